"""Which optimizers can be updated in parts, and which of their states travel."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tba_offload.states.away import AwayMaster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    Wrap = Callable[[torch.Tensor], torch.Tensor]

_FUSED = frozenset(
    (
        "apex.optimizers.fused_adam.FusedAdam",
        "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    )
)
"""Optimizers of other packages that update each parameter by itself."""

_ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        *("adam.Adam", "adamw.AdamW", "sgd.SGD", "rmsprop.RMSprop", "adagrad.Adagrad", "adadelta.Adadelta"),
        *("adamax.Adamax", "nadam.NAdam", "radam.RAdam", "asgd.ASGD", "rprop.Rprop"),
    )
)
"""Optimizers that treat each element of a parameter by itself."""

_EXACT = frozenset((torch.float32, torch.float64))
"""Data types in which vectors of a kernel and the scalar loop for its last elements give the same bits. In 16
bits they do not: on a CPU 15 of 300,000 elements differed after six updates by RMSprop in bfloat16."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, each once, in the order in which ``state_dict`` counts them."""
    return list(dict.fromkeys(each for group in optimizer.param_groups for each in group["params"]))


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is known to update each parameter by itself, as PyTorch's do but LBFGS."""
    return is_of_torch(optimizer) or _name_of(optimizer) in _FUSED


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for PyTorch's own optimizers."""
    return _name_of(optimizer).startswith("torch.optim.")


def can_be_cut(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return True if a parameter has slices that are views, and updates of them give the same bits."""
    return (
        _name_of(optimizer) in _ELEMENTWISE
        and type(parameter.data) in (torch.Tensor, AwayMaster)
        and parameter.dtype in _EXACT
        and parameter.is_contiguous()
        and (parameter.grad is None or parameter.grad.layout == torch.strided)
    )


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


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
