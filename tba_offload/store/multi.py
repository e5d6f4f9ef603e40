"""A store that combines several drives, and host memory if requested.

:meth:`MultiStore.write` and :meth:`MultiStore.read` queue transfers. ``MultiStore._run`` runs one transfer on
an I/O thread.
"""

from __future__ import annotations

import atexit
import copy
import errno
import math
import os
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

import torch

from tba_offload.config.values import STALL_SECONDS
from tba_offload.errors import (
    ChecksumError,
    DeviceError,
    HangingError,
    OutOfServiceError,
    SessionError,
    StoreError,
    StoreFullError,
    is_of_drive,
    warn,
)
from tba_offload.planner.window import Tier, Window, drives_share, is_for_host
from tba_offload.store.base import Moved, close_after
from tba_offload.store.pool import FIRST_PAUSE, TICK, Place

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from tba_offload.device import ByteRange
    from tba_offload.store.base import DriveLoad, Extent, Store
    from tba_offload.store.pool import Transfer

WARN_AFTER = 0.1
"""Fraction of the time limit after which a warning names a drive that does not answer."""


class MultiStore:
    """A store that combines several stores. Each store has its own I/O threads and extents.

    Each write goes to one store that takes writes and has room. If there are drives and host memory,
    :func:`tba_offload.planner.window.is_for_host` chooses between drives and host memory. Among several
    drives, the write goes to the drive with the shortest estimated time. The estimate counts the bytes that a
    drive holds and the bytes that are queued for the drive.

    If a write fails, all queued writes to the same drive fail too, and the drive takes no writes during a
    pause. After the pause, one write tries the drive again. Each failure doubles the pause. If a drive is
    full, a write fails when the store's file on the drive has to grow.

    Args:
        stores: At least one store. Closing the :class:`MultiStore` closes all stores. If the first store is
            host memory, writes go to host memory first.
        readers: Number of threads that read, for each store that does not set its own number.
        writers: Number of threads that write, for each store that does not set its own number.
        stall_seconds: Time limit in seconds for the answer of a drive, after which a wait raises an error;
            ``None`` for no limit.

    Attributes:
        completed: Queue to which I/O threads append each ended transfer; ``None`` if unused.
        stall_seconds: The argument ``stall_seconds``; infinite if there is no limit.
        spill_bytes: Limit of the bytes that wait for drives, above which writes go to host memory. If writes
            go to host memory first, the limit also applies to the bytes that wait for host memory.
        alignment: The largest alignment of the stores, which is valid for all stores.
        kind: The kinds of the stores, joined by ``+``.
        beside: Index of the host memory if there are both drives and host memory, else ``None``.

    Raises:
        RuntimeError: The process cannot start more threads.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        readers: int = 1,
        writers: int = 1,
        stall_seconds: float | None = STALL_SECONDS,
    ) -> None:
        self.completed: deque[Transfer] | None = None
        self.stall_seconds = math.inf if stall_seconds is None else stall_seconds
        self.spill_bytes = Window().spills_above
        self.alignment = max(store.alignment for store in stores)
        self.kind = "+".join(dict.fromkeys(store.kind for store in stores))
        self._lock = threading.Lock()
        self._transfers: set[Transfer] = set()  # queued or running
        self._seen: Callable[[Moved], object] | None = None
        self._unusable = ""  # why the store is unusable, if it is
        self._outages: list[tuple[str, str]] = []
        self._places = [
            Place(index, store, self._run, writers, readers) for index, store in enumerate(stores)
        ]
        hosts = [place.index for place in self._places if not place.is_drive]
        self.beside = hosts[0] if 0 < len(hosts) < len(self._places) else None
        self._share = 0.0 if self.beside == 0 else None
        _open_stores.add(self)

    # ---- transfers -------------------------------------------------------------------------------

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Queue writes. I/O threads reserve an extent for each write that has no extent.

        If neither a drive nor host memory accepts a write, the write fails immediately.

        Raises:
            SessionError: The store is closed, or this is a forked child.
        """
        self._queue(transfers, writes=True)

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Queue reads. Several reads of one extent may run at the same time.

        Raises:
            SessionError: The store is closed, or this is a forked child.
        """
        self._queue(transfers, writes=False)

    def _queue(self, transfers: Sequence[Transfer], *, writes: bool) -> None:
        if self._unusable:
            raise SessionError(f"the store of kind {self.kind} cannot be used: {self._unusable}")
        batches: dict[Place, list[Transfer]] = {}
        with self._lock:
            for transfer in transfers:
                extent, nbytes = transfer.extent, transfer.nbytes
                place = self._choose(nbytes) if extent is None else self._places[extent.drive]
                transfer.is_write = writes
                if place is None:
                    transfer.claim()
                    self._finish(transfer, self._refusal(nbytes))
                    continue
                transfer.drive = place.index
                self._transfers.add(transfer)
                if writes:
                    place.pending += nbytes
                if extent is None:
                    place.unreserved += nbytes
                else:
                    extent.transfers += 1
                batches.setdefault(place, []).append(transfer)
        for place, batch in batches.items():
            place.submit(batch, writes=writes)

    def _run(self, transfer: Transfer) -> None:
        """Run a claimed transfer on an I/O thread. Any failure becomes the error of the transfer."""
        place, writes, is_new = self._places[transfer.drive], transfer.is_write, transfer.extent is None
        meter = place.writes if writes else place.reads
        memory: Any = transfer.memory
        error: StoreError | None = None
        began, nbytes = 0.0, 0
        try:
            transfer.after.synchronize()  # the kernel that wrote the bytes, or that used this memory last
            _check_still_there(memory)
            with self._lock:
                extent: Any = place.reserve(transfer, memory.address) if is_new else transfer.extent
            if writes and extent.offset + extent.length > place.grown:
                place.grow(extent.offset + extent.length)  # not a part of the measured rate
            with self._lock:
                began = meter.note(1)
            if writes:
                extent.checksum = place.store.write(extent, memory)
            else:
                _read(place.store, extent, memory)
            nbytes = transfer.nbytes  # a failed transfer may end at once, so it does not count in the rate
        except BaseException as failure:  # noqa: BLE001 - the waiting thread must get every error
            verb, way = ("write", "to") if writes else ("read", "from")
            error = _store_error(failure, f"{verb} {transfer.nbytes} bytes {way} {place.store.name}")
        del memory  # a waiting thread may expect that the memory is released
        with self._lock:
            ended = meter.note(-1 if began else 0, nbytes)
            if transfer in self._transfers:  # otherwise the step of the transfer was discarded
                self._end(transfer, place, error, is_new=is_new)
        if nbytes and (seen := self._seen) is not None:
            seen(Moved(place.index, place.store.name, writes, threading.get_ident(), began, ended, nbytes))
        if writes and error is None:
            transfer.memory = None
        self._finish(transfer, error)

    def _finish(self, transfer: Transfer, error: StoreError | None) -> None:
        transfer.error = error
        if self.completed is not None:
            self.completed.append(transfer)
        transfer.finish()

    def cancel(self, transfer: Transfer) -> bool:
        """Cancel a transfer if it has not started.

        Returns:
            True if the transfer will not run, and its memory is released; False if the transfer is running or
            has ended.
        """
        if transfer.claim():
            transfer.is_cancelled = True
            with self._lock:
                if transfer in self._transfers:
                    self._remove(transfer)
            transfer.memory = None
            transfer.finish()
        return transfer.is_cancelled

    def wait(self, transfer: Transfer) -> None:
        """Wait until a transfer has ended. Warn if the wait is long.

        Raises:
            StoreError: The transfer failed, or was cancelled (``errno.ECANCELED``). Each call raises a new
                error object.
            HangingError: The drive has not answered for ``stall_seconds``, and takes no writes for a while.
        """
        limit = self.stall_seconds
        with suppress(RuntimeError):  # the device failed, and the transfer will end with this error
            while not (transfer.is_done or transfer.after.query()):  # no drive causes this wait
                transfer.wait(TICK)
        if not transfer.wait(limit * WARN_AFTER):
            place = self._places[transfer.drive]
            what = f"{transfer.nbytes} bytes {'to' if transfer.is_write else 'from'} {place.store.name}"
            warn(f"a transfer of {what} made no progress for {limit * WARN_AFTER:g} s", RuntimeWarning)
            if not transfer.wait(limit * (1 - WARN_AFTER)):
                hanging = _hanging(f"a transfer of {what} made no progress for {limit:g} s")
                with self._lock:
                    self._leave_alone(place, hanging)
                raise hanging
        if transfer.is_cancelled:
            raise StoreError(errno.ECANCELED, "the transfer was cancelled before it started")
        if transfer.error is not None:
            # Raise a copy, because a raised error refers to the frames of all callers and so to their memory.
            error = copy.copy(transfer.error)
            error.__cause__ = transfer.error.__cause__
            raise error

    # ---- places; the lock is held ----------------------------------------------------------------

    def _choose(self, nbytes: int) -> Place | None:
        """Return the drive or host memory for a new extent; ``None`` if neither accepts the extent."""
        able = [place for place in self._places if place.takes(nbytes)]
        if not able:
            return None
        if len(able) > 1:
            if self.beside is not None:
                host, drives = (self._tier(is_drive=is_drive) for is_drive in (False, True))
                wants_host = is_for_host(host, drives, self.spill_bytes, self._share)
                able = [place for place in able if place.is_drive is not wants_host] or able
            # The bytes that each place holds count too. Otherwise the fastest place would get all writes, and
            # the other places would be idle during writes and reads.
            able.sort(key=lambda place: (place.held + nbytes) / place.writes.rate)
        if able[0].cause is not None:
            able[0].pause()  # other writes use the place only if this write succeeds
        return able[0]

    def _tier(self, *, is_drive: bool) -> Tier:
        places = [place for place in self._places if place.is_drive is is_drive]
        loads = ((place.pending, place.held, place.writes.rate) for place in places)
        return Tier(*map(sum, zip(*loads, strict=True)))

    def _refusal(self, nbytes: int) -> StoreError:
        reasons = "; ".join(
            f"{place.store.name}: {place.cause or f'{place.extents.used} of {place.limit} bytes are taken'}"
            for place in self._places
        )
        if all(place.cause is not None for place in self._places):
            return OutOfServiceError(errno.EIO, f"all drives failed, and are tried again later: {reasons}")
        return StoreFullError(errno.ENOSPC, f"no room for {nbytes} bytes: {reasons}")

    def _remove(self, transfer: Transfer) -> None:
        place, extent = self._places[transfer.drive], transfer.extent
        self._transfers.remove(transfer)
        if transfer.is_write:
            place.pending -= transfer.nbytes
        if extent is None:
            place.unreserved -= transfer.nbytes
        else:
            extent.transfers -= 1
            if extent.is_released and not extent.transfers:
                place.extents.release(extent)

    def _end(self, transfer: Transfer, place: Place, error: StoreError | None, *, is_new: bool) -> None:
        """Update the state after a transfer has run. After a failed write, free the new extent."""
        extent, is_lost = transfer.extent, is_new and error is not None
        if transfer.is_write:
            if error is None:
                place.cause = None
            elif isinstance(error, StoreFullError):
                if extent is not None:
                    place.found_full()
            elif is_of_drive(error):
                self._leave_alone(place, error)
        if is_lost and extent is not None:
            extent.is_released = True
        self._remove(transfer)
        if is_lost:
            transfer.extent = None

    def _leave_alone(self, place: Place, error: BaseException) -> None:
        """Accept no writes to a failed drive for a while.

        All queued writes to the drive fail at once, because each might block an I/O thread for a long time.
        """
        cause = str(error)  # the error object may refer to frames and their memory
        if place.next_pause == FIRST_PAUSE:
            self._outages.append((place.store.name, cause))
        place.fail(cause)
        for each in list(self._transfers):
            if each.drive == place.index and each.is_write and each.claim():
                self._remove(each)
                text = f"the drive failed, and is tried again later: {cause}"
                self._finish(each, OutOfServiceError(errno.EIO, text, place.store.name))

    # ---- extents and steps -----------------------------------------------------------------------

    def release(self, extent: Extent) -> None:
        """Free an extent, on any thread. If a transfer uses the extent, free the extent after the transfer.

        Raises:
            ValueError: The extent is already free.
        """
        with self._lock:
            extent.is_released = True
            if not extent.transfers:
                self._places[extent.drive].extents.release(extent)

    def reset(self) -> None:
        """Discard all transfers and extents, for example after an interrupted step.

        Cancel queued transfers, and wait for running transfers. A drive that does not answer within
        ``stall_seconds`` takes no more writes, because a hanging transfer may still write to the drive.
        """
        self._settle()
        with self._lock:
            self._transfers.clear()
            for place in self._places:
                place.extents.reset()
                place.pending = place.unreserved = 0

    def trim(self) -> None:
        """Free room that the last steps did not need. Call this method at the end of a step."""
        for place in self._places:
            place.trim(self._lock)
        if self.beside == 0:
            expected, limit = sum(place.needed for place in self._places), self._places[0].limit
            self._share = drives_share(expected, math.inf if limit is None else limit)

    @property
    def description(self) -> dict[str, object]:
        """The kinds, the I/O paths and the settings of the stores, as JSON values for the run log."""
        stores = [place.store.description for place in self._places]
        if len(stores) == 1:
            return stores[0]
        limits = [place.store.capacity for place in self._places]
        capacity = None if None in limits else sum(filter(None, limits))
        return {"kind": self.kind, "alignment": self.alignment, "capacity": capacity, "stores": stores}

    # ---- drives: load and health -----------------------------------------------------------------

    def place(self, extent: Extent) -> str:
        """Return the directory that holds an extent, or ``host memory``."""
        return self._places[extent.drive].store.name

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Let I/O threads call a function after each transfer that moved bytes.

        Args:
            seen: The function, which must not raise; ``None`` to end the calls.
        """
        self._seen = seen

    def take_loads(self) -> list[DriveLoad]:
        """Return the load of each drive and of host memory since the last call."""
        with self._lock:
            return [place.take_load(is_beside=self.beside is not None) for place in self._places]

    def take_outages(self) -> list[tuple[str, str]]:
        """Return the name and the cause of each drive that failed for the first time since the last call."""
        outages, self._outages = self._outages, []
        return outages

    def suspend(self, extent: Extent, cause: BaseException) -> None:
        """Accept no writes to the drive of an extent for a while, because repeated reads failed."""
        with self._lock:
            self._leave_alone(self._places[extent.drive], cause)

    def resume(self) -> None:
        """Accept writes to all drives again, except to drives that do not answer."""
        with self._lock:
            for place in self._places:
                place.resume()

    # ---- closing ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel queued transfers, wait for running transfers, end the threads and free everything.

        Later calls of this method do nothing.

        Raises:
            HangingError: A drive does not answer. The drive's threads, memory and file stay until the process
                ends.
        """
        if self._unusable:
            return
        hanging = self._settle()
        self._unusable = "the store is closed"
        _open_stores.discard(self)
        with ExitStack() as stack:
            for place in self._places:
                stack.callback(place.close)
        if hanging:
            raise _hanging(f"no answer from {hanging}: memory and files stay until the process ends")

    def abandon(self) -> None:
        """Make the store unusable in a forked child, and close the child's descriptors."""
        self._unusable = (
            "the store was opened before this process was forked. Only the parent process can use the store"
        )
        for place in self._places:
            place.store.abandon()

    def _settle(self) -> str:
        """Cancel queued transfers, wait for running transfers, and return the names of drives that hang."""
        until = time.monotonic() + self.stall_seconds
        with self._lock:
            transfers = list(self._transfers)
        running = [transfer for transfer in transfers if not self.cancel(transfer)]
        hanging = {each.drive for each in running if not each.wait(max(until - time.monotonic(), 0.0))}
        for index in hanging:
            self._places[index].disable()
        return ", ".join(self._places[index].store.name for index in sorted(hanging))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close)


