"""The model of a program: an embedding, layers, a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .containers import STYLES
from .modules import MODULES

if TYPE_CHECKING:
    from .choices import Layer, Program

WORDS, CLASSES = 11, 5


class Mishap(Exception):  # noqa: N818 - no fault
    """What a program runs into, and catches."""


class Block(nn.Module):
    """What is attached: a layer in its style, with what is around its body."""

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
    """The whole."""

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
    """Input and targets of a micro-batch."""
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
