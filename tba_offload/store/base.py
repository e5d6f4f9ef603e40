"""The contract of a store: extents, futures and transfers.

A store keeps bytes of activations outside device memory. It reserves an extent, writes one tensor's bytes
into it, reads them back any number of times, and takes the extent back. Transfers run on threads of the
store; each gives an :class:`IoFuture`.
"""

from __future__ import annotations

import copy
import errno
import math
import time
from _thread import LockType, allocate_lock
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from tba_offload.config.values import STALL_SECONDS
from tba_offload.errors import SessionError, StoreError, TransferError, warn
from tba_offload.store import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from tba_offload.device import ByteRange, Event

DRIVE_TIER, HOST_TIER = "drive", "host"
"""The legal tiers of :class:`DriveLoad`."""

TICK = 1.0
"""Seconds that the clock is believed at a time."""

WARN_AFTER = 0.1
"""A wait for a drive is named in a warning after this share of its limit."""


class Extent(NamedTuple):
    """A byte range of a store that holds one range of bytes of a storage.

    Attributes:
        offset: Where the range starts, bytes; a multiple of 4096.
        length: Bytes of the range; a multiple of 4096.
        nbytes: Bytes that it holds.
        lead: They start at ``offset + lead``; less than the store's alignment.
        drive: Which store of a striped store the range lies in; 0 elsewhere.
    """

    offset: int
    length: int
    nbytes: int
    lead: int
    drive: int = 0

    def __str__(self) -> str:
        return f"the extent of {self.nbytes} bytes at offset {self.offset}"


