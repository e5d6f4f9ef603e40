"""What a store with threads and extents of its own tells of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.store.batching import BatchingStore

if TYPE_CHECKING:
    from tba_offload.store.base import DriveLoad, Extent
    from tba_offload.store.condition import Condition
    from tba_offload.store.leases import Leases
    from tba_offload.store.life import Life


class Figures(BatchingStore):
    """The part of a store that is asked, and changes nothing.

    Args:
        name: What messages call the store.
        leases: Of the store.
        condition: Of its drive.
        life: Of the store.
    """

    def __init__(self, name: str, leases: Leases, condition: Condition, life: Life) -> None:
        self.name = name
        self._leases = leases
        self._condition = condition
        self._life = life

    def place(self, extent: Extent) -> str:  # noqa: ARG002 - a store without parts is one place
        """Return the name of this store; see :meth:`ActivationStore.place`."""
        return self.name

    @property
    def used_bytes(self) -> int:
        """Bytes that extents take now, padding included."""
        return self._leases.used_bytes

    @property
    def high_water_bytes(self) -> int:
        """The largest end that an extent ever had."""
        return self._leases.high_water_bytes

    def leased(self) -> list[Extent]:
        """Return the extents that are reserved; see :meth:`ActivationStore.leased`."""
        if self._life.closed or self._life.forked:  # they are gone, or the parent's
            return []
        return self._leases.reserved()

    def take_loads(self) -> list[DriveLoad]:
        """Return what the drive has moved; see :meth:`ActivationStore.take_loads`."""
        return [self._condition.take_load(self.capacity_bytes, self._leases.high_water_bytes)]

    def write_rate(self) -> float | None:
        """Bytes a second that were written of late; see :meth:`ActivationStore.write_rate`."""
        return self._condition.writes.rate if self._condition.service.cause is None else None

    def take_outages(self) -> list[tuple[str, str]]:
        """Return what took the drive out of service; see :meth:`ActivationStore.take_outages`."""
        return self._condition.take_outages()

    def pending(self) -> int:
        """Transfers that are queued or running."""
        return self._leases.pending

    def pending_bytes(self) -> int:
        """Bytes whose transfers are queued or running."""
        return self._leases.pending_bytes

    def pending_write_bytes(self) -> int:
        """Bytes whose writes are queued or running."""
        return self._leases.pending_write_bytes
