"""What a store is made on: the bytes of a file, or of host memory, and how they are moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.base import Extent


class Backend(Protocol):
    """What holds the bytes and moves them, for :class:`tba_offload.store.engine.QueuedStore`.

    It must not refer to the store, so that a forgotten store can be collected. The thread that has bytes
    moved has waited for ``after``.
    """

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def alignment(self) -> int:
        """See :class:`tba_offload.store.ActivationStore`."""

    @property
    def device(self) -> Device:
        """The device that activations lie on."""

    @property
    def size(self) -> int:
        """Bytes that there is room for."""

    def grow(self, size: int) -> None:
        """Makes room for ``size`` bytes; raises ``StoreFullError`` and changes nothing if there is none."""

    def move_out(self, extent: Extent, source: ByteRange, after: Event) -> int | None:
        """Writes, on an I/O thread; returns the checksum of the bytes, ``None`` if checksums are off."""

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:
        """Reads, on an I/O thread; returns the checksum of the bytes, ``None`` if checksums are off."""

    def digest(self, data: torch.Tensor) -> int | None:
        """The checksum of bytes in the device's memory, as of their transfer."""

    def close(self) -> None:
        """Frees everything; takes no lock, because the cyclic collector may call it."""

    def abandon(self) -> None:
        """In a forked child: closes descriptors and touches nothing else."""
