"""What activations may take: as the policy says, or what ``budget.device_bytes`` leaves for them.

What a device holds beside activations is read when a step begins: parameters, states of optimizers or the
slots of offloaded ones, and whatever else outlives steps. How many bytes of gradients there are at a time is
known after the first step. So the first one runs as under each budget, with all layers of the planner
offloaded and little in flight; the states that its update leaves are known when it ends, or when the second
one begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tba_offload.plan.device_share import DeviceShare
from tba_offload.plan.model import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tba_offload.adapt.planning import Planning
    from tba_offload.capture.hooks import Capture
    from tba_offload.config import OffloadConfig
    from tba_offload.device.live_bytes import LiveBytes
    from tba_offload.report.log import StepRecord
    from tba_offload.session.notices import Notices


_SECOND = 2
"""Number of the step from which on it counts how many gradients there are. In the first it is not known which
backward pass is the last before an update, so that no optimizer can free them in backward."""


class Watched(NamedTuple):
    """What keeps to the budget, and what it is made from.

    Attributes:
        planning: Keeps to it by its plans and the window.
        capture: Keeps to it where a drive is slow.
        gradients: Their bytes, and those of frozen weights that come and go.
        notices: Takes the warning that nothing is left.
    """

    planning: Planning
    capture: Capture
    gradients: LiveBytes
    notices: Notices


class Budget:
    """What activations may take in a step.

    Args:
        limits: What the policy says.
        watched: What keeps to it.
        device_bytes: Most bytes of everything on the device; ``None`` for no limit.
        static: Tells bytes of the device by what holds them.

    Attributes:
        limits: What holds now.
    """

    def __init__(
        self,
        limits: Limits,
        watched: Watched,
        *,
        device_bytes: int | None,
        static: Callable[[], Mapping[str, int]],
    ) -> None:
        self.limits = self._of_policy = limits
        self._watched = watched
        self._device_bytes = device_bytes
        self._static = static
        self._most_gradients = 0
        self._share: DeviceShare | None = None
        self._freeable: Callable[[], int] = int
        self._at_begin = 0  # bytes of gradients
        self._less: tuple[tuple[int, int], int] = (0, 0), 0  # of a step, by how much less there was of all

    @property
    def is_of_device(self) -> bool:
        """Whether it is derived from what lies on the device, which must be measured in each step."""
        return self._device_bytes is not None

    def begin_step(self, base_bytes: int | None) -> None:
        """Look at what there is before the forward of a step; one that has less left runs without its plan.

        Args:
            base_bytes: Live bytes of the device, without gradients; ``None`` if they were not measured.
        """
        self._at_begin = self._watched.gradients.nbytes
        self._most_gradients = max(self._most_gradients, self._at_begin)
        self._derive(base_bytes)
        if self.is_of_device:
            self._watched.planning.leave_if_over_limits()

    def end_step(self, record: StepRecord) -> None:
        """Take note of the gradients of a step and of states made in it, before a plan is made."""
        if record.step == _SECOND:
            self._most_gradients = self._at_begin
        self._most_gradients = max(self._most_gradients, record.gradient_peak_bytes or 0)
        base, peak = record.base_bytes, record.device_peak_bytes
        expected = self._watched.planning.plan.prediction
        if self._share is not None and peak is not None and expected is not None:
            of_peaks = self._share.base_bytes + self._most_gradients + expected.peak_bytes
            self._less = (expected.peak_bytes, self._at_begin), of_peaks - peak
        self._derive(None if base is None else base + (record.state_bytes or 0))

    def may_free(self, freeable: Callable[[], int]) -> None:
        """States may leave the device, as many bytes as this tells: before they have, nothing is short."""
        self._freeable = freeable

    @property
    def share(self) -> DeviceShare | None:
        """What lies on the device beside activations; ``None`` before it was measured."""
        return self._share

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
        """Return the most bytes on the device in a step; ``None`` if unknown.

        What a step needed beyond what is known of it counts with the last gradients too, and may go with the
        loss: how much less there is, the last step has shown, if it was to take as much and began with as
        many. No plan counts on it, since under another one it is something else.

        Args:
            taken: Bytes of the budget that the step takes.
        """
        share, (before, less) = self._share, self._less
        if share is None:
            return None
        # Of activations alone, the peak is at another moment than that of gradients under most plans.
        counts = before == (taken, self._at_begin) or not self.limits.nets_gradients
        return share.base_bytes + share.gradient_bytes + taken - (less if counts else 0)

    def limits_on(self, share: DeviceShare) -> Limits:
        """Return what would hold if that lay on the device."""
        return self._of_policy.on_device(share)

    def _derive(self, base_bytes: int | None) -> None:
        if self._device_bytes is None or base_bytes is None:
            return
        device = self._share = DeviceShare(self._device_bytes, base_bytes, self._most_gradients)
        notices = self._watched.notices
        if device.left + self._freeable() <= 0 and not notices.said("nothing left"):
            notices.nothing_left(device, self._static())
        before = self.limits.device
        if before is not None and before.holds_for(device):
            return
        self.limits = self._of_policy.on_device(device)
        self._watched.planning.limit(self.limits)
        self._watched.capture.budget_bytes = self.limits.budget


def limits_of(config: OffloadConfig) -> Limits:
    """Budget and window of a configuration, and what may be written; of a device all may be left at first."""
    budget = config.budget
    limits = Limits(budget.activation_bytes, budget.window, config.store.write_bytes_per_day)
    return limits if budget.device_bytes is None else limits.on_device(DeviceShare(budget.device_bytes))
