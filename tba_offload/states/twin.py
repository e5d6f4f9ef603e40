"""Updates of selected parameters by the optimizer's own code, and the replacement of ``optimizer.step``."""

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
    """Runner of the optimizer's own update on selected parameters and their states.

    Each run creates a twin, which is a new object of the optimizer's class. The twin gets the attributes and
    settings of the optimizer. Only :meth:`commit` changes the optimizer, so a step count in the optimizer
    increases by one per step, for any number of twins.

    Args:
        optimizer: The optimizer.
        kind: Class of the optimizer.
        settings: Function that converts settings and attributes of the optimizer for a twin.

    Attributes:
        kind: The class of the optimizer.
        states: The states after the last run.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: Kind, settings: Callable[[Entry], Entry] = dict
    ) -> None:
        self._optimizer = optimizer
        self.kind = kind
        self._made_of = settings
        step: Any = kind.step  # without the wrapper that calls the user's hooks: hooks run once per step
        self._update: Step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._loans: dict[int | None, _Loan] = {}  # keys: index of the parameter group; None for attributes
        self.states: dict[torch.Tensor, Entry] = {}

    def run(self, number: int, entries: Mapping[torch.Tensor, Entry], options: Mapping[str, Any]) -> None:
        """Update some parameters of one parameter group.

        After the update, or after an error, :attr:`states` holds the states of these parameters.

        Args:
            number: Index of the parameter group.
            entries: Parameters and their states. A parameter without states has an empty entry.
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
            group.taken["params"] = []  # otherwise views of the parameters would stay alive
        self.states = twin.state

    def check_rest(self) -> None:
        """Check that :attr:`states` is empty after the caller has removed the states of all parameters.

        Raises:
            UnsupportedError: The optimizer has a state that does not belong to a parameter.
        """
        if self.states:
            why = f"{self.kind.__name__} has a state {next(iter(self.states))!r} that all parameters share"
            raise UnsupportedError(f"{why}. Load a checkpoint, and do not offload states of this optimizer")

    def commit(self) -> None:
        """Copy the changes of the twins' attributes and settings to the optimizer."""
        for number, loan in self._loans.items():
            loan.give_back(vars(self._optimizer) if number is None else self._optimizer.param_groups[number])
        self.discard()

    def discard(self) -> None:
        """Discard the changes of the twins' attributes and settings, and the states after the last run."""
        self._loans, self.states = {}, {}


class _Loan:
    """Attributes or settings of the optimizer for a twin, whose changes can be copied back.

    A tensor of one element is copied, because an update may change the tensor in place.
    """

    def __init__(self, values: Mapping[str, Any], taken: dict[str, Any]) -> None:
        with torch.inference_mode(mode=False):  # inference tensors have no version
            self._given = {
                name: value.detach().clone() if _is_number(value) else value for name, value in values.items()
            }
        self.taken = taken
        taken.update(self._given)

    def give_back(self, own: dict[str, Any]) -> None:
        """Copy the values that the twin has changed to the optimizer.

        Values that the twin has not changed are not copied, because other code may have changed these values.
        """
        for name, value in self.taken.items():
            if value is not self._given.get(name, _APART):
                if name not in _APART:
                    own[name] = value
            elif _is_number(value) and value._version:
                own[name].copy_(value)  # other code may hold this tensor, as schedulers do


def _is_number(value: object) -> TypeGuard[torch.Tensor]:
    return type(value) is torch.Tensor and value.numel() == 1


# ---- the optimizer's step --------------------------------------------------------------------------

_taken: dict[Kind, Kind] = {}

_STEP = "_tba_offload_step"
"""Name of the optimizer attribute with the function that ``step`` calls."""


class Takeover:
    """Replacement of ``optimizer.step`` by another function. The user's step hooks still run.

    The optimizer stays the same object and an instance of its class, and ``step`` stays a method. Schedulers,
    ``GradScaler`` and hooks therefore work as before.

    Args:
        optimizer: The optimizer.

    Raises:
        UnsupportedError: The ``step`` of the optimizer was replaced by an unknown function.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind = type(optimizer)
        self._optimizer = optimizer
        self._instance_step = vars(optimizer).get("step")
        if self._instance_step is not None and not hasattr(self._instance_step, "_wrapped_by_lr_sched"):
            why = f"the method step of this {self.kind.__name__} was replaced by {self._instance_step!r}"
            raise UnsupportedError(f"{why}. Offload the states first, and replace step afterwards")

    def begin(self, step: Step) -> None:
        """Make ``optimizer.step(closure, **options)`` call ``step(closure, options)`` from now on.

        Args:
            step: The function to call.
        """
        vars(self._optimizer).pop("step", None)
        vars(self._optimizer)[_STEP] = step
        self._optimizer.__class__ = _class_for(self.kind)

    def end(self) -> None:
        """Restore the optimizer's class and step."""
        vars(self._optimizer).pop(_STEP, None)
        self._optimizer.__class__ = self.kind
        if self._instance_step is not None:
            vars(self._optimizer)["step"] = self._instance_step


def is_taken(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the states of the optimizer are already offloaded."""
    return _STEP in vars(optimizer)


def _class_for(kind: Kind) -> Kind:
    if kind not in _taken:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        methods = {"step": _hooked(kind), "__reduce_ex__": _refuse_copy}
        _taken[kind] = type(kind.__name__, (kind,), names | methods)
    return _taken[kind]


def _hooked(kind: Kind) -> Step:
    @functools.wraps(kind.step)
    def step(self: torch.optim.Optimizer, closure: Any = None, **options: Any) -> Any:
        vars(self)["_opt_called"] = True  # the wrapper of a scheduler does the same
        return vars(self)[_STEP](closure, options)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # PyTorch then does not wrap this function again
    hooked._wrapped_by_lr_sched = True  # schedulers then do not wrap this function either
    made: Step = hooked
    return made


def _refuse_copy(self: torch.optim.Optimizer, _: object) -> NoReturn:
    why = f"this {type(self).__name__} cannot be copied or pickled, because its states are offloaded"
    raise StatesAwayError(f"{why}. Use optimizer.state_dict(), or close the OptimizerStates first")
