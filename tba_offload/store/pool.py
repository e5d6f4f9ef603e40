"""Transfers, and the I/O threads, free room, failures and load of one drive or of host memory."""

from __future__ import annotations

import math
import time
from _thread import allocate_lock
from collections import deque
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING

from tba_offload.store.base import DRIVE_TIER, DriveLoad, Load
from tba_offload.store.extents import Extents

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.device import ByteRange, Event
    from tba_offload.store.base import Extent, Store

TICK = 1.0
"""Length in seconds of the periods in which a wait for a drive is measured.

If a batch system suspends the process during a wait, at most one period of this time counts as waiting.
"""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 600.0
"""Seconds of the pause after the first failure of a drive, and of the longest pause after later failures.

The pause is not a number of steps, because a drive may need minutes to recover, and a step may take only
milliseconds.
"""

STEPS_KEPT = 3
"""Number of recent steps that determine the size of a store's file.

After each step, the file shrinks to the largest size that one of these steps needed.
"""

FIRST_RATE = 1e9
"""Assumed write rate of a drive before the rate is measured, in bytes per second."""

FIRST_BYTES, RECENT_BYTES = 8 << 20, 64 << 20
"""Numbers of bytes by which measured rates are weighted. The assumed :data:`FIRST_RATE` counts like a
transfer of ``FIRST_BYTES``. After each ``RECENT_BYTES``, the weight of older measurements is halved.

A single small transfer does not measure the rate of a drive, because the I/O thread may have waited for the
processor.
"""


class Transfer:
    """One write or read, and its result.

    An I/O thread that runs a transfer must claim the transfer first. A transfer has two raw locks instead of
    a condition variable, because raw locks are faster to create.

    Args:
        memory: The bytes to write, or the memory to fill. The caller must not use this memory before the
            transfer has ended.
        after: Event of the device. The transfer starts after the device has reached this event.
        extent: The extent to read or write; ``None`` for a write to a new extent.

    Attributes:
        memory: The argument ``memory``; ``None`` after a successful write or a cancellation.
        extent: The argument ``extent``, or the new extent after a successful write.
        nbytes: Size of the memory in bytes.
        is_write: Whether the transfer is a write; set when the transfer is queued.
        drive: Index of the drive in the store; set when the transfer is queued.
        error: The exception of a failed transfer; ``None`` if the transfer has not failed.
        is_done: Whether the transfer has ended, failed or been cancelled.
        is_cancelled: Whether the transfer was cancelled before it started.
    """

    __slots__ = (
        *("_claim", "_done", "after", "drive", "error", "extent", "is_cancelled", "is_done", "is_write"),
        *("memory", "nbytes"),
    )

    def __init__(self, memory: ByteRange, after: Event, *, extent: Extent | None = None) -> None:
        self.memory: ByteRange | None = memory
        self.after = after
        self.extent = extent
        self.nbytes = memory.nbytes
        self.drive = 0
        self.error: BaseException | None = None
        self.is_write = self.is_done = self.is_cancelled = False
        self._claim = allocate_lock()  # acquired once, by the thread that runs or cancels the transfer
        self._done = allocate_lock()  # held until the result is known
        self._done.acquire()

    def claim(self) -> bool:
        """Return True to the first caller only. This caller must then run or end the transfer."""
        return self._claim.acquire(blocking=False)

    def finish(self) -> None:
        """Mark the transfer as done, and wake the waiting threads."""
        self.is_done = True
        self._done.release()

    def wait(self, seconds: float) -> bool:
        """Wait until the transfer has ended, without raising its error.

        Args:
            seconds: Longest time to wait; may be infinite.

        Returns:
            Whether the transfer has ended.
        """
        while not self.is_done and seconds > 0:
            if self._done.acquire(timeout=min(seconds, TICK)):
                self._done.release()  # for the next thread that waits
            seconds -= TICK
        return self.is_done


