"""One store over several drives: an extent lies wholly on one of them, the one with the least to do."""

from __future__ import annotations

import errno
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tba_offload.errors import StoreFullError
from tba_offload.store.base import ActivationStore, DriveLoad, Extent, IoFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import ByteRange, Event


class StripedStore(ActivationStore):
    """Spreads extents over stores.

    A new extent goes to the store with the fewest bytes queued and running, in turn where several have
    equally few; to another one if that is full. A slow drive thus gets less to do.

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
        self.stores = tuple(stores)
        # Alignments are powers of two: what suits the largest suits all.
        self.alignment = max(store.alignment for store in stores)
        capacities = [store.capacity_bytes for store in stores]
        limited = [capacity for capacity in capacities if capacity is not None]
        self.capacity_bytes = sum(limited) if len(limited) == len(capacities) else None
        self._turn = 0
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

    @property
    def used_bytes(self) -> int:
        """Bytes that extents take now, padding included, on all drives."""
        return sum(store.used_bytes for store in self.stores)

    @property
    def high_water_bytes(self) -> int:
        """The largest ends that extents ever had, summed over the drives."""
        return sum(store.high_water_bytes for store in self.stores)

    def reserve(self, nbytes: int, address: int) -> Extent:
        """Takes an extent where there is room and least to do; see :meth:`ActivationStore.reserve`."""
        refusals = []
        for drive in self._by_load():
            try:
                return self.stores[drive].reserve(nbytes, address)
            except StoreFullError as error:
                refusals.append(str(error))
        raise StoreFullError(
            errno.ENOSPC,
            f"none of {len(self.stores)} drives has room for {nbytes} bytes: {'; '.join(refusals)}",
        )

    def release(self, extent: Extent) -> None:
        """Gives an extent back; see :meth:`ActivationStore.release`."""
        self._store_of(extent).release(extent)

    def write(
        self,
        extent: Extent,
        source: ByteRange,
        after: Event,
        *,
        done: Callable[[IoFuture], object] | None = None,
    ) -> IoFuture:
        """Queues a write; see :meth:`ActivationStore.write`."""
        return self._store_of(extent).write(extent, source, after, done=done)

    def read(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> IoFuture:
        """Queues a read; see :meth:`ActivationStore.read`."""
        return self._store_of(extent).read(extent, target, after, padded=padded)

    def place(self, extent: Extent) -> str:
        """The store that the extent lies in; see :meth:`ActivationStore.place`."""
        return self._store_of(extent).place(extent)

    def take_loads(self) -> list[DriveLoad]:
        """What each drive has moved; see :meth:`ActivationStore.take_loads`."""
        return [load for store in self.stores for load in store.take_loads()]

    def pending(self) -> int:
        """Transfers that are queued or running on all drives."""
        return sum(store.pending() for store in self.stores)

    def pending_bytes(self) -> int:
        """Bytes whose transfers are queued or running on all drives."""
        return sum(store.pending_bytes() for store in self.stores)

    def prepare(self, nbytes: int) -> None:
        """Grows every drive to its even share; see :meth:`ActivationStore.prepare`."""
        for store in self.stores:
            store.prepare(-(-nbytes // len(self.stores)))

    def close(self) -> None:
        """Closes every store, also if one of them raises; see :meth:`ActivationStore.close`."""
        with ExitStack() as stack:
            for store in self.stores:
                stack.callback(store.close)

    def _store_of(self, extent: Extent) -> ActivationStore:
        if not 0 <= extent.drive < len(self.stores):
            raise ValueError(f"{extent} is not reserved here: there are {len(self.stores)} drives")
        return self.stores[extent.drive]

    def _by_load(self) -> list[int]:
        """All drives, the one to use first in front."""
        count = len(self.stores)
        with self._turn_lock:
            first = self._turn
            self._turn = (first + 1) % count
        drives = [(first + i) % count for i in range(count)]
        drives.sort(key=lambda drive: self.stores[drive].pending_bytes())  # stable: ties go in turn
        return drives
