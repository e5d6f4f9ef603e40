"""Decides between steps on the layers that are placed ``auto``: learns from each step, and plans.

The first step offloads all of them, so that a budget holds from the start. The next two show what layers of
each kind cost if they are kept, recomputed, or rebuilt in part. Then there is a plan. It is renewed when a
step was not as predicted, or the drive is not what it was, and only if the new one is clearly better. What is
decided when stands in :mod:`tba_offload.adapt.phases`; here is what the controller knows.

Under a budget plans are made for the largest step, with all layers that ran in any step. Where a layer is
given more than that, the rest of the step runs as the first one did, and what other steps needed is
forgotten; in smaller steps, and where layers are skipped, the plan stays.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from tba_offload.adapt.knowledge import Knowledge
from tba_offload.adapt.phases import Moment, Settled, WarmUp, is_time_to_talk
from tba_offload.adapt.proposals import bare, best_plan, over_budget
from tba_offload.adapt.thinking import AtOnce
from tba_offload.config.policy import Placement
from tba_offload.errors import warn
from tba_offload.plan.describe import describe_plan
from tba_offload.plan.writes import writes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.adapt.observation import StepObservation
    from tba_offload.adapt.phases import Phase
    from tba_offload.adapt.task import Task
    from tba_offload.adapt.thinking import Thinking
    from tba_offload.plan.model import Limits, Plan
    from tba_offload.plan.sizes import RunSize

    Decision = tuple[Phase, Plan]
    """What comes next."""

    Think = Callable[[Callable[[], Decision]], Thinking[Decision]]
    """Begins to find out what comes next."""


Need = tuple[float, float]
"""Need of a rank for its proposal: bytes over its budget and seconds of its step without recomputation."""


class Controller:
    """The plans of one session.

    Args:
        task: What it has to decide.
        think: Begins to find out what comes next; by default it is found out at once.

    Attributes:
        task: The same.
        knowledge: What it has learned from the steps.
    """

    def __init__(self, task: Task, think: Think = AtOnce) -> None:
        self.task = task
        self.knowledge = Knowledge(task)
        self._think = think
        self._thinking: tuple[Thinking[Decision], Moment] | None = None
        self._phase: Phase = WarmUp()
        self._told: Plan | None = None
        self._warned = False

    # ---- during a step ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget how large the last step was, which may have failed."""
        self.knowledge.sizes.begin_step()

    def fits(self, layer: int, size: RunSize) -> bool:
        """Whether this step, now that a layer is going to run with a size, still is as was planned for."""
        return self.knowledge.sizes.note(layer, size)

    def least(self, plan: Plan) -> Plan:  # noqa: ARG002 - what ranks have agreed on depends on it
        """Return the plan for the rest of a step that is larger than what ``plan`` was made for."""
        return self.task.first()

    # ---- between steps ---------------------------------------------------------------------------

    def limit(self, limits: Limits) -> None:
        """Have plans keep to other limits; the one in force is thought over after the next step."""
        if limits != self.task.limits:
            self.give_up()
            self.task = dataclasses.replace(self.task, limits=limits)
            self.knowledge.limit(self.task)
            self._phase = self._phase.limited(self.task)

    @property
    def phase(self) -> Phase:
        """The phase that the next step is in, unless a warm-up ends with it."""
        return self._phase

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to decide and nothing more to learn."""
        learned = self._phase.settled is not None or self.knowledge.steps >= self.task.tuning.turn
        return learned and not self.task.decides

    @property
    def has_planned(self) -> bool:
        """Whether a plan of its own is in force."""
        return self._phase.settled is not None and self.task.decides

    @property
    def wants_memory(self) -> bool:
        """Whether the next step's peak must be measured: none under this plan was, and there is a budget."""
        settled = self._phase.settled
        if settled is None:
            return self.task.has_budget and self.knowledge.steps < self.task.tuning.closely
        return self.task.has_budget and not settled.is_measured

    def observe(self, observation: StepObservation) -> Plan:
        """Take note of a step.

        What it teaches is thought about after this step and the next ones, for a little each time; at once
        where the next step must not begin before, or ranks are about to agree.

        Returns:
            The plan for the next step; the one that was in force if nothing speaks for another one.
        """
        moment, plan = self._noted(observation), observation.plan
        slice_of_time = self.task.tuning.thinking(observation.record.seconds)
        is_waited_for = self.task.is_shared or self._phase.is_pressing(moment)
        if self._thinking is not None:
            if is_waited_for:
                self.give_up()  # that is about steps that are no more
            elif not self._thinking[0].go_on(slice_of_time):
                since = moment.step - self._thinking[1].step
                return self._repredicted(observation, moment) if since.bit_count() == 1 else plan
            else:
                plan = self._taken(plan)
                if bare(plan) != bare(observation.plan):
                    return plan  # of which nothing was seen yet
                observation = dataclasses.replace(observation, plan=plan)
                moment = dataclasses.replace(moment, plan=plan)
        if self.task.is_shared:  # the ranks talk after the same steps
            is_turn = is_time_to_talk(moment.step, self.task.tuning)
        else:
            is_turn = self._phase.is_turn(moment)
        if not (moment.size.has_grown or is_turn):
            return plan
        try:
            self._look(observation, moment)
        except Exception as error:  # noqa: BLE001 - a plan is advice: training goes on, and so do the other ranks
            self._warn(_failed(error, moment.step))
        if self._thinking is None or not (is_waited_for or self._thinking[0].go_on(slice_of_time)):
            self._phase, plan = self._phase.undecided(plan)
            return plan
        return self._taken(plan)

    def _noted(self, observation: StepObservation) -> Moment:
        known = self.knowledge
        known.end_step(observation)
        self._phase = self._phase.begun(known.steps, self.task.tuning)
        if known.size.has_grown:
            self._phase = self._phase.outgrown()
        peak = known.note(observation, self._phase)
        if peak is not None and known.is_as_planned:
            self._phase = self._phase.measured()
        return Moment(
            task=self.task,
            step=known.steps,
            plan=observation.plan,
            bandwidth=known.rates.bandwidth(),
            room=known.rates.room,
            usual=known.rates.usual(),
            deviation=known.rates.deviation(),
            seconds=observation.record.seconds,
            peak=peak,
            size=known.size,
            skips=known.skips,
            needs=copy.copy(known.needs),
            pace=copy.copy(known.pace),
        )

    def _look(self, observation: StepObservation, moment: Moment) -> None:
        """Begin to think about a step."""
        known = self.knowledge
        case = known.understand(observation, self._phase)
        if case is None:
            return
        moment = dataclasses.replace(
            moment,
            seconds=known.seconds,
            skips=known.skips,
            needs=copy.copy(known.needs),
            pace=copy.copy(known.pace),
        )
        self._thinking = self._think(partial(self._phase.decide, moment, case)), moment

    def _repredicted(self, observation: StepObservation, moment: Moment) -> Plan:
        """Get the plan in force while another one is thought about, with the times of steps as they are now.

        It takes time to look at a step closely, so that it is done ever more rarely: one, two, four steps
        after the thinking has begun, and so on.
        """
        settled, plan = self._phase.settled, observation.plan
        if settled is None or settled is not self._phase:
            return plan
        try:
            case = self.knowledge.understand(observation, settled)
            if case is None:
                return plan
            self._phase = settled.repredicted(case, self.knowledge.needs)
        except Exception as error:  # noqa: BLE001 - a plan is advice: training goes on with the one it has
            self._warn(_failed(error, moment.step))
            return plan
        return self._phase.plan

    def _taken(self, plan: Plan) -> Plan:
        """Return the plan that was thought about, with what follows."""
        if self._thinking is None:
            return plan
        (thinking, moment), self._thinking = self._thinking, None
        try:
            self._phase, plan = thinking.answer()
        except Exception as error:  # noqa: BLE001 - a plan is advice: training goes on with the one it has
            self._warn(_failed(error, moment.step))
            self._phase, plan = self._phase.undecided(plan)
            return plan
        for forget in moment.forgets:
            forget(self.knowledge.pace)
        for warning in moment.warnings:
            self._warn(warning)
        return plan

    def give_up(self) -> None:
        """Forget what it was thinking about."""
        if self._thinking is not None:
            self._thinking[0].give_up()
            self._thinking = None

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn(what, RuntimeWarning)

    def news(self) -> dict[str, object] | None:
        """Return a new plan and everything that it was made from; ``None`` if there is none since last time.

        Under ``summary`` it is told in one line.
        """
        settled, profile, task = self._phase.settled, self.knowledge.profile, self.task
        if settled is None or profile is None:
            return None
        bare = dataclasses.replace(settled.plan, prediction=None)
        if bare == self._told:
            return None
        writes = writes_of(profile, settled.plan, settled.planned_for, task.limits, task.policy)
        summary = describe_plan(task.names, settled.plan, self._told, settled.why, writes)
        self._told = bare
        return {
            "summary": summary,
            "names": list(task.names),
            "policy": [placement.value for placement in task.policy],
            "profile": profile.as_json(),
            "drive": dataclasses.asdict(settled.planned_for),
            "rates": self.knowledge.rates.as_json(),
            "caution": settled.caution,
            "limits": dataclasses.asdict(task.limits),
            "plan": settled.plan.as_json(),
            **({} if writes is None else {"writes": writes._asdict()}),
        }

    # ---- what ranks agree on ---------------------------------------------------------------------

    def need_of(self, proposed: Plan) -> Need:
        """How far this rank would be over its budget, and how long its step, if nothing were recomputed."""
        case = self.knowledge.case
        if self._phase.settled is None or case is None:
            return 0.0, 0.0
        without = tuple(
            Placement.OFFLOAD if mine.recomputes and wanted is Placement.AUTO else mine
            for mine, wanted in zip(proposed.placements, self.task.policy, strict=True)
        )
        found = case.play(dataclasses.replace(proposed, placements=without))
        return max(found.peak_bytes - self.task.limits.planned, 0.0), found.seconds

    def bind(self, wanted: Sequence[Placement], proposed: Plan) -> Plan:
        """Take from a proposal what the ranks have not agreed on.

        Args:
            wanted: For each layer the proposal that counts; it is recomputed if that recomputes it.
            proposed: The plan that this rank has proposed.

        Returns:
            The plan for the next step.
        """
        pairs = zip(wanted, proposed.placements, strict=True)
        is_changed = any(agreed.recomputes != mine.recomputes for agreed, mine in pairs)
        plan = self._with_recomputed(wanted, proposed) if is_changed else proposed
        self._phase = self._phase.agreed(plan, is_changed=is_changed)
        if isinstance(self._phase, Settled) and self.knowledge.profile is not None:
            told = over_budget(self.task, plan, self.knowledge.profile, self.knowledge.rates.room)
            if told is not None:
                self._warn(told)
        return plan

    def _with_recomputed(self, wanted: Sequence[Placement], proposed: Plan) -> Plan:
        """Return the best that this rank can do if exactly those layers are recomputed that shall be."""
        placements = [
            placement if not agreed.recomputes else mine if mine.recomputes else agreed
            for agreed, mine, placement in zip(wanted, proposed.placements, self.task.policy, strict=True)
        ]
        try:
            plan = _best_with(placements, self._phase, self.knowledge)
        except Exception as error:  # noqa: BLE001 - the other ranks have agreed and go on
            self._warn(f"no plan could be made of what the ranks agreed on: {error!r}")
            plan = None
        if plan is not None:
            return plan
        known = zip(placements, proposed.placements, strict=True)
        kept = (
            mine if placement is Placement.AUTO and not mine.recomputes else placement
            for placement, mine in known
        )
        return dataclasses.replace(proposed, placements=tuple(kept), prediction=None)


def _best_with(placements: Sequence[Placement], phase: Phase, known: Knowledge) -> Plan | None:
    """Return the best plan that recomputes no layer but those placed so; ``None`` before there is one."""
    settled, case = phase.settled, known.case
    if settled is None or case is None:
        return None
    bound = dataclasses.replace(
        case.counting_on(settled.caution),
        task=dataclasses.replace(case.task, policy=tuple(placements)),
        not_recomputed=frozenset(range(len(placements))),
    )
    return known.needs.with_prediction(case, best_plan(bound))


def _failed(error: Exception, step: int) -> str:
    return f"no plan could be made after step {step}: {error!r}; the one before stays"
