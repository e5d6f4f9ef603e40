"""The controller, which chooses placements of ``auto`` layers between steps.

The controller has three states: LEARN, TRY and HOLD.

LEARN takes three steps. The first step offloads all layers, so that the first step keeps the budget. In the
other two steps, every fourth layer of a kind is kept, recomputed or partly rebuilt, as far as the budget
allows.

TRY alternates between the best plan and the best uniform plan. The plan with the faster measured steps wins.
If the measured times predict that a third plan is faster, the third plan races once against the winner.

HOLD keeps the winning plan. The controller makes a new plan if the times of three consecutive steps have
changed by 10%, or if a rate of the store has changed by a third.

In every state, the controller returns to LEARN during a step that is larger than all earlier steps. After a
step over the budget, the controller subtracts the excess from the budget and makes a new plan at once.

If no limit is set, the budget is the free memory of the device. Without a limit, plans grow gradually: the
peak of a plan may be at most twice the highest peak that has fitted so far.
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
"""Number of steps before the first plan."""

WARM_UP = 1
"""Number of first steps whose times are ignored, because the first steps are slower than later steps."""

FIRST_WINDOW = 16
"""Ratio of the budget to the in-flight window in the first steps, in which other memory is not measured
yet."""

ROUNDS, ROUNDS_ON_HOST = 2, 3
"""Number of steps of each plan in a race, by the device's clock and by the host's clock. The fastest step of
a plan counts. Host times vary more, so races by the host's clock take more steps."""

OFF, OFF_STEPS, OTHER_RATE = 0.1, 3, 1 / 3
"""Thresholds for a new plan: relative change of step times, number of consecutive steps with this change, and
relative change of a store rate."""

ROOM_CHANGED = "the limits of the plan have changed"

WORTH_IT = 0.02
"""Smallest relative gain of a new plan that replaces the current plan. I/O waits below this share of a step
are ignored."""

GROWTH, GROWTH_TO_PLAN = 2, 4 / 3
"""Growth of plans if the user set no limit, relative to the highest activation peak that has fitted so far.

The peak of a plan may be at most ``GROWTH`` times the highest peak so far. A new plan is made when the
allowed peak has grown by the factor ``GROWTH_TO_PLAN``. So plans fill the device within a few steps, and each
step checks the previous prediction.
"""

AGREE_EVERY = 8
"""Interval of agreements, in steps. Ranks that share layers agree on a plan after each of the first 16 steps,
then after every eighth step."""


Agree = Callable[[dict[str, Placement], tuple[float, float]], dict[str, Placement]]
"""Type of a function that takes the placements that a rank proposes, by layer name, and the need of the rank.
The function returns the placements that all ranks agreed on."""


