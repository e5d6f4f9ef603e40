"""Controller that chooses placements for ``auto`` layers between training steps.

The controller has three states: LEARN, TRY and HOLD.

LEARN takes three steps. The first step offloads every ``auto`` layer, with a small in-flight window. In the
last two steps of LEARN, a quarter of the layers is kept, a quarter is recomputed, and a quarter has the
placement ``offload-remat``. With a small budget, the controller offloads more layers.

TRY alternates between the best plan and the best uniform plan. A uniform plan gives one placement to all
layers that are not kept. At the end of TRY, the plan with the faster steps wins. If the measured times
predict a third, faster plan, TRY also measures the third plan.

HOLD repeats the winning plan. If the times of three consecutive steps differ by 10% from the first steps of
HOLD, or if a transfer rate of the store changes by a third, the controller makes a new plan.

If a step is larger than all earlier steps, the controller returns to LEARN. If a step exceeds the budget, the
controller makes a new plan with a smaller budget.

If the user sets no limit, the budget is the free memory of the device, and a new plan may have at most twice
the highest activation peak of the earlier steps.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tba_offload.config.policy import Objective, Placement
from tba_offload.errors import warn
from tba_offload.formatting import readable_size, significant
from tba_offload.planner.describe import describe, over_budget, over_writes
from tba_offload.planner.measure import Rates, Sizes, profile_of, with_beside
from tba_offload.planner.model import Bandwidth, Limits, Plan
from tba_offload.planner.play import play
from tba_offload.planner.solve import UNMEASURED, Case, best_plain, solve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.planner.measure import LayerKey, StepObservation
    from tba_offload.planner.model import Prediction, StepProfile
    from tba_offload.report.log import StepRecord

LEARNING = 3
"""Number of measured steps before the first plan."""

WARM_UP = 1
"""Number of first steps whose times are ignored, because files still grow and caches are empty."""

FIRST_WINDOW = 16
"""In the first steps, the in-flight window is the budget divided by this number. The window is small,
because the memory use without activations is not yet measured."""

ROUNDS, ROUNDS_ON_HOST = 2, 3
"""Number of steps in which TRY measures each plan on an accelerator, and the number on a CPU. The fastest
step of each plan counts."""

OFF, OFF_STEPS, OTHER_RATE = 0.1, 3, 1 / 3
"""Thresholds for a new plan: relative change of step times, number of consecutive steps with this change, and
relative change of a transfer rate of the store."""

ROOM_CHANGED = "the memory for activations has changed"

WORTH_IT = 0.02
"""Smallest relative gain for which a new plan replaces the current plan. The planner also ignores I/O waits
below this fraction of a step."""

GROWTH, GROWTH_TO_PLAN = 2, 4 / 3
"""Factors for the growth of plans if the user set no limit.

The activation peak of a plan may be at most ``GROWTH`` times the highest activation peak of the earlier
steps. When this limit has grown by the factor ``GROWTH_TO_PLAN``, the controller makes a new plan.
"""

AGREE_EVERY = 8
"""Number of steps after which ranks that share layers agree on placements again. Ranks also agree after each
of the first 16 steps."""


Agree = Callable[[dict[str, Placement], tuple[float, float]], dict[str, Placement]]
"""Function with which ranks agree on placements.

