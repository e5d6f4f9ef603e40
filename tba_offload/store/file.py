"""Extents in one file on one drive, past the page cache where the file system allows it.

How bytes travel without a copy: direct I/O wants addresses, offsets and lengths that are multiples of the
drive's block, 512 bytes say, and PyTorch aligns memory on the CPU to 64 bytes only. But as long as the block
is no larger than a page, a tensor's first and last block lie in pages that hold bytes of the tensor, so they
are mapped. A write therefore starts at the address rounded down and ends at the end rounded up; what it takes
along from the neighbours is padding in the file that is not used. The extent remembers how far the tensor's
bytes lie after the start, its ``lead``. A read does the same in reverse, if the target has the same lead and
the blocks at its ends belong to it (``padded``). Everything else goes through a staging slab: bytes on a GPU,
targets without padding, and sources whose neighbours must not change meanwhile because others checksum the
blocks.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device.staging import StagingRing
from tba_offload.errors import ShortTransferError, StoreError, StoreFullError
from tba_offload.store import posix
from tba_offload.store.engine import QueuedStore
from tba_offload.store.extents import BLOCK
from tba_offload.store.file_systems import Place, file_system_of
from tba_offload.store.options import StoreOptions
from tba_offload.store.run_file import FULL, RunFile, short_transfer
from tba_offload.store.run_file_backend import RunFileBackend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.backend import Move
    from tba_offload.store.base import DriveLoad, Extent

logger = logging.getLogger(__name__)

SLAB_BYTES = 8 << 20
_UNKNOWN_ALIGNMENT = 4096  # no drive asks for more unless it says so

# What lies between neighbours: a page that is written, and one that is read into. Nothing looks at either.
_PAGES = torch.frombuffer(mmap.mmap(-1, 2 * BLOCK), dtype=torch.uint8)
_NOTHING, _ANYTHING = _PAGES.data_ptr(), _PAGES.data_ptr() + BLOCK

_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


JOINED_BYTES = 4 << 20
"""Bytes. Neighbouring extents go together up to this.