@dataclass(frozen=True)
class Task:
    """Settings from which the controller makes plans.

    Attributes:
        policy: Placement of each layer in the policy.
        layers: Model chunk and module name of each layer.
        limits: Limits that plans must keep.
        objective: Goal of plans: shortest step, or lowest peak without a longer step.
        agree: Function that agrees with the other ranks of the same layers, so that all ranks recompute the
            same layers; ``None`` if no other rank has these layers.
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
        """Whether every layer is kept. Without transfers, the rates of drives cannot be measured."""
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
    """Purpose of the next step."""

    LEARN = "learn"
    TRY = "try"
    HOLD = "hold"


class Controller:
    """Controller that makes the plans of one session.

    Args:
        task: Settings from which the controller makes plans.

    Attributes:
        task: Settings from which the controller makes plans.
        state: Purpose of the next step.
        steps: Number of steps so far.
        profile: Profile of measured steps, from which plans are made; ``None`` until a step is measured.
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
        self._since = 0  # number of steps in LEARN
        self._excess = 0  # bytes over the budget, which reduce later budgets
        self._most_seen = 0  # highest activation peak of a step within the budget
        self._headrooms: dict[Plan, int] = {}  # measured headroom of each plan
        self._race: dict[Plan, list[float]] = {}  # plans that alternate, and their step times
        self._races = 0  # races since the last new plan, without the current race
        self._measured = False  # whether the current plan's peak was measured in HOLD
        self._off = 0
        self._limits_changed = False  # whether the limits changed after the current plan was made
        self._usual: list[float] = []  # seconds of the first steps under the current plan
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
        """Predicted figures of a step that keeps all layers; ``None`` until a step is measured."""
        plan = Plan((Placement.KEEP,) * len(self.task.layers))
        return None if self.profile is None else play(self.profile, plan, Bandwidth(1, 1))  # no transfers

    @property
    def is_done(self) -> bool:
        """Whether the controller has no layer to place and has measured enough steps."""
        return not self.task.decides and self.steps >= 2 * LEARNING and self.task.agree is None

    @property
    def wants_saved(self) -> bool:
        """Whether kept layers run with hooks in the next step, to log their saved tensors."""
        return self.steps == WARM_UP and self.task.keeps_all

    @property
    def wants_memory(self) -> bool:
        """Whether the activation peak of the next step must be measured."""
        return self.task.has_budget and (self.state is not State.HOLD or not self._measured)

    def least(self, plan: Plan) -> Plan:
        """Return a safe plan for the rest of a step that is larger than ``plan`` allows.

        Layers that the ranks have agreed to recompute are still recomputed.
        """
        first = self.task.first()
        if self.task.agree is None:
            return first
        pairs = zip(first.placements, plan.placements, strict=True)
        return replace(
            first,
            placements=tuple(
                Placement.RECOMPUTE_OFFLOAD if wanted is Placement.AUTO and now.recomputes else wanted
                for wanted, now in pairs
            ),
        )

    def limit(self, limits: Limits) -> None:
        """Set the limits for plans from the next step on."""
        self.task = replace(self.task, limits=limits)
        self._limits_changed = self.state is not State.LEARN  # the first plan uses the new limits anyway

    # ---- between steps ---------------------------------------------------------------------------

    def observe(self, seen: StepObservation) -> Plan:
        """Return the plan for the next step. All ranks recompute the same layers."""
        plan, names, agreed = self.propose(seen), self.task.names, seen.plan.placements
        if self.task.agree is None:
            return plan
        # Between agreements, recomputed layers stay recomputed.
        if self.steps <= 2 * AGREE_EVERY or self.steps % AGREE_EVERY == 0:
            found = self.task.agree(dict(zip(names, plan.placements, strict=True)), self.need_of(plan))
            agreed = tuple(found[name] for name in names)
        return self._bind(agreed, plan)

    def propose(self, seen: StepObservation) -> Plan:
        """Return this rank's plan for the next step. An error in the planner does not stop training."""
        self.steps += 1
        try:
            return self._after_step(seen)
        except Exception as error:  # noqa: BLE001 - training can continue without a new plan
            what = f"no plan could be made after step {self.steps}: {error!r}"
            self._warn("failed", f"{what}. Training continues with the old plan. Please report this error")
            return seen.plan

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
            return self._start_race("the first steps were measured")
        if not self.sizes.is_largest:
            return seen.plan
        return self._after_try(seen) if self.state is State.TRY else self._after_hold(seen)

    def _forget_warm_up(self) -> None:
        """Discard times of the first step.

        In the first step, files grow, caches are cold and gradients appear late.
        """
        self.rates.forget()
        self._headrooms = {}
        if self.profile is not None:
            profile = self.profile.without_gradients()
            self.profile = replace(profile, timings=({},) * len(profile.kinds))

    def _update_profile(self, seen: StepObservation, taken: int | None) -> None:
        """Update the profile and the headroom if a measured step has new information."""
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
        """Return a plan that keeps, recomputes or partly rebuilds every fourth layer of a kind."""
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
        """Return the input of the solver, with a budget of which the fraction ``spare`` stays free."""
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
        """Return the best plan that leaves a part of the budget free, if possible."""
        case = self._case(UNMEASURED)
        plan = solve(case)
        if not case.fits(plan):
            plan = solve(case := self._case())
        if self.steps > WARM_UP:  # do not warn because of one-time allocations of the first step
            self._warn_of(case, plan)
        self._bandwidth, self._highest, self._measured = case.bandwidth, case.highest, False
        return plan

    def _warn_of(self, case: Case, plan: Plan) -> None:
        """Warn about a limit that the plan exceeds.

        If the device is full, the session gives the warning instead.
        """
        limits, found = self.task.limits, case.played(plan)
        if found.sent_bytes > case.limits.planned_in(found.seconds):
            self._warn("writes", over_writes(case, plan))
        elif not case.fits(plan) and (limits.device is None or limits.device.left > 0):
            self._warn("budget", over_budget(limits, plan, case))

    def _start_race(self, why: str, *plans: Plan) -> Plan:
        """Start to measure the best plan, or start a race of several plans."""
        plan, *others = plans or (self._solve(),)
        self.state, self._off, self._usual, self._why = State.TRY, 0, [], why
        self._race, self._races, self._reported = {each: [] for each in (plan, *others)}, 0, None
        self._headrooms = {}
        return plan

    def _after_excess(self, over: int, seen: StepObservation) -> Plan:
        """Handle a step over the budget: subtract the excess from the budget and return a new plan."""
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
        """Add a measured step to the race. Return the plan for the next step, or the winner."""
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
            self._why = f"the plan was faster than another plan ({better} s instead of {worse} s)"
        if self.profile is not None and winner in self._headrooms:
            self.profile = replace(self.profile, headroom=self._headrooms[winner])
        case = self._case()
        if case.highest > GROWTH_TO_PLAN * self._highest and case.keep.activation_peak > self._highest:
            return self._start_race(f"a step with a peak of {readable_size(self._most_seen)} fitted")
        return self._improved(case, winner)

    def _second_plan(self, seen: StepObservation) -> Plan | None:
        """Return a plan to race against the first plan; ``None`` if the first plan will be replaced anyway.

        Whether training waits for the drive depends on the measured rates, and these rates are uncertain.
        Therefore a plan that waits for I/O races against a plan that recomputes.
        """
        plan, record, case = seen.plan, seen.record, self._case(UNMEASURED)
        grows = self._highest < min(case.limits.planned, case.keep.activation_peak)
        if grows or self._races or self.task.agree or set(plan.placements) == {Placement.KEEP}:
            return None
        expected = 0.0 if plan.prediction is None else plan.prediction.stall_seconds
        waits = max(record.stall_seconds or 0.0, expected) > WORTH_IT * record.seconds
        return best_plain(case, plan, recomputes=waits)

    def _improved(self, case: Case, winner: Plan) -> Plan:
        """Return the fastest of the measured plans, or a plan that is faster by the measured times.

        An improved plan is returned at most once. A plan that writes more per day than the limit allows, by
        the measured times, never wins.
        """
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
        """Return the current plan, or a new plan if step times or the store have changed."""
        case, was, seconds = self._case(), self._bandwidth, _seconds(seen)
        # Compare with measured times, because the prediction may have a constant error.
        if len(self._usual) < OFF_STEPS:
            self._usual.append(seconds)
        expected = statistics.median(self._usual)
        self._off = self._off + 1 if abs(seconds - expected) > OFF * expected else 0
        moved = was is not None and case.bandwidth.differs_from(was, OTHER_RATE)
        if not (moved or self._limits_changed or self._off >= OFF_STEPS):
            return seen.plan
        why = "the times of three consecutive steps have changed"
        if self._limits_changed or moved:
            why = f"the store rates are now {case.bandwidth} instead of {was}" if moved else ROOM_CHANGED
        self._off, self._usual, self._limits_changed = 0, [], False
        now, better = case.predicted(seen.plan), self._solve()
        if not case.fits(now):
            return self._start_race(why, better)
        if not _is_worth_it(better, now):
            return now  # the plan is the same, but has a new prediction
        return self._start_race(why, better, now)

    # ---- agreement of ranks ----------------------------------------------------------------------

    def need_of(self, proposed: Plan) -> tuple[float, float]:
        """Return the bytes over the budget and the step time of this rank without recomputation."""
        if self.state is State.LEARN or self.profile is None:
            return 0.0, 0.0
        case = self._case()
        found = case.played(replace(case.uniform(Placement.OFFLOAD), window=proposed.window))
        return max(found.peak_bytes - case.limits.planned, 0.0), found.seconds

    def _bind(self, agreed: Sequence[Placement], proposed: Plan) -> Plan:
        """Return this rank's best plan that recomputes exactly the layers that the ranks agreed on."""
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
        """Give a warning once per cause, so that a warning does not suppress warnings with other causes."""
        if key not in self._warned:
            self._warned.add(key)
            warn(text, RuntimeWarning)

    def news(self, plan: Plan) -> dict[str, object] | None:
        """Return a new plan and its inputs for the run log; ``None`` if the plan is not new."""
        if self.state is State.LEARN or self.profile is None or plan.prediction is None:
            return None
        is_last = not self.task.decides and self.steps == 2 * LEARNING  # memory is measured
        if self._reported is not None and not is_last and (plan == self._reported or self.state is State.TRY):
            return None  # the log gets the plans of a race after the race
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
    """Return the number of budget bytes that a step used; ``None`` if memory was not measured."""
    peak, base = record.device_peak_bytes, record.base_bytes
    if not limits.nets_gradients or record.activation_peak_bytes is None or peak is None or base is None:
        return record.activation_peak_bytes
    # An optimizer may create states after backward, when all gradients still exist.
    return max(peak - base - (record.gradient_peak_bytes or 0) - (record.state_bytes or 0), 0)


def _may_try(case: Case, layer: int, way: Placement) -> bool:
    kind = case.profile.kind_of(layer)
    if way.spares_attention and kind.attention_bytes is None:
        return case.allows(layer, Placement.RECOMPUTE)
    return (way.rebuilds and not kind.knows_rebuilt) or case.allows(layer, way)


def _is_worth_it(better: Plan, now: Plan) -> bool:
    """Return True if the prediction of ``better`` is clearly faster than the prediction of ``now``."""
    new, old = better.prediction, now.prediction
    return new is not None and old is not None and new.seconds <= (1 - WORTH_IT) * old.seconds


def _seconds(seen: StepObservation) -> float:
    times = None if seen.on_device is None else seen.on_device()
    return seen.record.seconds if times is None else times.ended - times.began
