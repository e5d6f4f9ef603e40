"""Plans that were tried on the simulator: what each does in a step, and which is the best so far.

Where a plan breaks the budget, it is tried with the largest window that the budget leaves room for.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement
from tba_offload.plan.condense import count_items
from tba_offload.plan.goals import GOALS
from tba_offload.plan.model import Plan
from tba_offload.plan.simulate import simulate

if TYPE_CHECKING:
    from tba_offload.plan.goals import Score
    from tba_offload.plan.profile import StepProfile
    from tba_offload.plan.simulate import Outcome
    from tba_offload.plan.terms import Freedom, Terms

_NO_TIME = 1e6
"""Factor of the rates with which a drive takes no time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan, what it does, and how good that is."""

    plan: Plan
    outcome: Outcome
    score: Score


def score_of(trial: Trial) -> Score:
    """How good a trial is, to sort by."""
    return trial.score


class Trials:
    """The plans of one step that were tried.

    Args:
        profile: The step.
        terms: What is wanted.
        freedom: What may be decided of each layer.

    Attributes:
        kept: The plan that keeps all layers that may be.
        bandwidth: The rates that plans are made for.
        goal: Says which outcome is better.
        least_window: The smallest window in bytes in which activations do not wait for one another.
        most: So many plans are tried before no new way is begun.
        most_extra: Plans that may be tried beside those ways: the simplest, and smaller windows.
    """

    def __init__(self, profile: StepProfile, terms: Terms, freedom: Freedom) -> None:
        tuning = terms.tuning
        self.profile = profile
        self.terms = terms
        self.freedom = freedom
        self.kept = Plan(freedom.uniform(Placement.KEEP), window=terms.limits.window)
        goal, seconds = GOALS[terms.objective], 0.0
        if goal.wants_memory:
            seconds = simulate(profile, self.kept, terms.bandwidth).seconds
        self.goal = goal(terms.limits, tuning, seconds)
        self.bandwidth = terms.bandwidth.scaled(self.goal.drive_share)
        items = max(count_items(profile), 1)
        self.most = min(tuning.max_trials, tuning.max_items // items)
        self.most_extra = tuning.max_items // 4 // items
        self.least_window = tuning.narrowest * profile.largest_bytes
        self._window = terms.limits.window
        self._played: dict[Plan, Trial] = {}

    # ---- trying ----------------------------------------------------------------------------------

    def play(self, plan: Plan) -> Trial:
        """Play a plan as it is."""
        if plan not in self._played:
            outcome = simulate(self.profile, plan, self.bandwidth)
            self._played[plan] = Trial(plan, outcome, self.goal.score(outcome))
        return self._played[plan]

    def really(self, plan: Plan) -> Outcome:
        """Return what a plan does on the drive as it is."""
        trial = self._played.get(plan) if self.bandwidth == self.terms.bandwidth else None
        return simulate(self.profile, plan, self.terms.bandwidth) if trial is None else trial.outcome

    def set_window(self, window: int | None) -> None:
        """From now on plans that say nothing else are tried with this window."""
        self._window = window

    def attempt(self, placements: tuple[Placement, ...], window: int | None = None) -> Trial:
        """Play a plan with the largest window that the budget leaves room for."""
        plan = Plan(placements, window=self._window if window is None else window)
        trial = self.play(plan)
        excess = self.goal.excess(trial.outcome)
        if not excess or not any(placement.offloads for placement in placements):
            return trial
        largest = trial.outcome.peak_bytes if plan.window is None else plan.window
        if largest <= self.least_window:
            return trial
        smaller = self._narrowed(plan, max(int(largest - excess), self.least_window))
        return smaller if not self.goal.excess(smaller.outcome) else self._fitted(plan, smaller, largest)

    def _narrowed(self, plan: Plan, window: int) -> Trial:
        return self.play(dataclasses.replace(plan, window=window))

    def _fitted(self, plan: Plan, found: Trial, largest: int) -> Trial:
        """Play a plan with the smallest window, and with one larger by what the budget then has left.

        Windows that are large enough to be never full lower no peak. From the smallest on the peak grows with
        the window, and mostly no faster; where it does, by what is too much the window is smaller again.
        """
        small = self._narrowed(plan, self.least_window)
        room = self.terms.limits.planned - small.outcome.peak_bytes
        if room <= 0:
            return min(found, small, self._tight(plan), key=score_of)
        window = min(int(self.least_window + room), largest)
        larger = self._narrowed(plan, window)
        if excess := self.goal.excess(larger.outcome):
            larger = self._narrowed(plan, max(int(window - excess), self.least_window))
        return small if self.goal.excess(larger.outcome) else min(small, larger, key=score_of)

    def _tight(self, plan: Plan) -> Trial:
        """Play a plan with windows in which activations wait for one another, where no other one fits."""
        *others, last = self.terms.tuning.tight
        tightest = self._narrowed(plan, self.least_window // last)
        if self.goal.excess(tightest.outcome):
            return tightest
        tight = (self._narrowed(plan, self.least_window // part) for part in others)
        return min((tightest, *tight), key=score_of)

    # ---- judging ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._played)

    def best(self) -> Trial:
        """Return the best so far."""
        return min(self._played.values(), key=score_of)

    def final(self) -> Trial:
        """Return the best to end with."""
        return min(self._played.values(), key=lambda trial: self.goal.final_score(trial.outcome))

    def ranked(self, *others: Trial) -> list[Trial]:
        """All of them and some others, the best first."""
        return sorted({**{trial.plan: trial for trial in others}, **self._played}.values(), key=score_of)

    def hardly_frees(self, outcome: Outcome, share: float) -> bool:
        """Whether memory is wanted first, there is room for everything, and nearly as much is used."""
        if not self._is_at_leisure:
            return False
        return self.peak_if_kept - outcome.peak_bytes < share * (self.peak_if_kept - self._least_peak)

    def is_needlessly_slow(self, plan: Plan) -> bool:
        """Whether memory is wanted first, there is room for everything, and keeping it would be faster."""
        if not self._is_at_leisure:
            return False
        return self.goal.slower(simulate(self.profile, plan, self.terms.bandwidth)) > 0

    @property
    def _is_at_leisure(self) -> bool:
        """Whether memory is wanted first although there is room for everything."""
        return self.goal.wants_memory and self.peak_if_kept <= self.terms.limits.planned

    @functools.cached_property
    def peak_if_kept(self) -> int:
        """The peak in bytes if all layers are kept that may be."""
        return self.play(self.kept).outcome.peak_bytes

    @functools.cached_property
    def _least_peak(self) -> int:
        """The peak if all of them travelled, on drives that take no time."""
        plan = Plan(self.freedom.uniform(Placement.OFFLOAD), window=self.least_window)
        return simulate(self.profile, plan, self.bandwidth.scaled(_NO_TIME)).peak_bytes
