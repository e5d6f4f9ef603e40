"""What backends have in common whose bytes lie in one unlinked file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.store.checksums import Checksums

if TYPE_CHECKING:
    import torch

    from tba_offload.device import Device
    from tba_offload.store.options import StoreOptions
    from tba_offload.store.run_file import RunFile


class RunFileBackend:
    """The file of a backend, and the checksums of its bytes.

    Args:
        file: The file.
        options: Whether there are checksums.
        device: The device that activations lie on.

    Attributes:
        name: The directory.
        device: As given.
    """

    def __init__(self, file: RunFile, options: StoreOptions, device: Device) -> None:
        self.name = file.directory
        self.device = device
        self._file = file
        self._checksums = Checksums(on=options.checksum)

    @property
    def fd(self) -> int:
        """The descriptor of the file."""
        return self._file.fd

    @property
    def size(self) -> int:
        """Bytes that the file has been grown to."""
        return self._file.size

    def grow(self, size: int) -> None:
        """See :meth:`RunFile.grow`."""
        self._file.grow(size)

    def close(self) -> None:
        """Free the blocks."""
        self._file.close()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors."""
        self._file.abandon()

    def digest(self, data: torch.Tensor) -> int | None:
        """Return the checksum of bytes on any device."""
        return self._checksums.of(data)

    def take_checksum_seconds(self) -> float:
        """Processor time for checksums since the last call."""
        return self._checksums.take_seconds()
