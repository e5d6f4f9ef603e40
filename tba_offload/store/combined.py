"""What stores that are made of other stores have in common: each extent lies in one of them, wholly."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from tba_offload.config.values import STALL_SECONDS
from tba_offload.store.base import take_back
from tba_offload.store.batching import BatchingStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.store.base import (
        ActivationStore,
        DriveLoad,
        Extent,
        IoFuture,
        Moved,
        ReadOrder,
        WriteOrder,
    )

Order = TypeVar("Order", "WriteOrder", "ReadOrder")


class CombinedStore(BatchingStore):
    """Several stores that look like one; what derives from it says where a new extent goes.

    Args:
        stores: At least one. They are closed with this one.

    Attributes:
        stores: As given.
        limit: Seconds after which a transfer that is taken back is not waited for; ``None`` for ever.
    """

    def __init__(self, stores: Sequence[ActivationStore]) -> None:
        self.stores = tuple(stores)
        # Alignments are powers of two: what suits the largest suits all.
        self.alignment = max(store.alignment for store in stores)
        capacities = [store.capacity_bytes for store in stores]
        limited = [capacity for capacity in capacities if capacity is not None]
        self.capacity_bytes = sum(limited) if len(limited) == len(capacities) else None
        self.limit: float | None = STALL_SECONDS

    @abstractmethod
    def _store_of(self, extent: Extent) -> ActivationStore:
        """Return the store that an extent lies in."""

    @property
    def used_bytes(self) -> int:
        """Bytes that extents take now, padding included, in all stores."""
        return sum(store.used_bytes for store in self.stores)

    @property
    def high_water_bytes(self) -> int:
        """The largest ends that extents ever had, summed over the stores."""
        return sum(store.high_water_bytes for store in self.stores)

    def reserve(self, nbytes: int, address: int) -> Extent:
        """Take an extent where it is written soon; see :meth:`ActivationStore.reserve`."""
        return self.reserve_many([(nbytes, address)])[0]

    @abstractmethod
    def reserve_many(self, ranges: Sequence[tuple[int, int]]) -> list[Extent]:
        """Take extents in one of the stores for some ranges; see :meth:`ActivationStore.reserve_many`."""

    def release(self, extent: Extent) -> None:
        """Give an extent back; see :meth:`ActivationStore.release`."""
        self._store_of(extent).release(extent)

    def leased(self) -> list[Extent]:
        """Return the extents of all stores; see :meth:`ActivationStore.leased`."""
        return [extent for store in self.stores for extent in store.leased()]

    def write_many(self, orders: Sequence[WriteOrder]) -> list[IoFuture]:
        """Queues the writes of each store together; see :meth:`ActivationStore.write_many`."""
        return self._queue(orders, lambda store, its: store.write_many(its))

    def read_many(self, orders: Sequence[ReadOrder], *, padded: bool) -> list[IoFuture]:
        """Queues the reads of each store together; see :meth:`ActivationStore.read_many`."""
        return self._queue(orders, lambda store, its: store.read_many(its, padded=padded))

    def _queue(
        self, orders: Sequence[Order], queue: Callable[[ActivationStore, list[Order]], list[IoFuture]]
    ) -> list[IoFuture]:
        """Queues transfers, all or none; the futures are in the order of the transfers."""
        of_stores: dict[ActivationStore, list[int]] = {}
        for number, order in enumerate(orders):
            of_stores.setdefault(self._store_of(order[0]), []).append(number)
        queued: list[IoFuture] = []
        new: list[IoFuture] = []
        try:
            for store, numbers in of_stores.items():
                new = queue(store, [orders[number] for number in numbers])
                queued += new
            places = chain.from_iterable(of_stores.values())
            return [future for _, future in sorted(zip(places, queued, strict=True))]
        except BaseException:
            # An interrupt may come when a store has queued its own and they are not among the others yet.
            take_back([*queued, *new], self.limit)
            raise

    def place(self, extent: Extent) -> str:
        """Where in its store the extent lies; see :meth:`ActivationStore.place`."""
        return self._store_of(extent).place(extent)

    def suspend(self, extent: Extent, cause: BaseException) -> None:
        """Take the drive of an extent out of service; see :meth:`ActivationStore.suspend`."""
        self._store_of(extent).suspend(extent, cause)

    def take_outages(self) -> list[tuple[str, str]]:
        """Return what took drives out of service; see :meth:`ActivationStore.take_outages`."""
        return [outage for store in self.stores for outage in store.take_outages()]

    def resume(self) -> None:
        """Put every drive back in service; see :meth:`ActivationStore.resume`."""
        for store in self.stores:
            store.resume()

    def take_loads(self) -> list[DriveLoad]:
        """Return what each store has moved; see :meth:`ActivationStore.take_loads`."""
        return [load for store in self.stores for load in store.take_loads()]

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Have every store tell; see :meth:`ActivationStore.watch_moves`."""
        for store in self.stores:
            store.watch_moves(seen)

    def pending(self) -> int:
        """Transfers that are queued or running in all stores."""
        return sum(store.pending() for store in self.stores)

    def pending_bytes(self) -> int:
        """Bytes whose transfers are queued or running in all stores."""
        return sum(store.pending_bytes() for store in self.stores)

    def pending_write_bytes(self) -> int:
        """Bytes whose writes are queued or running in all stores."""
        return sum(store.pending_write_bytes() for store in self.stores)

    def limit_waits(self, seconds: float | None) -> None:
        """Record that the same limit for every store; see :meth:`ActivationStore.limit_waits`."""
        self.limit = seconds
        for store in self.stores:
            store.limit_waits(seconds)

    def close(self) -> None:
        """Close every store, also if one of them raises; see :meth:`ActivationStore.close`."""
        with ExitStack() as stack:
            for store in self.stores:
                stack.callback(store.close)


def first_ranges(ranges: Sequence[tuple[int, int]], nbytes: int) -> Sequence[tuple[int, int]]:
    """Return the first ranges that together have at least ``nbytes``; all ranges if they have less."""
    for number, (length, _) in enumerate(ranges):
        nbytes -= length
        if nbytes <= 0:
            return ranges[: number + 1]
    return ranges
