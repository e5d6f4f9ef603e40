"""What plans would do under other limits, by what a controller knows now."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tba_offload.adapt.proposals import best_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.adapt.controller import Controller
    from tba_offload.plan.model import Limits, Prediction


def prospects(controller: Controller) -> Callable[[Limits], Prediction] | None:
    """Tell what the best plan under limits does; ``None`` before the controller has made one.

    What it goes by is fixed now, so that it may be asked while training goes on.
    """
    settled, case = controller.phase.settled, controller.knowledge.case
    if settled is None or case is None:
        return None
    careful = case.counting_on(settled.caution)

    def prospect(limits: Limits) -> Prediction:
        wanted = dataclasses.replace(careful, task=dataclasses.replace(case.task, limits=limits))
        return case.play(best_plan(wanted)).prediction

    return prospect
