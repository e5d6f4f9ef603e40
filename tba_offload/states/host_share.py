"""How many sub-groups the processor updates while the device updates the others."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_RECENT = 5
"""Updates whose median counts: single ones are as slow as whatever else runs on the host makes them."""

_WORTH_IT = 0.95
"""Of the expected time: what another split must come down to, since a sub-group that changes lanes is written
and read once more. Less would follow the noise of single updates."""


class LaneTime(NamedTuple):
    """What one lane did in an update.

    Attributes:
        nbytes: Bytes of the states that it updated.
        seconds: From the begin of the update to the end of its last sub-group.
    """

    nbytes: int
    seconds: float


class HostShare:
    """Follows ``states.update``: all, a fixed share, or what lets both lanes end at the same time.

    With ``auto`` updates are split in halves until one was timed. From then on the lanes' rates are known,
    and each sub-group goes to the lane that ends it first: the time of an update is ``max(device bytes /
    device rate, host bytes / host rate)``, as in Deep Optimizer States, with rates that hold what host memory
    and link allow when both work.

    Args:
        percent: Of the sub-groups, what the processor updates; ``None`` for ``auto``.
    """

    def __init__(self, percent: int | None) -> None:
        self._percent = percent
        self._device: deque[float] = deque(maxlen=_RECENT)  # seconds for each byte
        self._host: deque[float] = deque(maxlen=_RECENT)

    def count(self, sizes: Sequence[int], before: int) -> int:
        """How many sub-groups the processor updates, the first ones of these.

        Args:
            sizes: Bytes of the states of each.
            before: How many of them it has.
        """
        if self._percent is not None:
            return round(self._percent * len(sizes) / 100)
        if not self._device or not self._host:
            return len(sizes) // 2
        on_host = [0, *accumulate(sizes)]
        seconds = [self._seconds(on_host[-1] - nbytes, nbytes) for nbytes in on_host]
        best = min(range(len(seconds)), key=seconds.__getitem__)
        now = min(before, len(sizes))
        return best if seconds[best] < _WORTH_IT * seconds[now] else now

    def expected(self, on_device: int, on_host: int) -> float | None:
        """Seconds that an update takes; ``None`` as long as the rate of a lane that works is not known.

        Args:
            on_device: Bytes of states that the device updates.
            on_host: Bytes that the processor does.
        """
        lanes = ((on_device, self._device), (on_host, self._host))
        if not on_device + on_host or any(nbytes and not rates for nbytes, rates in lanes):
            return None
        return self._seconds(on_device, on_host)

    def learn(self, device: LaneTime, host: LaneTime) -> None:
        """Take note of an update."""
        for lane, rates in ((device, self._device), (host, self._host)):
            if lane.nbytes:
                rates.append(lane.seconds / lane.nbytes)

    def _seconds(self, on_device: int, on_host: int) -> float:
        device = statistics.median(self._device) if self._device else 0.0
        host = statistics.median(self._host) if self._host else 0.0
        return max(device * on_device, host * on_host)
