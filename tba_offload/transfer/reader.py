"""The way back: backward is given bytes from memory, or waits until they are read."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import torch

from tba_offload.device.ranges import ByteRange
from tba_offload.errors import ChecksumError, SessionError, StoreError, TransferError, is_of_drive
from tba_offload.transfer.failures import transfer_error
from tba_offload.transfer.shared import DROPS_AT_ONCE
from tba_offload.transfer.storage import State
from tba_offload.transfer.watchdog import pause

if TYPE_CHECKING:
    from tba_offload.device.streams import Device
    from tba_offload.store.base import ActivationStore, IoFuture
    from tba_offload.transfer.reads import Reads
    from tba_offload.transfer.shared import Shared
    from tba_offload.transfer.storage import Handle, Piece, Record, Span

READ_AGAIN = (0.01, 0.1, 1.0)
"""Seconds before the second, third and fourth attempt to read what backward waits for.

The thread that needs the bytes pauses, so other transfers go on, and what was read ahead in vain is only read
again once it is needed. The sum is shorter than the wait after which a drive that stands still is named.
"""

_MAY_PASS = frozenset({
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOBUFS, errno.ENOMEM, errno.ETIMEDOUT
})  # fmt: skip
"""Errors of a read that may not come again: a path that is switched over, memory that is short."""


class Reader:
    """Reads records, on the training thread's behalf.

    Args:
        shared: The records.
        store: Where the bytes are.
        device: The device that holds the activations.
        reads: Starts the reads.
    """

    def __init__(self, shared: Shared, store: ActivationStore, device: Device, reads: Reads) -> None:
        self._shared = shared
        self._ledger = shared.ledger
        self._store = store
        self._device = device
        self._reads = reads

    # ---- from unpack -----------------------------------------------------------------------------

    def recall(self, handle: Handle) -> torch.Tensor | None:
        """Return the saved tensor of a handle whose record waits for its batch, and will not be part of it.

        The pass of backward that uses it frees it.

        Returns:
            The tensor; ``None`` if its record waits no more: then :meth:`fetch` has the bytes.

        Raises:
            SessionError: This is a forked child.
        """
        shared, record = self._shared, handle.record
        if shared.inert:
            raise _only_the_parent(record)
        if shared.drops.queue and self._ledger.settled:
            shared.drain()  # what was used where it lay holds its memory until then
        with shared.lock:
            tensor = handle.tensor
            if tensor is not None and record.state is State.WAITS:
                handle.recall()
                shared.outbox.discard(record)
                shared.records.pop(record, None)
                self._ledger.note(record)
                self._ledger.stats.forwarded += handle.hi - handle.lo
                if shared.watchdog.waiters:
                    shared.watchdog.notify()
        return tensor

    def fetch(self, handle: Handle) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes of a handle: from memory if they are still there, from the store otherwise.

        Returns:
            A storage and a shift in bytes: byte b of the original storage is byte b + shift of it.

        Raises:
            TransferError: The bytes could not be written or read.
        """
        shared, record = self._shared, handle.record
        if shared.inert:
            raise _only_the_parent(record)
        dropped = len(shared.drops.queue)
        if dropped and (dropped >= DROPS_AT_ONCE or self._ledger.settled):
            shared.drain()
        with shared.lock:
            is_first, was_held = not handle.drop.read, record.held
            storage, shift, span = record.hand_out(handle)
            if storage is not None:
                if span is None:
                    self._forwarded(handle, is_first=is_first, was_held=was_held)
                elif span in self._ledger.ahead:
                    shared.ahead.pop(span, None)
                    self._ledger.uncharge(span)
                if record.state is not State.TRAVELS:
                    self._ledger.note(record)
        if span is None:
            if storage is None:
                raise transfer_error("keep", record, record.error)
            return storage, shift
        if storage is None:
            storage, span = self._read(handle, span)
        if span.stream is not None and (stream := self._device.stream()) != span.stream:
            self._device.use(ByteRange(storage, 0, storage.nbytes()).tensor(), stream)
        return storage, span.shift

    def _forwarded(self, handle: Handle, *, is_first: bool, was_held: bool | None) -> None:
        """Backward has the original memory: what was still to be written is not, once no handle needs it."""
        stats, record = self._ledger.stats, handle.record
        if is_first:
            stats.forwarded += handle.hi - handle.lo
        if record.held and not was_held:
            stats.held += record.nbytes
        if not record.unread and record.writes:
            self._shared.cancel_writes(record)
            record.all_read()

    def _read(self, handle: Handle, span: Span | None) -> tuple[torch.UntypedStorage, Span]:
        """Wait for the bytes of a handle, which are not in memory."""
        shared, record = self._shared, handle.record
        while span is not None:
            while (reads := self._started(record, span)) is None:
                pass
            if not span.has_come(reads):
                self._await(record, span, reads)
            with shared.lock:
                if span in self._ledger.ahead:
                    self._ledger.uncharge(span)
                storage, _, _ = record.hand_out(handle)
                if record.state is not State.TRAVELS:
                    self._ledger.note(record)
                if storage is not None:
                    return storage, span
                span = record.span_over(handle.lo, handle.hi)  # another thread may have given it up
        raise transfer_error("keep", record, record.error)

    def _started(self, record: Record, span: Span) -> list[IoFuture] | None:
        """Start the reads of a span if need be; ``None`` if there was no memory and another attempt is due.

        Raises:
            torch.OutOfMemoryError: Nothing that was read ahead, and no transfer, holds memory of the device.
        """
        shared = self._shared
        with shared.lock:
            shared.ahead.pop(span, None)  # another thread that needs room must not take it away
            if span.reads or span.restored() is not None:
                return span.reads
            try:
                self._reads.start([span])
            except torch.OutOfMemoryError:
                if shared.give_up_farthest():
                    return None
                running = [read for each in shared.ahead for read in each.reads if not read.done()]
                if not running and not shared.writes_are_under_way():
                    raise
                change = shared.watchdog.next_change()
            else:
                return span.reads
        if running:
            piece = span.pieces[0]
            shared.watchdog.wait_for(running[0], lambda: shared.describe("read", record, piece, piece.nbytes))
        else:
            shared.wait(change)
        return None

    # ---- waiting ---------------------------------------------------------------------------------

    def _await(self, record: Record, span: Span, reads: list[IoFuture]) -> None:
        """Wait for the reads of a span; the time is a stall."""
        if span.has_come(reads):
            return
        with self._shared.stall(is_marked=not span.arrived()):
            for number, piece in enumerate(span.pieces):
                try:
                    self._await_read(record, span, reads, number, piece)
                except TransferError:  # nothing has moved for too long
                    self._shared.extents.suspend(piece, self._shared.watchdog.exhausted())
                    raise
                except StoreError as error:
                    raise self._failed(record, span, piece, error) from error

    def _await_read(
        self, record: Record, span: Span, reads: list[IoFuture], number: int, piece: Piece
    ) -> None:
        """Wait for one read, and try again where that may help.

        Raises:
            StoreError: It failed for good.
        """
        watchdog = self._shared.watchdog
        started, mismatched = time.perf_counter(), False
        for seconds in (*READ_AGAIN, None):
            spent, read = time.perf_counter() - started, reads[number]
            watchdog.wait_for(
                read, lambda: self._shared.describe("read", record, piece, piece.nbytes), spent=spent
            )
            if seconds is None or not _may_pass(read.error, mismatched=mismatched):
                break
            mismatched = isinstance(read.error, ChecksumError)
            if not watchdog.allows(time.perf_counter() - started + seconds):
                break
            pause(seconds)
            self._read_again(span, reads, number, piece)
        reads[number].wait()

    def _read_again(self, span: Span, reads: list[IoFuture], number: int, piece: Piece) -> None:
        """Submit a read that failed once more, into the same buffer."""
        with self._shared.lock:
            # Another thread that waits for the same bytes may have done so, or given them up.
            if reads[number].error is None or span.reads is not reads or span.buffer is None:
                return
            room = ByteRange(span.buffer, span.lo + span.shift, span.nbytes)
            reads[number] = self._reads.start_again(span, piece, room)
            self._ledger.stats.reread += piece.nbytes

    def _failed(self, record: Record, span: Span, piece: Piece, error: StoreError) -> TransferError:
        """Return the error of a read that failed for good; free its buffer, unless a read still fills it."""
        shared = self._shared
        with shared.lock:
            if span.arrived():
                shared.forget_ahead(span)
                span.forget()
        if is_of_drive(error):  # it did not give back what it took
            shared.extents.suspend(piece, error)
        return transfer_error("read", record, error, f" from {shared.extents.where(piece)}")


def _only_the_parent(record: Record) -> SessionError:
    return SessionError(
        f"{record.key} was saved before this process was forked; only the parent can go "
        "backward through that graph, not a forked child"
    )


def _may_pass(error: BaseException | None, *, mismatched: bool) -> bool:
    """Whether another read may go well; bits that flip on the way rarely do twice in turn."""
    if isinstance(error, ChecksumError):
        return not mismatched
    return isinstance(error, StoreError) and error.errno in _MAY_PASS
