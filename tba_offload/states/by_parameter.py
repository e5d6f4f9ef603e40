"""States read and set parameter by parameter, where those of a whole sub-group travel together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tba_offload.states.away import AwayTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.states.checkpoints import OnHost


class ByParameter:
    """Gives and takes the states of one parameter after the other.

    Args:
        optimizer: The optimizer.
        on_host: Copies states of parameters to host memory, and those of others in their sub-groups.
        follow: Takes the states that ``optimizer.state`` shows.
        most: Bytes that are shown there at most, before they are taken.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        on_host: OnHost,
        follow: Callable[[], object],
        most: int,
    ) -> None:
        self._optimizer = optimizer
        self._on_host = on_host
        self._follow = follow
        self._most = most
        self._copies: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._shown = 0

    def read(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The states of a parameter, those that are away as copies in host memory."""
        entry: dict[str, Any] = self._optimizer.state.get(parameter, {})
        if not any(isinstance(value, AwayTensor) for value in entry.values()):
            return dict(entry)
        if parameter not in self._copies:  # others of its sub-group are likely to be asked for next
            self._copies = self._on_host({parameter})
        return entry | self._copies.pop(parameter)

    def take(self, parameter: torch.Tensor) -> None:
        """Takes states that were put into ``optimizer.state[parameter]``, once there are enough of them."""
        self.forget()
        self._shown += sum(
            value.nbytes
            for value in self._optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and not isinstance(value, AwayTensor)
        )
        if self._shown >= self._most:
            self._shown = 0
            self._follow()

    def forget(self) -> None:
        """States are about to change: copies of them are of no use."""
        self._copies.clear()
