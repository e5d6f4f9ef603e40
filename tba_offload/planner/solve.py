"""Solver that simulates candidate plans and returns the best plan.

A candidate keeps the last layers, because backward needs the last layers first. Some of the other layers are
recomputed or partly rebuilt (*sparing* layers). Sparing layers are spread evenly, because the drive transfers
another layer while a sparing layer runs. All remaining layers are offloaded. The solver varies the
number of kept layers and the number of sparing layers, first on a coarse grid and then on finer grids.
Each candidate gets the largest in-flight window with which the peak stays within the budget. The predicted
peak assumes that the window is full when other memory use is highest.

Equal inputs give equal plans.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from tba_offload.config.policy import Objective, Placement
from tba_offload.planner.model import Limits, Plan, Prediction
from tba_offload.planner.play import play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tba_offload.planner.model import Bandwidth, Saved, StepProfile

KEEP, OFFLOAD, REMAT = Placement.KEEP, Placement.OFFLOAD, Placement.OFFLOAD_REMAT
WAYS = (Placement.RECOMPUTE, Placement.RECOMPUTE_OFFLOAD, Placement.RECOMPUTE_EXCEPT_ATTENTION, REMAT)
"""Placements that spare the drive, because they offload fewer bytes than ``offload``."""

GRID = 6
"""Number of intervals of the first search grid."""

MOST_PLAYS, LEAST_PLAYS, MOST_PLAYED = 500, 40, 200_000
"""Limits of the search: the largest and smallest number of simulated plans, and the largest number of
simulated activations. With these limits, a search takes about half a second."""

MOST_ITEMS = 1500
"""Largest number of activations in a simulated step. In a larger step, neighbouring activations are merged,
so that a simulation takes milliseconds."""

UNMEASURED = 0.05
"""Fraction of the budget that a plan leaves free until a similar step is measured."""

FULLER = 1.1
"""Safety factor for the bytes of a full in-flight window, because these bytes are hard to predict."""

NO_WAIT, NO_SLOWER = 0.01, 0.02
"""For the objective ``memory``: the largest accepted wait and slowdown, as fractions of a step."""

Score = tuple[float, ...]
"""Score of a plan: bytes over the limits, seconds, written bytes, peak. A smaller score is better."""


@dataclass(frozen=True)
class Case:
    """Input of the solver.

    Attributes:
        profile: Profile of the step.
        bandwidth: Rates of the store.
        limits: Limits that the plan must keep.
        policy: Placement of each layer in the policy. The solver chooses placements for ``auto`` layers.
        objective: Goal of the solver: shortest step, or lowest peak without a longer step.
        not_recomputed: ``auto`` layers that must not be recomputed.
        highest: Largest activation peak in bytes that a plan may have, in addition to ``limits``.
    """

    profile: StepProfile
    bandwidth: Bandwidth
    limits: Limits
    policy: tuple[Placement, ...]
    objective: Objective = Objective.TIME
    not_recomputed: frozenset[int] = frozenset()
    highest: float = math.inf

    @cached_property
    def keep(self) -> Prediction:
        """Prediction for the plan that keeps all ``auto`` layers."""
        return self.played(self.uniform(KEEP))

    def allows(self, layer: int, way: Placement) -> bool:
        """Return True if an ``auto`` layer may have the placement."""
        kind = self.profile.kind_of(layer)
        if way.recomputes and (self.objective is Objective.MEMORY or layer in self.not_recomputed):
            return False
        if way is Placement.RECOMPUTE_EXCEPT_ATTENTION:
            return bool(kind.attention_bytes)
        # offload-remat must write fewer bytes than offload.
        return not way.rebuilds or kind.rebuilt_bytes > sum(saved.nbytes for saved in kind.sources)

    @cached_property
    def sparing(self) -> list[Placement]:
        """Placements of :data:`WAYS` that at least one ``auto`` layer may have."""
        free = [layer for layer, wanted in enumerate(self.policy) if wanted is Placement.AUTO]
        return [way for way in WAYS if any(self.allows(layer, way) for layer in free)]

    def place(self, choose: Callable[[int], Placement]) -> tuple[Placement, ...]:
        """Return the placement of each layer.

        An ``auto`` layer gets the placement ``choose(layer)`` if this placement is allowed, else ``offload``.
        """

        def placed(layer: int, wanted: Placement) -> Placement:
            if wanted is not Placement.AUTO:
                return wanted
            return way if self.allows(layer, way := choose(layer)) else OFFLOAD

        return tuple(placed(*pair) for pair in enumerate(self.policy))

    def uniform(self, way: Placement) -> Plan:
        """Return the plan that gives all ``auto`` layers one placement."""
        return Plan(self.place(lambda _: way), window=self.limits.window)

    @property
    def full_planned(self) -> float:
        """Largest peak in bytes that a plan may have while the in-flight window is full.

        The margin is larger than for other peaks, because the peak with a full window is not measured.
        """
        return math.inf if self.limits.budget is None else (1 - UNMEASURED) * self.limits.budget

    def score(self, plan: Plan, found: Prediction) -> Score:
        """Return the score of a simulated plan."""
        full = found.peak_bytes  # the peak with a full window, because the rates of drives vary
        if plan.window is not None:
            full = max(full, min(found.held_bytes + int(FULLER * plan.window), self.keep.peak_bytes))
        over = max(found.peak_bytes - self.limits.planned, full - self.full_planned, 0.0)
        over = max(over, found.activation_peak - self.highest)
        over += max(found.sent_bytes - self.limits.planned_in(found.seconds), 0.0)
        if self.objective is not Objective.MEMORY:
            return over, round(found.seconds, 9), found.sent_bytes, found.peak_bytes
        waits = max(found.stall_seconds / max(found.seconds, 1e-9) - NO_WAIT, 0.0)
        slower = max(found.seconds / max((1 + NO_SLOWER) * self.keep.seconds, 1e-9) - 1, 0.0)
        return over, max(waits, slower), found.peak_bytes, found.sent_bytes

    def played(self, plan: Plan) -> Prediction:
        """Return the prediction for a step under a plan."""
        return play(self.profile, plan, self.bandwidth)

    def predicted(self, plan: Plan) -> Plan:
        """Return the plan with its prediction."""
        return replace(plan, prediction=self.played(plan))

    def fits(self, plan: Plan) -> bool:
        """Return True if a plan stays within the limits, even if a slow drive fills the window."""
        return not self.score(plan, self.played(plan))[0]


def solve(case: Case) -> Plan:
    """Return the best plan, with its prediction. If no plan fits the limits, return the nearest plan."""
    found = _Search(replace(case, profile=coarse(case.profile))).best()
    plan = case.predicted(found)
    if case.fits(found) or found.window is None:
        return plan
    narrow = _Search(case).fitted(found.placements)  # merged activations can hide a short peak
    return case.predicted(narrow)


def best_plain(case: Case, other: Plan, *, recomputes: bool) -> Plan | None:
    """Return the fastest uniform plan within the limits, except ``other``; ``None`` if there is none.

    A uniform plan keeps as many of the last layers as possible and gives all other layers one placement.

    Args:
        case: Input of the solver.
        other: Plan that is excluded.
        recomputes: Whether to prefer plans that recompute layers.
    """
    search = _Search(replace(case, profile=coarse(case.profile)))
    again = [way for way in case.sparing if way.recomputes and recomputes]
    for ways in (again, [OFFLOAD, *case.sparing]):
        others = [plan for plan in map(search.plain, ways) if plan.placements != other.placements]
        if others:
            plan = _Search(case).fitted(min(others, key=lambda plan: search.played(plan)[0]).placements)
            if case.fits(plan):
                return case.predicted(plan)
    return None


class _Search:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._found: dict[Plan, tuple[Score, Prediction]] = {}
        self._free = [layer for layer, wanted in enumerate(case.policy) if wanted is Placement.AUTO]
        items = sum(1 + len(case.profile.kind_of(slot.layer).activations) for slot in case.profile.slots) // 2
        self._most_plays = max(min(MOST_PLAYS, MOST_PLAYED // max(items, 1)), LEAST_PLAYS)

    def played(self, plan: Plan) -> tuple[Score, Prediction]:
        if plan not in self._found:
            found = self._case.played(plan)
            self._found[plan] = self._case.score(plan, found), found
        return self._found[plan]

    def fitted(self, placements: tuple[Placement, ...]) -> Plan:
        """Return the plan with the largest in-flight window for which the peak stays within the budget."""
        limits, largest = self._case.limits, self._case.profile.largest_bytes
        plan = Plan(placements, window=limits.window)
        for least in (largest, largest // 4):  # the smallest window holds one activation at a time
            (over, *_), found = self.played(plan)
            if not over or not any(way.offloads for way in placements):
                break
            highest = self._case.highest - self._case.profile.gradient_bytes

            room = min(self._case.full_planned, highest) - found.held_bytes
            window = min(room / FULLER, found.peak_bytes if plan.window is None else plan.window)
            smaller = Plan(placements, window=max(int(window), least, 1))
            if self.played(smaller)[0] < self.played(plan)[0]:
                plan = smaller
        return plan

    def plain(self, way: Placement) -> Plan:
        order = self._free[::-1]
        plans = [self._spread(order, kept, len(order) - kept, way, way) for kept in range(len(order) + 1)]
        fitting = bisect.bisect(plans, 0.0, key=lambda placements: self._try(placements)[0])
        return self.fitted(plans[max(fitting - 1, 0)])

    def best(self) -> Plan:
        others = min((OFFLOAD, REMAT), key=lambda way: self._try(self._case.place(lambda _: way)))
        orders = [self._free[::-1]]
        if len(self._case.profile.kinds) > 1:  # which kind is kept first is more important than the position
            nbytes = {layer: self._case.profile.kind_of(layer).nbytes for layer in self._free}
            orders += [sorted(orders[0], key=nbytes.__getitem__, reverse=first) for first in (False, True)]
        for order in orders:
            for way in [way for way in self._case.sparing if way is not others] or [OFFLOAD]:
                self._two_numbers(order, way, others)
        self._shares()
        if self._case.objective is Objective.MEMORY:
            self._smaller_windows()
        return min(self._found, key=lambda plan: self._found[plan][0])

    def _try(self, placements: tuple[Placement, ...]) -> Score:
        return self.played(self.fitted(placements))[0]

    def _spread(
        self, order: Sequence[int], kept: int, sparing: int, way: Placement, others: Placement
    ) -> tuple[Placement, ...]:
        """Return placements that keep the first ``kept`` layers of ``order``.

        ``sparing`` of the other layers, spread evenly, get the placement ``way``. All remaining layers get
        the placement ``others``.
        """
        rest = sorted(order[kept:])
        chosen = dict.fromkeys(order[:kept], KEEP)
        for place, layer in enumerate(rest):
            is_next = (place + 1) * sparing // len(rest) > place * sparing // len(rest)
            chosen[layer] = way if is_next else others
        return self._case.place(chosen.__getitem__)

    def _two_numbers(self, order: Sequence[int], way: Placement, others: Placement) -> None:
        count = len(order)
        step = max(count // GRID, 1)
        points = {(kept, sparing) for kept in _grid(count, step) for sparing in _grid(count - kept, step)}
        while True:
            scores = {point: self._try(self._spread(order, *point, way, others)) for point in sorted(points)}
            kept, sparing = min(scores, key=lambda point: scores[point])
            if step == 1 or len(self._found) > self._most_plays:
                return
            step //= 2
            near = [(kept + a, sparing + b) for a in (-step, 0, step) for b in (-step, 0, step)]
            points = {(a, b) for a, b in near if a >= 0 and b >= 0 and a + b <= count}

    def _shares(self) -> None:
        """Try plans that keep the last layers, and offload a percentage of the bytes of all other layers."""
        count = len(self._free)
        for percent in range(90, 0, -10):
            for kept in _grid(count, max(count // GRID, 1)):
                if len(self._found) <= self._most_plays:
                    self._try(
                        self._spread(self._free[::-1], kept, 0, OFFLOAD, Placement(f"offload-{percent}%"))
                    )

    def _smaller_windows(self) -> None:
        best = min(self._found, key=lambda plan: self._found[plan][0])
        window = best.window or self.played(best)[1].peak_bytes
        while window > 6 * self._case.profile.largest_bytes:
            window //= 2
            self.played(replace(best, window=window))


def _grid(most: int, step: int) -> Iterable[int]:
    return sorted({*range(0, most + 1, step), most})


def coarse(profile: StepProfile) -> StepProfile:
    """Return a similar profile with at most about :data:`MOST_ITEMS` activations."""
    profile = _with_few_micro_batches(profile)
    runs = sum(not slot.backward for slot in profile.slots)
    most = max(MOST_ITEMS // max(runs, 1), 1)
    if all(len(kind.activations) <= most for kind in profile.kinds):
        return profile
    kinds = (dataclasses.replace(kind, activations=_merged(kind.activations, most)) for kind in profile.kinds)
    return dataclasses.replace(profile, kinds=tuple(kinds))


def _with_few_micro_batches(profile: StepProfile) -> StepProfile:
    """Return the profile of only those micro-batches that run near the time of the largest overlap."""
    places = list(enumerate(slot.micro_batch for slot in profile.slots))
    last = {micro_batch: place for place, micro_batch in places}
    first = {micro_batch: place for place, micro_batch in reversed(places)}
    order = sorted(first, key=first.__getitem__)
    overlaps = ([n for n, one in enumerate(order) if first[one] <= first[new] <= last[one]] for new in order)
    most = max(overlaps, key=len)
    near = set(order[max(most[0] - 2, 0) : most[-1] + 3])
    slots = tuple(slot for slot in profile.slots if slot.micro_batch in near)
    return profile if len(near) == len(order) else dataclasses.replace(profile, slots=slots)


def _merged(activations: Sequence[Saved], most: int) -> tuple[Saved, ...]:
    """Merge neighbouring activations, but never a rebuilt activation with an offloaded activation.

    A merged activation is saved when the last of its activations is saved, and used when the first is used.
    """
    size = -(-len(activations) // most)
    alike = [list(run) for _, run in itertools.groupby(activations, key=lambda saved: saved.rebuilt)]
    groups = [run[first : first + size] for run in alike for first in range(0, len(run), size)]
    return tuple(
        group[-1]._replace(
            nbytes=sum(saved.nbytes for saved in group), until=min(saved.until for saved in group)
        )
        for group in groups
    )
