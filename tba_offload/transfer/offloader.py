"""Moves records out and back: writes as soon as they are known, prefetch inside a window of bytes.

The training thread calls :meth:`Offloader.require` when a tensor is saved, :meth:`Offloader.fetch` when
backward asks for it, and :meth:`Offloader.prefetch` in between. The store's I/O threads call back when a
write has ended. One lock protects all books; nobody waits for I/O while holding it.

Bytes in flight are those that were packed and not yet freed, plus those whose read was submitted and that
were not yet unpacked. They have a ceiling. At the ceiling :meth:`Offloader.admit` waits, but only for
writes that are running or queued: if there are none, the prefetch that is needed last is given up, and if
there is none either the activation is admitted alone, because nothing but the waiting thread itself could
free the rest.
"""

from __future__ import annotations

import copy
import errno
import threading
import time
import warnings
from _thread import LockType, allocate_lock
from collections import OrderedDict, deque
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch

from tba_offload import interrupts
from tba_offload.device.ranges import ByteRange, aligned_range
from tba_offload.errors import (
    ChecksumError,
    OutOfServiceError,
    SessionError,
    StoreError,
    StoreFullError,
    TransferError,
    is_of_drive,
)
from tba_offload.plan.window import Window
from tba_offload.transfer.ledger import Books, TransferStats
from tba_offload.transfer.storage import Drop, Handle, Piece, Record, Span
from tba_offload.transfer.watchdog import HUNG, Patience

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tba_offload.device.streams import Device, Event
    from tba_offload.store.base import ActivationStore, Extent, IoFuture

READ_AGAIN = (0.01, 0.1, 1.0)
"""Seconds before the second, third and fourth attempt to read what backward waits for.

The thread that needs the bytes pauses, so other transfers go on, and what was read ahead in vain is only read
again once it is needed. The sum is shorter than the wait after which a drive that stands still is named.
"""

_MAY_PASS = frozenset({
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOBUFS, errno.ENOMEM, errno.ETIMEDOUT
})  # fmt: skip
"""Errors of a read that may not come again: a path that is switched over, memory that is short."""

DROPS_AT_ONCE = 8
"""Dropped handles that :meth:`Offloader.tidy` waits for before it takes note of them."""


