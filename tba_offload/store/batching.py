"""What a store says once that moves many extents as easily as one."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from tba_offload.store.base import ActivationStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import ByteRange, Event
    from tba_offload.store.base import Extent, IoFuture, ReadOrder, WriteOrder


class BatchingStore(ActivationStore):
    """A store to which one transfer is a batch of one."""

    @abstractmethod
    def write_many(self, orders: Sequence[WriteOrder]) -> list[IoFuture]:
        """Queues writes; see :meth:`ActivationStore.write_many`."""

    @abstractmethod
    def read_many(self, orders: Sequence[ReadOrder], *, padded: bool) -> list[IoFuture]:
        """Queues reads; see :meth:`ActivationStore.read_many`."""

    def write(
        self,
        extent: Extent,
        source: ByteRange,
        after: Event,
        *,
        done: Callable[[IoFuture], object] | None = None,
    ) -> IoFuture:
        """Queues a write; see :meth:`ActivationStore.write`."""
        return self.write_many([(extent, source, after, done)])[0]

    def read(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> IoFuture:
        """Queues a read; see :meth:`ActivationStore.read`."""
        return self.read_many([(extent, target, after)], padded=padded)[0]
