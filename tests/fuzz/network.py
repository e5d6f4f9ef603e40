"""The model of a program: an embedding, a head, and layers that take and give tensors in several ways."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .modules import MODULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from .choices import Layer, Program

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]

WORDS, CLASSES = 11, 5


class Mishap(Exception):  # noqa: N818 - no fault
    """What a program runs into, and catches."""


@dataclass
class Output:
    """What a layer puts out, in a class that PyTorch does not look into."""

    hidden: Tensor
    extra: Any = None


def bare(x: Tensor) -> Arguments:
    return (x,), {}


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = args[0]
    return found


def same(y: Any, *_: Any) -> Any:
    return y


def appended(y: Tensor, args: tuple[Any, ...]) -> None:
    args[0].append(y)


class Style(NamedTuple):
    """One way.

    Attributes:
        arguments: What the caller makes of a tensor.
        taken: What the layer takes from its arguments.
        given: What the layer makes of its result, of which it knows the arguments too.
        found: What the caller takes from that.
    """

    arguments: Callable[[Tensor], Arguments] = bare
    taken: Callable[[tuple[Any, ...], dict[str, Any]], Tensor] = first
    given: Callable[[Tensor, tuple[Any, ...]], Any] = same
    found: Callable[[Any, tuple[Any, ...]], Tensor] = same


STYLES = {
    "bare": Style(),
    "by name": Style(lambda x: ((), {"hidden": x, "mask": None}), lambda _, kwargs: kwargs["hidden"]),
    "nested": Style(lambda x: (({"states": [x, (x.detach() > 0,)]},), {}), lambda a, _: a[0]["states"][0]),
    "in an object": Style(lambda x: ((SimpleNamespace(x=x, flag=True),), {}), lambda args, _: args[0].x),
    "beside an unused one": Style(lambda x: ((x, x * 2), {}), first),
    "both bare and by name": Style(lambda x: ((x,), {"bias": x.mean()}), lambda a, k: a[0] + k["bias"]),
    "gives a dict": Style(given=lambda y, _: {"hidden": y, "mean": y.mean()}, found=lambda y, _: y["hidden"]),
    "gives a tuple": Style(given=lambda y, _: (y, None, (y.detach().sum(),)), found=lambda y, _: y[0]),
    "gives two that count": Style(given=lambda y, _: (y, y.sin()), found=lambda y, _: y[0] + y[1]),
    "gives an object": Style(given=lambda y, _: Output(y, y.mean()), found=lambda y, _: y.hidden),
    "gives a view": Style(given=lambda y, _: y.transpose(0, 1), found=lambda y, _: y.transpose(0, 1)),
    "puts it into a list": Style(
        lambda x: (([x],), {}), lambda args, _: args[0][-1], appended, lambda _, args: args[0][-1]
    ),
}


class Block(nn.Module):
    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__()
        self.body = MODULES[layer.kind](width)
        self.style, self.inside, self.residual = layer.style, layer.inside, layer.residual
        self.body.requires_grad_(not layer.frozen) if layer.frozen else None
        self.fails = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        style = STYLES[self.style]
        x = style.taken(args, kwargs)
        y = self.run(x)
        if self.fails:
            raise Mishap
        return style.given(x + y if self.residual else y, args)

    def run(self, x: Tensor) -> Tensor:
        if self.inside == "body twice":
            return self.body(self.body(x))
        if self.inside == "own hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda packed: packed[0]):
                return self.body(x)
        if self.inside != "nothing":
            found: Tensor = checkpoint(self.body, x, use_reentrant=self.inside == "reentrant checkpoint")
            return found
        return self.body(x)


class Network(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        width = program.width
        takes_words = program.embedding != "linear"
        self.embed = (
            nn.Embedding(WORDS, width, sparse=program.embedding == "sparse embedding")
            if takes_words
            else nn.Linear(width, width)
        )
        self.layers = nn.ModuleList(Block(layer, width) for layer in program.layers)
        classes = (WORDS if takes_words else width) if program.tied else CLASSES
        self.head = nn.Linear(width, classes)
        if program.tied:
            self.head.weight = self.embed.weight

    def forward(self, given: Tensor) -> Tensor:
        x = begun = self.embed(given)
        for layer in self.order():
            x = self.call(layer, x)
        if self.program.skip:
            x = x + begun
        return self.head(x.to(self.head.weight.dtype))

    def order(self) -> list[nn.Module]:
        layers = list(self.layers)
        again = {"nothing": [], "first layer": layers[:1], "all layers": layers}[self.program.again]
        return layers + again

    def call(self, layer: Block, x: Tensor) -> Tensor:
        style = STYLES[layer.style]

        def through(x: Tensor) -> Tensor:
            args, kwargs = style.arguments(x)
            return style.found(layer(*args, **kwargs), args)

        if self.program.around == "nothing":
            return through(x)
        found: Tensor = checkpoint(through, x, use_reentrant=self.program.around == "reentrant checkpoint")
        return found


def make(program: Program) -> Network:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(program.seed)
        return Network(program).to(getattr(torch, program.dtype))


def batch(program: Program, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * program.seed + number)
    length = program.length + (number % 3 if program.other_lengths else 0)
    shape = (program.batch, length)
    targets = torch.randint(CLASSES, shape, generator=generator)
    if program.embedding != "linear":
        return torch.randint(WORDS, shape, generator=generator), targets
    made = torch.randn(*shape, program.width, generator=generator)
    return made.to(getattr(torch, program.dtype)), targets


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())
