"""The optimizer's own update code, run over some of its parameters, and how its ``step`` comes here."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch

from tba_offload.errors import StatesAwayError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tba_offload.states.groups import Entry

    Step = Callable[..., Any]
    Kind = type[torch.optim.Optimizer]

_APART = ("params", "param_groups", "state")


class Twin:
    """Runs the update of an optimizer on a twin of it that has only some parameters and their states.

    The twin starts with the attributes that the optimizer has, each time: a count of steps that an optimizer
    keeps in itself or in a parameter group goes up by one in a step, however many twins there are. The
    optimizer itself is changed once, by :meth:`commit`.

    Args:
        optimizer: The optimizer.
        kind: Its class.
        settings: Makes those of the twin, and its attributes, of those of the optimizer.

    Attributes:
        kind: As given.
        states: What the last run has left.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: Kind, settings: Callable[[Entry], Entry] = dict
    ) -> None:
        self._optimizer = optimizer
        self.kind = kind
        self._made_of = settings
        step: Any = kind.step  # without the wrapper that calls the user's hooks, which come once a step
        self._update: Step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._loans: dict[int | None, _Loan] = {}  # those of parameter groups by number, attributes by None
        self.states: dict[torch.Tensor, Entry] = {}

    def run(self, number: int, entries: Mapping[torch.Tensor, Entry], options: Mapping[str, Any]) -> None:
        """Update some parameters of one parameter group; ``states`` holds their states afterwards.

        After an error they hold what there is of them.

        Args:
            number: The number of the parameter group.
            entries: Parameters and their states; an empty entry where there are none.
            options: Further arguments of the optimizer's ``step``.
        """
        twin: Any = object.__new__(self.kind)
        group = _Loan(self._made_of(self._optimizer.param_groups[number]) | {"params": list(entries)}, {})
        states: defaultdict[Any, Any] = defaultdict(dict)
        states.update({tensor: entry for tensor, entry in entries.items() if entry})
        attributes = self._made_of(vars(self._optimizer)) | {"param_groups": [group.taken], "state": states}
        self.states, self._loans[number], self._loans[None] = states, group, _Loan(attributes, vars(twin))
        try:
            self._update(twin, **options)
        finally:
            group.taken["params"] = []  # or views of them would live on
        self.states = twin.state

    def check_rest(self) -> None:
        """Check that nothing is in ``states`` when those of parameters were taken out.

        Raises:
            UnsupportedError: The update keeps states that belong to no parameter.
        """
        if self.states:
            raise UnsupportedError(
                f"{self.kind.__name__} keeps {next(iter(self.states))!r} for all parameters at once. Load a "
                "checkpoint, and do not offload its states"
            )

    def commit(self) -> None:
        """Give the optimizer what its update changed in itself and in its parameter groups."""
        for number, loan in self._loans.items():
            loan.give_back(vars(self._optimizer) if number is None else self._optimizer.param_groups[number])
        self.discard()

    def discard(self) -> None:
        """Forget what the update changed there."""
        self._loans, self.states = {}, {}


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
        with torch.inference_mode(mode=False):  # whose tensors do not tell that they are changed
            self._given = {
                name: value.detach().clone() if _is_number(value) else value for name, value in values.items()
            }
        self.taken = taken
        taken.update(self._given)

    def give_back(self, own: dict[str, Any]) -> None:
        """Change the optimizer's own values where the twin has; others may have been changed meanwhile."""
        for name, value in self.taken.items():
            if value is not self._given.get(name, _APART):
                if name not in _APART:
                    own[name] = value
            elif _is_number(value) and value._version:
                own[name].copy_(value)  # others may hold it, as schedulers do


def _is_number(value: object) -> TypeGuard[torch.Tensor]:
    return type(value) is torch.Tensor and value.numel() == 1


# ---- the optimizer's step --------------------------------------------------------------------------

_taken: dict[Kind, Kind] = {}

_STEP, _CLEARING = "_tba_offload_step", "_tba_offload_clearing"
"""Attributes of an optimizer that hold what its methods call, so that this lives as long as it."""


class Takeover:
    """Has ``optimizer.step`` call another function, beneath the hooks of users.

    The optimizer stays the same object, of its class by ``isinstance``, with a ``step`` that is a method:
    schedulers, ``GradScaler`` and hooks work as before.

    Args:
        optimizer: The optimizer.

    Raises:
        UnsupportedError: Its ``step`` was replaced by something that is not known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind = type(optimizer)
        self._optimizer = optimizer
        self._instance_step = vars(optimizer).get("step")
        if self._instance_step is not None and not hasattr(self._instance_step, "_wrapped_by_lr_sched"):
            raise UnsupportedError(
                f"the step of this {self.kind.__name__} was replaced by {self._instance_step!r}; offload its "
                "states first, and replace it afterwards"
            )

    def begin(self, step: Step, clearing: Step) -> None:
        """Have ``optimizer.step(closure, **options)`` call ``step(closure, options)`` from now on.

        Args:
            step: The function.
            clearing: Called before gradients are cleared.
        """
        vars(self._optimizer).pop("step", None)
        vars(self._optimizer).update({_STEP: step, _CLEARING: clearing})
        self._optimizer.__class__ = _class_for(self.kind)

    def end(self) -> None:
        """Give the optimizer its own class and step back."""
        for name in (_STEP, _CLEARING):
            vars(self._optimizer).pop(name, None)
        self._optimizer.__class__ = self.kind
        if self._instance_step is not None:
            vars(self._optimizer)["step"] = self._instance_step


def is_taken(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer's states are offloaded already."""
    return _STEP in vars(optimizer)


def _class_for(kind: Kind) -> Kind:
    if kind not in _taken:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        methods = {"step": _hooked(kind), "zero_grad": _clearing(kind), "__reduce_ex__": _refuse_copy}
        _taken[kind] = type(kind.__name__, (kind,), names | methods)
    return _taken[kind]


def _hooked(kind: Kind) -> Step:
    """Return a step that calls the user's hooks once, and what :meth:`Takeover.begin` was given between."""

    @functools.wraps(kind.step)
    def step(self: torch.optim.Optimizer, closure: Any = None, **options: Any) -> Any:
        vars(self)["_opt_called"] = True  # as a scheduler's own wrapper notes it
        return vars(self)[_STEP](closure, options)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # so that PyTorch does not wrap it again
    hooked._wrapped_by_lr_sched = True  # nor a scheduler
    made: Step = hooked
    return made


def _clearing(kind: Kind) -> Step:
    """Return a ``zero_grad`` that calls what :meth:`Takeover.begin` was given first."""

    @functools.wraps(kind.zero_grad)
    def zero_grad(self: torch.optim.Optimizer, *arguments: Any, **options: Any) -> None:
        vars(self)[_CLEARING]()
        kind.zero_grad(self, *arguments, **options)

    return zero_grad


def _refuse_copy(self: torch.optim.Optimizer, _: object) -> NoReturn:
    raise StatesAwayError(
        f"the states of this {type(self).__name__} are not in memory between updates, and it was copied or "
        "pickled; use optimizer.state_dict(), or close the OptimizerStates first"
    )