Processor time of the I/O thread for each written extent, by itself and so joined (EPYC,
O_DIRECT): 35 and 8 us at 64 KiB, 52 and 22 at 256 KiB, 115 and 83 at 1 MiB, no gain at 4 MiB.
"""


class FileBackend(RunFileBackend):
    """The bytes of one unlinked file.

    Args:
        directory: Where to create it.
        options: Capacity, checksum and threads.
        device: The device that activations lie on.
        slab_bytes: Size of a staging slab.

    Attributes:
        alignment: What addresses in the device's memory must match, bytes; 1 where all bytes take the way
            through slabs: padding there would only keep a buffer from fitting where another one was.
        joined_bytes: See :attr:`Joining.joined_bytes`; what passes through a slab goes one by one.
        block: What direct I/O demands, bytes; 1 where it is buffered.
        reason: Why it is buffered; ``None`` if it is direct.
        late: Asks for errors that the file system tells late.
        ring: The staging slabs.

    Raises:
        StoreError: The directory cannot be used.
    """

    def __init__(self, directory: str, options: StoreOptions, device: Device, slab_bytes: int) -> None:
        super().__init__(RunFile(directory, options.capacity), options, device)
        try:
            self.block, self.reason = _choose_path(self._file)
            self.file_system = self._file.file_system().name
            self.alignment, self.joined_bytes = (1, 0) if device.pins_memory else (self.block, JOINED_BYTES)
            self._stable_pages = posix.needs_stable_pages(self._file.fd)
            self.ring = StagingRing(slab_bytes, options.writers + options.readers, self.block, device)
        except BaseException:
            self._file.close()
            raise

    def abandon(self) -> None:
        """In a forked child: closes the descriptors, and leaves the slabs to the parent."""
        self.ring.abandon()
        super().abandon()

    def move_out(self, extent: Extent, source: ByteRange, after: Event) -> int | None:
        """See :meth:`Backend.move_out`."""
        if not self._is_in_place(extent, source, padded=not self._stable_pages):
            return self._out_staged(extent, source, after)
        digest = self._checksums.of_range(source)
        self._put(extent, source.address - extent.lead, 0, self._span(extent))
        return digest

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:
        """See :meth:`Backend.move_in`."""
        if not self._is_in_place(extent, target, padded=padded):
            return self._in_staged(extent, target, after)
        self._get(extent, target.address - extent.lead, 0, self._span(extent))
        return self._checksums.of_range(target)

    def move_out_together(self, moves: Sequence[Move]) -> list[int | None] | None:
        """See :meth:`Joining.move_out_together`."""
        padded = not self._stable_pages
        for extent, source in moves:
            if not self._is_in_place(extent, source, padded=padded):
                return None
        digests = self._checksums.of_ranges(source for _, source in moves)
        return digests if self._moved_together(posix.pwritev, moves, _NOTHING) else None

    def move_in_together(self, moves: Sequence[Move], *, padded: bool) -> list[int | None] | None:
        """See :meth:`Joining.move_in_together`."""
        for extent, target in moves:
            if not self._is_in_place(extent, target, padded=padded):
                return None
        if not self._moved_together(posix.preadv, moves, _ANYTHING):
            return None
        return self._checksums.of_ranges(target for _, target in moves)

    def _moved_together(self, call: posix.Call, moves: Sequence[Move], filler: int) -> bool:
        """Move neighbouring extents wholly, by one call; after the span of each comes the filler."""
        parts: list[tuple[int, int]] = []
        for extent, memory in moves:
            span = self._span(extent)
            parts.append((memory.address - extent.lead, span))
            if span < extent.length:
                parts.append((filler, extent.length - span))
        try:
            return posix.transfer_together(call, self._file.fd, parts, moves[0][0].offset)
        except OSError:
            return False

    def _out_staged(self, extent: Extent, source: ByteRange, after: Event) -> int | None:
        hasher, data = self._checksums.hasher(), source.tensor()
        with self.ring.borrow() as slab:
            for piece in _pieces(extent, self._span(extent), self.ring.slab_bytes):
                payload = slab[piece.lo : piece.hi]
                self.device.copy(payload, data[piece.at : piece.at + payload.numel()], after)
                self._checksums.add(hasher, payload.data_ptr(), payload.numel())
                self._put(extent, slab.data_ptr(), piece.start, piece.length)
        return None if hasher is None else hasher.intdigest()

    def _in_staged(self, extent: Extent, target: ByteRange, after: Event) -> int | None:
        hasher, data = self._checksums.hasher(), target.tensor()
        with self.ring.borrow() as slab:
            for piece in _pieces(extent, self._span(extent), self.ring.slab_bytes):
                self._get(extent, slab.data_ptr(), piece.start, piece.length)
                payload = slab[piece.lo : piece.hi]
                self._checksums.add(hasher, payload.data_ptr(), payload.numel())
                self.device.copy(data[piece.at : piece.at + payload.numel()], payload, after)
        return None if hasher is None else hasher.intdigest()

    def _span(self, extent: Extent) -> int:
        """Bytes of the extent that are moved: lead, payload and padding up to the alignment."""
        return -(-(extent.lead + extent.nbytes) // self.block) * self.block

    def _is_in_place(self, extent: Extent, memory: ByteRange, *, padded: bool) -> bool:
        """Whether a system call can move the bytes of an extent from, or to, where they lie.

        Args:
            extent: The extent.
            memory: The bytes.
            padded: Whether the call may take the rest of their first and last block along.
        """
        if self.device.pins_memory or memory.address % self.alignment != extent.lead:
            return False
        return padded or self._span(extent) == extent.nbytes

    def _put(self, extent: Extent, address: int, start: int, nbytes: int) -> None:
        self._transfer("write", posix.pwrite, extent, address, start, nbytes)

    def _get(self, extent: Extent, address: int, start: int, nbytes: int) -> None:
        self._transfer("read", posix.pread, extent, address, start, nbytes)

    def _transfer(
        self, verb: str, call: posix.Call, extent: Extent, address: int, start: int, nbytes: int
    ) -> None:
        """Move ``nbytes`` between memory at ``address`` and the extent from ``start`` on."""
        offset = extent.offset + start
        try:
            moved = posix.transfer(call, self._file.fd, address, nbytes, offset, self.block)
        except OSError as error:
            raise _failure(self._file, f"{verb} of {nbytes} bytes at offset {offset}", error) from None
        if moved != nbytes:
            raise short_transfer(self.name, verb, nbytes, offset, moved)


class FileStore(QueuedStore):
    """A store in one unlinked file.

    Args:
        directory: Where to create the file; made if it is missing.
        device: The device that activations lie on.
        drive: The ``drive`` of the extents.
        slab_bytes: Size of a staging slab, a multiple of 4096; one a thread is allocated at first need.
        options: Capacity, checksum, threads and the limit of waits.
        settings: The same one by one, without options.

    Raises:
        StoreError: The directory cannot be used.
    """

    kind = "file"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        device: Device,
        drive: int = 0,
        slab_bytes: int = SLAB_BYTES,
        options: StoreOptions | None = None,
        **settings: Any,
    ) -> None:
        options = options or StoreOptions(**settings)
        self.directory = os.fspath(directory)
        self._options = options
        self._file = FileBackend(self.directory, options, device, slab_bytes)
        super().__init__(self._file, options, drive=drive)

    @property
    def description(self) -> dict[str, object]:
        """Kind, directory, "O_DIRECT" or "buffered" and why, file system, alignment, threads and so on."""
        return {
            "kind": self.kind,
            "directory": self.directory,
            "path": "O_DIRECT" if self._file.reason is None else "buffered",
            "reason": self._file.reason,
            "file_system": self._file.file_system,
            "alignment": self._file.block,
            "capacity": self.capacity_bytes,
            "checksum": self._options.checksum,
            "writers": self._options.writers,
            "readers": self._options.readers,
            **({} if self.chosen is None else {"chosen": self.chosen}),
        }

    def take_loads(self) -> list[DriveLoad]:
        """Return what the drive has moved; see :meth:`ActivationStore.take_loads`."""
        (load,) = super().take_loads()
        return [load._replace(checksum_seconds=self._file.take_checksum_seconds())]

    @property
    def staging_bytes(self) -> int:
        """Host memory that staging slabs take now."""
        return self._file.ring.allocated_bytes

    def fileno(self) -> int:
        """Return the descriptor of the file, for tools that look at it or measure its drive."""
        return self._file.fd

    def close(self) -> None:
        """End the store; see :meth:`ActivationStore.close`."""
        try:
            super().close()
        finally:
            self._file.ring.close()
            self._file.device.give_back_host_memory()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of an extent that fits a slab.

    Bytes [start, start + length) of the extent travel; bytes [lo, hi) of the slab are the payload, which
    starts at byte ``at`` of the tensor.
    """

    start: int
    length: int
    lo: int
    hi: int
    at: int


