"""Transfers, and the I/O threads that run transfers."""

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
"""A wait for a drive is measured in periods of this length in seconds. The clock continues while a process is
stopped, for example by a batch system that suspends the job. The wait then counts at most one period of the
stopped time.
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
        error: The exception of a failed transfer; ``None`` before the end and after success.
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
        left = seconds
        while not self.is_done:
            if self._done.acquire(timeout=min(max(left, 0.0), TICK)):
                self._done.release()  # release the lock for the next thread that waits
                break
            left -= TICK
            if left <= 0:
                break
        return self.is_done


class WorkerPool:
    """I/O threads for one drive or for host memory, with one queue of writes and one queue of reads.

    Args:
        name: Name of the drive in the threads' names.
        bind: Function that each thread calls when the thread starts.
        run: Function that runs a claimed transfer to its end. The function must not raise.
        writers: Number of threads that write.
        readers: Number of threads that read.

    Raises:
        RuntimeError: The process cannot start more threads.
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
        except RuntimeError:  # the process cannot start more threads: end the started threads
            self.stop()
            raise

    def submit(self, transfers: list[Transfer], *, writes: bool) -> None:
        """Queue transfers, in one batch for each thread, because each ``put`` takes time to wake a thread."""
        queue, threads = (self._writes, self._writers) if writes else (self._reads, self._readers)
        width = min(threads, len(transfers))
        for first in range(width):
            queue.put(transfers[first::width])

    def _work(self, queue: _Queue) -> None:
        """Run the transfers of a queue until the pool stops."""
        self._bind()
        while (batch := queue.get()) is not None:
            while batch:
                transfer = batch.pop(0)
                if transfer.claim():  # otherwise the transfer was cancelled
                    self._do(transfer)
                del transfer  # otherwise the memory would not be freed until the next transfer comes

    def stop(self) -> None:
        """Make the threads end after the queued transfers, without waiting for the threads."""
        for queue, threads in ((self._writes, self._writers), (self._reads, self._readers)):
            for _ in range(threads):
                queue.put(None)

    def join(self) -> None:
        """Wait for the threads to end, after :meth:`stop`."""
        for thread in self._threads:
            thread.join()


_Queue = SimpleQueue[list[Transfer] | None]
