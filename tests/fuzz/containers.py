"""How a layer is given its input, and how it gives its output: bare, by name, in containers and objects."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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
