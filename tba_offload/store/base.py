"""Interface of a store, which keeps bytes on one drive or in host memory.

A :class:`Store` only moves bytes, with one call for each transfer.
:class:`tba_offload.store.multi.MultiStore` calls the store from I/O threads. ``MultiStore`` also manages
extents, several drives, failed drives and forks, so a :class:`Store` needs no code for these tasks.
"""

from __future__ import annotations

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
"""Offsets and lengths of extents are multiples of this number of bytes."""

DRIVE_TIER, HOST_TIER = "drive", "host"
"""Values of :attr:`Store.tier`."""


@dataclass(slots=True, eq=False)
class Extent:
    """A byte range of a store, which holds the bytes of one storage.

    Attributes:
        offset: Start of the range in bytes; a multiple of 4096.
        length: Length of the range in bytes; a multiple of 4096.
        nbytes: Size of the payload in bytes.
        lead: Distance in bytes from ``offset`` to the payload; smaller than the store's alignment.
        drive: Index of the store in a :class:`tba_offload.store.multi.MultiStore`.
        checksum: Checksum of the payload at its last write; ``None`` before the first write, or without
            checksums.
        transfers: Number of queued or running transfers of this extent.
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
    """Base class of stores, which keep bytes in a file on one drive, in host memory, or elsewhere.

    A subclass implements :meth:`write` and :meth:`read`, which several I/O threads may call at the same time.
    During a write, no other call uses the extent. After a :class:`tba_offload.errors.StoreFullError`,
    :class:`tba_offload.store.multi.MultiStore` does not let the store grow for a while. If a write raises any
    other ``OSError`` or a ``MemoryError``, the store gets no writes for a while. Other exceptions are treated
    as errors of the program.

    Attributes:
        kind: Name of this kind of store in a policy.
        tier: ``"host"`` for host memory, ``"drive"`` for all other stores.
        name: Name of the store in messages.
        device: The device with the activations.
        alignment: Alignment of transfers without a copy, in bytes; 1 if any address works. For a write, the
            ``lead`` of the extent is set to the address of the bytes in memory modulo the alignment.
        capacity: Largest number of bytes that extents may take; ``None`` for no limit except the free space.
        threads: Number of threads for each direction; ``None`` for the number in the configuration.
    """

    kind: str
    tier: str = DRIVE_TIER
    name: str
    device: Device
    alignment: int = 1
    capacity: int | None = None
    threads: int | None = None

    @property
    @abstractmethod
    def description(self) -> dict[str, object]:
        """The kind, the I/O path and the settings of the store, as JSON values for the run log."""

    @abstractmethod
    def write(self, extent: Extent, source: ByteRange) -> int | None:
        """Write the whole payload of an extent. The device has already computed the bytes.

        Args:
            extent: The extent to write to.
            source: ``extent.nbytes`` bytes in the device's memory.

        Returns:
            The checksum of the bytes; ``None`` without checksums.

        Raises:
            StoreFullError: There is no room.
            OSError: The bytes cannot be written.
        """

    @abstractmethod
    def read(self, extent: Extent, target: ByteRange) -> int | None:
        """Read the whole payload of an extent into memory that the device no longer uses.

        The caller compares the returned checksum with the checksum of the write.

        Args:
            extent: The extent to read from.
            target: ``extent.nbytes`` bytes in the device's memory. If ``target.address`` equals
                ``extent.lead`` modulo the alignment, the storage of the target extends to a multiple of the
                alignment on both sides. The read may then overwrite all bytes of the storage.

        Returns:
            The checksum of the bytes that were read; ``None`` without checksums.

        Raises:
            OSError: The bytes cannot be read.
        """

    def grow(self, end: int) -> None:  # noqa: B027 - some stores need no preparation
        """Make room for ``end`` bytes. An I/O thread calls this method before it writes to a new extent.

        Raises:
            StoreFullError: There is no room. The size of the store is unchanged.
        """

    def shrink(self, end: int) -> None:  # noqa: B027 - as above
        """Free the room after the first ``end`` bytes, which no extent uses."""

    def close(self) -> None:  # noqa: B027 - as above
        """Free all resources of the store, after the last transfer has ended."""

    def abandon(self) -> None:  # noqa: B027 - as above
        """Close descriptors in a forked child.

        The method must take no lock, because a thread of the parent may have held the lock during the fork.
        """


class Checksum:
    """The xxh3 checksum of the bytes of one transfer.

    Args:
        on: Whether to compute the checksum.
    """

    def __init__(self, *, on: bool = True) -> None:
        # The functions of xxhash before 4.0 hold the GIL while they hash. The methods do not.
        self._hasher = xxh3_64() if on else None

    def add(self, address: int, nbytes: int) -> None:
        """Add bytes of host memory to the checksum."""
        if self._hasher is not None:
            self._hasher.update(posix.view(address, nbytes))

    def value(self) -> int | None:
        """Return the checksum of all added bytes; ``None`` if no checksum is computed."""
        return None if self._hasher is None else self._hasher.intdigest()


class Load(NamedTuple):
    """Transfers of one drive in one direction.

    Attributes:
        nbytes: Number of transferred bytes.
        seconds: Time during which at least one transfer was running.
    """

    nbytes: int
    seconds: float


class DriveLoad(NamedTuple):
    """Transfers and state of one drive, or of host memory.

    Attributes:
        write: The writes to the drive.
        read: The reads from the drive.
        tier: ``"drive"`` or ``"host"``. If all bytes go to host memory, the tier is also ``"drive"``.
        in_service: Whether the drive takes writes; False for a while after a failure.
        room: Largest number of bytes that the store may put on the drive: the set capacity, or the size at
            which the drive was full. ``None`` if unknown; 0 while the drive is out of service.
    """

    write: Load
    read: Load
    tier: str = DRIVE_TIER
    in_service: bool = True
    room: int | None = None


class Moved(NamedTuple):
    """A transfer that moved bytes.

    Attributes:
        drive: Index of the store in a :class:`tba_offload.store.multi.MultiStore`.
        place: Name of the store in messages.
        writes: True for a write, False for a read.
        thread: Number of the I/O thread, as :func:`threading.get_ident` returns it.
        began: Start of the transfer by :func:`time.perf_counter`, after the wait for the device.
        ended: End of the transfer.
        nbytes: Number of bytes that were moved.
    """

    drive: int
    place: str
    writes: bool
    thread: int
    began: float
    ended: float
    nbytes: int


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Call ``close`` at the end of a ``with`` block.

    If the block raised an exception, give a warning instead of raising the errors below.

    Args:
        error: The exception of the block; ``None`` if the block raised nothing.
        close: Function that closes a store, or the owner of a store.

    Raises:
        StoreError: The store cannot be closed.
        TransferError: Bytes cannot be read back.
        SessionError: A tensor was changed while its bytes were in the store.
    """
    try:
        close()
    except (StoreError, TransferError, SessionError) as failure:
        if error is None:
            raise
        warn(str(failure), RuntimeWarning)
