"""One transfer, a future that is also the job in the queue; several in a batch; how they are done.

A call to a drive costs as much as a few hundred KiB that it moves. So transfers of neighbouring extents that
are queued together are one job, and one call where the backend can join them. Each is still cancelled, fails
and is concluded for itself.
"""

from __future__ import annotations

import errno
import threading
import time
import traceback
from _thread import allocate_lock
from typing import TYPE_CHECKING

from tba_offload.device import is_device_failure
from tba_offload.errors import ChecksumError, DeviceError, StoreError
from tba_offload.store import posix
from tba_offload.store.base import IoFuture, Moved
from tba_offload.store.leases import check_idle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.device import ByteRange, Event
    from tba_offload.store.backend import Backend, Joining
    from tba_offload.store.condition import Condition
    from tba_offload.store.lanes import Job
    from tba_offload.store.leases import Lease, Leases
    from tba_offload.store.life import Life
    from tba_offload.store.meters import Meter

_MOST_JOINED = posix.MOST_PARTS // 2  # each has a part of its own, and perhaps one for its padding


class Transfer(IoFuture):
    """A future that is also the job in the queue: one object a transfer.

    ``store``, ``memory`` and ``after`` are dropped as soon as the outcome is certain, so neither the queue
    nor a caller that keeps the future keeps memory alive.
    """

    __slots__ = ("after", "lease", "memory", "mover", "padded", "store", "writes")

    def __init__(
        self,
        lease: Lease,
        memory: ByteRange,
        after: Event,
        done: Callable[[IoFuture], object] | None,
        mover: Mover,
        *,
        writes: bool,
        padded: bool,
    ) -> None:
        # Not by the class above: a call less for each transfer.
        self.error = None
        self.is_done = self._cancelled = False
        self._callbacks = [] if done is None else [done]
        self._claim = allocate_lock()
        self._ended = allocate_lock()
        self._ended.acquire()
        self.store: object = None  # kept alive while it counts the transfer as pending
        self.mover = mover
        self.lease = lease
        self.memory: ByteRange | None = memory
        self.after: Event | None = after
        self.writes = writes
        self.padded = padded

    def run(self) -> tuple[()]:
        """Move the bytes; on an I/O thread that has claimed the transfer. Nothing is left to do then."""
        _store = self.store  # not collected before the outcome is told
        error: StoreError | None = None
        try:
            self.mover.move(self)
        except BaseException as failure:  # noqa: BLE001 - every failure reaches the thread that waits
            error = self.mover.as_store_error(failure, self)
        self.end(error)
        return ()

    def what(self) -> tuple[ByteRange, Event]:
        """Return the memory, and the point of the device's work that it waits for."""
        if self.memory is None or self.after is None:
            raise RuntimeError("a transfer can run only once")
        return self.memory, self.after

    def end(self, error: StoreError | None) -> None:
        """Make the outcome known; on the I/O thread."""
        mover = self.mover
        if self.writes:
            mover.condition.note_write(error)
        self._forget(succeeded=error is None)
        self._conclude(error)
        while self._callbacks:
            try:
                self._call_back()
            except BaseException as failure:  # noqa: BLE001 - reported now, raised by close()
                mover.life.callback_failed(failure)

    def _forget(self, *, succeeded: bool) -> None:
        self.store = self.memory = self.after = None
        self.mover.leases.settle(self.lease, wrote=self.writes, succeeded=succeeded)

    def _drop(self) -> None:
        if self.store is not None:
            self._forget(succeeded=False)

    def _block(self, timeout: float | None) -> None:
        if self.store is not None:
            self.mover.life.check_process()
        super()._block(timeout)


class Batch:
    """Transfers of neighbouring extents, as one job.

    Args:
        transfers: In the order of their extents; all write, or all read and are padded alike.
    """

    __slots__ = ("_transfers",)

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def claim(self) -> bool:
        """Decide that those run which were not cancelled; whether there are any."""
        self._transfers = [transfer for transfer in self._transfers if transfer.claim()]
        return bool(self._transfers)

    def run(self) -> Sequence[Job]:
        """Move all by one call; what could not be is still to be done, one by one."""
        transfers, self._transfers = self._transfers, []
        _store = transfers[0].store  # not collected before the outcomes are told
        alone: list[Job] = []
        mover = transfers[0].mover
        for neighbours in mover.neighbours(transfers):  # a cancelled one leaves a gap
            errors = mover.move_together(neighbours) if len(neighbours) > 1 else None
            if errors is None:
                for transfer in neighbours:
                    transfer.put_back()
                alone += neighbours
                continue
            for transfer, error in zip(neighbours, errors, strict=True):
                transfer.end(error)
        return alone

    def cancel(self) -> bool:
        """Keep all from running that have not started."""
        cancelled = [transfer.cancel() for transfer in self._transfers]  # each, whatever the first says
        return all(cancelled)


