"""Finds the placements of a step: which layers keep, offload or recompute their activations.

The planner tries plans on the simulator, so a plan is as good as the profile and the rates it is made from,
and every plan comes with what it is expected to do. It is pure: the same arguments give the same plan.

Which plans are tried. Layers that are kept are the last ones: what backward needs first is not worth a round
trip. Among the others the layers that are recomputed are spread evenly, because each gives the drive time for
those between; their inputs stay or travel. So two numbers describe a plan, how many layers are kept and how
many recomputed; the best pair is searched for, for both ways of recomputing. Layers of which only cheap parts
are rebuilt are tried in the same two roles: instead of those that are recomputed, and instead of those that
are offloaded beside them. Of what is not recomputed the same share of each layer may travel instead: while
whole layers are saved, a slow drive is given more than it writes, and afterwards it has nothing to write.
At last the planner changes the placement of single layers as long as that helps.

Where memory is wanted first, the window comes before all that: one that is large enough for the whole step
frees nothing. Nor may a step take longer than if everything was kept, as far as that was measured: not only
waits count, but also what hooks and transfers take from compute. And if what is found frees hardly anything,
everything is kept.

A step with very many activations is planned on a condensed profile, and the plan made exact on the whole one.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from tba_offload.config.policy import Objective, Placement
from tba_offload.plan.condense import condensed, count_items, with_few_micro_batches
from tba_offload.plan.goals import default_objective
from tba_offload.plan.model import Plan
from tba_offload.plan.shares import ways_to_share, with_shares
from tba_offload.plan.terms import Freedom, Terms
from tba_offload.plan.trials import Trials
from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.goals import Score
    from tba_offload.plan.model import Limits
    from tba_offload.plan.profile import StepProfile
    from tba_offload.plan.shares import Shares
    from tba_offload.plan.trials import Trial
    from tba_offload.plan.tuning import Tuning

KEEP, OFFLOAD, OFFLOAD_REMAT = Placement.KEEP, Placement.OFFLOAD, Placement.OFFLOAD_REMAT


def make_plan(
    profile: StepProfile,
    bandwidth: Bandwidth,
    limits: Limits,
    *,
    policy: Sequence[Placement],
    objective: Objective | None = None,
    not_recomputed: frozenset[int] = frozenset(),
    known: Sequence[Plan] = (),
    tuning: Tuning = TUNING,
) -> Plan:
    """Return the best plan that is found.

    Args:
        profile: The step.
        bandwidth: How fast offloaded bytes travel.
        limits: What the plan must keep to. Without a budget it is the one with the lowest peak that is as
            fast as keeping everything.
        policy: For each layer, what the user wants; the planner decides on those that are ``auto``.
        objective: What is wanted; by default ``time`` where there is a budget and ``memory`` elsewhere.
        not_recomputed: Layers that must not be recomputed unless the policy says so.
        known: Plans to choose from as well, such as the best for less memory: no search is perfect.
        tuning: The numbers of the search.

    Raises:
        ValueError: Policy and profile have different numbers of layers.
    """
    if len(policy) != len(profile.layers):
        raise ValueError(f"{len(policy)} placements for a profile of {len(profile.layers)} layers")
    objective = objective or default_objective(limits)
    terms = Terms(bandwidth, limits, objective, tuning)
    freedom = Freedom.all_of(profile, policy, not_recomputed)
    if count_items(profile) <= tuning.many_items:
        return _Search(profile, terms, freedom).best(known)
    return _best_of_many(profile, terms, freedom, known)


def _best_of_many(profile: StepProfile, terms: Terms, freedom: Freedom, known: Sequence[Plan]) -> Plan:
    """Search on a condensed profile; memory is made exact with few micro-batches, prediction with all."""
    small = condensed(profile, freedom.alike, terms.tuning.few_items)
    found = _Search(small.profile, terms, freedom.of(small.members)).best()
    candidate = Plan(small.expanded(found.placements), window=found.window)
    shorter = with_few_micro_batches(profile)
    exact = _Search(shorter, terms, freedom).best_of([candidate, *known])
    return exact if shorter is profile else _Search(profile, terms, freedom).confirmed(exact, known)


def is_better(
    profile: StepProfile,
    bandwidth: Bandwidth,
    limits: Limits,
    new: Plan,
    old: Plan,
    *,
    policy: Sequence[Placement],
    objective: Objective,
    worth: float,
    tuning: Tuning = TUNING,
) -> bool:
    """Whether a plan is better than the one in force by the share that makes a change worth it.

    Args:
        profile: The step.
        bandwidth: How fast offloaded bytes travel.
        limits: What both must keep to; whether they do is not a matter of shares.
        new: The plan.
        old: The one in force.
        policy: For each layer, what the user wants.
        objective: What is wanted.
        worth: The share, of time or of written bytes; of the peak it is twice as much.
        tuning: The numbers of the search.
    """
    bare = [dataclasses.replace(plan, prediction=None) for plan in (old, new)]
    if bare[0] == bare[1]:
        return False
    terms = Terms(bandwidth, limits, objective, tuning)
    trials = Trials(profile, terms, Freedom.all_of(profile, policy, frozenset()))
    now, then = (trials.play(plan).outcome for plan in bare)
    fits = [not trials.goal.broken(outcome) for outcome in (now, then)]
    if fits[0] != fits[1]:
        return fits[1]
    if not fits[0]:
        needs = [outcome.peak_bytes + trials.goal.overwritten(outcome) for outcome in (now, then)]
        return needs[1] < (1 - worth) * needs[0]
    # A plan that frees next to nothing is held to free nothing, be it the old one or the new one.
    frees = [not trials.hardly_frees(outcome, tuning.least_freed / 2) for outcome in (now, then)]
    credit = dataclasses.replace(
        now,
        seconds=(1 - worth) * now.seconds,
        stall_seconds=max(now.stall_seconds + now.rebuild_seconds - worth * now.seconds, 0.0),
        rebuild_seconds=0.0,
        peak_bytes=int((1 - 2 * worth) * now.peak_bytes) if frees[0] else trials.peak_if_kept,
        written_bytes=int((1 - worth) * now.written_bytes),
    )
    if not frees[1]:
        then = dataclasses.replace(then, peak_bytes=trials.peak_if_kept)
    score = trials.goal.score
    return score(then)[1:] < score(credit)[1:]  # both keep to the limits


class _Search:
    """One search: which plans are tried.

    Args:
        profile: The step.
        terms: What is wanted.
        freedom: What may be decided of each layer.
    """

    def __init__(self, profile: StepProfile, terms: Terms, freedom: Freedom) -> None:
        self._profile = profile
        self._terms = terms
        self._freedom = freedom
        self._free = freedom.layers
        self._trials = Trials(profile, terms, freedom)
        # What no layer can be placed would be tried in vain: it means offload there.
        self._choices = [
            way
            for way in self._trials.goal.choices
            if way in {KEEP, OFFLOAD, Placement.RECOMPUTE} or freedom.allows_any(way)
        ]

    def best(self, known: Sequence[Plan] = ()) -> Plan:
        """Return the best plan that is found, or known."""
        if self._trials.goal.wants_memory:
            self._trials.set_window(self._best_window())
        self._try_simplest()
        shares = ways_to_share(self._profile)
        self._try_shares(shares, self._freedom.uniform(OFFLOAD))
        others = self._best_others()
        if OFFLOAD_REMAT in self._choices:
            self._try_family(OFFLOAD_REMAT, OFFLOAD)
        for way in [way for way in self._choices if way.recomputes] or [others]:
            self._try_family(way, others)
        self._try_shares(shares, self._trials.best().plan.placements)
        self._improve(self._trials.best())
        self._try_smaller_windows()
        return self._chosen(known)

    def best_of(self, plans: Sequence[Plan]) -> Plan:
        """Return the best of some plans and of the simplest, its window fitted to the budget."""
        if self._trials.goal.wants_memory:
            self._trials.set_window(plans[0].window)
        for plan in plans:
            self._trials.attempt(plan.placements, plan.window)
        self._try_simplest()
        return self._chosen(())

    def confirmed(self, plan: Plan, known: Sequence[Plan]) -> Plan:
        """Return a plan for a part of this step, made to fit all of it."""
        if self._trials.play(dataclasses.replace(plan, prediction=None)).score[0]:
            self._trials.attempt(plan.placements, plan.window)
            self._try_simplest()
        return self._chosen(known)

    def _chosen(self, known: Sequence[Plan]) -> Plan:
        """Return the best of all that were tried and those that are known, with what it is going to do."""
        trials = self._trials
        for plan in known:
            trials.play(dataclasses.replace(plan, prediction=None))
        best = trials.final()
        if trials.bandwidth != self._terms.bandwidth:
            best = self._sound(best)
        least = self._terms.tuning.least_freed
        if trials.hardly_frees(best.outcome, least) or trials.is_needlessly_slow(best.plan):
            best = trials.play(trials.kept)
        return dataclasses.replace(best.plan, prediction=trials.really(best.plan).prediction)

    def _sound(self, best: Trial) -> Trial:
        """Return the best plan that is as good on the drive as it is: a faster one can mean more waiting.

        If none of those that come next is, it is the one of them that is best there.
        """
        scores: list[tuple[Score, Trial]] = []
        for trial in self._trials.ranked(best)[: self._terms.tuning.sound]:
            score = self._trials.goal.score(self._trials.really(trial.plan))
            if score[:2] <= trial.score[:2]:
                return trial
            scores.append((score, trial))
        return min(scores, key=lambda pair: pair[0])[1]

    def _try_simplest(self) -> None:
        for placement in self._choices:
            # The two that move nothing take next to no time to play.
            if self._trials.most_extra or placement in {KEEP, Placement.RECOMPUTE}:
                self._trials.attempt(self._freedom.uniform(placement))

    # ---- windows ---------------------------------------------------------------------------------

    def _best_window(self) -> int | None:
        """Return the window with which most is freed: a large one frees nothing of a step that fits in it.

        After that of the user come those from the smallest on, until two are worse than the best so far.
        """
        scores: dict[int | None, Score] = {}
        worse = 0
        for window in (self._terms.limits.window, *self._smaller_windows()):
            self._trials.set_window(window)
            scores[window] = self._best_kept(0, OFFLOAD, None)[0].score
            worse = worse + 1 if scores[window] > min(scores.values()) else 0
            if worse == 2 or len(self._trials) > self._trials.most // 3:
                break
        return min(scores, key=lambda window: scores[window])

    def _smaller_windows(self) -> Iterator[int]:
        peak = self._trials.peak_if_kept
        most = min(peak, self._terms.limits.window or peak)
        size = max(self._trials.least_window, 1)
        while size < most:
            yield size
            size *= 2

    def _try_smaller_windows(self) -> None:
        """Play the best plan with smaller windows: sometimes less in flight is better."""
        shares, least = self._terms.tuning.windows, self._trials.least_window
        if self._trials.most_extra < len(shares):
            return
        best = self._trials.best()
        window = best.plan.window or best.outcome.peak_bytes
        smaller = {int(share * window) for share in shares if share * window >= least}
        for size in sorted(smaller | {min(least, window)}):
            self._trials.play(dataclasses.replace(best.plan, window=size))

    # ---- two numbers -----------------------------------------------------------------------------

    def _best_others(self) -> Placement:
        """Return what layers had better be that are neither kept nor recomputed.

        Offloaded, or rebuilt in part.
        """
        if OFFLOAD_REMAT not in self._choices:
            return OFFLOAD
        return min((OFFLOAD, OFFLOAD_REMAT), key=lambda way: self._best_kept(0, way, None, way)[0].score)

    def _try_family(self, way: Placement, others: Placement) -> None:
        """Find the best number of kept layers for some numbers of those that spare the drive, ever closer.

        Args:
            way: How they spare it; the same as ``others`` if none does.
            others: What is neither kept nor one of those.
        """
        most = len(self._free) if way is not others else 0
        numbers = sorted({round(most * share / 8) for share in range(9)})
        kept: int | None = None
        while True:
            found: dict[int, Trial] = {}
            for number in numbers:
                found[number], kept = self._best_kept(number, way, kept, others)
            best = min(found, key=lambda number: found[number].score)
            place = numbers.index(best)
            near = numbers[max(place - 1, 0) : place + 2]
            finer = sorted({*near, *((a + b) // 2 for a, b in itertools.pairwise(near))})
            if finer == near or len(self._trials) >= self._trials.most:
                return
            numbers = finer

    def _best_kept(
        self, sparing: int, way: Placement, near: int | None, others: Placement = OFFLOAD
    ) -> tuple[Trial, int]:
        """Return the best number of kept layers: the plan, and the number.

        Args:
            sparing: How many layers spare the drive.
            way: How.
            near: Where to begin: what was best for nearly as many; ``None`` for in the middle.
            others: What is neither kept nor one of those.
        """
        most = len(self._free) - sparing
        place = most // 2 if near is None else min(near, most)
        step = max(most // (4 if near is None else 8), 1)
        return self._climb(lambda kept: self._spread(kept, sparing, way, others), most, place, step)

    def _climb(
        self, placed: Callable[[int], tuple[Placement, ...]], most: int, place: int, step: int
    ) -> tuple[Trial, int]:
        """Return the best of placements that are in order, by ever smaller steps: the plan, and its place.

        Args:
            placed: Those of a place.
            most: The last place; the first is 0.
            place: Where to begin.
            step: Places of the first step.
        """
        trials = self._trials
        found = trials.attempt(placed(place))
        while True:
            near_by = [other for other in (place - step, place + step) if 0 <= other <= most]
            tried = [(trials.attempt(placed(other)), other) for other in near_by]
            trial, other = min(tried, key=lambda pair: pair[0].score, default=(found, place))
            if trial.score < found.score:
                found, place = trial, other
            elif step > 1 and len(trials) < trials.most:
                step //= 2
            else:
                return found, place

    def _spread(self, kept: int, sparing: int, way: Placement, others: Placement) -> tuple[Placement, ...]:
        """Return the last ones kept, among the others those that spare the drive spread evenly."""
        placements = list(self._freedom.uniform(others))
        first = self._free[: len(self._free) - kept]
        for layer in self._free[len(first) :]:
            placements[layer] = KEEP
        for position, layer in enumerate(first):
            is_one = (position + 1) * sparing // len(first) > position * sparing // len(first)
            if is_one and self._freedom.allows(layer, way):
                placements[layer] = way
        return tuple(placements)

    # ---- shares ----------------------------------------------------------------------------------

    def _try_shares(self, shares: Sequence[Shares], placements: tuple[Placement, ...]) -> None:
        """Have the same share of each layer travel: of those that do, and then of those that are kept too.

        Args:
            shares: The ways to divide what layers save.
            placements: Those of a good plan of whole layers.
        """
        for whole in ({OFFLOAD}, {OFFLOAD, KEEP}):
            layers = {layer for layer in self._free if placements[layer] in whole}
            plans = [*dict.fromkeys(with_shares(self._profile, placements, layers, each) for each in shares)]
            if plans and len(self._trials) < self._trials.most:
                self._climb(plans.__getitem__, len(plans) - 1, len(plans) // 2, max(len(plans) // 4, 1))

    # ---- single changes --------------------------------------------------------------------------

    def _improve(self, found: Trial) -> None:
        """Change one layer after the other, until no change helps or enough was tried."""
        changed = True
        while changed:
            changed = False
            for layer, placement in itertools.product(self._free, self._choices):
                if len(self._trials) >= self._trials.most:
                    return
                placements = list(found.plan.placements)
                if placements[layer] is placement or not self._freedom.allows(layer, placement):
                    continue
                placements[layer] = placement
                trial = self._trials.attempt(tuple(placements))
                if trial.score < found.score:
                    found, changed = trial, True
