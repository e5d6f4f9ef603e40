"""Which bytes are in memory on the offloader's account, and what moved: plain sums, no I/O.

The lock that protects the books belongs to the offloader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tba_offload.transfer.storage import Record, Span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tba_offload.device import Mark
    from tba_offload.plan.window import Window

NOTICEABLE = 20e-6
"""Seconds; shorter waits are counted, but nobody needs to know when they were."""


@dataclass(slots=True)
class TransferStats:
    """What moved since the last reset, in bytes unless the name says otherwise.

    Attributes:
        offloaded: Written to the store.
        read: Read from the store.
        reread: Read again because the first read failed.
        rescued: Made again by their layer, because no read of them went well.
        forwarded: Handed over from memory without a read.
        given_up: Prefetches dropped to make room.
        held: Offloaded in vain: somebody else kept the storage until backward asked for it.
        fallback_kept: Kept in memory because they could not be written.
        full: Whether some of them found no room.
        stall_seconds: Time that the training thread waited for I/O; a device that runs behind it may have had
            work meanwhile.
        in_flight_peak: Most bytes in flight.
        own_peak: Most bytes that the offloader itself kept in memory: in flight, restored, kept.
        stalls: When the training thread waited for longer than a glance: from, until.
        marked_stalls: Marks in the work of the device before and behind each wait, where they are wanted.
    """

    offloaded: int = 0
    read: int = 0
    reread: int = 0
    rescued: int = 0
    forwarded: int = 0
    given_up: int = 0
    held: int = 0
    fallback_kept: int = 0
    full: bool = False
    stall_seconds: float = 0.0
    in_flight_peak: int = 0
    own_peak: int = 0
    stalls: list[tuple[float, float]] = field(default_factory=list)
    marked_stalls: list[tuple[Mark, Mark]] = field(default_factory=list)

    def stalled(self, began: float, ended: float) -> None:
        """The training thread waited for I/O, by :func:`time.perf_counter`."""
        self.stall_seconds += ended - began
        if ended - began >= NOTICEABLE:
            self.stalls.append((began, ended))


class Books:
    """The sums that the window is held by.

    Args:
        window: Its rules.

    Attributes:
        window: As given; may be set to another one between steps.
        in_flight: Bytes packed and not yet freed, and bytes whose read was submitted and that were not yet
            unpacked.
        departing: Those among them that queued and running writes alone will free.
        read_ahead: Bytes whose read was submitted ahead of backward and that were not yet unpacked.
        settled: Bytes kept in memory outside the window, because they could not be written, or because
            backward uses them.
        stats: What moved.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.in_flight = 0
        self.departing = 0
        self.read_ahead = 0
        self.settled = 0
        self.stats = TransferStats()
        # Entered before and removed after the attribute says so: see recount().
        self._charged: dict[Record | Span, None] = {}
        self._largest = 0
        self._largest_before = 0

    # ---- the window ------------------------------------------------------------------------------

    def crowded(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more would exceed the window."""
        return self.window.is_crowded(self.in_flight, nbytes)

    def is_tight(self) -> bool:
        """Whether another activation as large as the largest of late would have to wait for writes."""
        return self.window.is_tight(self.in_flight, max(self._largest, self._largest_before))

    def may_be_read_ahead(self, nbytes: int, *, across_forward: bool) -> bool:
        """Whether the window has room for ``nbytes`` that are read ahead."""
        return self.window.may_read_ahead(
            self.in_flight, self.read_ahead, nbytes, across_forward=across_forward
        )

    def has_room(self) -> bool:
        """Whether enough of the window is free for reading ahead to be worth a start."""
        return self.window.is_worth_filling(self.in_flight)

    # ---- records ---------------------------------------------------------------------------------

    def charge(self, record: Record) -> None:
        """The memory of a record is in flight from now on."""
        if not record.charged:
            self._charged[record] = None
            record.charged = record.nbytes
            self._largest = max(self._largest, record.nbytes)
            self._add_in_flight(record.charged)
            self._count_departing(record, +1)

    def uncharge(self, record: Record) -> None:
        """It is no longer."""
        if record.charged:
            self._count_departing(record, -1)
            self._add_in_flight(-record.charged)
            record.charged = 0
            self._charged.pop(record, None)

    def keep(self, record: Record) -> bool:
        """A pinned record no longer counts as in flight: it is kept, or in use by backward.

        Returns:
            Whether it did until now.
        """
        if not record.charged:
            return False
        self.uncharge(record)
        self.settle(record)
        return True

    def settle(self, record: Record) -> None:
        """The memory of a record is kept, and counts outside the window."""
        self.settled += record.nbytes - record.settled
        record.settled = record.nbytes

    def unsettle(self, record: Record) -> None:
        """It is no longer."""
        self.settled -= record.settled
        record.settled = 0

    def change(
        self, record: Record, *, writes: int = 0, deferred: bool | None = None, pinned: bool | None = None
    ) -> None:
        """Changes what tells whether writes alone will free a record.

        Args:
            record: The record.
            writes: How many more writes are queued or running than before.
            deferred: New value of the attribute.
            pinned: New value of the attribute.
        """
        self._count_departing(record, -1)
        record.writes += writes
        if deferred is not None:
            record.deferred = deferred
        if pinned is not None:
            record.pinned = pinned
        self._count_departing(record, +1)

    # ---- spans read ahead ------------------------------------------------------------------------

    def charge_span(self, span: Span) -> None:
        """The buffer of a span is in flight from the submission of its read on."""
        self._charged[span] = None
        span.charged = span.nbytes
        self.read_ahead += span.charged
        self._add_in_flight(span.charged)

    def uncharge_span(self, span: Span) -> int:
        """It was unpacked, or dropped; returns the bytes that counted."""
        charged, span.charged = span.charged, 0
        self.read_ahead -= charged
        self._add_in_flight(-charged)
        self._charged.pop(span, None)
        return charged

    # ---- sums ------------------------------------------------------------------------------------

    def reset_stats(self) -> TransferStats:
        """Starts new :attr:`stats` and returns the old ones."""
        old, self.stats = self.stats, TransferStats()
        self._largest_before, self._largest = self._largest, 0
        self._add_in_flight(0)
        return old

    def records(self) -> list[Record]:
        """The records whose memory is in flight."""
        return [charged for charged in self._charged if isinstance(charged, Record)]

    def recount(self, records: Iterable[Record]) -> None:
        """Makes the sums anew, after an interrupt that may have fallen between two.

        Args:
            records: All that some handle needs.
        """
        for charged in list(self._charged):
            if not charged.charged:
                del self._charged[charged]
        self.in_flight = sum(charged.charged for charged in self._charged)
        self.read_ahead = sum(span.charged for span in self._charged if isinstance(span, Span))
        self.settled = self.departing = 0
        for record in records:
            self.settled += record.settled
            record.writes = sum(piece.pending for piece in record.pieces())
            self._count_departing(record, +1)

    def _count_departing(self, record: Record, sign: int) -> None:
        if record.writes and not record.deferred and not record.pinned:
            self.departing += sign * record.charged

    def _add_in_flight(self, nbytes: int) -> None:
        self.in_flight += nbytes
        stats = self.stats
        if self.in_flight > stats.in_flight_peak:
            stats.in_flight_peak = self.in_flight
        if self.in_flight + self.settled > stats.own_peak:
            stats.own_peak = self.in_flight + self.settled