def _neighbours(transfers: Sequence[Transfer], most: int) -> Iterator[list[Transfer]]:
    """Return runs of transfers whose extents lie next to each other, each in the order of the extents.

    Args:
        transfers: In any order.
        most: Bytes that a run of several comes to at most.
    """
    run: list[Transfer] = []
    nbytes = lo = hi = 0
    for transfer in transfers:
        extent = transfer.lease.extent
        nbytes += extent.length
        if run and nbytes <= most and len(run) < _MOST_JOINED and transfer.padded is run[0].padded:
            if extent.offset == hi:
                hi += extent.length
                run.append(transfer)
                continue
            if extent.offset + extent.length == lo:  # backward reads in the opposite order
                lo = extent.offset
                run.insert(0, transfer)
                continue
        if run:
            yield run
        run, nbytes = [transfer], extent.length
        lo, hi = extent.offset, extent.offset + extent.length
    if run:
        yield run


def begin(transfers: Sequence[Transfer], leases: Leases, store: object) -> None:
    """Take note of transfers that are about to be queued; the lock of their leases is held.

    Args:
        transfers: All write, or all read.
        leases: Of their extents.
        store: Kept alive while they are pending.

    Raises:
        ValueError: An extent is in use. Transfers before it count, until they are cancelled.
    """
    for transfer in transfers:
        lease, writes, nbytes = transfer.lease, transfer.writes, transfer.lease.extent.nbytes
        if lease.writing or (lease.reading if writes else not lease.written):
            check_idle(lease, writes=writes)
        # There is no call between the next lines, so no interrupt can fall between them.
        if writes:
            lease.writing = True
            lease.written = False
            leases.pending_write_bytes += nbytes
        else:
            lease.reading += 1
        leases.pending += 1
        leases.pending_bytes += nbytes
        transfer.store = store


