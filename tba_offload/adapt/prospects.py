"""What plans would do under other limits, by what a controller knows now."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tba_offload.adapt.proposals import best_plan
from tba_offload.plan.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.adapt.controller import Controller
    from tba_offload.plan.model import Limits, Prediction


def prospects(controller: Controller) -> Callable[[Limits], Prediction] | None:
    """Tells what the best plan under limits does; ``None`` before the controller has made one.

    What it goes by is fixed now, so that it may be asked while training goes on.
    """
    settled, known, task = controller.phase.settled, controller.knowledge, controller.task
    profile, bandwidth, never = known.profile, known.rates.bandwidth(), known.not_recomputed
    if settled is None or profile is None or bandwidth is None:
        return None
    careful = bandwidth.scaled(settled.caution)

    def prospect(limits: Limits) -> Prediction:
        wanted = dataclasses.replace(task, limits=limits)
        plan = best_plan(wanted, profile, careful, not_recomputed=never)
        return simulate(profile, plan, bandwidth).prediction

    return prospect
