"""How many sub-groups of optimizer states travel, where the policy leaves that open.

All travel until the planner knows what steps are like. Then it is found out which number lets the step and
the updates together be fastest, and again where a device has more or less left, or a drive is another.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.adapt.thinking import InSlices
from tba_offload.formatting import readable_size, significant
from tba_offload.plan.model import Prediction
from tba_offload.plan.states_share import StatesLoad, choose, settled
from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.adapt.planning import Planning
    from tba_offload.adapt.thinking import Thinking
    from tba_offload.plan.device_share import DeviceShare
    from tba_offload.plan.model import Limits
    from tba_offload.plan.states_share import Expected
    from tba_offload.report.run_log import StepRecord
    from tba_offload.session.budget import Budget
    from tba_offload.states import OptimizerStates, StatesRecord

_REMEMBERED = 3
"""Updates whose median counts: one may be odd, and the first makes states."""

_WAITED = 0.05
"""Share of an update; if it waits longer for the drive, its bytes tell the rate of that."""


class Basis(NamedTuple):
    """What a choice was made from.

    Attributes:
        load: States and updates.
        share: What lay on the device beside activations, with as many states as stayed then.
        states_bytes: Bytes of those, slots included.
    """

    load: StatesLoad
    share: DeviceShare
    states_bytes: int

    def differs_from(self, other: Basis) -> bool:
        """Whether another choice may be better now."""
        without = dataclasses.replace(self.share, base_bytes=self.share.base_bytes - self.states_bytes)
        then = dataclasses.replace(other.share, base_bytes=other.share.base_bytes - other.states_bytes)
        return (
            self.load.sizes != other.load.sizes
            or not then.holds_for(without)
            or not math.isclose(self.load.rate, other.load.rate, rel_tol=TUNING.big_drift)
        )


class StatesChoice:
    """Has as few sub-groups travel as let steps be fastest.

    Args:
        planning: Tells what plans for activations would do.
        budget: Tells what is left for them.
        chosen: Is told of each choice, in words and for the run log.
    """

    def __init__(
        self, planning: Planning, budget: Budget, chosen: Callable[[str, dict[str, object]], object]
    ) -> None:
        self._planning = planning
        self._budget = budget
        self._chosen = chosen
        self._states: Sequence[OptimizerStates] = ()
        self._updates: dict[int, deque[StatesRecord]] = {}
        self._rate: float | None = None
        self._peak = 0
        self._thinking: tuple[Thinking[list[Expected]], Basis] | None = None
        self._last: Basis | None = None
        self._travelling: int | None = None

    def begin(self, states: Sequence[OptimizerStates]) -> None:
        """Chooses of these from now on."""
        self._states = states

    def updated(self, number: int, record: StatesRecord) -> None:
        """One of the optimizers has made an update."""
        self._updates.setdefault(number, deque(maxlen=_REMEMBERED)).append(record)
        moved = record.read_bytes + record.written_bytes
        if moved and (self._rate is None or record.waited_seconds > _WAITED * record.seconds):
            self._rate = moved / record.seconds

    def step_ended(self, record: StepRecord) -> None:
        """Looks whether there is something to choose after a step, or goes on thinking about it.

        Raises:
            TransferError: A sub-group cannot be read or written.
        """
        self._peak = max(self._peak, record.activation_peak_bytes or 0)
        if self._thinking is None:
            self._look(record)
        if self._thinking is None:
            return
        thinking, basis = self._thinking
        is_first = self._last is None
        if thinking.go_on(math.inf if is_first else TUNING.thinking(record.seconds)):
            self._thinking = None
            self._take(thinking.answer(), basis, record)

    def _look(self, record: StepRecord) -> None:
        """Begins to think where something speaks for it."""
        is_turn = self._last is None or record.step % TUNING.turn == 0
        plan_of = self._prospects() if is_turn else None
        basis = None if plan_of is None else self._basis()
        if plan_of is None or basis is None:
            return
        if self._last is not None and not basis.differs_from(self._last):
            return
        find = partial(
            choose,
            basis.load,
            partial(_limits_of, self._budget.limits_on, basis),
            plan_of,
            now=self._travelling,
        )
        self._thinking = InSlices(find), basis

    def _prospects(self) -> Callable[[Limits], Prediction] | None:
        """What plans do; where the policy places all layers, they need what they were seen to need."""
        controller = self._planning.controller
        if controller is not None and controller.task.decides:
            return controller.prospects()
        seen = Prediction(0.0, 0.0, self._peak, 0)
        return lambda _: seen

    def _basis(self) -> Basis | None:
        """What there is to choose from; ``None`` before each optimizer has made an update, and states."""
        sizes = tuple(states.sizes for states in self._states)
        share, updates = self._budget.share, self._updates.values()
        if share is None or len(updates) < len(self._states) or not any(sizes):
            return None
        seconds = sum(
            statistics.median(each.seconds - each.waited_seconds for each in records) for records in updates
        )
        load = StatesLoad(
            sizes, seconds, self._rate or math.inf, turns=all(states.turns for states in self._states)
        )
        return Basis(load, share, sum(states.device_bytes for states in self._states))

    def _take(self, tried: list[Expected], basis: Basis, record: StepRecord) -> None:
        """Takes the best if it is clearly better than what there is."""
        before = self._travelling
        best, self._last = settled(tried, before), basis
        self._travelling = best.travelling
        parts = zip(self._states, basis.load.split(best.travelling), strict=True)
        for states, travelling in parts:
            states.arrange(travelling, expected_seconds=best.update_seconds / len(self._states))
        if best.travelling != before:
            self._chosen(
                _told(best, basis.load),
                {
                    "step": record.step,
                    "sub_groups": basis.load.count,
                    **best.as_json(),
                    "tried": [each.as_json() for each in tried],
                },
            )


def _limits_of(limits_on: Callable[[DeviceShare], Limits], basis: Basis, states_bytes: int) -> Limits:
    """What holds for activations where so many bytes of states stay."""
    base = basis.share.base_bytes - basis.states_bytes + states_bytes
    return limits_on(dataclasses.replace(basis.share, base_bytes=base))


def _told(best: Expected, load: StatesLoad) -> str:
    left, staying = readable_size(best.limits.budget or 0), load.device_bytes(best.travelling)
    return (
        f"{best.travelling} of {load.count} sub-groups of optimizer states travel, {readable_size(staying)} "
        f"of states and slots stay, {left} are left for activations; predicted step "
        f"{significant(best.plan.seconds)} s and update {significant(best.update_seconds)} s"
    )
