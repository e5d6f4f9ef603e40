"""Classes that apply plans, compute the memory for activations, and choose which other data is offloaded."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tba_offload.config.policy import Placement
from tba_offload.errors import StoreError
from tba_offload.planner.auto import bytes_taken
from tba_offload.planner.model import MARGIN, SPARE, DeviceShare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.capture.hooks import Capture
    from tba_offload.device.meters import LiveBytes
    from tba_offload.planner.auto import Controller
    from tba_offload.planner.measure import RunSize, StepObservation
    from tba_offload.planner.model import Limits, Plan
    from tba_offload.report.log import StepRecord
    from tba_offload.transfer.offloader import Offloader


class Planning:
    """The plan in use, which is replaced between steps, or during a step that needs more memory.

    Args:
        plan: The plan of the policy.
        layers: For each layer, the number of the layer in activation keys.
        capture: The capture hooks. When the placement of a layer changes, the hooks forget which saved
            tensors of the layer stay in memory.
        offloader: The offloader, which gets the in-flight window of each plan.
        probe: Function that measures the store before the first plan, and returns the write and read rates in
            bytes per second.

    Attributes:
        plan: The plan in use.
        controller: The controller, which makes new plans; ``None`` if no layer is ``auto`` and the run log
            needs no further measurements.
        chosen: Indices of the ``auto`` layers.
        seconds: Seconds that training waited for the controller after the last step; ``None`` without a
            controller.
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
        self.plan = plan
        self.start(None)

    def start(self, controller: Controller | None) -> None:
        """Use the first plan of the controller. Without a controller, use the plan of the policy."""
        self.controller = controller
        self.seconds: float | None = None if controller is None else 0.0
        self.plan = self.plan if controller is None else controller.task.first()
        policy = () if controller is None else controller.task.policy
        self.chosen = frozenset(index for index, wanted in enumerate(policy) if wanted is Placement.AUTO)
        self._outgrown: Plan | None = None  # plan at the start of this step, if replaced during the step
        self._made_for = self._budget  # budget for which the current plan was made
        self._offloader.resize_window(self.plan.window)

    @property
    def has_budget(self) -> bool:
        """Whether a budget limits the plans, so that the controller measures the size of each step."""
        return self.controller is not None and self.controller.task.has_budget

    @property
    def _budget(self) -> int:
        return 0 if self.controller is None else self.controller.task.limits.budget or 0

    @property
    def has_planned(self) -> bool:
        """Whether the current plan was made from measured steps."""
        return self.controller is not None and self.controller.has_planned

    @property
    def wants_memory(self) -> bool:
        """Whether the peak of the next step must be measured."""
        return self.controller is not None and self.controller.wants_memory

    def begin_step(self) -> None:
        """Begin a step. If the last step failed after its plan was replaced, use the original plan again."""
        if self.controller is not None:
            self.controller.sizes.begin_step()
        if self._outgrown is not None:
            self._put_in_force(self._outgrown)
            self._outgrown = None

    def limit(self, limits: Limits) -> None:
        """Set the limits for plans, for the window and for the capture hooks."""
        self._capture.budget_bytes = limits.budget
        if self.controller is not None:
            self.controller.limit(limits)
        if not self.has_budget:
            self._put_in_force(replace(self.plan, window=limits.window))

    def leave_if_over_limits(self) -> None:
        """Replace the plan for the rest of the step if the budget is smaller than when the plan was made."""
        if self.controller is not None and self.has_budget and self._budget < self._made_for:
            self._leave(self.controller)

    def leave_if_outgrown(self, layer: int, size: RunSize) -> None:
        """Replace the plan for the rest of the step if a layer run makes the step larger than planned."""
        controller = self.controller
        if controller is not None and not controller.sizes.note(layer, size) and self._outgrown is None:
            self._leave(controller)

    def _leave(self, controller: Controller) -> None:
        self._outgrown = self.plan
        self._put_in_force(controller.least(self.plan))

    def learn(self, seen: StepObservation) -> dict[str, object] | None:
        """Pass a finished step to the controller, and use the controller's next plan.

        Returns:
            The entry of the new plan for the run log; ``None`` if the plan is not new.
        """
        controller, began, self.seconds = self.controller, time.perf_counter(), None
        if controller is None:
            return None
        if controller.steps == 0 and controller.task.decides:
            # Three small steps are not enough to measure rates. Training itself raises errors of the store.
            with suppress(StoreError, TimeoutError):
                controller.rates.floor = self._probe()
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
        # If the placement of a layer or of the layer before it changes, other saved tensors of the layer may
        # stay in memory.
        changed = [old is not new for old, new in zip(self.plan.placements, plan.placements, strict=True)]
        near = (index for index, is_new in enumerate(changed) if is_new or (index and changed[index - 1]))
        self._capture.forget_learned({self._layers[index] for index in near})
        self.plan = plan
        self._offloader.resize_window(plan.window)


