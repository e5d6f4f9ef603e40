"""Checks whether an optimizer can update one sub-group at a time, also in backward and on the CPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tba_offload.device import device_of, has_peers
from tba_offload.errors import UnsupportedError
from tba_offload.states.away import AwayMaster
from tba_offload.states.twin import is_taken
from tba_offload.torch_private import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from tba_offload.config import StatesConfig
    from tba_offload.device import Device

_FUSED = {
    "apex.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
}
"""Optimizers of other packages that update each parameter independently."""

_ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        *("adam.Adam", "adamw.AdamW", "sgd.SGD", "rmsprop.RMSprop", "adagrad.Adagrad", "adadelta.Adadelta"),
        *("adamax.Adamax", "nadam.NAdam", "radam.RAdam", "asgd.ASGD", "rprop.Rprop"),
    )
)
"""Optimizers that update each element of a parameter independently."""

_EXACT = frozenset((torch.float32, torch.float64))
"""Data types for which vectorized and scalar code give the same bits.

For bfloat16, 15 of 300,000 elements differed on a CPU after six updates by RMSprop.
"""


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the innermost optimizer of a wrapper, such as Accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def check(
    optimizer: torch.optim.Optimizer, config: StatesConfig, modules: Sequence[nn.Module], *, has_masters: bool
) -> None:
    """Check that an optimizer supports updates of sub-groups with the given configuration.

    Args:
        optimizer: The optimizer.
        config: The user's configuration.
        modules: The model that the optimizer trains, or its chunks.
        has_masters: Whether the parameters of the optimizer are master copies of model parameters.

    Raises:
        UnsupportedError: The optimizer does not support the configured updates.
    """
    _check_parts(optimizer, trusted=config.trust)
    if config.update != "device" and device_of_parameters(optimizer).torch_device.type != "cpu":
        _check_host(optimizer, config.update)
    if config.when == "backward":
        _check_backward(optimizer, modules, has_masters=has_masters)


def _check_parts(optimizer: torch.optim.Optimizer, *, trusted: bool) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(f"{name} is not a torch.optim.Optimizer. Pass the optimizers inside {name}")
    if is_taken(optimizer):
        raise UnsupportedError(f"the states of this {name} are already offloaded. Close its OptimizerStates")
    if (attribute := _attribute_with_optimizers(optimizer)) is not None:
        why = f"{name} is a wrapper: the optimizers in its attribute {attribute!r} make the updates"
        raise UnsupportedError(f"{why}. Pass the inner optimizers instead")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS updates all parameters as one vector. Use another optimizer")
    if not (trusted or is_known(optimizer)):
        why = f"tba-offload does not know whether {name} updates each parameter independently"
        raise UnsupportedError(f"{why}. If the updates are independent, set states.trust to true")
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        raise UnsupportedError(f"{name} has states that all parameters share. Do not offload its states")
    if _goes_by_position(optimizer):
        why = f"states of {name} cannot be offloaded: GlobalOptimManager has overrides for some parameters"
        raise UnsupportedError(f"{why}. Remove the overrides, and give these parameters another optimizer")
    for group in optimizer.param_groups:
        _check_group(name, group, of_adafactor=isinstance(optimizer, torch.optim.Adafactor))


def _check_group(name: str, group: dict[str, Any], *, of_adafactor: bool) -> None:
    if len(set(group["params"])) < len(group["params"]):
        raise UnsupportedError(f"a parameter group of this {name} has a parameter twice. Remove one")
    # In PyTorch's Adafactor, the eps of a whole group depends on the dtype of its first parameter.
    if of_adafactor and group["eps"][0] is None and len({each.dtype for each in group["params"]}) > 1:
        why = "a parameter group of this Adafactor has several data types, which need different values of eps"
        raise UnsupportedError(f"{why}. Create one group for each data type, or set eps")
    for setting in ("capturable", "differentiable"):
        if group.get(setting):
            raise UnsupportedError(f"states of {name} cannot be offloaded with {setting}=True. Use False")


def _goes_by_position(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer of bitsandbytes has settings for single parameters.

    bitsandbytes identifies a parameter by its index in the parameter group, which differs in a sub-group.
    """
    manager = getattr(optimizer, "mng", None)
    return any(getattr(manager, name, None) for name in ("index2config", "module_weight_config_triple"))


def _attribute_with_optimizers(optimizer: torch.optim.Optimizer) -> str | None:
    own = set(parameters_of(optimizer))
    for attribute, value in vars(optimizer).items():
        for other in tree_leaves(value, lambda each: isinstance(each, torch.optim.Optimizer)):
            if isinstance(other, torch.optim.Optimizer) and not own.isdisjoint(parameters_of(other)):
                return attribute
    return None