class Offloader:
    """The queues between the saved-tensor hooks and a store.

    Args:
        store: Where the bytes go. Nothing else reserves extents there; the offloader does not close it.
        device: The device that holds the activations.
        ceiling: Most bytes in flight; ``None`` for no limit.
        keep_when_full: Whether what cannot be written is kept in memory (counted in :attr:`stats`) instead of
            raising a :class:`~tba_offload.errors.TransferError`.
        stall_limit: Seconds after which a wait during which nothing moved is an error; ``None`` for never.
        budget_bytes: What resident activations may come to, for warnings; ``None`` for no budget.
    """

    def __init__(
        self,
        store: ActivationStore,
        device: Device,
        *,
        ceiling: int | None = None,
        keep_when_full: bool = True,
        stall_limit: float | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        self.store = store
        self.device = device
        self.keep_when_full = keep_when_full
        self.marks_stalls = False
        """Whether waits are marked in the work of the device, for those who ask it for times."""
        self._books = Books(Window(ceiling))
        self._outbox: dict[Piece, Record] = {}
        self._outbox_bytes = 0
        self._take_sizes()
        self._prefetched: OrderedDict[Span, Record] = OrderedDict()
        self._dropped: deque[Drop] = deque()
        self._records: dict[
            Record, None
        ] = {}  # all that were not released yet; after an interrupt, the truth
        self._giving_back: Extent | None = None
        self._reserving = threading.Lock()  # held until the piece knows of its extent
        self._being_read: dict[Piece, Extent] = {}  # by reads of which no record knows any more
        self._failures: SimpleQueue[TransferError] = SimpleQueue()
        self._told: set[str] = set()
        self._rescued_from: set[str] = set()
        self._budget_bytes = budget_bytes
        self._inert = False
        self._epoch = 0  # failures of records from before the last abandoned step concern nobody
        self._lock = threading.Lock()
        self._waiters: list[LockType] = []
        self._patience = Patience(stall_limit)

    def _take_sizes(self) -> None:
        """Looks the sizes up that every pack asks for, and tells the store."""
        window = self._books.window
        self._batch_bytes, self._held_back_bytes = window.batch, window.held_back
        self.store.expect(window.nbytes)

    def resize_window(self, ceiling: int | None) -> None:
        """Sets the most bytes in flight; between steps."""
        self._books.window = Window(ceiling)
        self._take_sizes()

    def configure(self, *, keep_when_full: bool) -> None:
        """Sets what becomes of bytes that cannot be written; between steps."""
        self.keep_when_full = keep_when_full

    def mark_stalls(self, *, wanted: bool) -> None:
        """Sets whether waits are marked in the work of the device, for those who ask it for times."""
        self.marks_stalls = wanted

    @property
    def stats(self) -> TransferStats:
        """What moved since :meth:`reset_stats`."""
        return self._books.stats

    @property
    def in_flight(self) -> int:
        """Bytes in flight now."""
        return self._books.in_flight

    @property
    def own_bytes(self) -> int:
        """Bytes that the offloader itself keeps in memory now: in flight, restored, kept."""
        return self._books.in_flight + self._books.settled

    def crowded(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more would exceed the ceiling."""
        return self._books.crowded(nbytes)

    def has_room(self) -> bool:
        """Whether reading ahead is worth a start: the window has room, and this is no forked child."""
        return not self._inert and self._books.has_room()

    # ---- from pack -------------------------------------------------------------------------------

    def handle(self, record: Record, lo: int, hi: int) -> Handle:
        """A new handle of ``record`` that needs its bytes [lo, hi)."""
        with self._lock:
            self._records[record] = None
            return Handle(record, lo, hi, self._dropped)

    def borrow(self, record: Record, lo: int, hi: int) -> Handle | None:
        """As :meth:`handle`, for a look that is no use by backward; ``None`` if the bytes were given back."""
        with self._lock:
            if record.released:
                return None
            handle = Handle(record, lo, hi, self._dropped)
            handle.mark_read()
            return handle

    def owns(self, handle: Handle) -> bool:
        """Whether a handle is of a record of this offloader."""
        return handle.is_told(self._dropped)

    def admit(self, nbytes: int) -> None:
        """Waits until ``nbytes`` more may be in flight, or until waiting cannot help.

        Raises:
            TransferError: A transfer failed meanwhile, or nothing moved for too long.
        """
        if not self._books.crowded(nbytes):
            return
        self.drain()
        mark = self.device.mark() if self.marks_stalls else None
        started = time.perf_counter()
        while self._make_room(nbytes):
            pass
        self.stats.stalled(started, time.perf_counter())
        if mark is not None:
            self.stats.marked_stalls.append((mark, self.device.mark()))
        self.raise_failures()

    def _make_room(self, nbytes: int) -> bool:
        """One attempt to get below the ceiling; whether another one makes sense."""
        self.flush()  # also what another thread collected: its writes must be under way to be waited for
        with self._lock:
            if not self._books.crowded(nbytes):
                return False
            if self._outbox:
                return True
            if not self._books.departing:
                return self._give_up_farthest()
            change = self._next_change()
        self._wait(change)
        return True

    def defer(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Holds the memory of ``record`` until :meth:`decide`: what to write is not known yet."""
        with self._lock:
            if not record.pinned:
                record.source = storage
                self._books.change(record, deferred=True)
                self._books.charge(record)

    def decide(self, record: Record) -> None:
        """Ends :meth:`defer`: what had to be written was required meanwhile."""
        with self._lock:
            if not record.deferred:
                return
            self._books.change(record, deferred=False)
            self._settle(record)

    def require(
        self, record: Record, storage: torch.UntypedStorage, lo: int, hi: int, *, at_once: bool = False
    ) -> bool:
        """Makes sure that bytes [lo, hi) of ``storage`` are written or about to be.

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
        part = self._copy_of_part(record, storage, lo, hi) if record.part else None
        with self._lock:
            if record.pinned:
                return False
            self._records[record] = None
            missing = record.claim(lo, hi)
            if not missing:
                return False
            if part is not None:
                missing = record.leave(part, self.device.stream())
                self._books.leave(record, part.nbytes)
            record.epoch = self._epoch
            record.source = storage
            if not record.writes:
                missing[0].weight = record.nbytes
            self._books.charge(record)
            self._books.change(record, writes=len(missing))
            stream = self.device.stream()
            for piece in missing:
                piece.stream = stream
                self._outbox[piece] = record
                self._outbox_bytes += piece.weight
            self._notify()
        self._flush_if_due(at_once=at_once)
        return True

    def _copy_of_part(
        self, record: Record, storage: torch.UntypedStorage, lo: int, hi: int
    ) -> ByteRange | None:
        """A copy of the bytes that stay, the last ones; ``None`` if some are written already, or no room."""
        start = hi - record.part
        start += -(storage.data_ptr() + start) % self.store.alignment  # so that the others end with a block
        if record.spans or not lo < start < hi:
            return None
        try:
            return ByteRange.of(ByteRange(storage, start, hi - start).tensor().clone())
        except torch.OutOfMemoryError:  # then all of it travels
            return None

    def _flush_if_due(self, *, at_once: bool) -> None:
        """Writes what is more than a batch; all of it if the next activation may find no room."""
        if self._books.is_tight():
            self.flush()
            return
        held_back = 0 if at_once else self._held_back_bytes
        if self._outbox_bytes >= held_back + self._batch_bytes:
            self.flush(held_back)

    def end_scope(self, *, at_once: bool) -> None:
        """A scope has saved everything; without a window nothing is held back, nor if ``at_once``."""
        if at_once or not self._held_back_bytes:
            self.flush()

    def flush(self, held_back: int = 0) -> None:
        """Hands the writes that were collected to the store, oldest first.

        They go in batches, because a hook finds the caches full of the model's data: the first transfer
        of a batch pays for fetching the code of ten functions, the others find it there.

        Args:
            held_back: So many bytes, the latest, may stay behind.

        Raises:
            TransferError: It could not be written and is not allowed to stay in memory.
        """
        batch: list[tuple[Record, Piece]] = []
        with self._lock:
            for piece, record in list(self._outbox.items()):
                # What weighs nothing goes with the piece before it: together they hold their memory.
                if held_back and piece.weight and self._outbox_bytes <= held_back:
                    break
                batch.append((record, piece))
                self._take_out(piece)
        try:
            # Each write starts behind the work of the stream that produced its bytes.
            after = {stream: self.device.event(stream) for stream in {piece.stream for _, piece in batch}}
            for record, piece in batch:
                self._submit(record, piece, after[piece.stream])
        except BaseException:
            # An interrupt, or a full store: nobody may wait for writes that will never start.
            with self._lock:
                for record, _ in batch:
                    self._give_up_writes(record)
            raise

    def _take_out(self, piece: Piece) -> None:
        """The write of a piece no longer waits to be handed over."""
        piece.waiting = False
        if self._outbox.pop(piece, None) is not None:  # an interrupt may have kept it from getting there
            self._outbox_bytes -= piece.weight

    def _give_up_writes(self, record: Record) -> None:
        """Takes back what was collected of a record and never came to the store."""
        if lost := record.unfinished():
            self._take_back(record, lost)
            self._settle(record)

    def _submit(self, record: Record, piece: Piece, after: Event) -> None:
        storage = record.source
        if storage is None or not piece.pending:
            return
        source = ByteRange(storage, piece.lo, piece.nbytes)
        piece.address = source.address
        done = partial(self._written, record, piece)
        try:
            with self._reserving:
                piece.extent = self._reserve(source)
            piece.write = self.store.write(piece.extent, source, after, done=done)
        except (StoreError, TimeoutError) as error:
            with self._lock:
                self._unwritten(record, piece, error)
            self.raise_failures()

    def _reserve(self, source: ByteRange) -> Extent:
        try:
            return self.store.reserve(source.nbytes, source.address)
        except OutOfServiceError:
            if self.keep_when_full:
                raise
        self.store.resume()  # the policy wants an error, and only the drive can tell whether there is one
        return self.store.reserve(source.nbytes, source.address)

    def _written(self, record: Record, piece: Piece, future: IoFuture) -> None:
        """Runs on an I/O thread when a write has ended."""
        with self._lock:
            piece.pending = False
            piece.write = None
            if future.error is not None:
                self._unwritten(record, piece, future.error)
            else:
                self.stats.offloaded += piece.nbytes
                self._books.change(record, writes=-1)
                self._settle(record)
            self._notify()

    def _unwritten(self, record: Record, piece: Piece, error: BaseException) -> None:
        """A piece could not be written: its memory stays, and the policy says whether that is an error."""
        self._take_back(record, {piece})
        if record.released:
            self._settle(record)
            return
        newly_kept = self._books.keep(record)
        if self.keep_when_full and is_of_drive(error):
            self.stats.fallback_kept += record.nbytes if newly_kept else 0
            self.stats.full |= _is_full(error)
            return
        record.error = copy.copy(error)  # without the frames of callers, which hold the graph
        if record.epoch == self._epoch:
            self._failures.put(_transfer_error("write", record, error))

    def _tell_outages(self) -> None:
        """Names each drive that failed, once; where the policy wants an error, that names it."""
        for place, cause in self.store.take_outages():
            if self.keep_when_full and place not in self._told:
                self._told.add(place)
                warnings.warn(self._describe_outage(place, cause), RuntimeWarning, stacklevel=2)

    def _describe_outage(self, place: str, cause: str) -> str:
        budget = self._budget_bytes
        beyond = "" if budget is None else f", beyond budget.activation_bytes ({budget} bytes) if it must"
        return (
            f"a drive failed and is left alone: {place}: {cause}. what was meant for it goes to other drives "
            f"or stays in memory{beyond}; it is tried again after 1 s, 2 s, 4 s and so on. check the drive "
            "and the system log, or choose another directory under store.directories; on_full: error makes "
            "this an error. the run log counts drives_out_of_service and fallback_kept_bytes"
        )

    def _take_back(self, record: Record, pieces: set[Piece]) -> None:
        """Pieces that will never be written: their memory stays until the last handle is gone."""
        for piece in pieces:
            piece.write = None
            piece.pending = False
            if piece.waiting:
                self._take_out(piece)
            self._give_back(piece)
        record.discard(pieces)
        if record.copied:
            self._books.leave(record, 0)
        self._books.change(record, writes=-len(pieces), pinned=True)
        self._notify()

    def _give_back(self, piece: Piece) -> None:
        """Gives back an extent that no transfer uses; :meth:`repair` ends what an interrupt cuts short."""
        extent = piece.extent
        if extent is not None:
            self._giving_back, piece.extent = extent, None
            self.store.release(extent)
            self._giving_back = None

    def _settle(self, record: Record) -> None:
        """Frees memory, or extents, that no transfer and no handle needs any more."""
        if record.writes or record.deferred:
            return
        if record.released:
            self._release_extents(record)
        elif record.pinned or record.source is None:
            return
        record.source = None
        self._books.uncharge(record)
        if record.released:
            self._records.pop(record, None)

    # ---- from unpack -----------------------------------------------------------------------------

    def fetch(self, handle: Handle) -> tuple[torch.UntypedStorage, int]:
        """The bytes of a handle: from memory if they are still there, from the store otherwise.

        Returns:
            A storage and a shift in bytes: byte b of the original storage is byte b + shift of it.

        Raises:
            TransferError: The bytes could not be written or read.
        """
        if self._inert:
            raise SessionError(
                f"{handle.record.key} was saved before this process was forked; only the parent can go "
                "backward through that graph, not a forked child"
            )
        record = handle.record
        with self._lock:
            memory = self._forward(record, handle)
            if memory is not None:
                return memory, 0
            span = record.span_over(handle.lo, handle.hi)
            if span is None:
                raise _transfer_error("keep", record, record.error)
            buffer = span.restored()
            if buffer is None:
                buffer = self._start_read(span)
            shift, reads = span.shift, span.reads
            self._prefetched.pop(span, None)  # another thread that needs room must not take it away
        self._await(record, span, reads)
        if record.copied:
            self._complete(span, buffer)
        if (stream := self.device.stream()) != span.stream:
            self.device.use(ByteRange(buffer, 0, buffer.nbytes()), stream)
        with self._lock:
            self._unpacked(handle, span)
        return buffer, shift

    def is_lost(self, handle: Handle) -> bool:
        """Whether bytes were written, are not in memory, and no read that fills a buffer is under way."""
        with self._lock:
            span = handle.record.span_over(handle.lo, handle.hi)
            return span is not None and span.restored() is None

    def can_be(self, handle: Handle, storage: torch.UntypedStorage) -> bool:
        """Whether bytes that were computed again may be those that a handle needs, by their checksums.

        Args:
            handle: What needs them.
            storage: All bytes of the record, at the place that they had in its storage.
        """
        self.device.event().synchronize()
        with self._lock:
            span = handle.record.span_over(handle.lo, handle.hi)
            pieces = span.travelled() if span is not None else []
        made = ((_extent_of(piece), ByteRange(storage, piece.lo, piece.nbytes)) for piece in pieces)
        return all(self.store.holds(extent, source) is not False for extent, source in made)

    def replace(
        self, handle: Handle, storage: torch.UntypedStorage, error: TransferError
    ) -> tuple[torch.UntypedStorage, int]:
        """Takes bytes that were computed again in place of those that a read did not give.

        Args:
            handle: What needs them.
            storage: All bytes of the record, at the place that they had in its storage.
            error: Of the read, for the warning.

        Returns:
            As :meth:`fetch`.
        """
        record = handle.record
        self.device.event().synchronize()  # as bytes that were read, these are there for every stream
        with self._lock:
            span = record.span_over(handle.lo, handle.hi)
            if span is None:
                raise AssertionError(f"{record.key} has no bytes to be replaced")
            span.restores_into(ByteRange(storage, span.lo, span.nbytes), [], self.device.stream())
            self.stats.rescued += span.nbytes
            self._unpacked(handle, span)
        self._tell_rescue(record, span, error)
        return storage, span.shift

    def _tell_rescue(self, record: Record, span: Span, error: TransferError) -> None:
        """Names a drive that lost something, once."""
        place = self.store.place(_extent_of(span.travelled()[0]))
        if place in self._rescued_from:
            return
        self._rescued_from.add(place)
        warnings.warn(
            f"an activation was lost and made again: {place} did not give back {record.nbytes} bytes of "
            f"{record.key} ({error.__cause__}). the forward of the layer was repeated, so training goes on "
            "with the same bits, but slower; check the drive with its own tools. the run log counts "
            "rescued_bytes",
            RuntimeWarning,
            stacklevel=2,
        )

    def _complete(self, span: Span, buffer: torch.UntypedStorage) -> None:
        """Puts what stayed in memory beside what was read; the calling thread's stream may then use both."""
        stream = self.device.stream()
        if span.completed is not None:
            filled_on, filled = span.completed
            if filled_on != stream:
                filled.wait(stream)
            return
        for piece in span.pieces:
            if piece.copy is not None:
                if stream != piece.stream:
                    self.device.use(piece.copy, stream)
                room = ByteRange(buffer, piece.lo + span.shift, piece.nbytes)
                room.tensor().copy_(piece.copy.tensor())
        span.completed = stream, self.device.event()

    def _forward(self, record: Record, handle: Handle) -> torch.UntypedStorage | None:
        """The original memory of a record, if it is alive; then what was still to be written is not."""
        memory = record.memory()
        if memory is None:
            return None
        if not handle.read:
            if record.source is None and not record.forwarded:
                self.stats.held += record.nbytes
                record.held = True
            record.forwarded = True
            self.stats.forwarded += handle.hi - handle.lo
            self._mark_read(record, handle)
        if not record.unread and record.writes:
            self._cancel_writes(record)
            if record.pinned:
                self._books.keep(record)
        return memory

    def _cancel_writes(self, record: Record) -> None:
        """Takes back the writes that have not started; the memory then stays until the handles are gone."""
        cancelled = {
            piece
            for span in record.spans
            for piece in span.pieces
            if piece.waiting or (piece.write is not None and piece.write.cancel())
        }
        if cancelled:
            self._take_back(record, cancelled)

    def _start_read(self, span: Span) -> torch.UntypedStorage:
        """Submits the reads of a span into a new buffer. Called on the training thread, under the lock."""
        pieces = span.travelled()
        room = aligned_range(span.nbytes, span.address, self.store.alignment, self.device)
        after = self.device.event()
        reads: list[IoFuture] = []
        try:
            for piece in pieces:
                reads.append(self._read(span, piece, room, after))  # noqa: PERF401 - known if the next raises
            span.restores_into(room, reads, self.device.stream())
        except BaseException:
            # The buffer must not be taken for one that holds the bytes, and no read may be forgotten.
            for read in reads:
                if not read.cancel():
                    _has_ended(read, self._patience.limit)
            raise
        self.stats.read += sum(piece.nbytes for piece in pieces)
        return room.storage

    def _read(self, span: Span, piece: Piece, room: ByteRange, after: Event) -> IoFuture:
        alone = len(span.pieces) == 1
        target = room if alone else room.part(piece.lo - span.lo, piece.nbytes)
        # Next to a neighbour in the same buffer the store must not touch the padding.
        return self.store.read(_extent_of(piece), target, after, padded=alone)

    def _await(self, record: Record, span: Span, reads: list[IoFuture]) -> None:
        """Waits for the reads of a span; the time is a stall."""
        if not reads:
            return
        mark = self.device.mark() if self.marks_stalls and not span.arrived() else None
        started = time.perf_counter()
        try:
            for number, piece in enumerate(span.travelled()):
                self._await_read(record, span, reads, number, piece)
        except TransferError:  # nothing has moved for too long
            self.store.suspend(_extent_of(piece), self._patience.exhausted())
            raise
        except StoreError as error:
            with self._lock:
                self._forget_failed(span)
            if is_of_drive(error):  # it did not give back what it took
                self.store.suspend(_extent_of(piece), error)
            raise _transfer_error("read", record, error, self._where(piece)) from error
        finally:
            self.stats.stalled(started, time.perf_counter())
            if mark is not None:
                self.stats.marked_stalls.append((mark, self.device.mark()))

    def _await_read(
        self, record: Record, span: Span, reads: list[IoFuture], number: int, piece: Piece
    ) -> None:
        """Waits for one read, and tries again where that may help.

        Raises:
            StoreError: It failed for good.
        """
        started, mismatched = time.perf_counter(), False
        for pause in (*READ_AGAIN, None):
            spent, read = time.perf_counter() - started, reads[number]
            self._await_transfer(read, "read", record, piece, spent=spent)
            if pause is None or not _may_pass(read.error, mismatched=mismatched):
                break
            mismatched = isinstance(read.error, ChecksumError)
            if not self._patience.allows(time.perf_counter() - started + pause):
                break
            _pause(pause)
            self._read_again(span, reads, number, piece)
        reads[number].wait()

    def _read_again(self, span: Span, reads: list[IoFuture], number: int, piece: Piece) -> None:
        """Submits a read that failed once more, into the same buffer."""
        with self._lock:
            # Another thread that waits for the same bytes may have done so, or given them up.
            if reads[number].error is None or span.reads is not reads or span.buffer is None:
                return
            room = ByteRange(span.buffer, span.lo + span.shift, span.nbytes)
            reads[number] = self._read(span, piece, room, self.device.event())
            self.stats.reread += piece.nbytes

    def _where(self, piece: Piece) -> str:
        extent = _extent_of(piece)
        return f" from {self.store.place(extent)}, offset {extent.offset}"

    def _forget_failed(self, span: Span) -> None:
        """Gives back the buffer of a span that could not be read, unless a read still fills it."""
        if span.arrived():
            self._forget_prefetch(span)
            span.forget()

    def _unpacked(self, handle: Handle, span: Span) -> None:
        record = handle.record
        span.reads = []
        self._forget_prefetch(span)
        if not handle.read:
            self._mark_read(record, handle)
        self._loosen_when_read(record)

    def _mark_read(self, record: Record, handle: Handle) -> None:
        handle.mark_read()
        if not record.unread and record.pinned:
            self._books.keep(record)

    def _loosen_when_read(self, record: Record) -> None:
        """Every live handle was unpacked once: from now on only autograd keeps restored data alive."""
        if not record.unread:
            for span in record.spans:
                if not span.reads:
                    span.loosen()

    # ---- ahead of unpack -------------------------------------------------------------------------

    def prefetch(self, record: Record, *, across_forward: bool = False) -> bool:
        """Starts reading ``record`` if it is in the store and the window has room.

        A record that is still in memory is about to be used there: writes of it that have not started
        are taken back.

        Args:
            record: What backward is going to use.
            across_forward: A forward pass comes before that, which will need most of the window: only a part
                of it may be filled, and writes go on.

        Returns:
            Whether the next record may be tried: ``False`` means that the window is full.

        Raises:
            TransferError: To make room, something was written that the store had no room for.
        """
        if self._read_ahead(record, across_forward=across_forward):
            return True
        if self._outbox and not across_forward:
            self.flush()  # it is needed later than this record, or it would have been taken out
        return False

    def _read_ahead(self, record: Record, *, across_forward: bool) -> bool:
        with self._lock:
            if record.released or not record.unread:
                return True
            if record.memory() is not None:
                if across_forward and not record.pinned:
                    return False  # it may have to be read after all
                if record.source is not None and record.writes:
                    self._cancel_writes(record)
                return True
            for span in record.spans:
                if span.restored() is not None:
                    continue
                if not self._books.may_be_read_ahead(span.nbytes, across_forward=across_forward):
                    return False
                self._start_read(span)
                self._prefetched[span] = record
                self._books.charge_span(span)
            return True

    def _forget_prefetch(self, span: Span) -> None:
        """A span that was read ahead is in use, or will not be."""
        self._prefetched.pop(span, None)
        if span.charged:
            self._books.uncharge_span(span)

    def _give_up_farthest(self) -> bool:
        """Drops the prefetched span that is needed last and whose read is not running."""
        for span in reversed(self._prefetched):
            if span.arrived() or (len(span.reads) == 1 and span.reads[0].cancel()):
                del self._prefetched[span]
                span.forget()
                self.stats.given_up += self._books.uncharge_span(span)
                return True
        return False

    # ---- ends ------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """:meth:`drain`, but only when it is worth it; for the hot path.

        Handles of records that hold memory until the last of them is gone are never put off.
        """
        if self._books.settled or len(self._dropped) >= DROPS_AT_ONCE:
            self.drain()

    def drain(self) -> None:
        """Takes note of the handles that autograd has dropped."""
        if self._inert or not self._dropped:
            return
        with self._lock:
            while self._dropped:
                # It leaves the queue last: what an interrupt cuts short is done again.
                self._take_note(self._dropped[0])
                self._dropped.popleft()

    def _take_note(self, drop: Drop) -> None:
        record = drop.record
        record.forget_drop(drop)
        if record.drops:
            self._loosen_when_read(record)
        else:
            self._release(record)

    def _release(self, record: Record) -> None:
        """The last handle is gone: nothing will ask for these bytes again. To do it twice does no harm."""
        record.released = True
        self._books.change(record, deferred=False)
        for span in record.spans:
            self._forget_prefetch(span)
        if record.writes:
            self._cancel_writes(record)
        self._books.unsettle(record)
        if record.copied:
            self._books.leave(record, 0)
        self._settle(record)

    def _release_extents(self, record: Record) -> None:
        for span in record.spans:
            pieces = span.travelled()
            reads: Iterable[IoFuture | None] = span.reads or (None,) * len(pieces)
            for piece, read in zip(pieces, reads, strict=True):
                if read is None or read.done() or read.cancel():
                    self._give_back(piece)
                else:
                    # The read still fills its buffer from these blocks; the store keeps the buffer alive.
                    self._being_read[piece] = _extent_of(piece)
                    read.add_done_callback(partial(self._release_after, piece))
            span.forget()
        record.spans = []

    def _release_after(self, piece: Piece, _: IoFuture) -> None:
        """Gives back an extent on an I/O thread; once, however often it was asked for."""
        extent, piece.extent = piece.extent, None
        if extent is not None:
            self.store.release(extent)
        self._being_read.pop(piece, None)

    def protect(self, storage: torch.UntypedStorage, record: Record) -> None:
        """Called before somebody resizes ``storage``: no write may read its memory any more.

        The record keeps the same storage object, whose owner is going to fill it again.
        """
        with self._lock:
            if record.released or record.memory() is None:
                return
            self._cancel_writes(record)
            record.source = storage
            if not self._books.keep(record) and not record.pinned:
                self._books.settle(record)
            self._books.change(record, pinned=True)
            running = [(piece, piece.write) for piece in record.pieces() if piece.write is not None]
        for piece, write in running:
            try:
                self._await_transfer(write, "write", record, piece)
            except TransferError:
                self.store.suspend(_extent_of(piece), self._patience.exhausted())
                raise

    def quiesce(self) -> None:
        """Waits until every write has ended or was taken back, and accounts for dropped handles.

        Raises:
            TransferError: A transfer failed.
        """
        self.drain()
        while self._is_departing():
            pass
        self.raise_failures()

    def _is_departing(self) -> bool:
        """Waits for one change if anything is to be written; whether there was."""
        self.flush()  # also what another thread saved meanwhile
        with self._lock:
            if self._outbox or not self._books.departing:
                return bool(self._outbox)
            change = self._next_change()
        self._wait(change)
        return True

    def _next_change(self) -> LockType:
        """A lock that is let go of at the next change of the books; the lock of the books is held.

        No condition variable: an interrupt in its Python code may leave it without the lock that the caller
        believes to hold.
        """
        change = allocate_lock()
        change.acquire()
        self._waiters.append(change)
        return change

    def _wait(self, change: LockType) -> None:
        """Waits for a change that :meth:`_next_change` told of; no lock is held."""
        try:
            self._patience.wait(partial(_is_free, change), self._describe_writes)
        except TransferError:
            with self._lock:
                self._give_up_hanging()
            raise

    def _give_up_hanging(self) -> None:
        """Nothing was written for too long: what is under way stays in memory, its drives are left alone.

        A write only reads its memory. Should it end one day, that changes nothing any more.
        """
        for record in list(self._records):
            if not any(map(_is_under_way, record.pieces())):
                continue
            self._cancel_writes(record)
            for piece in filter(_is_under_way, record.pieces()):
                self.store.suspend(_extent_of(piece), self._patience.exhausted())
            self._books.change(record, pinned=True)
            if self._books.keep(record):
                self.stats.fallback_kept += record.nbytes

    def _await_transfer(
        self, transfer: IoFuture, what: str, record: Record, piece: Piece, *, spent: float = 0.0
    ) -> None:
        """Waits until a transfer has ended, failed or not."""
        if not transfer.done():
            self._patience.wait(
                partial(_has_ended, transfer),
                lambda: self._describe(what, record, piece, piece.nbytes),
                spent=spent,
            )

    def _describe_writes(self) -> str:
        """What is being written, by its oldest piece."""
        with self._lock:
            running = [
                (record, piece)
                for record in self._books.records()
                for piece in record.pieces()
                if piece.write is not None
            ]
        if not running:
            return "no write is under way"
        record, piece = running[0]
        return self._describe("write", record, piece, sum(piece.nbytes for _, piece in running))

    def _describe(self, what: str, record: Record, piece: Piece, nbytes: int) -> str:
        place = self.store.place(piece.extent) if piece.extent is not None else "the store"
        return f"{nbytes} bytes wait to be {_PAST[what]}, first {record.key}, at {place}"

    def _notify(self) -> None:
        """Wakes the threads that wait for a change; the lock is held."""
        while self._waiters:
            self._waiters.pop().release()

    def abandon(self) -> None:
        """Gives a step up that failed: drops what was read ahead, and its other failures with it."""
        with self._lock:
            self._epoch += 1
            self._failures = SimpleQueue()
        self.repair()
        self.drain()
        self.give_up_prefetched()

    def give_up_prefetched(self) -> None:
        """Drops what was read ahead and not used in the step that is over."""
        with self._lock:
            while self._give_up_farthest():
                pass

    def repair(self) -> None:
        """After an interrupt, which may have struck between any two operations of the training thread.

        Writes that never came to the store are taken back, records that no handle needs are released, and the
        books are made anew from the others.
        """
        with self._lock:
            if self._giving_back is not None:
                with suppress(ValueError):  # it came to pass
                    self.store.release(self._giving_back)
                self._giving_back = None
            for piece in list(self._outbox):
                piece.waiting = False
            self._outbox.clear()
            self._outbox_bytes = 0
            for record in list(self._records):
                self._give_up_writes(record)
                if not record.drops:
                    self._release(record)
            self._give_back_unknown()
            self._books.recount(self._records)
            self._notify()

    def _give_back_unknown(self) -> None:
        """Gives back the extents that were reserved, and of which an interrupt let no piece know.

        While another thread reserves one it cannot be told from those; the next repair finds them.
        """
        if not self._reserving.acquire(blocking=False):
            return
        try:
            known = {piece.extent for record in self._records for piece in record.pieces()}
            known.update(self._being_read.values())  # before the store is asked, or they may be back by then
            for extent in self.store.leased():
                if extent not in known:
                    self.store.release(extent)
        finally:
            self._reserving.release()

    def raise_failures(self) -> None:
        """Raises the error of a transfer that failed on an I/O thread, if there is one.

        Raises:
            TransferError: Names the layer, the cause and the remedy.
        """
        self._tell_outages()
        try:
            error = self._failures.get_nowait()
        except Empty:
            return
        raise error

    def become_inert(self) -> None:
        """In a forked child: the lock may be held for ever, and threads and descriptors are the parent's."""
        self._inert = True

    def reset_stats(self) -> TransferStats:
        """Starts new :attr:`stats` and returns the old ones."""
        with self._lock:
            return self._books.reset_stats()


def _is_under_way(piece: Piece) -> bool:
    """Whether its write is queued or running; one that has ended waits for its callback at most."""
    return piece.write is not None and not piece.write.done()


def _extent_of(piece: Piece) -> Extent:
    if piece.extent is None:
        raise AssertionError("a piece without an extent was asked for")
    return piece.extent


def _may_pass(error: BaseException | None, *, mismatched: bool) -> bool:
    """Whether another read may go well; bits that flip on the way rarely do twice in turn."""
    if isinstance(error, ChecksumError):
        return not mismatched
    return isinstance(error, StoreError) and error.errno in _MAY_PASS


def _is_full(error: BaseException | None) -> bool:
    """Whether there was no room; a drive that is out of service may have some."""
    return isinstance(error, StoreFullError) and not isinstance(error, OutOfServiceError)


@interrupts.waits
def _has_ended(transfer: IoFuture, timeout: float | None) -> bool:
    """Waits for a transfer; one that failed has ended too."""
    try:
        transfer.wait(timeout)
    except TimeoutError:
        return False
    except StoreError:
        return True
    return True


@interrupts.waits
def _pause(seconds: float) -> None:
    time.sleep(seconds)


@interrupts.waits
def _is_free(lock: LockType, timeout: float | None) -> bool:
    """Waits until a lock is let go of."""
    return lock.acquire(timeout=-1 if timeout is None else timeout)


_FULL = "free space or choose another directory under store.directories, or set on_full: keep"
_PAST = {"read": "read", "write": "written"}
_REMEDIES = {
    "write": "check the drive and the system log, choose another directory under store.directories, or set "
    "on_full: keep",
    "read": "check the drive with its own tools; training cannot go on without these bytes",
    "keep": "an earlier transfer of this activation failed; see the first error",
}


def _transfer_error(what: str, record: Record, cause: BaseException | None, where: str = "") -> TransferError:
    remedy = _FULL if _is_full(cause) else _REMEDIES[what]
    if isinstance(cause, TimeoutError):
        remedy = HUNG
    message = f"could not {what} {record.nbytes} bytes of {record.key}{where}: {cause}; {remedy}"
    error = TransferError(message)
    error.__cause__ = cause
    return error
