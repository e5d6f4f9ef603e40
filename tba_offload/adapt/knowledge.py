"""What a controller knows of its steps: how large they are, what they need, and how long they take."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from tba_offload.adapt.beside import BesideLayers
from tba_offload.adapt.needs import Needs, taken
from tba_offload.adapt.pace import Pace
from tba_offload.adapt.phases import Excursion
from tba_offload.adapt.profiler import profile_of
from tba_offload.adapt.rates import Rates
from tba_offload.adapt.task import Case
from tba_offload.plan.sizes import Sizes, StepSize
from tba_offload.plan.skipped import with_skipped

if TYPE_CHECKING:
    from tba_offload.adapt.observation import StepObservation
    from tba_offload.adapt.phases import Phase
    from tba_offload.adapt.task import Task
    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.profile import StepProfile
    from tba_offload.report.log import StepRecord


class Knowledge:
    """What was learned from the steps of a session.

    Args:
        task: What has to be decided.

    Attributes:
        rates: How fast the tiers are.
        sizes: How large the runs of layers are.
        needs: What steps were seen to need of memory.
        beside: What was seen to lie beside layers.
        pace: How long they took.
        seconds: How long the step took that was last looked at closely, by the clock of its device.
        not_recomputed: Layers that must not be recomputed unless the policy says so, by the last step.
    """

    def __init__(self, task: Task) -> None:
        self.rates = Rates(task)
        self.sizes = Sizes(task.tuning)
        self.needs = Needs(task)
        self.beside = BesideLayers(task.tuning)
        self.pace = Pace(task.tuning)
        self.seconds = 0.0
        self.not_recomputed: frozenset[int] = frozenset()
        self._task = task
        self._steps = 0
        self._size = StepSize()
        self._skips = False
        self._profile: StepProfile | None = None

    def limit(self, task: Task) -> None:
        """Have needs judged by other limits.

        Args:
            task: The same as before but for its limits.
        """
        self._task = task
        self.needs.limit(task)

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._steps

    @property
    def size(self) -> StepSize:
        """How large the last step was."""
        return self._size

    @property
    def skips(self) -> bool:
        """Whether there were steps without layers that plans must hold for."""
        return self._skips

    @property
    def profile(self) -> StepProfile | None:
        """What plans are made from; ``None`` before a step was understood."""
        return self._profile

    @property
    def case(self) -> Case | None:
        """All that plans are made from now; ``None`` if too little is known."""
        profile, bandwidth = self._profile, self.rates.bandwidth()
        if profile is None or bandwidth is None:
            return None
        return Case(self._task, profile, bandwidth, self.not_recomputed)

    def end_step(self, observation: StepObservation) -> None:
        """Count a step, and find out how large it was.

        Of one that has grown, nothing that was measured before tells.
        """
        self._steps += 1
        self.not_recomputed = observation.not_recomputed
        if not self._task.has_budget:
            return
        scopes = observation.trace.scopes
        self._size = self.sizes.end_step(max((scope.input_bytes for scope in scopes), default=0))
        if self._size.has_grown:
            self._skips = False
            self.pace.forget()
            self.needs.forget()

    def note(self, observation: StepObservation, phase: Phase) -> int | None:
        """Note what every step tells, whether or not it is looked at closely.

        Args:
            observation: The step, which has ended.
            phase: The phase that it was in.

        Returns:
            Its peak in bytes, if that was measured.
        """
        record, plan = observation.record, observation.plan
        peak = self._peak_in(record)
        if self._has_warmed_up:
            self.rates.forget()
            if self._profile is not None:  # in the first step no optimizer can free gradients in backward
                self._profile = self._profile.without_gradients()
            if peak is not None:  # of which there is something to plan with
                self.needs.forget()
                self.beside.forget()
        if self.rates.note(observation.loads, fell_back=record.fallback_kept_bytes > 0):
            self.needs.forget_peaks()
        activations = record.activation_peak_bytes or 0
        self.needs.note_peak(plan, peak, activations, is_largest=self._size.is_largest)
        self.pace.end_last_step()
        if self.is_as_planned and not isinstance(phase, Excursion):
            self.pace.note(record, observation.on_device, is_planned=phase.settled is not None)
        return peak

    def _peak_in(self, record: StepRecord) -> int | None:
        """Return what a step took of the budget.

        Where it has grown on the way, that is the peak of no plan.
        """
        return None if self._size.is_mixed else taken(record, self._task.limits)

    @property
    def is_as_planned(self) -> bool:
        """Whether the last step tells what a plan does, if only without the layers that it skipped."""
        return self._size.is_full and not self._size.has_grown

    @property
    def _has_warmed_up(self) -> bool:
        """Whether all earlier times say nothing: memory and files grew, caches were cold."""
        return self._steps == self._task.tuning.warm_up + 1

    def understand(self, observation: StepObservation, phase: Phase) -> Case | None:
        """Look at a step closely, and wait for a device that runs behind the host.

        Returns:
            What plans are to be made from; ``None`` if too little is known.
        """
        on_device = observation.on_device
        times = on_device.read() if on_device is not None else None
        self.seconds = observation.record.seconds
        if times is not None:
            self.seconds = times.ended - times.began
            self.pace.read(times, is_planned=phase.settled is not None)
        profile = profile_of(
            observation.trace,
            observation.stalls,
            self._task.layers,
            began=observation.began,
            ended=observation.began + observation.record.seconds,
            on_device=times,
            before=self._known_before(),
            has_grown=self._size.has_grown,
            most_gradients=observation.record.gradient_peak_bytes
            if self._task.limits.nets_gradients
            else None,
            tuning=self._task.tuning,
        )
        bandwidth = self.rates.bandwidth()
        if profile is None or bandwidth is None:
            return None
        self._profile = self._of_largest(profile, observation, bandwidth, is_first=phase.settled is None)
        return self.case

    def _known_before(self) -> StepProfile | None:
        """Return what the last step adds to."""
        if self._profile is None or not self._has_warmed_up:
            return self._profile
        return dataclasses.replace(self._profile, timings=({},) * len(self._profile.kinds), samples=())

    def _of_largest(
        self, profile: StepProfile, observation: StepObservation, bandwidth: Bandwidth, *, is_first: bool
    ) -> StepProfile:
        """Return the profile that plans are made from.

        Of the largest step, with what another one tells of times.

        What lies beside the layers is found with those that ran; then the ones that were skipped are added.
        """
        before, size = self._profile, self._size
        if before is not None and size.has_grown and before.layer_bytes:
            # What lies beside the layers is taken to have grown as they have, unless it was measured.
            growth = max(profile.layer_bytes / before.layer_bytes, 1.0)
            profile = dataclasses.replace(profile, rest_bytes=int(growth * profile.rest_bytes))
            if size.is_new:
                self.beside.forget()
            self.beside.grow(growth)
        if before is None or size.is_full or size.has_grown:
            peak, record = self._peak_in(observation.record), observation.record
            if observation.beside is not None and self._tells_beside(observation, peak, is_first=is_first):
                self.beside.note(observation.beside, observation.plan, profile)
            profile = self.beside.put_in(profile)
            profile = self.needs.with_rest(profile, observation.plan, bandwidth, record, peak)
        elif not size.is_large:
            return before
        if before is not None:
            profile = profile.with_gradients_of(before)
        if before is not None and not size.is_full:
            profile = profile.at_least(before)
        if not self._task.has_budget:
            return profile
        whole = with_skipped(profile, None if size.is_new else before)
        self._skips |= len(whole.slots) > len(profile.slots)
        return whole

    def _tells_beside(self, observation: StepObservation, peak: int | None, *, is_first: bool) -> bool:
        """Whether a step tells what lies beside its layers.

        What one needed more when it broke the budget under a plan is its rest: that is remembered for longer.
        Where a graph outlives its backward, what it holds is not told from what lies beside it.
        """
        if self._size.is_mixed or any(scope.is_retained for scope in observation.trace.scopes):
            return False
        keeps_to_budget = (peak or 0) <= (self._task.limits.budget or math.inf)
        return is_first or self._size.has_grown or keeps_to_budget
