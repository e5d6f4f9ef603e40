"""Extents in host memory, pinned where the device is a GPU."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tba_offload.errors import StoreFullError
from tba_offload.store import posix
from tba_offload.store.extents import BLOCK, round_up
from tba_offload.store.queued import QueuedStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.base import Extent

SLAB_BYTES = 64 << 20
_NAME = "host memory"


class _Slabs:
    """Host memory in slabs that together form one range of bytes; none is freed before the end.

    All slabs have one size but the last, which ends at the limit. Large slabs are few: pinning one blocks the
    device, and PyTorch rounds a pinned allocation up to a power of two.
    """

    def __init__(self, slab_bytes: int, limit: int | None, device: Device, setting: str) -> None:
        self.slab_bytes = slab_bytes
        self._limit = limit
        self._device = device
        self._setting = setting
        self._slabs: list[torch.Tensor] = []

    @property
    def allocated_bytes(self) -> int:
        """Host memory taken."""
        return sum(slab.numel() for slab in self._slabs)

    def grow(self, size: int) -> None:
        """Adds slabs until there are ``size`` bytes, which are within the limit."""
        while self.allocated_bytes < size:
            nbytes = self.slab_bytes
            if self._limit is not None:
                nbytes = min(nbytes, self._limit - self.allocated_bytes)
            try:
                self._slabs.append(self._device.host_memory(nbytes))
            except (MemoryError, OSError, RuntimeError) as error:  # malloc, mmap, CUDA
                raise StoreFullError(
                    errno.ENOMEM,
                    f"no {nbytes} bytes more than {self.allocated_bytes}: {error}; set "
                    f"{self._setting} to less or use a drive",
                    _NAME,
                ) from error

    def parts(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        """The pieces of slabs that make up a range of bytes."""
        while nbytes:
            index, start = divmod(offset, self.slab_bytes)
            length = min(nbytes, self.slab_bytes - start)
            yield self._slabs[index][start : start + length]
            offset += length
            nbytes -= length

    def close(self) -> None:
        """Frees all slabs."""
        self._slabs.clear()

    def abandon(self) -> None:
        """Keeps the slabs: freeing pinned memory would call CUDA, which a forked child must not."""


class HostStore(QueuedStore):
    """A store in host memory, with one thread for each direction: a copy takes all the bandwidth it finds.

    Args:
        capacity: Bytes that extents may take in all, and host memory that the store takes at most; ``None``
            for no limit but the memory's own.
        device: The device that activations lie on; on CUDA the memory is pinned.
        writers: Threads that copy to the store.
        readers: Threads that copy from the store.
        checksum: Verify every read against a checksum taken at the write.
        drive: The ``drive`` of the extents.
        setting: The setting that the capacity comes from, for messages.
        slab_bytes: The store grows by this much, a multiple of 4096. On CUDA the store grows to its capacity
            at once if it has one, because growing blocks the device.

    Raises:
        StoreFullError: There is no such memory.
        MissingDependencyError: ``checksum`` without xxhash.
    """

    kind = "host"

    def __init__(
        self,
        capacity: int | None = None,
        *,
        device: Device,
        writers: int = 1,
        readers: int = 1,
        checksum: bool = False,
        drive: int = 0,
        setting: str = "store.capacity",
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        if slab_bytes <= 0 or slab_bytes % BLOCK:
            raise ValueError(f"a slab is a positive multiple of {BLOCK} bytes, not {slab_bytes}")
        limit = None if capacity is None else capacity // BLOCK * BLOCK
        self._slabs = _Slabs(slab_bytes, limit, device, setting)
        if limit is not None and device.pins_memory:
            self._slabs.grow(limit)
        super().__init__(
            alignment=1,
            capacity=capacity,
            checksum=checksum,
            device=device,
            writers=writers,
            readers=readers,
            drive=drive,
            name=_NAME,
            setting=setting,
            backing=self._slabs,
        )

    @property
    def description(self) -> dict[str, object]:
        """Kind, "memory", whether it is pinned, alignment, capacity, checksum."""
        return {
            "kind": self.kind,
            "path": "memory",
            "pinned": self._device.pins_memory,
            "alignment": self.alignment,
            "capacity": self.capacity_bytes,
            "checksum": self._checksum is not None,
        }

    @property
    def host_bytes(self) -> int:
        """Host memory that the store takes now."""
        return self._slabs.allocated_bytes

    def may_hold(self, nbytes: int) -> bool:
        """Whether an extent of ``nbytes`` may find room; no, if the capacity leaves too little of it."""
        capacity = self._space.capacity
        return capacity is None or self._space.used + round_up(nbytes, BLOCK) <= capacity

    def _move_out(self, extent: Extent, source: ByteRange, after: Event) -> int | None:
        hasher, data = self._hasher(), source.tensor()
        at = 0
        for part in self._slabs.parts(extent.offset, extent.nbytes):
            self._device.copy(part, data[at : at + part.numel()], after)
            at += part.numel()
            if hasher is not None:
                hasher.update(posix.view(part.data_ptr(), part.numel()))
        return None if hasher is None else hasher.intdigest()

    def _move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:  # noqa: ARG002
        hasher, data = self._hasher(), target.tensor()
        at = 0
        for part in self._slabs.parts(extent.offset, extent.nbytes):
            if hasher is not None:
                hasher.update(posix.view(part.data_ptr(), part.numel()))
            self._device.copy(data[at : at + part.numel()], part, after)
            at += part.numel()
        return None if hasher is None else hasher.intdigest()
