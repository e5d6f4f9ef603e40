"""How an optimizer's ``step`` comes here: the optimizer gets a class that derives from its own."""

from __future__ import annotations

import copyreg
import functools
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[..., Any]

_taken: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {}

_STEP, _ZERO_GRAD = "_tba_offload_step", "_tba_offload_zero_grad"
"""Attributes of an optimizer that hold what its methods call, so that this lives as long as it."""


class Takeover:
    """Has ``optimizer.step`` call another function, beneath the hooks of users.

    It stays the same object, of its class by ``isinstance``, with a ``step`` that is a method: schedulers,
    ``GradScaler`` and hooks work as before.

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

    def begin(self, step: Step, zero_grad: Step | None = None) -> None:
        """From now on ``optimizer.step(closure, **options)`` is ``step(closure, options)``.

        Args:
            step: The function.
            zero_grad: Called before gradients are cleared, with the arguments of that.
        """
        optimizer = self._optimizer
        vars(optimizer).pop("step", None)
        vars(optimizer)[_STEP] = step
        vars(optimizer)[_ZERO_GRAD] = zero_grad or _nothing
        optimizer.__class__ = _class_for(self.kind)

    def end(self) -> None:
        """Give the optimizer its own class and step back."""
        optimizer = self._optimizer
        vars(optimizer).pop(_STEP, None)
        vars(optimizer).pop(_ZERO_GRAD, None)
        optimizer.__class__ = self.kind
        if self._instance_step is not None:
            vars(optimizer)["step"] = self._instance_step


def is_taken(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's states are offloaded already."""
    return _STEP in vars(optimizer)


def _class_for(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if kind not in _taken:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        methods = {"step": _hooked(kind), "zero_grad": _clearing(kind), "__reduce_ex__": _reducing(kind)}
        _taken[kind] = type(kind.__name__, (kind,), names | methods)
    return _taken[kind]


def _hooked(kind: type[torch.optim.Optimizer]) -> Step:
    """Return the step of a class.

    Calls the user's hooks once, and what :meth:`Takeover.begin` was given between.
    """

    @functools.wraps(kind.step)
    def step(self: torch.optim.Optimizer, closure: Any = None, **options: Any) -> Any:
        vars(self)["_opt_called"] = True  # as a scheduler's own wrapper notes it
        return vars(self)[_STEP](closure, options)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # so that PyTorch does not wrap it again
    hooked._wrapped_by_lr_sched = True  # nor a scheduler
    made: Step = hooked
    return made


def _clearing(kind: type[torch.optim.Optimizer]) -> Step:
    """Return the ``zero_grad`` of a class, which calls what :meth:`Takeover.begin` was given first."""

    @functools.wraps(kind.zero_grad)
    def zero_grad(self: torch.optim.Optimizer, *arguments: Any, **options: Any) -> None:
        vars(self)[_ZERO_GRAD](*arguments, **options)
        kind.zero_grad(self, *arguments, **options)

    return zero_grad


def _reducing(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """How a class is copied and pickled: as itself, and without what :meth:`Takeover.begin` has set."""

    def reduce(self: torch.optim.Optimizer, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        taken = type(self)
        if isinstance(reduced, str) or taken not in reduced[1]:
            return reduced  # by a method of the class
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined] # typeshed does not have it
            make = object.__new__  # pickle would compare the classes
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name not in (_STEP, _ZERO_GRAD)}
        return make, tuple(kind if each is taken else each for each in arguments), *rest

    return reduce


def _nothing(*_: object, **__: object) -> None:
    """Gradients may go."""
