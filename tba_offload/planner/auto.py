"""The controller of the layers that are placed ``auto``: LEARN, then TRY, then HOLD.

LEARN   Three steps. The first offloads all layers, so that a budget holds from the start. In the other two
        every fourth layer of a kind is kept, recomputed or rebuilt in part, as far as the budget allows.
TRY     The plan and the best plain plan run in turn. The one that was faster, as measured, stays; a plan
        that the times of the race show to be better races once against it.
HOLD    The plan stays until three steps in a row are off by 10 %, or the store's rate is off by a third.

At any time: a step larger than all before goes back to LEARN, in the middle of the step. After a step over
the budget the excess is taken off, and there is another plan at once.

Where no limit was set, the budget is what the device has. Plans then climb: each peaks at most twice as high
as the highest step that was seen to fit.
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
from tba_offload.planner.model import Limits, Plan
from tba_offload.planner.play import play
from tba_offload.planner.solve import UNMEASURED, Case, best_plain, solve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.planner.measure import LayerKey, StepObservation
    from tba_offload.planner.model import Bandwidth, StepProfile
    from tba_offload.report.log import StepRecord

LEARNING = 3
"""Steps before there is a plan."""

WARM_UP = 1
"""Steps whose times tell nothing of later ones."""

FIRST_WINDOW = 16
"""The first steps have this part of the budget in flight: what else they hold is not known yet."""

ROUNDS, ROUNDS_ON_HOST = 2, 3
"""Steps of each plan in a race; the fastest one counts. More where the times are those of a host."""

OFF, OFF_STEPS, OTHER_RATE = 0.1, 3, 1 / 3
"""Share by which steps are off, how many in a row, and share by which a rate is off, to solve again."""

ANOTHER_SHARE = "the device has another share left for activations"

WORTH_IT = 0.02
"""Share by which a new plan must be faster than the one in force, or that stays. Shorter waits are none."""

CLIMB, CLIMBS_ON = 2, 4 / 3
"""Without a limit a plan may peak at most this many times as high as the highest step that was seen to fit.

There is another plan when it may peak so many times as high as the one before. So the device is filled in a
few steps, each of which checks the prediction of the one before.
"""

TALKS = 8
"""Ranks that share layers agree after each of the first 16 steps, and after every eighth later."""


Agree = Callable[[dict[str, Placement], tuple[float, float]], dict[str, Placement]]
"""Takes a rank's proposal, name of a layer to its placement, and its need; returns what counts for each."""


