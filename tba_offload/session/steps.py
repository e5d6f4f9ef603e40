"""The steps of a session, one at a time: what begins and ends with each of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement
from tba_offload.errors import SessionError, TransferError
from tba_offload.layers.guards import checkpointing_warning, is_checkpointed
from tba_offload.session.conclusions import warn_of_no_layer
from tba_offload.session.figures import StepMemory
from tba_offload.session.step import Step
from tba_offload.store import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from tba_offload.capture.trace import StepTrace
    from tba_offload.device import Device
    from tba_offload.report.log import StepRecord
    from tba_offload.session.conclusions import Conclusions
    from tba_offload.session.figures import Times
    from tba_offload.session.ongoing import Ongoing
    from tba_offload.session.parts import Parts


class Steps:
    """Begins and ends the steps of a session.

    Args:
        ongoing: Where it is noted which of them is open.
        parts: What works in a step, and is told where it begins and ends.
        conclusions: What is made of steps that have ended.
        traced: Numbers of the steps that are recorded over time, also where they open by themselves.

    Attributes:
        ongoing: As given.
    """

    def __init__(
        self, ongoing: Ongoing, parts: Parts, conclusions: Conclusions, *, traced: Container[int] = ()
    ) -> None:
        self.ongoing = ongoing
        self._parts = parts
        self._conclusions = conclusions
        self._traced = traced
        self._settle: Callable[[], object] = _nothing
        self._finish: Callable[[], object] = _nothing
        _all.add(self)

    def end_by(self, *, settle: Callable[[], object], finish: Callable[[], object]) -> None:
        """Step may open by themselves.

        Args:
            settle: Ends such a step if it is over.
            finish: Ends it.
        """
        self._settle, self._finish = settle, finish

    @property
    def device(self) -> Device:
        """What the steps run on."""
        return self._parts.device

    @property
    def trace(self) -> StepTrace:
        """What happened in the step."""
        return self._parts.capture.trace

    def new(
        self,
        *,
        tokens: int | None = None,
        model_flops: float | None = None,
        measure_memory: bool | None = None,
        trace: bool = False,
        opened_itself: bool = False,
    ) -> Step:
        """Return a step that has not begun; see :meth:`Session.step`."""
        trace = trace or self.ongoing.number + 1 in self._traced
        planning, meters = self._parts.planning, self._parts.meters
        may_help = trace or planning.wants_memory or self._parts.budget.is_of_device
        meter = meters.of_step(wanted=measure_memory, may_help=may_help)
        return Step(
            self,
            tokens=tokens,
            model_flops=model_flops,
            memory=StepMemory(meter, self._parts.memory_watch, self._parts.outputs),
            opened_itself=opened_itself,
            trace=trace,
        )

    def open_by_itself(self) -> Step:
        """Begin a step that nothing has announced."""
        step = self.new(opened_itself=True)
        step.__enter__()
        return step

    def open_step(self) -> Step | None:
        """Return the step that is open; one whose end was interrupted is ended now."""
        step = self.ongoing.step
        if step is not None and step.state.left:
            self.end(failed=True)
        return self.ongoing.step

    def settle(self) -> None:
        """End a step that opened by itself and is over."""
        if not self.ongoing.is_inert:
            self._settle()

    def finish(self) -> None:
        """End a step that opened by itself: no more of it will come."""
        if not self.ongoing.is_inert:
            self._finish()

    # ---- begin -----------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Have everything ready for a step.

        Raises:
            SessionError: No step can begin here.
        """
        try:
            interrupts.put_up(step)
            self._prepare(step)
        except BaseException:
            interrupts.take_down(step)
            raise

    def _prepare(self, step: Step) -> None:
        self.ongoing.check_usable()
        if not step.opened_itself:
            self.finish()
        if self.open_step() is not None:
            raise SessionError("another step of this session is still open")
        parts = self._parts
        parts.offloader.drain()
        self.raise_failures()
        parts.capture.static.refresh(parts.modules)
        self._warn_of_checkpointing()
        self._begin_parts(step)
        parts.meters.resident.reset()
        parts.meters.leave(step.memory.meter)
        self._note_overlap(step)
        self._trace_for_planner()
        parts.ranges.begin_step(self.ongoing.number + 1, wanted=step.timeline.is_wanted)
        step.start(gradients_allocated=parts.gradients.all_exist)
        parts.budget.begin_step(step.memory.base_bytes)
        self.ongoing.opened(step)
        parts.memory_watch.started()

    def _begin_parts(self, step: Step) -> None:
        parts = self._parts
        meter = step.memory.meter
        samples = meter is not None and meter.samples
        parts.capture.begin_step(look_at_memory=self.ongoing.look_at_memory if samples else None)
        parts.verifier.begin_step()
        parts.rebuilds.begin_step()
        for site in parts.sites:
            site.begin_step()
        parts.planning.begin_step()
        parts.offloader.reset_stats()
        parts.store.take_loads()  # those of a failed step belong to none
        # So are those of evaluations; a compiled model has read the weights of its first layers by now.
        parts.weights.begin_step(parts.gradients.live.parts[1])
        parts.gradients.begin_step()
        parts.gradients.live.take_most()
        wanted = step.timeline.is_wanted
        looks = wanted or parts.planning.wants_memory
        parts.memory_watch.begin_step(meter, self.ongoing.number, wanted=looks)
        parts.curve.begin_step(meter, self.ongoing.number, wanted=wanted)

    def _note_overlap(self, step: Step) -> None:
        """Live bytes are those of the process: of two steps at once none can tell its own."""
        for steps in _all:
            if steps is self or steps.device.torch_device != self.device.torch_device:
                continue
            steps.settle()
            other = steps.ongoing.step
            if other is not None and step.memory.meter is not None:
                step.memory.overlapped()
                other.memory.overlapped()
                self._parts.notices.overlap()

    def _trace_for_planner(self) -> None:
        """Have the trace note what the planner asks of it beside the times of the host.

        These are times of the device, if it does its work later than the host gives it out, and under a
        budget of all that lies on the device when gradients come.
        """
        parts = self._parts
        wanted = parts.planning.controller is not None and parts.device.runs_behind
        parts.offloader.mark_stalls(wanted=wanted)
        if wanted:
            parts.capture.trace.mark_times(parts.device)
        if parts.budget.limits.nets_gradients:
            parts.capture.trace.count_gradients(parts.gradients.alone)

    def _warn_of_checkpointing(self) -> None:
        """Trainers may switch checkpointing on long after the model was attached: every step looks."""
        parts = self._parts
        if parts.notices.said("checkpointing"):
            return
        placed = zip(parts.sites, parts.planning.plan.placements, strict=True)
        others = [site.layer.module for site, placement in placed if placement is not Placement.KEEP]
        if count := sum(map(is_checkpointed, others)):
            parts.notices.warn_once("checkpointing", checkpointing_warning(count, len(parts.sites)))

    # ---- end -------------------------------------------------------------------------------------

    def look_back(self) -> None:
        """Record that the step that is open is about to end well.

        Notes what of its activations something else holds.
        """
        self._parts.memory_watch.look_back()

    def end(self, *, failed: bool) -> None:
        """Record that the step that is open is over.

        Raises:
            TransferError: One of its transfers failed.
        """
        step = self.ongoing.ended()
        self._parts.memory_watch.stop()
        self._parts.curve.stop()
        self._parts.ranges.end_step()
        try:
            self._parts.capture.end_step(failed=failed)
            self._parts.rebuilds.end_step(failed=failed)
        finally:
            if step is not None:
                interrupts.take_down(step)
        if failed:
            return
        self.raise_failures()
        self.ongoing.counted()

    def forget(self, step: Step) -> None:
        """End a step of which nothing is recorded."""
        trace = self.trace
        ran = trace.scopes or trace.left_alone
        if step.updates and not ran and not step.state.failed:
            warn_of_no_layer(self._parts, self.ongoing.number + 1)
        step.state.leave()
        self.end(failed=True)

    def raise_failures(self) -> None:
        """Record that the first failed transfer ends the step.

        Those that failed with it must not end the next one.

        Raises:
            TransferError: A transfer failed.
        """
        offloader = self._parts.offloader
        try:
            offloader.writer.flush()  # a graph that outlives its step shall not keep memory
            offloader.raise_failures()
        except TransferError:
            offloader.abandon()
            raise

    def conclude(self, step: Step, times: Times) -> StepRecord:
        """Record a step that has ended, and learn from it."""
        return self._conclusions.draw(step, times, self.ongoing.number)


def _nothing() -> None:
    """Step that are told by hand end where they are told to."""


_all: weakref.WeakSet[Steps] = weakref.WeakSet()
