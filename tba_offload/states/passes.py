"""Which backward pass is the last before a step, and whose gradients are there in it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.states.subgroup import SubGroup

_REMEMBERED_STEPS = 8
"""Steps whose passes are remembered: the last step of an epoch may have fewer."""


class Passes:
    """Counts the backward passes of each step; the last has the number that the steps before have had."""

    def __init__(self) -> None:
        self._count = 0
        self._current = -1
        self._of_steps: deque[int] = deque(maxlen=_REMEMBERED_STEPS)

    @property
    def is_last(self) -> bool:
        """Whether no other pass is to be expected before the step; none that keeps its graph is the last."""
        is_next = self._count == max(self._of_steps, default=0)
        return is_next and not torch._C._autograd._get_current_graph_task_keep_graph()

    def has_begun(self) -> bool:
        """Whether the pass that runs is another one than the last time that this was asked."""
        current = torch._C._current_graph_task_id()
        has_begun, self._current = current != self._current, current
        self._count += has_begun
        return has_begun

    def step_ends(self) -> None:
        """Record that the step comes: its passes are counted."""
        self._of_steps.append(self._count)
        self._count = 0

    def start_again(self) -> None:
        """Record that the gradients of the passes so far are not used."""
        self._count = 0


class Waiting:
    """Sub-groups, and the parameters whose gradients are still to come."""

    def __init__(self) -> None:
        self._missing: dict[SubGroup, set[torch.Tensor]] = {}
        self._groups: dict[torch.Tensor, list[SubGroup]] = {}

    def begin(self, groups: Sequence[SubGroup]) -> None:
        """No gradient has come yet."""
        self.clear()
        for group in groups:
            self._missing[group] = {piece.parameter for piece in group.pieces}
            for parameter in self._missing[group]:
                self._groups.setdefault(parameter, []).append(group)

    def came(self, parameter: torch.Tensor) -> list[SubGroup]:
        """Record that the gradient of a parameter has come; return the sub-groups to update.

        Returns:
            The sub-groups that have all gradients now.
        """
        groups = self._groups.get(parameter, ())
        for group in groups:
            self._missing[group].discard(parameter)
        return [group for group in groups if not self._missing[group]]

    def is_done(self, group: SubGroup) -> set[torch.Tensor]:
        """Return a sub-group is updated.

        Returns:
            Those of its parameters of which no other sub-group has a slice that is to be updated yet.
        """
        parameters = {piece.parameter for piece in group.pieces}
        for parameter in parameters:
            self._groups[parameter].remove(group)
        return {parameter for parameter in parameters if not self._groups[parameter]}

    def clear(self) -> None:
        """Nothing is waited for."""
        self._missing.clear()
        self._groups.clear()
