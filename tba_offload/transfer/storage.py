"""The life of one offloaded storage: which bytes backward needs, where they are, which handles want them.

A :class:`Record` stands for one storage at one version. Saved tensors refer to it through a :class:`Handle`.
The bytes that those tensors need form :class:`Span` objects (what is restored into one buffer); each span was
written as one or more :class:`Piece` objects (what travels as one extent).

::

    waits ──► saved ──► writing ──► stored ──► reading ──► restored ──► released
      │         │          │                                               ▲
      │         └──────────┴──► kept: a write was taken back or failed ────┤
      └──► recalled: backward came for it before its batch was due ────────┘

Until its batch is due a record has one handle, which keeps the saved tensor itself, and nothing else: if
backward comes first, there is nothing to undo.

Only the objects of this file change their fields; other files read them and call the transitions. Everything
is plain bookkeeping: the lock that protects it belongs to the offloader. A transition that an interrupt cuts
short may be done again.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections import deque
from typing import TYPE_CHECKING

from tba_offload.device.ranges import blank
from tba_offload.store.extents import BLOCK, round_up

if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Hashable, Iterable, Iterator

    import torch

    from tba_offload.device.ranges import ByteRange
    from tba_offload.store.base import Extent, IoFuture


class Piece:
    """Bytes [lo, hi) of a storage that travel as one extent.

    A piece that was handed to the store is never extended: what a later view needs beyond it becomes a
    piece of its own.

    Attributes:
        lo: First byte.
        hi: End of the last one.
        nbytes: Length in bytes.
        address: Where it lay; bytes are restored at the same place modulo the alignment.
        stream: Of the device, on which the bytes were produced.
        weight: Bytes of memory that wait with it; the first piece of a record has them all.
        pending: Neither written nor given up.
        extent: Where it is in the store; ``None`` before that, and afterwards.
        write: Its transfer while that is queued or running.
    """

    __slots__ = (
        "address",
        "extent",
        "hi",
        "lo",
        "nbytes",
        "pending",
        "stream",
        "weight",
        "write",
    )

    def __init__(self, lo: int, hi: int, stream: object, weight: int) -> None:
        self.lo = lo
        self.hi = hi
        self.nbytes = hi - lo
        self.address = 0
        self.stream = stream
        self.weight = weight
        self.pending = True
        self.extent: Extent | None = None
        self.write: IoFuture | None = None

    def is_unfinished(self) -> bool:
        """Whether it is to be written and never will be, or was taken back and not forgotten."""
        if self.pending:
            return self.write is None or self.write.cancelled()
        return self.extent is None

    def is_under_way(self) -> bool:
        """Whether its write is queued or running; one that has ended waits for its callback at most."""
        return self.write is not None and not self.write.done()

    def write_ended(self) -> None:
        """Its transfer is over, failed or not."""
        self.pending = False
        self.write = None

    def take_extent(self) -> Extent | None:
        """Give up its place in the store, once."""
        extent, self.extent = self.extent, None
        return extent


def reserved(pieces: Iterable[Piece], sources: Iterable[ByteRange], extents: Iterable[Extent]) -> None:
    """Record that the first of several pieces have a place in the store from now on."""
    for piece, source, extent in zip(pieces, sources, extents, strict=False):
        piece.address = source.address
        piece.extent = extent


def handed_over(pieces: Iterable[Piece], writes: Iterable[IoFuture]) -> None:
    """Record that the writes of the first of several pieces are queued from now on.

    Some may have ended already.
    """
    for piece, write in zip(pieces, writes, strict=False):
        if piece.pending:
            piece.write = write


_NO_READS: list[IoFuture] = []
"""The reads of every span that has none; nothing is ever added to it."""


class Span:
    """Bytes [lo, hi) of a storage without a gap, restored into one buffer that all views of it share.

    Attributes:
        pieces: In order, without a gap.
        lo: First byte.
        hi: End of the last one.
        nbytes: Length in bytes.
        buffer: What holds the bytes, or is about to; ``None`` while they are only in the store.
        shift: Byte b of the original storage is byte b + shift of the buffer.
        stream: Of the device, on which the buffer was allocated.
        reads: The transfers that fill the buffer, one a piece; none once the bytes were used.
        weak: What is left of the buffer when only backward may keep it.
    """

    __slots__ = ("buffer", "hi", "lo", "nbytes", "pieces", "reads", "shift", "stream", "weak")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.lo = pieces[0].lo
        self.hi = pieces[-1].hi
        self.nbytes = self.hi - self.lo
        self.buffer: torch.UntypedStorage | None = None
        self.shift = 0
        self.stream: object = None
        self.reads = _NO_READS
        self.weak: weakref.ref[torch.UntypedStorage] | None = None

    def restored(self) -> torch.UntypedStorage | None:
        """Return the buffer that holds, or is about to hold, the bytes, if one is alive."""
        if self.buffer is not None:
            return self.buffer
        return self.weak() if self.weak is not None else None

    def restores_into(self, room: ByteRange, reads: list[IoFuture], stream: object) -> None:
        """Record that the bytes are on their way into ``room``, allocated on ``stream``."""
        self.stream = stream
        self.shift = room.start - self.lo
        self.buffer = room.storage
        self.reads = reads

    def arrived(self) -> bool:
        """Whether no read of this span is under way."""
        return all(read.done() for read in self.reads)

    def has_come(self, reads: list[IoFuture]) -> bool:
        """Whether reads of this span have gone well, so that there is nothing to wait for."""
        for read in reads:  # noqa: SIM110 - on the hot path, where a generator costs as much as all of it
            if read.error is not None or not read.is_done:
                return False
        return True

    def cut(self, piece: Piece, parts: list[Piece]) -> None:
        """Record that a piece of it, if it is one, travels as these."""
        if piece in self.pieces:
            at = self.pieces.index(piece)
            self.pieces[at : at + 1] = parts

    def forget(self) -> None:
        """Drop the buffer; the bytes have to be read again."""
        self.buffer = self.weak = None
        self.reads = _NO_READS


class State(enum.Enum):
    """What becomes of the memory of a record."""

    WAITS = "is the saved tensor's own until its batch is due"
    TRAVELS = "is freed when its writes have ended"
    UNDECIDED = "views wait for the end of their scope before it is decided what to write"
    STAYS = "stays until the last handle is gone: a write was taken back, or its use is near; still in flight"
    KEPT = "stays likewise, and counts outside the window: it is in use, or nothing else will free it"
    RELEASED = "the last handle is gone; extents go back as soon as no transfer uses them"


class Record:
    """One storage at one version, offloaded.

    Attributes:
        key: Which activation it is; its text names layer and micro-batch in messages.
        nbytes: Size of the whole storage in bytes; what its memory costs while it is in flight.
        source: The storage itself while its memory must stay: until every byte needed is written.
        origin: Weak reference to the same storage: while something else keeps it, it is forwarded.
        spans: What was or is being written.
        handles: How many autograd holds.
        unread: Live handles that were not unpacked yet.
        writes: Writes that are queued or running.
        state: What becomes of the memory.
        held: Whether the memory was there at its first use although nothing here held it: offloading freed
            nothing. ``None`` before it was handed over.
        error: Why it was not written, where that is an error.
        waits: Of its one handle, while it waits for its batch.
    """

    __slots__ = (
        "error",
        "handles",
        "held",
        "key",
        "nbytes",
        "origin",
        "source",
        "spans",
        "state",
        "unread",
        "waits",
        "writes",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, key: Hashable) -> None:
        self.key = key
        self.nbytes = storage.nbytes()
        self.source: torch.UntypedStorage | None = None
        self.origin = weakref.ref(storage)
        self.spans: list[Span] = []
        self.handles = 0
        self.unread = 0
        self.writes = 0
        self.state = State.TRAVELS
        self.held: bool | None = None
        self.error: BaseException | None = None
        self.waits: Drop | None = None

    # ---- where the bytes are ---------------------------------------------------------------------

    def memory(self) -> torch.UntypedStorage | None:
        """Return the original storage while it is alive with its bytes in it."""
        storage = self.source if self.source is not None else self.origin()
        # A storage that was resized to nothing is alive but empty.
        return storage if storage is not None and storage.nbytes() >= self.nbytes else None

    def pieces(self) -> Iterator[Piece]:
        """All pieces of all spans."""
        for span in self.spans:
            yield from span.pieces

    def unrestored(self) -> list[Span]:
        """Return the spans of which no buffer is alive."""
        spans = []
        for span in self.spans:
            if span.buffer is None and (span.weak is None or span.weak() is None):
                spans.append(span)  # noqa: PERF401 - a comprehension is a call more, on the hot path
        return spans

    def span_over(self, lo: int, hi: int) -> Span | None:
        """Return the span that covers bytes [lo, hi), if there is one."""
        for span in self.spans:
            if span.lo <= lo and hi <= span.hi:
                return span
        return None

    # ---- saved, written or kept ------------------------------------------------------------------

    def join(self) -> Piece | None:
        """Its batch is due: from now on the record has the memory, and the handle does not.

        Returns:
            What is to be written; ``None`` if the handle is gone.
        """
        drop, self.waits = self.waits, None
        handle = drop() if drop is not None else None
        if handle is None or handle.tensor is None:
            if self.state is State.WAITS:
                self.state = State.TRAVELS  # another handle may come before the end of this one is noted
            return None
        tensor = handle.tensor
        self.source = tensor.untyped_storage()
        self.state = State.TRAVELS
        handle.tensor = None
        # The saved tensor's version is still to be seen at this one, its memory must not be kept by it.
        tensor.data = blank(tensor.dtype, tensor.device)
        piece = Piece(handle.lo, handle.hi, handle.stream, self.nbytes)
        self.spans = [Span([piece])]
        self.writes = 1
        return piece

    def defer(self, storage: torch.UntypedStorage) -> None:
        """Its memory is held: what to write of it is not known yet."""
        if self.state is State.TRAVELS:
            self.state = State.UNDECIDED
            self.source = storage

    def decide(self) -> None:
        """Record that what had to be written was saved meanwhile."""
        if self.state is State.UNDECIDED:
            self.state = State.TRAVELS

    def save(self, storage: torch.UntypedStorage, lo: int, hi: int, stream: object) -> list[Piece]:
        """Bytes [lo, hi) of ``storage``, which ``stream`` produced, are to be written.

        Returns:
            The pieces that no earlier save covers; none if the memory stays.
        """
        if self.state is State.STAYS or self.state is State.KEPT:
            return []
        if not self.spans:
            piece = Piece(lo, hi, stream, 0 if self.writes else self.nbytes)
            missing = [piece]
            self.spans = [Span(missing)]
        elif not (missing := self._claim(lo, hi, stream)):
            return []
        self.writes += len(missing)
        self.source = storage
        return missing

    def _claim(self, lo: int, hi: int, stream: object) -> list[Piece]:
        """Make sure that one span covers [lo, hi); return the new pieces that have to be written.

        Spans that the range overlaps are merged with it, because a view must lie in one buffer.
        """
        if self.span_over(lo, hi) is not None:
            return []
        touched = sorted(
            (span for span in self.spans if span.lo < hi and lo < span.hi), key=lambda span: span.lo
        )
        missing: list[Piece] = []
        for a, b in _gaps(touched, lo, hi):
            missing.append(Piece(a, b, stream, 0 if self.writes or missing else self.nbytes))
        old = [piece for span in touched for piece in span.pieces]
        self.spans = [span for span in self.spans if span not in touched]
        self.spans.append(Span(sorted(old + missing, key=lambda piece: piece.lo)))
        return missing

    def written(self, piece: Piece) -> None:
        """Record that a piece is in the store."""
        piece.write_ended()
        self.writes -= 1

    def lose(self, pieces: set[Piece]) -> None:
        """Pieces will never be written: their memory stays until the last handle is gone.

        What remains of a span is split where they lay.
        """
        for piece in pieces:
            piece.write_ended()
        if len(self.spans) == 1 and pieces.issuperset(self.spans[0].pieces):
            self.spans = []
        else:
            kept = ([piece for piece in span.pieces if piece not in pieces] for span in self.spans)
            self.spans = [Span(run) for rest in kept for run in _runs(rest)]
        self.writes -= len(pieces)
        if self.state is not State.KEPT and self.state is not State.RELEASED:
            self.state = State.STAYS

    def stay(self) -> None:
        """Backward is near: its memory does not go when its writes end."""
        if self.state is State.TRAVELS:
            self.state = State.STAYS

    def failed(self, error: BaseException) -> None:
        """Record that it was not written, and that is an error."""
        self.error = copy.copy(error)  # without the frames of callers, which hold the graph

    def keep(self, storage: torch.UntypedStorage | None = None) -> bool:
        """Its memory stays, and no longer counts as in flight: backward uses it, or nothing will free it.

        Args:
            storage: The memory, if it is not held yet.

        Returns:
            Whether it counted as in flight until now.
        """
        was_in_flight = self.source is not None and self.state is not State.KEPT
        if self.state is State.RELEASED:
            self.source = None  # a write that hangs has it
            return was_in_flight
        if storage is not None:
            self.source = storage
        self.state = State.STAYS if self.source is None else State.KEPT
        return was_in_flight

    def free(self) -> None:
        """Its memory may go: every byte that is needed is in the store, or none is needed."""
        self.source = None

    # ---- used by backward ------------------------------------------------------------------------

    def hand_out(self, handle: Handle) -> tuple[torch.UntypedStorage | None, int, Span | None]:
        """Give backward the bytes of a handle if they are in memory: it was unpacked.

        Returns:
            A storage, a shift in bytes, and the span if the storage is its buffer and not the original one.
            Without a storage the bytes are only in the store, or their reads have not come, or failed; then
            without a span they are nowhere.
        """
        drop, span = handle.drop, None
        memory, shift = self.source if self.source is not None else self.origin(), 0
        if memory is not None and memory.nbytes() >= self.nbytes:
            if self.held is None and not drop.read:
                self.held = self.source is None
        else:
            for span in self.spans:
                if span.lo <= handle.lo and handle.hi <= span.hi:
                    break
            else:
                return None, 0, None
            memory, shift = span.buffer, span.shift
            if memory is None and span.weak is not None:
                memory = span.weak()
            if memory is None:
                return None, 0, span
            if span.reads:
                if not span.has_come(span.reads):
                    return None, 0, span
                span.reads = _NO_READS
        if not drop.read:
            # No call between the two, so no interrupt either.
            drop.read = True
            self.unread -= 1
        if not self.unread:
            self.all_read()
        return memory, shift, span

    def all_read(self) -> None:
        """Every live handle was unpacked once: from now on only autograd keeps restored data alive."""
        if self.state is State.STAYS:
            self.keep()
        for span in self.spans:
            if span.buffer is not None and not span.reads:
                span.weak = weakref.ref(span.buffer)
                span.buffer = None

    # ---- released --------------------------------------------------------------------------------

    def release(self) -> list[Extent]:
        """Return the extents to release: the last handle is gone, and nothing asks for these bytes again.

        Returns:
            The extents that go back; none while a write still reads the memory.
        """
        if self.state is State.KEPT:
            self.source = None  # a write that runs has it, and counts no more
        self.state = State.RELEASED
        self.waits = None
        extents: list[Extent] = []
        if self.writes:
            return extents
        for span in self.spans:
            for piece in span.pieces:
                if piece.extent is not None:
                    extents.append(piece.extent)
                    piece.extent = None
        self.spans = []
        self.source = None
        return extents

    def recount(self) -> None:
        """Count its writes anew: after an interrupt, and where one became several."""
        self.writes = sum(piece.pending for piece in self.pieces())


def split(record: Record, piece: Piece, most: int) -> list[Piece]:
    """Have a piece that was not handed to the store travel as several of about the same size.

    Args:
        record: What it is of.
        piece: The piece.
        most: Bytes of each at most.
    """
    count = -(-piece.nbytes // most)
    size = round_up(-(-piece.nbytes // count), BLOCK)
    parts = [
        Piece(lo, min(lo + size, piece.hi), piece.stream, piece.weight if lo == piece.lo else 0)
        for lo in range(piece.lo, piece.hi, size)
    ]
    for span in record.spans:
        span.cut(piece, parts)
    record.recount()
    return parts


class Drops:
    """The ends of handles, which are only noted when they come.

    The cyclic collector may end a handle while this very thread holds any lock, so nothing else happens then.

    Attributes:
        lock: Protects records while handles are made.
        queue: In the order in which they came.
        note: Appends to it; one object for all handles, as the cyclic collector looks at every object.
        awaited: Those that have not come. They are kept here, so that the cyclic collector, which may end a
            handle together with its record, still calls them back.
    """

    __slots__ = ("awaited", "lock", "note", "queue")

    def __init__(self, lock: LockType) -> None:
        self.lock = lock
        self.queue: deque[Drop] = deque()
        self.note = self.queue.append
        self.awaited: set[Drop] = set()


class Drop(weakref.ref["Handle"]):
    """Notes the end of a handle.

    Its callback is a function written in C, which appends it to a queue: the interpreter handles signals only
    between operations of Python code, so no interrupt can strike in it and be lost with the drop. The cyclic
    collector may run it inside any lock, too.

    Attributes:
        record: Of the handle.
        read: Whether the handle was unpacked.
    """

    __slots__ = ("read", "record")

    record: Record
    read: bool


def forget(drops: Drops, count: int) -> list[Record]:
    """Return the first handles of a queue are gone; to be told twice of one does no harm.

    Returns:
        The records that have no handle left, or of which every handle was read.
    """
    changed: dict[Record, None] = {}
    queue, awaited = drops.queue, drops.awaited
    for number in range(count):  # other threads, and the collector, append meanwhile
        drop = queue[number]
        record = drop.record
        if drop in awaited:
            # No call between these, so no interrupt either.
            if not drop.read:
                record.unread -= 1
            record.handles -= 1
            awaited.discard(drop)
        if not record.unread:
            changed[record] = None
    return list(changed)


class Handle:
    """What a saved tensor holds of its record: the range [lo, hi) of bytes that it needs.

    Args:
        record: The record.
        lo: First byte.
        hi: End of the last one.
        drops: Where its end is noted.
        is_use: Whether it stands for a use by backward, and not for a look at the bytes.
        tensor: Shares memory and version of the saved tensor, if that waits for its batch: then the record is
            new, and gets no other handle before :meth:`Record.join`.
        stream: Of the device, on which its bytes were produced.

    Attributes:
        drop: What is left of it when it is gone.
        tensor: As given, as long as it waits, and once it was recalled.
    """

    __slots__ = ("__weakref__", "_drops", "drop", "hi", "lo", "record", "stream", "tensor")

    def __init__(
        self,
        record: Record,
        lo: int,
        hi: int,
        drops: Drops,
        *,
        is_use: bool = True,
        tensor: torch.Tensor | None = None,
        stream: object = None,
    ) -> None:
        self.record = record
        self.lo = lo
        self.hi = hi
        self._drops = drops
        self.tensor = tensor
        self.stream = stream
        self.drop = drop = Drop(self, drops.note)
        drop.record = record
        drop.read = not is_use
        if tensor is not None:
            record.state = State.WAITS
            record.waits = drop
        with drops.lock:
            # No call between the two, so no interrupt either.
            record.unread += is_use
            record.handles += 1
            drops.awaited.add(drop)

    def recall(self) -> None:
        """Backward has come for it before its batch was due: its end means nothing any more."""
        record = self.record
        record.state = State.RELEASED
        record.waits = None
        record.handles = record.unread = 0
        self._drops.awaited.discard(self.drop)
        del self.drop

    def is_told(self, drops: Drops) -> bool:
        """Whether its end is noted there."""
        return self._drops is drops


def _gaps(spans: list[Span], lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [lo, hi) that sorted, disjoint spans leave uncovered."""
    for span in spans:
        if lo < span.lo:
            yield lo, span.lo
        lo = max(lo, span.hi)
    if lo < hi:
        yield lo, hi


def _runs(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into runs without a gap."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.lo):
        if run and run[-1].hi != piece.lo:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
