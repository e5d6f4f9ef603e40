"""Store in host memory. The memory is pinned if the device is an accelerator.

The store computes no checksums, because checksums protect against errors of drives, drivers and file systems.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import torch

from tba_offload.device import READY
from tba_offload.device.host_memory import never_freed
from tba_offload.device.meters import available_bytes
from tba_offload.errors import StoreFullError
from tba_offload.store.base import HOST_TIER, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.device import ByteRange, Device
    from tba_offload.store.base import Extent

SLAB_BYTES = 64 << 20


class HostStore(Store):
    """A store in slabs of host memory, which together form one range of bytes.

    Slabs are large, because pinning each slab blocks the device. If memory is pinned and the capacity is
    limited, all slabs are pinned when the store is opened. Memory that cannot be pinned is pageable.

    Args:
        device: The device with the activations.
        capacity: Largest number of bytes that extents may take; ``None`` for no limit except the free memory.
        slab_bytes: Bytes by which the store grows; a multiple of 4096.

    Raises:
        StoreFullError: There is not enough memory.
    """

    kind, tier, name = "host", HOST_TIER, "host memory"

    def __init__(self, *, device: Device, capacity: int | None = None, slab_bytes: int = SLAB_BYTES) -> None:
        self.device, self.capacity = device, capacity
        # One copy within host memory uses its full bandwidth. On a link to a device, the next copy must be
        # ready when a copy ends.
        self.threads = 2 if device.pins_memory else 1
        self._slab_bytes = slab_bytes
        self._slabs: list[torch.Tensor] = []
        if self.capacity is not None and device.pins_memory:
            self.grow(self.capacity)

    @property
    def description(self) -> dict[str, object]:
        """The kind of store, the kind of memory and the capacity, as JSON values for the run log."""
        how = "pageable " if self.device.refuses_pinning else "pinned " if self.device.pins_memory else ""
        return {
            "kind": self.kind,
            "path": f"{how}memory",
            "capacity": self.capacity,
            "checksum": False,
        }

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in all slabs."""
        return sum(slab.numel() for slab in self._slabs)

    def write(self, extent: Extent, source: ByteRange) -> None:
        """Copy bytes to host memory."""
        for part, data in self._parts(extent, source):
            self.device.copy(part, data, READY)

    def read(self, extent: Extent, target: ByteRange) -> None:
        """Copy bytes back from host memory."""
        for part, data in self._parts(extent, target):
            self.device.copy(data, part, READY)

    def _parts(self, extent: Extent, memory: ByteRange) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the slices of slabs that make up an extent, each with the matching slice of ``memory``."""
        data, at = memory.tensor(), 0
        while at < extent.nbytes:
            index, start = divmod(extent.offset + at, self._slab_bytes)
            nbytes = min(extent.nbytes - at, self._slab_bytes - start)
            yield self._slabs[index][start : start + nbytes], data[at : at + nbytes]
            at += nbytes

    def grow(self, end: int) -> None:
        """Add slabs until the store has ``end`` bytes.

        Raises:
            StoreFullError: There is not enough memory.
        """
        while (size := self.host_bytes) < end:
            limit = size + self._slab_bytes if self.capacity is None else self.capacity
            nbytes = min(self._slab_bytes, limit - size)
            try:
                _check_free(end - size)
                self._slabs.append(self.device.host_memory(nbytes))
            except (MemoryError, OSError) as error:
                what = f"the store in host memory cannot grow from {size} to {size + nbytes} bytes: {error}"
                remedy = "lower store.capacity or store.host_capacity, or use a drive"
                raise StoreFullError(errno.ENOMEM, f"{what}; {remedy}", self.name) from error

    def shrink(self, end: int) -> None:
        """Free the slabs from offset ``end``.

        Pinned slabs stay allocated, because pinning new slabs later would block the device.
        """
        if not self.device.pins_memory:
            del self._slabs[-(-end // self._slab_bytes) :]

    def close(self) -> None:
        """Free all slabs."""
        self._slabs.clear()

    def abandon(self) -> None:
        """Leak the slabs in a forked child, because freeing pinned memory would call the driver."""
        never_freed(self._slabs)


def _check_free(nbytes: int) -> None:
    """Check that ``nbytes`` bytes of host memory are free.

    Linux may allocate more bytes than are free, and kill the process when the process uses the bytes.
    """
    if nbytes > (free := available_bytes(torch.device("cpu"))):
        raise MemoryError(f"only {free} bytes are free")
