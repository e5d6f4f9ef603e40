"""The life of one offloaded storage: which bytes it needs, where they are, who still wants them.

A :class:`Record` stands for one storage at one version. Saved tensors refer to it through a
:class:`Handle`. The bytes that those tensors need form :class:`Span` objects (what is restored into one
buffer); each span was written as one or more :class:`Piece` objects (what travels as one extent).

Everything here is plain bookkeeping: the lock that protects it belongs to the offloader.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Hashable, Iterator

    import torch

    from tba_offload.device.ranges import ByteRange
    from tba_offload.store.base import Extent, IoFuture


class State(enum.Enum):
    """Where the bytes of a record are."""

    RESIDENT = "resident"
    WRITING = "writing"
    STORED = "stored"
    READING = "reading"


class Piece:
    """Bytes [lo, hi) of a storage that travel as one extent.

    A piece that was handed to the store is never extended: what a later view needs beyond it becomes a
    piece of its own.
    """

    __slots__ = ("address", "extent", "hi", "lo", "pending", "stream", "waiting", "weight", "write")

    def __init__(self, lo: int, hi: int) -> None:
        self.lo = lo
        self.hi = hi
        self.address = 0  # where it lay; bytes are restored at the same place modulo the alignment
        self.extent: Extent | None = None
        self.stream: object = None  # of the device, on which the bytes were produced
        self.waiting = True  # not handed to the store yet
        self.weight = 0  # bytes of memory that wait with it; the first piece of a record has them all
        self.pending = True  # neither written nor given up
        self.write: IoFuture | None = None

    def is_unfinished(self) -> bool:
        """Whether it is to be written and never will be, or was taken back and not forgotten."""
        if self.pending:
            return self.write is None or self.write.cancelled()
        return self.extent is None

    @property
    def nbytes(self) -> int:
        """Payload of the piece, bytes."""
        return self.hi - self.lo


class Span:
    """Bytes [lo, hi) of a storage without a gap, restored into one buffer that all views of it share."""

    __slots__ = ("buffer", "charged", "hi", "lo", "pieces", "reads", "shift", "stream", "weak")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces  # in order, without a gap
        self.lo = pieces[0].lo
        self.hi = pieces[-1].hi
        self.buffer: torch.UntypedStorage | None = None
        self.weak: weakref.ref[torch.UntypedStorage] | None = None
        self.shift = 0  # byte b of the original storage is byte b + shift of the buffer
        self.stream: object = None  # of the device, on which the buffer was allocated
        self.reads: list[IoFuture] = []
        self.charged = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the span covers."""
        return self.hi - self.lo

    @property
    def address(self) -> int:
        """Where the first byte lay when it was written."""
        return self.pieces[0].address

    def restored(self) -> torch.UntypedStorage | None:
        """The buffer that holds, or is about to hold, the bytes, if one is alive."""
        if self.buffer is not None:
            return self.buffer
        return self.weak() if self.weak is not None else None

    def restores_into(self, room: ByteRange, reads: list[IoFuture], stream: object) -> None:
        """The bytes are on their way into ``room``, allocated on ``stream``."""
        self.stream = stream
        self.shift = room.start - self.lo
        self.buffer = room.storage
        self.reads = reads

    def arrived(self) -> bool:
        """Whether no read of this span is under way."""
        return all(read.done() for read in self.reads)

    def loosen(self) -> None:
        """Keep the buffer only as long as somebody else does."""
        if self.buffer is not None:
            self.weak = weakref.ref(self.buffer)
            self.buffer = None

    def forget(self) -> None:
        """Drop the buffer; the bytes have to be read again."""
        self.buffer = self.weak = None
        self.reads = []


