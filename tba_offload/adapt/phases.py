"""The phases of a controller: each says which steps are looked at closely, and what comes next.

::

    warm-up ──► probe ──► settled ⇄ excursion
    times do    layers of  a plan is   one step tries
    not count   each kind  in force    what it does not
                run in
                each way

A phase never changes: what a step has taught makes another one. A settled phase whose steps have grown stays
settled, but must be measured and refined anew; an excursion ends with its step, or when steps grow.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tba_offload.adapt.pace import Pace
from tba_offload.adapt.proposals import (
    bare,
    best_plan,
    excursion,
    is_plain,
    over_budget,
    over_writes,
    probing_plan,
    rival,
    writes_too_much,
)
from tba_offload.adapt.rates import differ, differ_in_room, drifted, in_words
from tba_offload.config.policy import Objective
from tba_offload.formatting import readable_size, significant
from tba_offload.plan.search import is_better

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.adapt.needs import Needs
    from tba_offload.adapt.task import Case, Task
    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Plan
    from tba_offload.plan.sizes import StepSize
    from tba_offload.plan.tuning import Tuning


_TOO_MUCH = "steps write more than store.write_bytes_per_day allows"


@dataclass(frozen=True, slots=True)
class Moment:
    """The end of a step, as a phase sees it.

    Attributes:
        task: What is to be decided.
        step: Number of the step, from 1.
        plan: The plan that was in force.
        bandwidth: The rates of the drives now; ``None`` if nothing ever moved.
        room: Bytes that they hold at most.
        seconds: How long the step took by the host's clock; one that was looked at, by that of its device.
        peak: The peak of the step in bytes; ``None`` if it was not measured, or is that of no plan.
        size: How large the step was.
        skips: Whether there were steps without layers that plans must hold for.
        needs: What steps were seen to need of memory by then.
        pace: How long steps took until then.
        usual: The rates of the drives in the last few steps; ``None`` if those were never told apart.
        deviation: By which share the rates of the drives differ from step to step.
        warnings: What the user is to be told when the decision is taken.
        forgets: What is to be forgotten of the times of steps then.
    """

    task: Task
    step: int
    plan: Plan
    bandwidth: Bandwidth | None
    room: int | None
    peak: int | None
    size: StepSize
    skips: bool
    needs: Needs
    pace: Pace
    seconds: float = 0.0
    usual: Bandwidth | None = None
    deviation: float = 0.0
    warnings: list[str] = field(default_factory=list)
    forgets: list[Callable[[Pace], None]] = field(default_factory=list)

    @property
    def tuning(self) -> Tuning:
        """The numbers that plans are made with."""
        return self.task.tuning

    @property
    def may_compare(self) -> bool:
        """Whether a plain plan may be tried for a step: not where ranks would have to agree on it.

        Nor after a step that has broken the budget, which is answered first.
        """
        is_free = self.task.has_budget and self.task.objective is Objective.TIME and not self.task.is_shared
        return is_free and (self.peak or 0) <= (self.task.limits.budget or 0)

    def within_budget(self, case: Case, plan: Plan) -> Plan:
        """Return a measured plan to fall back to if this one exceeds the budget."""
        known = self.needs.instead_of(plan)
        return plan if known is None else self.needs.with_prediction(case, known)

    def check_limits(self, case: Case, plan: Plan) -> None:
        """Say it if the lowest peak that was found is over the budget, or too much is written."""
        for told in (over_budget(self.task, plan, case.profile, self.room), over_writes(case, plan)):
            if told is not None:
                self.warnings.append(told)


class Phase(ABC):
    """What the controller is about."""

    __slots__ = ()

    @property
    def settled(self) -> Settled | None:
        """The phase of the plan that is in force, or was left for one step; ``None`` before there is one."""
        return None

    def begun(self, step: int, tuning: Tuning) -> Phase:  # noqa: ARG002 - only the first ones end by themselves
        """Return the phase that a step ends in, before anything of it is known."""
        return self

    def outgrown(self) -> Phase:
        """Return the phase after a step that was larger than all before."""
        return self

    def limited(self, task: Task) -> Phase:  # noqa: ARG002 - before there is a plan, each step gets its own
        """Return the phase after limits have become others.

        Args:
            task: Has those that hold now.
        """
        return self

    def measured(self) -> Phase:
        """Return the phase after the peak of a step was measured."""
        return self

    def agreed(self, plan: Plan, *, is_changed: bool) -> Phase:  # noqa: ARG002 - before there is a plan, nothing changes
        """Get the phase after ranks have agreed on a plan, whether or not it is another than was proposed."""
        return self

    def undecided(self, plan: Plan) -> tuple[Phase, Plan]:
        """Return what comes where nothing is decided after a step with that plan; an excursion is over."""
        settled = self.settled
        return (self, plan) if settled is None else (settled, settled.plan)

    def is_pressing(self, moment: Moment) -> bool:  # noqa: ARG002 - before there is a plan, each is
        """Whether the next step must not begin before it is decided what it does."""
        return True

    def is_turn(self, moment: Moment) -> bool:  # noqa: ARG002 - of the others every step counts
        """Whether to look at a step closely: not at each, because that takes time."""
        return True

    @abstractmethod
    def decide(self, moment: Moment, case: Case) -> tuple[Phase, Plan]:
        """Return the phase and the plan of the next step, after one that was looked at closely.

        Args:
            moment: The step.
            case: What plans are made from.
        """


@dataclass(frozen=True, slots=True)
class WarmUp(Phase):
    """Steps whose times do not count: all is offloaded in the first one, so that a budget holds."""

    def begun(self, step: int, tuning: Tuning) -> Phase:
        """Return the phase as it is: it ends by itself."""
        return self if step <= tuning.warm_up else Probe(is_first=True)

    def decide(self, moment: Moment, case: Case) -> tuple[Phase, Plan]:
        """Have the next step show what is not known."""
        return self, _probe(moment, case, has_warmed_up=False)


@dataclass(frozen=True, slots=True)
class Probe(Phase):
    """Steps that show what layers of each kind cost under each placement.

    Attributes:
        is_first: Whether this is the first step of which times count: what was measured before says nothing.
    """

    is_first: bool = False

    def begun(self, step: int, tuning: Tuning) -> Phase:  # noqa: ARG002 - it ends when there is a plan
        """Only one step is the first."""
        return Probe()

    def decide(self, moment: Moment, case: Case) -> tuple[Phase, Plan]:
        """Go on, or makes the first plan."""
        if moment.step < moment.tuning.learning:
            return self, _probe(moment, case, has_warmed_up=self.is_first)
        settled = _first_plan(moment, case, f"{moment.step} steps were measured")
        return settled, settled.plan


@dataclass(frozen=True, slots=True)
class Settled(Phase):
    """A plan is in force.

    Attributes:
        plan: The plan.
        why: Why it was made.
        planned_for: The rates by which it was.
        caution: Plans count on this share of the measured rates.
        is_measured: Whether the peak of a step under it was measured.
        is_refined: Whether it was made anew after that.
        quiet_steps: Steps for which a plan that was in doubt without need is left alone.
        quiet_until: Step until which small doubts do not count.
        is_compared: Whether a step has tried the plain plan that comes next.
        favoured: Share by which predictions favour the plan that this one has beaten in a step.
        is_overdue: Whether the budget is another one than the plan was made for.
        looked: Step after which something else was last tried, or could have been.
        beside_bytes: What memory held beside the layers when the plan was made.
    """

    plan: Plan
    why: str
    planned_for: Bandwidth
    caution: float = 1.0
    is_measured: bool = False
    is_refined: bool = False
    quiet_steps: int = 1
    quiet_until: int = 0
    is_compared: bool = False
    favoured: float = 0.0
    is_overdue: bool = False
    looked: int = 0
    beside_bytes: int = 0

    @property
    def settled(self) -> Settled | None:
        """This one."""
        return self

    def outgrown(self) -> Phase:
        """Nothing that was measured of smaller steps tells anything of larger ones."""
        return dataclasses.replace(self, is_measured=False, is_refined=False, quiet_until=0)

    def limited(self, task: Task) -> Phase:
        """Return the phase that makes the plan anew, for another budget.

        One of the policy has its window.
        """
        if task.has_budget:
            return dataclasses.replace(self, is_overdue=True)
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, window=task.limits.window))

    def measured(self) -> Phase:
        """Now it is known what the plan needs."""
        return dataclasses.replace(self, is_measured=True)

    def repredicted(self, case: Case, needs: Needs) -> Settled:
        """Return the same plan, with what it does in steps as they are now."""
        if self.plan.prediction is None:
            return self
        return dataclasses.replace(self, plan=needs.with_prediction(case, self.plan))

    def agreed(self, plan: Plan, *, is_changed: bool) -> Phase:
        """Return the phase under the agreed plan."""
        if not is_changed:
            return dataclasses.replace(self, plan=plan)
        why = "the ranks agreed on what is recomputed"
        return dataclasses.replace(self, plan=plan, why=why, is_measured=False)

    def is_pressing(self, moment: Moment) -> bool:
        """Whether the plan was made for less, or for drives that hold more or less, or broke the budget."""
        if not moment.task.has_budget:
            return False
        if moment.size.has_grown or self.is_overdue:
            return True
        if (moment.peak or 0) > (moment.task.limits.budget or 0):
            return True
        room = None if moment.bandwidth is None else moment.bandwidth.capacity
        return differ_in_room(room, self.planned_for.capacity, moment.tuning.drift)

    def is_turn(self, moment: Moment) -> bool:
        """Whether a step is one of the first, of every few, or a surprise."""
        tuning = moment.tuning
        if self.is_overdue or moment.step <= tuning.closely or moment.step % tuning.turn == 0:
            return True
        if moment.needs.retreat(moment.plan) is not None:
            return True
        return self.doubt(moment) is not None

    def doubt(self, moment: Moment) -> str | None:
        """Why the plan may not be the best any longer; ``None`` if nothing speaks against it."""
        bandwidth = moment.bandwidth
        if bandwidth is None:
            return None
        if self.is_overdue:
            return f"{readable_size(moment.task.limits.budget or 0)} are left for activations now"
        expected, then, tuning = moment.plan.prediction, self.planned_for, moment.tuning
        if expected is None:
            return "nothing was predicted of the one before"
        is_quiet = moment.step < self.quiet_until
        if self._has_drifted(moment, bandwidth, tuning.big_drift if is_quiet else tuning.drift):
            now = in_words(bandwidth)
            return f"drives or host memory are not what they were: {now} instead of {in_words(then)}"
        if self._waits_too_long(moment):
            return f"steps waited for more than {tuning.waits:.0%} of their time"
        usual, limits = moment.pace.usual, moment.task.limits
        if usual is not None and expected.written_bytes > limits.written_in(usual):
            return _TOO_MUCH
        if is_quiet:
            return None
        return _broken_budget(moment.peak or 0, moment.task.limits.budget) or _astray(
            moment, expected.seconds
        )

    def _has_drifted(self, moment: Moment, bandwidth: Bandwidth, share: float) -> bool:
        """Whether drives are others, and neither for a single step nor as they are from step to step."""
        share = max(share, moment.tuning.deviation(moment.deviation))
        found = (bandwidth, moment.usual or bandwidth)
        return all(drifted(rates, self.planned_for, share, moment.tuning) for rates in found)

    def _waits_too_long(self, moment: Moment) -> bool:
        """Whether compute waits under a plan by which it should not: compute and drives have their moods."""
        if moment.task.objective is not Objective.MEMORY or self.caution <= moment.tuning.most_caution:
            return False
        return moment.pace.has_waited(moment.tuning.waits)

    def decide(self, moment: Moment, case: Case) -> tuple[Phase, Plan]:
        """Answer to what has become larger, to a broken budget and to doubts, or tries something else."""
        refining = moment.tuning.worth_refining
        if moment.size.has_grown:
            why = "a layer was given more, or found more gradients, than the plan was made for"
            return self.replanned(moment, case, bare(moment.plan), why, worth=refining)
        retreat = moment.needs.retreat(moment.plan)
        if retreat is not None:
            return self._retreated(moment, case, retreat)
        doubt = self.doubt(moment)
        is_due = moment.task.has_budget and self.is_measured and not self.is_refined
        is_time = is_due or has_excursion(moment.step, moment.tuning, self.looked)
        plain = self._plain(moment, case, adopts=doubt is not None or is_due, compares=is_time)
        if plain is not None:
            return plain
        if doubt is not None:
            return self.replanned(moment, case, self.plan, doubt)
        if is_due and not self._compares_soon(moment):
            why = "a step under the plan was measured"
            refined = dataclasses.replace(self, is_refined=True)
            return refined.replanned(moment, case, self.plan, why, worth=refining)
        beside = case.profile.beside_bytes(self.plan.placements)
        if self._has_more_room(moment, beside):
            why = f"memory holds {readable_size(beside)} beside the layers now"
            return self.replanned(moment, case, self.plan, why, worth=refining)
        if writes_too_much(case, moment.plan):
            return self.replanned(moment, case, self.plan, _TOO_MUCH)
        confirmed = dataclasses.replace(self, plan=moment.needs.with_prediction(case, moment.plan))
        return confirmed._gone_on(moment, case)

    def _plain(
        self, moment: Moment, case: Case, *, adopts: bool, compares: bool
    ) -> tuple[Phase, Plan] | None:
        """With all layers placed alike, if that is faster by what is known now, or may be.

        That is soon known, and a search takes many steps: it comes after a step under that plan. And no
        prediction is so exact that it decides between plans that are nearly as good: a step does.

        Args:
            moment: The step.
            case: What plans are made from.
            adopts: Whether a plan that is faster is in force from now on.
            compares: Whether a step tries one that may be.
        """
        adopts = adopts and not is_plain(self.plan, moment.task.policy)
        compares = compares and not self.is_compared and moment.pace.usual is not None
        if self.is_overdue or not moment.may_compare or not (adopts or compares):
            return None
        plain = rival(case, self.plan)
        if plain is None or plain.prediction is None:
            return None
        now, then = plain.prediction.seconds, case.play(self.plan).seconds
        if adopts and now < then * (1 - moment.tuning.worth_it):
            moment.forgets.append(Pace.forget_seconds)
            adopted = dataclasses.replace(
                self,
                plan=plain,
                why="by what was measured a step under it takes "
                f"{significant(now)} s instead of {significant(then)} s",
                planned_for=case.bandwidth,
                is_measured=False,
                is_refined=False,
                is_compared=False,
                favoured=0.0,
                beside_bytes=case.profile.beside_bytes(plain.placements),
            )
            return adopted, plain
        if compares and now < then * (1 + moment.tuning.rival):
            return Comparison(dataclasses.replace(self, looked=moment.step, is_compared=True)), plain
        return None

    def _compares_soon(self, moment: Moment) -> bool:
        """Whether a search, which takes many steps, would be in the way of the comparison in the next one."""
        return moment.may_compare and not self.is_compared and moment.pace.usual is None

    def _has_more_room(self, moment: Moment, beside: int) -> bool:
        """Whether layers have more room than when the plan was made, by more than plans leave free."""
        return self.beside_bytes - beside > moment.tuning.unmeasured * (moment.task.limits.budget or math.inf)

    def _retreated(self, moment: Moment, case: Case, known: Plan) -> tuple[Phase, Plan]:
        """Return a plan that is known to keep to the budget, or to come closer to it."""
        why = _broken_budget(moment.needs.peak_of(moment.plan), moment.task.limits.budget) or self.why
        moment.forgets.append(Pace.forget_seconds)
        plan = moment.needs.with_prediction(case, known)
        now = dataclasses.replace(
            self,
            plan=plan,
            why=why,
            is_measured=False,
            is_overdue=False,
            beside_bytes=case.profile.beside_bytes(plan.placements),
        )
        return now, plan

    def _gone_on(self, moment: Moment, case: Case) -> tuple[Phase, Plan]:
        """Return what comes after a step that was as planned."""
        tuning = moment.tuning
        if self.caution < 1.0 and moment.step % tuning.excursions[-1] == 0:
            # A slow hour ends some time.
            bolder = dataclasses.replace(self, caution=min(self.caution / tuning.caution, 1.0))
            return bolder.replanned(moment, case, self.plan, "the drives may have recovered")
        # Ranks that share layers try something else in the same step; others when they come to it.
        since = moment.step - 1 if moment.task.is_shared else self.looked
        if not has_excursion(moment.step, tuning, since):
            return self, self.plan
        now = dataclasses.replace(self, looked=moment.step)
        look = excursion(case, self.plan)
        return (now, self.plan) if look is None else (Excursion(now), look)

    def replanned(
        self, moment: Moment, case: Case, old: Plan, why: str, *, worth: float | None = None
    ) -> tuple[Settled, Plan]:
        """Return a new plan if it is clearly better than the old one.

        If not, the next doubt has to wait longer.
        """
        task, tuning = moment.task, moment.tuning
        now = dataclasses.replace(
            self,
            planned_for=case.bandwidth,
            caution=self._new_caution(moment, case.bandwidth),
            is_overdue=False,
        )
        moment.forgets.append(Pace.forget_waits)
        if not task.decides:
            now = dataclasses.replace(now, plan=_as_policy(moment, case, old), why=why)
            return now, now.plan
        careful = case.counting_on(now.caution)
        new = best_plan(careful)
        if self.is_overdue or is_better(
            case.profile,
            careful.bandwidth,
            task.limits,
            new,
            old,
            policy=task.policy,
            objective=task.objective,
            worth=self.favoured + (tuning.worth_it if worth is None else worth),
            tuning=tuning,
        ):
            moment.forgets.append(Pace.forget_seconds)
            now = dataclasses.replace(
                now, why=why, quiet_steps=1, is_measured=False, is_compared=False, favoured=0.0
            )
        else:
            new = old
            quiet_steps = min(2 * self.quiet_steps, tuning.excursions[-1])
            now = dataclasses.replace(now, quiet_steps=quiet_steps, quiet_until=moment.step + quiet_steps)
        if new is old or now.caution < 1.0:
            new = moment.needs.with_prediction(case, new)
        new = moment.within_budget(case, new)
        now = dataclasses.replace(now, plan=new, beside_bytes=case.profile.beside_bytes(new.placements))
        moment.check_limits(case, now.plan)
        return now, now.plan

    def _new_caution(self, moment: Moment, bandwidth: Bandwidth) -> float:
        """Return the share of the measured rates to count on: all of those of another drive."""
        tuning = moment.tuning
        if self._has_drifted(moment, bandwidth, tuning.drift):
            return 1.0
        if self._waits_too_long(moment):
            return max(tuning.caution * self.caution, tuning.most_caution)
        return self.caution


@dataclass(frozen=True, slots=True)
class Excursion(Phase):
    """One step tries what the plan does not.

    Attributes:
        left: The phase that was left for it.
    """

    left: Settled

    @property
    def settled(self) -> Settled | None:
        """The phase that was left."""
        return self.left

    def outgrown(self) -> Phase:
        """Return the phase as it is: the step has taught nothing."""
        return self.left.outgrown()

    def limited(self, task: Task) -> Phase:
        """Return it is over: the next step may not have room for it."""
        return self.left.limited(task)

    def is_pressing(self, moment: Moment) -> bool:
        """Whether the plan that was left must not come back either."""
        return self.left.is_pressing(moment)

    def agreed(self, plan: Plan, *, is_changed: bool) -> Phase:
        """Return it goes on, unless ranks want something else."""
        return self.left.agreed(plan, is_changed=True) if is_changed else self

    def decide(self, moment: Moment, case: Case) -> tuple[Phase, Plan]:
        """Comes back with what was learned."""
        return self.left.replanned(moment, case, self.left.plan, "a step tried other placements")


class Comparison(Excursion):
    """One step has a plain plan, which is as good as the one in force as far as predictions can tell."""

    __slots__ = ()

    def decide(self, moment: Moment, case: Case) -> tuple[Phase, Plan]:
        """Keep what was faster."""
        left, tuning, plain = self.left, moment.tuning, moment.plan
        usual, expected = moment.pace.usual, left.plan.prediction
        budget = moment.task.limits.budget or 0
        if usual is None or expected is None or plain.prediction is None or (moment.peak or 0) > budget:
            return super().decide(moment, case)
        needed = max(tuning.worth_it, tuning.deviation(moment.pace.deviation / usual))
        if moment.seconds >= (1 - needed) * usual:
            return super().decide(moment, case)
        said = plain.prediction.seconds / expected.seconds  # and this was found:
        favoured = max(said * usual / moment.seconds - 1, 0.0)
        moment.forgets.append(Pace.forget_seconds)
        why = f"a step under it took {significant(moment.seconds)} s instead of {significant(usual)} s"
        plain = moment.needs.with_prediction(case, plain)
        won = dataclasses.replace(left, plan=plain, why=why, is_measured=False, favoured=favoured)
        return won, plain


def has_excursion(step: int, tuning: Tuning, since: int | None = None) -> bool:
    """Whether the step after this one may try what the plan does not.

    Args:
        step: The step that has ended.
        tuning: Says after which steps that is so.
        since: The last one of which this was asked; by default the one before.
    """
    since, last = max(step - 1, 0) if since is None else since, tuning.excursions[-1]
    return any(since < due <= step for due in tuning.excursions) or step // last > since // last


def is_time_to_talk(step: int, tuning: Tuning) -> bool:
    """Whether ranks agree after a step; where layers are shared, no other step is looked at closely."""
    is_soon = has_excursion(step, tuning) or has_excursion(step - 1, tuning)
    return step <= tuning.learning + 1 or step % tuning.turn == 0 or is_soon


def _probe(moment: Moment, case: Case, *, has_warmed_up: bool) -> Plan:
    """Return the plan of a step that shows what is not known."""
    task = moment.task
    if not task.decides:
        return moment.plan
    has_room = case.bandwidth.capacity is None or not case.play(task.first()).fallback_bytes
    if task.has_budget and (has_warmed_up or not has_room):
        found = moment.within_budget(case, best_plan(case))
        if has_warmed_up:  # the first step needs much that others do not
            moment.check_limits(case, found)
        if not has_room:
            return found
    return probing_plan(case, step=moment.step)


def _first_plan(moment: Moment, case: Case, why: str) -> Settled:
    moment.forgets.append(Pace.forget_waits)
    if not moment.task.decides:
        return Settled(_as_policy(moment, case, moment.plan), why, case.bandwidth)
    moment.forgets.append(Pace.forget_seconds)
    first = moment.within_budget(case, best_plan(case))
    moment.check_limits(case, first)
    return Settled(first, why, case.bandwidth, beside_bytes=case.profile.beside_bytes(first.placements))


def _as_policy(moment: Moment, case: Case, plan: Plan) -> Plan:
    """Return the plan of a policy that leaves nothing to decide, with what it does if that is known."""
    # Where memory was never measured, it is not known what it holds beside activations of layers.
    found = case.play(plan).prediction if moment.needs.knows_rest else None
    return dataclasses.replace(plan, prediction=found)


def _broken_budget(peak: int, budget: int | None) -> str | None:
    if budget is None or peak <= budget:
        return None
    return f"a step peaked at {readable_size(peak)}, over the budget of {readable_size(budget)}"


def _astray(moment: Moment, expected: float) -> str | None:
    """Return that steps take another time than they were expected to, and not only from one to the next."""
    found, tuning = moment.pace.usual, moment.tuning
    if found is None:
        return None
    if not differ(found, expected, max(tuning.astray, tuning.deviation(moment.pace.deviation / expected))):
        return None
    if moment.skips and found < expected:  # layers that are skipped take no time
        return None
    return f"steps took {significant(found)} s instead of {significant(expected)} s"
