"""Counts of the bytes that the offloader has in memory, and the rules of the in-flight window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tba_offload.planner.window import Window

if TYPE_CHECKING:
    from tba_offload.device import Mark
    from tba_offload.transfer.saved import SavedRef

NOTICEABLE = 20e-6
"""Shortest wait, in seconds, whose start and end are recorded."""


@dataclass(slots=True)
class TransferStats:
    """Figures of transfers since the last reset.

    Attributes:
        offloaded: Bytes written to the store.
        read: Bytes read from the store.
        reread: Bytes read again because the first read failed.
        forwarded: Bytes that backward used from memory without a read.
        given_up: Prefetched bytes that were dropped before backward used the bytes.
        held: Written bytes that were not freed, because another reference kept the storage in memory.
        fallback_kept: Bytes that stayed in memory because their write failed.
        full: Whether the store had no room for some of the bytes in ``fallback_kept``.
        stall_seconds: Seconds in which the training thread waited for I/O, even if an accelerator was busy.
        in_flight_peak: Largest number of bytes in flight.
        own_peak: Largest number of bytes of saved storages in memory: in flight or kept.
        stalls: Start and end of each wait of the training thread that takes at least :data:`NOTICEABLE`.
        marked_stalls: Marks on the device before and after each wait, if ``Offloader.marks_stalls`` is True.
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


class InFlightWindow(Window):
    """Counts of the bytes that one offloader has in memory. The lock of the offloader protects the counts.

    Attributes:
        in_flight: Saved bytes that are not freed yet, plus prefetched bytes that backward has not used yet.
        read_ahead: Number of bytes in flight that were prefetched.
        settled: Bytes in memory that the window does not limit, because backward uses them or their write
            failed.
        stats: Figures since the last reset.
        most_read_ahead: Number of bytes in flight above which nothing is prefetched. The number is infinite
            until the device runs out of memory.
        all_above: The result of :meth:`tight_above` for the largest storage of this step or the step before.
    """

    def __init__(self, nbytes: int | None) -> None:
        self.in_flight = self.read_ahead = self.settled = 0
        self.stats, self.most_read_ahead = TransferStats(), float("inf")
        self._largest = self._largest_before = 0
        self.resize(nbytes)

    def resize(self, nbytes: int | None) -> None:
        """Set the upper limit of the bytes in flight, between two steps."""
        super().__init__(nbytes)
        self.all_above = self.tight_above(max(self._largest, self._largest_before))

    def add(self, nbytes: int) -> None:
        """Count bytes that are new in memory."""
        self.in_flight += nbytes
        if nbytes > self._largest:
            self._largest = nbytes
            self.all_above = self.tight_above(max(nbytes, self._largest_before))
        stats, in_flight = self.stats, self.in_flight
        if in_flight > stats.in_flight_peak:
            stats.in_flight_peak = in_flight
        if in_flight + self.settled > stats.own_peak:
            stats.own_peak = in_flight + self.settled

    def free(self, ref: SavedRef) -> None:
        """Stop counting the bytes of a saved storage."""
        self.in_flight -= ref.charged
        self.settled -= ref.settled
        ref.charged = ref.settled = 0

    def settle(self, ref: SavedRef) -> None:
        """Count bytes in flight as kept, because backward uses them or because no write will free them."""
        self.in_flight -= ref.charged
        self.settled += ref.charged
        ref.settled += ref.charged
        ref.charged = 0

    def reset_stats(self) -> None:
        """Set all figures in :attr:`stats` to zero."""
        self.stats = TransferStats()
        self._largest_before, self._largest = self._largest, 0
        self.add(0)
        self.all_above = self.tight_above(self._largest_before)

    def reset(self) -> None:
        """Set all counts to zero, after a step was discarded."""
        self.in_flight = self.read_ahead = self.settled = 0
        self.most_read_ahead = float("inf")
