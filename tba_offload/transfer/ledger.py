"""Which bytes are in memory on the offloader's account, and what moved: plain sums, no I/O.

The lock that protects the ledger belongs to the offloader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tba_offload.transfer.storage import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tba_offload.device import Mark
    from tba_offload.planner.window import Window
    from tba_offload.transfer.storage import Record, Span

NOTICEABLE = 20e-6
"""Seconds; shorter waits are counted, but when they were is not noted."""


@dataclass(slots=True)
class TransferStats:
    """What moved since the last reset, in bytes unless the name says otherwise.

    Attributes:
        offloaded: Written to the store.
        read: Read from the store.
        reread: Read again because the first read failed.
        forwarded: Handed over from memory without a read.
        given_up: Prefetches dropped to make room.
        held: Offloaded in vain: something else kept the storage until backward asked for it.
        fallback_kept: Kept in memory because they could not be written.
        full: Whether some of them found no room.
        stall_seconds: Time that the training thread waited for I/O; a device that runs behind it may have had
            work meanwhile.
        in_flight_peak: Most bytes in flight.
        own_peak: Most bytes that the offloader itself kept in memory: in flight, restored, kept.
        stalls: When the training thread waited for longer than a glance: from, until.
        marked_stalls: Marks in the work of the device before and after each wait, where they are wanted.
    """

    offloaded: int = 0
    read: int = 0
    reread: int = 0
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
        """Record that the training thread waited for I/O, by :func:`time.perf_counter`."""
        self.stall_seconds += ended - began
        if ended - began >= NOTICEABLE:
            self.stalls.append((began, ended))


_NOTHING = (0, 0, 0)


class Ledger:
    """The sums that the window is held by.

    Args:
        window: Its rules.

    Attributes:
        window: As given; see :meth:`resize`.
        fills_below: Reading ahead is worth a start up to so many bytes in flight.
        tight_above: Everything is written above so many bytes in flight.
        in_flight: Bytes packed and not yet freed, and bytes whose read was submitted and that were not yet
            unpacked.
        departing: Those among them that queued and running writes alone will free.
        read_ahead: Bytes whose read was submitted ahead of backward and that were not yet unpacked.
        settled: Bytes kept in memory outside the window, because they could not be written, or because
            backward uses them.
        ahead: The spans that were read ahead, with their bytes; of what is not among them none count.
        noted: The records that count, and what was counted of each: in flight, departing, settled.
        stats: What moved.
    """

    def __init__(self, window: Window) -> None:
        self.in_flight = 0
        self.departing = 0
        self.read_ahead = 0
        self.settled = 0
        self.stats = TransferStats()
        self.noted: dict[Record, tuple[int, int, int]] = {}
        self.ahead: dict[Span, int] = {}
        self._largest = 0
        self._largest_before = 0
        self.resize(window)

    # ---- the window ------------------------------------------------------------------------------

    def resize(self, window: Window) -> None:
        """Have other rules hold; between steps."""
        self.window = window
        self.fills_below = window.fills_below
        self._look_at_largest()

    def crowded(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more would exceed the window."""
        return self.window.is_crowded(self.in_flight, nbytes)

    def _look_at_largest(self) -> None:
        self.tight_above = self.window.tight_above(max(self._largest, self._largest_before))

    # ---- what is in memory -----------------------------------------------------------------------

    def note(self, record: Record) -> None:
        """Take note of a transition of a record."""
        state, nbytes = record.state, record.nbytes
        charged = departing = settled = 0
        if state is State.KEPT:
            settled = nbytes
        elif record.source is not None or state is State.WAITS:
            charged = nbytes
            if record.writes and (state is State.TRAVELS or state is State.RELEASED):
                departing = nbytes
        before = self.noted.get(record, _NOTHING)
        self.in_flight += charged - before[0]
        self.departing += departing - before[1]
        self.settled += settled - before[2]
        if charged or settled:
            self.noted[record] = charged, departing, settled
            if charged > self._largest:
                self._largest = charged
                self._look_at_largest()
            stats, in_flight = self.stats, self.in_flight  # in _look_at_peaks, but for a call
            if in_flight > stats.in_flight_peak:
                stats.in_flight_peak = in_flight
            if in_flight + self.settled > stats.own_peak:
                stats.own_peak = in_flight + self.settled
        else:
            self.noted.pop(record, None)

    def charge(self, span: Span) -> None:
        """Count the buffer of a span that is read ahead from the submission of its read on."""
        self.ahead[span] = span.nbytes
        self.read_ahead += span.nbytes
        self.in_flight += span.nbytes
        if self.in_flight > self.stats.in_flight_peak:
            self._look_at_peaks()

    def uncharge(self, span: Span, *, in_vain: bool = False) -> None:
        """Record that it was unpacked, or dropped; perhaps in vain, to make room."""
        charged = self.ahead.pop(span, 0)
        self.read_ahead -= charged
        self.in_flight -= charged
        if in_vain:
            self.stats.given_up += charged

    # ---- sums ------------------------------------------------------------------------------------

    def reset_stats(self) -> TransferStats:
        """Start new :attr:`stats` and return the old ones."""
        old, self.stats = self.stats, TransferStats()
        self._largest_before, self._largest = self._largest, 0
        self._look_at_largest()
        self._look_at_peaks()
        return old

    def recount(self, records: Iterable[Record]) -> None:
        """Make the sums anew, after an interrupt that may have fallen between two.

        Args:
            records: All that some handle needs.
        """
        self.noted.clear()
        self.read_ahead = self.in_flight = sum(self.ahead.values())
        self.departing = self.settled = 0
        for record in records:
            record.recount()
            self.note(record)

    def _look_at_peaks(self) -> None:
        stats = self.stats
        if self.in_flight > stats.in_flight_peak:
            stats.in_flight_peak = self.in_flight
        if self.in_flight + self.settled > stats.own_peak:
            stats.own_peak = self.in_flight + self.settled
