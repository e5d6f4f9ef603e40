"""What steps were seen to need of memory: the peak under each plan, and what nothing else explains of it."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.adapt.proposals import bare, offloads_all
from tba_offload.plan.simulate import simulate

if TYPE_CHECKING:
    from tba_offload.adapt.task import Case, Task
    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Limits, Plan
    from tba_offload.plan.profile import StepProfile
    from tba_offload.report.log import StepRecord


def taken(record: StepRecord, limits: Limits) -> int | None:
    """Bytes of the budget that a step took; ``None`` if they were not measured."""
    peak, base = record.device_peak_bytes, record.base_bytes
    if not limits.nets_gradients or record.activation_peak_bytes is None or peak is None or base is None:
        return record.activation_peak_bytes
    # States that an optimizer makes after backward lie there beside all gradients.
    return max(peak - base - (record.gradient_peak_bytes or 0) - (record.state_bytes or 0), 0)


class Peaks(NamedTuple):
    """What was measured under a plan.

    Attributes:
        most: The most bytes of the budget that a step took.
        last: Those that the last one took of the largest ones; 0 if there was none.
        activations: Bytes of activations in that; where a budget leaves room for gradients, they take less of
            it.
    """

    most: int = 0
    last: int = 0
    activations: int = 0


class Needs:
    """The memory that was measured.

    What it knows of plans is replaced, never changed, so that a copy stays as it is.

    Args:
        task: Has the budget.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._peaks: dict[Plan, Peaks] = {}
        self._rests: deque[int] = deque(maxlen=task.tuning.remembered_rests)
        self._rest_over = 0  # of steps that peaked over the budget
        self._patience = task.tuning.remembered_rests  # measured steps that go well until it is forgotten
        self._went_well = 0
        self._knows_rest = False

    def limit(self, task: Task) -> None:
        """Have what was measured judged by other limits.

        Args:
            task: The same as before but for its limits.
        """
        self._task = task

    @property
    def knows_rest(self) -> bool:
        """Whether the memory of a step was ever held against what is known of it."""
        return self._knows_rest

    def forget(self) -> None:
        """Forget what smaller steps needed, or the first one, in which a process allocates much once."""
        self.forget_peaks()
        self._rests.clear()
        self._rest_over = 0

    def forget_peaks(self) -> None:
        """Forget what plans needed: drives held more, or less, than they do now."""
        self._peaks = {}

    def note_peak(self, plan: Plan, peak: int | None, activations: int, *, is_largest: bool) -> None:
        """Remembers what a plan needs in the largest step; a smaller one over the budget tells as well."""
        if not self._task.has_budget or peak is None:
            return
        if is_largest or peak > (self._task.limits.budget or 0):
            known = bare(plan)
            others = {plan: peaks for plan, peaks in self._peaks.items() if plan != known}
            before = self._peaks.get(known, Peaks())
            now = before._replace(most=max(before.most, peak))
            if is_largest:
                now = now._replace(last=peak, activations=activations)
            self._peaks = dict([*others.items(), (known, now)][-self._task.tuning.most_peaks :])

    def peak_of(self, plan: Plan) -> int:
        """Return the most of the budget that a plan was seen to take, in bytes; 0 if it was not measured."""
        return self._peaks.get(bare(plan), Peaks()).most

    def with_prediction(self, case: Case, plan: Plan) -> Plan:
        """Return a plan with what it does on a drive.

        Its peaks are those that were measured last, if they were.

        What other plans needed beyond all that is known of them is none of its needs then.
        """
        found = case.play(plan).prediction
        seen = self._peaks.get(bare(plan), Peaks())
        if seen.last:
            found = dataclasses.replace(found, peak_bytes=seen.last, activation_bytes=seen.activations)
        return dataclasses.replace(plan, prediction=found)

    def retreat(self, plan: Plan) -> Plan | None:
        """Return a plan that was seen to need less than one that was seen to break the budget.

        None if none was.

        Among those that kept to the budget it is the last one, because the first ones were made to learn.
        """
        budget, peak = self._task.limits.budget, self.peak_of(plan)
        if budget is None or peak <= budget:
            return None
        known = self._best_known()
        return known if self._peaks[known].most < (1 - self._task.tuning.worth_it) * peak else None

    def instead_of(self, plan: Plan) -> Plan | None:
        """Return a plan that was seen to need less, if this one is expected or known to break the budget."""
        budget = self._task.limits.budget
        if budget is None or plan.prediction is None or not self._peaks:
            return None
        expected = max(plan.prediction.peak_bytes, self.peak_of(plan))
        if expected <= budget or min(seen.most for seen in self._peaks.values()) >= expected:
            return None
        return self._best_known()

    def _best_known(self) -> Plan:
        """Return the last plan that kept to the budget, or the one that needed least if none did."""
        budget = self._task.limits.budget or 0
        fitting = [known for known, seen in self._peaks.items() if seen.most <= budget]
        return fitting[-1] if fitting else min(self._peaks, key=lambda plan: self._peaks[plan].most)

    def with_rest(
        self,
        profile: StepProfile,
        plan: Plan,
        bandwidth: Bandwidth,
        record: StepRecord,
        peak: int | None,
    ) -> StepProfile:
        """Return the profile with what the allocator's peak holds beside all that is known to lie there.

        Args:
            profile: The step.
            plan: The plan that was in force.
            bandwidth: The rates of the step.
            record: Its figures.
            peak: What it took of the budget, if that was measured and tells what the plan needs.
        """
        activations = record.activation_peak_bytes
        if peak is None or activations is None:
            return profile
        known = dataclasses.replace(profile, rest_bytes=0)
        played = simulate(known, plan, bandwidth)
        if not record.fallback_kept_bytes or played.fallback_bytes:
            rest = max(activations - played.activation_bytes, peak - played.peak_bytes, 0)
        elif offloads_all(plan):
            # What was kept in need is in no plan, but counts there.
            rest = max(activations - (record.own_peak_bytes or 0) - known.beside_bytes(plan.placements), 0)
        else:
            return profile
        self._knows_rest = True
        if self._task.has_budget:
            rest = self._most_rest(rest, is_over=peak > (self._task.limits.budget or 0))
        return dataclasses.replace(profile, rest_bytes=rest)

    def _most_rest(self, rest: int, *, is_over: bool) -> int:
        """Return what is planned with under a budget.

        The most of the last steps, since samples may miss a peak.

        What was found when a step broke the budget stays, or what broke it would be planned again, until as
        many went well, and twice as many the next time: kernels for shapes that are new take memory once.
        """
        self._rests.append(rest)
        most = max(*self._rests, self._rest_over)
        if is_over:
            self._rest_over, self._went_well = most, 0
        elif self._rest_over:
            self._went_well += 1
            if self._went_well == self._patience:
                if self._patience == self._task.tuning.remembered_rests:
                    self.forget_peaks()  # once: a plan that breaks the budget again stays out
                self._rest_over, self._patience = 0, 2 * self._patience
        return most