SECOND = 2
"""Number of the first step whose gradients are counted. In the first step, the optimizer cannot free
gradients during the last backward pass, because the number of backward passes is unknown."""


class Budget:
    """Memory that activations may use in a step.

    Args:
        limits: Limits of the policy.
        planning: The plan in use, which gets the current limits.
        gradients: Counter of the bytes of gradients, and of frozen weights in use.

    Attributes:
        limits: The current limits.
        device_bytes: The policy's limit for all bytes on the device; ``None`` without this limit.
        share: Device memory, and how much of this memory activations cannot use; ``None`` until measured.
            Optimizer states and frozen weights that could be offloaded are not counted.
        extra_bytes: Function that returns the bytes on the device that could be offloaded: optimizer states
            and frozen weights.
    """

    def __init__(self, limits: Limits, planning: Planning, gradients: LiveBytes) -> None:
        self.limits = self._of_policy = limits
        self.share: DeviceShare | None = None
        self.extra_bytes: Callable[[], int] = int
        self._planning, self._gradients = planning, gradients
        self.device_bytes = None if limits.device is None else limits.device.device_bytes
        self._most_gradients = 0
        self._at_begin = 0  # bytes of gradients at the start of the step

    def begin_step(self, base_bytes: int | None) -> None:
        """Before forward, compute the memory that is available to activations.

        If less memory is available than when the plan was made, replace the plan for this step.

        Args:
            base_bytes: Bytes in use on the device, without gradients; ``None`` if not measured.
        """
        self._at_begin = self._gradients.nbytes
        self._most_gradients = max(self._most_gradients, self._at_begin)
        self._derive(base_bytes)
        self._planning.leave_if_over_limits()

    def end_step(self, record: StepRecord) -> None:
        """Update the limits with the gradient bytes and the new optimizer states of a finished step."""
        if record.step == SECOND:
            self._most_gradients = self._at_begin
        self._most_gradients = max(self._most_gradients, record.gradient_peak_bytes or 0)
        base = record.base_bytes
        self._derive(None if base is None else base + (record.state_bytes or 0))

    @property
    def of_activations(self) -> int | None:
        """Largest number of bytes that activations may use now; ``None`` for no limit.

        Activations may use the memory that is reserved for later gradients.
        """
        budget = self.limits.budget
        if budget is None or not self.limits.nets_gradients:
            return budget
        return budget + self._most_gradients - self._at_begin

    def resize_window(self, nbytes: int | None) -> None:
        """Set the size of the in-flight window from the next step on; ``None`` for no limit."""
        if nbytes != self._of_policy.window:
            self._of_policy = replace(self._of_policy, window=nbytes)
            self.limits = self._of_policy if self.share is None else self._of_policy.on_device(self.share)
            self._planning.limit(self.limits)

    def device_peak(self, taken: int) -> int | None:
        """Return the predicted device peak of a step in bytes; ``None`` if unknown.

        Args:
            taken: Bytes of the budget that the step uses.
        """
        if self.share is None:
            return None
        return self.share.base_bytes + self.extra_bytes() + self.share.gradient_bytes + taken

    def _derive(self, base_bytes: int | None) -> None:
        if self.device_bytes is None or base_bytes is None:
            return
        base_bytes = max(base_bytes - self.extra_bytes(), 0)
        device = self.share = DeviceShare(self.device_bytes, base_bytes, self._most_gradients)
        before, left = self.limits.device, max(device.left, 0)
        if before is not None and (1 - 2 * SPARE) * left <= before.budget <= left:
            return  # the budget fits, and leaves little memory unused
        self.limits = self._of_policy.on_device(device)
        self._planning.limit(self.limits)


