"""The optimizer's own update code, run over some of its parameters at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.formatting import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

Entry = dict[str, Any]
"""The states of one parameter by their names, as in ``optimizer.state[parameter]``."""

_APART = ("param_groups", "state")


class OwnStep:
    """Runs the update of an optimizer on a twin of it that has only some parameters and their states.

    The twin starts with the attributes that the optimizer has, each time: a count of steps that an optimizer
    keeps in itself or in a parameter group goes up by one in a step, however many twins there are, also where
    the group has it in a tensor. The optimizer itself is changed once, by :meth:`commit`.

    Args:
        optimizer: The optimizer.
        kind: Its class.

    Attributes:
        kind: As given.
        states: What the last run has left.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        self._optimizer = optimizer
        self.kind = kind
        self._update = _beneath_hooks(kind)
        self._changes: dict[int, dict[str, Any]] = {}  # of the settings of each parameter group
        self._attributes: dict[str, Any] = {}
        self.states: dict[torch.Tensor, Entry] = {}

    @property
    def ran_for(self) -> set[int]:
        """The numbers of the parameter groups that were updated since :meth:`commit`."""
        return set(self._changes)

    def run(self, number: int, entries: Mapping[torch.Tensor, Entry], options: Mapping[str, Any]) -> None:
        """Updates some parameters of one parameter group; ``states`` holds their states afterwards.

        After an error it holds what there is of them. What the update changes in the parameter group must not
        depend on which of its parameters were updated.

        Args:
            number: The number of the parameter group.
            entries: Parameters, or views of slices, and their states; an empty entry where there are none.
            options: Further arguments of the optimizer's ``step``.

        Raises:
            UnsupportedError: It does, or the update has states of all parameters together.
        """
        twin: Any = object.__new__(self.kind)
        settings = _with_own_tensors(self._settings(number, entries))
        group = {**settings, "params": list(entries)}
        states: defaultdict[torch.Tensor, Entry] = defaultdict(dict)
        states.update({tensor: entry for tensor, entry in entries.items() if entry})
        vars(twin).update({**self._own_attributes(), "param_groups": [group], "state": states})
        self.states, self._attributes = states, vars(twin)
        earlier = self._changes.get(number)
        try:
            self._update(twin, **options)
        finally:
            self._changes[number] = _changes(settings, group)
        self.states = twin.state
        self._check(number, entries, self._changes[number] if earlier is None else earlier)

    def _check(self, number: int, entries: Mapping[torch.Tensor, Entry], earlier: Mapping[str, Any]) -> None:
        """Checks that parameters are updated each by itself, as far as what an update has left tells.

        Raises:
            UnsupportedError: They are not.
        """
        now, before = self._changes[number], self._optimizer.param_groups[number]
        of_all = [
            key
            for key in {**earlier, **now}
            if not _are_same(now.get(key, before.get(key)), earlier.get(key, before.get(key)))
        ]
        shared = [key for key in self.states if key not in entries]
        if of_all or shared:
            what = f"{of_all[0]} in its parameter group" if of_all else f"state[{quoted(shared[0])}]"
            raise UnsupportedError(
                f"{self.kind.__name__} does not update each parameter by itself, since it makes {what} of "
                "several of them, and would update wrongly in parts; do not offload its states"
            )

    def _settings(
        self,
        number: int,
        entries: Mapping[torch.Tensor, Entry],  # noqa: ARG002 - a choice may depend on them
    ) -> dict[str, Any]:
        """What the twin's parameter group says."""
        return self._optimizer.param_groups[number]

    def _own_attributes(self) -> dict[str, Any]:
        """The attributes that the twin starts with."""
        return vars(self._optimizer)

    def commit(self) -> None:
        """Gives the optimizer what its update changed in itself and in its parameter groups."""
        for number, changes in self._changes.items():
            settings = self._optimizer.param_groups[number]
            for key, value in changes.items():
                if isinstance(value, _Written):
                    settings[key].detach().copy_(value.tensor)  # others may hold it, as schedulers do
                else:
                    settings[key] = value
        changed = {name: value for name, value in self._attributes.items() if name not in _APART}
        vars(self._optimizer).update(changed)
        self.discard()

    def discard(self) -> None:
        """Forgets what the update changed there."""
        self._changes, self._attributes, self.states = {}, {}, {}


def _beneath_hooks(kind: type[torch.optim.Optimizer]) -> Any:
    """The update of a class without the wrapper that calls the user's hooks: they are called once a step."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class _Written(NamedTuple):
    """What a tensor among the settings becomes that an update has changed in place."""

    tensor: torch.Tensor


def _with_own_tensors(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with copies of their tensors: one that counts steps in place is changed once a step."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in settings.items()
    }


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group that an update has changed, in place or for others."""
    changes: dict[str, Any] = {}
    for key, value in after.items():
        if key != "params" and value is not before.get(key):
            changes[key] = value
        elif isinstance(value, torch.Tensor) and value._version:
            changes[key] = _Written(value)
    return changes


def _are_same(one: object, other: object) -> bool:
    """Whether two settings are the same, as far as they are numbers."""
    one = one.tensor if isinstance(one, _Written) else one
    other = other.tensor if isinstance(other, _Written) else other
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return True
