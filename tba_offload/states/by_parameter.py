"""States read and set parameter by parameter, where those of a whole sub-group travel together."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayTensor, has_moved, is_away, memory_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.states.checkpoints import OnHost
    from tba_offload.states.masters import Masters


class ByParameter:
    """Gives and takes the states of one parameter after the other.

    Args:
        optimizer: The optimizer.
        on_host: Copies states of parameters to host memory, and those of others in their sub-groups.
        masters: The master copies among its parameters.
        follow: Takes the states that ``optimizer.state`` shows, and masters that are in memory.
        most: Bytes that are shown there at most, before they are taken.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        on_host: OnHost,
        masters: Masters,
        follow: Callable[[], object],
        most: int,
    ) -> None:
        self._optimizer = optimizer
        self._on_host = on_host
        self._masters = masters
        self._follow = follow
        self._most = most
        self._copies: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._shown = 0

    def read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the states of a parameter, and the master if it is one.

        Those that are away as host copies.
        """
        shown = self._optimizer.state.get(parameter, {})
        if any(has_moved(each, parameter, key) for key, each in shown.items()):
            self.forget()
            self._follow()
        entry = self._masters.with_states(parameter, self._optimizer.state.get(parameter, {}))
        if not any(map(is_away, entry.values())):
            return entry
        if parameter not in self._copies:  # others of its sub-group are likely to be asked for next
            self._copies = self._on_host({parameter})
        copies = self._copies.pop(parameter)
        return {key: copies.get(key, value) if is_away(value) else value for key, value in entry.items()}

    def take(self, parameter: torch.Tensor) -> None:
        """Take states that were put into ``optimizer.state[parameter]``, once there are enough of them.

        Likewise a master that was brought back.
        """
        self.forget()
        entry = self._masters.with_states(parameter, self._optimizer.state.get(parameter, {}))
        self._shown += sum(
            value.nbytes for value in entry.values() if isinstance(value, torch.Tensor) and not is_away(value)
        )
        if self._shown >= self._most:
            self._shown = 0
            self._follow()

    @contextmanager
    def setting(self, parameter: torch.Tensor, *, states: bool) -> Iterator[None]:
        """Within, what is away has memory, which is undefined; after an error it is away as before."""
        entry = self._optimizer.state.get(parameter, {}) if states else {}
        away = {key: value for key, value in entry.items() if isinstance(value, AwayTensor)}
        was_away = is_away(parameter)
        entry.update({key: memory_for(value) for key, value in away.items()})
        self._masters.bring_back(parameter)
        try:
            yield
        except BaseException:
            entry.update(away)
            if was_away:
                self._masters.send_away(parameter)
            raise
        self.take(parameter)

    def forget(self) -> None:
        """States are about to change: copies of them are of no use."""
        self._copies.clear()
