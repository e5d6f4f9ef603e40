"""Storage for the states of sub-groups between updates, in extents of a store."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.device import READY, Device, aligned_range
from tba_offload.errors import HangingError, StoreError, StoreFullError, TransferError
from tba_offload.store.base import BLOCK
from tba_offload.store.pool import Transfer

if TYPE_CHECKING:
    import torch

    from tba_offload.device import ByteRange, Event
    from tba_offload.store.multi import MultiStore

PART = 8 * 2**20
"""Size of one extent in bytes. Several threads transfer the extents of a sub-group in parallel."""

HOST_PART = 64 * 2**20
"""Size of one extent in bytes if the store is host memory.

After each copy, the link to the device is idle until a thread wakes up. On an H200, updates moved 60 GB/s in
both directions with extents of 8 MiB, and 82 GB/s with extents of 64 MiB.
"""

TRIES = 3
"""Number of attempts to read an extent before an error is raised."""


class Reads(NamedTuple):
    """Reads in an interval.

    Attributes:
        read_bytes: Bytes that were read.
        waited_seconds: Seconds spent waiting for transfers.
        waits: Start and end of the recorded waits, by :func:`time.perf_counter`.
    """

    read_bytes: int
    waited_seconds: float
    waits: tuple[tuple[float, float], ...]


class Homes:
    """The store of an optimizer's sub-groups or of frozen weights, with counters of transfers.

    Args:
        store: The store.
        device: The device that runs the optimizer.

    Attributes:
        read_bytes: Number of bytes in all reads that have started.
        written_bytes: Number of bytes in all writes that have started.
        waited: Seconds spent waiting for transfers.
        waits: Start and end of each wait. By default, the deque has a maximum length of 0, so no waits are
            recorded.
    """

    def __init__(self, store: MultiStore, device: Device) -> None:
        self.store = store
        self.device = device
        self.part_bytes = HOST_PART if store.kind == "host" else PART
        self.read_bytes = self.written_bytes = 0
        self.waited = 0.0
        self.waits: deque[tuple[float, float]] = deque(maxlen=0)

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer, but not longer than the time limit of the store.

        Raises:
            HangingError: The drive hangs.
            StoreError: The transfer failed.
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

    def take(self) -> Reads:
        """Return the reads since the last call, and set the counters of reads to 0."""
        found = Reads(self.read_bytes, self.waited, tuple(self.waits))
        self.read_bytes, self.waited = 0, 0.0
        self.waits.clear()
        return found


class Home:
    """The extents of one sub-group or of one frozen weight. Writes of the same size use the same extents.

    Args:
        homes: The shared store.
        owner: Name of the parameters, for messages.
        what: Kind of data, for messages.

    Attributes:
        homes: The shared store.
    """

    def __init__(self, homes: Homes, owner: str, what: str = "optimizer states") -> None:
        self.homes = homes
        self._what = f"the {what} of {owner}"
        self._writes: list[Transfer] = []  # the last write of each part, with its extent

    def write(self, memory: ByteRange) -> list[Transfer]:
        """Start to write all bytes. The caller waits with :meth:`settle_writes`.

        Args:
            memory: The bytes, page-aligned. If the number of bytes has changed since the last write, the
                bytes get new extents.
        """
        homes = self.homes
        if sum(write.nbytes for write in self._writes if write.extent is not None) != memory.nbytes:
            self.release()
        parts, after = self._parts(memory), homes.device.event()
        extents = [write.extent for write in self._writes] or [None] * len(parts)
        pairs = zip(parts, extents, strict=True)
        self._writes = [Transfer(part, after, extent=extent) for part, extent in pairs]
        homes.store.write(self._writes)
        homes.written_bytes += memory.nbytes
        return self._writes

    def settle_writes(self, writes: list[Transfer]) -> None:
        """Wait for writes.

        Raises:
            TransferError: A write failed, or the drive hangs.
        """
        for write in writes:
            try:
                self.homes.wait(write)
            except StoreError as error:
                remedy = "Free some space" if isinstance(error, StoreFullError) else "Check the drive"
                why = f"{self._what} cannot be written: {error}. {remedy}"
                raise TransferError(f"{why}. If training has started, load a checkpoint") from error

    def read(self, memory: ByteRange, after: Event | None = None) -> list[Transfer]:
        """Start to read all bytes. The caller waits with :meth:`settle_reads`.

        Args:
            memory: The memory to fill.
            after: Event after which the device no longer uses the memory. The default is an event after all
                work that the calling thread has submitted so far.

        Raises:
            SessionError: The store is closed.
            TransferError: The bytes were never written, because an update or the loading of a checkpoint was
                interrupted.
        """
        homes = self.homes
        after = after or homes.device.event()
        extents = [write.extent for write in self._writes]
        if not extents or None in extents:
            why = "an update or the loading of a checkpoint was interrupted"
            raise TransferError(f"{self._what} are lost: {why}. Load a checkpoint")
        parts = zip(self._parts(memory), extents, strict=True)
        reads = [Transfer(part, after, extent=extent) for part, extent in parts]
        homes.store.read(reads)
        homes.read_bytes += memory.nbytes
        return reads

    def settle_reads(self, reads: list[Transfer]) -> None:
        """Wait for reads. Repeat a read that fails, up to ``TRIES`` attempts.

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
                        why = f"{self._what} cannot be read back from {place}: {error}"
                        raise TransferError(f"{why}. Check the drive, and load a checkpoint") from error
                    read = Transfer(memory, homes.device.event(), extent=extent)
                    homes.store.read([read])

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Read the bytes into new host memory, and return the memory as a 1-D uint8 tensor.

        Raises:
            TransferError: The bytes cannot be read.
        """
        target = page_aligned(nbytes, Device(), self.homes.store.alignment)
        self.settle_reads(self.read(target, READY))
        return target.tensor()

    def release(self) -> None:
        """Release the extents.

        If a transfer uses an extent, the extent is freed at the end of the transfer.
        """
        writes, self._writes = self._writes, []
        for write in writes:
            if write.extent is not None:
                self.homes.store.release(write.extent)

    def _parts(self, memory: ByteRange) -> list[ByteRange]:
        size, end = self.homes.part_bytes, memory.nbytes
        return [memory.part(start, min(size, end - start)) for start in range(0, end, size)]


def page_aligned(nbytes: int, device: Device, alignment: int) -> ByteRange:
    """Allocate page-aligned memory, which direct I/O can use without an extra copy."""
    return aligned_range(nbytes, 0, max(alignment, BLOCK), device)
