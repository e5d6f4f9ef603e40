"""How many sub-groups of optimizer states travel, where the policy leaves that open.

All travel until the planner knows what steps are like. Then it is found out which number lets the step and
the updates together be fastest, and again where a device has more or less left, or a drive is another.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.adapt.needs import taken
from tba_offload.adapt.prospects import prospects
from tba_offload.adapt.thinking import InSlices
from tba_offload.plan.model import Prediction
from tba_offload.plan.states_share import (
    StatesLoad,
    choose,
    drive_rate,
    in_words,
    settled,
    usual_seconds,
)
from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.adapt.planning import Planning
    from tba_offload.adapt.thinking import Thinking
    from tba_offload.plan.device_share import DeviceShare
    from tba_offload.plan.model import Limits
    from tba_offload.plan.states_share import Expected
    from tba_offload.report.log import StepRecord
    from tba_offload.session.budget import Budget
    from tba_offload.states import OptimizerStates, StatesRecord

_MOST = 8
"""Updates of an optimizer that are remembered; the median is that of fewer."""


class Basis(NamedTuple):
    """What a choice is made from.

    Attributes:
        load: States and updates.
        share: What lies on the device beside activations, without states.
    """

    load: StatesLoad
    share: DeviceShare

    def with_states(self, travelling: int) -> DeviceShare:
        """Return what lies there if that number of sub-groups travels."""
        base = self.share.base_bytes + self.load.device_bytes(travelling)
        return dataclasses.replace(self.share, base_bytes=base)

    def differs_from(self, other: Basis) -> bool:
        """Whether another choice may be better now."""
        return (
            self.load.sizes != other.load.sizes
            or not other.share.holds_for(self.share)
            or not math.isclose(self.load.rate, other.load.rate, rel_tol=TUNING.big_drift)
        )


class StatesChoice:
    """Has as few sub-groups travel as let steps be fastest.

    Args:
        planning: Tells what plans for activations would do.
        budget: Tells what is left for them.
        chosen: Is told of each choice, for the run log, and in words if it is another one than before.
    """

    def __init__(
        self, planning: Planning, budget: Budget, chosen: Callable[[str | None, dict[str, object]], object]
    ) -> None:
        self._planning = planning
        self._budget = budget
        self._chosen = chosen
        self._states: Sequence[OptimizerStates] = ()
        self._updates: dict[int, deque[tuple[float, float]]] = {}
        self._rate: float | None = None
        self._peak = 0
        self._thinking: tuple[Thinking[list[Expected]], Basis] | None = None
        self._last: Basis | None = None
        self._share: DeviceShare | None = None
        self._travelling: int | None = None

    def begin(self, states: Sequence[OptimizerStates]) -> None:
        """Choose of these from now on."""
        self._states = states
        self._budget.may_free(self._freeable)

    def _freeable(self) -> int:
        """Bytes of sub-groups that stay and need not."""
        sizes = tuple(states.sizes for states in self._states)
        if self._travelling is None or not any(sizes):
            return 0
        load = StatesLoad(sizes, 0.0, math.inf)
        return max(load.device_bytes(self._travelling) - load.device_bytes(load.count), 0)

    def close(self) -> None:
        """Nothing more is chosen."""
        self._states = ()
        if self._thinking is not None:
            self._thinking[0].give_up()
            self._thinking = None

    def updated(self, number: int, record: StatesRecord) -> None:
        """One of the optimizers has made an update."""
        self._updates.setdefault(number, deque(maxlen=_MOST)).append((record.seconds, record.waited_seconds))
        moved = record.read_bytes + record.written_bytes
        self._rate = drive_rate(self._rate, moved, record.seconds, record.waited_seconds)
        if self._travelling is not None and number == len(self._states) - 1:
            self._expect()

    def _expect(self) -> None:
        """Record that what the next updates take, by what the last ones have taken."""
        basis = self._basis()
        if basis is not None and self._travelling is not None:
            for states in self._states:
                states.expect(basis.load.seconds(self._travelling) / len(self._states))

    def step_ended(self, record: StepRecord) -> None:
        """Look whether there is something to choose after a step, or go on thinking about it.

        Raises:
            TransferError: A sub-group cannot be read or written.
        """
        self._peak = max(self._peak, taken(record, self._budget.limits) or 0)
        is_pressing = self._is_pressing
        if self._thinking is None and (is_pressing or record.step % TUNING.turn == 0):
            self._look()
        if self._thinking is None:
            return
        thinking, basis = self._thinking
        if thinking.go_on(math.inf if is_pressing else TUNING.thinking(record.seconds)):
            self._thinking = None
            self._take(thinking.answer(), basis, record)

    @property
    def _is_pressing(self) -> bool:
        """Whether the next step must not begin before it is known: others have taken of what is left."""
        share = self._budget.share
        return self._share is None or (share is not None and share.left < self._share.budget)

    def _look(self) -> None:
        """Begin to think where something speaks for it."""
        plan_of = None if self._planning.is_over else self._prospects()
        basis = None if plan_of is None else self._basis()
        if plan_of is None or basis is None:
            return
        if self._last is not None and not basis.differs_from(self._last):
            return
        limits_on = self._budget.limits_on
        task = partial(
            choose, basis.load, lambda n: limits_on(basis.with_states(n)), plan_of, now=self._travelling
        )
        self._thinking = InSlices(task), basis

    def _prospects(self) -> Callable[[Limits], Prediction] | None:
        """Return what plans do; where the policy places all layers, they need what they were seen to need."""
        if self._planning.has_budget:
            controller = self._planning.controller
            return None if controller is None else prospects(controller)
        seen = Prediction(0.0, 0.0, self._peak, 0)
        return lambda _: seen

    def _basis(self) -> Basis | None:
        """Return what there is to choose from; None before each optimizer has made an update, and states."""
        sizes = tuple(states.sizes for states in self._states)
        share, updates = self._budget.share, self._updates.values()
        if share is None or len(updates) < len(self._states) or not any(sizes):
            return None
        seconds = sum(usual_seconds([*times]) for times in updates)
        load = StatesLoad(
            sizes, seconds, self._rate or math.inf, turns=all(states.turns for states in self._states)
        )
        present = sum(states.device_bytes for states in self._states)
        return Basis(load, dataclasses.replace(share, base_bytes=share.base_bytes - present))

    def _take(self, tried: list[Expected], basis: Basis, record: StepRecord) -> None:
        """Take the best if it is clearly better than what there is."""
        before = self._travelling
        best, self._last = settled(tried, before), basis
        self._share = best.limits.device
        self._travelling = best.travelling
        parts = zip(self._states, basis.load.split(best.travelling), strict=True)
        for states, travelling in parts:
            states.arrange(travelling)
            states.expect(best.update_seconds / len(self._states))
        self._updates.clear()
        self._chosen(
            None if best.travelling == before else in_words(best, basis.load),
            {
                "step": record.step,
                "sub_groups": basis.load.count,
                **best.as_json(),
                "tried": [each.as_json() for each in tried],
            },
        )