@dataclass(frozen=True)
class Task:
    """What is wanted of the plans of a session.

    Attributes:
        policy: What the user wants for each layer.
        layers: Chunk and module name of each layer.
        limits: What plans must keep to.
        objective: Shortest step, or lowest peak at no cost in time.
        agree: Asks the other ranks that have these layers too, so that all recompute the same ones; ``None``
            if there are none.
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
        """Whether there are layers to decide on."""
        return Placement.AUTO in self.policy

    @property
    def may_recompute(self) -> bool:
        """Whether the planner may choose to recompute a layer."""
        return self.decides and self.objective is not Objective.MEMORY

    @property
    def has_budget(self) -> bool:
        """Whether plans must keep to one."""
        return self.limits.budget is not None and self.decides

    def first(self) -> Plan:
        """Return the plan of the first steps."""
        window, budget = self.limits.window, self.limits.budget
        if budget is not None and self.has_budget:
            window = min(budget // FIRST_WINDOW, budget if window is None else window)
        return Plan(self.policy, window=window)


class State(enum.Enum):
    """What the next step is for."""

    LEARN = "learn"
    TRY = "try"
    HOLD = "hold"


class Controller:
    """The plans of one session.

    Args:
        task: What it has to decide.

    Attributes:
        task: The same.
        state: What the next step is for.
        steps: Steps so far.
        profile: What plans are made from; ``None`` before a step was understood.
        rates: How fast the store is.
        sizes: How large the runs of layers are.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.rates, self.sizes = Rates(), Sizes()
        self.steps = 0
        self.profile: StepProfile | None = None
        self._not_recomputed: frozenset[int] = frozenset()
        self._told: Plan | None = None
        self._warned: set[str] = set()
        self._learn()

    def _learn(self) -> None:
        self.state = State.LEARN
        self._since = 0  # steps in LEARN
        self._excess = 0  # bytes that came over the budget, and come off it
        self._most_seen = 0  # highest activation peak of a step within the budget
        self._headrooms: dict[Plan, int] = {}  # of each plan that was measured
        self._race: dict[Plan, list[float]] = {}  # plans that run in turn, and the seconds of their steps
        self._races = 0  # since the last plan was made, before this one
        self._measured = False  # whether the plan in force was, in HOLD
        self._off = 0
        self._limited = False  # whether limits are others than the plan in force was made for
        self._usual: list[float] = []  # seconds of the first steps under the plan in force
        self._bandwidth: Bandwidth | None = None  # that the plan in force was made for
        self._highest = math.inf  # likewise
        self._why = ""

    # ---- what the session asks -------------------------------------------------------------------

    @property
    def has_planned(self) -> bool:
        """Whether a plan made from measured steps is in force."""
        return self.state is not State.LEARN and self.task.decides

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to decide and nothing more to learn."""
        return not self.task.decides and self.steps >= 2 * LEARNING and self.task.agree is None

    @property
    def wants_memory(self) -> bool:
        """Whether the peak of the next step must be measured."""
        return self.task.has_budget and (self.state is not State.HOLD or not self._measured)

    def least(self, plan: Plan) -> Plan:
        """Return the plan for the rest of a step that is larger than ``plan`` was made for.

        What ranks have agreed to recompute they do recompute.
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
        """Have plans keep to other limits from the next step on."""
        self.task = replace(self.task, limits=limits)
        self._limited = True

    # ---- between steps ---------------------------------------------------------------------------

    def observe(self, seen: StepObservation) -> Plan:
        """Return the plan for the next step; all ranks recompute the same layers, as that is collective."""
        plan, names, agreed = self.propose(seen), self.task.names, seen.plan.placements
        if self.task.agree is None:
            return plan
        if self.steps <= 2 * TALKS or self.steps % TALKS == 0:  # until then, what is recomputed stays
            found = self.task.agree(dict(zip(names, plan.placements, strict=True)), self.need_of(plan))
            agreed = tuple(found[name] for name in names)
        return self._bind(agreed, plan)

    def propose(self, seen: StepObservation) -> Plan:
        """Return the plan that this rank wants for the next step. No error of the planner ends training."""
        self.steps += 1
        try:
            return self._after_step(seen)
        except Exception as error:  # noqa: BLE001 - a plan is advice
            what = f"no plan could be made after step {self.steps}: {error!r}"
            self._warn("failed", f"{what}. Training goes on with the plan before; please report this")
            return seen.plan

    def _after_step(self, seen: StepObservation) -> Plan:
        if self.task.has_budget and self.sizes.end_step():
            self._learn()
            self.profile = None
        if self.steps == WARM_UP + 1:
            self._forget_warm_up()
        self.rates.note(seen.loads, fell_back=seen.record.fallback_kept_bytes > 0)
        self._not_recomputed = seen.not_recomputed
        self._since += 1
        taken = bytes_taken(seen.record, self.task.limits)
        if self.sizes.is_largest:
            self._look(seen, taken)
        if self.profile is None or self.rates.bandwidth() is None:
            return self.task.first()
        budget = self.task.limits.budget
        if taken is not None and budget is not None and self.task.decides:
            if taken > budget:
                return self._over(taken - budget, seen)
            self._most_seen = max(self._most_seen, seen.record.activation_peak_bytes or 0)
            self._measured = True
        if not self.task.decides:
            self.state = State.LEARN if self._since < LEARNING else State.TRY
            return self._case().predicted(seen.plan)
        if self.state is State.LEARN:
            if self._since < LEARNING:
                return self._next_lesson()
            return self._try("the first steps were measured")
        if not self.sizes.is_largest:
            return seen.plan
        return self._raced(seen) if self.state is State.TRY else self._held(seen)

    def _forget_warm_up(self) -> None:
        """Forget what the first step took: memory and files grew, caches were cold, gradients came late."""
        self.rates.forget()
        self._headrooms = {}
        if self.profile is not None:
            profile = self.profile.without_gradients()
            self.profile = replace(profile, timings=({},) * len(profile.kinds))

    def _look(self, seen: StepObservation, taken: int | None) -> None:
        """Measure the profile, as long as something is learned from it, and hold the peak against it."""
        is_due = self._limited or self._off >= OFF_STEPS - 1 or self.steps % TALKS == 0
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
            if self.state is State.LEARN:  # other plans peak at other moments
                headroom = max(self._headrooms.values())
            profile = replace(profile, headroom=headroom)
        self.profile = profile

    # ---- LEARN -----------------------------------------------------------------------------------

    def _next_lesson(self) -> Plan:
        """Return a plan in which every fourth layer of a kind is kept, recomputed or rebuilt in part."""
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
        """Return the question to the solver, with a share of the budget left free."""
        profile, bandwidth, limits = self.profile, self.rates.bandwidth(), self.task.limits
        if profile is None or bandwidth is None:
            raise RuntimeError("no plan can be made before a step was measured")
        if limits.budget is not None:
            limits = replace(limits, budget=max(int((1 - spare) * limits.budget) - self._excess, 0))
        climbs = limits.is_fit and self._most_seen
        return Case(
            profile,
            bandwidth,
            limits,
            self.task.policy,
            self.task.objective,
            self._not_recomputed,
            CLIMB * self._most_seen if climbs else math.inf,
        )

    def _solve(self) -> Plan:
        """Return the best plan: one that leaves something free, unless only the whole budget will do."""
        case = self._case(UNMEASURED)
        plan = solve(case)
        if not case.fits(plan):
            plan = solve(case := self._case())
        if self.steps > WARM_UP:  # what the first step takes once is no reason to warn
            self._warn_of(case, plan)
        self._bandwidth, self._highest, self._measured = case.bandwidth, case.highest, False
        return plan

    def _warn_of(self, case: Case, plan: Plan) -> None:
        """Warn of each limit that no plan keeps to; of a device that has nothing left the session warns."""
        limits, found = self.task.limits, case.played(plan)
        if found.sent_bytes > case.limits.planned_in(found.seconds):
            self._warn("writes", over_writes(case, plan))
        elif not case.fits(plan) and (limits.device is None or limits.device.left > 0):
            self._warn("budget", over_budget(limits, plan, case))

    def _try(self, why: str, *plans: Plan) -> Plan:
        """Begin to measure the best plan, or several plans in turn."""
        plan, *others = plans or (self._solve(),)
        self.state, self._off, self._usual, self._why = State.TRY, 0, [], why
        self._race, self._races, self._told = {each: [] for each in (plan, *others)}, 0, None
        self._headrooms = {}
        return plan

    def _over(self, over: int, seen: StepObservation) -> Plan:
        """Answer a step over the budget at once: its excess comes off, and there is another plan."""
        self._why = f"the last step took {readable_size(over)} more than the budget"
        if self.steps == WARM_UP and not seen.record.fallback_kept_bytes:  # some is allocated once
            return self._next_lesson()
        if self.state is State.LEARN:  # nothing smaller is known than the first steps
            return self._try(self._why)
        if seen.plan.prediction is None or seen.plan.prediction.peak_bytes <= self.task.limits.planned:
            self._excess += over  # else no plan was known to fit, and none fits a smaller budget
        self.state, self._off, self._usual = State.HOLD, 0, []
        return self._solve()

    # ---- TRY -------------------------------------------------------------------------------------

    def _raced(self, seen: StepObservation) -> Plan:
        """Note a step of the race; return the next one's plan, or the winner."""
        if self._limited:  # the plans in the race were made for another budget
            self._limited = False
            return self._try(ANOTHER_SHARE)
        plan, first = seen.plan, next(iter(self._race))
        if plan in self._race:
            self._race[plan].append(_seconds(seen))
        if plan == first and len(self._race) == 1 and (rival := self._rival(seen)):
            self._race[rival] = []
        rounds = ROUNDS_ON_HOST if seen.on_device is None else ROUNDS
        waiting = [each for each, times in self._race.items() if len(times) < rounds]
        if waiting and len(self._race) > 1:
            return self._case().predicted(min(waiting, key=lambda each: len(self._race[each])))
        self.state = State.HOLD
        if len(self._race) > 1:
            self._told = None
        raced = {each: min(times) for each, times in self._race.items() if times}
        winner = min(raced, key=raced.__getitem__, default=first)
        if winner != first and first in raced:
            better, worse = significant(raced[winner]), significant(raced[first])
            self._why = f"it was faster than the other plan in turn ({better} s, not {worse} s)"
        if self.profile is not None and winner in self._headrooms:
            self.profile = replace(self.profile, headroom=self._headrooms[winner])
        case = self._case()
        if case.highest > CLIMBS_ON * self._highest and case.keep.activation_peak > self._highest:
            return self._try(f"{readable_size(self._most_seen)} were seen to fit")
        return self._improved(case, winner)

    def _rival(self, seen: StepObservation) -> Plan | None:
        """Return the plan that races against the first one; none where another plan is going to follow it.

        Whether training waits for the drive depends on the rates of both, which are known least. So a plan
        that waits races against one that recomputes.
        """
        plan, record, case = seen.plan, seen.record, self._case(UNMEASURED)
        climbs = self._highest < min(case.limits.planned, case.keep.activation_peak)
        if climbs or self._races or self.task.agree or set(plan.placements) == {Placement.KEEP}:
            return None
        expected = 0.0 if plan.prediction is None else plan.prediction.stall_seconds
        waits = max(record.stall_seconds or 0.0, expected) > WORTH_IT * record.seconds
        return best_plain(case, plan, recomputes=waits)

    def _improved(self, case: Case, winner: Plan) -> Plan:
        """Return the winner of a race, or, once, a plan that is better by all that the race has shown.

        As times are measured, a plan can turn out to write more a day than allowed: then it is never the one.
        """
        most = max(self._headrooms.values(), default=case.profile.headroom)  # it may peak as the others do
        better = solve(replace(case, profile=replace(case.profile, headroom=most)))
        now, found = case.predicted(winner), case.played(winner)
        writes_more = found.sent_bytes > case.limits.planned_in(found.seconds)  # as its steps are shorter now
        if better in self._race:
            return better if writes_more else now
        if not (writes_more or (not self._races and _is_worth_it(better, now))):
            return now
        self.state, self._races = State.TRY, self._races + 1
        raced = {winner: self._race[winner]} if len(self._race) > 1 and not writes_more else {}
        self._race = {**raced, better: []}
        return better

    # ---- HOLD ------------------------------------------------------------------------------------

    def _held(self, seen: StepObservation) -> Plan:
        """Return the plan in force, unless steps or the store are no longer what it was made for."""
        case, was, seconds = self._case(), self._bandwidth, _seconds(seen)
        if len(self._usual) < OFF_STEPS:  # what differs from a prediction from the begin will do so again
            self._usual.append(seconds)
        expected = statistics.median(self._usual)
        self._off = self._off + 1 if abs(seconds - expected) > OFF * expected else 0
        moved = was is not None and case.bandwidth.differs_from(was, OTHER_RATE)
        if not (moved or self._limited or self._off >= OFF_STEPS):
            return seen.plan
        why = "three steps in a row took another time than before"
        if self._limited or moved:
            why = f"the store now gives {case.bandwidth}, not {was}" if moved else ANOTHER_SHARE
        self._off, self._usual, self._limited = 0, [], False
        now, better = case.predicted(seen.plan), self._solve()
        if not case.fits(now):
            return self._try(why, better)
        if not _is_worth_it(better, now):
            return now  # the same plan, with times as they are now
        return self._try(why, better, now)

    # ---- what ranks agree on ---------------------------------------------------------------------

    def need_of(self, proposed: Plan) -> tuple[float, float]:
        """Return bytes over the budget, and seconds, of this rank's step if nothing were recomputed."""
        if self.state is State.LEARN or self.profile is None:
            return 0.0, 0.0
        case = self._case()
        found = case.played(replace(case.uniform(Placement.OFFLOAD), window=proposed.window))
        return max(found.peak_bytes - case.limits.planned, 0.0), found.seconds

    def _bind(self, agreed: Sequence[Placement], proposed: Plan) -> Plan:
        """Return this rank's best plan in which exactly those layers are recomputed that ranks agreed on."""
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

    # ---- words -----------------------------------------------------------------------------------

    def _warn(self, key: str, text: str) -> None:
        """Warn once for each cause, so that one warning never hides another."""
        if key not in self._warned:
            self._warned.add(key)
            warn(text, RuntimeWarning)

    def news(self, plan: Plan) -> dict[str, object] | None:
        """Return a new plan and everything that it was made from, for the log; ``None`` if there is none."""
        if self.state is State.LEARN or self.profile is None or plan.prediction is None:
            return None
        is_last = not self.task.decides and self.steps == 2 * LEARNING  # memory was looked at by now
        if self._told is not None and not is_last and (plan == self._told or self.state is State.TRY):
            return None  # plans that race are told when one has won
        case = self._case()
        self._told = plan
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
    """Return the bytes of the budget that a step took; ``None`` if they were not measured."""
    peak, base = record.device_peak_bytes, record.base_bytes
    if not limits.nets_gradients or record.activation_peak_bytes is None or peak is None or base is None:
        return record.activation_peak_bytes
    # States that an optimizer makes after backward lie there beside all gradients.
    return max(peak - base - (record.gradient_peak_bytes or 0) - (record.state_bytes or 0), 0)


def _may_try(case: Case, layer: int, way: Placement) -> bool:
    kind = case.profile.kind_of(layer)
    if way.spares_attention and kind.attention_bytes is None:
        return case.allows(layer, Placement.RECOMPUTE)
    return (way.rebuilds and not kind.knows_rebuilt) or case.allows(layer, way)


def _is_worth_it(better: Plan, now: Plan) -> bool:
    """Return True if a plan is predicted to be that much faster than the one in force."""
    new, old = better.prediction, now.prediction
    return new is not None and old is not None and new.seconds <= (1 - WORTH_IT) * old.seconds


def _seconds(seen: StepObservation) -> float:
    times = None if seen.on_device is None else seen.on_device()
    return seen.record.seconds if times is None else times.ended - times.began
