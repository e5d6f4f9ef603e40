"""Transfers, and the threads that run them: one queue for each direction of one place."""

from __future__ import annotations

import errno
import math
import threading
from _thread import allocate_lock
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tba_offload.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.device import ByteRange, Event
    from tba_offload.store.base import Extent

TICK = 1.0
"""Seconds that the clock is believed at a time.

Clocks go on while a process is stopped, by a batch system that suspends the job or with its container. A
drive is not to blame for that time: of each stop this much counts at most.
"""


class Transfer:
    """One write or read, and its outcome.

    The I/O thread that claims a transfer owns it until it is finished. One is created for each transfer on
    the training thread, so it is light: two raw locks and no condition variable.

    Args:
        memory: The bytes to write, or to fill. The caller leaves them alone until the transfer has ended.
        after: The transfer starts when this point of the device's work is reached.
        extent: Where from, or where to; ``None`` for a write to a new extent.

    Attributes:
        memory: As given; ``None`` after a successful write, and after a transfer was cancelled.
        extent: As given, or the new one after a successful write.
        nbytes: Bytes of the memory.
        is_write: Whether it writes; set when it is queued.
        drive: Index of its place among those of the store; set when it is queued.
        error: The exception that made it fail; ``None`` before it has ended and after success.
        is_done: Whether it has ended, failed or been cancelled.
        is_cancelled: Whether it was cancelled before it started.
        seconds: Time that the bytes took, without waiting for the device.
        refused: Indices of the places that had no room for it.
    """

    __slots__ = (
        *("_claim", "_done", "after", "drive", "error", "extent", "is_cancelled", "is_done", "is_write"),
        *("memory", "nbytes", "refused", "seconds"),
    )

    def __init__(self, memory: ByteRange, after: Event, *, extent: Extent | None = None) -> None:
        self.memory: ByteRange | None = memory
        self.after = after
        self.extent = extent
        self.nbytes = memory.nbytes
        self.drive = 0
        self.error: BaseException | None = None
        self.is_write = self.is_done = self.is_cancelled = False
        self.seconds = 0.0
        self.refused: tuple[int, ...] = ()
        self._claim = allocate_lock()  # taken once, by the thread that decides whether the transfer runs
        self._done = allocate_lock()  # held until the outcome is known
        self._done.acquire()

    def claim(self) -> bool:
        """Return True to the first caller, which then runs the transfer or cancels it."""
        return self._claim.acquire(blocking=False)

    def put_back(self) -> None:
        """Take a claim back: nothing has moved, and the transfer goes to another queue."""
        self._claim.release()

    def finish(self) -> None:
        """Wake the threads that wait."""
        self.is_done = True
        self._done.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the transfer has ended; an error of it is not raised.

        Args:
            seconds: Longest time to wait; ``None`` for no limit.

        Returns:
            Whether it has ended.
        """
        left = math.inf if seconds is None else seconds
        while not self.is_done:
            if self._done.acquire(timeout=min(max(left, 0.0), TICK)):
                self._done.release()  # for the next thread that waits
                break
            left -= TICK
            if left <= 0:
                break
        return self.is_done


class WorkerPool:
    """The I/O threads of one place.

    Args:
        name: Of the place.
        run: Runs a claimed transfer, to its end. It does not raise.
        writers: Threads that write.
        readers: Threads that read.

    Raises:
        StoreError: The process may have no more threads.
    """

    def __init__(self, name: str, run: Callable[[Transfer], object], writers: int, readers: int) -> None:
        queues: tuple[_Queue, _Queue] = SimpleQueue(), SimpleQueue()
        self._writes, self._reads = queues
        self._writers = [_Worker(f"tba-write-{name}", run, self._writes) for _ in range(writers)]
        self._readers = [_Worker(f"tba-read-{name}", run, self._reads) for _ in range(readers)]
        try:
            for worker in (*self._writers, *self._readers):
                worker.start()
        except RuntimeError as error:  # all that Python tells of it
            self.stop()
            raise StoreError(
                errno.EAGAIN,
                "no more threads can be started. Raise `ulimit -u`, or the container's limit on processes",
            ) from error

    def submit(self, transfers: list[Transfer], *, writes: bool) -> None:
        """Queue transfers, a share for each thread: every put wakes a thread, which costs the caller time."""
        queue, threads = (self._writes, self._writers) if writes else (self._reads, self._readers)
        width = min(len(threads), len(transfers))
        for first in range(width):
            queue.put(transfers[first::width])

    def stop(self) -> None:
        """Have the threads end after what is queued now; take no lock, and do not wait."""
        for queue, threads in ((self._writes, self._writers), (self._reads, self._readers)):
            for _ in threads:
                queue.put(None)

    def join(self) -> None:
        """Wait for the threads to end, which :meth:`stop` was called for."""
        for worker in (*self._writers, *self._readers):
            worker.join()

    def reading(self) -> list[threading.Lock]:
        """Return a lock for each thread that reads, held while it does."""
        return [worker.busy for worker in self._readers]


_Queue = SimpleQueue[list[Transfer] | None]


class _Worker(threading.Thread):
    """One I/O thread.

    Attributes:
        busy: Held while a transfer runs.
    """

    def __init__(self, name: str, run: Callable[[Transfer], object], queue: _Queue) -> None:
        super().__init__(name=name, daemon=True)
        self.busy = threading.Lock()
        self._do, self._queue = run, queue

    def run(self) -> None:
        """Run transfers until the pool stops: the whole life of an I/O thread."""
        while (batch := self._queue.get()) is not None:
            while batch:
                transfer = batch.pop(0)
                if transfer.claim():  # else it was cancelled
                    with self.busy:
                        self._do(transfer)
                del transfer  # or the last one, and its memory, would live until the next one comes
