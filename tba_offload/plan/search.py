"""Finds the placements of a step: which layers keep, offload or recompute their activations.

The planner tries plans on the simulator, so a plan is as good as the profile and the rates it is made from,
and every plan comes with what it is expected to do. It is pure: the same arguments give the same plan.

Which plans are tried. Layers that are kept are the last ones: what backward needs first is not worth a round
trip. Among the others the layers that are recomputed are spread evenly, because each gives the drive time for
those between; their inputs stay or travel. So two numbers describe a plan, how many layers are kept and how
many recomputed; the best pair is searched for first, for both ways of recomputing. Layers of which only cheap
parts are rebuilt are tried in the same two roles: instead of those that are recomputed, and instead of those
that are offloaded beside them. After that single layers change their placement as long as that helps, and at
last single activations stay where the budget has room.

Where memory is wanted first, the window comes before all that: one that is large enough for the whole step
frees nothing. Nor may a step take longer than if everything was kept, as far as that was measured: not only
waits count, but also what hooks and transfers take from compute. And if what is found frees hardly anything,
everything is kept.

A step with very many activations is planned on a condensed profile, and the plan made exact on the whole one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.config.policy import Objective, Placement
from tba_offload.formatting import readable_size
from tba_offload.plan.condense import condensed, count_items, with_few_micro_batches
from tba_offload.plan.model import Plan
from tba_offload.plan.simulate import Outcome, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.profile import StepProfile

KEEP, OFFLOAD, RECOMPUTE, AUTO = Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.AUTO
RECOMPUTE_OFFLOAD, SELECTIVE = Placement.RECOMPUTE_OFFLOAD, Placement.SELECTIVE
TRAVELS = frozenset({OFFLOAD, RECOMPUTE_OFFLOAD, SELECTIVE})

NO_STALL = 0.01
"""Share of the step: waiting for less than that, rebuilding included, counts as not waiting. With 0 the peaks
of 26 seeded steps were 3.7 % higher, with 0.02 4.6 % lower, and steps took 0.2 % longer."""

NO_SLOWER = 0.02
"""A plan for memory may take this share of a step longer than keeping everything: less is within what equal
steps differ by, and is no reason to change a plan either (``WORTH_IT`` of the planner between steps). With 0
the peaks of those 26 steps were 23 % higher, with 0.04 13 % lower, and steps took 0.7 % longer."""

LEAST_FREED = 1 / 8
"""Where memory is wanted first, freeing less than this share of what could be freed counts as freeing none: a
drive that slow had better be left alone. A plan in force stays until it is half of that. It spares 2 of those
26 steps transfers that would free 4 to 6 % of memory and take up to 1.2 % of the time; with twice as much
peaks are 6 % higher."""

MARGIN = 0.02
"""Share of the budget that is left free: a prediction is not exact, and a budget is hard. Few measured runs
cannot show what it gains: of a small GPT on a busy machine 1 of 6 broke its budget without it, by 7 %, and 1
of 13 with it, by 1 %."""

MAX_TRIALS = 600
"""Plans that are tried on the simulator; after that many no new way is begun. With half as many none of 26
seeded steps got another plan, with a quarter 1 of 70 with a budget took 1.6 % longer."""

MAX_ITEMS = 120_000
"""Activations that are simulated in all trials together: half a second. Then the best so far will do. With
half as many 1 of 26 seeded steps took 1.6 % longer, with twice as many none took less."""

MANY_ITEMS = 4000
"""A step that saves more activations than this is condensed."""

FEW_ITEMS = 1000
"""To about so many."""

MANY_TRIALS = 16
"""If so many are possible on the whole step, a search is tried there too."""

BEST = 3
"""Number of the best plans that are played with smaller windows. Without that, 2 of 26 seeded steps without a
budget peaked 4.5 and 6.9 % higher."""

TIGHT = (2, 4, 12)
"""Parts of the smallest window that are tried where nothing else keeps to the budget; the last is a quarter
of the largest activation, so that it is in flight alone. Without them, 21 of 70 seeded steps had no plan that
keeps to the budget instead of 7; with the last one alone, steps took up to 32 % longer."""

SOUND = 32
"""Number of the best plans for a slower drive that are played on the real one at most. With one alone, 1 of
26 seeded steps took 0.7 % longer, at a peak that was 9 % lower."""

WINDOWS = (0.8, 0.6, 0.4, 0.25)
"""Shares of the window."""

NO_TIME = 1e6
"""A drive so many times as fast takes no time."""

SLACK = 0.9
"""Share of the measured rates that plans are made for where nothing shall wait: drives have their moods. On a
drive at 0.9 of these rates, 26 seeded steps wait for 0.15 % of their time instead of 0.5 %."""

Score = tuple[float, ...]
"""Less is better."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep to.

    Attributes:
        budget: Most bytes of the activation peak; ``None`` for no limit.
        window: Most bytes in flight; ``None`` for no limit.
    """

    budget: int | None = None
    window: int | None = None

    @property
    def planned(self) -> float:
        """What plans are made for: the budget less the margin."""
        return float("inf") if self.budget is None else self.budget * (1 - MARGIN)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What is wanted, on which drive, within which limits."""

    drive: Bandwidth
    limits: Limits
    objective: Objective
    whole_layers: bool

    @property
    def choices(self) -> tuple[Placement, ...]:
        """What the planner may decide for: who wants memory at no cost in time wants no recomputation."""
        return (
            (KEEP, OFFLOAD, SELECTIVE)
            if self.objective is Objective.MEMORY
            else (KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD, SELECTIVE)
        )

    @property
    def planned_drive(self) -> Bandwidth:
        """The drive that plans are made for."""
        return self.drive.scaled(SLACK) if self.objective is Objective.MEMORY else self.drive


