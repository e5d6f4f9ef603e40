"""What the offloader has in memory, by the rules of the in-flight window: plain sums, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tba_offload.planner.window import Window

if TYPE_CHECKING:
    from tba_offload.device import Mark
    from tba_offload.transfer.saved import SavedRef

NOTICEABLE = 20e-6
"""Seconds; shorter waits are counted, but when they were is not noted."""


@dataclass(slots=True)
class TransferStats:
    """Figures since the last reset, in bytes unless the name says otherwise.

    Attributes:
        offloaded: Written to the store.
        read: Read from the store.
        reread: Read again because the first read failed.
        forwarded: Handed over from memory without a read.
        given_up: Prefetches dropped to make room.
        held: Written although another reference kept the storage in memory, so that nothing was freed.
        fallback_kept: Kept in memory because they could not be written.
        full: Whether some of them found no room.
        stall_seconds: Time that the training thread waited for I/O; a device that runs behind may have had
            work meanwhile.
        in_flight_peak: Most bytes in flight.
        own_peak: Most bytes that the offloader itself kept in memory: in flight, or kept.
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


class InFlightWindow:
    """The sums of one offloader; its lock protects them.

    Attributes:
        rules: The size and the rules that follow from it.
        in_flight: Bytes saved and not yet freed, and bytes whose read was submitted and that backward has
            not used yet.
        read_ahead: Bytes among them that were read ahead.
        settled: Bytes kept in memory outside the window: backward uses them, or they could not be written.
        stats: Figures.
        most_read_ahead: Bytes in flight up to which the device has turned out to have memory.
        due: Pending writes of so many bytes are due.
        tight_above: Everything is written above so many bytes in flight.
    """

    def __init__(self, nbytes: int | None) -> None:
        self.in_flight = self.read_ahead = self.settled = 0
        self.stats, self.most_read_ahead = TransferStats(), float("inf")
        self._largest = self._largest_before = 0
        self.resize(nbytes)

    def resize(self, nbytes: int | None) -> None:
        """Set the most bytes in flight; between steps."""
        self.rules = rules = Window(nbytes)
        self.nbytes, self.batch, self.held_back = nbytes, rules.batch, rules.held_back
        self.due, self.fills_below = rules.held_back + rules.batch, rules.fills_below
        self.tight_above = rules.tight_above(max(self._largest, self._largest_before))

    def add(self, nbytes: int) -> None:
        """Count bytes that came into memory."""
        self.in_flight += nbytes
        if nbytes > self._largest:
            self._largest = nbytes
            self.tight_above = self.rules.tight_above(max(nbytes, self._largest_before))
        stats, in_flight = self.stats, self.in_flight
        if in_flight > stats.in_flight_peak:
            stats.in_flight_peak = in_flight
        if in_flight + self.settled > stats.own_peak:
            stats.own_peak = in_flight + self.settled

    def free(self, ref: SavedRef) -> None:
        """Count the bytes of a saved storage no longer."""
        self.in_flight -= ref.charged
        self.settled -= ref.settled
        ref.charged = ref.settled = 0

    def settle(self, ref: SavedRef) -> None:
        """Count bytes in flight as kept: backward uses them, or nothing will free them."""
        self.in_flight -= ref.charged
        self.settled += ref.charged
        ref.settled += ref.charged
        ref.charged = 0

    def reset_stats(self) -> None:
        """Start new :attr:`stats`."""
        self.stats = TransferStats()
        self._largest_before, self._largest = self._largest, 0
        self.add(0)
        self.tight_above = self.rules.tight_above(self._largest_before)

    def reset(self) -> None:
        """Count nothing any more: the step was thrown away."""
        self.in_flight = self.read_ahead = self.settled = 0
        self.most_read_ahead = float("inf")
