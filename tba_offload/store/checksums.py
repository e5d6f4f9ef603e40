"""Checksums of what stores move: xxh3, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xxhash import xxh3_64

from tba_offload.store import posix

if TYPE_CHECKING:
    import torch

    from tba_offload.device import ByteRange


class Checksums:
    """The checksums of one store.

    Args:
        on: Whether there are any.
    """

    def __init__(self, *, on: bool) -> None:
        self.on = on

    def hasher(self) -> xxh3_64 | None:
        """A new checksum for one transfer, ``None`` if checksums are off.

        An object, because the functions of xxhash before 4.0 hold the interpreter's lock while they hash.
        """
        return xxh3_64() if self.on else None

    def of(self, data: torch.Tensor) -> int | None:
        """The checksum of bytes on any device."""
        if (hasher := self.hasher()) is None:
            return None
        on_host = data.cpu()
        hasher.update(posix.view(on_host.data_ptr(), on_host.numel()))
        return hasher.intdigest()

    def of_range(self, memory: ByteRange) -> int | None:
        """The checksum of bytes in host memory."""
        if (hasher := self.hasher()) is None:
            return None
        hasher.update(posix.view(memory.address, memory.nbytes))
        return hasher.intdigest()