class Mover:
    """How the transfers of one store are done; like the backend it does not refer to the store.

    Attributes:
        backend: What moves the bytes.
        condition: Of the drive.
        leases: Of the store.
        life: Of the store.
    """

    def __init__(self, backend: Backend, condition: Condition, leases: Leases, life: Life) -> None:
        self.condition = condition
        self.leases = leases
        self.life = life
        self.backend = backend
        self._seen: Callable[[Moved], object] | None = None

    def tell(self, seen: Callable[[Moved], object] | None) -> None:
        """Have a function told of each call that has moved bytes; ``None`` for none."""
        self._seen = seen

    def jobs(self, transfers: Sequence[Transfer]) -> Iterator[Job]:
        """Yield the jobs that do transfers which are queued together.

        Neighbours are one, if they can be joined.
        """
        if len(transfers) == 1 or not self._joined_bytes():
            yield from transfers
            return
        for neighbours in self.neighbours(transfers):
            if len(neighbours) > 1:
                yield Batch(neighbours)
            else:
                yield from neighbours

    def neighbours(self, transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
        """Those among transfers that can go together, in the order of their extents."""
        return _neighbours(transfers, self._joined_bytes())

    def _joined_bytes(self) -> int:
        """Return what several may come to that go together; 0 where the backend cannot join them."""
        return getattr(self.backend, "joined_bytes", 0)

    def move(self, transfer: Transfer) -> None:
        """Move the bytes of a transfer, and compare what is read with its checksum.

        Raises:
            OutOfServiceError: The drive failed meanwhile.
            ChecksumError: The bytes are others than were written.
            BaseException: The backend's own.
        """
        memory, after = transfer.what()
        backend, meter, extent = self.backend, self._ready(transfer, after), transfer.lease.extent
        moved = 0  # a transfer that fails, perhaps at once, says nothing of a rate
        began = self._now()
        meter.begin()
        try:
            if transfer.writes:
                digest = backend.move_out(extent, memory, after)
            else:
                digest = backend.move_in(extent, memory, after, padded=transfer.padded)
            moved = extent.nbytes
        finally:
            meter.end(moved)
        self._tell(transfer, began, moved)
        if error := self._compare(transfer, digest):
            raise error

    def move_together(self, transfers: Sequence[Transfer]) -> list[ChecksumError | None] | None:
        """Move the bytes of transfers of neighbouring extents by one call.

        Returns:
            The error of each, or ``None`` for one that went well; ``None`` alone if each has to go by itself.
        """
        try:
            digests = self._joined(transfers)
        except BaseException:  # noqa: BLE001 - each that goes by itself tells its own
            return None
        if digests is None:
            return None
        return [self._compare(transfer, digest) for transfer, digest in zip(transfers, digests, strict=True)]

    def _joined(self, transfers: Sequence[Transfer]) -> list[int | None] | None:
        """Move the bytes; return the checksums, or ``None`` if they could not go together."""
        backend: Joining = self.backend  # type: ignore[assignment]  # else there were no batches
        first, moves, moved = transfers[0], [], 0
        reached: Event | None = None
        for transfer in transfers:
            memory, after = transfer.what()
            if after is not reached:  # those of one stream wait for the same
                meter, reached = self._ready(transfer, after), after
            moves.append((transfer.lease.extent, memory))
        began = self._now()
        meter.begin()
        try:
            if first.writes:
                digests = backend.move_out_together(moves)
            else:
                digests = backend.move_in_together(moves, padded=first.padded)
            if digests is not None:
                moved = sum([extent.nbytes for extent, _ in moves])
        finally:
            meter.end(moved)
        if digests is not None:
            self._tell(first, began, moved)
        return digests

    def _now(self) -> float:
        """Return the time, if calls are told."""
        return 0.0 if self._seen is None else time.perf_counter()

    def _tell(self, transfer: Transfer, began: float, nbytes: int) -> None:
        """Tell of a call, unless that was not wanted when it began."""
        seen = self._seen
        if seen is not None and began:
            drive, thread, ended = transfer.lease.extent.drive, threading.get_ident(), time.perf_counter()
            seen(Moved(drive, self.backend.name, transfer.writes, thread, began, ended, nbytes))

    def _ready(self, transfer: Transfer, after: Event) -> Meter:
        """Wait until a transfer may start; return what measures it."""
        condition = self.condition
        self.backend.device.bind_thread()
        after.synchronize()  # before the clock starts: this is not the drive's time
        if not transfer.writes:
            return condition.reads
        if condition.service.is_resting():
            # What was queued need not fail one by one, each after its timeout.
            raise condition.out_of_service()
        return condition.writes

    def _compare(self, transfer: Transfer, digest: int | None) -> ChecksumError | None:
        """Note the checksum of what was written; compares that of what was read."""
        lease = transfer.lease
        if transfer.writes:
            lease.digest = digest
        elif digest != lease.digest:
            return ChecksumError(
                errno.EIO,
                f"{lease.extent} reads back with checksum {digest:#x} instead of {lease.digest:#x}: the "
                "drive, its driver or the memory changed the bytes, or the model changed a saved tensor "
                "through .data while it was written; check the drive",
                self.backend.name,
            )
        return None

    def as_store_error(self, failure: BaseException, transfer: Transfer) -> StoreError:
        """Return the error as waiters get it.

        The frames in its traceback let go of the memory and of the store.
        """
        if failure.__traceback__ is not None:
            failure.__traceback__ = failure.__traceback__.tb_next  # the frame of run(), which goes on
            traceback.clear_frames(failure.__traceback__)
        verb = "write" if transfer.writes else "read"
        return store_error(failure, f"{verb} {transfer.lease.extent} of {self.backend.name}")


def store_error(failure: BaseException, what: str) -> StoreError:
    """Return what an I/O thread could not do, as an error of the store."""
    if isinstance(failure, StoreError):
        return failure
    if is_device_failure(failure):
        error: StoreError = DeviceError(f"the device failed before it could {what}: {failure}")
        error.__cause__ = failure
        return error
    text = f"could not {what}: {failure!r}"
    number = failure.errno if isinstance(failure, OSError) else None
    if isinstance(failure, MemoryError):
        number = errno.ENOMEM  # no fault of the program, whether a system call or Python says so
    error = StoreError(text) if number is None else StoreError(number, text)
    error.__cause__ = failure
    return error
