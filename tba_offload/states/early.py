"""Updates in backward: a sub-group is updated as soon as the gradients of all its parameters are there.

Gradients are final in the last backward pass before the optimizer's step. Which one that is, the steps before
tell; a step that has fewer passes is updated as a whole in ``step``. Until ``step`` comes nothing of it is
final: what then differs from what was used (gradients that were clipped, another learning rate), and a step
that never comes (``zero_grad``, the next forward), have all of it taken back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.errors import SessionError
from tba_offload.recompute.digest import Digest
from tba_offload.states.away import FreedGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from tba_offload.states.roster import Roster
    from tba_offload.states.stream import Stream
    from tba_offload.states.subgroup import SubGroup

_REMEMBERED_STEPS = 8
"""Steps whose passes are remembered: the last step of an epoch may have fewer."""

_RECENT = 20
_VAIN = 2
"""Of so many recent steps at most so many may have been updated in vain; with more, the update waits for
``step``. One that is in vain costs another reading of states and parameters."""


class Early:
    """Sees gradients come, and has sub-groups updated.

    Args:
        optimizer: The optimizer.
        stream: Updates sub-groups.
        roster: Which there are.
        modules: The model or its chunks: before their forward parameters are those of the last whole update.
        frees: Whether gradients are freed that were used.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stream: Stream,
        roster: Roster,
        modules: Sequence[nn.Module],
        *,
        frees: bool,
    ) -> None:
        self._optimizer = optimizer
        self._stream = stream
        self._roster = roster
        self._frees = frees
        self._passes = 0
        self._pass = -1
        self._passes_of_steps: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        self._vain: deque[bool] = deque(maxlen=_RECENT)
        self._waiting: dict[SubGroup, set[torch.Tensor]] = {}
        self._groups: dict[torch.Tensor, list[SubGroup]] = {}
        self._used: dict[torch.Tensor, _Used] = {}
        self._settings: dict[int, dict[str, Any]] = {}
        self._is_pending = False
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._handles: list[RemovableHandle] = [
            optimizer.register_load_state_dict_pre_hook(_Hook(self, "_is_loaded"))
        ]
        module: Any  # whose methods for hooks on checkpoints have no types
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(_Hook(self, "_forward_begins")),
                module.register_state_dict_pre_hook(_Hook(self, "_is_saved")),
                module.register_load_state_dict_pre_hook(_Hook(self, "_is_loaded")),
            ]

    def follow(self) -> None:
        """Watches the parameters that the optimizer has now."""
        parameters = {each for group in self._optimizer.param_groups for each in group["params"]}
        for parameter in self._hooks.keys() - parameters:
            self._hooks.pop(parameter).remove()
        for parameter in parameters - self._hooks.keys():
            if parameter.is_leaf and parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[parameter] = register(_Hook(self, "_accumulated"))

    def close(self) -> None:
        """Takes all hooks off."""
        for handle in (*self._handles, *self._hooks.values()):
            handle.remove()
        self._hooks.clear()

    # ---- backward --------------------------------------------------------------------------------

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """A gradient is in its place."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            self._begin_pass()
        self._stream.prefetch()
        for group in self._groups.get(parameter, ()):
            waiting = self._waiting[group]
            waiting.discard(parameter)
            if not waiting:
                self._is_ready(group)

    def _begin_pass(self) -> None:
        self.take_back("another backward pass")
        self._passes += 1
        self._groups.clear()
        self._waiting.clear()
        if self._passes != max(self._passes_of_steps, default=0):
            return
        self._stream.follow()
        for group in self._roster.groups:
            self._waiting[group] = {piece.parameter for piece in group.pieces}
            for parameter in self._waiting[group]:
                self._groups.setdefault(parameter, []).append(group)

    def _is_ready(self, group: SubGroup) -> None:
        """The gradients of a sub-group are final."""
        parameters = {piece.parameter for piece in group.pieces}
        if not all(_is_plain(parameter.grad) for parameter in parameters):
            return
        rests = sum(self._vain) > _VAIN
        if not rests:
            self._is_pending = True
            self._settings.setdefault(group.number, _settings_of(self._optimizer, group.number))
            try:
                self._stream.update_in_backward(group)
            except BaseException:
                self._forget()
                raise
        for parameter in parameters:
            self._groups[parameter].remove(group)
            self._note(parameter)
            if self._frees and not rests and not self._groups[parameter]:
                self._free(parameter)

    def _note(self, parameter: torch.Tensor) -> None:
        """Notes what a parameter and its gradient are like now."""
        used = self._used.get(parameter)
        if used is None:
            used = _Used.of(parameter.grad, is_compared=not self._frees)
        self._used[parameter] = used._replace(version=parameter._version)

    def _free(self, parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        parameter.grad = FreedGradient(
            gradient.shape,
            gradient.stride(),
            gradient.dtype,
            gradient.device,
            f"the gradient of {self._roster.name_of(parameter)}",
        )

    # ---- what comes of it ------------------------------------------------------------------------

    def step_begins(self, options: Mapping[str, Any]) -> None:
        """The optimizer's step has begun: what was updated with something else is taken back.

        Raises:
            SessionError: Parameters were changed since; or what has changed cannot be used again, since
                gradients are freed.
        """
        changed = self._changed(options)
        if self._used and changed is None:
            self._vain.append(False)
        passes, self._passes = self._passes, 0
        self._passes_of_steps.append(passes)
        if changed is not None:
            self.take_back(changed)
        self._forget()

    def _changed(self, options: Mapping[str, Any]) -> str | None:
        """What an update in backward did not know of."""
        if self._is_pending:
            moved = [each for each, used in self._used.items() if used.version != each._version]
            if moved:
                self._stream.take_back()
                self._forget()
                raise SessionError(
                    f"{self._roster.name_of(moved[0])} was changed between backward and step(), after its "
                    "update; change it after step(), or set states.when to step"
                )
        if any(options.values()) or _is_scaled(self._optimizer):
            return "arguments of step()"
        if self._roster.outdated():
            return "parameters of the optimizer"
        for number, settings in self._settings.items():
            if not _are_same(settings, _settings_of(self._optimizer, number)):
                return "settings of the optimizer"
        if not self._frees and not all(used.is_same(each.grad) for each, used in self._used.items()):
            return "gradients"
        return None

    def zero_grad(self, *, set_to_none: bool) -> None:
        """The gradients go, and with them what was done with them."""
        if not set_to_none and self._frees:
            raise SessionError(
                "zero_grad(set_to_none=False) would keep gradients that states.gradients: free has freed"
            )
        self._passes = 0
        self._take_back()

    def take_back(self, reason: str) -> None:
        """Takes back what a step that has not come would have made final; that one is made as a whole then.

        Args:
            reason: What came instead.

        Raises:
            SessionError: Gradients are freed, so that the step cannot be made any more.
        """
        was_pending = self._is_pending
        self._take_back()
        if was_pending and self._frees:
            raise SessionError(
                f"{reason} came after gradients were used in backward and freed, so that they cannot be used "
                "again; call optimizer.zero_grad() and repeat the step, or set states.gradients to keep"
            )

    def _take_back(self) -> None:
        if self._used:
            self._vain.append(True)
        if self._is_pending:
            self._stream.take_back()
        self._forget()

    def _forward_begins(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
            self.take_back("another forward")

    def _is_loaded(self, *_: object) -> None:
        self._take_back()

    def _is_saved(self, *_: object) -> None:
        self.take_back("a checkpoint of the model")

    def _forget(self) -> None:
        self._is_pending = False
        self._used.clear()
        self._settings.clear()
        self._groups.clear()
        self._waiting.clear()


class _Used(NamedTuple):
    """What an update was made with.

    Attributes:
        gradient: The gradient.
        gradient_version: Its version.
        digest: Tells whether another one has the same bits; ``None`` if it is freed.
        version: The version of the parameter after the update.
    """

    gradient: weakref.ref[torch.Tensor]
    gradient_version: int
    digest: Digest | None
    version: int

    @classmethod
    def of(cls, gradient: Any, *, is_compared: bool) -> _Used:
        """What there is to know of a gradient before it is used."""
        digest = Digest.of(gradient) if is_compared else None
        return cls(weakref.ref(gradient), gradient._version, digest, -1)

    def is_same(self, now: torch.Tensor | None) -> bool:
        """Whether a gradient has the bits of the one that was used."""
        if self.digest is None:
            return True
        if not _is_plain(now) or now is None:
            return False
        if now is self.gradient() and now._version == self.gradient_version:
            return True
        return Digest.of(now).equals(self.digest)


class _Hook:
    """A hook that keeps nothing alive; copies and pickles of what it is on get one that does nothing."""

    def __init__(self, early: Early, method: str) -> None:
        self._early = weakref.ref(early)
        self._method = method

    def __call__(self, *arguments: object) -> None:
        early = self._early()
        if early is not None:
            getattr(early, self._method)(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _nothing(*_: object) -> None:
    """What a copy of a hook does."""


def _is_plain(gradient: torch.Tensor | None) -> bool:
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided


def _settings_of(optimizer: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    group = optimizer.param_groups[number]
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _are_same(settings: dict[str, Any], others: dict[str, Any]) -> bool:
    return settings.keys() == others.keys() and all(
        torch.equal(value, others[key])
        if isinstance(value, torch.Tensor) and isinstance(others[key], torch.Tensor)
        else value == others[key]
        for key, value in settings.items()
    )


def _is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient scaler has the update divide gradients, or leave them out."""
    return any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
