"""The optimizer's own update code, run over some of its parameters at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.formatting import quoted
from tba_offload.states.pieces import is_known

if TYPE_CHECKING:
    from collections.abc import Mapping

Entry = dict[str, Any]
"""The states of one parameter by their names, as in ``optimizer.state[parameter]``."""

_APART = ("params", "param_groups", "state")

_OF_NO_GROUP = -1


class OwnStep:
    """Runs the update of an optimizer on a twin of it that has only some parameters and their states.

    The twin starts with the attributes that the optimizer has, each time: a count of steps that an optimizer
    keeps in itself, in a parameter group or in its state by a name goes up by one in a step, however many
    twins there are. The optimizer itself is changed once, by :meth:`commit`.

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
        self._is_known = is_known(optimizer)  # each parameter by itself, and no states but theirs
        self._named: dict[str, Any] = {}
        self._groups: dict[int, _Loan] = {}
        self._left: dict[int, dict[str, Any]] = {}
        self._attributes = _Loan({}, {})
        self.states: dict[torch.Tensor, Entry] = {}

    @property
    def ran_for(self) -> set[int]:
        """The numbers of the parameter groups that were updated since :meth:`commit`."""
        return set(self._groups)

    def run(self, number: int, entries: Mapping[torch.Tensor, Entry], options: Mapping[str, Any]) -> None:
        """Update some parameters of one parameter group; ``states`` holds their states afterwards.

        After an error it holds what there is of them. What the update leaves in the parameter group, and in
        states of no parameter, must not depend on which parameters of the group were updated.

        Args:
            number: The number of the parameter group.
            entries: Parameters, or views of slices, and their states; an empty entry where there are none.
            options: Further arguments of the optimizer's ``step``.

        Raises:
            UnsupportedError: It does.
        """
        if not (self._is_known or self._groups):  # once a step
            self._named = _named_in(self._optimizer.state)
        twin: Any = object.__new__(self.kind)
        group = _Loan(self._settings(number, entries) | {"params": list(entries)}, {})
        states: defaultdict[Any, Any] = defaultdict(dict, deepcopy(self._named))
        states.update({tensor: entry for tensor, entry in entries.items() if entry})
        own = self._own_attributes() | {"param_groups": [group.taken], "state": states}
        self.states, self._groups[number], self._attributes = states, group, _Loan(own, vars(twin))
        self._update(twin, **options)
        self.states = twin.state
        self._check(number)

    def _check(self, number: int) -> None:
        """Check that parameters are updated each by itself, as far as what updates have left tells."""
        if self._is_known:
            return
        left = {f"{key} in its parameter group": each for key, each in self._groups[number].changes().items()}
        named = {f"state[{quoted(key)}]": each for key, each in _named_in(self.states).items()}
        for group, now in ((number, left), (_OF_NO_GROUP, named)):
            first = self._left.setdefault(group, now)
            for name in () if first is now else {**first, **now}:
                if not _are_same(now.get(name), first.get(name)):
                    raise UnsupportedError(_of_all(self.kind.__name__, name))

    def _settings(
        self,
        number: int,
        entries: Mapping[torch.Tensor, Entry],  # noqa: ARG002 - a choice may depend on them
    ) -> dict[str, Any]:
        """Return what the twin's parameter group says."""
        return self._optimizer.param_groups[number]

    def _own_attributes(self) -> dict[str, Any]:
        """Return the attributes that the twin starts with."""
        return vars(self._optimizer)

    def commit(self) -> None:
        """Give the optimizer what its update changed in itself and in its parameter groups."""
        for number, group in self._groups.items():
            group.give_back(self._optimizer.param_groups[number])
        self._attributes.give_back(vars(self._optimizer))
        if not self._is_known:
            vars(self._optimizer)["state"].update(_named_in(self.states))  # typed as having parameters only
        self.discard()

    def discard(self) -> None:
        """Forget what the update changed there."""
        self._named, self._groups, self._left, self.states = {}, {}, {}, {}
        self._attributes = _Loan({}, {})


class _Loan:
    """Values of an optimizer that a twin takes: what it changes of them, the optimizer gets.

    A number in a tensor is copied, since an update may count in it, in place.

    Args:
        values: The values by their names.
        taken: Where the twin has them.

    Attributes:
        taken: As given.
    """

    def __init__(self, values: Mapping[str, Any], taken: dict[str, Any]) -> None:
        self._numbers = {name: value for name, value in values.items() if _is_number(value)}
        with torch.inference_mode(mode=False):  # whose tensors do not tell that they are changed
            copies = {name: each.detach().clone() for name, each in self._numbers.items()}
        self._given = {**values, **copies}
        self.taken = taken
        taken.update(self._given)

    def changes(self) -> dict[str, Any]:
        """Return what the twin has changed: other values, and numbers in tensors that it has written to."""
        return {
            name: value
            for name, value in self.taken.items()
            if name not in _APART and (not self._is_given(name) or (name in self._numbers and value._version))
        }

    def give_back(self, own: dict[str, Any]) -> None:
        """Change the optimizer's own values where the twin has; others may have been changed meanwhile."""
        for name, value in self.changes().items():
            if self._is_given(name):
                self._numbers[name].copy_(value)  # others may hold it, as schedulers do
            else:
                own[name] = value

    def _is_given(self, name: str) -> bool:
        return name in self._given and self.taken[name] is self._given[name]


def _of_all(optimizer: str, what: str) -> str:
    return (
        f"{optimizer} does not update each parameter by itself, since it makes {what} of several of them, "
        "and updates wrongly in parts; load a checkpoint, and do not offload its states"
    )


def _is_number(value: object) -> bool:
    return type(value) is torch.Tensor and value.numel() == 1


def _named_in(states: Mapping[Any, Any]) -> dict[str, Any]:
    """States that an optimizer keeps by a name: they are of no parameter."""
    return {key: value for key, value in states.items() if not isinstance(key, torch.Tensor)}


def _are_same(one: object, other: object) -> bool:
    """Whether two values are the same, as far as they are numbers, alone or in dictionaries."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_are_same(one.get(key), other.get(key)) for key in {**one, **other})
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return (one is None) is (other is None)


def _beneath_hooks(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the update of a class without the wrapper that calls the user's hooks.

    They are called once a step.
    """
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
