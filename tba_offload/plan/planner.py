"""Finds the placements of a step: which layers keep, offload or recompute their activations.

The planner tries plans on the simulator, so a plan is as good as the profile and the rates it is made from,
and every plan comes with what it is expected to do. It is pure: the same arguments give the same plan.

Which plans are tried. Layers that are kept are the last ones: what backward needs first is not worth a round
trip. Among the others the layers that are recomputed are spread evenly, because each gives the drive time for
those between. So two numbers describe a plan, how many layers are kept and how many recomputed; the best pair
is searched for first. After that single layers change their placement as long as that helps, and at last
single activations stay where the budget has room for them.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.plan.plan import Plan
from tba_offload.plan.simulator import Outcome, simulate
from tba_offload.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.profile import StepProfile

KEEP, OFFLOAD, RECOMPUTE, AUTO = Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.AUTO

NO_STALL = 0.01
"""Waiting for less than this share of the step counts as not waiting."""

MARGIN = 0.02
"""This share of the budget is left free: a prediction is not exact, and a budget is hard."""

MAX_TRIALS = 600
"""Plans that are tried on the simulator, at most."""

MAX_ITEMS = 400_000
"""Activations that are simulated in all trials together: a second or two. Then the best so far will do."""

Score = tuple[float, ...]
"""Less is better."""


class Objective(enum.StrEnum):
    """What is wanted of a plan."""

    TIME = "time"
    """The least step time under the budget."""

    MEMORY = "memory"
    """The lowest peak at which compute waits for nothing."""

    ENDURANCE = "endurance"
    """The fewest written bytes under the budget."""


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


def make_plan(
    profile: StepProfile,
    drive: Bandwidth,
    limits: Limits,
    *,
    policy: Sequence[Placement],
    choices: Sequence[Placement] = (KEEP, OFFLOAD, RECOMPUTE),
    objective: Objective | None = None,
    whole_layers: bool = False,
    not_recomputed: frozenset[int] = frozenset(),
) -> Plan:
    """The best plan that is found.

    Args:
        profile: The step.
        drive: How fast offloaded bytes travel.
        limits: What the plan must keep to. If none does, it is the one with the lowest peak.
        policy: For each layer, what the user wants; the planner decides on those that are ``auto``.
        choices: What the planner may decide for.
        objective: What is wanted; by default ``time`` where there is a budget and ``memory`` elsewhere.
        not_recomputed: Layers that must not be recomputed unless the policy says so.
        whole_layers: Whether all activations of a layer get the same placement, as in a policy file.

    Raises:
        ValueError: Policy and profile have different numbers of layers.
    """
    if len(policy) != len(profile.layers):
        raise ValueError(f"{len(policy)} placements for a profile of {len(profile.layers)} layers")
    if objective is None:
        objective = Objective.MEMORY if limits.budget is None else Objective.TIME
    if objective is Objective.MEMORY:  # who wants memory at no cost in time wants no recomputation
        choices = [placement for placement in choices if placement is not RECOMPUTE]
    search = _Search(profile, drive, limits, tuple(policy), tuple(choices), objective, not_recomputed)
    return search.best(whole_layers=whole_layers)


def explain(profile: StepProfile, plan: Plan, drive: Bandwidth, layer: int) -> str:
    """Why a plan places a layer as it does, in one line."""
    kind, placement = profile.kind_of(layer), plan.placements[layer]
    kept = _kept_of(plan, layer)
    moved = sum(saved.nbytes for number, saved in enumerate(kind.activations) if number not in kept)
    seconds = moved / drive.write + moved / drive.read
    size = f"{kind.nbytes / 2**20:.1f} MiB"
    again = profile.timing(layer, RECOMPUTE).backward - profile.timing(layer, KEEP).backward
    if placement is KEEP:
        return f"{size} have room, and need no {seconds * 1e3:.1f} ms of the drive"
    if placement is RECOMPUTE:
        return f"{again * 1e3:.1f} ms of compute spare the drive {seconds * 1e3:.1f} ms for {size}"
    part = f"{moved / 2**20:.1f} of {size}" if moved < kind.nbytes else size
    return f"{part} are {seconds * 1e3:.1f} ms of the drive, and recomputing {again * 1e3:.1f} ms of compute"


def _kept_of(plan: Plan, layer: int) -> frozenset[int]:
    return plan.kept[layer] if plan.kept else frozenset()


@dataclass(frozen=True, slots=True)
class _Trial:
    plan: Plan
    outcome: Outcome
    score: Score


class _Search:
    def __init__(
        self,
        profile: StepProfile,
        drive: Bandwidth,
        limits: Limits,
        policy: tuple[Placement, ...],
        choices: tuple[Placement, ...],
        objective: Objective,
        not_recomputed: frozenset[int],
    ) -> None:
        self.profile = profile
        self.drive = drive
        self.limits = limits
        self.policy = policy
        self.free = [layer for layer, placement in enumerate(policy) if placement is AUTO]
        self.choices = choices
        self.not_recomputed = not_recomputed
        items = sum(len(profile.kind_of(slot.layer).activations) for slot in profile.slots)
        self.most_trials = min(MAX_TRIALS, max(MAX_ITEMS // max(items, 1), 12))
        self.score: Callable[[Outcome], Score] = getattr(self, f"_score_{objective.value}")
        self.trials: dict[Plan, _Trial] = {}
        # Smaller windows would make every activation wait for the one before.
        largest = max((saved.nbytes for kind in profile.kinds for saved in kind.activations), default=0)
        self.least_window = 3 * largest

    def best(self, *, whole_layers: bool) -> Plan:
        found = min(self._family(), key=lambda trial: trial.score)
        self._improved(found)
        found = min(self.trials.values(), key=lambda trial: trial.score)
        if not whole_layers:
            found = self._filled(found)
        return dataclasses.replace(found.plan, prediction=found.outcome.prediction)

    # ---- what is wanted --------------------------------------------------------------------------

    def _excess(self, outcome: Outcome) -> float:
        return max(outcome.peak_bytes - self.limits.planned, 0.0)

    def _score_time(self, outcome: Outcome) -> Score:
        return self._excess(outcome), outcome.seconds, outcome.peak_bytes

    def _score_memory(self, outcome: Outcome) -> Score:
        waits = max(outcome.stall_seconds / outcome.seconds - NO_STALL, 0.0) if outcome.seconds else 0.0
        return self._excess(outcome), waits, outcome.peak_bytes, outcome.seconds

    def _score_endurance(self, outcome: Outcome) -> Score:
        return self._excess(outcome), outcome.written_bytes, outcome.seconds

    # ---- trying a plan ---------------------------------------------------------------------------

    def _try(self, placements: tuple[Placement, ...], kept: tuple[frozenset[int], ...] = ()) -> _Trial:
        """Plays a plan with the largest window that the budget leaves room for."""
        trial = self._play(Plan(placements, kept, self.limits.window))
        for _ in range(3):
            excess = self._excess(trial.outcome)
            window = trial.plan.window
            if not excess or OFFLOAD not in placements:
                return trial
            if window is None:
                window = trial.outcome.peak_bytes
            smaller = max(int(window - excess), self.least_window)
            if smaller >= window:
                return trial
            trial = self._play(Plan(placements, kept, smaller))
        return trial

    def _play(self, plan: Plan) -> _Trial:
        if plan not in self.trials:
            outcome = simulate(self.profile, plan, self.drive)
            self.trials[plan] = _Trial(plan, outcome, self.score(outcome))
        return self.trials[plan]

    # ---- two numbers -----------------------------------------------------------------------------

    def _family(self) -> Iterator[_Trial]:
        """The best number of kept layers for some numbers of recomputed ones, ever closer to the best."""
        most = len(self.free) if RECOMPUTE in self.choices else 0
        numbers = sorted({round(most * share / 8) for share in range(9)})
        while True:
            found = {number: self._best_kept(number) for number in numbers}
            yield from found.values()
            best = min(found, key=lambda number: found[number].score)
            place = numbers.index(best)
            near = numbers[max(place - 1, 0) : place + 2]
            finer = sorted({*near, *((a + b) // 2 for a, b in itertools.pairwise(near))})
            if finer == near or len(self.trials) >= self.most_trials:
                return
            numbers = finer

    def _best_kept(self, recomputed: int) -> _Trial:
        """The best number of kept layers: by halves if more are better as long as they fit, else all."""
        low, high = 0, len(self.free) - recomputed
        trials = [self._try(self._spread(low, recomputed)), self._try(self._spread(high, recomputed))]
        while high - low > 1:
            middle = (low + high) // 2
            trial = self._try(self._spread(middle, recomputed))
            trials.append(trial)
            if trial.score < min(trials[:-1], key=lambda each: each.score).score or not trial.score[0]:
                low = middle
            else:
                high = middle
        return min(trials, key=lambda trial: trial.score)

    def _spread(self, kept: int, recomputed: int) -> tuple[Placement, ...]:
        """The last ones kept, among the others those that are recomputed spread evenly."""
        placements = [OFFLOAD if placement is AUTO else placement for placement in self.policy]
        others = self.free[: len(self.free) - kept]
        for layer in self.free[len(others) :]:
            placements[layer] = KEEP
        for position, layer in enumerate(others):
            is_one = (position + 1) * recomputed // len(others) > position * recomputed // len(others)
            if is_one and layer not in self.not_recomputed:
                placements[layer] = RECOMPUTE
        return tuple(placements)

    # ---- single changes --------------------------------------------------------------------------

    def _improved(self, found: _Trial) -> None:
        """Changes one layer after the other, until no change helps or enough was tried."""
        changed = True
        while changed:
            changed = False
            for layer in self.free:
                for placement in self.choices:
                    if len(self.trials) >= self.most_trials:
                        return
                    placements = list(found.plan.placements)
                    if placements[layer] is placement:
                        continue
                    if placement is RECOMPUTE and layer in self.not_recomputed:
                        continue
                    placements[layer] = placement
                    trial = self._try(tuple(placements))
                    if trial.score < found.score:
                        found, changed = trial, True

    def _filled(self, found: _Trial) -> _Trial:
        """Keeps single activations of the last layer that is offloaded, those that backward needs first."""
        if self.limits.budget is None or found.score[0]:
            return found
        layers = [layer for layer in self.free if found.plan.placements[layer] is OFFLOAD]
        if not layers:
            return found
        layer = layers[-1]
        activations = self.profile.kind_of(layer).activations
        numbers = sorted(range(len(activations)), key=lambda number: activations[number].until)
        for count in range(1, len(numbers)):
            if len(self.trials) >= self.most_trials + len(numbers):
                break
            kept = [frozenset[int]()] * len(self.profile.layers)
            kept[layer] = frozenset(numbers[:count])
            trial = self._try(found.plan.placements, tuple(kept))
            if trial.score[0]:
                break
            if trial.score < found.score:
                found = trial
        return found
