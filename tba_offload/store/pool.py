"""Transfers, and the threads that run them: one queue for each direction of one place."""

from __future__ import annotations

import threading
from _thread import allocate_lock
from queue import SimpleQueue
from typing import TYPE_CHECKING

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
        self._claim = allocate_lock()  # taken once, by the thread that decides whether the transfer runs
        self._done = allocate_lock()  # held until the outcome is known
        self._done.acquire()

    def claim(self) -> bool:
        """Return True to the first caller, which then runs the transfer or ends it."""
        return self._claim.acquire(blocking=False)

    def finish(self) -> None:
        """Wake the threads that wait."""
        self.is_done = True
        self._done.release()

    def wait(self, seconds: float) -> bool:
        """Wait until the transfer has ended; an error of it is not raised.

        Args:
            seconds: Longest time to wait; may be infinite.

        Returns:
            Whether it has ended.
        """
        left = seconds
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
        bind: Called by each thread when it starts.
        run: Runs a claimed transfer, to its end. It does not raise.
        writers: Threads that write.
        readers: Threads that read.

    Raises:
        RuntimeError: The process may have no more threads.
    """

    def __init__(
        self,
        name: str,
        bind: Callable[[], object],
        run: Callable[[Transfer], object],
        *,
        writers: int,
        readers: int,
    ) -> None:
        self._bind, self._do = bind, run
        self._writes: _Queue = SimpleQueue()
        self._reads: _Queue = SimpleQueue()
        self._writers, self._readers = writers, readers
        self._threads: list[threading.Thread] = []
        try:
            for number in range(writers + readers):
                verb, queue = ("write", self._writes) if number < writers else ("read", self._reads)
                thread = threading.Thread(target=self._work, args=(queue,), name=f"tba-{verb}-{name}")
                thread.daemon = True
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.stop()
            raise

    def submit(self, transfers: list[Transfer], *, writes: bool) -> None:
        """Queue transfers, a share for each thread: every put wakes a thread, which costs the caller time."""
        queue, threads = (self._writes, self._writers) if writes else (self._reads, self._readers)
        width = min(threads, len(transfers))
        for first in range(width):
            queue.put(transfers[first::width])

    def _work(self, queue: _Queue) -> None:
        """Run transfers until the pool stops: the whole life of an I/O thread."""
        self._bind()
        while (batch := queue.get()) is not None:
            while batch:
                transfer = batch.pop(0)
                if transfer.claim():  # else it was cancelled
                    self._do(transfer)
                del transfer  # or the last one, and its memory, would live until the next one comes

    def stop(self) -> None:
        """Have the threads end after what is queued now; take no lock, and do not wait."""
        for queue, threads in ((self._writes, self._writers), (self._reads, self._readers)):
            for _ in range(threads):
                queue.put(None)

    def join(self) -> None:
        """Wait for the threads to end, which :meth:`stop` was called for."""
        for thread in self._threads:
            thread.join()


_Queue = SimpleQueue[list[Transfer] | None]
