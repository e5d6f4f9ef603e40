"""A store in one unlinked file on one drive, with direct I/O if the file system allows direct I/O.

Direct I/O needs addresses, offsets and lengths that are multiples of the drive's block size. PyTorch aligns
memory on the CPU to 64 bytes only. A write without a copy therefore starts at the storage's address rounded
down to a block, and ends at the storage's end address rounded up to a block. The additional bytes are in
mapped memory, because a block is no larger than a page. The ``lead`` of an extent is the distance from the
start of the write to the payload. A read needs no copy if the target begins ``lead`` bytes after the start of
a block, and if the target's storage contains the whole first and last block.

Bytes are copied through a staging slab in three cases: the bytes are on a GPU, the target of a read has
another lead, or the file system is neither ext4 nor XFS. Other file systems may compute checksums of blocks
during a write, so the bytes next to the payload must not change.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shlex
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tba_offload.device import READY
from tba_offload.device.host_memory import never_freed
from tba_offload.errors import ShortTransferError, StoreError, StoreFullError, log_warning
from tba_offload.store import posix
from tba_offload.store.base import BLOCK, Checksum, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tba_offload.device import ByteRange, Device
    from tba_offload.store.base import Extent

SLAB_BYTES = 8 << 20

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)  # a container may forbid unknown calls
_LEFT_FREE_SHARE, _LEFT_FREE_BYTES = 20, 1 << 30  # a twentieth of the file system, at least 1 GiB
_MOST_LINKS = 40
_GROWTH = 64 << 20  # a file grows by this many bytes more than needed
# Small blocks save memory, because a buffer for a read is padded to blocks. Other file systems may accept
# transfers smaller than their own block, and use the page cache for these transfers without an error.
_SMALL_BLOCKS, _LOCAL = (512, BLOCK), ("ext4", "xfs")


class FileStore(Store):
    """A store in one unlinked file that is written and read by system calls.

    The file is unlinked as soon as it is created. The kernel frees the blocks of the file when the last
    descriptor is closed, even if the process is killed.

    Args:
        directory: An existing directory in which to create the file.
        device: The device with the activations.
        capacity: Largest size of the file in bytes. By default, a twentieth of the file system and at least 1
            GiB stay free for other files.
        checksum: Whether to compute checksums.
        slabs: Number of staging slabs, one for each I/O thread. For a GPU, the slabs are pinned when the
            store is opened, because pinning memory inside a step would block the device.

    Attributes:
        fd: The file descriptor.
        size: Size of the file in bytes.
        mount: The mount of the file's file system.
        block: Block size in bytes. Addresses and lengths of transfers are multiples of ``block``.
        path: Name of the I/O path, ``"O_DIRECT"`` or ``"buffered"``.
        reason: Why the file does not use the fastest path; ``None`` if the path is the fastest.

    Raises:
        StoreError: The directory cannot be used, or other users could tamper with its path.
    """

    kind = "file"
    block = 1
    path = "O_DIRECT"
    reason: str | None = None

    def __init__(
        self,
        directory: str | Path,
        *,
        device: Device,
        capacity: int | None = None,
        checksum: bool = True,
        slabs: int = 0,
    ) -> None:
        self.name, self.device, self.checksum = os.fspath(directory), device, checksum
        self.capacity, self.size = capacity, 0
        self._slabs = [device.host_memory(SLAB_BYTES) for _ in range(slabs if device.pins_memory else 0)]
        self._create()

    @property
    def description(self) -> dict[str, object]:
        """The kind, the I/O path and the settings of the store, as JSON values for the run log."""
        return {
            "kind": self.kind,
            "directory": self.name,
            "path": self.path,
            "reason": self.reason,
            "file_system": self.mount.kind,
            "in_memory": self.mount.place == posix.MEMORY,
            "alignment": self.block,
            "capacity": self.capacity,
            "checksum": self.checksum,
        }

    def write(self, extent: Extent, source: ByteRange) -> int | None:
        """Write the bytes of an extent, without a copy if possible. See :meth:`Store.write`."""
        lead, nbytes, block = extent.lead, extent.nbytes, self.block
        span = -(-(lead + nbytes) // block) * block
        is_still = span == nbytes or self.mount.kind in _LOCAL  # bytes next to the payload may change
        checksum = Checksum(on=self.checksum)
        if is_still and source.address % block == lead and not self.device.pins_memory:
            checksum.add(source.address, nbytes)
            self._move("write", posix.pwrite, source.address - lead, span, extent.offset)
        else:
            for staged, data, address, length, offset in self._pieces(extent, source, span):
                self.device.copy(staged, data, READY)
                checksum.add(staged.data_ptr(), staged.numel())
                self._move("write", posix.pwrite, address, length, offset)
        return checksum.value()

    def read(self, extent: Extent, target: ByteRange) -> int | None:
        """Read the bytes of an extent, without a copy if possible. See :meth:`Store.read`."""
        lead, nbytes, block = extent.lead, extent.nbytes, self.block
        span = -(-(lead + nbytes) // block) * block
        has_padding = 0 <= target.start - lead <= target.storage.nbytes() - span
        checksum = Checksum(on=self.checksum)
        if has_padding and target.address % block == lead and not self.device.pins_memory:
            self._move("read", posix.pread, target.address - lead, span, extent.offset)
            checksum.add(target.address, nbytes)
        else:
            for staged, data, address, length, offset in self._pieces(extent, target, span):
                self._move("read", posix.pread, address, length, offset)
                checksum.add(staged.data_ptr(), staged.numel())
                self.device.copy(data, staged, READY)
        return checksum.value()

    def _pieces(
        self, extent: Extent, memory: ByteRange, span: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int, int]]:
        """Split an extent into pieces that fit into a staging slab. Each running transfer has its own slab.

        Yields:
            A slice of the slab, the matching slice of ``memory``, and the address, length and file offset of
            the I/O call.
        """
        try:
            slab = self._slabs.pop()
        except IndexError:
            slab = self.device.host_memory(SLAB_BYTES)
        data, end = memory.tensor(), extent.lead + extent.nbytes
        try:
            for start in range(0, span, SLAB_BYTES):
                length = min(SLAB_BYTES, span - start)
                first, last = max(start, extent.lead), min(start + length, end)
                part = data[first - extent.lead : last - extent.lead]
                yield slab[first - start : last - start], part, slab.data_ptr(), length, extent.offset + start
        finally:
            self._slabs.append(slab)

    def _move(self, verb: str, call: posix.Call, address: int, nbytes: int, offset: int) -> None:
        """Repeat a system call until all bytes were moved."""
        done = 0
        try:
            while done < nbytes:
                moved = call(self.fd, address + done, nbytes - done, offset + done)
                if done + moved < nbytes:
                    moved -= moved % self.block  # direct I/O continues at a whole block
                if moved == 0:
                    break
                done += moved
        except OSError as error:
            what = f"the {verb} of {nbytes} bytes at offset {offset} failed"
            raise store_error(what, error, self.name) from error
        if done != nbytes:
            what = f"the {verb} of {nbytes} bytes at offset {offset} stopped after {done} bytes"
            why = "the drive or the file system is failing, or another process truncated the file"
            raise ShortTransferError(errno.EIO, f"{what}: {why}; check the system log", self.name)

    def grow(self, end: int) -> None:
        """Make the file at least ``end`` bytes long, and allocate its blocks if the file system can.

        Raises:
            StoreFullError: There is no room. The length of the file is unchanged.
            StoreError: The drive failed.
        """
        if end <= self.size:
            return
        system = os.fstatvfs(self.fd)
        free = system.f_bavail * system.f_frsize
        spared = max(system.f_blocks * system.f_frsize // _LEFT_FREE_SHARE, _LEFT_FREE_BYTES)
        if self.capacity is None:
            limit = self.size + max(free - spared, 0)
        else:
            limit = min(self.size + free, self.capacity)
        room = f"of {free} free bytes, the store leaves {spared} bytes free unless store.capacity is set"
        what = f"the file cannot grow from {self.size} to {end} bytes ({room})"
        if end > limit:
            raise store_error(what, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.name)
        size = min(end + _GROWTH, limit)
        try:
            posix.fallocate(self.fd, self.size, size - self.size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                os.ftruncate(self.fd, self.size)  # frees the blocks that the failed call has allocated
                raise store_error(what, error, self.name) from error
            os.ftruncate(self.fd, size)
        self.size = size

    def shrink(self, end: int) -> None:
        """Free the blocks from offset ``end``, a multiple of 4096.

        Errors are ignored, because the next write reports a failed drive.
        """
        if end < self.size:
            with suppress(OSError):
                os.ftruncate(self.fd, end)
                self.size = end

    def close(self) -> None:
        """Close the descriptor, which frees the blocks, and free the slabs.

        Errors are ignored, because the bytes of the file are no longer needed.
        """
        with suppress(OSError):
            os.close(self.fd)
        self._slabs.clear()

    def abandon(self) -> None:
        """Close the file in a forked child, because an open descriptor would keep the disk space.

        All descriptors of the file are closed, because a library may have opened the file a second time. The
        slabs are not freed, because freeing pinned memory would call the driver.
        """
        never_freed(self._slabs)
        own = os.fstat(self.fd)
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of the directory listing
                if os.path.samestat(path.stat(), own):
                    os.close(int(path.name))

    def _create(self) -> None:
        """Create the file, and remove its name.

        The owner of the file is not checked, because a file server may give all files another owner than the
        user of this process.
        """
        here, name = existing_directory(self.name), f"tba-{secrets.token_hex(8)}"
        with ExitStack() as opened, ExitStack() as named:
            try:
                directory = os.open(here, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
                named.callback(os.close, directory)
                self.fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
            except OSError as error:
                raise store_error("no file can be created in this directory", error, self.name) from error
            opened.callback(self.close)
            named.callback(os.unlink, name, dir_fd=directory)
            if (mode := os.fstat(self.fd).st_mode & 0o777) & 0o077:
                what = f"other users may read the store: new files in this directory have mode {mode:04o}"
                remedy = "choose a directory on another drive, or mount this drive with umask=077"
                raise StoreError(errno.EPERM, f"{what}; {remedy}", self.name)
            self.mount = posix.mount_of(f"/proc/self/fd/{self.fd}")
            self.start()
            named.close()
            opened.pop_all()

    def start(self) -> None:
        """Choose the I/O path: direct I/O with the smallest possible block, or buffered I/O.

        This method is called once, before the file is unlinked.
        """
        flags, memory = fcntl.fcntl(self.fd, fcntl.F_GETFL), memoryview(mmap.mmap(-1, BLOCK))
        self.reason = f"{self.mount.kind} is in memory"
        sizes = _SMALL_BLOCKS if self.mount.kind in _LOCAL else (BLOCK,)
        for size in sizes if self.mount.place != posix.MEMORY else ():
            try:
                fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
                os.pwrite(self.fd, memory[:size], 0)
                os.preadv(self.fd, [memory[:size]], 0)
                os.ftruncate(self.fd, 0)
            except OSError as error:
                self.reason = f"the file system refuses direct I/O of {size} bytes ({error.strerror})"
            else:
                self.block, self.reason = size, None
                self.alignment = 1 if self.device.pins_memory else size  # slabs accept any address
                return
        self.path = "buffered"
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        what = "the store uses buffered I/O instead of direct I/O, so bytes pass through the page cache"
        log_warning(__name__, "%s: %s: %s", self.name, what, self.reason)


# ---- directories -------------------------------------------------------------------------------------------


def existing_directory(name: str) -> Path:
    """Return the absolute path of a directory, without symbolic links.

    A missing directory is not created, because its drive may not be mounted. Files would then fill the
    system's disk.

    Raises:
        StoreError: The directory does not exist or cannot be reached, or its path has a symbolic link of
            another user in a directory that everybody may write to.
    """
    here = Path(name).expanduser().absolute()
    for _ in range(_MOST_LINKS):
        link = next((part for part in (*reversed(here.parents), here) if part.is_symlink()), None)
        if link is None:
            break
        if link.parent.stat().st_mode & stat.S_IWOTH and link.lstat().st_uid not in {0, os.geteuid()}:
            why = f"the link {link.name!r} of another user is in a directory that everybody may write to"
            raise StoreError(errno.ELOOP, f"{why}; name the directory to which the link points", name)
        here = link.parent / link.readlink() / here.relative_to(link)
    else:
        raise StoreError(errno.ELOOP, "the path has too many symbolic links; name the directory itself", name)
    for part in (*reversed(here.parents), here):
        try:
            mode = part.stat().st_mode
        except FileNotFoundError:
            remedy = f"mount the drive, or create the directory: mkdir -p {shlex.quote(str(here))}"
            raise StoreError(errno.ENOENT, f"{part.name!r} does not exist; {remedy}", name) from None
        except OSError as error:
            raise store_error("this directory cannot be opened", error, name) from error
        if not stat.S_ISDIR(mode):
            raise StoreError(errno.ENOTDIR, f"{part.name!r} is a file; choose a directory", name)
    return here


def store_error(what: str, error: OSError, directory: str) -> StoreError:
    """Return the error of a failed system call, with the directory and a remedy."""
    if error.errno in _FULL:
        remedy = "free some space, choose another directory or set store.capacity"
        return StoreFullError(error.errno, f"{what}: {error.strerror}; {remedy}", directory)
    remedy = "check your access rights, the drive and the system log, or choose another directory"
    return StoreError(error.errno, f"{what}: {error.strerror}; {remedy}", directory)