def _check_backward(
    optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module], *, has_masters: bool
) -> None:
    name, parameters = type(optimizer).__name__, parameters_of(optimizer)
    come_late = has_peers() and not is_fully_sharded(modules, parameters)
    # With FSDP2's CPUOffloadPolicy, parameters are on the CPU although an accelerator exists.
    on_host = any(is_distributed(each) and each.device.type == "cpu" for each in parameters)
    are_copied = on_host and torch.accelerator.is_available()
    refusals = {
        "the optimizer updates master copies, which get their gradients after backward": has_masters,
        "several processes train, and gradients are final only after their reduction": come_late,
        "FSDP2's CPUOffloadPolicy may mark a gradient as ready before its copy to the host ends": are_copied,
        f"the result of {name} may depend on the order of updates": not is_known(optimizer),
    }
    for why, holds in refusals.items():
        if holds:
            raise UnsupportedError(f"states.when 'backward' is not possible: {why}. Use 'step'")


def _check_host(optimizer: torch.optim.Optimizer, update: str) -> None:
    name, are_spread = type(optimizer).__name__, any(map(is_distributed, parameters_of(optimizer)))
    may_drift = update == "auto" and has_peers()
    refusals = {
        f"only optimizers of torch.optim can run on the CPU, not {name}": not is_of_torch(optimizer),
        "the CPU cannot update distributed parameters, for example parameters of fully_shard": are_spread,
        "several processes train, and each process would choose different sub-groups for its CPU": may_drift,
    }
    for why, holds in refusals.items():
        if holds:
            raise UnsupportedError(f"states.update {update!r} is not possible: {why}. Use 'device'")


def device_of_parameters(optimizer: torch.optim.Optimizer) -> Device:
    """Return the device of an optimizer's parameters.

    Raises:
        UnsupportedError: The parameters are on several devices.
    """
    devices = {each.device for each in parameters_of(optimizer)}
    if len(devices) != 1:
        raise UnsupportedError(f"the optimizer uses {len(devices)} devices. Use one optimizer per device")
    return device_of(devices.pop())


# ---- properties of optimizers and parameters -------------------------------------------------------


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer without repetition, in the order of ``state_dict``."""
    return list(dict.fromkeys(each for group in optimizer.param_groups for each in group["params"]))


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for optimizers that are known to update each parameter independently."""
    return is_of_torch(optimizer) or _name_of(optimizer) in _FUSED


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for PyTorch's own optimizers."""
    return _name_of(optimizer).startswith("torch.optim.")


def can_be_cut(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return True if updates of slices of a parameter give the same bits as updates of the whole."""
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


def gathered(parts: Iterable[_Part], most: int, nbytes_of: Callable[[_Part], int]) -> list[list[_Part]]:
    """Return ``parts`` in groups of at most ``most`` bytes. A larger part forms its own group."""
    groups: list[list[_Part]] = []
    room = 0
    for part in parts:
        room -= nbytes_of(part)
        if room < 0 or not groups:
            groups.append([])
            room = most - nbytes_of(part)
        groups[-1].append(part)
    return groups


def is_offloadable(value: object, parameter: torch.Tensor) -> bool:
    """Return True if a state is a dense tensor or shard with its own storage and more than one element.

    Other values stay in ``optimizer.state``, such as step counts, tensor subclasses and views.
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
    """Return True if the elements fill a contiguous range of memory, in any order of dimensions."""
    return torch.empty_like(value, device="meta").stride() == value.stride()


# ---- distributed tensors: only the local part is offloaded -----------------------------------------


def is_distributed(value: object) -> bool:
    """Return True for a ``DTensor``, without an import of ``torch.distributed.tensor``."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if ``fully_shard`` has sharded all parameters of a model.

    FSDP2 calls the hooks of a parameter after its gradient is reduced over the ranks.
    """
    module: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        module is not None
        and all(map(is_distributed, parameters))
        and any(isinstance(each, module.FSDPModule) for root in modules for each in root.modules())
    )


def local(value: Any) -> Any:
    """Return the local part of a distributed tensor. Return any other value unchanged."""
    if not is_distributed(value):
        return value
    with torch.no_grad():  # with gradients enabled, this call would add a graph node
        return value.to_local()


def spec_of(value: Any) -> Any:
    """Return the spec of a distributed tensor; ``None`` for any other value."""
    return value._spec if is_distributed(value) else None


def distributed(value: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the distributed tensor with ``value`` as its local part.

    If ``spec`` is ``None``, return ``value``.
    """
    if spec is None:
        return value
    module: Any = sys.modules["torch.distributed.tensor"]
    return module.DTensor(value, spec, requires_grad=False)  # type: ignore[no-any-return]
