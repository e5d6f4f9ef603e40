"""Moves records out and back: writes as soon as they are known, prefetch inside a window of bytes.

The training thread calls :meth:`Writer.save` when a tensor is saved, :meth:`Reader.fetch` when backward asks
for it, and :meth:`ReadAhead.start` in between. The store's I/O threads call back when a write has ended. One
lock protects all records and sums; nothing waits for I/O while it is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.planner.window import Window
from tba_offload.transfer.ahead import ReadAhead
from tba_offload.transfer.failures import Failures
from tba_offload.transfer.reader import Reader
from tba_offload.transfer.reads import Reads
from tba_offload.transfer.shared import Shared
from tba_offload.transfer.storage import Drops, Handle, State
from tba_offload.transfer.watchdog import Watchdog
from tba_offload.transfer.writer import Writer

if TYPE_CHECKING:
    import torch

    from tba_offload.device.streams import Device
    from tba_offload.store.base import ActivationStore
    from tba_offload.transfer.ledger import TransferStats
    from tba_offload.transfer.storage import Record


class Offloader:
    """The queues between the saved-tensor hooks and a store.

    Args:
        store: Where the bytes go. Nothing else reserves extents there; the offloader does not close it.
        device: The device that holds the activations.
        window: Most bytes in flight; ``None`` for no limit.
        keep_when_full: Whether what cannot be written is kept in memory (counted in :attr:`stats`) instead of
            raising a :class:`~tba_offload.errors.TransferError`.
        stall_limit: Seconds after which a wait during which nothing moved is an error; ``None`` for never.
        budget_bytes: What resident activations may come to, for warnings; ``None`` for no budget.

    Attributes:
        store: As given.
        device: As given.
        failures: What went wrong, and whether that is an error.
        watchdog: Waits, within the stall limit.
        ledger: What is in memory, and what moved.
        writer: The way out.
        reader: The way back.
        ahead: The way back before backward asks.
        drops: Where the ends of handles are noted.
    """

    def __init__(
        self,
        store: ActivationStore,
        device: Device,
        *,
        window: int | None = None,
        keep_when_full: bool = True,
        stall_limit: float | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        self.store = store
        self.device = device
        self.failures = Failures(store, keep_when_full=keep_when_full, budget_bytes=budget_bytes)
        self.watchdog = Watchdog(stall_limit)
        allowed = Window(window)
        self._shared = Shared(store, device, allowed, self.failures, self.watchdog)
        self.ledger = self._shared.ledger
        self.writer = Writer(self._shared, store, device, allowed)
        reads = Reads(self._shared, store, device)
        self.reader = Reader(self._shared, store, device, reads)
        self.ahead = ReadAhead(self._shared, reads, self.writer)
        self.drops: Drops = self._shared.drops

    def resize_window(self, window: int | None) -> None:
        """Set the most bytes in flight; between steps."""
        self.writer.resize(Window(window))

    # ---- what is counted -------------------------------------------------------------------------

    @property
    def stats(self) -> TransferStats:
        """What moved since :meth:`reset_stats`."""
        return self.ledger.stats

    @property
    def in_flight(self) -> int:
        """Bytes in flight now."""
        return self.ledger.in_flight

    @property
    def own_bytes(self) -> int:
        """Bytes that the offloader itself keeps in memory now: in flight, restored, kept."""
        return self.ledger.in_flight + self.ledger.settled

    def reset_stats(self) -> TransferStats:
        """Start new :attr:`stats` and return the old ones."""
        with self._shared.lock:
            return self.ledger.reset_stats()

    def mark_stalls(self, *, wanted: bool) -> None:
        """Whether waits are marked in the work of the device, where times are asked of it."""
        self._shared.marks_stalls = wanted

    # ---- handles ---------------------------------------------------------------------------------

    def owns(self, handle: Handle) -> bool:
        """Whether a handle is of a record of this offloader."""
        return handle.is_told(self.drops)

    def drain(self) -> None:
        """Take note of the handles that autograd has dropped."""
        self._shared.drain()

    # ---- ends ------------------------------------------------------------------------------------

    def protect(self, storage: torch.UntypedStorage, record: Record) -> None:
        """Take the call before the owner of ``storage`` resizes it: no write may read its memory any more.

        The record keeps the same storage object, whose owner is going to fill it again.

        Raises:
            TransferError: A write that reads the memory does not end.
        """
        shared = self._shared
        with shared.lock:
            if record.state is State.RELEASED or record.memory() is None:
                return
            shared.cancel_writes(record)
            record.keep(storage)
            shared.ledger.note(record)
            running = [piece for piece in record.pieces() if piece.write is not None]
        for piece in running:
            shared.wait_for_write(record, piece)

    def quiesce(self) -> None:
        """Wait until every write has ended or was taken back, and accounts for dropped handles.

        Raises:
            TransferError: A transfer failed.
        """
        self.drain()
        while self._is_departing():
            pass
        self.raise_failures()

    def _is_departing(self) -> bool:
        """Wait for one change if anything is to be written; whether there was."""
        self.writer.flush()  # also what another thread saved meanwhile
        shared = self._shared
        with shared.lock:
            if shared.outbox.items or not shared.ledger.departing:
                return bool(shared.outbox.items)
            change = shared.watchdog.next_change()
        shared.wait(change)
        return True

    def abandon(self) -> None:
        """Give a step up that failed: drops what was read ahead, and its other failures with it."""
        with self._shared.lock:
            self.failures.forget()
        self.repair()
        self.drain()
        self.ahead.give_up()

    def repair(self) -> None:
        """After an interrupt, which may have struck between any two operations of the training thread."""
        self._shared.repair()

    def raise_failures(self) -> None:
        """Raise the error of a transfer that failed on an I/O thread, if there is one.

        Raises:
            TransferError: Names the layer, the cause and the remedy.
        """
        self.failures.raise_first()

    def become_inert(self) -> None:
        """In a forked child: the lock may be held for ever, and threads and descriptors are the parent's."""
        self._shared.inert = True