@dataclass(frozen=True, slots=True)
class _Layers:
    """What may be decided of each layer: all but what stands in the way of single ones."""

    policy: tuple[Placement, ...]
    not_recomputed: frozenset[int]
    not_rebuilt: frozenset[int]

    @classmethod
    def all_of(
        cls, profile: StepProfile, policy: Sequence[Placement], not_recomputed: frozenset[int]
    ) -> _Layers:
        """Those of a step; nothing is rebuilt of layers of which nobody knows that it would be."""
        count = len(profile.layers)
        not_rebuilt = frozenset(layer for layer in range(count) if not profile.kind_of(layer).rebuilt_bytes)
        return cls(tuple(policy), not_recomputed, not_rebuilt)

    @property
    def alike(self) -> list[tuple[Placement, bool]]:
        """Layers for which this is equal can get one placement."""
        return [(wanted, layer in self.not_recomputed) for layer, wanted in enumerate(self.policy)]

    def of(self, groups: Sequence[tuple[int, ...]]) -> _Layers:
        """The same of groups of layers that are alike."""

        def of_groups(layers: frozenset[int]) -> frozenset[int]:
            return frozenset(place for place, group in enumerate(groups) if group[0] in layers)

        policy = tuple(self.policy[group[0]] for group in groups)
        return _Layers(policy, of_groups(self.not_recomputed), of_groups(self.not_rebuilt))

    def allows(self, layer: int, placement: Placement) -> bool:
        """Whether the planner may give a layer this placement."""
        if placement is SELECTIVE:
            return layer not in self.not_rebuilt
        return not placement.recomputes or layer not in self.not_recomputed


def make_plan(
    profile: StepProfile,
    drive: Bandwidth,
    limits: Limits,
    *,
    policy: Sequence[Placement],
    objective: Objective | None = None,
    whole_layers: bool = False,
    not_recomputed: frozenset[int] = frozenset(),
    known: Sequence[Plan] = (),
) -> Plan:
    """The best plan that is found.

    Args:
        profile: The step.
        drive: How fast offloaded bytes travel.
        limits: What the plan must keep to. Without a budget it is the one with the lowest peak that is as
            fast as keeping everything.
        policy: For each layer, what the user wants; the planner decides on those that are ``auto``.
        objective: What is wanted; by default ``time`` where there is a budget and ``memory`` elsewhere.
        whole_layers: Whether all activations of a layer get the same placement, as in a policy file.
        not_recomputed: Layers that must not be recomputed unless the policy says so.
        known: Plans to choose from as well, such as the best for less memory: no search is perfect.

    Raises:
        ValueError: Policy and profile have different numbers of layers.
    """
    if len(policy) != len(profile.layers):
        raise ValueError(f"{len(policy)} placements for a profile of {len(profile.layers)} layers")
    terms = _Terms(drive, limits, objective or default_objective(limits), whole_layers=whole_layers)
    layers = _Layers.all_of(profile, policy, not_recomputed)
    if count_items(profile) <= MANY_ITEMS:
        return _Search(profile, terms, layers).best(known)
    return _best_of_many(profile, terms, layers, known)


