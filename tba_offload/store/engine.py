"""A store on a backend: it hands out extents, queues transfers, and ends in order.

The training thread pays for a few dictionary look-ups and one queue operation a transfer; everything else
happens on the I/O threads::

    QueuedStore ── leases     which extents are reserved, what is done with each
        │       ── condition  whether the drive is in service, full, and how fast
        │       ── life       open, closed, forked
        ├─ lanes ──► Transfer.run ──► mover ──► backend   bytes of a file or of host memory
        └─ growing ──────────────────────────────┘
"""

from __future__ import annotations

import errno
import threading
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from tba_offload.errors import HangingError, SessionError, StoreFullError
from tba_offload.store import process
from tba_offload.store.base import take_back
from tba_offload.store.condition import Condition
from tba_offload.store.extents import BLOCK, round_up
from tba_offload.store.figures import Figures
from tba_offload.store.growth import Growing
from tba_offload.store.lanes import Lanes
from tba_offload.store.leases import Leases, TooSmallError
from tba_offload.store.life import Life
from tba_offload.store.transfers import Mover, Transfer, begin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.store.backend import Backend
    from tba_offload.store.base import Extent, IoFuture, Moved, ReadOrder, WriteOrder
    from tba_offload.store.options import StoreOptions


class QueuedStore(Figures):
    """A store with an extent allocator, a queue of writes and a queue of reads.

    Args:
        backend: What holds the bytes and moves them; the store closes it, also if it cannot begin.
        options: Capacity, threads and the limit of waits.
        drive: The ``drive`` of the extents.
        setting: The setting that its capacity comes from, for messages.

    Attributes:
        drive_index: As given.
        chosen: Why ``auto`` took this kind of store, and what it measured; ``None`` if nothing was to choose.
    """

    def __init__(
        self, backend: Backend, options: StoreOptions, *, drive: int, setting: str = "store.capacity"
    ) -> None:
        try:
            name, life = backend.name, Life(backend.name)
            leases, condition = Leases(options.capacity, setting, drive, backend, life), Condition(name)
            super().__init__(name, leases, condition, life)
            self.alignment = backend.alignment
            self.capacity_bytes = options.capacity
            self.drive_index = drive
            self.chosen: dict[str, object] | None = None
            self._backend = backend
            self._lanes = Lanes(options.writers, options.readers, options.stall_seconds)
            self._growing = Growing(backend, self._lanes, condition, leases, life)
            self._mover = Mover(backend, condition, leases, life)
            self._finalizer = weakref.finalize(self, _end_forgotten, name, self._lanes, backend)
            self._finalizer.atexit = False  # process.close_all() ends stores in order instead
            process.opened(self)
        except BaseException:
            backend.close()
            raise

    # What callers see.

    def reserve(self, nbytes: int, address: int) -> Extent:
        """Take an extent; see :meth:`ActivationStore.reserve`."""
        if nbytes < 1:
            raise ValueError(f"an extent holds at least 1 byte, not {nbytes}")
        lead = address % self.alignment
        length = round_up(lead + nbytes, BLOCK)
        self._life.check_process()
        service = self._condition.service
        if (service.cause is not None and self._lanes.hang()) or not service.admits():
            raise self._condition.out_of_service()
        while True:
            try:
                return self._leases.take(nbytes, lead, length)
            except TooSmallError as found:
                size = found.size
            self._growing.to(size)

    def reserve_many(self, ranges: Sequence[tuple[int, int]]) -> list[Extent]:
        """Take extents next to each other where there is room for all of them, and else one.

        See :meth:`ActivationStore.reserve_many`.
        """
        if len(ranges) > 1 and self._condition.service.cause is None:  # else one write shall try the drive
            self._life.check_process()
            places = [(nbytes, address % self.alignment) for nbytes, address in ranges]
            with suppress(TooSmallError):
                if extents := self._leases.take_run(places):
                    return extents
        return super().reserve_many(ranges)

    def release(self, extent: Extent) -> None:
        """Give an extent back; see :meth:`ActivationStore.release`."""
        if self._life.forked:
            self._life.check_process()
        self._leases.give_back(extent)

    def write_many(self, orders: Sequence[WriteOrder]) -> list[IoFuture]:
        """Queues writes; see :meth:`ActivationStore.write_many`."""
        return [*self._queue(orders, writes=True, padded=False)]

    def read_many(self, orders: Sequence[ReadOrder], *, padded: bool) -> list[IoFuture]:
        """Queues reads; see :meth:`ActivationStore.read_many`."""
        if padded and self.alignment > 1:
            for _, target, _ in orders:
                lead = target.address % self.alignment
                end = target.start + target.nbytes + -(lead + target.nbytes) % self.alignment
                if target.start < lead or end > target.storage.nbytes():
                    raise ValueError(
                        "the target's storage has no room for padding to multiples of "
                        f"{self.alignment} bytes; allocate it larger or pass padded=False"
                    )
        return [*self._queue([(*order, None) for order in orders], writes=False, padded=padded)]

    def suspend(self, extent: Extent, cause: BaseException) -> None:  # noqa: ARG002 - one drive
        """Take the drive out of service; see :meth:`ActivationStore.suspend`."""
        self._condition.fail(cause)

    def resume(self) -> None:
        """Put the drive back in service; see :meth:`ActivationStore.resume`."""
        self._condition.resume()

    def limit_waits(self, seconds: float | None) -> None:
        """Limits how long :meth:`close` waits for one transfer; see :meth:`ActivationStore.limit_waits`."""
        self._lanes.limit = seconds

    def prepare(self, nbytes: int) -> None:
        """Grows the store; see :meth:`ActivationStore.prepare`."""
        self._life.check_process()
        with self._leases.lock:
            self._life.check_open()
        limit = self.capacity_bytes
        if limit is not None and nbytes > limit // BLOCK * BLOCK:
            raise StoreFullError(
                errno.ENOSPC, f"{nbytes} bytes do not fit into a capacity of {limit} bytes", self.name
            )
        self._growing.to(round_up(nbytes, BLOCK))

    def close(self) -> None:
        """End the store; see :meth:`ActivationStore.close`."""
        if self._life.forked or not self._finalizer.alive:
            return
        if self._lanes.are_of(threading.current_thread()):
            raise SessionError("a store cannot be closed from a callback: it would wait for itself")
        # Each step may be repeated: an interrupted close() is finished by the next one.
        self._stop()
        if not self._lanes.join():
            self.give_up()
            raise self._hanging()
        if self._finalizer.detach() is None:
            return  # another thread closes, too, and was first
        process.ended(self)
        self._backend.close()
        if self._life.callback_error is not None:
            raise self._life.callback_error

    def give_up(self) -> None:
        """End the store without waiting for transfers that hang.

        Their threads, and the file, stay until the process ends; so does the memory that they write from or
        read into, which the threads hold.
        """
        self._stop()
        self._finalizer.detach()
        process.ended(self)

    def _stop(self) -> None:
        with self._leases.lock:
            self._life.closed = True  # from here on nothing is queued any more
        self._lanes.end()

    def _hanging(self) -> HangingError:
        if pending := self.pending():
            what = f"{self.pending_bytes()} bytes of {pending} transfers have not moved"
        else:
            what = "the attempts to grow the file have not ended"
        return HangingError(
            errno.ETIMEDOUT,
            f"{what} for {self._lanes.limit:g} s and are given up: their threads, their memory and the file "
            "stay until the process ends; check the drive and the system log",
            self.name,
        )

    def _queue(self, orders: Sequence[WriteOrder], *, writes: bool, padded: bool) -> list[Transfer]:
        """Queues transfers, all or none.

        The conditions are looked at here and judged, with an error that says which, elsewhere: this costs the
        training thread time for each transfer.
        """
        life, leases, mover = self._life, self._leases, self._mover
        if life.forked:
            life.check_process()
        transfers: list[Transfer] = []
        put = self._lanes.put_write if writes else self._lanes.put_read
        try:
            with leases.lock:
                if life.closed or life.callback_error is not None:
                    life.check_open()
                for extent, memory, after, done in orders:
                    lease = leases.get(extent.offset)
                    if lease is None or lease.extent is not extent or memory.nbytes != extent.nbytes:
                        lease = leases.fitting(extent, memory)
                    transfer = Transfer(lease, memory, after, done, mover, writes=writes, padded=padded)
                    transfers.append(transfer)
                begin(transfers, leases, self)
                for job in mover.jobs(transfers):
                    put(job)
            return transfers  # noqa: TRY300 - an interrupt after the block would lose them
        except BaseException:
            # An interrupt: none must run without its owner's knowing; what runs already shall end.
            take_back(transfers, self._lanes.limit)
            raise

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Have a function told of each call that moves bytes; see :meth:`ActivationStore.watch_moves`."""
        self._mover.tell(seen)

    # At a fork.

    def reading(self) -> list[threading.Lock]:
        """Return a lock for each thread that reads, held while it does."""
        return self._lanes.reading()

    def abandon(self) -> None:
        """Make the store inert in a forked child and close its descriptors there."""
        self._life.forked = True
        if self._finalizer.detach() is not None:
            self._backend.abandon()


def _end_forgotten(name: str, lanes: Lanes, backend: Backend) -> None:
    """End a store that was collected without close(); nothing is pending, or it would not be collected.

    This may run inside any lock, so it takes none and waits for nothing.
    """
    lanes.stop()
    backend.close()
    warnings.warn(f"the store {name} was not closed", ResourceWarning, stacklevel=2)
