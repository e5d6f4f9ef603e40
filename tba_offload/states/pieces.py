"""Which parameters are updated together: pieces, and the sub-groups that travel as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tba_offload.states.away import AwayMaster
from tba_offload.states.shards import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SLICE = 1024
"""Elements: a parameter is cut at multiples of it, so that no kernel meets another alignment or remainder.

Without it the last elements of each part could go through a kernel's scalar loop, and others through its
vectors.
"""

_SLICED = frozenset(
    f"torch.optim.{module}"
    for module in (
        *("adam.Adam", "adamw.AdamW", "sgd.SGD", "rmsprop.RMSprop", "adagrad.Adagrad", "adadelta.Adadelta"),
        *("adamax.Adamax", "nadam.NAdam", "radam.RAdam", "asgd.ASGD", "rprop.Rprop"),
    )
)
"""Optimizers that treat each element of a parameter by itself."""

_EXACT = frozenset((torch.float32, torch.float64))
"""Data types in which the vectors of a kernel and the scalar loop for its last elements give the same bits.

In 16 bits they do not, on a CPU with several threads: of 300,000 elements 15 differed after six updates by
RMSprop in bfloat16, 6 in float16, where none did in 32 and 64 bits, with 19 settings of 11 optimizers.
"""


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """What an update gets as one parameter.

    Attributes:
        parameter: The parameter.
        start: First element, in the order of its memory.
        stop: One past the last.
    """

    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.stop - self.start == self.parameter.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of its part of the parameter, on this rank."""
        if self.is_whole:
            return local(self.parameter).nbytes  # type: ignore[no-any-return]
        return (self.stop - self.start) * self.parameter.element_size()

    def tensor(self) -> torch.Tensor:
        """Return the parameter itself, or a view of the slice that has a view of its gradient."""
        if self.is_whole:
            return self.parameter
        view = self.part_of(self.parameter.detach())
        view.grad = self.gradient()
        return view

    def gradient(self) -> torch.Tensor | None:
        """Its part of the parameter's gradient; ``None`` if there is none."""
        gradient = self.parameter.grad
        return gradient if gradient is None or self.is_whole else self.part_of(gradient)

    def own(self, value: Any) -> torch.Tensor:
        """Its part of the parameter or of a tensor like that, on this rank and without a gradient."""
        plain: torch.Tensor = local(value.detach())
        return plain if self.is_whole else self.part_of(plain)

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the slice of a tensor of the parameter's shape, 1-D.

        A copy where that one is not contiguous.
        """
        return value.reshape(-1)[self.start : self.stop]


_FUSED = frozenset(
    (
        "apex.optimizers.fused_adam.FusedAdam",
        "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    )
)
"""Optimizers of other packages that update each parameter by itself."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, each once, in the order in which ``state_dict`` counts them."""
    return list(dict.fromkeys(each for group in optimizer.param_groups for each in group["params"]))


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update each parameter by itself: PyTorch's do, but for LBFGS."""
    return is_of_torch(optimizer) or _name_of(optimizer) in _FUSED


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of PyTorch's own."""
    return _name_of(optimizer).startswith("torch.optim.")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer treats each element of a parameter by itself, and draws no random numbers."""
    return _name_of(optimizer) in _SLICED


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def can_be_cut(parameter: torch.Tensor) -> bool:
    """Whether slices of a parameter are views of it, and an update of them gives the bits of the whole.

    A sparse gradient has no slices.
    """
    return (
        type(parameter.data) in (torch.Tensor, AwayMaster)
        and parameter.layout == torch.strided
        and parameter.is_contiguous()
        and parameter.dtype in _EXACT
        and (parameter.grad is None or parameter.grad.layout == torch.strided)
    )


def pieces_of(parameter: torch.Tensor, most: int, *, sliced: bool) -> Iterator[Piece]:
    """Yield a parameter as pieces.

    Args:
        parameter: The parameter.
        most: Bytes of a piece at most; one of an element at least.
        sliced: Whether it may be cut.
    """
    count = parameter.numel()
    step = max(most // parameter.element_size() // SLICE, 1) * SLICE
    if not sliced or count <= step or not can_be_cut(parameter):
        yield Piece(parameter, 0, count)
        return
    starts = range(0, count - 1, step)  # the last has two elements at least: a state of one never travels
    for start in starts:
        yield Piece(parameter, start, count if start == starts[-1] else start + step)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Part = TypeVar("_Part", bound=_Sized)


def gathered(parts: Iterable[_Part], most: int) -> Iterator[tuple[_Part, ...]]:
    """Pieces or tensors in groups of at most ``most`` bytes; a larger one is a group of its own."""
    together: list[_Part] = []
    nbytes = 0
    for part in parts:
        if together and nbytes + part.nbytes > most:
            yield tuple(together)
            together, nbytes = [], 0
        together.append(part)
        nbytes += part.nbytes
    if together:
        yield tuple(together)