def _pieces(extent: Extent, span: int, slab_bytes: int) -> Iterator[_Piece]:
    end = extent.lead + extent.nbytes
    for start in range(0, span, slab_bytes):
        length = min(slab_bytes, span - start)
        first = max(start, extent.lead)
        yield _Piece(start, length, first - start, min(start + length, end) - start, first - extent.lead)


def _failure(file: RunFile, what: str, error: OSError) -> StoreError:
    """Return the error of a system call as a caller can use it."""
    what = f"{what} failed: {error.strerror}"
    if error.errno in FULL:
        room = "a quota or `ulimit -f` allows no more"
        if error.errno == errno.ENOSPC:
            room = (
                f"{file.free_bytes()} bytes are free, of which a full drive below or a quota may allow less"
            )
        remedy = f"{room}: free some, name another directory or set store.capacity"
        return StoreFullError(error.errno, f"{what}; {remedy}", file.directory)
    remedy = "check the drive and the system log, or name another directory"
    return StoreError(error.errno, f"{what}; {remedy}", file.directory)


def _choose_path(file: RunFile) -> tuple[int, str | None]:
    """Turn on direct I/O where it works.

    Returns:
        The alignment, and why the I/O is buffered; ``None`` if it is direct.
    """
    alignment, reason = _direct_path(file)
    if reason is not None:
        flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
        fcntl.fcntl(file.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        logger.warning(
            "%s: buffered I/O instead of direct I/O, because %s; bytes pass through the page cache",
            file.directory,
            reason,
        )
        return 1, reason
    logger.info("%s: direct I/O, aligned to %d bytes", file.directory, alignment)
    return alignment, None


def _direct_path(file: RunFile) -> tuple[int, str | None]:
    system = file_system_of(file.fd)
    if system.place is Place.MEMORY:
        return 1, f"{system.name} lies in memory"
    told = posix.direct_alignment(file.fd)
    alignment = _UNKNOWN_ALIGNMENT if told is None else told
    if alignment == 0:
        return 1, "the file system does not offer direct I/O"
    if mmap.PAGESIZE % alignment or alignment > _UNKNOWN_ALIGNMENT:
        return 1, f"direct I/O would need an alignment of {alignment} bytes"
    try:
        flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
        fcntl.fcntl(file.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        _probe(file, alignment)
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise _failure(file, "a probe of direct I/O", error) from None
        return 1, f"the file system refuses direct I/O ({error.strerror})"
    return alignment, None


def _probe(file: RunFile, alignment: int) -> None:
    """Move one block each way, because some systems accept the flag and refuse the transfer."""
    file.grow(_UNKNOWN_ALIGNMENT)
    block = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    for call in (posix.pwrite, posix.pread):
        if posix.transfer(call, file.fd, block.data_ptr(), alignment, 0, alignment) != alignment:
            raise ShortTransferError(errno.EIO, f"a probe of {alignment} bytes was cut short", file.directory)
