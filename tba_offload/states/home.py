"""Where the states of one sub-group live between updates: extents of a store."""

from __future__ import annotations

import errno
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from tba_offload.device.ranges import aligned_range
from tba_offload.device.streams import READY, CpuDevice
from tba_offload.errors import HangingError, StoreError, StoreFullError, TransferError
from tba_offload.store.extents import BLOCK
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    import torch

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.base import ActivationStore, Extent, IoFuture

PART = 8 * 2**20
"""Bytes that travel as one extent: a sub-group has some for each drive and each thread."""

HOST_PART = 64 * 2**20
"""Bytes of an extent where those lie in host memory: after each copy the link idles until a thread is awake
again. Updates on an H200 moved 60 GB/s in parts of 8 MiB, both directions together, and 82 in parts of 64."""

TRIES = 3
"""Reads of one extent before its error counts."""


class Homes:
    """What the homes of all sub-groups, or of all frozen weights, share.

    Args:
        store: Where bytes go.
        device: Where the optimizer updates.
        stall_limit: Seconds that a transfer is waited for; ``None`` for no limit.

    Attributes:
        read_bytes: Bytes whose reads have begun.
        written_bytes: Bytes whose writes have begun.
        waited: Seconds that were waited for transfers.
        waits: Begin and end of each wait; who wants them sets a longer one.
    """

    def __init__(self, store: ActivationStore, device: Device, stall_limit: float | None) -> None:
        self.store = store
        self.device = device
        self.stall_limit = stall_limit
        self.part_bytes = HOST_PART if store.kind == HostStore.kind else PART
        self.read_bytes = self.written_bytes = 0
        self.waited = 0.0
        self.waits: deque[tuple[float, float]] = deque(maxlen=0)

    def wait(self, transfer: IoFuture) -> None:
        """Wait for a transfer, within the limit.

        Raises:
            HangingError: Its drive hangs.
            StoreError: It failed.
        """
        if transfer.is_done and transfer.error is None:
            return
        began = time.perf_counter()
        try:
            transfer.wait(self.stall_limit)
        except TimeoutError:
            reason = f"the drive has not answered for {self.stall_limit} s (store.stall_seconds)"
            raise HangingError(errno.ETIMEDOUT, reason) from None
        finally:
            ended = time.perf_counter()
            self.waited += ended - began
            self.waits.append((began, ended))


class Home:
    """Where the states of one sub-group, or one frozen weight, live.

    Args:
        homes: What all share.
        owner: Whose they are, for messages.
        what: What lives there, likewise.

    Attributes:
        homes: As given.
    """

    def __init__(self, homes: Homes, owner: str, what: str = "optimizer states") -> None:
        self.homes = homes
        self._what = f"the {what} of {owner}"
        self._extents: tuple[Extent, ...] = ()

    def write(self, memory: ByteRange) -> list[IoFuture]:
        """Begin to write all bytes; the caller waits for them with :meth:`settle_writes`.

        Args:
            memory: The bytes, page-aligned; as many each time.

        Raises:
            TransferError: There is no room.
        """
        homes = self.homes
        try:
            self._reserve(memory)
            after = homes.device.event()
            writes = homes.store.write_many(
                [(extent, part, after, None) for extent, part in self._parts(memory)]
            )
        except StoreError as error:
            raise self._unwritten(error) from error
        homes.written_bytes += memory.nbytes
        return writes

    def settle_writes(self, writes: list[IoFuture]) -> None:
        """Wait for writes.

        Raises:
            TransferError: One failed, or the drive hangs.
        """
        for write in writes:
            try:
                self.homes.wait(write)
            except StoreError as error:
                raise self._unwritten(error) from error

    def read(self, memory: ByteRange, after: Event | None = None) -> list[IoFuture]:
        """Begin to read all bytes; the caller waits for them with :meth:`settle_reads`.

        Args:
            memory: Where to.
            after: The device has no more work with the memory when this point is reached; by default what the
                calling thread has given it until now.

        Raises:
            StoreError: The store is closed.
            TransferError: There are none: what was to bring them here was interrupted.
        """
        homes = self.homes
        if not self._extents:
            raise TransferError(
                f"{self._what} are lost, since an update or the loading of a checkpoint was interrupted; "
                "load a checkpoint"
            )
        homes.read_bytes += memory.nbytes
        after = after or homes.device.event()
        orders = [(extent, part, after) for extent, part in self._parts(memory)]
        return homes.store.read_many(orders, padded=False)

    def settle_reads(self, reads: list[IoFuture], memory: ByteRange) -> None:
        """Wait for reads; one that failed is tried again.

        Raises:
            TransferError: The bytes cannot be read.
        """
        homes = self.homes
        for first, (extent, part) in zip(reads, self._parts(memory) if reads else (), strict=True):
            read = first
            for tries_left in reversed(range(TRIES)):
                try:
                    homes.wait(read)
                    break
                except StoreError as error:
                    if not tries_left or isinstance(error, HangingError):
                        raise TransferError(
                            f"{self._what} cannot be read back from {homes.store.place(extent)}: {error}; "
                            "check the drive, and load a checkpoint"
                        ) from error
                    read = homes.store.read(extent, part, homes.device.event(), padded=False)

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Return a copy of the bytes in new host memory, 1-D uint8; the slots are left alone.

        Raises:
            TransferError: They cannot be read.
        """
        target = page_aligned(nbytes, CpuDevice(), self.homes.store.alignment)
        self.settle_reads(self.read(target, READY), target)
        return target.tensor()

    def release(self) -> None:
        """Give the extents back; those of a transfer that hangs stay reserved until the store is closed."""
        extents, self._extents = self._extents, ()
        for extent in extents:
            with suppress(ValueError):  # a transfer has not ended
                self.homes.store.release(extent)

    def _reserve(self, memory: ByteRange) -> None:
        if sum(extent.nbytes for extent in self._extents) == memory.nbytes:
            return
        self.release()
        try:
            for start in range(0, memory.nbytes, self.homes.part_bytes):
                nbytes = min(self.homes.part_bytes, memory.nbytes - start)
                self._extents += (self.homes.store.reserve(nbytes, memory.address + start),)
        except BaseException:
            self.release()
            raise

    def _parts(self, memory: ByteRange) -> list[tuple[Extent, ByteRange]]:
        starts = range(0, memory.nbytes, self.homes.part_bytes)
        extents = zip(starts, self._extents, strict=True)
        return [(extent, memory.part(start, extent.nbytes)) for start, extent in extents]

    def _unwritten(self, error: StoreError) -> TransferError:
        remedy = "Make room" if isinstance(error, StoreFullError) else "Check the drive"
        return TransferError(
            f"{self._what} cannot be written: {error}. {remedy}; if training has begun, load a checkpoint of "
            "the model and the optimizer"
        )


def page_aligned(nbytes: int, device: Device, alignment: int) -> ByteRange:
    """Return new memory for the bytes of a sub-group: direct I/O fills and empties it without a copy."""
    return aligned_range(nbytes, 0, max(alignment, BLOCK), device)
