"""Which optimizers can be updated in parts, in backward and by the processor, and which states travel."""

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


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer itself, out of wrappers such as that of Accelerate."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def check(
    optimizer: torch.optim.Optimizer, config: StatesConfig, modules: Sequence[nn.Module], *, has_masters: bool
) -> None:
    """Check that an optimizer can be updated in parts, when and where the configuration says.

    Args:
        optimizer: The optimizer.
        config: What the user wanted.
        modules: The model that it trains, or its chunks.
        has_masters: Whether its parameters are copies of those of the model.

    Raises:
        UnsupportedError: It cannot.
    """
    _check_parts(optimizer, trusted=config.trust)
    if config.update != "device" and device_of_parameters(optimizer).torch_device.type != "cpu":
        _check_host(optimizer, config.update)
    if config.when == "backward":
        _check_backward(optimizer, modules, has_masters=has_masters)


def _check_parts(optimizer: torch.optim.Optimizer, *, trusted: bool) -> None:
    """Check that an optimizer can be updated in parts.

    Raises:
        UnsupportedError: It cannot, or is not known and not trusted to.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(f"{name} is no torch.optim.Optimizer; give the optimizers that it has")
    if is_taken(optimizer):
        raise UnsupportedError(f"the states of this {name} are offloaded already; close those first")
    if (attribute := _attribute_with_optimizers(optimizer)) is not None:
        raise UnsupportedError(
            f"{name} has other optimizers make its updates; give what is in its attribute {attribute} instead"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS updates all parameters as one vector, so that nothing can be away")
    if not (trusted or is_known(optimizer)):
        raise UnsupportedError(
            f"whether {name} updates each parameter by itself is not known; if it computes nothing over all "
            "of them, set states.trust to true"
        )
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        raise UnsupportedError(f"{name} keeps states for all parameters at once; do not offload them")
    if _goes_by_position(optimizer):
        raise UnsupportedError(
            f"{name} has settings for some parameters by their position, which is another one in a part; "
            "give these parameters a group or an optimizer of their own"
        )
    for group in optimizer.param_groups:
        _check_group(name, group, of_adafactor=isinstance(optimizer, torch.optim.Adafactor))


def _check_group(name: str, group: dict[str, Any], *, of_adafactor: bool) -> None:
    if len(set(group["params"])) < len(group["params"]):
        raise UnsupportedError(f"a parameter stands twice in one group of this {name}; give it once")
    # PyTorch's Adafactor gives all parameters of a group an eps that depends on the first one.
    if of_adafactor and group["eps"][0] is None and len({each.dtype for each in group["params"]}) > 1:
        raise UnsupportedError(
            "Adafactor with parameters of several data types in one group cannot be updated in parts; "
            "give each data type a group of its own, or set eps"
        )
    for setting in ("capturable", "differentiable"):
        if group.get(setting):
            raise UnsupportedError(f"{name} with {setting}=True cannot be updated in parts; set it to False")


def _goes_by_position(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of bitsandbytes has settings by numbers of groups and parameters.

    Its manager is one for the process. Those of a module become such in the first step.
    """
    manager = getattr(optimizer, "mng", None)
    return any(getattr(manager, name, None) for name in ("index2config", "module_weight_config_triple"))


def _attribute_with_optimizers(optimizer: torch.optim.Optimizer) -> str | None:
    """Where an optimizer has others of its parameters, as ZeroRedundancyOptimizer; ``None`` if nowhere."""
    own = set(parameters_of(optimizer))
    for attribute, value in vars(optimizer).items():
        for other in tree_leaves(value, lambda each: isinstance(each, torch.optim.Optimizer)):
            if isinstance(other, torch.optim.Optimizer) and not own.isdisjoint(parameters_of(other)):
                return attribute
    return None


def _check_backward(
    optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module], *, has_masters: bool
) -> None:
    """Check that an optimizer can be updated in backward.

    Raises:
        UnsupportedError: It cannot.
    """
    name, parameters = type(optimizer).__name__, parameters_of(optimizer)
    come_late = has_peers() and not is_fully_sharded(modules, parameters)
    # By FSDP2's CPUOffloadPolicy: there is a device, and parameters are not on it.
    on_host = any(is_distributed(each) and each.device.type == "cpu" for each in parameters)
    are_copied = on_host and torch.accelerator.is_available()
    refusals = {
        "masters get their gradients after backward": has_masters,
        "with several processes gradients are final only when they are reduced": come_late,
        "FSDP2 may tell of gradients that it copies to host memory before they are there": are_copied,
        f"whether {name} can be updated in any order is not known": not is_known(optimizer),
    }
    for why, holds in refusals.items():
        if holds:
            raise UnsupportedError(f"{why}; set states.when to step")


def _check_host(optimizer: torch.optim.Optimizer, update: str) -> None:
    """Check that the processor can update sub-groups of an optimizer.

    Raises:
        UnsupportedError: It cannot.
    """
    name, are_spread = type(optimizer).__name__, any(map(is_distributed, parameters_of(optimizer)))
    may_drift = update == "auto" and has_peers()
    refusals = {
        f"whether {name} updates parameters in host memory is not known": not is_of_torch(optimizer),
        "distributed parameters, as fully_shard makes them, are updated on the device only": are_spread,
        "with several processes each would choose for itself what its processor updates": may_drift,
    }
    for why, holds in refusals.items():
        if holds:
            raise UnsupportedError(f"{why}; set states.update to device")


def device_of_parameters(optimizer: torch.optim.Optimizer) -> Device:
    """Return the device of the parameters.

    Raises:
        UnsupportedError: They lie on several.
    """
    devices = {each.device for each in parameters_of(optimizer)}
    if len(devices) != 1:
        raise UnsupportedError(f"the parameters lie on {len(devices)} devices; use an optimizer for each")
    return device_of(devices.pop())


# ---- of optimizers and their parameters ------------------------------------------------------------


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


def gathered(parts: Iterable[_Part], most: int, nbytes_of: Callable[[_Part], int]) -> list[list[_Part]]:
    """Return parts in groups of at most ``most`` bytes; a larger one is a group of its own."""
    groups: list[list[_Part]] = []
    room = 0
    for part in parts:
        room -= nbytes_of(part)
        if room < 0 or not groups:
            groups.append([])
            room = most - nbytes_of(part)
        groups[-1].append(part)
    return groups


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


def spec_of(value: Any) -> Any:
    """Return how a distributed tensor is spread; ``None`` for anything else."""
    return value._spec if is_distributed(value) else None


def distributed(value: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the distributed tensor whose part on this rank a tensor is; without ``spec`` that is itself."""
    if spec is None:
        return value
    module: Any = sys.modules["torch.distributed.tensor"]
    return module.DTensor(value, spec, requires_grad=False)  # type: ignore[no-any-return]
