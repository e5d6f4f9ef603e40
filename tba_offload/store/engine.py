"""What the stores have in common: extents and who uses them, queues, I/O threads, closing, forking.

A backend derives from :class:`QueuedStore` and says how bytes move. The training thread pays for a few
dictionary look-ups and one queue operation a transfer; everything else happens on the I/O threads.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import traceback
import warnings
import weakref
from abc import abstractmethod
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from xxhash import xxh3_64

from tba_offload.errors import (
    ChecksumError,
    OutOfServiceError,
    SessionError,
    StoreError,
    StoreFullError,
    is_of_drive,
)
from tba_offload.store import exit_status, posix
from tba_offload.store.base import (
    STALL_SECONDS,
    WARN_AFTER,
    ActivationStore,
    DriveLoad,
    Extent,
    IoFuture,
    Load,
)
from tba_offload.store.extents import BLOCK, ExtentAllocator, round_up
from tba_offload.store.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.base import WriteOrder


_PATIENCE_AT_FORK = 10.0
"""Seconds that a fork waits for running reads."""

_WRITE, _READ, _GROW = range(3)
"""The number of the lane for each kind of job."""

_RECENT_BYTES = 64 << 20
"""How far back the rate of a direction looks: what came before so many bytes counts half, or less."""


class Backing(Protocol):
    """What holds the bytes. It must not refer to the store, so that a forgotten store can be collected."""

    @property
    def size(self) -> int:
        """Bytes that there is room for."""

    def grow(self, size: int) -> None:
        """Makes room for ``size`` bytes; raises ``StoreFullError`` and changes nothing if there is none."""

    def close(self) -> None:
        """Frees everything; takes no lock, because the cyclic collector may call it."""

    def abandon(self) -> None:
        """In a forked child: closes descriptors and touches nothing else."""


class _TooSmallError(Exception):
    """The store has to grow before it can hand out an extent.

    Attributes:
        size: How far, bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class _Refusal:
    """What a store found no room for: it is not asked for again for a while.

    Attributes:
        service: How long.
    """

    def __init__(self, name: str) -> None:
        self.service = Service()
        self._size = 0
        self._name = name

    def check(self, size: int) -> None:
        """Checks that growing to ``size`` is worth a try.

        Raises:
            StoreFullError: There was no room a moment ago.
        """
        if size >= self._size and not self.service.admits():
            raise StoreFullError(errno.ENOSPC, f"no room, as a moment ago: {self.service.cause}", self._name)

    def note(self, size: int, error: StoreFullError) -> None:
        """There is no room for ``size`` bytes."""
        self._size = size
        self.service.failed(error)


class _Lease:
    """A reserved extent and what is being done with it."""

    __slots__ = ("digest", "extent", "reading", "writing", "written")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.writing = False
        self.reading = 0
        self.written = False
        self.digest: int | None = None


