"""One store over several drives: an extent lies wholly on one of them, the one that writes it first."""

from __future__ import annotations

import errno
import math
import threading
from typing import TYPE_CHECKING

from tba_offload.errors import OutOfServiceError, StoreFullError
from tba_offload.store.combined import CombinedStore, first_ranges

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from tba_offload.store.base import ActivationStore, Extent


TOGETHER_BYTES = 1 << 20
"""Bytes. So much at least goes to a drive together, if there is that much: one call moves it."""


EXTENT_BYTES = 32 << 20
"""Bytes. A larger activation lies on several drives, where its parts need no padding.

Time of a step that waits for its drives, by that with whole extents, in a simulation of layers of 1.07 GB:
on four drives 0.97 with a window of two layers, 0.93 of one and 0.54 of half a
layer, on eight 0.93, 0.50 and 0.32, on two 1.00, 1.00 and 0.97. 16 MiB gain 0.01 more.
"""


class StripedStore(CombinedStore):
    """Spreads extents over stores.

    A new extent goes to the store that would have written it first, by the bytes queued and running there and
    the rate that was measured of late; to another one if that is full or out of service. Where several have
    nothing to do they take turns, a drive of twice the rate twice as often: else the fastest would get
    everything as long as queues are short, the others would not help when it is read back, and their rates
    would never be measured again. Until anything is measured all drives are taken for equally fast.

    An activation that is larger than :data:`EXTENT_BYTES` comes as several extents, if no address has to be
    aligned: as from a GPU, whose bytes go through slabs or cuFile.

    Args:
        stores: At least one; the ``drive`` of the extents of each is its place in the list. They are closed
            with the striped store.

    Raises:
        ValueError: There is no store.
    """

    kind = "striped"

    def __init__(self, stores: Sequence[ActivationStore]) -> None:
        if not stores:
            raise ValueError("a striped store needs at least one store")
        super().__init__(stores)
        if len(stores) > 1 and self.alignment == 1:
            self.extent_bytes = EXTENT_BYTES
        # Weighted turns: when the last turn began, and when that of each drive ended, as if bytes were time.
        self._now = 0.0
        self._ended = [0.0] * len(self.stores)
        self._turn_lock = threading.Lock()

    @property
    def description(self) -> dict[str, object]:
        """Kind, alignment, capacity, and the description of each store."""
        return {
            "kind": self.kind,
            "alignment": self.alignment,
            "capacity": self.capacity_bytes,
            "stores": [store.description for store in self.stores],
        }

    def reserve_many(self, ranges: Sequence[tuple[int, int]]) -> list[Extent]:
        """Take extents on one drive for some ranges; see :meth:`ActivationStore.reserve_many`.

        Each drive gets its even share of them, but not less than one call should move.
        """
        share = sum(nbytes for nbytes, _ in ranges) // len(self.stores)
        ranges = first_ranges(ranges, max(share, TOGETHER_BYTES))
        nbytes = sum(nbytes for nbytes, _ in ranges)
        refusals: dict[int, StoreFullError] = {}
        while len(refusals) < len(self.stores):
            drive = self._choose(nbytes, refusals)
            try:
                return self.stores[drive].reserve_many(ranges)
            except StoreFullError as error:
                refusals[drive] = error.with_traceback(None)
        nbytes, _ = ranges[0]
        out = all(isinstance(refusal, OutOfServiceError) for refusal in refusals.values())
        raise (OutOfServiceError if out else StoreFullError)(
            errno.ENOSPC,
            f"none of {len(self.stores)} drives has room for {nbytes} bytes: "
            f"{'; '.join(map(str, refusals.values()))}",
        )

    def write_rate(self) -> float | None:
        """Return the sum over the drives in service; see :meth:`ActivationStore.write_rate`."""
        return sum(store.write_rate() or 0.0 for store in self.stores) or None

    def prepare(self, nbytes: int) -> None:
        """Grows every drive to its even share; see :meth:`ActivationStore.prepare`."""
        for store in self.stores:
            store.prepare(-(-nbytes // len(self.stores)))

    def _store_of(self, extent: Extent) -> ActivationStore:
        if not 0 <= extent.drive < len(self.stores):
            raise ValueError(f"{extent} is not reserved here: there are {len(self.stores)} drives")
        return self.stores[extent.drive]

    def _choose(self, nbytes: int, refused: Container[int]) -> int:
        """Return the drive for ``nbytes``, none of those that refused them."""
        speeds = self._speeds()
        idle: list[int] = []
        soonest, busy = math.inf, -1
        for drive, store in enumerate(self.stores):
            if drive in refused:
                continue
            pending = store.pending_bytes()
            if not pending:
                idle.append(drive)
            elif (ends := (pending + nbytes) / speeds[drive]) < soonest:
                soonest, busy = ends, drive
        if len(idle) == 1 and busy < 0:
            return idle[0]
        if not idle or soonest < min(nbytes / speeds[drive] for drive in idle):
            return busy
        return self._take_turn(idle, nbytes, speeds)

    def _speeds(self) -> list[float]:
        """How fast each drive writes, as a share of the fastest; one that was not measured is as fast."""
        rates = [store.write_rate() for store in self.stores]
        best = max([rate for rate in rates if rate is not None], default=1.0)
        return [1.0 if rate is None else rate / best for rate in rates]

    def _take_turn(self, idle: Sequence[int], nbytes: int, speeds: Sequence[float]) -> int:
        """Whose turn it is among drives with nothing to do: start-time fair queueing (Goyal et al. 1996).

        A drive that was busy, or full, when others had their turns is owed nothing for that.
        """
        with self._turn_lock:
            drive = min(idle, key=self._ended.__getitem__)
            self._now = max(self._ended[drive], self._now)
            self._ended[drive] = self._now + nbytes / speeds[drive]
        return drive