# ---- one transfer, on an I/O thread --------------------------------------------------------------


def _check_still_there(memory: ByteRange) -> None:
    """Check that memory was neither freed nor moved since its transfer was queued.

    Raises:
        StoreError: The memory was freed or moved, so it no longer has the saved bytes.
    """
    storage = memory.storage
    if storage.nbytes() < memory.start + memory.nbytes or storage.data_ptr() + memory.start != memory.address:
        raise StoreError(
            f"the memory of a saved tensor ({memory.nbytes} bytes) was freed or moved before its transfer: "
            "the program resized the tensor's storage. Set the placement of the layer to 'keep'"
        )


def _read(store: Store, extent: Extent, memory: ByteRange) -> None:
    """Read an extent, and compare the checksums.

    Raises:
        ChecksumError: The bytes differ from the bytes that were written.
    """
    checksum = store.read(extent, memory)
    if extent.checksum is not None and checksum != extent.checksum:
        raise ChecksumError(
            errno.EIO,
            f"{extent} reads back with checksum {checksum:#x} instead of {extent.checksum:#x}: the "
            "drive, its driver or the memory changed the bytes, or the model changed a saved tensor "
            "through .data during the write. Check the drive",
            store.name,
        )


# ---- errors --------------------------------------------------------------------------------------


