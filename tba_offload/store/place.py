"""One place of a store: its room, its health and its load."""

from __future__ import annotations

import errno
import math
import time
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

from tba_offload.errors import StoreFullError
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

STEPS_KEPT = 3
"""Steps whose largest need is not given back at the end of a step."""

FIRST_RATE = 1e9
"""Bytes a second that a place is taken to write before it was measured."""

FIRST_BYTES, RECENT_BYTES = 8 << 20, 64 << 20
"""Bytes that count at :data:`FIRST_RATE` at first, and bytes after which older measurements are halved.

One small transfer whose thread had to wait for the processor says nothing of its drive.
"""


class Place:
    """A store with threads, extents, load and health; :class:`MultiStore` alone uses it.

    Its methods are called with the lock of the :class:`MultiStore` held, but for :meth:`grow`, :meth:`trim`
    and :meth:`close`, which may wait for the drive.

    Args:
        index: Among the places.
        store: The store.
        run: Runs a claimed transfer on an I/O thread.
        writers: Threads that write, if the store does not choose.
        readers: Threads that read, likewise.

    Attributes:
        is_drive: Whether it is no host memory beside drives.
        pending: Bytes of writes that are queued or running.
        unreserved: Bytes among them that have no extent yet.
        grown: Bytes that there is room for.
        cause: Why it is left alone; ``None`` while it is in service.
        disabled_until: When it may be tried again, by :func:`time.monotonic`.
    """

    def __init__(
        self, index: int, store: Store, run: Callable[[Transfer], object], writers: int, readers: int
    ) -> None:
        self.index, self.store, self.is_drive = index, store, store.tier == DRIVE_TIER
        self.extents = Extents(store.capacity)
        self.writes, self.reads = Meter(), Meter()
        self.pending = self.unreserved = self.grown = 0
        self.cause: str | None = None
        self.disabled_until = 0.0
        self._pause, self._full_until = FIRST_PAUSE, 0.0
        self._growing = Lock()
        self._needs: deque[int] = deque(maxlen=STEPS_KEPT)
        self._checksum_seconds = 0.0
        writers, readers = store.threads or writers, store.threads or readers
        self.pool = WorkerPool(store.name, store.device.bind_thread, run, writers=writers, readers=readers)

    # ---- room ------------------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """The most bytes that extents may take, as far as known; ``None`` for no known limit."""
        return self.grown if time.monotonic() < self._full_until else self.extents.capacity

    def takes(self, nbytes: int) -> bool:
        """Return whether a write is worth a try; an I/O thread that finds no room all the same says so."""
        is_left_alone = self.cause is not None and time.monotonic() < self.disabled_until
        limit, taken = self.limit, self.extents.used + self.unreserved
        return not is_left_alone and (limit is None or taken + nbytes <= limit)

    def reserve(self, transfer: Transfer, address: int) -> Extent:
        """Give a write a new extent.

        Raises:
            StoreFullError: There is no room.
        """
        extent = self.extents.reserve(transfer.nbytes, address % self.store.alignment)
        extent.drive, extent.transfers = self.index, 1
        self.unreserved -= transfer.nbytes
        transfer.extent = extent
        return extent

    def found_full(self, extent: Extent) -> None:
        """Take note that an extent could not be written for lack of room: do not grow for a while."""
        self._full_until = time.monotonic() + FIRST_PAUSE
        if extent.offset + extent.length <= self.grown:  # the file system allocates when it writes
            self.grown = extent.offset

    def grow(self, end: int) -> None:
        """Make room up to ``end`` bytes.

        Raises:
            StoreFullError: There is none, or there was none a moment ago.
        """
        with self._growing:
            if end > self.grown:
                if time.monotonic() < self._full_until:
                    raise StoreFullError(errno.ENOSPC, f"no room beyond {self.grown} bytes", self.store.name)
                self.store.grow(end)
                self.grown = end

    def trim(self, lock: Lock) -> None:
        """Give back room that no extent needs, beyond the need of the last steps."""
        if not self._growing.acquire(blocking=False):  # the next step may find it idle
            return
        try:  # an extent that is reserved meanwhile, beyond what is kept, grows afterwards
            with lock:
                self._needs.append(self.extents.take_high_water())
                keep = max(self._needs)
                self.grown = min(self.grown, keep)
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

    def pause(self) -> None:
        """Take no writes for a while, which doubles each time."""
        self.disabled_until = max(self.disabled_until, time.monotonic() + self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def fail(self, cause: str) -> None:
        """Take the place out of service; after a while one write tries it again."""
        if self.cause is None or time.monotonic() >= self.disabled_until:
            self.pause()
        self.cause = cause

    def disable(self) -> None:
        """Take the place out of service for ever."""
        self.cause = "it does not answer, and takes no writes any more"
        self.disabled_until = math.inf

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
    """Bytes that move in one direction, and the time in which at least one transfer moves some."""

    def __init__(self) -> None:
        self._moving, self._since = 0, 0.0
        self._nbytes, self._seconds = 0, 0.0
        self._recent_bytes, self._recent_seconds = float(FIRST_BYTES), FIRST_BYTES / FIRST_RATE

    @property
    def rate(self) -> float:
        """Bytes a second of late."""
        return self._recent_bytes / self._recent_seconds

    def note(self, change: int, nbytes: int = 0) -> float:
        """Note that a transfer begins (1), or ends (-1) and has moved so many bytes; return the time."""
        now = time.perf_counter()
        if self._moving:
            passed = now - self._since
            self._seconds += passed
            self._recent_seconds += passed
        self._since = now
        self._moving += change
        if nbytes:
            self._nbytes += nbytes
            self._recent_bytes += nbytes
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
