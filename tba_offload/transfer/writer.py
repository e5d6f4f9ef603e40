"""The way out: what was saved is collected in batches and handed to the store, and the window is kept.

Bytes in flight are those that were packed and not yet freed, plus those whose read was submitted and that
were not yet unpacked. The window limits them. When it is full :meth:`Writer.admit` waits, but only for writes
that are running or queued: if there are none, the prefetch that is needed last is given up, and if there is
none either the activation is admitted alone, because only the waiting thread itself could free the rest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tba_offload.device.ranges import ByteRange
from tba_offload.device.streams import check_not_captured
from tba_offload.errors import StoreError, is_of_drive
from tba_offload.transfer.failures import is_full
from tba_offload.transfer.storage import State, handed_over

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tba_offload.device.streams import Device, Event
    from tba_offload.planner.window import Window
    from tba_offload.store.base import ActivationStore, IoFuture
    from tba_offload.transfer.shared import Shared
    from tba_offload.transfer.storage import Piece, Record


class Writer:
    """Writes records.

    Args:
        shared: The records.
        store: Where the bytes go.
        device: The device that holds the activations.
        window: The rules of what is in flight.
    """

    def __init__(self, shared: Shared, store: ActivationStore, device: Device, window: Window) -> None:
        self._shared = shared
        self._ledger = shared.ledger
        self._outbox = shared.outbox
        self._store = store
        self._device = device
        self.resize(window)

    def resize(self, window: Window) -> None:
        """Look the sizes up that every save asks for, and tell the store; between steps."""
        self._ledger.resize(window)
        self._held_back = window.held_back
        self._batch = window.batch
        self._due = window.held_back + window.batch
        self._store.resize_window(window.nbytes)

    # ---- room ------------------------------------------------------------------------------------

    def admit(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be in flight, or until waiting cannot help.

        Raises:
            TransferError: A transfer failed meanwhile, or nothing moved for too long.
        """
        ledger, shared = self._ledger, self._shared
        if not ledger.crowded(nbytes):
            return
        shared.drain()
        with shared.stall():
            while self._make_room(nbytes):
                pass
        shared.failures.raise_first()

    def _make_room(self, nbytes: int) -> bool:
        """One attempt to get below the window; whether another one makes sense."""
        self.flush()  # also what another thread collected: its writes must be under way to be waited for
        shared = self._shared
        with shared.lock:
            if not self._ledger.crowded(nbytes):
                return False
            if self._outbox.items:
                return True
            if not self._ledger.departing:
                return shared.give_up_farthest()
            change = shared.watchdog.next_change()
        shared.wait(change)
        return True

    # ---- from pack -------------------------------------------------------------------------------

    def collect(self, record: Record) -> None:
        """Record that a record whose one handle has the saved tensor waits for its batch.

        Raises:
            TransferError: Another one could not be written and is not allowed to stay in memory.
        """
        shared, outbox = self._shared, self._outbox
        with shared.lock:
            shared.records[record] = None
            outbox.wait(record)
            self._ledger.note(record)
            if shared.watchdog.waiters:
                shared.watchdog.notify()
        if self._ledger.in_flight > self._ledger.tight_above or outbox.nbytes >= self._due:
            self._flush_due()

    def join(self, record: Record) -> None:
        """End the wait of a record, for more than its one handle is to have its bytes.

        In a forked child nothing comes of it: a thread of the parent may have held the lock.
        """
        items = self._outbox.items
        if self._shared.inert:
            return
        with self._shared.lock:
            if record.state is not State.WAITS:
                return
            piece = record.join()
            if piece is None:
                self._outbox.discard(record)
                self._ledger.note(record)
            elif record in items:
                items[piece] = items.pop(record)
            else:
                self._outbox.put(record, (piece,))

    def defer(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Hold the memory of ``record`` until :meth:`decide`: what to write is not known yet."""
        shared = self._shared
        with shared.lock:
            shared.records[record] = None
            record.defer(storage)
            shared.ledger.note(record)

    def decide(self, record: Record) -> None:
        """End :meth:`defer`: what had to be written was saved meanwhile."""
        with self._shared.lock:
            if record.state is State.UNDECIDED:
                record.decide()
                self._shared.settle(record)

    def save(
        self, record: Record, storage: torch.UntypedStorage, lo: int, hi: int, *, at_once: bool = False
    ) -> bool:
        """Make sure that bytes [lo, hi) of ``storage`` are written or about to be.

        Only what no earlier view covers is written.

        Args:
            record: The record of ``storage``.
            storage: The bytes.
            lo: First byte.
            hi: End of the last one.
            at_once: Nothing is held back.

        Returns:
            Whether anything had to be written.

        Raises:
            TransferError: It could not be written and is not allowed to stay in memory.
        """
        shared, outbox = self._shared, self._outbox
        with shared.lock:
            missing = record.save(storage, lo, hi, self._device.stream())
            if not missing:
                return False
            shared.records[record] = None
            self._ledger.note(record)
            outbox.put(record, missing)
            if shared.watchdog.waiters:
                shared.watchdog.notify()
        if self._ledger.in_flight > self._ledger.tight_above or outbox.nbytes >= self._due:
            self._flush_due()
        elif at_once and outbox.nbytes >= self._batch:
            self.flush()
        return True

    def _flush_due(self) -> None:
        """Write what is due: all but the latest, or all, if the next activation may find no room."""
        is_tight = self._ledger.in_flight > self._ledger.tight_above
        self.flush(0 if is_tight else self._held_back)

    def end_scope(self, *, at_once: bool) -> None:
        """Record that a scope has saved everything.

        Without a window nothing is held back, nor if ``at_once``.
        """
        if at_once or not self._held_back:
            self.flush()

    # ---- to the store ----------------------------------------------------------------------------

    def flush(self, held_back: int = 0) -> None:
        """Hand the writes that were collected to the store, oldest first.

        They go in batches, because a hook finds the caches full of the model's data: the first transfer
        of a batch pays for fetching the code of ten functions, the others find it there.

        Args:
            held_back: So many bytes, the latest, are left.

        Raises:
            TransferError: It could not be written and is not allowed to stay in memory.
        """
        shared = self._shared
        with shared.lock:
            batch = self._outbox.take(held_back)
            for record, _ in batch:
                self._ledger.note(record)
        if not batch:
            return
        try:
            self._send(batch)
        except BaseException:
            # An interrupt, or a full store: nothing may wait for writes that will never start.
            with shared.lock:
                for record, _ in batch:
                    shared.give_up_unfinished(record)
            raise

    def _send(self, batch: list[tuple[Record, Piece]]) -> None:
        """Write pieces, each after the work of the stream that produced its bytes."""
        check_not_captured(self._device)
        saved: list[tuple[Record, Piece]] = []
        sources: list[ByteRange] = []
        for record, piece in batch:
            storage = record.source
            if storage is not None and piece.pending:  # or it was taken back meanwhile
                saved.append((record, piece))
                sources.append(ByteRange(storage, piece.lo, piece.nbytes))
        after = {stream: self._device.event(stream) for stream in {piece.stream for _, piece in saved}}
        done = 0
        while done < len(saved):
            try:
                done += self._queue(saved[done:], sources[done:], after)
            except (StoreError, TimeoutError) as error:
                with self._shared.lock:
                    self._unwritten(*saved[done], error, self._shared.failures.epoch)
                self._shared.failures.raise_first()
                done += 1

    def _queue(
        self,
        saved: Sequence[tuple[Record, Piece]],
        sources: Sequence[ByteRange],
        after: Mapping[object, Event],
    ) -> int:
        """Queues the writes of the first of several pieces; returns of how many.

        Raises:
            StoreError: The first cannot be written.
            TimeoutError: The drive hangs.
        """
        pieces = [piece for _, piece in saved]
        extents = self._shared.extents.reserve(pieces, sources)
        written, epoch = self._written, self._shared.failures.epoch
        orders = [
            (extent, source, after[piece.stream], partial(written, record, piece, epoch))
            for extent, source, (record, piece) in zip(extents, sources, saved, strict=False)
        ]
        writes: list[IoFuture] = []
        try:
            writes = self._store.write_many(orders)
            handed_over(pieces, writes)
        except BaseException:
            # An interrupt: done again, or a write would run that no piece knows of.
            handed_over(pieces, writes)
            raise
        return len(extents)

    # ---- on an I/O thread ------------------------------------------------------------------------

    def _written(self, record: Record, piece: Piece, epoch: int, future: IoFuture) -> None:
        """Record that a write has ended."""
        shared = self._shared
        with shared.lock:
            if not piece.pending:
                return  # it was given up: an interrupt struck in the store
            if future.error is not None:
                self._unwritten(record, piece, future.error, epoch)
            else:
                record.written(piece)
                self._ledger.stats.offloaded += piece.nbytes
                shared.settle(record)
            shared.watchdog.notify()

    def _unwritten(self, record: Record, piece: Piece, error: BaseException, epoch: int) -> None:
        """Record that a piece could not be written.

        Its memory stays, and the policy says whether that is an error.
        """
        shared, stats = self._shared, self._ledger.stats
        shared.take_back(record, {piece})
        if record.state is State.RELEASED:
            shared.settle(record)
            return
        newly_kept = record.keep()
        self._ledger.note(record)
        if shared.failures.keep_when_full and is_of_drive(error):
            stats.fallback_kept += record.nbytes if newly_kept else 0
            stats.full |= is_full(error)
        else:
            shared.failures.of_write(record, error, epoch)
