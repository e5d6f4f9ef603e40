"""A ring of aligned host slabs, for bytes that cannot travel between a tensor and a drive directly."""

from __future__ import annotations

import mmap
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tba_offload.device.streams import never_freed
from tba_offload.errors import SessionError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tba_offload.device.streams import Device


class StagingRing:
    """At most ``count`` slabs, allocated when first needed and then reused until :meth:`close`.

    Where allocating one would block the device, all are allocated at once.

    Args:
        slab_bytes: Size of a slab; longer transfers go in pieces.
        count: Number of slabs. With as many slabs as threads, no thread ever waits for one.
        alignment: What the address of a slab is a multiple of; at most the page size.
        device: Whose host memory the slabs are; pinned on an accelerator.

    Raises:
        ValueError: A size or a count is not positive, or pages do not satisfy the alignment.
    """

    def __init__(self, slab_bytes: int, count: int, alignment: int, device: Device) -> None:
        if slab_bytes <= 0 or count <= 0:
            raise ValueError(f"a staging ring needs slabs: {count} of {slab_bytes} bytes were asked for")
        if mmap.PAGESIZE % alignment or slab_bytes % alignment:
            raise ValueError(
                f"alignment {alignment} must divide the page size, {mmap.PAGESIZE}, and a slab, {slab_bytes}"
            )
        self.slab_bytes = slab_bytes
        self.count = count
        self._alignment = alignment
        self._device = device
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._made = 0
        self._closed = False
        if device.pins_memory:
            self._free += [self._new_slab() for _ in range(count)]
            self._made = count

    @property
    def allocated_bytes(self) -> int:
        """Host memory that the slabs take now."""
        return self._made * self.slab_bytes

    @contextmanager
    def borrow(self) -> Iterator[torch.Tensor]:
        """Lends one slab, a 1-D uint8 tensor on the host; waits until one is free.

        The borrower must have finished all copies from and to the slab when it leaves the block.

        Raises:
            SessionError: The ring is closed.
            UnsupportedError: The device's host memory is not aligned.
        """
        slab = self._acquire()
        try:
            yield slab
        finally:
            with self._changed:
                if not self._closed:
                    self._free.append(slab)
                    self._changed.notify()

    def close(self) -> None:
        """Free the slabs, a lent one when it comes back, and wake the thread that waits for one."""
        with self._changed:
            self._closed = True
            self._made = 0
            self._free.clear()
            self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: the slabs are never freed. Takes no lock, which a thread may have held."""
        never_freed(self._free)

    def _acquire(self) -> torch.Tensor:
        with self._changed:
            while not self._closed:
                if self._free:
                    return self._free.pop()
                if self._made < self.count:
                    slab = self._new_slab()
                    self._made += 1
                    return slab
                self._changed.wait()
        raise SessionError("the staging ring is closed")

    def _new_slab(self) -> torch.Tensor:
        slab = self._device.host_memory(self.slab_bytes)
        if slab.data_ptr() % self._alignment:  # direct I/O would say EINVAL, as of the drive
            raise UnsupportedError(
                f"host memory of {self._device.torch_device} lies at {slab.data_ptr():#x}, which "
                f"is no multiple of {self._alignment}, as direct I/O needs"
            )
        return slab