class Record:
    """One storage at one version, offloaded.

    Attributes:
        key: Which activation it is; its text names layer and micro-batch in messages.
        nbytes: Size of the whole storage in bytes; what its memory costs while it is in flight.
        source: The storage itself while its memory must stay: until every byte needed is written.
        origin: Weak reference to the same storage: while somebody else keeps it, it is forwarded.
        spans: What was or is being written.
        drops: Those of the handles that autograd holds.
        unread: Live handles that were not unpacked yet.
        writes: Writes that are queued or running.
        deferred: Views wait for the end of their scope before it is decided what to write.
        pinned: The memory stays until the last handle is gone: a write was given up or not possible.
        charged: Bytes of this record that count as in flight.
        settled: Bytes of it that count as kept in memory outside the window.
        released: The last handle is gone; extents go back as soon as no transfer uses them.
        forwarded: Some handle was served from memory without a read.
        held: The memory was alive at unpack although nobody but its owner kept it: offloading freed nothing.
    """

    __slots__ = (
        "charged",
        "deferred",
        "drops",
        "epoch",
        "error",
        "forwarded",
        "held",
        "key",
        "nbytes",
        "origin",
        "pinned",
        "released",
        "settled",
        "source",
        "spans",
        "unread",
        "version",
        "version_tensor",
        "writes",
    )  # fmt: skip

    def __init__(
        self,
        storage: torch.UntypedStorage,
        *,
        version_tensor: torch.Tensor,
        key: Hashable,
    ) -> None:
        self.key = key
        self.nbytes = storage.nbytes()
        self.source: torch.UntypedStorage | None = None
        self.origin = weakref.ref(storage)
        self.version_tensor = version_tensor
        self.version = version_tensor._version
        self.spans: list[Span] = []
        self.drops: set[Drop] = set()
        self.unread = 0
        self.writes = 0
        self.deferred = False
        self.pinned = False
        self.charged = 0
        self.settled = 0
        self.released = False
        self.forwarded = False
        self.held = False
        self.epoch = 0
        self.error: BaseException | None = None

    @property
    def state(self) -> State:
        """Where the bytes are now."""
        if self.writes:
            return State.WRITING
        if self.source is not None:
            return State.RESIDENT
        if any(not span.arrived() for span in self.spans):
            return State.READING
        resident = self.spans and all(span.restored() is not None for span in self.spans)
        return State.RESIDENT if resident else State.STORED

    def is_current(self) -> bool:
        """Whether the bytes that were recorded are still those of the storage."""
        return self.version_tensor._version == self.version and not self.released

    def pieces(self) -> Iterator[Piece]:
        """All pieces of all spans."""
        for span in self.spans:
            yield from span.pieces

    def forget_drop(self, drop: Drop) -> None:
        """A handle is gone; to be told twice of one does no harm."""
        if drop in self.drops:
            # No call between the two, so no interrupt either.
            if not drop.read:
                self.unread -= 1
            self.drops.discard(drop)

    def unfinished(self) -> set[Piece]:
        """Pieces that an interrupt kept from the store, or left half taken back."""
        return {piece for piece in self.pieces() if piece.is_unfinished()}

    def memory(self) -> torch.UntypedStorage | None:
        """The original storage while it is alive with its bytes in it."""
        storage = self.source if self.source is not None else self.origin()
        # A storage that was resized to nothing is alive but empty.
        return storage if storage is not None and storage.nbytes() >= self.nbytes else None

    def span_over(self, lo: int, hi: int) -> Span | None:
        """The span that covers bytes [lo, hi), if there is one."""
        for span in self.spans:
            if span.lo <= lo and hi <= span.hi:
                return span
        return None

    def claim(self, lo: int, hi: int) -> list[Piece]:
        """Makes sure that one span covers [lo, hi); returns the new pieces that have to be written.

        Spans that the range overlaps are merged with it, because a view must lie in one buffer.
        """
        if not self.spans:
            piece = Piece(lo, hi)
            self.spans = [Span([piece])]
            return [piece]
        if self.span_over(lo, hi) is not None:
            return []
        touched = sorted(
            (span for span in self.spans if span.lo < hi and lo < span.hi), key=lambda span: span.lo
        )
        missing = [Piece(a, b) for a, b in _gaps(touched, lo, hi)]
        old = [piece for span in touched for piece in span.pieces]
        self.spans = [span for span in self.spans if span not in touched]
        self.spans.append(Span(sorted(old + missing, key=lambda piece: piece.lo)))
        return missing

    def discard(self, pieces: set[Piece]) -> None:
        """Forgets pieces that were never written; what remains of a span is split where they lay."""
        if len(self.spans) == 1 and pieces.issuperset(self.spans[0].pieces):
            self.spans = []
            return
        kept = ([piece for piece in span.pieces if piece not in pieces] for span in self.spans)
        self.spans = [Span(run) for rest in kept for run in _runs(rest)]


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


class Handle:
    """What a saved tensor holds of its record: the range [lo, hi) of bytes that it needs."""

    __slots__ = ("__weakref__", "_drop", "_dropped", "hi", "lo", "record")

    def __init__(self, record: Record, lo: int, hi: int, dropped: deque[Drop]) -> None:
        self.record = record
        self.lo = lo
        self.hi = hi
        self._dropped = dropped
        self._drop = drop = Drop(self, dropped.append)
        drop.record = record
        drop.read = False
        # No call between the two, so no interrupt either.
        record.unread += 1
        record.drops.add(drop)

    @property
    def read(self) -> bool:
        """Whether it was unpacked."""
        return self._drop.read

    def mark_read(self) -> None:
        """It was unpacked for the first time."""
        drop, record = self._drop, self.record
        drop.read = True
        record.unread -= 1

    def is_told(self, dropped: deque[Drop]) -> bool:
        """Whether its end is told to this queue."""
        return self._dropped is dropped


def _gaps(spans: list[Span], lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """The parts of [lo, hi) that sorted, disjoint spans leave uncovered."""
    for span in spans:
        if lo < span.lo:
            yield lo, span.lo
        lo = max(lo, span.hi)
    if lo < hi:
        yield lo, hi


def _runs(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Groups pieces into runs without a gap."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.lo):
        if run and run[-1].hi != piece.lo:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