def _best_of_many(profile: StepProfile, terms: _Terms, layers: _Layers, known: Sequence[Plan]) -> Plan:
    """Searches on a condensed profile; memory is made exact with few micro-batches, prediction with all."""
    small = condensed(profile, layers.alike, FEW_ITEMS)
    coarse = dataclasses.replace(terms, whole_layers=True)
    found = _Search(small.profile, coarse, layers.of(small.members)).best()
    candidate = Plan(small.expanded(found.placements), window=found.window)
    shorter = with_few_micro_batches(profile)
    exact = _Search(shorter, terms, layers).best_of([candidate, *known])
    return exact if shorter is profile else _Search(profile, terms, layers).confirmed(exact, known)


def default_objective(limits: Limits) -> Objective:
    """What is wanted if nobody says so."""
    return Objective.MEMORY if limits.budget is None else Objective.TIME


def is_better(
    profile: StepProfile,
    drive: Bandwidth,
    limits: Limits,
    new: Plan,
    old: Plan,
    *,
    policy: Sequence[Placement],
    objective: Objective,
    worth: float,
) -> bool:
    """Whether a plan is better than the one in force by the share that makes a change worth it.

    Args:
        profile: The step.
        drive: How fast offloaded bytes travel.
        limits: What both must keep to; whether they do is not a matter of shares.
        new: The plan.
        old: The one in force.
        policy: For each layer, what the user wants.
        objective: What is wanted.
        worth: The share, of time or of written bytes; of the peak it is twice as much.
    """
    bare = [dataclasses.replace(plan, prediction=None) for plan in (old, new)]
    if bare[0] == bare[1]:
        return False
    layers = _Layers.all_of(profile, policy, frozenset())
    search = _Search(profile, _Terms(drive, limits, objective, whole_layers=False), layers)
    now, then = (simulate(profile, plan, search.drive) for plan in bare)
    fits = [outcome.peak_bytes <= limits.planned for outcome in (now, then)]
    if fits[0] != fits[1]:
        return fits[1]
    if not fits[0]:
        return then.peak_bytes < (1 - worth) * now.peak_bytes
    # Who frees next to nothing is held to free nothing, be it the old plan or the new one.
    frees = [not search.hardly_frees(outcome, LEAST_FREED / 2) for outcome in (now, then)]
    credit = dataclasses.replace(
        now,
        seconds=(1 - worth) * now.seconds,
        stall_seconds=max(now.stall_seconds + now.rebuild_seconds - worth * now.seconds, 0.0),
        rebuild_seconds=0.0,
        peak_bytes=int((1 - 2 * worth) * now.peak_bytes) if frees[0] else search.peak_if_kept,
        written_bytes=int((1 - worth) * now.written_bytes),
    )
    if not frees[1]:
        then = dataclasses.replace(then, peak_bytes=search.peak_if_kept)
    return search.score(then) < search.score(credit)


def explain(profile: StepProfile, plan: Plan, drive: Bandwidth, layer: int) -> str:
    """Why a plan places a layer as it does, in one line."""
    kind, placement = profile.kind_of(layer), plan.placements[layer]
    moved = kind.nbytes - plan.kept_bytes(layer, kind)
    size, travel = readable_size(kind.nbytes), _milliseconds(moved / drive.write + moved / drive.read)
    kept = profile.timing(layer, KEEP)
    again = _milliseconds(profile.timing(layer, RECOMPUTE).backward - kept.backward)
    if placement is SELECTIVE:
        return _explain_selective(profile, drive, layer, moved)
    if placement is KEEP:
        cost = _milliseconds(profile.timing(layer, OFFLOAD).whole - kept.whole)
        return f"{size} have room; offloading takes {travel} of the drive and {cost} more compute"
    if placement is RECOMPUTE:
        return f"{again} of compute spare the drive {travel} for {size}"
    if placement is RECOMPUTE_OFFLOAD:
        return f"{again} of compute, and {readable_size(kind.input_bytes)} travel instead of {size}"
    what = f"{readable_size(moved)} of {size}" if moved < kind.nbytes else size
    return f"{what} take {travel} of the drive, and recomputing takes {again} of compute"


