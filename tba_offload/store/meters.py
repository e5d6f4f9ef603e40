"""How fast a drive is: bytes moved in one direction, and the time in which there was something to move."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tba_offload.store.base import Load

if TYPE_CHECKING:
    from collections.abc import Callable

RECENT_BYTES = 64 << 20
"""Reach of the rate of a direction in bytes: what came before so many bytes counts half, or less."""


class Meter:
    """How many bytes move in one direction, and for how long there is something to move.

    Attributes:
        rate: Bytes a second of late; ``None`` before anything has moved. Looking takes no lock, and
            does not disturb :meth:`take`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rate: float | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._moving = 0
        self._since = 0.0
        self._nbytes = 0
        self._seconds = 0.0
        self._recent_bytes = 0.0
        self._recent_seconds = 0.0

    def begin(self) -> None:
        """Record that a transfer starts."""
        with self._lock:
            if not self._moving:
                self._since = self._clock()
            self._moving += 1

    def end(self, nbytes: int) -> None:
        """Record that it has ended, and has moved so many bytes."""
        with self._lock:
            self._pass_time()
            self._moving -= 1
            self._nbytes += nbytes
            self._recent_bytes += nbytes
            if self._recent_seconds and self._recent_bytes:
                self.rate = self._recent_bytes / self._recent_seconds
            if self._recent_bytes >= RECENT_BYTES:
                self._recent_bytes /= 2
                self._recent_seconds /= 2

    def take(self) -> Load:
        """Return what was moved since the last call."""
        with self._lock:
            if self._moving:
                self._pass_time()
            load = Load(self._nbytes, self._seconds)
            self._nbytes, self._seconds = 0, 0.0
            return load

    def _pass_time(self) -> None:
        """Count the time since it was last counted, in all of which something moved."""
        now = self._clock()
        self._seconds += now - self._since
        self._recent_seconds += now - self._since
        self._since = now
