"""The extents that pieces have in a store, and how each comes back, whatever cuts that short."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from tba_offload.errors import OutOfServiceError
from tba_offload.transfer.storage import reserved

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.device.ranges import ByteRange
    from tba_offload.store.base import ActivationStore, Extent, IoFuture
    from tba_offload.transfer.failures import Failures
    from tba_offload.transfer.storage import Piece, Record


class Extents:
    """The extents of one offloader, in a store in which nothing else reserves any.

    Args:
        store: The store.
        failures: Say whether what finds no room is kept.

    Attributes:
        store: As given.
    """

    def __init__(self, store: ActivationStore, failures: Failures) -> None:
        self.store = store
        self._failures = failures
        self._reserving = threading.Lock()  # held until pieces know of their extents
        self._being_read: dict[Extent, None] = {}  # by reads of which no record knows any more

    def reserve(self, pieces: Sequence[Piece], sources: Sequence[ByteRange]) -> list[Extent]:
        """Find a place for the first of several pieces.

        Raises:
            StoreError: There is no room for the first, or the drive failed.
            TimeoutError: The drive hangs.
        """
        ranges = [(source.nbytes, source.address) for source in sources]
        with self._reserving:
            extents = self._reserve(ranges)
            reserved(pieces, sources, extents)
        return extents

    def _reserve(self, ranges: Sequence[tuple[int, int]]) -> list[Extent]:
        try:
            return self.store.reserve_many(ranges)
        except OutOfServiceError:
            if self._failures.keep_when_full:
                raise
        self.store.resume()  # the policy wants an error, and only the drive can tell whether there is one
        return self.store.reserve_many(ranges)

    def give_back(self, piece: Piece) -> None:
        """Give back the extent of a piece; :meth:`reconcile` ends what an interrupt cuts short."""
        extent = piece.take_extent()
        if extent is not None:
            self.release(extent)

    def release(self, extent: Extent) -> None:
        """Give back an extent that no piece has any more.

        A transfer that hangs may still use it if an interrupt let no piece know of that, or when nothing is
        to wait for it any longer: then :meth:`reconcile` gives it back after the next step that fails.
        """
        try:
            self.store.release(extent)
        except ValueError:
            if extent not in self.store.leased():
                raise

    def give_back_after(self, read: IoFuture, piece: Piece) -> None:
        """Give back an extent when a read, which still fills its buffer from it, has ended.

        The store keeps the buffer alive.
        """
        extent = extent_of(piece)
        self._being_read[extent] = None
        read.add_done_callback(partial(self._read_ended, extent))
        piece.take_extent()

    def _read_ended(self, extent: Extent, _: IoFuture) -> None:
        """Give back an extent on an I/O thread; once, however often it was asked for."""
        if extent in self._being_read:
            self.store.release(extent)
            self._being_read.pop(extent, None)

    def reconcile(self, records: Iterable[Record]) -> None:
        """Give back the extents of which an interrupt let no piece know.

        While another thread reserves one it cannot be told from those; the next time finds them.

        Args:
            records: All that have extents.
        """
        if not self._reserving.acquire(blocking=False):
            return
        try:
            known = {piece.extent for record in records for piece in record.pieces()}
            known.update(self._being_read)  # before the store is asked, or they may be back by then
            for extent in self.store.leased():
                if extent not in known:
                    self.release(extent)
        finally:
            self._reserving.release()

    def suspend(self, piece: Piece, cause: BaseException) -> None:
        """Take the drive of a piece out of service: it did not do what it was asked."""
        self.store.suspend(extent_of(piece), cause)

    def place(self, piece: Piece) -> str:
        """Where a piece lies, for messages."""
        return self.store.place(piece.extent) if piece.extent is not None else "the store"

    def where(self, piece: Piece) -> str:
        """Return the same to the block."""
        extent = extent_of(piece)
        return f"{self.store.place(extent)}, offset {extent.offset}"


def extent_of(piece: Piece) -> Extent:
    """Where in the store a piece is that was written."""
    if piece.extent is None:
        raise AssertionError("a piece without an extent was asked for")
    return piece.extent
