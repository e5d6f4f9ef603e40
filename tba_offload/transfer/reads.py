"""How reads are started: each span has a buffer of its own; spans that are asked for together go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.device.ranges import aligned_range
from tba_offload.device.streams import check_not_captured
from tba_offload.store.base import take_back
from tba_offload.transfer.extents import extent_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.device.ranges import ByteRange
    from tba_offload.device.streams import Device
    from tba_offload.store.base import ActivationStore, IoFuture, ReadOrder
    from tba_offload.transfer.shared import Shared
    from tba_offload.transfer.storage import Piece, Span


class Reads:
    """Starts the reads of one offloader.

    Args:
        shared: What is counted, and how long is waited.
        store: Where the bytes are.
        device: The device that holds the activations.
    """

    def __init__(self, shared: Shared, store: ActivationStore, device: Device) -> None:
        self._ledger = shared.ledger
        self._watchdog = shared.watchdog
        self._store = store
        self._device = device

    def start(self, spans: Sequence[Span]) -> None:
        """Submit the reads of spans, all or none. Called on the training thread, under the lock."""
        whole = [span for span in spans if len(span.pieces) == 1]
        if whole:
            self._submit(whole, padded=True)
        if len(whole) != len(spans):
            try:
                self._submit([span for span in spans if len(span.pieces) > 1], padded=False)
            except BaseException:
                self._take_back(whole, [read for span in whole for read in span.reads])
                raise
        self._ledger.stats.read += sum([span.nbytes for span in spans])

    def _submit(self, spans: Sequence[Span], *, padded: bool) -> None:
        """Submit the reads of spans, into a new buffer each; ``padded`` if each has one piece."""
        store, device = self._store, self._device
        check_not_captured(device)
        alignment = store.alignment
        rooms = [aligned_range(span.nbytes, span.pieces[0].address, alignment, device) for span in spans]
        # Not before: the last work with the memory that the allocator gives may have been given meanwhile.
        after, stream = device.event(), device.stream()
        orders: list[ReadOrder] = []
        for span, room in zip(spans, rooms, strict=True):
            first = span.pieces[0]
            if padded:
                orders.append((first.extent or extent_of(first), room, after))
            else:
                orders.extend((extent_of(piece), _place(room, span, piece), after) for piece in span.pieces)
        reads: list[IoFuture] = []
        try:
            reads = store.read_many(orders, padded=padded)
            done = 0
            for span, room in zip(spans, rooms, strict=True):
                span.restores_into(room, reads[done : done + len(span.pieces)], stream)
                done += len(span.pieces)
        except BaseException:
            self._take_back(spans, reads)
            raise

    def _take_back(self, spans: Iterable[Span], reads: Iterable[IoFuture]) -> None:
        """Cancel reads: no buffer must be taken for one that holds the bytes, and no read be forgotten.

        A span whose drive hangs keeps its reads, and the buffer that they fill.
        """
        take_back(reads, self._watchdog.limit)
        for span in spans:
            if span.arrived():
                span.forget()

    def start_again(self, span: Span, piece: Piece, room: ByteRange) -> IoFuture:
        """Submit the read of one piece once more, without the padding if it has neighbours in the buffer."""
        alone = len(span.pieces) == 1
        target = room if alone else _place(room, span, piece)
        return self._store.read(extent_of(piece), target, self._device.event(), padded=alone)


def _place(room: ByteRange, span: Span, piece: Piece) -> ByteRange:
    """Where a piece of a span belongs in its buffer."""
    return room.part(piece.lo - span.lo, piece.nbytes)