class _Meter:
    """How many bytes move in one direction, and for how long there is something to move.

    Attributes:
        rate: Bytes a second of late; ``None`` before anything has moved. Whoever looks takes no lock, and
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
        """A transfer starts."""
        with self._lock:
            if not self._moving:
                self._since = self._clock()
            self._moving += 1

    def end(self, nbytes: int) -> None:
        """It has ended, and has moved so many bytes."""
        with self._lock:
            self._pass_time()
            self._moving -= 1
            self._nbytes += nbytes
            self._recent_bytes += nbytes
            if self._recent_seconds and self._recent_bytes:
                self.rate = self._recent_bytes / self._recent_seconds
            if self._recent_bytes >= _RECENT_BYTES:
                self._recent_bytes /= 2
                self._recent_seconds /= 2

    def take(self) -> Load:
        """What was moved since the last call."""
        with self._lock:
            if self._moving:
                self._pass_time()
            load = Load(self._nbytes, self._seconds)
            self._nbytes, self._seconds = 0, 0.0
            return load

    def _pass_time(self) -> None:
        """Counts the time since it was last counted, in all of which something moved."""
        now = self._clock()
        self._seconds += now - self._since
        self._recent_seconds += now - self._since
        self._since = now


class _Growth(IoFuture):
    """The job of making room: a file system may hang, so it is not asked on the thread that waits for it."""

    __slots__ = ("_backing", "_device", "_size")

    def __init__(self, backing: Backing, device: Device, size: int) -> None:
        super().__init__()
        self._backing = backing
        self._device = device
        self._size = size

    def run(self) -> None:
        """Makes room; on the thread that has claimed the job."""
        error: BaseException | None = None
        try:
            self._device.bind_thread()
            self._backing.grow(self._size)
        except BaseException as failure:  # noqa: BLE001 - every failure reaches the thread that waits
            error = _store_error(failure.with_traceback(None), "grow")
        self.finish(error)


class Transfer(IoFuture):
    """A future that is also the job in the queue: one object a transfer.

    ``store``, ``memory`` and ``after`` are dropped as soon as the outcome is certain, so neither the queue
    nor somebody who keeps the future keeps memory alive.
    """

    __slots__ = ("after", "lease", "memory", "padded", "store", "writes")

    def __init__(
        self,
        lease: _Lease,
        memory: ByteRange,
        after: Event,
        done: Callable[[IoFuture], object] | None,
        *,
        writes: bool,
        padded: bool,
    ) -> None:
        super().__init__(done)
        self.store: QueuedStore | None = None  # until the store counts it as pending
        self.lease = lease
        self.memory: ByteRange | None = memory
        self.after: Event | None = after
        self.writes = writes
        self.padded = padded

    def run(self) -> None:
        """Moves the bytes; on an I/O thread that has claimed the transfer."""
        store, memory, after = self.store, self.memory, self.after
        if store is None or memory is None or after is None:
            raise RuntimeError("a transfer can run only once")
        error: StoreError | None = None
        try:
            store._move(self, memory, after)
        except BaseException as failure:  # noqa: BLE001 - every failure reaches the thread that waits
            error = store._as_store_error(failure, self)
        del memory, after
        if self.writes:
            store._note_write(error)
        self._forget(store, succeeded=error is None)
        self._conclude(error)
        while self._callbacks:
            try:
                self._call_back()
            except BaseException as failure:  # noqa: BLE001 - reported now, raised by close()
                store._callback_failed(failure)

    def _forget(self, store: QueuedStore, *, succeeded: bool) -> None:
        self.store = self.memory = self.after = None
        store._settle(self, succeeded=succeeded)

    def _drop(self) -> None:
        if self.store is not None:
            self._forget(self.store, succeeded=False)

    def _block(self, timeout: float | None) -> None:
        store = self.store
        if store is not None:
            store._check_process()
        del store
        super()._block(timeout)


class _Lane:
    """One queue and the threads that serve it.

    The threads know the queue only, never the store: a store that was forgotten can be collected, and its
    finalizer ends them.
    """

    def __init__(self, name: str, count: int) -> None:
        self.jobs: SimpleQueue[Transfer | _Growth | None] = SimpleQueue()
        self.shifts = [_Shift() for _ in range(count)]
        self.threads = [
            threading.Thread(target=_serve, args=(self.jobs, shift), name=f"tba-{name}-{i}", daemon=True)
            for i, shift in enumerate(self.shifts)
        ]
        for thread in self.threads:
            thread.start()

    def cancel_queued(self) -> None:
        """Cancels every transfer that has not started."""
        while True:
            try:
                job = self.jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                job.cancel()

    def stop(self) -> None:
        """Has every thread end when it has served what is queued now; does not wait."""
        for _ in self.threads:
            self.jobs.put(None)

    def hangs(self, limit: float | None) -> bool:
        """Whether one job has run for ``limit`` seconds."""
        return any((left := shift.left(limit)) is not None and left <= 0 for shift in self.shifts)

    def join(self, limit: float | None) -> bool:
        """Waits until the threads have ended; false when one transfer has run for ``limit`` seconds."""
        for thread, shift in zip(self.threads, self.shifts, strict=True):
            while thread.is_alive():
                left = shift.left(limit)
                if left is not None and left <= 0:
                    return False
                thread.join(left)
        return True


class _Shift:
    """What an I/O thread is at.

    Attributes:
        busy: Held while the thread moves bytes.
        began: When it began with them, on the monotonic clock; ``None`` while it moves none.
    """

    __slots__ = ("began", "busy")

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.began: float | None = None

    def left(self, limit: float | None) -> float | None:
        """Seconds that are left of a limit for one transfer; ``None`` if there is no limit."""
        if limit is None:
            return None
        began = self.began
        return limit if began is None else began + limit - time.monotonic()


def _serve(jobs: SimpleQueue[Transfer | _Growth | None], shift: _Shift) -> None:
    """The life of an I/O thread."""
    while (job := jobs.get()) is not None:
        with shift.busy:
            shift.began = time.monotonic()
            if job.claim():
                job.run()
            shift.began = None
        del job


class QueuedStore(ActivationStore):
    """A store with an extent allocator, a queue of writes and a queue of reads.

    Args:
        alignment: See :class:`ActivationStore`.
        capacity: Bytes that extents may take in all; ``None`` for no limit.
        checksum: Verify every read against an xxh3 checksum taken at the write.
        device: The device that activations lie on.
        writers: Threads that write, at least 1.
        readers: Threads that read, at least 1.
        drive: The ``drive`` of the extents.
        name: What messages call the store.
        setting: The setting that its capacity comes from, for messages.
        backing: What holds the bytes; the store closes it.
    """

    def __init__(
        self,
        *,
        alignment: int,
        capacity: int | None,
        checksum: bool,
        device: Device,
        writers: int,
        readers: int,
        drive: int,
        name: str,
        setting: str = "store.capacity",
        backing: Backing,
    ) -> None:
        if writers < 1 or readers < 1:
            raise ValueError(f"a store needs a writer and a reader, not {writers} and {readers}")
        if capacity is not None and capacity < BLOCK:
            raise ValueError(f"a capacity of {capacity} bytes holds no extent; the least is {BLOCK}")
        self.alignment = alignment
        self.capacity_bytes = capacity
        self.name = name
        self.chosen: dict[str, object] | None = None
        """Why ``auto`` took this kind of store, and what it measured; ``None`` if nothing was to choose."""
        self._setting = setting
        self._device = device
        self.drive_number = drive
        self._backing = backing
        self._checksum = checksum
        # Guards the allocator, the leases and the counters; held for microseconds.
        self._lock = threading.Lock()
        self._service = Service()
        self._outage: str | None = None
        self._refusal = _Refusal(name)
        self._space = ExtentAllocator(capacity, partial(_check_size, backing))
        self._leases: dict[int, _Lease] = {}
        self._pending = 0
        self._pending_bytes = 0
        self._pending_write_bytes = 0
        self._limit: float | None = STALL_SECONDS
        self._closed = False
        self._forked = False
        self._callback_error: BaseException | None = None
        self._meters = (_Meter(), _Meter())
        self._lanes = (_Lane("write", writers), _Lane("read", readers), _Lane("grow", 1))
        self._finalizer = weakref.finalize(self, _end_forgotten, name, self._lanes, backing)
        self._finalizer.atexit = False  # _close_all() ends stores in order instead
        _open_stores.add(self)

    # What a backend supplies. The thread that calls it has waited for ``after``.

    @abstractmethod
    def _move_out(self, extent: Extent, source: ByteRange, after: Event) -> int | None:
        """Writes on an I/O thread; returns the checksum of the bytes, ``None`` if checksums are off."""

    @abstractmethod
    def _move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:
        """Reads on an I/O thread; returns the checksum of the bytes, ``None`` if checksums are off."""

    def _hasher(self) -> xxh3_64 | None:
        """A new checksum for one transfer, ``None`` if checksums are off.

        An object, because the functions of xxhash before 4.0 hold the interpreter's lock while they hash.
        """
        return xxh3_64() if self._checksum else None

    def _digest(self, data: torch.Tensor) -> int | None:
        """The checksum of bytes in the device's memory, as of their transfer."""
        if (hasher := self._hasher()) is None:
            return None
        on_host = data.cpu()
        hasher.update(posix.view(on_host.data_ptr(), on_host.numel()))
        return hasher.intdigest()

    # What callers see.

    def holds(self, extent: Extent, source: ByteRange) -> bool | None:
        """Compares bytes with the checksum of an extent; see :meth:`ActivationStore.holds`."""
        with self._lock:
            lease = self._leases.get(extent.offset)
            written = lease.digest if lease is not None and lease.extent == extent else None
        return None if written is None else self._digest(source.tensor()) == written

    def place(self, extent: Extent) -> str:  # noqa: ARG002 - a store without parts is one place
        """The name of this store; see :meth:`ActivationStore.place`."""
        return self.name

    @property
    def used_bytes(self) -> int:
        """Bytes that extents take now, padding included."""
        return self._space.used

    @property
    def high_water_bytes(self) -> int:
        """The largest end that an extent ever had."""
        return self._space.high_water

    def reserve(self, nbytes: int, address: int) -> Extent:
        """Takes an extent; see :meth:`ActivationStore.reserve`."""
        if nbytes < 1:
            raise ValueError(f"an extent holds at least 1 byte, not {nbytes}")
        lead = address % self.alignment
        length = round_up(lead + nbytes, BLOCK)
        self._check_process()
        if (self._service.cause is not None and self._hangs()) or not self._service.admits():
            raise self._out_of_service()
        while True:
            try:
                return self._take(nbytes, lead, length)
            except _TooSmallError as found:
                size = found.size
            self._grow(size)

    def reserve_many(self, ranges: Sequence[tuple[int, int]]) -> list[Extent]:
        """Takes extents next to each other where there is room for all of them, and else one.

        See :meth:`ActivationStore.reserve_many`.
        """
        if len(ranges) > 1 and self._service.cause is None:  # else one write shall try the drive
            self._check_process()
            places = [(nbytes, address % self.alignment) for nbytes, address in ranges]
            with suppress(_TooSmallError):
                if extents := self._take_run(places):
                    return extents
        return super().reserve_many(ranges)

    def _take_run(self, places: Sequence[tuple[int, int]]) -> list[Extent]:
        """Takes extents for ranges, of each its bytes and its lead, without growing; none if not all fit."""
        extents: list[Extent] = []
        lengths = [-(-(lead + nbytes) // BLOCK) * BLOCK for nbytes, lead in places]
        try:
            with self._lock:
                self._check_open()
                offset = self._space.allocate(sum(lengths))
                if offset is None:
                    return []
                for (nbytes, lead), length in zip(places, lengths, strict=True):
                    extent = Extent(offset, length, nbytes, lead, self.drive_number)
                    extents.append(extent)
                    self._leases[offset] = _Lease(extent)
                    offset += length
        except _TooSmallError:
            raise
        except BaseException:  # an interrupt: the caller would never know of the extents
            self._rebuild_space(without=[extent.offset for extent in extents])
            raise
        return extents

    def _take(self, nbytes: int, lead: int, length: int) -> Extent:
        """Takes an extent of ``length`` bytes without growing."""
        offset = None
        try:
            with self._lock:
                self._check_open()
                offset = self._space.allocate(length)
                if offset is not None:
                    extent = Extent(offset, length, nbytes, lead, self.drive_number)
                    self._leases[offset] = _Lease(extent)
                    return extent
        except _TooSmallError:
            raise
        except BaseException:
            # An interrupt: the caller would never know of the extent.
            self._rebuild_space(without=() if offset is None else (offset,))
            raise
        raise StoreFullError(
            errno.ENOSPC,
            f"{length} bytes do not fit: {self._space.used} of the store's capacity of "
            f"{self.capacity_bytes} bytes are taken; raise {self._setting} or offload less",
            self.name,
        )

    def _grow(self, size: int) -> None:
        """Makes room for ``size`` bytes; no lock is held meanwhile.

        Raises:
            StoreFullError: There is none, or there was none a moment ago.
            OutOfServiceError: The drive failed.
            TimeoutError: The drive hangs.
        """
        growth = _Growth(self._backing, self._device, size)
        with self._lock:
            self._check_open()
            self._refusal.check(size)
            self._lanes[_GROW].jobs.put(growth)
        try:
            self._await_growth(growth, size)
        except StoreFullError as error:
            self._refusal.note(size, error)
            raise
        except StoreError as error:
            if not is_of_drive(error):
                raise
            self._fail(error)
            raise self._out_of_service() from error
        except TimeoutError:
            cause = f"the file cannot grow within {self._limit:g} s"
            self._fail(StoreError(errno.ETIMEDOUT, cause, self.name))
            raise
        self._refusal.service.succeeded()

    def _await_growth(self, growth: _Growth, size: int) -> None:
        """Waits for room for ``size`` bytes; a wait that gets long is named in a warning.

        Raises:
            StoreError: The file cannot grow.
            TimeoutError: The drive hangs.
        """
        limit = self._limit
        if limit is None:
            growth.wait()
            return
        text = "nothing has moved for {:g} s: the file in {} does not grow to {} bytes"
        try:
            growth.wait(limit * WARN_AFTER)
        except TimeoutError:
            warnings.warn(text.format(limit * WARN_AFTER, self.name, size), RuntimeWarning, stacklevel=2)
            try:
                growth.wait(limit * (1 - WARN_AFTER))
            except TimeoutError:
                raise TimeoutError(text.format(limit, self.name, size)) from None

    def _hangs(self) -> bool:
        """Whether a transfer or the growth of the file has gone on for longer than the limit."""
        return any(lane.hangs(self._limit) for lane in self._lanes)

    def _fail(self, error: BaseException) -> None:
        """Takes the drive out of service; that there was no room is told elsewhere."""
        self._service.failed(error)
        if self._outage is None and not isinstance(error, StoreFullError):
            self._outage = str(error)

    def _out_of_service(self) -> OutOfServiceError:
        cause = self._service.cause
        return OutOfServiceError(
            errno.EIO, f"left alone since it failed, to be tried again: {cause}", self.name
        )

    def _rebuild_space(self, *, without: Iterable[int] = ()) -> None:
        """Has the allocator begin anew with the extents that are reserved, but for those at some offsets."""
        with self._lock:
            for offset in without:
                self._leases.pop(offset, None)
            self._space.rebuild((lease.extent.offset, lease.extent.length) for lease in self._leases.values())

    def release(self, extent: Extent) -> None:
        """Gives an extent back; see :meth:`ActivationStore.release`."""
        if self._forked:
            self._check_process()
        try:
            with self._lock:
                if self._closed:
                    return
                lease = self._leases.get(extent.offset)
                if lease is None or lease.extent is not extent or lease.writing or lease.reading:
                    self._check_unused(extent)
                del self._leases[extent.offset]
                self._space.free(extent.offset, extent.length)
        except ValueError:
            raise
        except BaseException:
            self._rebuild_space()  # an interrupt: it may have struck between the two
            raise

    def leased(self) -> list[Extent]:
        """The extents that are reserved; see :meth:`ActivationStore.leased`."""
        if self._closed or self._forked:  # they are gone, or the parent's
            return []
        with self._lock:
            return [lease.extent for lease in self._leases.values()]

    def write(
        self,
        extent: Extent,
        source: ByteRange,
        after: Event,
        *,
        done: Callable[[IoFuture], object] | None = None,
    ) -> IoFuture:
        """Queues a write; see :meth:`ActivationStore.write`."""
        return self._queue([(extent, source, after, done)], writes=True, padded=False)[0]

    def write_many(self, orders: Sequence[WriteOrder]) -> list[IoFuture]:
        """Queues writes; see :meth:`ActivationStore.write_many`."""
        return [*self._queue(orders, writes=True, padded=False)]

    def read(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> IoFuture:
        """Queues a read; see :meth:`ActivationStore.read`."""
        if padded and self.alignment > 1:
            self._check_padding(target)
        return self._queue([(extent, target, after, None)], writes=False, padded=padded)[0]

    def take_loads(self) -> list[DriveLoad]:
        """What the drive has moved; see :meth:`ActivationStore.take_loads`."""
        write, read = self._meters
        in_service = self._service.cause is None
        return [DriveLoad(write.take(), read.take(), in_service=in_service, room=self._room())]

    def _room(self) -> int | None:
        """The most bytes that the drive holds, as far as that is known."""
        if self._service.cause is not None:
            return 0
        return self.capacity_bytes if self._refusal.service.cause is None else self._space.high_water

    def write_rate(self) -> float | None:
        """Bytes a second that were written of late; see :meth:`ActivationStore.write_rate`."""
        return self._meters[0].rate if self._service.cause is None else None

    def suspend(self, extent: Extent, cause: BaseException) -> None:  # noqa: ARG002 - one drive
        """Takes the drive out of service; see :meth:`ActivationStore.suspend`."""
        self._fail(cause)

    def take_outages(self) -> list[tuple[str, str]]:
        """What took the drive out of service; see :meth:`ActivationStore.take_outages`."""
        if self._outage is None:
            return []
        outage, self._outage = self._outage, None
        return [(self.name, outage)]

    def resume(self) -> None:
        """Puts the drive back in service; see :meth:`ActivationStore.resume`."""
        self._service.resume()
        self._refusal.service.resume()

    def pending(self) -> int:
        """Transfers that are queued or running."""
        return self._pending

    def pending_bytes(self) -> int:
        """Bytes whose transfers are queued or running."""
        return self._pending_bytes

    def pending_write_bytes(self) -> int:
        """Bytes whose writes are queued or running."""
        return self._pending_write_bytes

    def limit_waits(self, seconds: float | None) -> None:
        """Limits how long :meth:`close` waits for one transfer; see :meth:`ActivationStore.limit_waits`."""
        self._limit = seconds

    def prepare(self, nbytes: int) -> None:
        """Grows the store; see :meth:`ActivationStore.prepare`."""
        self._check_process()
        with self._lock:
            self._check_open()
            limit = self._space.capacity
            if limit is not None and nbytes > limit:
                raise StoreFullError(
                    errno.ENOSPC, f"{nbytes} bytes do not fit into a capacity of {limit} bytes", self.name
                )
        self._grow(round_up(nbytes, BLOCK))

    def close(self) -> None:
        """Ends the store; see :meth:`ActivationStore.close`."""
        if self._forked or not self._finalizer.alive:
            return
        if any(threading.current_thread() in lane.threads for lane in self._lanes):
            raise SessionError("a store cannot be closed from a callback: it would wait for itself")
        with self._lock:
            self._closed = True  # from here on nothing is queued any more
        # Each step may be repeated: an interrupted close() is finished by the next one.
        for lane in self._lanes:
            lane.cancel_queued()
            lane.stop()
        joined = [lane.join(self._limit) for lane in self._lanes]
        if not all(joined):
            self.give_up()
            raise self._hanging()
        if self._finalizer.detach() is None:
            return  # another thread closes, too, and was first
        _open_stores.discard(self)
        self._backing.close()
        if self._callback_error is not None:
            raise self._callback_error

    def _hanging(self) -> StoreError:
        if self._pending:
            what = f"{self._pending_bytes} bytes of {self._pending} transfers have not moved"
        else:
            what = "the attempts to grow the file have not ended"
        return StoreError(
            errno.ETIMEDOUT,
            f"{what} for {self._limit:g} s and are given up: their threads, their memory and the file stay "
            "until the process ends; check the drive and the system log",
            self.name,
        )

    def give_up(self) -> None:
        """Ends the store without waiting for transfers that hang.

        Their threads, and the file, stay until the process ends; so does the memory that they write from or
        read into, which the threads hold.
        """
        with self._lock:
            self._closed = True
        for lane in self._lanes:
            lane.cancel_queued()
            lane.stop()
        self._finalizer.detach()
        _open_stores.discard(self)

    # On the training thread.

    def _queue(self, orders: Sequence[WriteOrder], *, writes: bool, padded: bool) -> list[Transfer]:
        """Queues transfers, all or none.

        The conditions are looked at here and judged, with an error that says which, elsewhere: this costs the
        training thread time for each transfer.
        """
        if self._forked:
            self._check_process()
        transfers: list[Transfer] = []
        jobs = self._lanes[_WRITE if writes else _READ].jobs
        try:
            with self._lock:
                self._check_open()
                for extent, memory, after, done in orders:
                    lease = self._leases.get(extent.offset)
                    if lease is None or lease.extent is not extent or memory.nbytes != extent.nbytes:
                        lease = self._lease_for(extent, memory)
                    if lease.writing or (lease.reading if writes else not lease.written):
                        self._check_idle(lease, writes=writes)
                    transfer = Transfer(lease, memory, after, done, writes=writes, padded=padded)
                    transfers.append(transfer)
                    self._count(transfer)
                for transfer in transfers:
                    jobs.put(transfer)
            return transfers  # noqa: TRY300 - an interrupt after the block would lose them
        except BaseException:
            # An interrupt: none must run without its owner's knowing; what runs already shall end.
            for transfer in transfers:
                if not transfer.cancel():
                    with suppress(StoreError, TimeoutError):
                        transfer.wait(self._limit)
            raise

    def _count(self, transfer: Transfer) -> None:
        """Takes note of a transfer that is about to be queued; the lock is held.

        There is no call between the lines, so no interrupt can fall between them.
        """
        lease, nbytes = transfer.lease, transfer.lease.extent.nbytes
        if transfer.writes:
            lease.writing = True
            lease.written = False
            self._pending_write_bytes += nbytes
        else:
            lease.reading += 1
        self._pending += 1
        self._pending_bytes += nbytes
        transfer.store = self

    def _lease_for(self, extent: Extent, memory: ByteRange) -> _Lease:
        """The lease of an extent that these bytes fit."""
        if memory.nbytes != extent.nbytes:
            raise ValueError(f"a transfer of {extent} takes {extent.nbytes} bytes, not {memory.nbytes}")
        return self._lease(extent)

    def _check_idle(self, lease: _Lease, *, writes: bool) -> None:
        """Checks that an extent may be written, or read, now."""
        if writes and (lease.writing or lease.reading):
            raise ValueError(f"{lease.extent} cannot be written: another transfer of it has not ended")
        if not writes and not lease.written:
            state = "is being written" if lease.writing else "was never written"
            raise ValueError(f"{lease.extent} cannot be read: it {state}")

    def _check_unused(self, extent: Extent) -> None:
        lease = self._lease(extent)
        if lease.writing or lease.reading:
            raise ValueError(f"{extent} cannot be released: a transfer of it has not ended")

    def _lease(self, extent: Extent) -> _Lease:
        lease = self._leases.get(extent.offset)
        # By identity: an equal extent may be an older one at the same place.
        if lease is None or lease.extent is not extent:
            raise ValueError(f"{extent} is not reserved here: it was released, or belongs to another store")
        return lease

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError(f"the store {self.name} is closed")
        if self._callback_error is not None:
            raise SessionError(
                f"the store {self.name} stopped: a callback of a transfer failed"
            ) from self._callback_error

    def _check_process(self) -> None:
        # Before the lock is taken: a thread that does not exist in the child may have held it at the fork.
        if self._forked:
            raise SessionError(
                f"the store {self.name} was opened before this process was forked; only the parent can use "
                "it, not a forked child"
            )

    def _check_padding(self, target: ByteRange) -> None:
        if not self._device.is_host(target):
            return
        lead = target.address % self.alignment
        end = round_up(lead + target.nbytes, self.alignment) - lead + target.start
        if target.start < lead or end > target.storage.nbytes():
            raise ValueError(
                f"the target's storage has no room for padding to multiples of {self.alignment} bytes; "
                "allocate it larger or pass padded=False"
            )

    # On the I/O threads.

    def _move(self, transfer: Transfer, memory: ByteRange, after: Event) -> None:
        self._device.bind_thread()
        after.synchronize()  # before the clock starts: this is not the drive's time
        if transfer.writes and self._service.is_resting():
            raise self._out_of_service()  # what was queued need not fail one by one, each after its timeout
        lease = transfer.lease
        meter = self._meters[0 if transfer.writes else 1]
        moved = 0  # a transfer that fails, perhaps at once, says nothing of a rate
        meter.begin()
        try:
            if transfer.writes:
                lease.digest = self._move_out(lease.extent, memory, after)
                moved = lease.extent.nbytes
                return
            digest = self._move_in(lease.extent, memory, after, padded=transfer.padded)
            moved = lease.extent.nbytes
        finally:
            meter.end(moved)
        if digest != lease.digest:
            raise ChecksumError(
                errno.EIO,
                f"{lease.extent} reads back with checksum {digest:#x} instead of {lease.digest:#x}: the "
                "drive, its driver or the memory changed the bytes, or the model changed a saved tensor "
                "through .data while it was written; check the drive",
                self.name,
            )

    def _note_write(self, error: StoreError | None) -> None:
        """A write has ended: tells whether the drive is in service."""
        if error is None:
            self._service.succeeded()
        elif is_of_drive(error):
            self._fail(error)

    def _settle(self, transfer: Transfer, *, succeeded: bool) -> None:
        """Notes that a transfer has ended or was cancelled."""
        lease = transfer.lease
        with self._lock:
            self._pending -= 1
            self._pending_bytes -= lease.extent.nbytes
            if transfer.writes:
                lease.writing = False
                lease.written = succeeded
                self._pending_write_bytes -= lease.extent.nbytes
            else:
                lease.reading -= 1

    def _as_store_error(self, failure: BaseException, transfer: Transfer) -> StoreError:
        """The error as waiters get it; the frames in its traceback let go of the memory and of the store."""
        if failure.__traceback__ is not None:
            failure.__traceback__ = failure.__traceback__.tb_next  # the frame of run(), which goes on
            traceback.clear_frames(failure.__traceback__)
        verb = "write" if transfer.writes else "read"
        return _store_error(failure, f"{verb} {transfer.lease.extent} of {self.name}")

    def _callback_failed(self, failure: BaseException) -> None:
        if self._callback_error is None:
            self._callback_error = failure
        hook_arguments = (type(failure), failure, failure.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(hook_arguments))

    def _abandon(self) -> None:
        """Makes the store inert in a forked child and closes its descriptors there."""
        self._forked = True
        if self._finalizer.detach() is not None:
            self._backing.abandon()


def _store_error(failure: BaseException, what: str) -> StoreError:
    if isinstance(failure, StoreError):
        return failure
    text = f"could not {what}: {failure!r}"
    # Memory that is short is no fault of the program, whether a system call or Python says so.
    error = StoreError(errno.ENOMEM, text) if isinstance(failure, MemoryError) else StoreError(text)
    error.__cause__ = failure
    return error


def _check_size(backing: Backing, size: int) -> None:
    """Checks that there is room for ``size`` bytes.

    Raises:
        _TooSmallError: There is not.
    """
    if size > backing.size:
        raise _TooSmallError(size)


def _end_forgotten(name: str, lanes: tuple[_Lane, ...], backing: Backing) -> None:
    """Ends a store that was collected without close(); nothing is pending, or it would not be collected.

    This may run inside any lock, so it takes none and waits for nobody.
    """
    for lane in lanes:
        lane.stop()
    backing.close()
    warnings.warn(f"the store {name} was not closed", ResourceWarning, stacklevel=2)


_open_stores: weakref.WeakSet[QueuedStore] = weakref.WeakSet()


def open_stores() -> list[QueuedStore]:
    """The stores of this process that are in use: neither closed nor given up."""
    return list(_open_stores)


@exit_status.failing
def _close_all() -> None:
    with ExitStack() as stack:
        for store in open_stores():
            stack.callback(store.close)


_held_at_fork: list[threading.Lock] = []


def _before_fork() -> None:
    """Lets no read run during a fork.

    Direct I/O into private memory must not overlap with one: before Linux 6.3 the bytes may arrive in a page
    that copy-on-write has given to the child. A drive that hangs shall not hang the fork too.
    """
    deadline = time.monotonic() + _PATIENCE_AT_FORK
    reading = [shift.busy for store in open_stores() for shift in store._lanes[_READ].shifts]
    _held_at_fork.extend(
        busy for busy in reading if busy.acquire(timeout=max(deadline - time.monotonic(), 0))
    )


def _after_fork_in_parent() -> None:
    while _held_at_fork:
        _held_at_fork.pop().release()


def _after_fork_in_child() -> None:
    _held_at_fork.clear()
    for store in list(_open_stores):
        store._abandon()
    _open_stores.clear()


atexit.register(_close_all)
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
