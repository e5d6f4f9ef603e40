"""The optimizer's own update code, run over some of its parameters at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

Entry = dict[str, Any]
"""The states of one parameter by their names, as in ``optimizer.state[parameter]``."""

_APART = ("param_groups", "state")


class OwnStep:
    """Runs the update of an optimizer on a twin of it that has only some parameters and their states.

    The twin starts with the attributes that the optimizer has, each time: a count of steps that an optimizer
    keeps in itself or in a parameter group goes up by one in a step, however many twins there are. The
    optimizer itself is changed once, by :meth:`commit`.

    Args:
        optimizer: The optimizer.
        kind: Its class.

    Attributes:
        kind: As given.
        states: What the last run has left.
        changes_gradients: Whether a run has changed gradients in place, as SGD's ``foreach`` with Nesterov
            momentum does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        self._optimizer = optimizer
        self.kind = kind
        self._update = _beneath_hooks(kind)
        self._groups: dict[int, dict[str, Any]] = {}
        self._attributes: dict[str, Any] = {}
        self.states: dict[torch.Tensor, Entry] = {}
        self.changes_gradients = False

    @property
    def ran_for(self) -> set[int]:
        """The numbers of the parameter groups that were updated since :meth:`commit`."""
        return set(self._groups)

    def run(self, number: int, entries: Mapping[torch.Tensor, Entry], options: Mapping[str, Any]) -> None:
        """Updates some parameters of one parameter group; ``states`` holds their states afterwards.

        After an error it holds what there is of them.

        Args:
            number: The number of the parameter group.
            entries: Parameters, or views of slices, and their states; an empty entry where there are none.
            options: Further arguments of the optimizer's ``step``.
        """
        twin: Any = object.__new__(self.kind)
        group = {**self._settings(number, entries), "params": list(entries)}
        states: defaultdict[torch.Tensor, Entry] = defaultdict(dict)
        states.update({tensor: entry for tensor, entry in entries.items() if entry})
        vars(twin).update({**self._own_attributes(), "param_groups": [group], "state": states})
        self.states, self._groups[number], self._attributes = states, group, vars(twin)
        before = _versions_of_gradients(entries)
        self._update(twin, **options)
        self.states = twin.state
        self.changes_gradients |= _versions_of_gradients(entries) != before

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
        for number, group in self._groups.items():
            changed = {key: value for key, value in group.items() if key != "params"}
            self._optimizer.param_groups[number].update(changed)
        changed = {name: value for name, value in self._attributes.items() if name not in _APART}
        vars(self._optimizer).update(changed)
        self.discard()

    def discard(self) -> None:
        """Forgets what the update changed there."""
        self._groups, self._attributes, self.states = {}, {}, {}


def _versions_of_gradients(parameters: Iterable[torch.Tensor]) -> list[int]:
    gradients = (each.grad for each in parameters)
    return [each._version for each in gradients if each is not None and not each.is_inference()]


def _beneath_hooks(kind: type[torch.optim.Optimizer]) -> Any:
    """The update of a class without the wrapper that calls the user's hooks: they are called once a step."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
