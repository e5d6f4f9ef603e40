"""Where the states of one sub-group live between updates: extents of a store."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from tba_offload.device import READY, Device, aligned_range
from tba_offload.errors import HangingError, StoreError, StoreFullError, TransferError
from tba_offload.store.base import BLOCK
from tba_offload.store.pool import Transfer

if TYPE_CHECKING:
    import torch

    from tba_offload.device import ByteRange, Event
    from tba_offload.store.multi import MultiStore

PART = 8 * 2**20
"""Bytes that travel as one extent: a sub-group has some for each drive and each thread."""

HOST_PART = 64 * 2**20
"""Bytes of an extent in host memory alone: after each copy the link idles until a thread is awake
again. Updates on an H200 moved 60 GB/s in parts of 8 MiB, both directions together, and 82 in parts of 64."""

TRIES = 3
"""Reads of one extent before its error counts."""


class Homes:
    """The store of all sub-groups, or of all frozen weights, and what has moved.

    Args:
        store: Where bytes go.
        device: Where the optimizer updates.

    Attributes:
        read_bytes: Bytes whose reads have begun.
        written_bytes: Bytes whose writes have begun.
        waited: Seconds that were waited for transfers.
        waits: Begin and end of each wait; who wants them sets a longer one.
    """

    def __init__(self, store: MultiStore, device: Device) -> None:
        self.store = store
        self.device = device
        self.part_bytes = HOST_PART if store.kind == "host" else PART
        self.read_bytes = self.written_bytes = 0
        self.waited = 0.0
        self.waits: deque[tuple[float, float]] = deque(maxlen=0)

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer, within the limit of the store.

        Raises:
            HangingError: Its drive hangs.
            StoreError: It failed.
        """
        if transfer.is_done and transfer.error is None:
            return
        began = time.perf_counter()
        try:
            self.store.wait(transfer)
        finally:
            ended = time.perf_counter()
            self.waited += ended - began
            self.waits.append((began, ended))


class Home:
    """The extents of one sub-group, or of one frozen weight. Each write goes to the same ones.

    Args:
        homes: The store, for all of them.
        owner: Whose they are, for messages.
        what: The bytes, likewise.

    Attributes:
        homes: As given.
    """

    def __init__(self, homes: Homes, owner: str, what: str = "optimizer states") -> None:
        self.homes = homes
        self._what = f"the {what} of {owner}"
        self._writes: list[Transfer] = []  # the last of each part, which knows its extent

    def write(self, memory: ByteRange) -> list[Transfer]:
        """Begin to write all bytes; the caller waits for them with :meth:`settle_writes`.

        Args:
            memory: The bytes, page-aligned; as many each time.
        """
        homes = self.homes
        if sum(write.nbytes for write in self._writes if write.extent is not None) != memory.nbytes:
            self.release()
        parts, after = self._parts(memory), homes.device.event()
        extents = [write.extent for write in self._writes] or [None] * len(parts)
        self._writes = [
            Transfer(part, after, extent=extent) for part, extent in zip(parts, extents, strict=True)
        ]
        homes.store.write(self._writes)
        homes.written_bytes += memory.nbytes
        return self._writes

    def settle_writes(self, writes: list[Transfer]) -> None:
        """Wait for writes.

        Raises:
            TransferError: One failed, or the drive hangs.
        """
        for write in writes:
            try:
                self.homes.wait(write)
            except StoreError as error:
                remedy = "Make room" if isinstance(error, StoreFullError) else "Check the drive"
                raise TransferError(
                    f"{self._what} cannot be written: {error}. {remedy}; if training has begun, load a "
                    "checkpoint of the model and the optimizer"
                ) from error

    def read(self, memory: ByteRange, after: Event | None = None) -> list[Transfer]:
        """Begin to read all bytes; the caller waits for them with :meth:`settle_reads`.

        Args:
            memory: Where to.
            after: The device has no more work with the memory when this point is reached; by default all
                work that the calling thread has given it until now.

        Raises:
            SessionError: The store is closed.
            TransferError: There are none: the update or the load that was to write them was interrupted.
        """
        homes = self.homes
        after = after or homes.device.event()
        extents = [write.extent for write in self._writes]
        if not extents or None in extents:
            raise TransferError(
                f"{self._what} are lost, since an update or the loading of a checkpoint was interrupted; "
                "load a checkpoint"
            )
        parts = zip(self._parts(memory), extents, strict=True)
        reads = [Transfer(part, after, extent=extent) for part, extent in parts]
        homes.store.read(reads)
        homes.read_bytes += memory.nbytes
        return reads

    def settle_reads(self, reads: list[Transfer]) -> None:
        """Wait for reads; one that failed is tried again.

        Raises:
            TransferError: The bytes cannot be read.
        """
        homes = self.homes
        for first in reads:
            read = first
            for tries_left in reversed(range(TRIES)):
                try:
                    homes.wait(read)
                    break
                except StoreError as error:
                    memory, extent = read.memory, read.extent
                    if not tries_left or isinstance(error, HangingError) or memory is None or extent is None:
                        place = "the store" if extent is None else homes.store.place(extent)
                        raise TransferError(
                            f"{self._what} cannot be read back from {place}: {error}; check the drive, and "
                            "load a checkpoint"
                        ) from error
                    read = Transfer(memory, homes.device.event(), extent=extent)
                    homes.store.read([read])

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Return a copy of the bytes in new host memory, 1-D uint8; the slots are left alone.

        Raises:
            TransferError: They cannot be read.
        """
        target = page_aligned(nbytes, Device(), self.homes.store.alignment)
        self.settle_reads(self.read(target, READY))
        return target.tensor()

    def release(self) -> None:
        """Give the extents back; one that a transfer uses is freed when that ends."""
        writes, self._writes = self._writes, []
        for write in writes:
            if write.extent is not None:
                self.homes.store.release(write.extent)

    def _parts(self, memory: ByteRange) -> list[ByteRange]:
        size = self.homes.part_bytes
        return [
            memory.part(start, min(size, memory.nbytes - start)) for start in range(0, memory.nbytes, size)
        ]


def page_aligned(nbytes: int, device: Device, alignment: int) -> ByteRange:
    """Return new memory for the bytes of a sub-group: direct I/O fills and empties it without a copy."""
    return aligned_range(nbytes, 0, max(alignment, BLOCK), device)
