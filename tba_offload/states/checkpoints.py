"""``state_dict`` gives plain tensors and ``load_state_dict`` takes them, a sub-group at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayTensor
from tba_offload.states.incoming import Incoming
from tba_offload.states.pieces import parameters_of
from tba_offload.states.shards import is_distributed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    StateDict = dict[str, Any]
    OnHost = Callable[[set[torch.Tensor]], dict[torch.Tensor, dict[str, torch.Tensor]]]


class Checkpoints:
    """Hooks on the checkpoints of one optimizer.

    Args:
        optimizer: The optimizer.
        on_host: Copies states of parameters to host memory.
        follow: Called before a checkpoint is made: states that an interrupted load left are taken first.
        loaded: Called when a checkpoint was loaded: ``optimizer.state`` shows it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        on_host: OnHost,
        follow: Callable[[], object],
        loaded: Callable[[], object],
    ) -> None:
        self._on_host = on_host
        self._follow = follow
        self._loaded = loaded
        self._handles: list[RemovableHandle] = [
            optimizer.register_state_dict_pre_hook(self._before_save),
            optimizer.register_state_dict_post_hook(self._fill, prepend=True),
            optimizer.register_load_state_dict_pre_hook(_hold_back),
            optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _before_save(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002 - as torch calls it
        self._follow()

    def _fill(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        """Return a state dict in which each state is a tensor in host memory."""
        entries = state_dict["state"]
        parameters = parameters_of(optimizer)
        away = {number for number, entry in entries.items() if _has(entry, AwayTensor)}
        found = self._on_host({parameters[number] for number in away})
        full = {
            number: entry | found[parameters[number]] if number in away else entry
            for number, entry in entries.items()
        }
        return state_dict | {"state": full}

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002 - as torch calls it
        self._loaded()


def _hold_back(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Get a state dict whose states come to the device one sub-group after the other, when all is checked."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    known = dict(zip(dict.fromkeys(numbers), parameters_of(optimizer), strict=False))
    full = {
        number: _held_back(entry, known[number]) if number in known else entry
        for number, entry in state_dict["state"].items()
    }
    return state_dict | {"state": full}


def _held_back(entry: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {
        key: Incoming(value, _wanted(value, parameter))
        if (type(value) is torch.Tensor or is_distributed(value)) and value.numel() > 1
        else value
        for key, value in entry.items()
    }


def _wanted(value: torch.Tensor, parameter: torch.Tensor) -> torch.dtype:
    """Return the data type in which PyTorch loads a state, as it does in ``Optimizer.load_state_dict``."""
    return parameter.dtype if parameter.is_floating_point() else value.dtype


def _has(entry: Any, kind: type) -> bool:
    return isinstance(entry, dict) and any(type(value) is kind for value in entry.values())