class Swappable(Protocol):
    """Optimizer states or frozen weights, divided into slices that are offloaded or stay on the device.

    Attributes:
        what: Name of the slices in messages.
        slots: Number of offloaded slices that are on the device at the same time during use.
    """

    what: str
    slots: int

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each slice, in the order in which :meth:`arrange` offloads the slices."""

    @property
    def device_bytes(self) -> int:
        """Bytes that these optimizer states or frozen weights use on the device."""

    def arrange(self, offloaded: int) -> None:
        """Offload the first ``offloaded`` slices from now on, and keep all later slices on the device."""


class ResidentData:
    """Choice of the optimizer states and frozen weights that stay on the device during training.

    Until the first plan, all states and weights are offloaded. After each step under a plan, states and
    weights stay on the device as far as the remaining memory allows.

    Args:
        planning: The plan in use.
        budget: The memory that activations may use.
        data: Optimizer states and frozen weights. The first items of the sequence get device memory first.
        chosen: Function that is called with each choice, as a line of text and as an entry of the run log.
    """

    def __init__(
        self,
        planning: Planning,
        budget: Budget,
        data: Sequence[Swappable],
        chosen: Callable[[str, dict[str, object]], object],
    ) -> None:
        self._planning, self._budget, self._data, self._chosen = planning, budget, data, chosen
        self._parts: list[int] = []  # number of offloaded parts of each
        self._highest = 0  # largest use of the budget so far, if there are no plans
        self._needs: deque[int] = deque(maxlen=2)  # use in the last two steps, as racing plans alternate
        budget.extra_bytes = self._extra_bytes

    def _extra_bytes(self) -> int:
        extra = sum(each.device_bytes - _on_device(each, len(each.sizes)) for each in self._data)
        return max(extra, 0)

    def step_ended(self, record: StepRecord) -> None:
        """Choose which optimizer states and frozen weights stay on the device in the next step.

        Args:
            record: The figures of the last step.

        Raises:
            TransferError: An optimizer state or a frozen weight cannot be read or written.
        """
        share, prediction = self._budget.share, self._planning.plan.prediction
        taken = bytes_taken(record, self._budget.limits) or 0
        self._highest = max(self._highest, taken)
        count = sum(len(each.sizes) for each in self._data)
        if share is None or not count:
            return
        if not self._planning.has_budget:
            self._needs.append(self._highest)
        elif prediction is None:
            return
        else:
            self._needs.append(max(prediction.peak_bytes, taken))
        free, parts = max(share.budget - int((1 + MARGIN) * max(self._needs)), 0), []
        for each in self._data:
            most = len(each.sizes)
            extra = [_on_device(each, part) - _on_device(each, most) for part in range(most + 1)]
            parts.append(next(part for part, nbytes in enumerate(extra) if nbytes <= free))
            free -= extra[parts[-1]]
        if parts == self._parts:
            return
        for each, part in zip(self._data, parts, strict=True):
            each.arrange(part)
        self._parts = parts
        shares = (
            f"{part} of {len(each.sizes)} {each.what}" for each, part in zip(self._data, parts, strict=True)
        )
        line = f"{', '.join(shares)} are offloaded. The rest stays in memory"
        self._chosen(line, {"step": record.step, "parts": count, "offloaded": sum(parts)})

    def close(self) -> None:
        """Stop choosing which data stays on the device."""
        self._budget.extra_bytes = int  # breaks a reference cycle


def _on_device(data: Swappable, offloaded: int) -> int:
    slots = sorted(data.sizes[:offloaded], reverse=True)[: data.slots]
    return sum(data.sizes[offloaded:]) + sum(slots)
