"""Puts plans in force: the plan of the step, when it is left for a larger step, and what follows it."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement
from tba_offload.errors import StoreError
from tba_offload.planner.auto import bytes_taken
from tba_offload.planner.model import MARGIN, DeviceShare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.capture.hooks import Capture
    from tba_offload.device.meters import LiveBytes
    from tba_offload.planner.auto import Controller
    from tba_offload.planner.measure import RunSize, StepObservation
    from tba_offload.planner.model import Limits, Plan
    from tba_offload.report.log import StepRecord
    from tba_offload.states import OptimizerStates
    from tba_offload.transfer.offloader import Offloader


class Planning:
    """Puts plans in force.

    Args:
        plan: That of the policy.
        layers: The number of each layer, as activations are named by it.
        capture: Tells what layers saved; forgets what it learned of those that are placed anew.
        offloader: Takes the window.
        probe: Measures the store; returns the bytes a second that it takes, and gives back, first.

    Attributes:
        plan: In force.
        controller: Renews it; ``None`` if there is nothing to decide and nothing to learn.
        chosen: Layers that the controller may have recomputed.
        seconds: How long training has waited for the controller since the last step; ``None`` without one.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[int],
        capture: Capture,
        offloader: Offloader,
        probe: Callable[[], Sequence[float]],
    ) -> None:
        self._layers, self._capture, self._offloader, self._probe = layers, capture, offloader, probe
        self.start(plan, None)

    def start(self, plan: Plan, controller: Controller | None) -> None:
        """Start with the plan of a policy, or with that of a new controller for its first step.

        Args:
            plan: The plan of the policy.
            controller: Is going to renew it.
        """
        self.controller = controller
        self.seconds: float | None = None if controller is None else 0.0
        self.plan = plan if controller is None else controller.task.first()
        policy = () if controller is None else controller.task.policy
        self.chosen = frozenset(index for index, wanted in enumerate(policy) if wanted is Placement.AUTO)
        self._outgrown: Plan | None = None  # what this step began with and was too large for
        self._made_for = self._budget  # the budget that the plan in force was made for
        self._offloader.resize_window(self.plan.window)

    @property
    def has_budget(self) -> bool:
        """Whether plans must keep to one, so that the controller counts how large a step is."""
        return self.controller is not None and self.controller.task.has_budget

    @property
    def _budget(self) -> int:
        return 0 if self.controller is None else self.controller.task.limits.budget or 0

    @property
    def has_planned(self) -> bool:
        """Whether a plan made from measured steps is in force."""
        return self.controller is not None and self.controller.has_planned

    @property
    def wants_memory(self) -> bool:
        """Whether the peak of the next step must be measured."""
        return self.controller is not None and self.controller.wants_memory

    def begin_step(self) -> None:
        """Begin a step. One that failed after it had left its plan taught nothing: the plan stays."""
        if self.controller is not None:
            self.controller.sizes.begin_step()
        if self._outgrown is not None:
            self._put_in_force(self._outgrown)
            self._outgrown = None

    def limit(self, limits: Limits) -> None:
        """Have plans, the window and layers before slow drives keep to other limits from now on."""
        self._capture.budget_bytes = limits.budget
        if self.controller is not None:
            self.controller.limit(limits)
        if not self.has_budget:
            self._put_in_force(replace(self.plan, window=limits.window))

    def leave_if_over_limits(self) -> None:
        """Run the step without its plan if less is left than the plan was made for."""
        if self.controller is not None and self.has_budget and self._budget < self._made_for:
            self._leave(self.controller)

    def leave_if_outgrown(self, layer: int, size: RunSize) -> None:
        """Run the rest of the step without its plan if a layer is given more than the plan is for."""
        controller = self.controller
        if controller is not None and not controller.sizes.note(layer, size) and self._outgrown is None:
            self._leave(controller)

    def _leave(self, controller: Controller) -> None:
        self._outgrown = self.plan
        self._put_in_force(controller.least(self.plan))

    def learn(self, seen: StepObservation) -> dict[str, object] | None:
        """Show the controller a step, and take its plan for the next one.

        Returns:
            What the log is told of a new plan; ``None`` if there is none.
        """
        controller, began, self.seconds = self.controller, time.perf_counter(), None
        if controller is None:
            return None
        if controller.steps == 0 and controller.task.decides:
            # Three small steps measure rates poorly. A full or hanging store raises its own error later.
            with suppress(StoreError, TimeoutError):
                controller.rates.note_probe(*self._probe()[:2])
        plan = controller.observe(seen)
        self._put_in_force(plan)
        self._outgrown, self._made_for = None, self._budget
        self.seconds = time.perf_counter() - began
        news = controller.news(plan)
        if controller.is_done:
            self.controller = None
        return None if news is None else {**news, "not_recomputed": sorted(seen.not_recomputed)}

    def _put_in_force(self, plan: Plan) -> None:
        if plan is self.plan:
            return
        # What a layer saves may be kept elsewhere because of how it, or the one before it, was placed.
        changed = [old is not new for old, new in zip(self.plan.placements, plan.placements, strict=True)]
        near = (index for index, is_new in enumerate(changed) if is_new or (index and changed[index - 1]))
        self._capture.forget_learned({self._layers[index] for index in near})
        self.plan = plan
        self._offloader.resize_window(plan.window)


SECOND = 2
"""Number of the step from which on gradients count. In the first one it is not known which backward pass is
the last before an update, so that no optimizer can free them in backward."""

SLOTS = 3
"""Sub-groups that updates go through: their memory is taken as soon as one sub-group is offloaded."""


