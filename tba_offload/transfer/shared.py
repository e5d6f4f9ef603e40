"""What the writer and the reader of an offloader share: the lock, the records, and how each one ends."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tba_offload.errors import TransferError
from tba_offload.transfer.extents import Extents
from tba_offload.transfer.ledger import Ledger
from tba_offload.transfer.storage import Drops, Piece, State, forget, split

if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Iterable, Iterator

    from tba_offload.device.streams import Device
    from tba_offload.planner.window import Window
    from tba_offload.store.base import ActivationStore
    from tba_offload.transfer.failures import Failures
    from tba_offload.transfer.storage import Record, Span
    from tba_offload.transfer.watchdog import Watchdog

DROPS_AT_ONCE = 8
"""Handles that are gone before backward takes note of them, unless their records hold memory until then.

Taking note finds code and extents in cold caches after the model's work; eight at once pay for that once.
"""

_PAST = {"read": "read", "write": "written"}


class Outbox:
    """What was saved and not handed to the store, oldest first: records that wait, and pieces of others.

    Args:
        most: Bytes of an extent; a larger piece is taken out as several. ``None`` for any.

    Attributes:
        items: Records that wait for their batch, and pieces, each with its weight: bytes of memory.
        nbytes: Memory that they hold.
    """

    __slots__ = ("_most", "items", "nbytes")

    def __init__(self, most: int | None = None) -> None:
        self._most = sys.maxsize if most is None else most
        self.items: dict[Record | Piece, tuple[Record, int]] = {}
        self.nbytes = 0

    def wait(self, record: Record) -> None:
        """Add a record that waits for its batch."""
        self.items[record] = record, record.nbytes
        self.nbytes += record.nbytes

    def put(self, record: Record, pieces: Iterable[Piece]) -> None:
        """Add pieces of a record."""
        for piece in pieces:
            self.items[piece] = record, piece.weight
            self.nbytes += piece.weight

    def take(self, held_back: int) -> list[tuple[Record, Piece]]:
        """Take out the oldest items, all but the latest of which ``held_back`` bytes of memory wait.

        Returns:
            Pieces. Records join now; what nothing needs any more is left out.
        """
        taken: list[tuple[Record, Record | Piece]] = []
        for item, (record, weight) in self.items.items():
            # What weighs nothing goes with the piece before it: together they hold their memory.
            if held_back and weight and self.nbytes <= held_back:
                break
            self.nbytes -= weight
            taken.append((record, item))
        pieces: list[tuple[Record, Piece]] = []
        for record, item in taken:
            del self.items[item]
            piece = item if isinstance(item, Piece) else record.join()
            if piece is None:
                continue
            if piece.nbytes <= self._most:
                pieces.append((record, piece))
            else:
                pieces += [(record, part) for part in split(record, piece, self._most)]
        return pieces

    def discard(self, item: Record | Piece) -> bool:
        """Take out one item; whether it was there."""
        found = self.items.pop(item, None)
        if found is None:
            return False
        self.nbytes -= found[1]
        return True

    def clear(self) -> None:
        """Take out everything, after an interrupt."""
        self.items.clear()
        self.nbytes = 0


class Shared:
    """The records of one offloader, and the lock that protects them.

    The caller of a method holds the lock, unless it says otherwise. Nothing waits for I/O while it is held.

    Args:
        store: Where the bytes go.
        device: The device that holds the activations.
        window: The rules of what is in flight.
        failures: What went wrong.
        watchdog: Waits.

    Attributes:
        lock: Protects all of this.
        records: All that were not released yet; after an interrupt, the truth.
        outbox: What was not handed to the store yet.
        ahead: Spans that were read ahead and that nothing has asked for yet, in the order of their reading.
        drops: Handles that are gone and were not taken note of.
        inert: Whether this is a forked child.
        marks_stalls: Whether waits are marked in the work of the device.
    """

    def __init__(
        self, store: ActivationStore, device: Device, window: Window, failures: Failures, watchdog: Watchdog
    ) -> None:
        self.device = device
        self.lock: LockType = threading.Lock()
        self.ledger = Ledger(window)
        self.failures = failures
        self.watchdog = watchdog
        self.extents = Extents(store, failures)
        self.outbox = Outbox(store.extent_bytes)
        self.records: dict[Record, None] = {}
        self.ahead: dict[Span, None] = {}
        self.drops = Drops(self.lock)
        self.inert = False
        self.marks_stalls = False

    # ---- transitions -----------------------------------------------------------------------------

    def settle(self, record: Record) -> None:
        """Free memory, or extents, that no transfer and no handle needs any more, and update the ledger."""
        if record.state is State.RELEASED:
            self.release(record)
            return
        if record.state is State.TRAVELS and not record.writes:
            record.free()
        self.ledger.note(record)

    def release(self, record: Record) -> None:
        """Record that the last handle is gone: nothing will ask for these bytes again.

        What a write still reads is given back when that has ended. To do this twice does no harm.
        """
        if record.writes:
            self.cancel_writes(record)
        if record.state is State.WAITS:
            self.outbox.discard(record)
        for span in record.spans:
            if span in self.ledger.ahead:
                self.forget_ahead(span)
            if span.reads and not record.writes:
                self._end_reads(span)
        for extent in record.release():
            try:
                self.extents.store.release(extent)
            except ValueError:  # not by a call for each extent
                self.extents.release(extent)
        if not record.writes:
            self.records.pop(record, None)
        if record in self.ledger.noted:
            self.ledger.note(record)

    def _end_reads(self, span: Span) -> None:
        """Cancel reads that nothing needs; what one still fills goes back when it has ended."""
        for piece, read in zip(span.pieces, span.reads, strict=True):
            if not read.done() and not read.cancel():
                self.extents.give_back_after(read, piece)

    def cancel_writes(self, record: Record) -> None:
        """Take back the writes that have not started; the memory then stays until the handles are gone."""
        cancelled = {
            piece
            for piece in record.pieces()
            if self.outbox.discard(piece) or (piece.write is not None and piece.write.cancel())
        }
        if cancelled:
            self.take_back(record, cancelled)

    def stay(self, record: Record) -> None:
        """Backward is about to use the memory of a record: no write that ends before lets go of it."""
        self.cancel_writes(record)
        record.stay()
        self.ledger.note(record)

    def take_back(self, record: Record, pieces: set[Piece]) -> None:
        """Pieces that will never be written: their memory stays until the last handle is gone."""
        for piece in pieces:
            self.outbox.discard(piece)
            self.extents.give_back(piece)
        record.lose(pieces)
        self.ledger.note(record)
        self.watchdog.notify()

    def give_up_unfinished(self, record: Record) -> None:
        """Take back what was saved of a record and never came to the store."""
        if lost := {piece for piece in record.pieces() if piece.is_unfinished()}:
            self.take_back(record, lost)
            self.settle(record)

    def forget_ahead(self, span: Span) -> None:
        """Record that a span that was read ahead is in use, or will not be."""
        self.ahead.pop(span, None)
        self.ledger.uncharge(span)

    def give_up_farthest(self) -> bool:
        """Drop what was read ahead, is needed last and is not being read; whether there is such a span."""
        for span in reversed(self.ahead):
            if span.arrived() or (len(span.reads) == 1 and span.reads[0].cancel()):
                del self.ahead[span]
                span.forget()
                self.ledger.uncharge(span, in_vain=True)
                return True
        return False

    def writes_are_under_way(self) -> bool:
        """Whether a write holds memory that it is going to let go of."""
        return any(piece.is_under_way() for record in self.records for piece in record.pieces())

    # ---- handles that are gone; the lock is not held ---------------------------------------------

    def drain(self) -> None:
        """Take note of the handles that autograd has dropped."""
        queue = self.drops.queue
        if self.inert or not queue:
            return
        with self.lock:
            # They leave the queue last: what an interrupt cuts short is done again.
            count = len(queue)
            for record in forget(self.drops, count):
                if not record.handles:
                    self.release(record)
                else:
                    record.all_read()
                    self.ledger.note(record)
            for _ in range(count):
                queue.popleft()

    def repair(self) -> None:
        """After an interrupt, which may have struck between any two operations of the training thread.

        Writes that never came to the store are taken back, records that no handle needs are released, and the
        sums are made anew from the others.
        """
        with self.lock:
            self.outbox.clear()
            for record in list(self.records):
                if record.state is State.WAITS:
                    self.outbox.wait(record)
                self.give_up_unfinished(record)
                if not record.handles:
                    self.release(record)
            self.extents.reconcile(self.records)
            self.ledger.recount(self.records)
            self.watchdog.notify()

    # ---- waiting; the lock is not held -----------------------------------------------------------

    def wait(self, change: LockType) -> None:
        """Wait for a change that the watchdog told of.

        Raises:
            TransferError: Nothing has changed within the limit.
        """
        try:
            self.watchdog.wait_until_changed(change, self._describe_writes)
        except TransferError:
            with self.lock:
                self.give_up_hanging()
            raise

    def give_up_hanging(self) -> None:
        """Nothing was written for too long: what is under way stays in memory, its drives are left alone.

        A write only reads its memory. Should it end one day, that changes nothing any more. The lock is held.
        """
        for record in list(self.records):
            if not any(piece.is_under_way() for piece in record.pieces()):
                continue
            self.cancel_writes(record)
            for piece in record.pieces():
                if piece.is_under_way():
                    self.extents.suspend(piece, self.watchdog.exhausted())
            if record.keep():
                self.ledger.stats.fallback_kept += record.nbytes
            self.ledger.note(record)

    def wait_for_write(self, record: Record, piece: Piece) -> None:
        """Wait until the write of a piece has ended.

        Raises:
            TransferError: It has not ended within the limit; its drive is left alone.
        """
        write = piece.write
        if write is None:
            return
        try:
            self.watchdog.wait_for(write, lambda: self.describe("write", record, piece, piece.nbytes))
        except TransferError:
            self.extents.suspend(piece, self.watchdog.exhausted())
            raise

    def _describe_writes(self) -> str:
        """Return what is being written, by its oldest piece."""
        with self.lock:
            running = [
                (record, piece)
                for record in self.records
                for piece in record.pieces()
                if piece.write is not None
            ]
        if not running:
            return "no write is under way"
        record, piece = running[0]
        return self.describe("write", record, piece, sum(piece.nbytes for _, piece in running))

    def describe(self, what: str, record: Record, piece: Piece, nbytes: int) -> str:
        """Return what is waited for: "read" or "write", its bytes, the first layer and its place."""
        place = self.extents.place(piece)
        return f"{nbytes} bytes wait to be {_PAST[what]}, first {record.key}, at {place}"

    @contextmanager
    def stall(self, *, is_marked: bool = True) -> Iterator[None]:
        """Around a wait of the training thread for I/O: it is counted, and marked in the device's work."""
        stats = self.ledger.stats
        mark = self.device.mark() if self.marks_stalls and is_marked else None
        started = time.perf_counter()
        try:
            yield
        finally:
            stats.stalled(started, time.perf_counter())
            if mark is not None:
                stats.marked_stalls.append((mark, self.device.mark()))
