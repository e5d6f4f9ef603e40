"""Which extents of a store are reserved, and what is being done with each."""

from __future__ import annotations

import errno
import threading
from functools import partial
from typing import TYPE_CHECKING

from tba_offload.errors import StoreFullError
from tba_offload.store.base import Extent
from tba_offload.store.extents import BLOCK, ExtentAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.device import ByteRange
    from tba_offload.store.backend import Backend
    from tba_offload.store.life import Life


class TooSmallError(Exception):
    """The store has to grow before it can hand out an extent.

    Attributes:
        size: How far, bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Lease:
    """A reserved extent and what is being done with it."""

    __slots__ = ("digest", "extent", "reading", "writing", "written")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.writing = False
        self.reading = 0
        self.written = False
        self.digest: int | None = None


class Leases:
    """The leases of one store, and its lock, which is held for microseconds.

    Args:
        capacity: Bytes that extents may take in all; ``None`` for no limit.
        setting: The setting that the capacity comes from, for messages.
        drive: The ``drive`` of the extents.
        backend: What has to be large enough for them.
        life: Whether the store is open.

    Attributes:
        lock: Guards all of this, and whether the store is open.
        get: The lease at an offset, or ``None``; a function without a frame, for the training thread.
        pending: Transfers that are queued or running.
        pending_bytes: Their bytes.
        pending_write_bytes: Those of them that are written.
    """

    def __init__(self, capacity: int | None, setting: str, drive: int, backend: Backend, life: Life) -> None:
        self.lock = threading.Lock()
        self.pending = 0
        self.pending_bytes = 0
        self.pending_write_bytes = 0
        self._capacity = capacity
        self._setting = setting
        self._drive = drive
        self._name = backend.name
        self._life = life
        self._space = ExtentAllocator(capacity, partial(_check_size, backend))
        self._leases: dict[int, Lease] = {}
        self.get = self._leases.get

    @property
    def used_bytes(self) -> int:
        """Bytes that extents take now, padding included."""
        return self._space.used

    @property
    def high_water_bytes(self) -> int:
        """The largest end that an extent ever had."""
        return self._space.high_water

    def take(self, nbytes: int, lead: int, length: int) -> Extent:
        """Take an extent of ``length`` bytes without growing.

        Raises:
            TooSmallError: That takes growing.
            StoreFullError: The capacity does not allow it.
            SessionError: The store is closed.
        """
        offset = None
        try:
            with self.lock:
                self._life.check_open()
                offset = self._space.allocate(length)
                if offset is not None:
                    extent = Extent(offset, length, nbytes, lead, self._drive)
                    self._leases[offset] = Lease(extent)
                    return extent
        except TooSmallError:
            raise
        except BaseException:
            # An interrupt: the caller would never know of the extent.
            self._rebuild(without=() if offset is None else (offset,))
            raise
        raise StoreFullError(
            errno.ENOSPC,
            f"{length} bytes do not fit: {self._space.used} of the store's capacity of "
            f"{self._capacity} bytes are taken; raise {self._setting} or offload less",
            self._name,
        )

    def take_run(self, places: Sequence[tuple[int, int]]) -> list[Extent]:
        """Take extents next to each other without growing; none if not all fit.

        Args:
            places: Bytes and lead of each.

        Raises:
            TooSmallError: That takes growing.
            SessionError: The store is closed.
        """
        extents: list[Extent] = []
        lengths = [-(-(lead + nbytes) // BLOCK) * BLOCK for nbytes, lead in places]
        try:
            with self.lock:
                self._life.check_open()
                offset = self._space.allocate(sum(lengths))
                if offset is None:
                    return []
                for (nbytes, lead), length in zip(places, lengths, strict=True):
                    extent = Extent(offset, length, nbytes, lead, self._drive)
                    extents.append(extent)
                    self._leases[offset] = Lease(extent)
                    offset += length
        except TooSmallError:
            raise
        except BaseException:  # an interrupt: the caller would never know of the extents
            self._rebuild(without=[extent.offset for extent in extents])
            raise
        return extents

    def give_back(self, extent: Extent) -> None:
        """Free an extent; of a closed store they are all gone.

        Raises:
            ValueError: It is not reserved, or in use.
        """
        try:
            with self.lock:
                if self._life.closed:
                    return
                lease = self.get(extent.offset)
                if lease is None or lease.extent is not extent or lease.writing or lease.reading:
                    self._check_unused(extent)
                del self._leases[extent.offset]
                self._space.free(extent.offset, extent.length)
        except ValueError:
            raise
        except BaseException:
            self._rebuild()  # an interrupt: it may have struck between the two
            raise

    def _rebuild(self, *, without: Iterable[int] = ()) -> None:
        """Have the allocator begin anew with the extents that are reserved, but for those at some offsets."""
        with self.lock:
            for offset in without:
                self._leases.pop(offset, None)
            self._space.rebuild((lease.extent.offset, lease.extent.length) for lease in self._leases.values())

    def _check_unused(self, extent: Extent) -> None:
        lease = self.of(extent)
        if lease.writing or lease.reading:
            raise ValueError(f"{extent} cannot be released: a transfer of it has not ended")

    def reserved(self) -> list[Extent]:
        """Return the extents that are reserved."""
        with self.lock:
            return [lease.extent for lease in self._leases.values()]

    def of(self, extent: Extent) -> Lease:
        """Return the lease of an extent; the lock is held.

        Raises:
            ValueError: There is none.
        """
        lease = self._leases.get(extent.offset)
        # By identity: an equal extent may be an older one at the same place.
        if lease is None or lease.extent is not extent:
            raise ValueError(f"{extent} is not reserved here: it was released, or belongs to another store")
        return lease

    def fitting(self, extent: Extent, memory: ByteRange) -> Lease:
        """Return the lease of an extent that these bytes fit; the lock is held.

        Raises:
            ValueError: There is none, or they do not fit.
        """
        if memory.nbytes != extent.nbytes:
            raise ValueError(f"a transfer of {extent} takes {extent.nbytes} bytes, not {memory.nbytes}")
        return self.of(extent)

    def settle(self, lease: Lease, *, wrote: bool, succeeded: bool) -> None:
        """Note that a transfer has ended or was cancelled."""
        with self.lock:
            self.pending -= 1
            self.pending_bytes -= lease.extent.nbytes
            if wrote:
                lease.writing = False
                lease.written = succeeded
                self.pending_write_bytes -= lease.extent.nbytes
            else:
                lease.reading -= 1


def check_idle(lease: Lease, *, writes: bool) -> None:
    """Check that an extent may be written, or read, now.

    Raises:
        ValueError: It may not.
    """
    if writes and (lease.writing or lease.reading):
        raise ValueError(f"{lease.extent} cannot be written: another transfer of it has not ended")
    if not writes and not lease.written:
        state = "is being written" if lease.writing else "was never written"
        raise ValueError(f"{lease.extent} cannot be read: it {state}")


def _check_size(backend: Backend, size: int) -> None:
    """Check that there is room for ``size`` bytes.

    Raises:
        TooSmallError: There is not.
    """
    if size > backend.size:
        raise TooSmallError(size)
