"""The plan in force: what it is, when it is left for a step that outgrows it, and what follows it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tba_offload.adapt.agreement import Agreement
from tba_offload.adapt.observation import StepObservation
from tba_offload.config.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.adapt.agreement import Agree
    from tba_offload.adapt.beside import SeenBeside
    from tba_offload.adapt.controller import Controller
    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.trace import DeviceTimes
    from tba_offload.plan.model import Limits, Plan
    from tba_offload.plan.sizes import RunSize
    from tba_offload.report.log import StepRecord
    from tba_offload.store.base import DriveLoad
    from tba_offload.transfer.offloader import Offloader


class Planning:
    """Puts plans in force.

    Args:
        plan: That of the policy.
        layers: The number of each layer, as activations are named by it.
        capture: Tells what layers saved; forgets what it learned of those that are placed anew.
        offloader: Takes the window.

    Attributes:
        plan: In force.
        controller: Renews it; ``None`` if there is nothing to decide and nothing to learn.
        chosen: Layers that the controller may have recomputed.
        seconds: How long training waited for the controller before the step; ``None`` without one.
        is_over: Whether no step comes any more.
    """

    def __init__(self, plan: Plan, layers: Sequence[int], capture: Capture, offloader: Offloader) -> None:
        self.plan = plan
        self.controller: Controller | None = None
        self.chosen: frozenset[int] = frozenset()
        self.seconds: float | None = None
        self.is_over = False
        self._next_seconds: float | None = None
        self._observer: Controller | Agreement | None = None
        self._outgrown: Plan | None = None  # what this step began with and was too large for
        self._made_for: int | None = None  # the activation budget that the plan in force was made for
        self._layers = layers
        self._capture = capture
        self._offloader = offloader

    def start(self, plan: Plan, controller: Controller | None, agree: Agree | None = None) -> None:
        """Start with the plan of a policy, or with that of a new controller for its first step.

        Args:
            plan: The plan of the policy.
            controller: Is going to renew it.
            agree: Asks the other ranks, if layers are shared.
        """
        self.close()
        self.controller = controller
        self._made_for = self._budget
        self._observer = controller
        if controller is not None and agree is not None and controller.task.is_shared:
            self._observer = Agreement(controller, agree)
        self._next_seconds = None if controller is None else 0.0
        self.plan = plan if controller is None else controller.task.first()
        self.chosen = frozenset(
            index
            for index, wanted in enumerate(() if controller is None else controller.task.policy)
            if wanted is Placement.AUTO
        )
        self._outgrown = None
        self._offloader.resize_window(self.plan.window)

    @property
    def has_budget(self) -> bool:
        """Whether plans have to keep to one, so that it counts how large a step is."""
        return self.controller is not None and self.controller.task.has_budget

    @property
    def _budget(self) -> int | None:
        """What activations may take now; ``None`` if no plan has to keep to it."""
        return None if self.controller is None else self.controller.task.limits.budget

    @property
    def has_planned(self) -> bool:
        """Whether a plan that was made from what steps are like is in force."""
        return self.controller is not None and self.controller.has_planned

    @property
    def wants_memory(self) -> bool:
        """Whether the next step's peak must be measured."""
        return self.controller is not None and self.controller.wants_memory

    def end(self) -> None:
        """No step comes after this one: nothing is planned any more."""
        self.is_over = True
        self.close()
        self.controller = self._observer = None

    def close(self) -> None:
        """Nothing more is going to be planned."""
        if self.controller is not None:
            self.controller.give_up()

    def begin_step(self) -> None:
        """Record that a step that failed or was skipped after it had left its plan taught nothing.

        The plan stays.
        """
        self.seconds, self._next_seconds = self._next_seconds, None
        if self.controller is not None:
            self._next_seconds = 0.0
            self.controller.begin_step()
        if self._outgrown is not None:
            self._put_in_force(self._outgrown)
            self._outgrown = None

    def limit(self, limits: Limits) -> None:
        """Have plans and the window keep to other limits from now on.

        Args:
            limits: In which budget and window are others.
        """
        if self.controller is not None:
            self.controller.limit(limits)
        if not self.has_budget:
            self._put_in_force(replace(self.plan, window=limits.window))

    def leave_if_over_limits(self) -> None:
        """Where less is left than the plan in force was made for, the step that begins runs without it."""
        now, then = self._budget, self._made_for
        if self._observer is None or not self.has_budget or now is None or then is None or now >= then:
            return
        if self._outgrown is None:
            self._outgrown = self.plan
        self._put_in_force(self._observer.least(self.plan))

    def leave_if_outgrown(self, layer: int, size: RunSize) -> None:
        """Where a layer is given more than the plan is for, the rest of the step runs without it."""
        if self.controller is None or self._observer is None:
            return
        if not self.controller.fits(layer, size) and self._outgrown is None:
            self._outgrown = self.plan
            self._put_in_force(self._observer.least(self.plan))

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
        """Show the controller what a step was like, and take its plan for the next one.

        Args:
            record: The figures of the step.
            loads: What the drives moved.
            began: When it began, by :func:`time.perf_counter`.
            beside: As of :class:`StepObservation`.
            repeatable: Layers that are the same if their forward runs twice.
            on_device: Its times by the clock of a device whose work ends later than the host gave it out.

        Returns:
            What there is to tell of a new plan, see :meth:`Controller.news`, and the layers that it must not
            have recomputed.
        """
        controller, observer = self.controller, self._observer
        if controller is None or observer is None:
            return None
        observation = StepObservation(
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
        began_at = time.perf_counter()
        plan = observer.observe(observation)
        self._next_seconds = time.perf_counter() - began_at
        self._put_in_force(plan)
        self._outgrown = None
        settled = controller.phase.settled
        if settled is None or not settled.is_overdue:
            self._made_for = self._budget
        if observer.is_done:
            self.controller = self._observer = None
        news = controller.news()
        return None if news is None else {**news, "not_recomputed": sorted(observation.not_recomputed)}

    def _put_in_force(self, plan: Plan) -> None:
        if plan is self.plan:
            return
        self._forget_learned(plan)
        self.plan = plan
        self._offloader.resize_window(plan.window)

    def _forget_learned(self, plan: Plan) -> None:
        """Record that what a layer saves may be kept elsewhere: for its placement or its neighbour's."""
        changed = [old is not new for old, new in zip(self.plan.placements, plan.placements, strict=True)]
        near = (index for index, is_new in enumerate(changed) if is_new or (index and changed[index - 1]))
        self._capture.registry.forget_learned({self._layers[index] for index in near})
