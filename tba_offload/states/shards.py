"""Distributed tensors: what travels is the part that lies on this rank."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    Wrap = Callable[[torch.Tensor], torch.Tensor]


def is_distributed(value: object) -> bool:
    """Whether a value is a ``DTensor``; none is before PyTorch's module of them was imported."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
    """Whether ``fully_shard`` has spread all parameters of a model.

    It calls the hooks of a parameter when its gradient is reduced over the ranks, so that it is final then.
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
    """Make a tensor with other local bytes of them; ``None`` for a value that is no distributed tensor."""
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
    """Return what is made of the part that lies on this rank, as a distributed tensor if the value is one."""
    if not is_distributed(value):
        return make(value)
    return type(value)(make(local(value)), value._spec, requires_grad=False)  # type: ignore[no-any-return]