def _explain_selective(profile: StepProfile, drive: Bandwidth, layer: int, moved: int) -> str:
    kind = profile.kind_of(layer)
    spared = _milliseconds(kind.rebuilt_bytes / drive.write + kind.rebuilt_bytes / drive.read)
    again = profile.timing(layer, SELECTIVE).whole - profile.timing(layer, OFFLOAD).whole
    rebuilt, rest = readable_size(kind.rebuilt_bytes), readable_size(moved - kind.rebuilt_bytes)
    return (
        f"{_milliseconds(max(again, 0.0))} of compute spare the drive {spared} for {rebuilt}; {rest} travel"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class _Trial:
    plan: Plan
    outcome: Outcome
    score: Score


def _score_of(trial: _Trial) -> Score:
    return trial.score


class _Search:
    def __init__(self, profile: StepProfile, terms: _Terms, layers: _Layers) -> None:
        self.profile = profile
        self.terms = terms
        self.drive = terms.planned_drive
        self.limits = terms.limits
        self.layers = layers
        self.free = [layer for layer, placement in enumerate(layers.policy) if placement is AUTO]
        items = max(count_items(profile), 1)
        self.most_trials = min(MAX_TRIALS, MAX_ITEMS // items)
        self.most_filled = MAX_ITEMS // 4 // items
        self.score: Callable[[Outcome], Score] = getattr(self, f"_score_{terms.objective.value}")
        self.window = terms.limits.window  # of plans that say nothing else
        self.trials: dict[Plan, _Trial] = {}
        # Smaller windows would make every activation wait for the one before.
        largest = max((saved.nbytes for kind in profile.kinds for saved in kind.activations), default=0)
        self.least_window = 3 * largest

    @property
    def may_rebuild(self) -> bool:
        """Whether there is a layer that can be placed ``selective``."""
        return SELECTIVE in self.terms.choices and not self.layers.not_rebuilt.issuperset(self.free)

    def best(self, known: Sequence[Plan] = ()) -> Plan:
        """The best plan that is found, or known."""
        if self.terms.objective is Objective.MEMORY:
            self.window = self._best_window()
        self._try_simplest()
        others = self._best_others()
        if self.may_rebuild:
            self._try_family(SELECTIVE, OFFLOAD)
        for way in [way for way in self.terms.choices if way.recomputes] or [others]:
            self._try_family(way, others)
        self._improve(self._best_so_far())
        self._try_smaller_windows()
        return self._finished(known)

    def best_of(self, plans: Sequence[Plan]) -> Plan:
        """The best of some plans and of the simplest, its window fitted to the budget, the budget filled."""
        if self.terms.objective is Objective.MEMORY:
            self.window = plans[0].window
        for plan in plans:
            self._try(plan.placements, plan.kept, plan.window)
        self._try_simplest()
        if self.most_trials >= MANY_TRIALS:
            placements = [plans[0].placements[layer] for layer in self.free]
            others = SELECTIVE if SELECTIVE in placements else OFFLOAD
            self._best_kept(0, others, placements.count(KEEP), others)
        return self._finished(())

    def confirmed(self, plan: Plan, known: Sequence[Plan]) -> Plan:
        """A plan for a part of this step, made to fit all of it."""
        if self._play(dataclasses.replace(plan, prediction=None)).score[0]:
            self._try(plan.placements, plan.kept, plan.window)
            self._try_simplest()
        return self._chosen(self._best_so_far(), known)

    def predicted(self, plan: Plan) -> Plan:
        """A plan with what it will do on the drive as it is."""
        bare = dataclasses.replace(plan, prediction=None)
        trial = self.trials.get(bare) if self.drive == self.terms.drive else None
        outcome = simulate(self.profile, bare, self.terms.drive) if trial is None else trial.outcome
        return dataclasses.replace(bare, prediction=outcome.prediction)

    def _finished(self, known: Sequence[Plan]) -> Plan:
        found = self._best_so_far()
        if not self.terms.whole_layers:
            found = self._filled(found)
        return self._chosen(found, known)

    def _chosen(self, found: _Trial, known: Sequence[Plan]) -> Plan:
        """The best of a plan and those that are known, with what it is going to do."""
        others = (self._play(dataclasses.replace(plan, prediction=None)) for plan in known)
        best = min((found, *others), key=_score_of)
        if self.drive != self.terms.drive:
            best = self._sound(best)
        if self.hardly_frees(best.outcome, LEAST_FREED) or self._is_needlessly_slow(best.plan):
            best = self._play(self._kept())
        return self.predicted(best.plan)

    def _sound(self, best: _Trial) -> _Trial:
        """The best plan that is as good on the drive as it is: a faster one can mean more waiting.

        If none of those that come next is, it is the one of them that is best there.
        """
        scores: list[tuple[Score, _Trial]] = []
        for trial in sorted({best.plan: best, **self.trials}.values(), key=_score_of)[:SOUND]:
            score = self.score(simulate(self.profile, trial.plan, self.terms.drive))
            if score[:2] <= trial.score[:2]:
                return trial
            scores.append((score, trial))
        return min(scores, key=lambda pair: pair[0])[1]

    # ---- what is wanted --------------------------------------------------------------------------

    def _excess(self, outcome: Outcome) -> float:
        return max(outcome.peak_bytes - self.limits.planned, 0.0)

    def hardly_frees(self, outcome: Outcome, share: float) -> bool:
        """Whether memory is wanted first, there is room for everything, and nearly as much is used."""
        if self.terms.objective is not Objective.MEMORY or self.peak_if_kept > self.limits.planned:
            return False
        return self.peak_if_kept - outcome.peak_bytes < share * (self.peak_if_kept - self._least_peak)

    def _is_needlessly_slow(self, plan: Plan) -> bool:
        """Whether memory is wanted first, there is room for everything, and keeping it would be faster."""
        if self.terms.objective is not Objective.MEMORY or self.peak_if_kept > self.limits.planned:
            return False
        return self._slower(simulate(self.profile, plan, self.terms.drive)) > 0

    def _slower(self, outcome: Outcome) -> float:
        """The share by which a step takes longer than it may where memory is wanted first.

        A layer that offloads computes for longer than one that keeps, although nothing waits: hooks take the
        thread that trains, and transfers take cores and memory bandwidth. Where no layer was ever kept, the
        profile takes both to be equal, and only waits count.
        """
        allowed = (1 + NO_SLOWER) * self._seconds_if_kept
        return max(outcome.seconds / allowed - 1, 0.0) if allowed else 0.0

    @functools.cached_property
    def _seconds_if_kept(self) -> float:
        """The step time if all layers are kept that may be, on the drive as it is."""
        return simulate(self.profile, self._kept(), self.terms.drive).seconds

    @functools.cached_property
    def peak_if_kept(self) -> int:
        """The peak if all layers are kept that may be."""
        return self._play(self._kept()).outcome.peak_bytes

    @functools.cached_property
    def _least_peak(self) -> int:
        """The peak if all of them travelled, on drives that take no time."""
        plan = Plan(self._uniform(OFFLOAD), window=self.least_window)
        return simulate(self.profile, plan, self.drive.scaled(NO_TIME)).peak_bytes

    def _kept(self) -> Plan:
        return Plan(self._uniform(KEEP), window=self.limits.window)

    def _score_time(self, outcome: Outcome) -> Score:
        return self._excess(outcome), outcome.seconds, outcome.peak_bytes

    def _score_memory(self, outcome: Outcome) -> Score:
        # What is rebuilt spares the drive, so that more can travel; but who waits for it waits.
        lost = outcome.stall_seconds + outcome.rebuild_seconds
        waits = max(lost / outcome.seconds - NO_STALL, 0.0) if outcome.seconds else 0.0
        cost = max(waits, self._slower(outcome))
        return self._excess(outcome), cost, outcome.peak_bytes, outcome.written_bytes, outcome.seconds

    def _score_endurance(self, outcome: Outcome) -> Score:
        return self._excess(outcome), outcome.written_bytes, outcome.seconds

    # ---- trying a plan ---------------------------------------------------------------------------

    def _try(
        self,
        placements: tuple[Placement, ...],
        kept: tuple[frozenset[int], ...] = (),
        window: int | None = None,
    ) -> _Trial:
        """Plays a plan with the largest window that the budget leaves room for."""
        plan = Plan(placements, kept, self.window if window is None else window)
        trial = self._play(plan)
        excess = self._excess(trial.outcome)
        if not excess or TRAVELS.isdisjoint(placements):
            return trial
        largest = trial.outcome.peak_bytes if plan.window is None else plan.window
        if largest <= self.least_window:
            return trial
        smaller = self._play(dataclasses.replace(plan, window=max(int(largest - excess), self.least_window)))
        return smaller if not self._excess(smaller.outcome) else self._fitted(plan, smaller, largest)

    def _fitted(self, plan: Plan, found: _Trial, largest: int) -> _Trial:
        """Plays a plan with the smallest window, and with one larger by what the budget then has left.

        Windows that are large enough to be never full lower no peak. From the smallest on the peak grows with
        the window, and mostly no faster.
        """
        small = self._play(dataclasses.replace(plan, window=self.least_window))
        room = self.limits.planned - small.outcome.peak_bytes
        if room <= 0:
            return min(found, small, self._tight(plan), key=_score_of)
        larger = self._play(dataclasses.replace(plan, window=min(int(self.least_window + room), largest)))
        return small if self._excess(larger.outcome) else min(small, larger, key=_score_of)

    def _tight(self, plan: Plan) -> _Trial:
        """Plays a plan with windows in which activations wait for one another, where no other one fits."""
        tightest = self._play(dataclasses.replace(plan, window=self.least_window // TIGHT[-1]))
        if self._excess(tightest.outcome):
            return tightest
        tight = (dataclasses.replace(plan, window=self.least_window // part) for part in TIGHT[:-1])
        return min((tightest, *map(self._play, tight)), key=_score_of)

    def _try_simplest(self) -> None:
        for placement in self.terms.choices:
            if placement is SELECTIVE and not self.may_rebuild:
                continue
            if self.most_filled or placement in {KEEP, RECOMPUTE}:  # those take next to no time to play
                self._try(self._uniform(placement))

    def _best_window(self) -> int | None:
        """The window with which most is freed: a large one frees nothing of a step that fits in it.

        After that of the user come those from the smallest on, until two are worse than the best so far.
        """
        scores, worse = dict[int | None, Score](), 0
        for window in (self.limits.window, *self._smaller_windows()):
            self.window = window
            scores[window] = self._best_kept(0, OFFLOAD, None)[0].score
            worse = worse + 1 if scores[window] > min(scores.values()) else 0
            if worse == 2 or len(self.trials) > self.most_trials // 3:
                break
        return min(scores, key=lambda window: scores[window])

    def _smaller_windows(self) -> Iterator[int]:
        most = min(self.peak_if_kept, self.limits.window or self.peak_if_kept)
        size = max(self.least_window, 1)
        while size < most:
            yield size
            size *= 2

    def _try_smaller_windows(self) -> None:
        """Plays the best plans with smaller windows: sometimes less in flight is better."""
        if self.most_filled < BEST * len(WINDOWS):
            return
        for trial in sorted(self.trials.values(), key=_score_of)[:BEST]:
            window = trial.plan.window or trial.outcome.peak_bytes
            smaller = {int(share * window) for share in WINDOWS if share * window >= self.least_window}
            for size in sorted(smaller | {min(self.least_window, window)}):
                self._play(dataclasses.replace(trial.plan, window=size))

    def _uniform(self, placement: Placement) -> tuple[Placement, ...]:
        """All layers that may be get this placement, the others are offloaded."""
        return tuple(
            wanted if wanted is not AUTO else placement if self.layers.allows(layer, placement) else OFFLOAD
            for layer, wanted in enumerate(self.layers.policy)
        )

    def _best_so_far(self) -> _Trial:
        return min(self.trials.values(), key=_score_of)

    def _play(self, plan: Plan) -> _Trial:
        if plan not in self.trials:
            outcome = simulate(self.profile, plan, self.drive)
            self.trials[plan] = _Trial(plan, outcome, self.score(outcome))
        return self.trials[plan]

    # ---- two numbers -----------------------------------------------------------------------------

    def _best_others(self) -> Placement:
        """What layers had better be that are neither kept nor recomputed: offloaded, or rebuilt in part."""
        if not self.may_rebuild:
            return OFFLOAD
        return min((OFFLOAD, SELECTIVE), key=lambda way: self._best_kept(0, way, None, way)[0].score)

    def _try_family(self, way: Placement, others: Placement) -> None:
        """Finds the best number of kept layers for some numbers of those that spare the drive, ever closer.

        Args:
            way: How they spare it; the same as ``others`` if none does.
            others: What is neither kept nor one of those.
        """
        most = len(self.free) if way is not others else 0
        numbers = sorted({round(most * share / 8) for share in range(9)})
        kept: int | None = None
        while True:
            found: dict[int, _Trial] = {}
            for number in numbers:
                found[number], kept = self._best_kept(number, way, kept, others)
            best = min(found, key=lambda number: found[number].score)
            place = numbers.index(best)
            near = numbers[max(place - 1, 0) : place + 2]
            finer = sorted({*near, *((a + b) // 2 for a, b in itertools.pairwise(near))})
            if finer == near or len(self.trials) >= self.most_trials:
                return
            numbers = finer

    def _best_kept(
        self, sparing: int, way: Placement, near: int | None, others: Placement = OFFLOAD
    ) -> tuple[_Trial, int]:
        """The best number of kept layers, by ever smaller steps: the plan, and the number.

        Args:
            sparing: How many layers spare the drive.
            way: How.
            near: Where to begin: what was best for nearly as many; ``None`` for in the middle.
            others: What is neither kept nor one of those.
        """
        most = len(self.free) - sparing
        kept = most // 2 if near is None else min(near, most)
        step = max(most // (4 if near is None else 8), 1)
        found = self._try(self._spread(kept, sparing, way, others))
        while True:
            near_by = [other for other in (kept - step, kept + step) if 0 <= other <= most]
            trials = [(self._try(self._spread(other, sparing, way, others)), other) for other in near_by]
            trial, other = min(trials, key=lambda pair: pair[0].score, default=(found, kept))
            if trial.score < found.score:
                found, kept = trial, other
            elif step > 1 and len(self.trials) < self.most_trials:
                step //= 2
            else:
                return found, kept

    def _spread(self, kept: int, sparing: int, way: Placement, others: Placement) -> tuple[Placement, ...]:
        """The last ones kept, among the others those that spare the drive spread evenly."""
        placements = list(self._uniform(others))
        first = self.free[: len(self.free) - kept]
        for layer in self.free[len(first) :]:
            placements[layer] = KEEP
        for position, layer in enumerate(first):
            is_one = (position + 1) * sparing // len(first) > position * sparing // len(first)
            if is_one and self.layers.allows(layer, way):
                placements[layer] = way
        return tuple(placements)

    # ---- single changes --------------------------------------------------------------------------

    def _improve(self, found: _Trial) -> None:
        """Changes one layer after the other, until no change helps or enough was tried."""
        changed = True
        while changed:
            changed = False
            for layer in self.free:
                for placement in self.terms.choices:
                    if len(self.trials) >= self.most_trials:
                        return
                    placements = list(found.plan.placements)
                    if placements[layer] is placement or not self.layers.allows(layer, placement):
                        continue
                    placements[layer] = placement
                    trial = self._try(tuple(placements))
                    if trial.score < found.score:
                        found, changed = trial, True

    def _filled(self, found: _Trial) -> _Trial:
        """Keeps single activations of the last layer that travels, those that backward needs first."""
        if self.limits.budget is None or found.score[0]:
            return found
        layers = [layer for layer in self.free if found.plan.placements[layer] in {OFFLOAD, SELECTIVE}]
        if not layers:
            return found
        layer = layers[-1]
        activations = self.profile.kind_of(layer).activations
        is_selective = found.plan.placements[layer] is SELECTIVE
        numbers = sorted(
            (number for number, saved in enumerate(activations) if not (is_selective and saved.rebuilt)),
            key=lambda number: activations[number].until,
        )
        for count in range(1, min(len(numbers), self.most_filled)):
            kept = [frozenset[int]()] * len(self.profile.layers)
            kept[layer] = frozenset(numbers[:count])
            trial = self._try(found.plan.placements, tuple(kept))
            if trial.score[0]:
                return found
            if trial.score < found.score:
                found = trial
        return found
