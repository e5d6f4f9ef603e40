"""A layer that backward runs again: its second run gives the bits of its first one, or it is noticed.

A :class:`Run` stands in front of the layer's forward. The first time it takes down what the layer finds:
parameters, buffers, arguments, the state of random generators. The second time all of that is put back, and
samples of what the layer saves are compared, or of what it puts out where a checkpoint hides what it saves or
kernels do not fill it. Of the first run of each layer all that it puts out is compared.
"""

from __future__ import annotations

import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.layers.guards import is_scripted
from tba_offload.layers.nested import TooManyError
from tba_offload.recompute.observation import TOO_MANY
from tba_offload.recompute.run_errors import RunErrors
from tba_offload.recompute.samples import Samples
from tba_offload.recompute.saved_again import SavedAgain
from tba_offload.recompute.trial import fault_of
from tba_offload.recompute.verdicts import OTHER_NUMBERS, SCRIPTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.recompute.observation import Observation
    from tba_offload.recompute.verdicts import Mode, Verifier

_NO_HOOKS = "support saved tensor hooks"
"""Words of the errors of transforms that were called under hooks."""

_FORBIDDING: Any = torch.autograd.graph.disable_saved_tensors_hooks
"""Raises where it is called under hooks, with words of its caller's."""


class Run:
    """One execution of a layer that backward repeats.

    Args:
        verifier: What the session knows of second runs.
        mode: The layer, and what it is in.
        forward: What runs it.
        is_planned: Whether the planner has chosen to recompute it, which it does not do again after an error.
    """

    def __init__(
        self, verifier: Verifier, mode: Mode, forward: Callable[..., object], *, is_planned: bool
    ) -> None:
        self.__self__ = verifier.layers[mode.layer].module  # by which frameworks find a layer's settings
        self._verifier = verifier
        self._mode = mode
        self._forward = forward
        self._errors = RunErrors(verifier, mode, is_planned=is_planned)
        self._compares = verifier.compares(mode)
        # None of these may know this object, or it would outlive the graph until the cyclic collector runs.
        samples = partial(Samples, verifier.next_run(mode.layer), verifier.unfilled(mode))
        leave_out = partial(verifier.leave_out, mode)
        self._saved = SavedAgain(self._errors.failed, verifier.name_of(mode.layer), samples, leave_out)
        self._observed: Observation | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> object:
        """Run the layer: the first time to take down what it finds, then to repeat that.

        Raises:
            UnsupportedError: A second run would not find what the first one did.
            SavedTensorModifiedError: Something that the first run found was changed in place since.
            RecomputationError: A second run gives other numbers than the first, or fails.
        """
        return (
            self._first(args, kwargs) if self._observed is None else self._again(self._observed, args, kwargs)
        )

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        observed = self._look(args, kwargs)
        if self._compares:
            observed.look_closely(args, kwargs)
        self._observed = observed  # from here on: forward may go backward through what it has done so far
        try:
            output = self._run_first(observed, args, kwargs)
        except BaseException:
            self._observed = None  # which may hold the graph, as the graph holds this
            raise
        self._note_output(observed, output)
        return output

    def _run_first(self, observed: Observation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        try:
            with self._saved.in_first_run(observed.found.restorable()):
                output = self._forward(*args, **kwargs)
        except RuntimeError as error:
            if not _forbids_hooks(error):
                raise
            raise self._errors.refused(f"it forbids saved-tensor hooks ({error})") from error
        fault = observed.change(args, kwargs)
        if fault is not None:
            raise self._errors.refused(fault)
        return output

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observation:
        """Take down what the layer finds."""
        if is_scripted(self.__self__):
            raise self._errors.refused(SCRIPTED)
        try:
            observed = self._verifier.observe(self._mode, args, kwargs)
        except TooManyError:
            raise self._errors.refused(TOO_MANY) from None
        if observed.found.unknown is not None:
            what = f"is recomputed, but reaches {observed.found.unknown}: what it changes there, a second run"
            self._verifier.warn(self._mode, f"{what} changes once more")
        return observed

    def _note_output(self, observed: Observation, output: object) -> None:
        try:
            observed.note_output(output, samples_only=not self._compares)
        except TooManyError:
            self._compares = False  # samples of what it saves are compared all the same

    def _again(self, observed: Observation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if self._compares and observed.is_compared:
            self._compares = False
            self._compare(observed, args, kwargs)
        whole = partial(fault_of, observed, self._forward, args, kwargs) if observed.is_compared else None
        with self._saved.in_second_run(observed.found.restorable(), whole) as ended:
            output = self._repeated(observed, ended, args, kwargs)
        if not observed.is_output(output):
            raise self._errors.failed(OTHER_NUMBERS)
        return output

    def _repeated(
        self,
        observed: Observation,
        ended: Callable[[], object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> object:
        try:
            return observed.repeat(partial(_run_to_end, self._forward, ended), args, kwargs)
        except Exception as error:  # of the layer's own code: it cannot be repeated
            self._errors.withdraw(str(error))
            raise

    def _compare(self, observed: Observation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the layer once more than backward needs it: that stops at the last tensor that was saved."""
        fault = fault_of(observed, self._forward, args, kwargs)
        self._verifier.judge(self._mode, fault)
        if fault is not None:
            raise self._errors.failed(fault)


def _run_to_end(
    forward: Callable[..., object], ended: Callable[[], object], /, *args: Any, **kwargs: Any
) -> object:
    output = forward(*args, **kwargs)
    ended()
    return output


def _forbids_hooks(error: RuntimeError) -> bool:
    """Whether code was called under hooks that forbids them."""
    if _NO_HOOKS in str(error):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_code is _FORBIDDING.__wrapped__.__code__
