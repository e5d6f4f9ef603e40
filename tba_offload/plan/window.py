"""The window: how many bytes may be in flight, and what is done when it fills. Each rule stands here alone.

The offloader, the store beside host memory and the simulator ask these rules, so what is predicted is what
happens. Bytes are in flight from the moment they are saved until they are freed, and from the submission of
their read until backward uses them. In order of what is in flight:

::

    0 ── held back ─────────── batch due ─────────── refill below ─────────── window
    last saved, first needed   the others are        reading ahead            a pack waits for writes,
    by backward: not written   written               starts again             or for a read given up
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BATCH_BYTES = 4 * 2**20
"""Bytes. Writes are collected until they come to this, or to a quarter of the window."""

HELD_BACK = 0.25
"""Share of the window that is not written before something else needs the room; a batch more may wait.

What was saved last is needed first: if backward comes for it before the window fills, it never travels.
"""

REFILL_BELOW = 0.75
"""Share of the window. Reading ahead starts again when less is in flight.

Filling up every few bytes would wake the I/O threads all the time, each time for one transfer.
"""

ACROSS_FORWARD = 0.25
"""Share of the window that reads for after a forward pass may take: that pass needs the rest."""

SPILL_SHARE = 0.5
"""Share of the window. Host memory takes writes while the drives have more than this still to write.

A pack waits when the window is full. A quarter of it is held back in case that backward comes for it, so half
of it at the drives means that they lag.
"""

SPILL_BYTES = 64 * 2**20
"""Bytes; the same where there is no window."""


@dataclass(frozen=True, slots=True)
class Window:
    """Most bytes in flight, and the rules that follow from it.

    Attributes:
        nbytes: The size in bytes; ``None`` for no limit.
    """

    nbytes: int | None = None

    @property
    def held_back(self) -> int:
        """Bytes, the last ones saved, that are not written before the window fills."""
        return 0 if self.nbytes is None else int(HELD_BACK * self.nbytes)

    @property
    def batch(self) -> int:
        """Bytes that writes are collected to."""
        return BATCH_BYTES if self.nbytes is None else min(BATCH_BYTES, self.nbytes // 4)

    @property
    def spills_above(self) -> int:
        """Host memory takes writes while the drives have more bytes than this still to write."""
        return SPILL_BYTES if self.nbytes is None else int(SPILL_SHARE * self.nbytes)

    def is_crowded(self, in_flight: int, nbytes: int) -> bool:
        """Whether ``nbytes`` more would exceed the window; what is larger than it goes alone."""
        return self.nbytes is not None and in_flight > 0 and in_flight + nbytes > self.nbytes

    def tight_above(self, largest: int) -> float:
        """Bytes in flight above which an activation as large as the largest of late would have to wait.

        From there on everything is written. One that is larger than the window waits for all writes, whenever
        they began.
        """
        return math.inf if self.nbytes is None or largest > self.nbytes else self.nbytes - largest

    def is_tight(self, in_flight: int, largest: int) -> bool:
        """Whether another activation as large as the largest of late would have to wait."""
        return in_flight > self.tight_above(largest)

    def is_worth_filling(self, in_flight: int) -> bool:
        """Whether enough of the window is free for reading ahead to be worth a start."""
        return self.nbytes is None or in_flight <= REFILL_BELOW * self.nbytes

    def may_read_ahead(self, in_flight: int, read_ahead: int, nbytes: int, *, across_forward: bool) -> bool:
        """Whether ``nbytes`` may be read ahead; what the window can never hold is read on demand.

        Args:
            in_flight: Bytes in flight.
            read_ahead: Those among them that were read ahead.
            nbytes: Bytes that would be read.
            across_forward: A forward pass comes before backward uses them.
        """
        if self.nbytes is None:
            return True
        if across_forward and read_ahead and read_ahead + nbytes > ACROSS_FORWARD * self.nbytes:
            return False
        return in_flight + nbytes <= self.nbytes
