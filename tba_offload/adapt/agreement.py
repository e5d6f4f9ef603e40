"""What ranks that share layers agree on: which of them are recomputed, since that repeats collectives.

What is kept and what is offloaded is each rank's own, and may differ from rank to rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from tba_offload.adapt.controller import Need
from tba_offload.adapt.phases import is_time_to_talk
from tba_offload.config.policy import Placement

if TYPE_CHECKING:
    from tba_offload.adapt.controller import Controller
    from tba_offload.adapt.observation import StepObservation
    from tba_offload.plan.model import Plan

Agree = Callable[[dict[str, Placement], Need], dict[str, Placement]]
"""Takes what a rank proposes, name of a layer to its placement, and its need; tells what counts for each."""


class Agreement:
    """A controller whose plans are agreed on with other ranks.

    Args:
        controller: The controller of this rank.
        agree: Asks the other ranks; every rank calls it after the same steps.
    """

    def __init__(self, controller: Controller, agree: Agree) -> None:
        self._controller = controller
        self._agree = agree

    def observe(self, observation: StepObservation) -> Plan:
        """Take note of a step.

        Returns:
            The plan for the next step: the proposal of this rank, with the recomputed layers of all.
        """
        controller, names = self._controller, self._controller.task.names
        proposed = controller.observe(observation)
        if is_time_to_talk(controller.knowledge.steps, controller.task.tuning):
            named = dict(zip(names, proposed.placements, strict=True))
            agreed = self._agree(named, controller.need_of(proposed))
        elif controller.knowledge.size.has_grown:  # what is recomputed stays as it is until then
            agreed = dict(zip(names, observation.plan.placements, strict=True))
        else:
            return proposed
        return controller.bind([agreed[name] for name in names], proposed)

    def least(self, plan: Plan) -> Plan:
        """Return the plan for the rest of a step that is larger than what ``plan`` was made for.

        It is that of the first step, but what the ranks have agreed to recompute they do recompute.
        """
        first = self._controller.least(plan)
        placements = tuple(
            Placement.RECOMPUTE_OFFLOAD if wanted is Placement.AUTO and now.recomputes else wanted
            for wanted, now in zip(first.placements, plan.placements, strict=True)
        )
        return dataclasses.replace(first, placements=placements)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to decide and nothing more to learn: other ranks may always ask."""
        return False
