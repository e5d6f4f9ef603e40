"""Pieces: what one update gets as a parameter, and which optimizers and parameters can be cut into slices."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tba_offload.states.away import AwayMaster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    Wrap = Callable[[torch.Tensor], torch.Tensor]

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
"""Optimizers that treat each element of a parameter by itself, and draw no random numbers."""

_FUSED = frozenset(
    (
        "apex.optimizers.fused_adam.FusedAdam",
        "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    )
)
"""Optimizers of other packages that update each parameter by itself."""

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
        """Return its part of the parameter's gradient; ``None`` if there is none."""
        gradient = self.parameter.grad
        return gradient if gradient is None or self.is_whole else self.part_of(gradient)

    def own(self, value: Any) -> torch.Tensor:
        """Return its part of the parameter, or of a tensor like that, on this rank and without a gradient."""
        plain: torch.Tensor = local(value.detach())
        return plain if self.is_whole else self.part_of(plain)

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the slice of a tensor of the parameter's shape, 1-D; a copy if that is not contiguous."""
        return value.reshape(-1)[self.start : self.stop]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, each once, in the order in which ``state_dict`` counts them."""
    return list(dict.fromkeys(each for group in optimizer.param_groups for each in group["params"]))


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is known to update each parameter by itself, as PyTorch's do but LBFGS."""
    return is_of_torch(optimizer) or _name_of(optimizer) in _FUSED


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for PyTorch's own optimizers."""
    return _name_of(optimizer).startswith("torch.optim.")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer treats each element of a parameter by itself, so that slices are exact."""
    return _name_of(optimizer) in _SLICED


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def can_be_cut(parameter: torch.Tensor) -> bool:
    """Return True if slices of a parameter are views of it, and updates of them give the bits of the whole.

    A sparse gradient has no slices.
    """
    return (
        type(parameter.data) in (torch.Tensor, AwayMaster)
        and parameter.layout == torch.strided
        and parameter.is_contiguous()
        and parameter.dtype in _EXACT
        and (parameter.grad is None or parameter.grad.layout == torch.strided)
    )


def pieces_of(parameter: torch.Tensor, most: int) -> Iterator[Piece]:
    """Yield a parameter that can be cut as pieces of at most ``most`` bytes, or of ``SLICE`` elements."""
    count = parameter.numel()
    step = max(most // parameter.element_size() // SLICE, 1) * SLICE
    starts = range(0, max(count - 1, 1), step)  # the last has two elements at least: one of one stays
    for start in starts:
        yield Piece(parameter, start, count if start == starts[-1] else start + step)


_Part = TypeVar("_Part")


def gathered(
    parts: Iterable[_Part], most: int, nbytes_of: Callable[[_Part], int]
) -> Iterator[tuple[_Part, ...]]:
    """Yield parts in groups of at most ``most`` bytes; a larger one is a group of its own."""
    together: list[_Part] = []
    nbytes = 0
    for part in parts:
        if together and nbytes + nbytes_of(part) > most:
            yield tuple(together)
            together, nbytes = [], 0
        together.append(part)
        nbytes += nbytes_of(part)
    if together:
        yield tuple(together)


def travels(value: object, parameter: torch.Tensor) -> bool:
    """Return True if a state can be away: a dense tensor, or shard, of several elements with own memory.

    What is something else (a number, a step count, a tensor of a subclass, a view of memory that other
    tensors share) stays where the optimizer put it.
    """
    value = local(value)
    return (
        type(value) is torch.Tensor
        and value.numel() > 1
        and value.layout == torch.strided
        and value.device == parameter.device
        and value.untyped_storage().nbytes() == value.nbytes
        and is_dense(value)
        and not (value.is_conj() or value.is_neg())
    )


def is_dense(value: torch.Tensor) -> bool:
    """Return True if the elements fill a range of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# ---- distributed tensors: what travels is the part that lies on this rank ------------------------------


def is_distributed(value: object) -> bool:
    """Return True for a ``DTensor``; none is before PyTorch's module of them was imported."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if ``fully_shard`` has spread all parameters of a model.

    FSDP2 calls the hooks of a parameter when its gradient is reduced over the ranks, and so final.
    """
    module: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        module is not None
        and all(map(is_distributed, parameters))
        and any(isinstance(each, module.FSDPModule) for root in modules for each in root.modules())
    )


def local(value: Any) -> Any:
    """Return the part of a distributed tensor that lies on this rank; anything else is itself."""
    if not is_distributed(value):
        return value
    with torch.no_grad():  # where gradients are recorded this would be a node of the graph
        return value.to_local()


def wrap_of(value: Any) -> Wrap | None:
    """Return a function that makes a distributed tensor of other local bytes; ``None`` for a plain value."""
    if not is_distributed(value):
        return None
    return partial(
        type(value).from_local,
        device_mesh=value.device_mesh,
        placements=value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def in_place_of(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what is made of the part on this rank, as a distributed tensor if the value is one."""
    if not is_distributed(value):
        return make(value)
    return type(value)(make(local(value)), value._spec, requires_grad=False)  # type: ignore[no-any-return]
