"""What a store is made on: the bytes of a file, or of host memory, and how they are moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        """Make room for ``size`` bytes; raise ``StoreFullError`` and change nothing if there is none."""

    def move_out(self, extent: Extent, source: ByteRange, after: Event) -> int | None:
        """Write, on an I/O thread; return the checksum of the bytes, ``None`` if checksums are off."""

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:
        """Read, on an I/O thread; return the checksum of the bytes, ``None`` if checksums are off."""

    def digest(self, data: torch.Tensor) -> int | None:
        """Return the checksum of bytes in the device's memory, as of their transfer."""

    def close(self) -> None:
        """Free everything; take no lock, because the cyclic collector may call it."""

    def abandon(self) -> None:
        """In a forked child: closes descriptors and touches nothing else."""


Move = tuple["Extent", "ByteRange"]
"""An extent and the memory that its bytes come from, or go to."""


class Joining(Backend, Protocol):
    """A backend that can move neighbouring extents by one call: a call costs as much as many bytes.

    Each extent begins where the one before it ends. ``None`` means that these cannot go together, or that the
    call failed: they are moved one by one then, which tells which of them cannot be.
    """

    @property
    def joined_bytes(self) -> int:
        """Bytes that neighbours come to at most to go together; 0 if each goes by itself after all."""

    def move_out_together(self, moves: Sequence[Move]) -> list[int | None] | None:
        """Write, on an I/O thread; return the checksums as :meth:`Backend.move_out` does, or ``None``."""

    def move_in_together(self, moves: Sequence[Move], *, padded: bool) -> list[int | None] | None:
        """Read, on an I/O thread; return the checksums as :meth:`Backend.move_in` does, or ``None``."""
