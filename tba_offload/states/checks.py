"""Whether an optimizer can be updated in parts, in backward, and by the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from tba_offload.device.peers import has_peers
from tba_offload.errors import UnsupportedError
from tba_offload.states.parameters import (
    is_distributed,
    is_fully_sharded,
    is_known,
    is_of_torch,
    parameters_of,
)
from tba_offload.states.twin import is_taken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from tba_offload.config import StatesConfig


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
    if config.update != "device" and device_of_parameters(optimizer).type != "cpu":
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
        raise UnsupportedError(
            f"{name} is no torch.optim.Optimizer; give the optimizers that it has, one by one"
        )
    if is_taken(optimizer):
        raise UnsupportedError(f"the states of this {name} are offloaded already; close those first")
    if (attribute := _attribute_with_optimizers(optimizer)) is not None:
        raise UnsupportedError(
            f"{name} has other optimizers make its updates, which know nothing of parts of its parameters; "
            f"give what is in its attribute {attribute} instead"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS updates all parameters as one vector, so that nothing can be away")
    if not (trusted or is_known(optimizer)):
        raise UnsupportedError(
            f"whether {name} updates each parameter by itself is not known; if it computes nothing over all "
            "of them, set states.trust to true"
        )
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        raise UnsupportedError(
            f"{name} keeps states for all of its parameters at once, so it cannot be updated in parts. Do "
            "not offload its states"
        )
    if _goes_by_position(optimizer):
        raise UnsupportedError(
            f"{name} has settings for some parameters by their position, which is another one in a part; "
            "give these parameters a group or an optimizer of their own"
        )
    for group in optimizer.param_groups:
        _check_group(name, group, of_adafactor=isinstance(optimizer, torch.optim.Adafactor))


def _check_group(name: str, group: dict[str, Any], *, of_adafactor: bool) -> None:
    if len(set(group["params"])) < len(group["params"]):
        raise UnsupportedError(
            f"a parameter stands twice in one group of this {name}, so that a step would update it "
            "twice; give it once"
        )
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
    if has_masters:
        raise UnsupportedError("masters get their gradients after backward; set states.when to step")
    parameters = parameters_of(optimizer)
    if has_peers() and not is_fully_sharded(modules, parameters):
        raise UnsupportedError(
            "with several processes gradients are final only when they are reduced, which is after backward "
            "has made them, unless fully_shard spreads all parameters; set states.when to step"
        )
    if any(map(is_distributed, parameters)) and _lie_on_host(parameters):
        raise UnsupportedError(
            "FSDP2 may tell of gradients that it copies to host memory before they are there; set "
            "states.when to step"
        )
    if not is_known(optimizer):
        raise UnsupportedError(
            f"whether {type(optimizer).__name__} can be updated in any order is not known, and states.trust "
            "does not speak of that; set states.when to step"
        )


def _check_host(optimizer: torch.optim.Optimizer, update: str) -> None:
    """Check that the processor can update sub-groups of an optimizer.

    Raises:
        UnsupportedError: It cannot.
    """
    if not is_of_torch(optimizer):
        raise UnsupportedError(
            f"whether {type(optimizer).__name__} updates parameters in host memory is not known; set "
            "states.update to device"
        )
    if any(map(is_distributed, parameters_of(optimizer))):
        raise UnsupportedError(
            "distributed parameters, as fully_shard makes them, are updated on the device only; set "
            "states.update to device"
        )
    if update != "host" and has_peers():
        raise UnsupportedError(
            "with several processes each would choose for itself what its processor updates, and parameters "
            "that several of them hold would drift apart; set states.update to device, or to host"
        )


def _lie_on_host(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether parameters of a device are in host memory: there is one, and they are not on it."""
    on_host = any(parameter.device.type == "cpu" for parameter in parameters)
    return on_host and torch.accelerator.is_available()


def device_of_parameters(optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the device of the parameters.

    Raises:
        UnsupportedError: They lie on several.
    """
    devices = {each.device for each in parameters_of(optimizer)}
    if len(devices) != 1:
        raise UnsupportedError(
            f"the parameters of this {type(optimizer).__name__} lie on {len(devices)} devices; use an "
            "optimizer for each"
        )
    return devices.pop()
