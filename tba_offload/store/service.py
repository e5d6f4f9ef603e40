"""Whether a drive is in use: one that failed is left alone, and tried again at growing intervals."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tba_offload.errors import OutOfServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_REST = 1.0
"""Seconds that a drive is left alone after its first failure; after each further one twice as long.

By time and not by steps: a path to a drive comes back after seconds or minutes, while a step takes from
milliseconds to minutes. Doubling tries a drive that stays dead 17 times in a day, and one that comes back is
used again after at most twice the time that it was away.
"""


PROVEN = 16
"""Multiple of its last rest that a drive has to work for to count as healthy again.

Failures rarer than that cost little, and a drive that fails once a day must not rest for days after a month.
"""


class Service:
    """Of one drive: whether it takes writes.

    A failure takes it out of service. When the rest is over one write is let through; if that ends well the
    drive is back in service, otherwise it rests for twice as long. The next rest is longer than the last one
    also if the drive worked in between, but not for long: only so a drive that takes everything and gives
    nothing back costs ever fewer steps.

    Args:
        clock: Seconds.

    Attributes:
        cause: What took it out of service; ``None`` while it is in service.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.cause: str | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._rest = FIRST_REST
        self._until = 0.0
        self._since = 0.0  # when it last came back
        self._on_trial = False

    def admits(self) -> bool:
        """Whether something may be written now; out of service that begins a trial."""
        if self.cause is None:
            return True
        with self._lock:
            now = self._clock()
            if self.cause is not None and now < self._until:
                return False
            self._until = now + self._rest  # what is let through may never be written
            self._on_trial = self.cause is not None
            return True

    def is_resting(self) -> bool:
        """Whether nothing may be written, not even to try."""
        return self.cause is not None and not self._on_trial

    def failed(self, error: BaseException) -> None:
        """Record that a transfer failed; one that was queued before the first failure tells nothing new.

        Nor does one that was refused because of that failure, if a trial has begun by now.
        """
        with self._lock:
            if self.is_resting() or isinstance(error, OutOfServiceError):
                return
            now = self._clock()
            if self.cause is None and now - self._since > PROVEN * self._rest:
                self._rest = FIRST_REST
            self.cause = str(error)  # the error itself may know frames, and what they hold
            self._until = now + self._rest
            self._rest *= 2
            self._on_trial = False

    def succeeded(self) -> None:
        """Record that a write went well; what was queued before the failure does not end the rest."""
        if self.cause is None:
            return
        with self._lock:
            if self._on_trial:
                self._resume()

    def resume(self) -> None:
        """End the rest: the next write is tried."""
        with self._lock:
            self._resume()

    def _resume(self) -> None:
        self.cause = None
        self._since = self._clock()
        self._on_trial = False