class Place:
    """One store of a :class:`MultiStore`, with its I/O threads, extents, load and failures.

    A place is a drive or host memory. Most methods are called with the lock of the :class:`MultiStore` held.
    :meth:`grow`, :meth:`trim` and :meth:`close` are called without the lock, because these methods may wait
    for the drive.

    Args:
        index: Index of the store in the :class:`MultiStore`.
        store: The store.
        run: Function that runs a claimed transfer to its end. The I/O threads call this function, which must
            not raise.
        writers: Number of threads that write, if the store does not set its own number.
        readers: Number of threads that read, if the store does not set its own number.

    Raises:
        RuntimeError: The process cannot start more threads.

    Attributes:
        is_drive: False if the store is host memory.
        pending: Bytes of queued or running writes.
        unreserved: Bytes of queued writes that have no extent yet.
        grown: Size of the store in bytes.
        needed: Largest size in bytes that one of the last steps needed.
        cause: Why the store takes no writes; ``None`` if the store takes writes.
        next_pause: Length in seconds of the next pause.
        disabled_until: Time from which a write tries the store again, by :func:`time.monotonic`.
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
        self.next_pause, self._full_until = FIRST_PAUSE, 0.0
        self._growing = Lock()
        self._needs: deque[int] = deque(maxlen=STEPS_KEPT)
        self.needed = 0
        self._run = run
        self._queues: tuple[_Queue, _Queue] = SimpleQueue(), SimpleQueue()  # of reads, of writes
        self._numbers = store.threads or readers, store.threads or writers
        self._threads = [
            Thread(target=self._work, args=(queue,), name=f"tba-{verb}-{store.name}", daemon=True)
            for queue, number, verb in zip(self._queues, self._numbers, ("read", "write"), strict=True)
            for _ in range(number)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the process may not start more threads
            self.disabled_until = math.inf  # threads that did not start cannot be joined
            self.close()
            store.close()
            raise

    # ---- I/O threads -----------------------------------------------------------------------------

    def submit(self, transfers: list[Transfer], *, writes: bool) -> None:
        """Queue transfers, in one batch for each thread, because each ``put`` takes time to wake a thread."""
        queue, width = self._queues[writes], min(self._numbers[writes], len(transfers))
        for first in range(width):
            queue.put(transfers[first::width])

    def _work(self, queue: _Queue) -> None:
        """Run the transfers of a queue until the place is closed."""
        self.store.device.bind_thread()
        while (batch := queue.get()) is not None:
            while batch:
                transfer = batch.pop(0)
                if transfer.claim():  # otherwise the transfer was cancelled
                    self._run(transfer)
                del transfer  # otherwise the memory would not be freed before the next transfer

    def close(self) -> None:
        """End the threads and close the store.

        A store that does not answer stays open until the process ends.
        """
        for queue, number in zip(self._queues, self._numbers, strict=True):
            for _ in range(number):
                queue.put(None)
        if self.disabled_until < math.inf:
            for thread in self._threads:
                thread.join()
            self.store.close()

    # ---- room ------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes that extents and queued writes take."""
        return self.extents.used + self.unreserved

    @property
    def limit(self) -> int | None:
        """Largest number of bytes that extents may take; ``None`` if no limit is known."""
        return self.grown if time.monotonic() < self._full_until else self.extents.capacity

    def takes(self, nbytes: int) -> bool:
        """Return True if a write of ``nbytes`` bytes may be queued. The write may still find no room."""
        is_left_alone = self.cause is not None and time.monotonic() < self.disabled_until
        limit = self.limit
        return not is_left_alone and (limit is None or self.held + nbytes <= limit)

    def reserve(self, transfer: Transfer, address: int) -> Extent:
        """Reserve a new extent for a write.

        Raises:
            StoreFullError: There is no room.
        """
        extent = self.extents.reserve(transfer.nbytes, address % self.store.alignment)
        extent.drive, extent.transfers = self.index, 1
        self.unreserved -= transfer.nbytes
        transfer.extent = extent
        return extent

    def found_full(self) -> None:
        """Do not let the store grow for a while, because the drive is full."""
        self._full_until = time.monotonic() + FIRST_PAUSE

    def grow(self, end: int) -> None:
        """Make room up to ``end`` bytes.

        Raises:
            StoreFullError: There is no room.
        """
        with self._growing:
            if end > self.grown:
                self.store.grow(end)
                self.grown = end

    def trim(self, lock: Lock) -> None:
        """Free the room that the last :data:`STEPS_KEPT` steps did not need."""
        if not self._growing.acquire(blocking=False):  # an I/O thread has it: the next step tries again
            return
        try:  # if an extent beyond this size is reserved now, the store grows again
            with lock:
                self._needs.append(self.extents.take_high_water())
                self.needed = max(self._needs)
                self.grown = min(self.grown, self.needed)
            self.store.shrink(self.needed)  # the store may have grown more than needed
        finally:
            self._growing.release()

    # ---- health ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Accept no writes for a while. The length of this pause doubles with each call."""
        self.disabled_until = max(self.disabled_until, time.monotonic() + self.next_pause)
        self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)

    def fail(self, cause: str) -> None:
        """Accept no writes after a failure. After a pause, one write tries the store again."""
        if self.cause is None or time.monotonic() >= self.disabled_until:
            self.pause()
        self.cause = cause

    def disable(self) -> None:
        """Accept no more writes."""
        self.cause = "the drive does not answer, and is no longer used"
        self.disabled_until = math.inf

    def resume(self) -> None:
        """Accept writes again, unless :meth:`disable` was called."""
        if self.disabled_until < math.inf:
            self.cause, self._full_until = None, 0.0

    # ---- load ------------------------------------------------------------------------------------

    def take_load(self, *, is_beside: bool) -> DriveLoad:
        """Return the load since the last call.

        Args:
            is_beside: Whether the :class:`MultiStore` has both drives and host memory.
        """
        return DriveLoad(
            self.writes.take(),
            self.reads.take(),
            self.store.tier if is_beside else DRIVE_TIER,
            in_service=self.cause is None,
            room=self.limit if self.cause is None else 0,
        )


class Meter:
    """Counter of the bytes of transfers in one direction, and of the time in which transfers run."""

    def __init__(self) -> None:
        self._moving, self._since = 0, 0.0
        self._nbytes, self._seconds = 0, 0.0
        self._recent_bytes, self._recent_seconds = float(FIRST_BYTES), FIRST_BYTES / FIRST_RATE

    @property
    def rate(self) -> float:
        """Rate of the recent transfers, in bytes per second."""
        return self._recent_bytes / self._recent_seconds

    def note(self, change: int, nbytes: int = 0) -> float:
        """Record the start or the end of a transfer, and return the time.

        Args:
            change: 1 for the start, -1 for the end, 0 for neither.
            nbytes: Number of bytes that the ended transfer moved.
        """
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


_Queue = SimpleQueue[list[Transfer] | None]
