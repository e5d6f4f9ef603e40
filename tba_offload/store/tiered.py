"""Drives with host memory beside them: the drives first, host memory while they have too much to do."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tba_offload.errors import StoreFullError
from tba_offload.planner.window import Window
from tba_offload.store.base import HOST_TIER, ActivationStore, DriveLoad, Extent
from tba_offload.store.combined import CombinedStore, first_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.store.host import HostStore


class TieredStore(CombinedStore):
    """Spreads extents over drives and host memory.

    A new extent goes to the drives, unless they have so much to write that training would soon wait for them:
    then to host memory as long as its capacity lasts (TERAIO's rule). What one of the two has no room for
    goes to the other.

    Args:
        drives: The store of the drives.
        host: Host memory, up to its capacity. The ``drive`` of its extents is one that no drive has.
        spill_bytes: Host memory is used when the drives have more than this to write; ``None`` for what suits
            a step without a window.

    Attributes:
        spill_bytes: As given, or by what :meth:`resize_window` was told last.

    Both stores are closed with this one.
    """

    kind = "tiered"

    def __init__(self, drives: ActivationStore, host: HostStore, *, spill_bytes: int | None = None) -> None:
        super().__init__((drives, host))
        self.extent_bytes = drives.extent_bytes
        self.drives = drives
        self.host = host
        self.spill_bytes = Window().spills_above if spill_bytes is None else spill_bytes

    @property
    def description(self) -> dict[str, object]:
        """Kind, alignment, capacity, when host memory is used, and the description of both tiers."""
        return {
            "kind": self.kind,
            "alignment": self.alignment,
            "capacity": self.capacity_bytes,
            "spill_bytes": self.spill_bytes,
            "drives": self.drives.description,
            "host": self.host.description,
        }

    def reserve_many(self, ranges: Sequence[tuple[int, int]]) -> list[Extent]:
        """Take extents for as many as go to the same tier; see :meth:`ActivationStore.reserve_many`."""
        first: ActivationStore = self.drives
        second: ActivationStore = self.host
        nbytes, address = ranges[0]
        room = self.spill_bytes - self.drives.pending_write_bytes()
        if room < 0 and self.host.may_hold(nbytes):
            first, second = second, first
            ranges = ranges[:1]  # the drives may have made progress before the next
        try:
            # After the last of these the drives have more to write than that.
            return first.reserve_many(first_ranges(ranges, room + 1))
        except StoreFullError as error:
            refusal = str(error)  # the error itself would keep the frames of all callers
        try:
            return [second.reserve(nbytes, address)]
        except StoreFullError as error:
            raise StoreFullError(
                errno.ENOSPC,
                f"neither the drives nor host memory have room for {nbytes} bytes: {refusal}; {error}",
            ) from None

    def take_loads(self) -> list[DriveLoad]:
        """Return what each drive and host memory have moved; see :meth:`ActivationStore.take_loads`."""
        host = [load._replace(tier=HOST_TIER) for load in self.host.take_loads()]
        return [*self.drives.take_loads(), *host]

    def write_rate(self) -> float | None:
        """Return that of the drives; see :meth:`ActivationStore.write_rate`."""
        return self.drives.write_rate()

    def prepare(self, nbytes: int) -> None:
        """Grows the drives, and host memory by what they cannot hold; see :meth:`ActivationStore.prepare`.

        How much will go to host memory is not known before the drives have fallen behind.
        """
        limit = self.drives.capacity_bytes
        share = nbytes if limit is None else min(nbytes, limit)
        self.drives.prepare(share)
        if nbytes > share:
            self.host.prepare(nbytes - share)

    def resize_window(self, window: int | None) -> None:
        """Set when host memory is used, by the window; see :meth:`ActivationStore.resize_window`."""
        self.spill_bytes = Window(window).spills_above

    def _store_of(self, extent: Extent) -> ActivationStore:
        return self.host if extent.drive == self.host.drive_index else self.drives
