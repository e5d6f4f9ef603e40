"""Updates in backward: a sub-group is updated as soon as the gradients of all its parameters are there.

Gradients are final in the last backward pass before the optimizer's step. Which one that is, the steps before
tell; a step that has fewer passes is updated as a whole in ``step``. Until ``step`` comes nothing of it is
final: if it would be made with something else than what was used, as gradients that were clipped, or if
something comes instead of it (``zero_grad``, another forward), all is taken back.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.errors import SessionError
from tba_offload.states.away import FreedGradient
from tba_offload.states.basis import Basis, are_finite, is_plain
from tba_offload.states.passes import Passes, Waiting
from tba_offload.states.pieces import parameters_of
from tba_offload.states.stream_order import StreamOrder
from tba_offload.states.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from tba_offload.device import Device
    from tba_offload.states.roster import Roster
    from tba_offload.states.stream import Stream
    from tba_offload.states.subgroup import SubGroup

_RECENT = 20
_VAIN = 2
"""If more than ``_VAIN`` of the ``_RECENT`` last steps were updated in vain, updates wait for ``step``. One
in vain costs another reading of states and parameters."""


class Early:
    """Sees gradients come, and has sub-groups updated.

    Args:
        optimizer: The optimizer.
        stream: Updates sub-groups.
        roster: Which there are.
        modules: The model or its chunks: before a forward of any part of them parameters are those
            of the last whole update.
        frees: Whether gradients are freed that were used.
        device: Where the optimizer updates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stream: Stream,
        roster: Roster,
        modules: Sequence[nn.Module],
        *,
        frees: bool,
        device: Device,
    ) -> None:
        self._optimizer = optimizer
        self._order = StreamOrder(device)
        self._stream = stream
        self._roster = roster
        self._frees = frees
        self._passes = Passes()
        self._waiting = Waiting()
        self._basis = Basis(optimizer)
        self._vain: deque[bool] = deque(maxlen=_RECENT)
        self._flags: list[torch.Tensor] = []
        self._watch = Watch(
            modules,
            optimizer,
            came=self._gradient_came,
            forward=self._forward_begins,
            saved=self._model_is_saved,
            loaded=self._undo,
        )

    def follow(self) -> None:
        """Watch the parameters that the optimizer has now; what is updated next comes after what was."""
        with self._order:
            self._watch.follow(parameters_of(self._optimizer))

    def close(self) -> None:
        """Take all hooks off."""
        self._watch.close()

    # ---- backward --------------------------------------------------------------------------------

    def _gradient_came(self, parameter: torch.Tensor) -> None:
        with self._order:
            self._update_with(parameter)

    def _update_with(self, parameter: torch.Tensor) -> None:
        if self._passes.has_begun():
            self._pass_begins()
        self._stream.prefetch()
        for group in self._waiting.came(parameter):
            if not all(is_plain(piece.parameter.grad) for piece in group.pieces):
                continue
            if not self._frees:
                self._flags.append(are_finite(group.pieces))
            try:
                self._update(group)
            except BaseException:
                self._basis.clear()  # it lacks what was updated last
                raise

    def _pass_ends(self) -> None:
        """FSDP2 reduces gradients in functions like this one, and all of them are to come first."""
        _at_the_end_of_the_pass(self._gradients_are_there)

    def _gradients_are_there(self) -> None:
        """Expect that a loop leaves the step out, since a gradient is not finite, and reads old parameters.

        The host asks once, at the end: asking after each sub-group would leave the device idle.
        """
        flags, self._flags = self._flags, []
        with self._order:
            if flags and not bool(torch.stack(flags).all()):
                self._undo()

    def _pass_begins(self) -> None:
        self.take_back("another backward pass")
        self._waiting.clear()
        if self._passes.is_last:
            self._stream.follow()
            self._waiting.begin(self._roster.groups)
            _at_the_end_of_the_pass(self._pass_ends)

    def _update(self, group: SubGroup) -> None:
        """Update a sub-group whose gradients are final; at rest it only notes what that would use.

        Raises:
            SessionError: The optimizer has begun to change gradients that are kept.
        """
        own, keeps = self._stream.own, not self._frees
        # Gradients that are kept are those of backward: the loop is to see, and clip, these.
        rests = sum(self._vain) > _VAIN or (keeps and own.changes_gradients)
        self._watch.forwards()
        if not rests:
            self._stream.update_in_backward(group)
            if keeps and own.changes_gradients:
                raise SessionError(
                    "the optimizer's update changes gradients with its present settings, which it did not "
                    "before; call optimizer.zero_grad() and repeat the step"
                )
        done = self._waiting.is_done(group)
        freed = done if self._frees and not rests else set()
        self._basis.note(group, freed)
        for parameter in freed:
            self._free(parameter)

    def _free(self, parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        name = f"the gradient of {self._roster.name_of(parameter)}"
        parameter.grad = FreedGradient(
            gradient.shape, gradient.stride(), gradient.dtype, gradient.device, name
        )

    # ---- what comes of it ------------------------------------------------------------------------

    def step_begins(self, options: Mapping[str, Any]) -> None:
        """Record that the optimizer's step has begun: what was updated with something else is taken back.

        Args:
            options: Arguments of the step.

        Raises:
            SessionError: Parameters or states were changed since; or gradients are freed, so that they
                cannot be used once more.
            TransferError: It cannot be read back.
        """
        with self._order:
            self._step_begins(options)

    def _step_begins(self, options: Mapping[str, Any]) -> None:
        self._passes.step_ends()
        if self._basis.is_empty:
            self.take_back("an interrupt of backward")
            return
        differs = "arguments of step()" if any(options.values()) else self._basis.what_differs()
        if differs is None and self._roster.outdated():
            differs = "other parameters of the optimizer"
        if differs is not None:
            self.take_back(differs)
            return
        self._check_untouched()
        self._vain.append(False)
        self._forget()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch has it
        """Gradients go, and with them what was done with them.

        Raises:
            SessionError: Gradients would stay that are freed.
            TransferError: It cannot be read back.
        """
        if not set_to_none and self._frees:
            raise SessionError(
                "zero_grad(set_to_none=False) would keep gradients that states.gradients: free has freed"
            )
        self._passes.start_again()
        with self._order:
            self._undo()

    def take_back(self, reason: str) -> None:
        """Take back what a step that has not come would have made final; that one is made as a whole then.

        Args:
            reason: What came instead.

        Raises:
            SessionError: Gradients are freed, so that the step cannot be made any more.
            TransferError: It cannot be read back.
        """
        was_pending = bool(self._stream.journal.noted)
        with self._order:
            self._undo()
        if was_pending and self._frees:
            raise SessionError(
                f"{reason} came after gradients were used in backward and freed, so that they cannot be used "
                "again; call optimizer.zero_grad() and repeat the step, or set states.gradients to keep"
            )

    def end(self) -> None:
        """No step comes any more: takes back what one would have made final.

        Raises:
            SessionError: Something else has changed it; what was before is there again.
            TransferError: It cannot be read back.
        """
        with self._order:
            try:
                self._undo()
            finally:
                self._stream.take_back()

    def _forward_begins(self) -> None:
        self.take_back("another forward")

    def _model_is_saved(self) -> None:
        self.take_back("a checkpoint of the model")

    def _undo(self) -> None:
        if not self._basis.is_empty:
            self._vain.append(True)
        self._check_untouched()
        self._basis.clear()
        self._stream.take_back()
        self._forget()

    def _check_untouched(self) -> None:
        """Check that nothing else has changed what was updated.

        Raises:
            SessionError: Something has; what was before is there again.
        """
        if not self._stream.journal.noted:
            return
        changed = self._basis.changed_since()
        if not changed and self._stream.is_current:
            return
        what = _names_of(changed, self._roster) if changed else "a state"
        self._stream.take_back()
        self._forget()
        raise SessionError(
            f"{what} was changed between backward and step(), after its update; change it after step(), "
            "close these states before another optimizer takes over, or set states.when to step"
        )

    def _forget(self) -> None:
        self._watch.no_forwards()
        self._basis.clear()
        self._flags.clear()
        self._waiting.clear()


def _names_of(parameters: Sequence[torch.Tensor], roster: Roster) -> str:
    first, last = (roster.name_of(parameters[place]) for place in (0, -1))
    return first if len(parameters) == 1 else f"one of {len(parameters)} from {first} to {last}"


def _at_the_end_of_the_pass(function: Callable[[], None]) -> None:
    """Have PyTorch call a function when the backward pass is over that runs now, after those it was given."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
