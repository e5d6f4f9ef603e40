"""How long steps took under the plan in force, and how much of that compute waited."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tba_offload.plan.bandwidth import median_deviation

if TYPE_CHECKING:
    from tba_offload.capture.trace import DeviceTimes, StepTimes
    from tba_offload.plan.tuning import Tuning
    from tba_offload.report.log import StepRecord


class Pace:
    """The times of the last steps; they are replaced, never changed, so that a copy stays as it is.

    A device that runs behind the host tells how long a step took when it has come to its end, mostly after
    the next one was given to it: it is waited for only where it has to be read anyway.

    Args:
        tuning: Says how many steps count.

    Attributes:
        seconds: Of the last steps, oldest first.
        waited: Shares of the last two steps under a plan that compute waited.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.seconds: tuple[float, ...] = ()
        self.waited: tuple[float, ...] = ()
        self._unread: DeviceTimes | None = None  # of a step under the plan, while its device was not asked

    def end_last_step(self) -> None:
        """Read how long the step before took, if its device has come to the end of it by now."""
        before, self._unread = self._unread, None
        if before is not None and before.are_known():
            self._add(before.step_seconds())

    def note(self, record: StepRecord, on_device: DeviceTimes | None, *, is_planned: bool) -> None:
        """Note a step.

        Args:
            record: Its figures.
            on_device: Its times by the clock of a device that runs behind the host.
            is_planned: Whether there is a plan by which it should, or should not, have waited.
        """
        if on_device is not None:
            self._unread = on_device
            return
        waited = (record.stall_seconds or 0.0) / record.seconds
        self._add(record.seconds, waited if is_planned else None)

    def read(self, times: StepTimes, *, is_planned: bool) -> None:
        """Note what the device told of the step after all."""
        if self._unread is None:
            return
        self._unread = None
        self._add(times.ended - times.began, times.waited if is_planned else None)

    def _add(self, seconds: float, waited: float | None = None) -> None:
        self.seconds = (*self.seconds, seconds)[-self._tuning.remembered_steps :]
        if waited is not None:
            self.waited = (*self.waited, waited)[-2:]

    @property
    def usual(self) -> float | None:
        """The median of the last few in seconds; ``None`` before there are two steps: one says nothing."""
        last = self.seconds[-self._tuning.recent :]
        return statistics.median(last) if len(last) > 1 else None

    @property
    def deviation(self) -> float:
        """By how many seconds steps differ from each other: the median deviation from their median."""
        return median_deviation(self.seconds)

    def has_waited(self, share: float) -> bool:
        """Whether compute waited for more than this share of both of the last two steps."""
        return len(self.waited) > 1 and min(self.waited) > share

    def forget(self) -> None:
        """Forget everything: steps have become larger."""
        self._unread = None
        self.seconds = self.waited = ()

    def forget_seconds(self) -> None:
        """Forget how long steps took: they took it under another plan."""
        self.seconds = ()

    def forget_waits(self) -> None:
        """Forget how long steps waited: that was answered."""
        self.waited = ()