def _hanging(what: str) -> HangingError:
    remedy = "Check the drive and the system log. store.stall_seconds sets the time limit"
    return HangingError(errno.ETIMEDOUT, f"{what}. {remedy}")


def _store_error(failure: BaseException, what: str) -> StoreError:
    """Return a :class:`StoreError` for an exception of an I/O thread, without references to frames."""
    if isinstance(failure, StoreError):
        error = failure
    elif isinstance(failure, torch.AcceleratorError):  # perhaps of work long before
        error = DeviceError(
            f"could not {what}, because the device failed: {failure}. No drive is at fault: an earlier "
            "operation of the program failed on the device. To find this operation, set "
            "CUDA_LAUNCH_BLOCKING=1"
        )
    else:
        number = errno.ENOMEM if isinstance(failure, MemoryError) else getattr(failure, "errno", None)
        text = f"could not {what}: {failure!r}"
        error = StoreError(text) if number is None else StoreError(number, text)
    if error is not failure:
        error.__cause__ = failure
    known: BaseException | None = error
    while known is not None:
        known.__traceback__ = None
        known = known.__cause__ or known.__context__
    return error


# ---- end of the process, and forked children -------------------------------------------------------

_open_stores: weakref.WeakSet[MultiStore] = weakref.WeakSet()


def close_all() -> None:
    """Close every store of this process, even if one store raises an error."""
    with ExitStack() as stack:
        for store in list(_open_stores):
            stack.callback(store.close)


def _after_fork_in_child() -> None:
    for store in list(_open_stores):
        store.abandon()
    _open_stores.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
