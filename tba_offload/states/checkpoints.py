"""States that are saved, loaded, read and set: plain tensors, a sub-group at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayMaster, AwayTensor, is_away, memory_for
from tba_offload.states.groups import Incoming
from tba_offload.states.parameters import is_distributed, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.hooks import RemovableHandle

    from tba_offload.states.optimizer import Updates

    StateDict = dict[str, Any]


class Checkpoints:
    """Hooks on the checkpoints of one optimizer, and states parameter by parameter.

    Args:
        updates: Those of the optimizer.
        loaded: Called when a checkpoint was loaded: ``optimizer.state`` shows it.
    """

    def __init__(self, updates: Updates, loaded: Callable[[], None]) -> None:
        self._updates = updates
        self._copies: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._set_bytes = 0
        optimizer = updates.optimizer
        self._handles: list[RemovableHandle] = [
            optimizer.register_state_dict_pre_hook(lambda _: updates.follow()),
            optimizer.register_state_dict_post_hook(self._fill, prepend=True),
            optimizer.register_load_state_dict_pre_hook(_hold_back),
            optimizer.register_load_state_dict_post_hook(lambda _: loaded(), prepend=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- all states ------------------------------------------------------------------------------

    def _fill(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        """Return a state dict in which each state is a tensor in host memory."""
        parameters, full = parameters_of(optimizer), dict(state_dict["state"])
        away = [
            number
            for number, entry in full.items()
            if isinstance(entry, dict) and any(type(value) is AwayTensor for value in entry.values())
        ]
        found = self._updates.entries.on_host({parameters[number] for number in away})
        full.update({number: full[number] | found[parameters[number]] for number in away})
        return state_dict | {"state": full}

    # ---- parameter by parameter --------------------------------------------------------------------

    def read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the states of a parameter, and the master if it is one; of what is away, copies on the host.

        Raises:
            TransferError: They cannot be read.
        """
        self._updates.entries.check_owner(parameter)
        entry = self._updates.groups.states_of(parameter)
        if not any(map(is_away, entry.values())):
            return entry
        if parameter not in self._copies:  # others of its sub-group are likely to be asked for next
            self._copies = self._updates.entries.on_host({parameter}, masters=True)
        copies = self._copies.pop(parameter)
        return {key: copies[key] if is_away(value) else value for key, value in entry.items()}

    @contextmanager
    def setting(self, parameter: torch.Tensor, *, states: bool) -> Iterator[None]:
        """Within, what is away has memory, which is undefined; after an error it is away as before."""
        entry = self._updates.optimizer.state.get(parameter, {}) if states else {}
        away = {key: value for key, value in entry.items() if isinstance(value, AwayTensor)}
        was_away = is_away(parameter)
        entry.update({key: memory_for(value) for key, value in away.items()})
        if was_away:
            AwayMaster.end(parameter)
        try:
            yield
        except BaseException:
            entry.update(away)
            if was_away:
                self._updates.groups.send_away(parameter)
            raise
        self.take(parameter)

    def take(self, parameter: torch.Tensor) -> None:
        """Take states that were put into ``optimizer.state[parameter]``, once there are enough of them.

        Likewise a master that was brought back.
        """
        self.forget()
        entry = self._updates.groups.states_of(parameter)
        tensors = [each for each in entry.values() if isinstance(each, torch.Tensor) and not is_away(each)]
        self._set_bytes += sum(each.nbytes for each in tensors)
        if self._set_bytes >= self._updates.groups.most:
            self._set_bytes = 0
            self._updates.follow()

    def forget(self) -> None:
        """Drop copies of states, which are about to change."""
        self._copies.clear()


def _hold_back(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Return a state dict whose states come to the device by sub-groups, when all of it is checked."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    known = dict(zip(dict.fromkeys(numbers), parameters_of(optimizer), strict=False))
    full = {
        number: {key: _held_back(value, known[number]) for key, value in entry.items()}
        if number in known and isinstance(entry, dict)
        else entry
        for number, entry in state_dict["state"].items()
    }
    return state_dict | {"state": full}


def _held_back(value: Any, parameter: torch.Tensor) -> Any:
    if not (type(value) is torch.Tensor or is_distributed(value)) or value.numel() <= 1:
        return value
    # The data type in which PyTorch itself loads a state, in Optimizer.load_state_dict.
    return Incoming(value, parameter.dtype if parameter.is_floating_point() else value.dtype)
