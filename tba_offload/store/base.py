"""The contract of a store: one place outside device memory that keeps bytes.

A :class:`Store` only moves bytes, one call a transfer. Threads, extents, several drives, failed drives and
forks are the same for every store, and belong to :class:`tba_offload.store.multi.MultiStore`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64

from tba_offload.config import values
from tba_offload.errors import SessionError, StoreError, TransferError, warn
from tba_offload.store import posix

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.device import ByteRange, Device

BLOCK = values.BLOCK
"""Offsets and lengths of extents are multiples of this, bytes."""

DRIVE_TIER, HOST_TIER = "drive", "host"
"""The legal tiers of a :class:`Store`."""


@dataclass(slots=True, eq=False)
class Extent:
    """A byte range of one place that holds one range of bytes of a storage.

    Attributes:
        offset: Where the range starts, bytes; a multiple of 4096.
        length: Bytes of the range; a multiple of 4096.
        nbytes: Bytes of the payload.
        lead: The payload starts at ``offset + lead``; less than the store's alignment.
        drive: Index of the place among those of a :class:`tba_offload.store.multi.MultiStore`.
        checksum: Of the payload, as it was written; ``None`` before the first write, or without checksums.
        transfers: Transfers of this extent that are queued or running.
        is_released: Whether the extent is freed when its last transfer ends.
    """

    offset: int
    length: int
    nbytes: int
    lead: int = 0
    drive: int = 0
    checksum: int | None = None
    transfers: int = 0
    is_released: bool = False

    def __str__(self) -> str:
        return f"the extent of {self.nbytes} bytes at offset {self.offset}"


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class Store(ABC):
    """One place for bytes outside device memory: the file on one drive, host memory, or one of yours.

    A subclass implements :meth:`write` and :meth:`read`. I/O threads call both, several at once, each for
    another extent. An ``OSError``, a ``MemoryError`` or a :class:`tba_offload.StoreError` of a write takes
    the place out of service for a while; any other exception counts as an error of the program.

    Attributes:
        kind: The word for it in a policy.
        tier: ``"drive"``, or ``"host"`` for host memory that is used beside drives.
        name: What messages call the place.
        device: The device that activations are on.
        alignment: What addresses must be a multiple of for a transfer without a copy, bytes; 1 where any
            address will do. The payload of an extent starts at ``lead``, its address modulo this.
        capacity: The most bytes that extents may take; ``None`` for no limit but the place's own.
        threads: Threads for each direction; ``None`` for as many as the user chose.
        checksum: Makes the checksums of :meth:`write` and :meth:`read`.
    """

    kind: str
    tier: str = DRIVE_TIER
    name: str
    device: Device
    alignment: int = 1
    capacity: int | None = None
    threads: int | None = None
    checksum: Checksum

    @property
    @abstractmethod
    def description(self) -> dict[str, object]:
        """The store and the I/O path that it uses, for the run log; plain JSON values."""

    @abstractmethod
    def write(self, extent: Extent, source: ByteRange) -> int | None:
        """Write the bytes of a whole extent; the device has made them.

        Args:
            extent: Where to.
            source: ``extent.nbytes`` bytes in the device's memory.

        Returns:
            Their checksum; ``None`` without checksums.

        Raises:
            StoreFullError: There is no room.
            OSError: They cannot be written.
        """

    @abstractmethod
    def read(self, extent: Extent, target: ByteRange) -> int | None:
        """Fill memory with the bytes of a whole extent; the device no longer uses the memory.

        The caller compares the checksum with that of the write.

        Args:
            extent: Where from.
            target: ``extent.nbytes`` bytes in the device's memory. If ``target.address`` is ``extent.lead``
                modulo the alignment, and that is more than 1, its storage also has the memory down to the
                previous and up to the next multiple of the alignment, for the read to overwrite.

        Returns:
            The checksum of the bytes that were read; ``None`` without checksums.

        Raises:
            OSError: They cannot be read.
        """

    def grow(self, end: int) -> None:  # noqa: B027 - a place that needs no preparation
        """Make room for extents up to ``end`` bytes; an I/O thread calls this before it writes there.

        Raises:
            StoreFullError: There is no room, and nothing has changed.
        """

    def shrink(self, end: int) -> None:  # noqa: B027 - as above
        """Give back the room beyond ``end`` bytes, which no extent uses."""

    def close(self) -> None:  # noqa: B027 - as above
        """Free everything. No transfer is running, and none comes."""

    def abandon(self) -> None:  # noqa: B027 - as above
        """Close descriptors in a forked child. Take no lock: a thread of the parent may have held it."""


class Checksum:
    """Makes the xxh3 checksums of one store, and counts the processor time that they take.

    Args:
        on: Whether there are any.

    Attributes:
        seconds: Processor time of I/O threads so far.
    """

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.seconds = 0.0

    def begin(self) -> xxh3_64 | None:
        """Return a new hasher; ``None`` without checksums.

        An object, because the functions of xxhash before 4.0 hold the interpreter's lock while they hash.
        """
        return xxh3_64() if self.on else None

    def add(self, hasher: xxh3_64 | None, address: int, nbytes: int) -> None:
        """Add bytes of host memory to a hasher, if there is one."""
        if hasher is not None:
            began = time.thread_time()
            hasher.update(posix.view(address, nbytes))
            self.seconds += time.thread_time() - began  # without a lock: one may be lost

    def of(self, address: int, nbytes: int) -> int | None:
        """Return the checksum of bytes of host memory; ``None`` without checksums."""
        if not self.on:
            return None
        began = time.thread_time()
        hasher = xxh3_64()
        hasher.update(posix.view(address, nbytes))
        self.seconds += time.thread_time() - began
        return hasher.intdigest()


class Load(NamedTuple):
    """Work of one direction of one drive.

    Attributes:
        nbytes: Bytes that moved.
        seconds: Time in which at least one transfer moved bytes.
    """

    nbytes: int
    seconds: float


class DriveLoad(NamedTuple):
    """Work and state of one drive, or of the host memory beside drives.

    Attributes:
        write: To it.
        read: From it.
        tier: "drive" or "host"; a store in host memory alone is its own drive.
        in_service: Whether it takes writes; one that failed does not, for a while.
        room: The most bytes that it holds, as far as known: its capacity, the bytes that it had grown to when
            it was found full, or 0 while it is out of service; ``None`` for no known limit.
        checksum_seconds: Processor time of I/O threads for checksums.
    """

    write: Load
    read: Load
    tier: str = DRIVE_TIER
    in_service: bool = True
    room: int | None = None
    checksum_seconds: float = 0.0


class Moved(NamedTuple):
    """One transfer that moved bytes.

    Attributes:
        drive: Index of its place.
        place: Name of the place, as in messages.
        writes: Whether it wrote.
        thread: Number of the I/O thread, as :func:`threading.get_ident` returns it.
        began: When it began, by :func:`time.perf_counter`; waiting for the device is not part of it.
        ended: When it ended.
        nbytes: Bytes that it moved.
    """

    drive: int
    place: str
    writes: bool
    thread: int
    began: float
    ended: float
    nbytes: int


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Close what uses a store at the end of a block; after an error of the block its own is only a warning.

    Args:
        error: The exception of the block.
        close: Closes the store, and its users.

    Raises:
        StoreError: The store cannot be closed, and the block raised nothing.
        TransferError: Bytes cannot be brought back, likewise.
        SessionError: Something was changed while its bytes were in the store, likewise.
    """
    try:
        close()
    except (StoreError, TransferError, SessionError) as failure:
        if error is None:
            raise
        warn(str(failure), RuntimeWarning)
