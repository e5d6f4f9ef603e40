"""One store over several places: drives, and host memory beside them.

:meth:`MultiStore.write` and :meth:`MultiStore.read` queue transfers; ``_run`` is the way of one of them on an
I/O thread.
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
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from tba_offload.config.values import STALL_SECONDS
from tba_offload.device import is_device_failure
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
from tba_offload.planner.window import Window
from tba_offload.store.base import BLOCK, DRIVE_TIER, Moved, close_after
from tba_offload.store.place import Place

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from tba_offload.device import ByteRange
    from tba_offload.store.base import DriveLoad, Extent, Store
    from tba_offload.store.pool import Transfer

POLL = 0.002
"""Seconds between looks at transfers of which any may end first."""

WARN_AFTER = 0.1
"""A wait for a drive is named in a warning after this share of its limit."""


class MultiStore:
    """One store over several places, each with threads, extents, a load and a health of its own.

    A write goes wholly to one place that is in service and has room: host memory beside drives while the
    drives have more than ``spill_bytes`` still to write (the rule of TERAIO), or no room; of several drives
    the one with the shortest time for what it holds and has still to do. A place that failed a write is left
    alone, and tried again by one write after a pause that doubles with each failure.

    Args:
        stores: At least one place. They are closed with this store.
        readers: Threads that read, for each place that does not choose itself.
        writers: Threads that write, likewise.
        stall_seconds: Seconds after which a place that does not answer is an error; ``None`` for never.

    Attributes:
        completed: Gets each transfer that has run, on its I/O thread; ``None`` if nobody looks.
        stall_seconds: As given.
        spill_bytes: As above.
        alignment: The largest of the places; what suits it suits all.
        kind: Kinds of the places.

    Raises:
        StoreError: The process may have no more threads.
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
        self.stall_seconds = stall_seconds
        self.spill_bytes = Window().spills_above
        self.alignment = max(store.alignment for store in stores)
        self.kind = "+".join(dict.fromkeys(store.kind for store in stores))
        self._lock = threading.Lock()
        self._transfers: set[Transfer] = set()  # queued or running
        self._seen: Callable[[Moved], object] | None = None
        self._is_closed = self._is_child = False
        self._places = [
            Place(index, store, self._lock, self._run, writers, readers) for index, store in enumerate(stores)
        ]
        self._drives = [place for place in self._places if place.store.tier == DRIVE_TIER]
        _open_stores.add(self)

    # ---- transfers -------------------------------------------------------------------------------

    def write(self, transfers: Sequence[Transfer]) -> None:
        """Queue writes: to their extents, or to new ones, which the I/O threads reserve.

        A write that finds no place ends at once, with its error.

        Raises:
            SessionError: The store is closed, or this is a forked child.
        """
        self._queue(transfers, writes=True)

    def read(self, transfers: Sequence[Transfer]) -> None:
        """Queue reads, from where their extents are; several reads of one extent may overlap.

        Raises:
            SessionError: The store is closed, or this is a forked child.
        """
        self._queue(transfers, writes=False)

    def _queue(self, transfers: Sequence[Transfer], *, writes: bool) -> None:
        if self._is_child or self._is_closed:
            why = "was opened before this process was forked; only the parent can use it, not a forked child"
            raise SessionError(f"the store of kind {self.kind} {why if self._is_child else 'is closed'}")
        batches: dict[Place, list[Transfer]] = {}
        refused: list[Transfer] = []
        with self._lock:
            for transfer in transfers:
                transfer.is_write, extent = writes, transfer.extent
                place = self._choose(transfer) if extent is None else self._places[extent.drive]
                if place is None:
                    transfer.error = self._refusal(transfer.nbytes)
                    refused.append(transfer)
                else:
                    self._add(transfer, place)
                    batches.setdefault(place, []).append(transfer)
        for place, batch in batches.items():
            place.pool.submit(batch, writes=writes)
        for transfer in refused:
            if transfer.claim():
                self._tell(transfer)

    def _run(self, transfer: Transfer) -> None:
        """Run a claimed transfer, on an I/O thread: whatever goes wrong is the transfer's error."""
        place, is_new = self._places[transfer.drive], transfer.extent is None
        memory: Any = transfer.memory
        try:
            place.store.device.bind_thread()
            transfer.after.synchronize()  # the kernel that made the bytes, or that used this memory before
            if transfer.is_write:
                place.reserve(transfer, memory.address)
            _check_still_there(memory)
            self._move(place, transfer, memory)
        except BaseException as failure:  # noqa: BLE001 - the thread that waits for it has to know
            verb = "write" if transfer.is_write else "read"
            transfer.error = _store_error(failure, f"{verb} {transfer.nbytes} bytes of {place.store.name}")
            if self._has_moved_on(transfer, place, is_new=is_new):
                return
        del memory  # whoever waits may count on it
        self._tell(transfer)

    def _move(self, place: Place, transfer: Transfer, memory: ByteRange) -> None:
        extent: Any = transfer.extent
        nbytes, writes, store = 0, transfer.is_write, place.store
        meter, move = (place.writes, store.write) if writes else (place.reads, store.read)
        with self._lock:
            began = meter.note(1)
        try:
            checksum = move(extent, memory)
            nbytes = transfer.nbytes  # a transfer that fails, perhaps at once, says nothing of a rate
        finally:
            with self._lock:
                ended = meter.note(-1, nbytes)
        transfer.seconds = ended - began
        if (seen := self._seen) is not None:
            seen(Moved(place.index, store.name, writes, threading.get_ident(), began, ended, nbytes))
        if writes:
            extent.checksum = checksum
        elif extent.checksum is not None and checksum != extent.checksum:
            raise ChecksumError(
                errno.EIO,
                f"{extent} reads back with checksum {checksum:#x} instead of {extent.checksum:#x}: the "
                "drive, its driver or the memory changed the bytes, or the model changed a saved tensor "
                "through .data while it was written. Check the drive",
                store.name,
            )

    def _has_moved_on(self, transfer: Transfer, place: Place, *, is_new: bool) -> bool:
        """Take note of a failed transfer; return True if it goes on at a place that has room."""
        error, other = transfer.error, None
        is_full = isinstance(error, StoreFullError)
        with self._lock:
            if not transfer.is_write or transfer not in self._transfers:  # of a step that was thrown away
                return False
            if is_full and transfer.extent is not None and not isinstance(error, OutOfServiceError):
                place.found_full(transfer.extent)
            elif not is_full and error is not None and is_of_drive(error):
                place.fail(error)
            if is_new:
                place.give_up(transfer)
                transfer.refused += (place.index,)
                other = self._choose(transfer) if is_full else None
            if other is not None:
                self._remove(transfer)
                self._add(transfer, other)
                transfer.error = None
                transfer.put_back()
        if other is not None:
            other.pool.submit([transfer], writes=True)
        return other is not None

    def _tell(self, transfer: Transfer) -> None:
        """Make the outcome of a transfer known; the memory of a successful write is freed before."""
        is_written = transfer.is_write and transfer.error is None
        with self._lock:
            if transfer in self._transfers:
                self._remove(transfer)
                if is_written:
                    self._places[transfer.drive].succeeded(transfer)
        if is_written:
            transfer.memory = None
        if self.completed is not None:
            self.completed.append(transfer)
        transfer.finish()

    def cancel(self, transfer: Transfer) -> bool:
        """Keep a transfer from running if it has not started.

        Returns:
            True if it has not run and never will; it lets go of its memory. False if it runs or has ended.
        """
        if transfer.claim():
            transfer.is_cancelled = True
            with self._lock:
                if transfer in self._transfers:
                    self._remove(transfer)
            transfer.memory = None
            transfer.finish()
        return transfer.is_cancelled

    def wait(self, transfer: Transfer, *others: Transfer) -> None:
        """Wait until a transfer, or one of others, has ended. A long wait is named in a warning.

        Raises:
            StoreError: The first failed, or was cancelled (``errno.ECANCELED``). A new one each time.
            HangingError: Its place has not answered for ``stall_seconds``, and is left alone from now on.
        """
        limit = math.inf if self.stall_seconds is None else self.stall_seconds
        if not transfer.is_done and not _ended(transfer, others, limit * WARN_AFTER):
            place = self._places[transfer.drive]
            what = f"{transfer.nbytes} bytes {'to' if transfer.is_write else 'from'} {place.store.name}"
            warn(f"nothing has moved for {limit * WARN_AFTER:g} s: {what}", RuntimeWarning)
            if not _ended(transfer, others, limit * (1 - WARN_AFTER)):
                hanging = _hanging(f"nothing has moved for {limit:g} s: {what}")
                with self._lock:
                    place.fail(hanging)
                raise hanging
        if transfer.is_cancelled:
            raise StoreError(errno.ECANCELED, "the transfer was cancelled before it started")
        if transfer.error is not None:
            # A raised error knows the frames of all callers, and their memory: not the transfer's own.
            error = copy.copy(transfer.error)
            error.__cause__ = transfer.error.__cause__
            raise error

    # ---- places; the lock is held ----------------------------------------------------------------

    def _choose(self, transfer: Transfer) -> Place | None:
        """Return the place for a new extent; ``None`` if there is none."""
        nbytes = transfer.nbytes
        able = [
            place for place in self._places if place.takes(nbytes) and place.index not in transfer.refused
        ]
        if len(able) > 1:
            drives = [place for place in able if place in self._drives]
            is_late = sum(place.pending for place in self._drives) > self.spill_bytes
            able = ([place for place in able if place not in drives] if is_late else drives) or able
            # By what each holds, too: else the fastest would get all that is written while drives are idle,
            # and the others would not help to read it back.
            taken = [place.extents.used + place.unreserved + nbytes for place in able]
            return min(zip(taken, able, strict=True), key=lambda each: each[0] / each[1].writes.rate)[1]
        return able[0] if able else None

    def _refusal(self, nbytes: int) -> StoreError:
        """Return the error of a write that no place takes."""
        causes = [
            place.cause or f"{place.extents.used} of {place.limit} bytes are taken" for place in self._places
        ]
        told = "; ".join(
            f"{place.store.name}: {cause}" for place, cause in zip(self._places, causes, strict=True)
        )
        if all(place.cause is not None for place in self._places):
            return OutOfServiceError(errno.EIO, f"left alone, to be tried again: {told}")
        return StoreFullError(errno.ENOSPC, f"no room for {nbytes} bytes: {told}")

    def _add(self, transfer: Transfer, place: Place) -> None:
        transfer.drive = place.index
        self._transfers.add(transfer)
        if transfer.is_write:
            place.pending += transfer.nbytes
        if transfer.extent is None:
            place.unreserved += transfer.nbytes
        else:
            transfer.extent.transfers += 1

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

    # ---- extents and steps -----------------------------------------------------------------------

    def release(self, extent: Extent) -> None:
        """Give an extent back, on any thread. A busy one is freed when its last transfer ends.

        Raises:
            ValueError: It is free already.
        """
        with self._lock:
            extent.is_released = True
            if not extent.transfers:
                self._places[extent.drive].extents.release(extent)

    def reset(self) -> None:
        """Throw away all transfers and extents, as of an interrupted step.

        Queued transfers are cancelled, and running ones are waited for. A place that does not answer within
        ``stall_seconds`` takes no writes any more: what hangs there may still write into its extents.
        """
        self._settle()
        with self._lock:
            self._transfers.clear()
            for place in self._places:
                place.extents.reset()
                place.pending = place.unreserved = 0

    def trim(self) -> None:
        """Give back room that no extent needs, beyond the need of the last steps; at the end of a step."""
        for place in self._places:
            place.trim()

    def prepare(self, nbytes: int) -> None:
        """Make room for extents of ``nbytes`` in all, an even share in each place.

        Raises:
            StoreFullError: There is no such room.
        """
        for place in self._places:
            place.grow(-(-nbytes // len(self._places) // BLOCK) * BLOCK)

    def pending(self) -> int:
        """Return the number of transfers that are queued or running."""
        return len(self._transfers)

    @property
    def used_bytes(self) -> int:
        """Bytes that extents take now, padding included."""
        return sum(place.extents.used for place in self._places)

    @property
    def high_water_bytes(self) -> int:
        """The largest ends that extents ever had, summed over the places."""
        return sum(max(place.most, place.extents.high_water) for place in self._places)

    @property
    def capacity_bytes(self) -> int | None:
        """The most bytes that extents may take; ``None`` if a place has no limit."""
        limits = [place.store.capacity for place in self._places]
        return None if None in limits else sum(filter(None, limits))

    @property
    def description(self) -> dict[str, object]:
        """The places and their I/O paths, for the run log; plain JSON values."""
        stores = [place.store.description for place in self._places]
        whole = {"kind": self.kind, "alignment": self.alignment, "capacity": self.capacity_bytes}
        return {**whole, "stores": stores} if len(stores) > 1 else stores[0]

    # ---- drives: load and health -----------------------------------------------------------------

    def place(self, extent: Extent) -> str:
        """Return the name of an extent's place: its directory, or what else it is."""
        return self._places[extent.drive].store.name

    def resize_window(self, window: int | None) -> None:
        """Set when host memory beside drives takes writes.

        Args:
            window: The most bytes in flight; ``None`` for no limit.
        """
        self.spill_bytes = Window(window).spills_above

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Have a function called after each transfer that moved bytes, on its I/O thread.

        Args:
            seen: The function, which must not raise; ``None`` for none any more.
        """
        self._seen = seen

    def take_loads(self) -> list[DriveLoad]:
        """Return the load of each place since the last call."""
        with self._lock:
            return [place.take_load(is_beside=bool(self._drives)) for place in self._places]

    def take_outages(self) -> list[tuple[str, str]]:
        """Return the places that were taken out of service since the last call, each with the cause."""
        outages: list[tuple[str, str]] = []
        for place in self._places:
            if place.outage is not None:
                outages.append((place.store.name, place.outage))
                place.outage = None
        return outages

    def suspend(self, extent: Extent, cause: BaseException) -> None:
        """Take the place of an extent out of service: a read of it failed for good."""
        with self._lock:
            self._places[extent.drive].fail(cause)

    def resume(self) -> None:
        """Put every place that answers back in service: the next write tells whether it works."""
        with self._lock:
            for place in self._places:
                place.resume()

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel queued transfers, wait for running ones, end the threads and free everything. Idempotent.

        Raises:
            HangingError: A place does not answer: its thread, its memory and its file stay until the process
                ends.
        """
        if self._is_closed or self._is_child:
            return
        hanging = self._settle()
        self._is_closed = True
        _open_stores.discard(self)
        with ExitStack() as stack:
            for place in self._places:
                stack.callback(place.close)
        if hanging:
            raise _hanging(f"{hanging}: no answer; its threads, memory and file stay until the process ends")

    def abandon(self) -> None:
        """Make the store inert in a forked child, and close its descriptors there."""
        self._is_child = True
        for place in self._places:
            place.store.abandon()

    def reading(self) -> list[threading.Lock]:
        """Return a lock for each thread that reads, held while it does."""
        return [lock for place in self._places for lock in place.pool.reading()]

    def _settle(self) -> str:
        """Cancel queued transfers, wait for running ones, and return the names of places that hang."""
        until = time.monotonic() + (math.inf if self.stall_seconds is None else self.stall_seconds)
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


def _ended(transfer: Transfer, others: Sequence[Transfer], seconds: float) -> bool:
    """Wait until one of some transfers has ended; return whether one has within so many seconds."""
    until = time.monotonic() + seconds
    while not transfer.wait(POLL if others else seconds):
        if any(other.is_done for other in others):
            return True
        if time.monotonic() >= until:
            return False
    return True


# ---- errors --------------------------------------------------------------------------------------


def _check_still_there(memory: ByteRange) -> None:
    """Check that memory was neither freed nor moved since its transfer was queued.

    Raises:
        StoreError: It was; its bytes are not those that were saved.
    """
    storage = memory.storage
    if storage.nbytes() < memory.start + memory.nbytes or storage.data_ptr() + memory.start != memory.address:
        raise StoreError(
            f"the memory of {memory.nbytes} bytes was freed or moved before they were written or read: the "
            "program resized the storage of a saved tensor. Place that layer keep, or resize it later"
        )


def _hanging(what: str) -> HangingError:
    remedy = "Check the drive and the system log; store.stall_seconds sets the limit"
    return HangingError(errno.ETIMEDOUT, f"{what}. {remedy}")


def _store_error(failure: BaseException, what: str) -> StoreError:
    """Return an exception of an I/O thread as an error of the store, which knows no frame and no memory."""
    if isinstance(failure, StoreError):
        error = failure
    elif is_device_failure(failure):
        error = DeviceError(f"the device failed before it could {what}: {failure}")
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


# ---- the process: stores end with it, and are inert in its forked children ---------------------------

_SECONDS_AT_FORK = 10.0
"""Seconds that a fork waits for running reads."""

_open_stores: weakref.WeakSet[MultiStore] = weakref.WeakSet()
_held_at_fork: list[threading.Lock] = []


def close_all() -> None:
    """Close every store of this process, also if one of them raises."""
    with ExitStack() as stack:
        for store in list(_open_stores):
            stack.callback(store.close)


def _before_fork() -> None:
    """Let no read run during a fork.

    Direct I/O into private memory must not overlap with one: before Linux 6.3 the bytes may arrive in a page
    that copy-on-write has given to the child. A drive that hangs shall not hang the fork too.
    """
    until = time.monotonic() + _SECONDS_AT_FORK
    reading = [busy for store in list(_open_stores) for busy in store.reading()]
    _held_at_fork.extend(busy for busy in reading if busy.acquire(timeout=max(until - time.monotonic(), 0)))


def _after_fork_in_parent() -> None:
    while _held_at_fork:
        _held_at_fork.pop().release()


def _after_fork_in_child() -> None:
    _held_at_fork.clear()
    for store in list(_open_stores):
        store.abandon()
    _open_stores.clear()


atexit.register(close_all)
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