class IoFuture:
    """The outcome of one transfer.

    One is created for each transfer on the training thread, so it is light: two raw locks and no condition
    variable. ``_claim`` is taken once, by the thread that decides whether the transfer runs: the I/O thread
    or the canceller. ``_ended`` is held until the outcome is known.

    Args:
        done: As by :meth:`add_done_callback`.

    Attributes:
        error: What made the transfer fail; ``None`` while it is not done and after success.
        is_done: As :meth:`done`.
    """

    __slots__ = ("_callbacks", "_cancelled", "_claim", "_ended", "error", "is_done")

    def __init__(self, done: Callable[[IoFuture], object] | None = None) -> None:
        self.error: BaseException | None = None
        self.is_done = False
        self._cancelled = False
        self._callbacks: list[Callable[[IoFuture], object]] = [] if done is None else [done]
        self._claim = allocate_lock()
        self._ended = allocate_lock()
        self._ended.acquire()

    def done(self) -> bool:
        """Whether the transfer has ended, failed or been cancelled."""
        return self.is_done

    def cancelled(self) -> bool:
        """Whether the transfer was cancelled before it started."""
        return self._cancelled

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer has ended.

        Args:
            timeout: Seconds to wait at most; ``None`` for no limit.

        Raises:
            StoreError: The transfer failed, or was cancelled (``errno.ECANCELED``). A new one each time.
            TimeoutError: It has not ended in time; it goes on.
        """
        if not self.is_done:
            self._block(timeout)
        if self.error is not None:
            raise _anew(self.error)
        if self._cancelled:
            raise StoreError(errno.ECANCELED, "the transfer was cancelled before it started")

    def cancel(self) -> bool:
        """Keep the transfer from running if it has not started.

        Returns:
            True if it has not started and now never will; its callbacks are then not called. False if it is
            running or has ended.
        """
        if self._claim.acquire(blocking=False):
            self._cancelled = True
            self._callbacks.clear()
            self._drop()
            self.is_done = True
            self._ended.release()
        return self._cancelled

    def add_done_callback(self, callback: Callable[[IoFuture], object]) -> None:
        """Have ``callback(self)`` called once when the transfer has ended.

        It is called on the I/O thread, or at once on this thread if the transfer has ended already; never for
        a cancelled transfer. An exception from a callback on an I/O thread makes the store refuse further
        transfers, and ``close()`` raises it.
        """
        if self._cancelled:
            return
        # Append first, look second: the I/O thread sets is_done first and empties the list second. Whatever
        # the order of the four, one of the two sees the callback, and pop() gives it to only one of them.
        self._callbacks.append(callback)
        if self.is_done and not self._cancelled:
            self._call_back()

    def claim(self) -> bool:
        """For the store: decides that the transfer runs; False if it was cancelled."""
        return self._claim.acquire(blocking=False)

    def put_back(self) -> None:
        """For the store: takes a claim back, as nothing has moved; until the next one it may be cancelled."""
        self._claim.release()

    def finish(self, error: BaseException | None = None) -> None:
        """For the store: makes the outcome known, wakes the waiters and runs the callbacks."""
        self._conclude(error)
        self._call_back()

    def _conclude(self, error: BaseException | None) -> None:
        self.error = error
        self.is_done = True
        self._ended.release()

    def _drop(self) -> None:
        """Forget a transfer that was cancelled, and its tensor."""

    @interrupts.waits
    def _block(self, timeout: float | None) -> None:
        if not acquired(self._ended, timeout):
            raise TimeoutError(f"the transfer has not ended within {timeout} s")
        self._ended.release()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # the other thread took the last one
                return
            callback(self)


@interrupts.waits
def in_ticks(has_ended: Callable[[float], bool], limit: float | None) -> bool:
    """Wait within a limit of the time that this process runs.

    Clocks go on while a process is stopped, by a batch system that suspends the job or with its container.
    A drive is not to blame for that time: of each stop a second counts at most.

    Args:
        has_ended: Waits for so many seconds; true if what it waits for has ended by then.
        limit: Seconds; ``None`` for no limit.

    Returns:
        Whether it has ended within the limit.
    """
    left = math.inf if limit is None else limit
    while not has_ended(min(max(left, 0.0), TICK)):
        left -= TICK
        if left <= 0:
            return False
    return True


def acquired(lock: LockType, limit: float | None) -> bool:
    """Take a lock; see :func:`in_ticks`.

    Args:
        lock: The lock.
        limit: Seconds; ``None`` for no limit.
    """
    # No lambda: an interrupt would find its frame, which is not known to wait.
    return in_ticks(partial(lock.acquire, True), limit)  # noqa: FBT003


def take_back(transfers: Iterable[IoFuture], limit: float | None = STALL_SECONDS) -> None:
    """Cancel transfers, or wait for them: none of them runs afterwards, unless its drive hangs.

    Args:
        transfers: The transfers.
        limit: Seconds to wait at most, for all of them together; ``None`` for no limit.
    """
    running = [transfer for transfer in transfers if not transfer.cancel()]

    def have_ended(seconds: float) -> bool:
        until = time.monotonic() + seconds
        for transfer in running:
            with suppress(StoreError):
                try:
                    transfer.wait(until - time.monotonic())
                except TimeoutError:
                    return False
        return True

    in_ticks(have_ended, limit)


def _anew(error: BaseException) -> BaseException:
    """Return the same error, to be raised.

    One that is raised comes to know the frames of all callers and what they hold, such as the graph of a
    step. A future that kept it would keep them.
    """
    new = copy.copy(error)
    new.__cause__ = error.__cause__
    return new


class Load(NamedTuple):
    """What one direction of one drive has moved.

    Attributes:
        nbytes: Bytes.
        seconds: How long at least one transfer was under way, waiting for the device not counted.
    """

    nbytes: int
    seconds: float


class DriveLoad(NamedTuple):
    """What one drive has moved, or the host memory beside drives.

    Attributes:
        write: To it.
        read: From it.
        tier: Which of the two it is, "drive" or "host"; a store in host memory alone is its own drive.
        in_service: Whether it takes writes; one that failed does not, for a while.
        room: Most bytes that it holds, as far as that is known: its capacity, what it had grown to when it
            was found full, or nothing while it is out of service; ``None`` for no known limit.
        checksum_seconds: Processor time of I/O threads for checksums.
    """

    write: Load
    read: Load
    tier: str = DRIVE_TIER
    in_service: bool = True
    room: int | None = None
    checksum_seconds: float = 0.0


class Moved(NamedTuple):
    """One call that moved bytes, of one extent or of several next to each other.

    Attributes:
        drive: As of their extents.
        place: Name of the drive, as messages have it.
        writes: Whether it wrote.
        thread: Number of the I/O thread, as :func:`threading.get_ident` tells it.
        began: When it began, by :func:`time.perf_counter`; waiting for the device is not part of it.
        ended: When it ended.
        nbytes: Bytes that it moved.
    """

    drive: int
    place: str
    writes: bool
    thread: int
    began: float
    ended: float
    nbytes: int


WriteOrder = tuple[Extent, "ByteRange", "Event", "Callable[[IoFuture], object] | None"]
"""The arguments of :meth:`ActivationStore.write`: extent, source, after, done."""

ReadOrder = tuple[Extent, "ByteRange", "Event"]
"""The first arguments of :meth:`ActivationStore.read`: extent, target, after."""


class ActivationStore(ABC):
    """A place outside device memory for the bytes of activations.

    ``source`` and ``target`` of a transfer are ranges of exactly ``extent.nbytes`` bytes, on any device. The
    caller keeps their memory untouched until the future is done. The store holds a reference while the
    transfer is queued or running and drops it before it runs the callbacks, so that a callback can free the
    memory.

    Use it as a context manager or call :meth:`close`. In a forked child it is inert: its descriptors are
    closed there and every use raises ``SessionError``.

    Attributes:
        kind: "file", "host", "gds", "striped", "tiered", or the word of a kind that was registered.
        alignment: What addresses must match for a transfer without a copy, bytes; 1 where nothing is needed.
        capacity_bytes: The most bytes that extents may take; ``None`` if only the drive sets a limit.
        extent_bytes: More bytes of one activation should come as several extents, which move at once;
            ``None`` where that is of no use.
    """

    kind: str
    alignment: int
    capacity_bytes: int | None
    extent_bytes: int | None = None

    @property
    @abstractmethod
    def description(self) -> dict[str, object]:
        """What the store is and which I/O path it really uses, for the run log; plain JSON values."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that extents take now, padding included."""

    @property
    @abstractmethod
    def high_water_bytes(self) -> int:
        """What the store has grown to: the largest end that an extent ever had, on each drive."""

    @abstractmethod
    def reserve(self, nbytes: int, address: int) -> Extent:
        """Take an extent for a range of bytes.

        Args:
            nbytes: Length of the range, at least 1.
            address: Address of its first byte. A write from an address that is congruent to it modulo the
                alignment, and a read into one, can go without a copy.

        Raises:
            StoreFullError: The capacity is reached or the drive is full.
            OutOfServiceError: The drive failed, now or before, and it is not time to try it again.
            TimeoutError: The drive hangs; from now on it is out of service.
            SessionError: The store is closed, or this is a forked child.
        """

    def reserve_many(self, ranges: Sequence[tuple[int, int]]) -> list[Extent]:
        """Take extents for the first of several ranges of bytes, at best next to each other.

        For how many, the store decides: for one where it places each by how far the writes before it have
        come. The caller asks again for the others when those are queued.

        Args:
            ranges: Length and address of each, as for :meth:`reserve`; at least one.

        Returns:
            At least one extent.

        Raises:
            StoreError: There is none for the first range; as :meth:`reserve`.
            TimeoutError: As there.
        """
        nbytes, address = ranges[0]
        return [self.reserve(nbytes, address)]

    @abstractmethod
    def release(self, extent: Extent) -> None:
        """Give an extent back; may be called from any thread and from a callback.

        After :meth:`close` it does nothing: the extents are gone with the store.

        Raises:
            ValueError: The extent is not reserved, or a transfer of it has not ended.
        """

    def leased(self) -> list[Extent]:
        """Return the extents that are reserved.

        Of a store that does not tell, one that its owner lost stays so.
        """
        return []

    @abstractmethod
    def write(
        self,
        extent: Extent,
        source: ByteRange,
        after: Event,
        *,
        done: Callable[[IoFuture], object] | None = None,
    ) -> IoFuture:
        """Queues a write of a whole extent.

        If this raises, an interrupt included, no transfer is queued or running that would not call ``done``.

        Args:
            extent: Where to; no other transfer of it may be queued or running.
            source: The bytes.
            after: The write starts when this point of the device's work is reached.
            done: Called as by :meth:`IoFuture.add_done_callback`, and known before the write can start.

        Raises:
            ValueError: The extent is released or busy, or the range does not fit it.
            SessionError: The store is closed, or this is a forked child.
        """

    def write_many(self, orders: Sequence[WriteOrder]) -> list[IoFuture]:
        """Queues writes of whole extents, all or none; see :meth:`write`.

        Args:
            orders: The arguments of each.
        """
        writes: list[IoFuture] = []
        try:
            for extent, source, after, done in orders:
                writes.append(self.write(extent, source, after, done=done))
        except BaseException:
            take_back(writes)
            raise
        return writes

    @abstractmethod
    def read(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> IoFuture:
        """Queues a read of a whole extent; several reads of one extent may overlap.

        Args:
            extent: Where from; its last write must have ended without an error.
            target: Where to.
            after: The read starts when this point is reached: the last use of the target's memory.
            padded: The bytes of the target's storage down to the previous and up to the next multiple of the
                alignment belong to the target and may be overwritten. If ``extent.lead`` is also the target's
                address modulo the alignment, the read goes without a copy.

        Raises:
            ValueError: The extent is released, being written, or was never written; the range does not fit
                it; or ``padded`` is set and the storage has no room for the padding.
            SessionError: The store is closed, or this is a forked child.
        """

    def read_many(self, orders: Sequence[ReadOrder], *, padded: bool) -> list[IoFuture]:
        """Queues reads of whole extents, all or none; see :meth:`read`.

        Args:
            orders: Extent, target and event of each.
            padded: As there, for all.
        """
        reads: list[IoFuture] = []
        try:
            for extent, target, after in orders:
                reads.append(self.read(extent, target, after, padded=padded))
        except BaseException:
            take_back(reads)
            raise
        return reads

    @abstractmethod
    def place(self, extent: Extent) -> str:
        """Where an extent lies, for messages: the directory, or what else the store is."""

    @abstractmethod
    def take_loads(self) -> list[DriveLoad]:
        """Return what each drive has moved since the last call."""

    @abstractmethod
    def write_rate(self) -> float | None:
        """Bytes a second that writes went at of late, of all drives in service; ``None`` before the first.

        Looking does not disturb :meth:`take_loads`, and costs next to nothing.
        """

    @abstractmethod
    def pending(self) -> int:
        """Transfers that are queued or running; one whose future is done no longer counts."""

    @abstractmethod
    def pending_bytes(self) -> int:
        """Bytes whose transfers are queued or running."""

    @abstractmethod
    def pending_write_bytes(self) -> int:
        """Bytes whose writes are queued or running."""

    def suspend(self, extent: Extent, cause: BaseException) -> None:  # noqa: B027 - as below
        """Take the drive that an extent lies on out of service: a read of it failed for good.

        A failed write does that by itself. The drive is tried again by one write, after one second, and twice
        as long after each further failure.
        """

    def take_outages(self) -> list[tuple[str, str]]:
        """Return the drives that were taken out of service since the last call, each with the cause.

        That a drive is full is none of them.
        """
        return []

    def resume(self) -> None:  # noqa: B027 - as below
        """Put every drive back in service: the next transfer tells whether it works."""

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:  # noqa: B027 - as above
        """Have a function told of each call that moves bytes, when it has ended well, on its I/O thread.

        A store that does not tell is left out where a step is drawn drive by drive.

        Args:
            seen: The function, which must not raise; ``None`` for none any more.
        """

    def resize_window(self, window: int | None) -> None:  # noqa: B027 - most stores have no use for it
        """Tell the store how many bytes may be in flight at most; ``None`` for no limit.

        Called between steps, whenever that changes.
        """

    def limit_waits(self, seconds: float | None) -> None:  # noqa: B027 - without threads nothing hangs
        """Tell the store how long a transfer may run before :meth:`close` gives it up; ``None`` for ever.

        :meth:`reserve` waits as long for a file to grow. Without this it is ``stall_seconds`` of the options.
        """

    @abstractmethod
    def prepare(self, nbytes: int) -> None:
        """Make room for extents of ``nbytes`` in all, so that no step has to wait while the store grows.

        Raises:
            StoreFullError: There is no such room.
            TimeoutError: The drive hangs.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel queued transfers, wait for running ones, end the threads and free everything.

        Idempotent. Not to be called from a callback. A transfer that has run for longer than the limit, see
        :meth:`limit_waits`, is not waited for: its thread, its memory and the file stay until the process
        ends.

        Raises:
            HangingError: A transfer hangs.
            BaseException: What the first callback that failed on an I/O thread raised.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(error, self.close)


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Close what uses a store at the end of a block; after an error of the block its own is only a warning.

    Args:
        error: What the block raised.
        close: Closes the store, and what it held.

    Raises:
        StoreError: The store says so, and the block raised nothing.
        TransferError: Bytes cannot be brought back from it, likewise.
        SessionError: What it held was changed when it must not be, likewise.
    """
    try:
        close()
    except (StoreError, TransferError, SessionError) as failure:
        if error is None:
            raise
        warn(str(failure), RuntimeWarning)