class Budget:
    """What activations may take in a step.

    Args:
        limits: What the policy says.
        planning: Keeps to it by its plans and the window.
        gradients: Their bytes, and those of frozen weights that come and go.

    Attributes:
        limits: What holds now.
        device_bytes: Size of the device that the limits are derived from, which needs the base of each step;
            ``None`` if they are not.
        share: What lies on the device beside activations; ``None`` before that was measured. States that
            may leave are none of it.
        extra_bytes: Bytes of states on the device that may leave.
    """

    def __init__(self, limits: Limits, planning: Planning, gradients: LiveBytes) -> None:
        self.limits = self._of_policy = limits
        self.share: DeviceShare | None = None
        self.extra_bytes: Callable[[], int] = int
        self._planning, self._gradients = planning, gradients
        self.device_bytes = None if limits.device is None else limits.device.device_bytes
        self._most_gradients = 0
        self._at_begin = 0  # bytes of gradients

    def begin_step(self, base_bytes: int | None) -> None:
        """Look at what there is before the forward of a step; one that has less left runs without its plan.

        Args:
            base_bytes: Live bytes of the device, without gradients; ``None`` if they were not measured.
        """
        self._at_begin = self._gradients.nbytes
        self._most_gradients = max(self._most_gradients, self._at_begin)
        self._derive(base_bytes)
        self._planning.leave_if_over_limits()

    def end_step(self, record: StepRecord) -> None:
        """Take note of the gradients of a step and of states made in it, before a plan is made."""
        if record.step == SECOND:
            self._most_gradients = self._at_begin
        self._most_gradients = max(self._most_gradients, record.gradient_peak_bytes or 0)
        base = record.base_bytes
        self._derive(None if base is None else base + (record.state_bytes or 0))

    @property
    def of_activations(self) -> int | None:
        """The most bytes that activations may take at a time; ``None`` for no limit.

        As long as gradients have not come, activations may have their room.
        """
        budget = self.limits.budget
        if budget is None or not self.limits.nets_gradients:
            return budget
        return budget + self._most_gradients - self._at_begin

    def device_peak(self, taken: int) -> int | None:
        """Return the most bytes on the device in a step, as far as is known before it; ``None`` if unknown.

        Args:
            taken: Bytes of the budget that the step takes.
        """
        if self.share is None:
            return None
        return self.share.base_bytes + self.extra_bytes() + self.share.gradient_bytes + taken

    def _derive(self, base_bytes: int | None) -> None:
        if self.device_bytes is None or base_bytes is None:
            return
        base_bytes = max(base_bytes - self.extra_bytes(), 0)
        device = self.share = DeviceShare(self.device_bytes, base_bytes, self._most_gradients)
        before = self.limits.device
        if before is not None and before.holds_for(device):
            return
        self.limits = self._of_policy.on_device(device)
        self._planning.limit(self.limits)


class StatesBeside:
    """Fills what the plan for activations leaves of a device with sub-groups of optimizer states.

    All sub-groups are offloaded until a plan is in force. Then as many stay as there is room for; they leave
    at once when less is left.

    Args:
        planning: Has the plan.
        budget: Tells what is left.
        states: Those of each optimizer.
        chosen: Is told of each choice, in words and for the run log.
    """

    def __init__(
        self,
        planning: Planning,
        budget: Budget,
        states: Sequence[OptimizerStates],
        chosen: Callable[[str, dict[str, object]], object],
    ) -> None:
        self._planning, self._budget, self._states, self._chosen = planning, budget, states, chosen
        self._parts: list[int] = []  # sub-groups of each optimizer that are offloaded
        self._highest = 0  # bytes of the budget that a step took, where there are no plans
        self._needs: deque[int] = deque(maxlen=2)  # of the last steps: plans that race run in turn
        budget.extra_bytes = self._extra_bytes

    def _extra_bytes(self) -> int:
        """Return the bytes of states that lie there and may leave."""
        extra = sum(each.device_bytes - _on_device(each.sizes, len(each.sizes)) for each in self._states)
        return max(extra, 0)

    def step_ended(self, record: StepRecord) -> None:
        """Look how many sub-groups have room beside the activations of the next step.

        Args:
            record: The figures of the step that has ended.

        Raises:
            TransferError: A sub-group cannot be read or written.
        """
        share, prediction = self._budget.share, self._planning.plan.prediction
        taken = bytes_taken(record, self._budget.limits) or 0
        self._highest = max(self._highest, taken)
        count = sum(len(states.sizes) for states in self._states)
        if share is None or not count or (self._planning.has_budget and prediction is None):
            return
        self._needs.append(self._highest if prediction is None else max(prediction.peak_bytes, taken))
        free, parts = max(share.budget - int((1 + MARGIN) * max(self._needs)), 0), []
        for sizes in (states.sizes for states in self._states):
            least = _on_device(sizes, len(sizes))
            extra = [_on_device(sizes, part) - least for part in range(len(sizes) + 1)]
            parts.append(next(part for part, nbytes in enumerate(extra) if nbytes <= free))
            free -= extra[parts[-1]]
        if parts == self._parts:
            return
        self._parts = parts
        for states, part in zip(self._states, parts, strict=True):
            states.arrange(part)
        line = f"{sum(parts)} of {count} sub-groups of optimizer states are offloaded, as many as must be"
        self._chosen(line, {"step": record.step, "sub_groups": count, "travelling": sum(parts)})

    def close(self) -> None:
        """Choose nothing more."""
        self._budget.extra_bytes = int  # a cycle


def _on_device(sizes: Sequence[int], offloaded: int) -> int:
    """Return the bytes that states take if the first ones of these sub-groups are offloaded, with slots."""
    return sum(sizes[offloaded:]) + sum(sorted(sizes[:offloaded])[-SLOTS:])
