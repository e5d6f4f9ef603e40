"""What activations and optimizer states may take of a device, found anew from step to step.

What a device holds beside activations is read when a step begins: parameters, states of optimizers or the
slots of offloaded ones, and whatever else outlives steps. The most gradients at one time are known after the
first step. So the first step runs as under each budget: all layers placed ``auto`` are offloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.planner.auto import bytes_taken
from tba_offload.planner.model import MARGIN, DeviceShare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.capture.hooks import Capture
    from tba_offload.device.live_bytes import LiveBytes
    from tba_offload.planner.model import Limits
    from tba_offload.planner.planning import Planning
    from tba_offload.report.log import StepRecord
    from tba_offload.states import OptimizerStates

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
        capture: Keeps to it where a drive is slow.
        gradients: Their bytes, and those of frozen weights that come and go.

    Attributes:
        limits: What holds now.
        share: What lies on the device beside activations; ``None`` before that was measured. States that
            may leave are none of it.
        extra_bytes: Bytes of states on the device that may leave.
    """

    def __init__(self, limits: Limits, planning: Planning, capture: Capture, gradients: LiveBytes) -> None:
        self.limits = self._of_policy = limits
        self.share: DeviceShare | None = None
        self.extra_bytes: Callable[[], int] = int
        self._planning, self._capture, self._gradients = planning, capture, gradients
        self._device_bytes = None if limits.device is None else limits.device.device_bytes
        self._most_gradients = 0
        self._at_begin = 0  # bytes of gradients

    @property
    def is_of_device(self) -> bool:
        """Whether it is derived from what lies on the device, which must be measured in each step."""
        return self._device_bytes is not None

    def begin_step(self, base_bytes: int | None) -> None:
        """Look at what there is before the forward of a step; one that has less left runs without its plan.

        Args:
            base_bytes: Live bytes of the device, without gradients; ``None`` if they were not measured.
        """
        self._at_begin = self._gradients.nbytes
        self._most_gradients = max(self._most_gradients, self._at_begin)
        self._derive(base_bytes)
        if self.is_of_device:
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
        if self._device_bytes is None or base_bytes is None:
            return
        base_bytes = max(base_bytes - self.extra_bytes(), 0)
        device = self.share = DeviceShare(self._device_bytes, base_bytes, self._most_gradients)
        before = self.limits.device
        if before is not None and before.holds_for(device):
            return
        self.limits = self._of_policy.on_device(device)
        self._planning.limit(self.limits)
        self._capture.budget_bytes = self.limits.budget


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
        self._offloaded: int | None = None
        self._highest = 0  # bytes of the budget that a step took, where there are no plans
        budget.extra_bytes = self._extra_bytes

    def _extra_bytes(self) -> int:
        """Return the bytes of states that lie there and may leave."""
        least = sum(_on_device(states.sizes, len(states.sizes)) for states in self._states)
        return max(sum(states.device_bytes for states in self._states) - least, 0)

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
        sizes = [states.sizes for states in self._states]
        count = sum(map(len, sizes))
        if share is None or not count or (self._planning.has_budget and prediction is None):
            return
        needed = self._highest if prediction is None else max(prediction.peak_bytes, taken)
        free = share.budget - int((1 + MARGIN) * needed)

        def extra(offloaded: int) -> int:
            """Return the bytes that lie there if so many are offloaded, beside those if all are."""
            parts = zip(sizes, self._split(offloaded, sizes), strict=True)
            return sum(_on_device(own, part) - _on_device(own, len(own)) for own, part in parts)

        offloaded = next((some for some in range(count) if extra(some) <= free), count)
        if offloaded == self._offloaded:
            return
        self._offloaded = offloaded
        for states, part in zip(self._states, self._split(offloaded, sizes), strict=True):
            states.arrange(part)
        line = f"{offloaded} of {count} sub-groups of optimizer states are offloaded, as many as must be"
        self._chosen(line, {"step": record.step, "sub_groups": count, "travelling": offloaded})

    def close(self) -> None:
        """Choose nothing more."""
        self._budget.extra_bytes = int  # a cycle

    @staticmethod
    def _split(offloaded: int, sizes: Sequence[Sequence[int]]) -> list[int]:
        """Return how many sub-groups of each optimizer are offloaded: an equal share of each."""
        count = sum(map(len, sizes))
        return [-(-offloaded * len(own) // count) for own in sizes]


def _on_device(sizes: Sequence[int], offloaded: int) -> int:
    """Return the bytes that states take if the first ones of these sub-groups are offloaded, with slots."""
    return sum(sizes[offloaded:]) + sum(sorted(sizes[:offloaded])[-SLOTS:])
