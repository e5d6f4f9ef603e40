"""One transfer: a future that is also the job in the queue, and how it is done on an I/O thread."""

from __future__ import annotations

import errno
import traceback
from _thread import allocate_lock
from typing import TYPE_CHECKING

from tba_offload.errors import ChecksumError, StoreError
from tba_offload.store.base import IoFuture
from tba_offload.store.leases import check_idle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import ByteRange, Event
    from tba_offload.store.backend import Backend
    from tba_offload.store.condition import Condition
    from tba_offload.store.leases import Lease, Leases
    from tba_offload.store.life import Life


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

    def run(self) -> None:
        """Moves the bytes; on an I/O thread that has claimed the transfer."""
        store, memory, after = self.store, self.memory, self.after
        if store is None or memory is None or after is None:
            raise RuntimeError("a transfer can run only once")
        mover = self.mover
        error: StoreError | None = None
        try:
            mover.move(self, memory, after)
        except BaseException as failure:  # noqa: BLE001 - every failure reaches the thread that waits
            error = mover.as_store_error(failure, self)
        del memory, after
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


def begin(transfers: Sequence[Transfer], leases: Leases, store: object) -> None:
    """Takes note of transfers that are about to be queued; the lock of their leases is held.

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

    def move(self, transfer: Transfer, memory: ByteRange, after: Event) -> None:
        """Moves the bytes of a transfer, and compares what is read with its checksum.

        Raises:
            OutOfServiceError: The drive failed meanwhile.
            ChecksumError: The bytes are others than were written.
            BaseException: The backend's own.
        """
        backend, condition = self.backend, self.condition
        backend.device.bind_thread()
        after.synchronize()  # before the clock starts: this is not the drive's time
        if transfer.writes and condition.service.is_resting():
            # What was queued need not fail one by one, each after its timeout.
            raise condition.out_of_service()
        lease = transfer.lease
        meter = condition.writes if transfer.writes else condition.reads
        moved = 0  # a transfer that fails, perhaps at once, says nothing of a rate
        meter.begin()
        try:
            if transfer.writes:
                lease.digest = backend.move_out(lease.extent, memory, after)
                moved = lease.extent.nbytes
                return
            digest = backend.move_in(lease.extent, memory, after, padded=transfer.padded)
            moved = lease.extent.nbytes
        finally:
            meter.end(moved)
        if digest != lease.digest:
            raise ChecksumError(
                errno.EIO,
                f"{lease.extent} reads back with checksum {digest:#x} instead of {lease.digest:#x}: the "
                "drive, its driver or the memory changed the bytes, or the model changed a saved tensor "
                "through .data while it was written; check the drive",
                backend.name,
            )

    def as_store_error(self, failure: BaseException, transfer: Transfer) -> StoreError:
        """The error as waiters get it; the frames in its traceback let go of the memory and of the store."""
        if failure.__traceback__ is not None:
            failure.__traceback__ = failure.__traceback__.tb_next  # the frame of run(), which goes on
            traceback.clear_frames(failure.__traceback__)
        verb = "write" if transfer.writes else "read"
        return store_error(failure, f"{verb} {transfer.lease.extent} of {self.backend.name}")


def store_error(failure: BaseException, what: str) -> StoreError:
    """What an I/O thread could not do, as an error of the store."""
    if isinstance(failure, StoreError):
        return failure
    text = f"could not {what}: {failure!r}"
    # Memory that is short is no fault of the program, whether a system call or Python says so.
    error = StoreError(errno.ENOMEM, text) if isinstance(failure, MemoryError) else StoreError(text)
    error.__cause__ = failure
    return error
