"""Megatron's optimizers: which ``torch`` optimizers are inside, and how their states get into checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.states.away import AwayTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.config.options import StatesConfig
    from tba_offload.states import OptimizerStates

_KINDS = frozenset(("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer"))
"""Classes of Megatron whose states are known to be in ``optimizer.optimizer.state`` and nowhere else."""


def children_of(optimizer: Any, config: StatesConfig) -> list[Any]:
    """The optimizers of Megatron that update something on this rank.

    Raises:
        UnsupportedError: One of them keeps its states in a way of its own; or the configuration asks for
            updates in backward.
    """
    if config.when == "backward":
        raise UnsupportedError(
            "states.when: backward cannot be had under Megatron, which reduces gradients after backward and "
            "updates copies of parameters; set it to step"
        )
    children = [
        each for each in getattr(optimizer, "chained_optimizers", [optimizer]) if _has_parameters(each)
    ]
    for child in children:
        if type(child).__name__ not in _KINDS:
            raise UnsupportedError(
                f"optimizer states of Megatron's {type(child).__name__} cannot be offloaded; remove "
                "--tba-optimizer-states, and states from the policy"
            )
    return children


def _has_parameters(child: Any) -> bool:
    inner = getattr(child, "optimizer", None)  # None for a rank that has nothing of a group of experts
    return inner is not None and any(group["params"] for group in inner.param_groups)


def keep_checkpoints(child: Any, states: OptimizerStates) -> None:
    """Has a distributed optimizer read and set states in its checkpoints where they are.

    All formats of its checkpoints go through two of its methods, parameter by parameter. What it reads are
    copies in host memory, so that a checkpoint may be written while training goes on.

    Args:
        child: An optimizer of Megatron.
        states: The states of the optimizer inside.
    """
    if hasattr(child, "_get_main_param_and_optimizer_states"):
        _CheckpointsOf(child, states)


class _CheckpointsOf:
    """Stands in for the two methods, on one object."""

    def __init__(self, child: Any, states: OptimizerStates) -> None:
        self._child = child
        self._states = states
        self._set_plain = child._set_main_param_and_optimizer_states
        vars(child)["_get_main_param_and_optimizer_states"] = self._get
        vars(child)["_set_main_param_and_optimizer_states"] = self._set

    def _main(self, model_param: torch.Tensor) -> torch.Tensor:
        child = self._child
        group, order = child.model_param_group_index_map[model_param]
        main: torch.Tensor = child.optimizer.param_groups[group]["params"][order]
        return main

    def _get(self, model_param: torch.Tensor) -> dict[str, Any]:
        main = self._main(model_param)
        return {"param": main, **self._states.read(main)}

    def _set(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        """Lets Megatron copy into new memory, and has that taken away."""
        main = self._main(model_param)
        entry = self._child.optimizer.state[main]
        for key, value in list(_away(entry)):
            entry[key] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        self._set_plain(model_param, tensors)
        self._states.take(main)


def _away(entry: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, value) for key, value in entry.items() if isinstance(value, AwayTensor))
