"""The I/O threads of a store: a queue of jobs for each kind, and the threads that serve it."""

from __future__ import annotations

import errno
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from tba_offload.errors import StoreError
from tba_offload.store.base import TICK

if TYPE_CHECKING:
    from collections.abc import Iterable

WRITE, READ, GROW = range(3)
"""The number of the lane for each kind of job."""


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        StoreError: The process may have no more.
    """
    try:
        thread.start()
    except RuntimeError as error:  # all that Python tells of it
        raise StoreError(
            errno.EAGAIN,
            "no more threads can be started; raise `ulimit -u`, or the limit of the container on processes",
        ) from error


class Job(Protocol):
    """What a lane serves."""

    def claim(self) -> bool:
        """Decide that the job runs; False if it was cancelled."""

    def run(self) -> Iterable[Job]:
        """Do it, and return what is still to be done; what it raises would end the thread."""

    def cancel(self) -> bool:
        """Keep it from running if it has not started."""


class Lanes:
    """The lanes of one store.

    Args:
        writers: Threads that write.
        readers: Threads that read.
        limit: Seconds that one job may run before it is taken to hang; ``None`` for ever.

    Attributes:
        limit: As given; may be changed.

    Raises:
        StoreError: The process may have no more threads.
    """

    def __init__(self, writers: int, readers: int, limit: float | None) -> None:
        self.limit = limit
        self._lanes = (_Lane("write", writers), _Lane("read", readers), _Lane("grow", 1))
        try:
            for thread in (thread for lane in self._lanes for thread in lane.threads):
                start_thread(thread)
        except BaseException:
            self.stop()
            raise
        self.put_write = self._lanes[WRITE].jobs.put
        self.put_read = self._lanes[READ].jobs.put
        self.put_growth = self._lanes[GROW].jobs.put

    def hang(self) -> bool:
        """Whether one job has run for longer than the limit."""
        return any(lane.hangs(self.limit) for lane in self._lanes)

    def are_of(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of theirs."""
        return any(thread in lane.threads for lane in self._lanes)

    def end(self) -> None:
        """Cancel what is queued, and have every thread end with what it is at; does not wait."""
        for lane in self._lanes:
            lane.cancel_queued()
            lane.stop()

    def stop(self) -> None:
        """Have every thread end when it has served what is queued now; does not wait, and take no lock."""
        for lane in self._lanes:
            lane.stop()

    def join(self) -> bool:
        """Wait until all threads have ended; false when one job has run for longer than the limit."""
        joined = [lane.join(self.limit) for lane in self._lanes]  # each of them, whatever the first says
        return all(joined)

    def reading(self) -> list[threading.Lock]:
        """Return a lock for each thread that reads, held while it does."""
        return [shift.busy for shift in self._lanes[READ].shifts]


class _Lane:
    """One queue and the threads that serve it.

    The threads know the queue only, never the store: a store that was forgotten can be collected, and its
    finalizer ends them.
    """

    def __init__(self, name: str, count: int) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.shifts = [_Shift() for _ in range(count)]
        self.threads = [
            threading.Thread(target=_serve, args=(self.jobs, shift), name=f"tba-{name}-{i}", daemon=True)
            for i, shift in enumerate(self.shifts)
        ]

    def cancel_queued(self) -> None:
        """Cancel every transfer that has not started."""
        for shift in self.shifts:
            shift.leave_rest()
        while True:
            try:
                job = self.jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                job.cancel()

    def stop(self) -> None:
        """Have every thread end when it has served what is queued now; does not wait."""
        for _ in self.threads:
            self.jobs.put(None)

    def hangs(self, limit: float | None) -> bool:
        """Whether one job has run for ``limit`` seconds."""
        return any((left := shift.left(limit)) is not None and left <= 0 for shift in self.shifts)

    def join(self, limit: float | None) -> bool:
        """Wait until the threads have ended; false when one transfer has run for ``limit`` seconds."""
        for thread, shift in zip(self.threads, self.shifts, strict=True):
            while thread.is_alive():
                began, left = shift.began, shift.left(limit)
                if left is None or left > 0:
                    thread.join(left)
                    continue
                thread.join(TICK)  # this process may have been stopped, which says nothing of the drive
                if thread.is_alive() and shift.began == began:
                    return False
        return True


class _Shift:
    """What an I/O thread is at.

    Attributes:
        busy: Held while the thread moves bytes.
        began: When it began with them, on the monotonic clock; ``None`` while it moves none.
        leaves_rest: Whether what a job left to be done is cancelled.
    """

    __slots__ = ("began", "busy", "leaves_rest")

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.began: float | None = None
        self.leaves_rest = False

    def leave_rest(self) -> None:
        """From now on the thread does no more than what it is at."""
        self.leaves_rest = True

    def left(self, limit: float | None) -> float | None:
        """Seconds that are left of a limit for one transfer; ``None`` if there is no limit."""
        if limit is None:
            return None
        began = self.began
        return limit if began is None else began + limit - time.monotonic()


def _serve(jobs: SimpleQueue[Job | None], shift: _Shift) -> None:
    """Record that the life of an I/O thread."""
    while (job := jobs.get()) is not None:
        with shift.busy:
            _do(job, shift)
            shift.began = None
        del job


def _do(job: Job, shift: _Shift) -> None:
    """Do a job, then what it left: each may be cancelled until then, and take as long as the limit says."""
    shift.began = time.monotonic()
    if not job.claim():
        return
    for rest in job.run():
        if shift.leaves_rest:
            rest.cancel()
        else:
            _do(rest, shift)
