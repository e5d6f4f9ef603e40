"""Puts plans in force: the plan of the step, when it is left for a larger step, and what follows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement
from tba_offload.errors import StoreError
from tba_offload.planner.auto import StepObservation
from tba_offload.planner.rates import EVIDENCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.trace import DeviceTimes
    from tba_offload.planner.auto import Controller
    from tba_offload.planner.measure import SeenBeside
    from tba_offload.planner.model import Limits, Plan
    from tba_offload.planner.sizes import RunSize
    from tba_offload.report.log import StepRecord
    from tba_offload.store.base import DriveLoad
    from tba_offload.transfer.offloader import Offloader

Agree = Callable[[dict[str, Placement], tuple[float, float]], dict[str, Placement]]
"""Takes a rank's proposal, name of a layer to its placement, and its need; returns what counts for each."""


class Planning:
    """Puts plans in force.

    Args:
        plan: That of the policy.
        layers: The number of each layer, as activations are named by it.
        capture: Tells what layers saved; forgets what it learned of those that are placed anew.
        offloader: Takes the window.
        probe: Measures the store; returns the bytes a second that it takes, and gives back.

    Attributes:
        plan: In force.
        controller: Renews it; ``None`` if there is nothing to decide and nothing to learn.
        chosen: Layers that the controller may have recomputed.
        seconds: How long training waited for the controller before the step; ``None`` without one.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[int],
        capture: Capture,
        offloader: Offloader,
        probe: Callable[[], tuple[float, float]],
    ) -> None:
        self.plan = plan
        self.controller: Controller | None = None
        self.chosen: frozenset[int] = frozenset()
        self.seconds: float | None = None
        self._next_seconds: float | None = None
        self._agree: Agree | None = None
        self._outgrown: Plan | None = None  # what this step began with and was too large for
        self._made_for: int | None = None  # the budget that the plan in force was made for
        self._layers, self._capture, self._offloader, self._probe = layers, capture, offloader, probe

    def start(self, plan: Plan, controller: Controller | None, agree: Agree | None = None) -> None:
        """Start with the plan of a policy, or with that of a new controller for its first step.

        Args:
            plan: The plan of the policy.
            controller: Is going to renew it.
            agree: Asks the other ranks, if layers are shared.
        """
        self.controller = controller
        self._made_for = self._budget
        self._agree = agree if controller is not None and controller.task.is_shared else None
        self._next_seconds = None if controller is None else 0.0
        self.plan = plan if controller is None else controller.task.first()
        policy = () if controller is None else controller.task.policy
        self.chosen = frozenset(index for index, wanted in enumerate(policy) if wanted is Placement.AUTO)
        self._outgrown = None
        self._offloader.resize_window(self.plan.window)

    @property
    def has_budget(self) -> bool:
        """Whether plans must keep to one, so that the controller counts how large a step is."""
        return self.controller is not None and self.controller.task.has_budget

    @property
    def _budget(self) -> int | None:
        return None if self.controller is None else self.controller.task.limits.budget

    @property
    def has_planned(self) -> bool:
        """Whether a plan made from measured steps is in force."""
        return self.controller is not None and self.controller.has_planned

    @property
    def wants_memory(self) -> bool:
        """Whether the peak of the next step must be measured."""
        return self.controller is not None and self.controller.wants_memory

    def end(self) -> None:
        """Plan nothing more: no step comes after this one."""
        self.controller = self._agree = None

    def begin_step(self) -> None:
        """Begin a step. One that failed after it had left its plan taught nothing: the plan stays."""
        self.seconds, self._next_seconds = self._next_seconds, None
        if self.controller is not None:
            self._next_seconds = 0.0
            self.controller.begin_step()
        if self._outgrown is not None:
            self._put_in_force(self._outgrown)
            self._outgrown = None

    def limit(self, limits: Limits) -> None:
        """Have plans and the window keep to other limits from now on."""
        if self.controller is not None:
            self.controller.limit(limits)
        if not self.has_budget:
            self._put_in_force(replace(self.plan, window=limits.window))

    def leave_if_over_limits(self) -> None:
        """Run the step without its plan if less is left than the plan was made for."""
        if self.has_budget and (self._budget or 0) < (self._made_for or 0):
            self._leave()

    def leave_if_outgrown(self, layer: int, size: RunSize) -> None:
        """Run the rest of the step without its plan if a layer is given more than the plan is for."""
        if self.controller is not None and not self.controller.fits(layer, size) and self._outgrown is None:
            self._leave()

    def _leave(self) -> None:
        if self.controller is None:
            return
        if self._outgrown is None:
            self._outgrown = self.plan
        self._put_in_force(self.controller.least(self.plan))

    def learn(
        self,
        record: StepRecord,
        loads: Sequence[DriveLoad],
        *,
        began: float,
        beside: SeenBeside | None,
        repeatable: Iterable[int],
        on_device: DeviceTimes | None,
    ) -> dict[str, object] | None:
        """Show the controller a step, and take its plan for the next one.

        Args:
            record: The figures of the step.
            loads: What the store moved.
            began: When it began, by :func:`time.perf_counter`.
            beside: Bytes seen beside activations.
            repeatable: Layers that may run twice.
            on_device: Its times by the clock of a device that runs behind the host.

        Returns:
            What the log is told of a new plan; ``None`` if there is none.
        """
        controller = self.controller
        if controller is None:
            return None
        began_at = time.perf_counter()
        if controller.steps == 0 and controller.task.decides:
            self._ask_store(controller, loads)
        seen = StepObservation(
            trace=self._capture.trace,
            stalls=self._offloader.stats.stalls,
            loads=loads,
            plan=self.plan,
            record=record,
            began=began,
            beside=beside,
            on_device=on_device,
            not_recomputed=self.chosen - frozenset(repeatable),
        )
        plan = self._agreed(controller, controller.observe(seen))
        self._put_in_force(plan)
        self._outgrown = None
        self._made_for = self._budget
        self._next_seconds = time.perf_counter() - began_at
        news = controller.news(plan)
        if controller.is_done and self._agree is None:
            self.controller = None
        return None if news is None else {**news, "not_recomputed": sorted(seen.not_recomputed)}

    def _ask_store(self, controller: Controller, loads: Sequence[DriveLoad]) -> None:
        """Measure the store by itself: three small steps alone are weak evidence of its rates."""
        if min(sum(load.write.nbytes for load in loads), sum(load.read.nbytes for load in loads)) >= EVIDENCE:
            return
        with suppress(StoreError, TimeoutError):  # a store that is full, or hangs, tells that by itself
            controller.rates.note_probe(*self._probe())

    def _agreed(self, controller: Controller, plan: Plan) -> Plan:
        """Return the plan with the recomputed layers of all ranks: that repeats collectives."""
        if self._agree is None:
            return plan
        names = controller.task.names
        if controller.is_time_to_talk:
            agreed = self._agree(dict(zip(names, plan.placements, strict=True)), controller.need_of(plan))
        else:  # what is recomputed stays as it is until then
            agreed = dict(zip(names, self.plan.placements, strict=True))
        return controller.bind([agreed[name] for name in names], plan)

    def _put_in_force(self, plan: Plan) -> None:
        if plan is self.plan:
            return
        # What a layer saves may be kept elsewhere because of how it, or the one before it, was placed.
        changed = [old is not new for old, new in zip(self.plan.placements, plan.placements, strict=True)]
        near = (index for index, is_new in enumerate(changed) if is_new or (index and changed[index - 1]))
        self._capture.registry.forget_learned({self._layers[index] for index in near})
        self.plan = plan
        self._offloader.resize_window(plan.window)
