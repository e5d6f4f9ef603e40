"""One place of a store: its room, its health and its load."""

from __future__ import annotations

import errno
import math
import time
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

from tba_offload.errors import OutOfServiceError, StoreFullError
from tba_offload.store.base import DRIVE_TIER, DriveLoad, Load
from tba_offload.store.extents import Extents
from tba_offload.store.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.store.base import Extent, Store
    from tba_offload.store.pool import Transfer

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 600.0
"""Seconds that a place is left alone after its first failure, and at most.

By time and not by steps: a path to a drive comes back after seconds or minutes, while a step takes from
milliseconds to minutes.
"""

PROVEN = 16
"""Multiple of its last pause that a place works for until it counts as healthy again.

A drive that takes everything and gives nothing back works and fails in turns; it costs ever fewer steps.
"""

STEPS_KEPT = 3
"""Steps whose largest need is not given back at the end of a step."""

FIRST_RATE = 1e9
"""Bytes a second that a place is taken to write before it was measured."""

RECENT_BYTES = 64 << 20
"""Reach of a measured rate in bytes: what came before so many bytes counts half, or less."""


class Place:
    """A store with threads, extents, load and health; :class:`MultiStore` alone uses it.

    Its methods are called with the lock held, but for :meth:`reserve`, :meth:`grow`, :meth:`trim` and
    :meth:`close`, which may wait for the drive.

    Args:
        index: Among the places.
        store: The store.
        lock: Of all places.
        run: Runs a claimed transfer on an I/O thread.
        writers: Threads that write, if the store does not choose.
        readers: Threads that read, likewise.
    """

    def __init__(
        self,
        index: int,
        store: Store,
        lock: Lock,
        run: Callable[[Transfer], object],
        writers: int,
        readers: int,
    ) -> None:
        self.index, self.store, self._lock = index, store, lock
        self.extents = Extents(store.capacity)
        self.writes, self.reads = Meter(), Meter()
        self.pending = 0  # bytes of writes that are queued or running
        self.unreserved = 0  # of these, bytes that have no extent yet
        self.cause: str | None = None  # why it is out of service
        self.outage: str | None = None  # the same, until it was told
        self.disabled_until = self._full_until = 0.0
        self.most = self._grown = (
            0  # the largest end of an extent so far, and the bytes that there is room for
        )
        self._growing = Lock()
        self._needs: deque[int] = deque(maxlen=STEPS_KEPT)
        self._pause, self._since = FIRST_PAUSE, 0.0
        self._trial: Transfer | None = None  # the write that tries whether it works again
        self._checksum_seconds = 0.0
        self.pool = WorkerPool(store.name, run, store.threads or writers, store.threads or readers)

    # ---- room ------------------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """The most bytes that extents may take, as far as known; ``None`` for no known limit."""
        return self._grown if time.monotonic() < self._full_until else self.extents.capacity

    def takes(self, nbytes: int) -> bool:
        """Return whether a write is worth a try; an I/O thread that finds no room all the same says so."""
        if self.cause is not None and time.monotonic() < self.disabled_until:
            return False
        limit = self.limit
        return limit is None or self.extents.used + self.unreserved + nbytes <= limit

    def reserve(self, transfer: Transfer, address: int) -> None:
        """Give a write an extent, and make room for it; on an I/O thread.

        Raises:
            OutOfServiceError: The place is left alone. What was queued before a failure need not fail one by
                one, each after its timeout.
            StoreFullError: There is no room.
        """
        with self._lock:
            if self.cause is not None:
                now = time.monotonic()
                if now < self.disabled_until:
                    text = f"left alone, to be tried again: {self.cause}"
                    raise OutOfServiceError(errno.EIO, text, self.store.name)
                self._trial, self.disabled_until = transfer, now + self._pause
            if transfer.extent is None:
                extent = self.extents.reserve(transfer.nbytes, address % self.store.alignment)
                extent.drive, extent.transfers = self.index, 1
                transfer.extent = extent
                self.unreserved -= transfer.nbytes
            end = transfer.extent.offset + transfer.extent.length
        if end > self._grown:
            self.grow(end)

    def grow(self, end: int) -> None:
        """Make room up to ``end`` bytes.

        Raises:
            StoreFullError: There is none, or there was none a moment ago.
        """
        with self._growing:
            if end > self._grown:
                if time.monotonic() < self._full_until:
                    raise StoreFullError(errno.ENOSPC, f"no room beyond {self._grown} bytes", self.store.name)
                self.store.grow(end)
                self._grown = end

    def found_full(self, extent: Extent) -> None:
        """Take note that an extent could not be written for lack of room: do not grow for a while."""
        self._full_until = time.monotonic() + FIRST_PAUSE
        if extent.offset + extent.length <= self._grown:  # the file system allocates when it writes
            self._grown = extent.offset

    def give_up(self, transfer: Transfer) -> None:
        """Take the extent of a failed write back."""
        if transfer.extent is not None:
            self.extents.release(transfer.extent)
            self.unreserved += transfer.nbytes
            transfer.extent = None

    def trim(self) -> None:
        """Give back room that no extent needs, beyond the need of the last steps."""
        if not self._growing.acquire(blocking=False):  # the next step may find it idle
            return
        try:  # an extent that is reserved meanwhile, beyond what is kept, grows afterwards
            with self._lock:
                self._needs.append(self.extents.high_water)
                self.most = max(self.most, self.extents.high_water)
                self.extents.high_water = self.extents.end
                keep = max(self._needs)
                self._grown = min(self._grown, keep)
            self.store.shrink(keep)  # which may have grown ahead of need
        finally:
            self._growing.release()

    def close(self) -> None:
        """End the threads and close the store; one that does not answer stays until the process ends."""
        self.pool.stop()
        if self.disabled_until < math.inf:
            self.pool.join()
            self.store.close()

    # ---- health ----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Take the place out of service; what was queued before the first failure tells nothing new."""
        now = time.monotonic()
        if isinstance(error, OutOfServiceError) or (self.cause is not None and self._trial is None):
            return
        if self.cause is None and now - self._since > PROVEN * self._pause:
            self._pause = FIRST_PAUSE
        self.cause, self._trial = str(error), None  # the error itself may know frames, and their memory
        self.outage = self.outage or self.cause
        self.disabled_until = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def succeeded(self, transfer: Transfer) -> None:
        """Put the place back in service if this write was to try it."""
        if transfer is self._trial:
            self.cause, self._trial, self._since = None, None, time.monotonic()

    def disable(self) -> None:
        """Take the place out of service for ever."""
        self._trial, self.disabled_until = None, math.inf
        self.cause = self.outage = "it does not answer, and takes no writes any more"

    def resume(self) -> None:
        """Put the place back in service, if it answers."""
        if self.disabled_until < math.inf:
            self.cause, self._full_until = None, 0.0

    # ---- load ------------------------------------------------------------------------------------

    def take_load(self, *, is_beside: bool) -> DriveLoad:
        """Return the load since the last call.

        Args:
            is_beside: Whether there are drives, beside which host memory is a tier of its own.
        """
        seconds, before = self.store.checksum.seconds, self._checksum_seconds
        self._checksum_seconds = seconds
        return DriveLoad(
            self.writes.take(),
            self.reads.take(),
            self.store.tier if is_beside else DRIVE_TIER,
            in_service=self.cause is None,
            room=self.limit if self.cause is None else 0,
            checksum_seconds=seconds - before,
        )


class Meter:
    """Bytes that move in one direction, and the time in which at least one transfer moves some.

    Attributes:
        rate: Bytes a second of late.
    """

    def __init__(self) -> None:
        self.rate = FIRST_RATE
        self._moving, self._since = 0, 0.0
        self._nbytes, self._seconds = 0, 0.0
        self._recent_bytes, self._recent_seconds = 0.0, 0.0

    def note(self, change: int, nbytes: int = 0) -> float:
        """Note that a transfer begins (1), or ends (-1) and has moved so many bytes; return the time."""
        now = time.perf_counter()
        if self._moving:
            self._seconds += now - self._since
            self._recent_seconds += now - self._since
        self._since = now
        self._moving += change
        self._nbytes += nbytes
        self._recent_bytes += nbytes
        if self._recent_bytes and self._recent_seconds:
            self.rate = self._recent_bytes / self._recent_seconds
        if self._recent_bytes >= RECENT_BYTES:
            self._recent_bytes /= 2
            self._recent_seconds /= 2
        return now

    def take(self) -> Load:
        """Return the load since the last call."""
        self.note(0)
        load = Load(self._nbytes, self._seconds)
        self._nbytes, self._seconds = 0, 0.0
        return load