The arguments are the placements that this rank proposes, by layer name, and the result of
:meth:`Controller.need_of`. The function returns the agreed placements by layer name.
"""


@dataclass(frozen=True)
class Task:
    """Settings from which the controller makes plans.

    Attributes:
        policy: Placement of each layer in the policy.
        layers: Model chunk and module name of each layer.
        limits: Limits for all plans.
        objective: Goal of plans: shortest step, or lowest peak without a longer step.
        agree: Function with which ranks that share layers agree which layers to recompute; ``None`` if no
            other rank has these layers.
    """

    policy: tuple[Placement, ...]
    layers: tuple[LayerKey, ...]
    limits: Limits
    objective: Objective = Objective.TIME
    agree: Agree | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Module name of each layer."""
        return tuple(name for _, name in self.layers)

    @property
    def decides(self) -> bool:
        """Whether any layer is ``auto``."""
        return Placement.AUTO in self.policy

    @property
    def keeps_all(self) -> bool:
        """Whether the policy keeps every layer."""
        return set(self.policy) == {Placement.KEEP}

    @property
    def may_recompute(self) -> bool:
        """Whether the planner may choose to recompute a layer."""
        return self.decides and self.objective is not Objective.MEMORY

    @property
    def has_budget(self) -> bool:
        """Whether a budget limits the plans."""
        return self.limits.budget is not None and self.decides

    def first(self) -> Plan:
        """Return the plan for the first steps."""
        window, budget = self.limits.window, self.limits.budget
        if budget is not None and self.has_budget:
            window = min(budget // FIRST_WINDOW, budget if window is None else window)
        return Plan(self.policy, window=window)


class State(enum.Enum):
    """States of the controller."""

    LEARN = "learn"
    TRY = "try"
    HOLD = "hold"


class Controller:
    """Controller that makes the plans of one session.

    Args:
        task: Settings from which the controller makes plans.

    Attributes:
        task: Settings from which the controller makes plans.
        state: State of the controller.
        steps: Number of finished steps.
        profile: Profile of the measured steps; ``None`` until a step is measured.
        rates: Measured rates of the store.
        sizes: Sizes of the layers' inputs in all steps.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.rates, self.sizes = Rates(), Sizes()
        self.steps = 0
        self.profile: StepProfile | None = None
        self._not_recomputed: frozenset[int] = frozenset()
        self._reported: Plan | None = None
        self._warned: set[str] = set()
        self._learn()

    def _learn(self) -> None:
        self.state = State.LEARN
        self._since = self._races = 0  # steps in LEARN; races since the last new plan, without this race
        self._excess = 0  # bytes over the budget, which reduce later budgets
        self._most_seen = 0  # highest activation peak of a step within the budget
        self._headrooms: dict[Plan, int] = {}  # measured headroom of each plan
        self._race: dict[Plan, list[float]] = {}  # plans that alternate, and their step times
        self._measured = False  # whether the current plan's peak was measured in HOLD
        self._limits_changed = False  # whether the limits changed after the current plan was made
        self._usual: list[float] = []  # seconds of the first steps under the current plan
        self._off = 0  # number of later steps in a row whose time has changed
        self._bandwidth: Bandwidth | None = None  # bandwidth for which the current plan was made
        self._highest = math.inf  # `Case.highest` for which the current plan was made
        self._why = ""

    # ---- for the session -------------------------------------------------------------------------

    @property
    def has_planned(self) -> bool:
        """Whether the current plan was made from measured steps."""
        return self.state is not State.LEARN and self.task.decides

    @property
    def keep(self) -> Prediction | None:
        """Prediction for a step that keeps all layers; ``None`` until a step is measured."""
        plan = Plan((Placement.KEEP,) * len(self.task.layers))
        return None if self.profile is None else play(self.profile, plan, Bandwidth(1, 1))  # no transfers

    @property
    def is_done(self) -> bool:
        """Whether no layer is ``auto`` and enough steps were measured for the run log."""
        return not self.task.decides and self.steps >= 2 * LEARNING and self.task.agree is None

    @property
    def wants_saved(self) -> bool:
        """Whether layers with placement ``keep`` run with hooks in the next step, for the run log."""
        return self.steps == WARM_UP and self.task.keeps_all

    @property
    def wants_memory(self) -> bool:
        """Whether the activation peak of the next step must be measured."""
        return self.task.has_budget and (self.state is not State.HOLD or not self._measured)

    def least(self, plan: Plan) -> Plan:
        """Return the plan that replaces ``plan`` for the rest of a step that needs too much memory.

        The returned plan offloads every ``auto`` layer. If ranks share layers, the layers that ``plan``
        recomputes are still recomputed.
        """
        first, is_shared = self.task.first(), self.task.agree is not None
        pairs = zip(first.placements, plan.placements, strict=True)
        placements = (
            Placement.RECOMPUTE_OFFLOAD
            if is_shared and wanted is Placement.AUTO and now.recomputes
            else wanted
            for wanted, now in pairs
        )
        return replace(first, placements=tuple(placements))

    def limit(self, limits: Limits) -> None:
        """Set the limits for plans from the next step on."""
        self.task = replace(self.task, limits=limits)
        self._limits_changed = self.state is not State.LEARN  # the first plan uses the new limits anyway

    # ---- between steps ---------------------------------------------------------------------------

    def observe(self, seen: StepObservation) -> Plan:
        """Add a finished step, and return the plan for the next step.

        All ranks that share layers recompute the same layers. If the planner fails, this method warns, and
        returns the plan of the last step.
        """
        self.steps += 1
        try:
            plan = self._after_step(seen)
        except Exception as error:  # noqa: BLE001 - training can continue without a new plan
            what = f"no plan could be made after step {self.steps}: {error!r}"
            self._warn("failed", f"{what}. Training continues with the old plan. Please report this error")
            plan = seen.plan
        if self.task.agree is None:
            return plan
        names, agreed = self.task.names, seen.plan.placements
        # Between agreements, recomputed layers stay recomputed.
        if self.steps <= 2 * AGREE_EVERY or self.steps % AGREE_EVERY == 0:
            found = self.task.agree(dict(zip(names, plan.placements, strict=True)), self.need_of(plan))
            agreed = tuple(found[name] for name in names)
        return self._bind(agreed, plan)

    def _after_step(self, seen: StepObservation) -> Plan:
        if self.task.has_budget and self.sizes.end_step():
            self._learn()
            self.profile = None
        if self.steps == WARM_UP + 1:
            self._forget_warm_up()
        is_idle = seen.record.fallback_kept_bytes > 0 or self.task.keeps_all
        self.rates.note(seen.loads, fell_back=is_idle)
        self._not_recomputed = seen.not_recomputed
        self._since += 1
        taken = bytes_taken(seen.record, self.task.limits)
        if self.sizes.is_largest:
            self._update_profile(seen, taken)
        if self.profile is None or self.rates.bandwidth() is None:
            return self.task.first()
        budget = self.task.limits.budget
        if taken is not None and budget is not None and self.task.decides:
            if taken > budget:
                return self._after_excess(taken - budget, seen)
            self._most_seen = max(self._most_seen, seen.record.activation_peak_bytes or 0)
            self._measured = True
        if not self.task.decides:
            self.state = State.LEARN if self._since < LEARNING else State.TRY
            return self._case().predicted(seen.plan)
        if self.state is State.LEARN:
            if self._since < LEARNING:
                return self._next_lesson()
            return self._start_race("the first steps have been measured")
        if not self.sizes.is_largest:
            return seen.plan
        return self._after_try(seen) if self.state is State.TRY else self._after_hold(seen)

    def _forget_warm_up(self) -> None:
        """Discard times of the first step: files grow, caches are empty, gradients are allocated late."""
        self.rates.forget()
        self._headrooms = {}
        if self.profile is not None:
            profile = self.profile.without_gradients()
            self.profile = replace(profile, timings=({},) * len(profile.kinds))

    def _update_profile(self, seen: StepObservation, taken: int | None) -> None:
        is_due = self._limits_changed or self._off >= OFF_STEPS - 1 or self.steps % AGREE_EVERY == 0
        if self.state is State.HOLD and not is_due:
            return
        record, plan = seen.record, seen.plan
        profile = profile_of(seen, self.task.layers, self.profile, nets=self.task.limits.nets_gradients)
        bandwidth = self.rates.bandwidth()
        if profile is None or bandwidth is None:
            return
        if seen.beside is not None:
            profile = with_beside(profile, seen.beside, plan.placements)
        activations = record.activation_peak_bytes
        if taken is not None and activations is not None and not record.fallback_kept_bytes:
            found = play(replace(profile, headroom=0), plan, bandwidth)
            headroom = max(activations - found.activation_peak, taken - found.peak_bytes)
            self._headrooms[plan] = headroom
            if self.state is State.LEARN:  # the peaks of other plans are at other times
                headroom = max(self._headrooms.values())
            profile = replace(profile, headroom=headroom)
        self.profile = profile

    # ---- LEARN -----------------------------------------------------------------------------------

    def _next_lesson(self) -> Plan:
        first = self.task.first()
        case = self._case(UNMEASURED)
        case = replace(case, limits=replace(case.limits, window=first.window))
        has_recomputed = case.profile.is_measured(Placement.RECOMPUTE)
        again = Placement.RECOMPUTE_EXCEPT_ATTENTION if has_recomputed else Placement.RECOMPUTE
        spares = again, Placement.OFFLOAD_REMAT
        for ways, stride in itertools.product(((Placement.KEEP, *spares), spares), (4, 8, 16)):
            placements = list(self.task.policy)
            for kind in set(case.profile.layers):
                alike = (layer for layer, number in enumerate(case.profile.layers) if number == kind)
                free = [layer for layer in alike if self.task.policy[layer] is Placement.AUTO]
                for place, layer in enumerate(reversed(free)):
                    turn = (place + self._since) % stride
                    if turn < len(ways) and _may_try(case, layer, ways[turn]):
                        placements[layer] = ways[turn]
            plan = replace(first, placements=tuple(placements))
            if case.fits(plan):
                return plan
        return first

    # ---- solve -----------------------------------------------------------------------------------

    def _case(self, spare: float = 0.0) -> Case:
        profile, bandwidth, limits = self.profile, self.rates.bandwidth(), self.task.limits
        if profile is None or bandwidth is None:
            raise RuntimeError("no plan can be made before a step is measured")
        if limits.budget is not None:
            limits = replace(limits, budget=max(int((1 - spare) * limits.budget) - self._excess, 0))
        grows = limits.is_fit and self._most_seen
        return Case(
            profile,
            bandwidth,
            limits,
            self.task.policy,
            self.task.objective,
            self._not_recomputed,
            GROWTH * self._most_seen if grows else math.inf,
        )

    def _solve(self) -> Plan:
        case = self._case(UNMEASURED)
        plan = solve(case)
        if not case.fits(plan):
            plan = solve(case := self._case())
        if self.steps > WARM_UP:  # the first step has one-time allocations
            self._warn_of(case, plan)
        self._bandwidth, self._highest, self._measured = case.bandwidth, case.highest, False
        return plan

    def _warn_of(self, case: Case, plan: Plan) -> None:
        limits, found = self.task.limits, case.played(plan)
        if found.sent_bytes > case.limits.planned_in(found.seconds):
            self._warn("writes", over_writes(case, plan))
        # If the device has no memory left for activations, the session gives another warning.
        elif not case.fits(plan) and (limits.device is None or limits.device.left > 0):
            self._warn("budget", over_budget(limits, plan, case))

    def _start_race(self, why: str, *plans: Plan) -> Plan:
        plan, *others = plans or (self._solve(),)
        self.state, self._off, self._usual, self._why = State.TRY, 0, [], why
        self._race, self._races, self._reported = {each: [] for each in (plan, *others)}, 0, None
        self._headrooms = {}
        return plan

    def _after_excess(self, over: int, seen: StepObservation) -> Plan:
        self._why = f"the last step exceeded the budget by {readable_size(over)}"
        # The first step has one-time allocations.
        if self.steps == WARM_UP and not seen.record.fallback_kept_bytes:
            return self._next_lesson()
        if self.state is State.LEARN:  # no plan is known with a lower peak than the first steps
            return self._start_race(self._why)
        if seen.plan.prediction is None or seen.plan.prediction.peak_bytes <= self.task.limits.planned:
            self._excess += over  # otherwise no plan fits, and a smaller budget would not help
        self.state, self._off, self._usual = State.HOLD, 0, []
        return self._solve()

    # ---- TRY -------------------------------------------------------------------------------------

    def _after_try(self, seen: StepObservation) -> Plan:
        if self._limits_changed:  # the racing plans were made for a different budget
            self._limits_changed = False
            return self._start_race(ROOM_CHANGED)
        plan, first = seen.plan, next(iter(self._race))
        if plan in self._race:
            self._race[plan].append(_seconds(seen))
        if plan == first and len(self._race) == 1 and (second := self._second_plan(seen)):
            self._race[second] = []
        rounds = ROUNDS_ON_HOST if seen.on_device is None else ROUNDS
        waiting = [each for each, times in self._race.items() if len(times) < rounds]
        if waiting and len(self._race) > 1:
            return self._case().predicted(min(waiting, key=lambda each: len(self._race[each])))
        self.state = State.HOLD
        if len(self._race) > 1:
            self._reported = None
        raced = {each: min(times) for each, times in self._race.items() if times}
        winner = min(raced, key=raced.__getitem__, default=first)
        if winner != first and first in raced:
            better, worse = significant(raced[winner]), significant(raced[first])
            self._why = f"a step took {better} s with this plan and {worse} s with another plan"
        if self.profile is not None and winner in self._headrooms:
            self.profile = replace(self.profile, headroom=self._headrooms[winner])
        case = self._case()
        if case.highest > GROWTH_TO_PLAN * self._highest and case.keep.activation_peak > self._highest:
            return self._start_race(
                f"a step with a peak of {readable_size(self._most_seen)} fitted into memory"
            )
        return self._improved(case, winner)

    def _second_plan(self, seen: StepObservation) -> Plan | None:
        """Return a plan that TRY compares with the current plan; ``None`` for no comparison.

        Predicted I/O waits are uncertain, so TRY compares a plan that waits for I/O with a plan that
        recomputes layers.
        """
        plan, record, case = seen.plan, seen.record, self._case(UNMEASURED)
        grows = self._highest < min(case.limits.planned, case.keep.activation_peak)
        if grows or self._races or self.task.agree or set(plan.placements) == {Placement.KEEP}:
            return None
        expected = 0.0 if plan.prediction is None else plan.prediction.stall_seconds
        waits = max(record.stall_seconds or 0.0, expected) > WORTH_IT * record.seconds
        return best_plain(case, plan, recomputes=waits)

    def _improved(self, case: Case, winner: Plan) -> Plan:
        # Assume the highest headroom of all racing plans.
        most = max(self._headrooms.values(), default=case.profile.headroom)
        better = solve(replace(case, profile=replace(case.profile, headroom=most)))
        now, found = case.predicted(winner), case.played(winner)
        # Shorter steps mean more bytes per day.
        writes_more = found.sent_bytes > case.limits.planned_in(found.seconds)
        if better in self._race:
            return better if writes_more else now
        if not (writes_more or (not self._races and _is_worth_it(better, now))):
            return now
        self.state, self._races = State.TRY, self._races + 1
        raced = {winner: self._race[winner]} if len(self._race) > 1 and not writes_more else {}
        self._race = {**raced, better: []}
        return better

    # ---- HOLD ------------------------------------------------------------------------------------

    def _after_hold(self, seen: StepObservation) -> Plan:
        case, was, seconds = self._case(), self._bandwidth, _seconds(seen)
        # Compare with measured times, because the prediction may have a constant error.
        if len(self._usual) < OFF_STEPS:
            self._usual.append(seconds)
        expected = statistics.median(self._usual)
        self._off = self._off + 1 if abs(seconds - expected) > OFF * expected else 0
        moved = was is not None and case.bandwidth.differs_from(was, OTHER_RATE)
        if not (moved or self._limits_changed or self._off >= OFF_STEPS):
            return seen.plan
        why = "three consecutive steps were faster or slower than before"
        if self._limits_changed or moved:
            why = f"the store rates are now {case.bandwidth} instead of {was}" if moved else ROOM_CHANGED
        self._off, self._usual, self._limits_changed = 0, [], False
        now, better = case.predicted(seen.plan), self._solve()
        if not case.fits(now):
            return self._start_race(why, better)
        if not _is_worth_it(better, now):
            return now
        return self._start_race(why, better, now)

    # ---- agreement of ranks ----------------------------------------------------------------------

    def need_of(self, proposed: Plan) -> tuple[float, float]:
        """Return two predictions for a step that offloads every ``auto`` layer.

        The first prediction is the number of bytes over the budget, and the second is the duration of the
        step in seconds. Both predictions are 0 until a plan is made from measured steps.
        """
        if self.state is State.LEARN or self.profile is None:
            return 0.0, 0.0
        case = self._case()
        found = case.played(replace(case.uniform(Placement.OFFLOAD), window=proposed.window))
        return max(found.peak_bytes - case.limits.planned, 0.0), found.seconds

    def _bind(self, agreed: Sequence[Placement], proposed: Plan) -> Plan:
        """Return this rank's best plan that recomputes the layers in ``agreed`` and no other layers."""
        pairs = list(zip(agreed, proposed.placements, strict=True))
        if all(each.recomputes == mine.recomputes for each, mine in pairs):
            return proposed
        policy = tuple(
            wanted if wanted is not Placement.AUTO else each if each.recomputes else Placement.AUTO
            for each, wanted in zip(agreed, self.task.policy, strict=True)
        )
        fixed = tuple(
            each if each.recomputes else Placement.OFFLOAD if mine.recomputes else mine
            for each, mine in pairs
        )
        if self.state is State.LEARN or self.profile is None or self.rates.bandwidth() is None:
            return replace(proposed, placements=fixed, prediction=None)
        return solve(replace(self._case(), policy=policy, not_recomputed=frozenset(range(len(policy)))))

    # ---- warnings and logs -----------------------------------------------------------------------

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text, RuntimeWarning)

    def news(self, plan: Plan) -> dict[str, object] | None:
        """Return a plan and its inputs for the run log; ``None`` if there is no new plan to log."""
        if self.state is State.LEARN or self.profile is None or plan.prediction is None:
            return None
        is_last = not self.task.decides and self.steps == 2 * LEARNING  # memory is measured
        if self._reported is not None and not is_last and (plan == self._reported or self.state is State.TRY):
            return None  # plans of a race are logged after the race
        case = self._case()
        self._reported = plan
        return {
            "summary": describe(self.task.names, plan, self._why, case),
            "names": self.task.names,
            "policy": self.task.policy,
            "profile": dataclasses.asdict(self.profile),
            "drive": dataclasses.asdict(case.bandwidth),
            "limits": dataclasses.asdict(self.task.limits),
            "plan": dataclasses.asdict(plan),
        }


def bytes_taken(record: StepRecord, limits: Limits) -> int | None:
    """Return how many bytes of the budget a step used; ``None`` if memory was not measured."""
    peak, base = record.device_peak_bytes, record.base_bytes
    if not limits.nets_gradients or record.activation_peak_bytes is None or peak is None or base is None:
        return record.activation_peak_bytes
    # An optimizer may create states after backward, when all gradients still exist.
    return max(peak - base - (record.gradient_peak_bytes or 0) - (record.state_bytes or 0), 0)


def _may_try(case: Case, layer: int, way: Placement) -> bool:
    kind = case.profile.kind_of(layer)
    if way.spares_attention and kind.attention_bytes is None:
        return case.allows(layer, Placement.RECOMPUTE)
    is_known = not way.rebuilds or all(saved.rebuilt is not None for saved in kind.activations)
    return not is_known or case.allows(layer, way)


def _is_worth_it(better: Plan, now: Plan) -> bool:
    new, old = better.prediction, now.prediction
    return new is not None and old is not None and new.seconds <= (1 - WORTH_IT) * old.seconds


def _seconds(seen: StepObservation) -> float:
    times = None if seen.on_device is None else seen.on_device()
    return seen.record.seconds if times is None else times.ended - times.began
