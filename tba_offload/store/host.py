"""Extents in host memory, pinned where the device is a GPU.

They have no checksums: those are against drives, their drivers and file systems, and here is none.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tba_offload.device.streams import READY, never_freed
from tba_offload.errors import StoreFullError
from tba_offload.store.engine import QueuedStore
from tba_offload.store.extents import BLOCK, round_up
from tba_offload.store.options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.backend import Move
    from tba_offload.store.base import Extent

SLAB_BYTES = 64 << 20

JOINED_BYTES = 16 << 20
"""Bytes. Neighbouring extents are copied together up to this, between a device and pinned memory.

Waking the thread after each copy takes longer than a small copy. On an H200 with two
threads extents of 4 MiB that went one by one used half of the link: 25 GB/s of 52; those of 64 MiB used all.
"""

_NAME = "host memory"


class HostBackend:
    """Host memory in slabs that together form one range of bytes; none is freed before the end.

    All slabs have one size but the last, which ends at the limit. Large slabs are few: pinning one blocks the
    device, and PyTorch rounds a pinned allocation up to a power of two.

    Attributes:
        name: What messages call it.
        device: The device that activations lie on.
        alignment: Copies start anywhere.
    """

    name = _NAME
    alignment = 1

    def __init__(self, slab_bytes: int, limit: int | None, device: Device, setting: str) -> None:
        self.slab_bytes = slab_bytes
        self._limit = limit
        self.device = device
        self._setting = setting
        self._slabs: list[torch.Tensor] = []

    @property
    def size(self) -> int:
        """Host memory taken, bytes."""
        return sum(slab.numel() for slab in self._slabs)

    @property
    def joined_bytes(self) -> int:
        """See :attr:`Joining.joined_bytes`; on a CPU no thread waits for a copy."""
        return JOINED_BYTES if self.device.pins_memory else 0

    def grow(self, size: int) -> None:
        """Add slabs until there are ``size`` bytes, which are within the limit."""
        while self.size < size:
            nbytes = self.slab_bytes
            if self._limit is not None:
                nbytes = min(nbytes, self._limit - self.size)
            try:
                self._slabs.append(self.device.host_memory(nbytes))
            except (MemoryError, OSError, RuntimeError) as error:  # malloc, mmap, CUDA
                raise StoreFullError(
                    errno.ENOMEM,
                    f"no {nbytes} bytes more than {self.size}: {error}; set "
                    f"{self._setting} to less or use a drive",
                    _NAME,
                ) from error

    def parts(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield the pieces of slabs that make up a range of bytes."""
        while nbytes:
            index, start = divmod(offset, self.slab_bytes)
            length = min(nbytes, self.slab_bytes - start)
            yield self._slabs[index][start : start + length]
            offset += length
            nbytes -= length

    def move_out(self, extent: Extent, source: ByteRange, after: Event) -> None:
        """See :meth:`Backend.move_out`."""
        places = self._places(extent, source.tensor())
        self.device.copy_all([(part, data) for data, part in places], after)

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> None:  # noqa: ARG002
        """See :meth:`Backend.move_in`."""
        self.device.copy_all(list(self._places(extent, target.tensor())), after)

    def move_out_together(self, moves: Sequence[Move]) -> list[int | None]:
        """See :meth:`Joining.move_out_together`; never ``None``."""
        places = [place for extent, source in moves for place in self._places(extent, source.tensor())]
        self.device.copy_all([(part, data) for data, part in places], READY)
        return [None] * len(moves)

    def move_in_together(self, moves: Sequence[Move], *, padded: bool) -> list[int | None]:  # noqa: ARG002
        """See :meth:`Joining.move_in_together`; never ``None``."""
        places = [place for extent, target in moves for place in self._places(extent, target.tensor())]
        self.device.copy_all(places, READY)
        return [None] * len(moves)

    def _places(self, extent: Extent, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parts of some bytes, each with the piece of a slab that has them in an extent."""
        at = 0
        for part in self.parts(extent.offset, extent.nbytes):
            yield data[at : at + part.numel()], part
            at += part.numel()

    def digest(self, data: torch.Tensor) -> None:
        """There is no checksum."""

    def close(self) -> None:
        """Free all slabs."""
        self._slabs.clear()

    def abandon(self) -> None:
        """In a forked child: the slabs are never freed."""
        never_freed(self._slabs)


class HostStore(QueuedStore):
    """A store in host memory, with one thread for each direction: a copy takes all the bandwidth it finds.

    Args:
        capacity: Bytes that extents may take in all, and host memory that the store takes at most; ``None``
            for no limit but the memory's own.
        device: The device that activations lie on; on CUDA the memory is pinned.
        writers: Threads that copy to the store.
        readers: Threads that copy from the store.
        drive: The ``drive`` of the extents.
        setting: The setting that the capacity comes from, for messages.
        slab_bytes: The store grows by this much, a multiple of 4096. On CUDA the store grows to its capacity
            at once if it has one, because growing blocks the device.
        options: In place of capacity and threads.

    Raises:
        StoreFullError: There is no such memory.
    """

    kind = "host"

    def __init__(
        self,
        capacity: int | None = None,
        *,
        device: Device,
        writers: int = 1,
        readers: int = 1,
        drive: int = 0,
        setting: str = "store.capacity",
        slab_bytes: int = SLAB_BYTES,
        options: StoreOptions | None = None,
    ) -> None:
        options = options or StoreOptions(capacity=capacity, writers=writers, readers=readers)
        capacity = options.capacity
        if slab_bytes <= 0 or slab_bytes % BLOCK:
            raise ValueError(f"a slab is a positive multiple of {BLOCK} bytes, not {slab_bytes}")
        limit = None if capacity is None else capacity // BLOCK * BLOCK
        self._slabs = HostBackend(slab_bytes, limit, device, setting)
        if limit is not None and device.pins_memory:
            self._slabs.grow(limit)
        super().__init__(self._slabs, options, drive=drive, setting=setting)

    @property
    def description(self) -> dict[str, object]:
        """Kind, "memory", whether it is pinned, alignment, capacity, and that there are no checksums."""
        return {
            "kind": self.kind,
            "path": "memory",
            "pinned": self._slabs.device.pins_memory,
            "alignment": self.alignment,
            "capacity": self.capacity_bytes,
            "checksum": False,
        }

    @property
    def host_bytes(self) -> int:
        """Host memory that the store takes now."""
        return self._slabs.size

    def may_hold(self, nbytes: int) -> bool:
        """Whether an extent of ``nbytes`` may find room; no, if the capacity leaves too little of it."""
        capacity = self.capacity_bytes
        return capacity is None or self.used_bytes + round_up(nbytes, BLOCK) <= capacity // BLOCK * BLOCK

    def close(self) -> None:
        """End the store; see :meth:`ActivationStore.close`."""
        super().close()
        self._slabs.device.give_back_host_memory()
