"""A store in one unlinked file on one drive, past the page cache where the file system allows it.

How bytes travel without a copy: direct I/O wants addresses, offsets and lengths that are multiples of the
drive's block, and PyTorch aligns memory on the CPU to 64 bytes only. A block is no larger than a page, so the
first and last block of a storage lie in pages that hold bytes of that storage, and they are mapped. A write
starts at the address rounded down and ends at the end rounded up; ``lead`` of the extent says how far the
payload begins after the start. A read does the same in reverse if its target has the same lead and owns both
blocks. Everything else goes through a staging slab: bytes on a GPU, targets of another lead, and sources
whose neighbours must not change meanwhile because somebody checksums the blocks.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
import shlex
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device import READY
from tba_offload.device.host_memory import never_freed
from tba_offload.errors import ShortTransferError, StoreError, StoreFullError
from tba_offload.store import posix
from tba_offload.store.base import BLOCK, Checksum, Store, round_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.device import ByteRange, Device
    from tba_offload.store.base import Extent

logger = logging.getLogger(__name__)

SLAB_BYTES = 8 << 20

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_USE = (errno.ENOTEMPTY, errno.EBUSY)  # where the name of an open file keeps its directory from going
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)  # a container may forbid unknown calls
_LEFT_FREE_SHARE, _LEFT_FREE_BYTES = 20, 1 << 30  # a twentieth of the file system, at least 1 GiB
_GROWTH = 64 << 20  # a file grows ahead of need by so much
_MOST_LINKS = 40


class UnlinkedFile(Store):
    """A store in an open file without a name; its subclasses move the bytes.

    The file and a directory of its own have names only while they are made. Afterwards the kernel frees the
    blocks when the last descriptor is closed, however the process ends.

    Args:
        directory: Where to create the file: a directory that exists.
        device: The device that activations are on.
        capacity: The most bytes that the file grows to. By default all that is free but a twentieth of the
            file system, and at least 1 GiB: others, such as checkpoints, need room there too.
        checksum: Whether to compute checksums.

    Attributes:
        fd: The descriptor.
        size: Bytes that the file has been grown to.
        mount: How its file system is mounted.
        block: What addresses and lengths of transfers must be multiples of, bytes.
        path: The I/O path, and in ``reason`` why it is not a better one.
        chosen: Why ``kind: auto`` took this kind; ``None`` if the user named it.

    Raises:
        StoreError: The directory cannot be used, or others could tamper with the way to it.
    """

    block = 1
    path = "O_DIRECT"
    reason: str | None = None
    chosen: str | None = None

    def __init__(
        self, directory: str | Path, *, device: Device, capacity: int | None = None, checksum: bool = True
    ) -> None:
        self.name, self.device, self.checksum = os.fspath(directory), device, Checksum(on=checksum)
        self.capacity = None if capacity is None else capacity // BLOCK * BLOCK
        self.size = 0
        self._left_behind: Path | None = None
        with explained(self.name):
            self.fd = self._create()
        self.mount = posix.mount_of(self.fd)
        if self.mount.kind == "btrfs":
            posix.overwrite_in_place(self.fd)

    @property
    def description(self) -> dict[str, object]:
        """Kind, directory, I/O path and why, file system, alignment, capacity, checksum and choice."""
        return {
            "kind": self.kind,
            "directory": self.name,
            "path": self.path,
            "reason": self.reason,
            "file_system": self.mount.kind,
            "alignment": self.block,
            "capacity": self.capacity,
            "checksum": self.checksum.on,
            **({} if self.chosen is None else {"chosen": {"why": self.chosen}}),
        }

    def fileno(self) -> int:
        """Return the descriptor of the file, for tools that look at it or measure its drive."""
        return self.fd

    def grow(self, end: int) -> None:
        """Make the file at least ``end`` bytes long, with blocks allocated where the file system can.

        Raises:
            StoreFullError: There is no room; the file is as long as before.
            StoreError: The drive failed.
        """
        if end <= self.size:
            return
        system = os.fstatvfs(self.fd)
        free, spared = system.f_bavail * system.f_frsize, left_to_others(system)
        limit = self.size + max(free - spared, 0) if self.capacity is None else self.capacity
        ahead = min(end + _GROWTH, limit)
        if end > limit or not ((ahead > end and self._extend(ahead)) or self._extend(end)):
            others = f", and {spared} are left to others" if self.capacity is None else ""
            what = f"the file cannot grow from {self.size} to {end} bytes: {free} are free{others}"
            raise self.failure(what, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def shrink(self, end: int) -> None:
        """Free the blocks beyond ``end``, a multiple of 4096; a failing drive says so at its next write."""
        if end < self.size:
            with suppress(OSError):
                os.ftruncate(self.fd, end)
                self.size = end

    def close(self) -> None:
        """Close the descriptor, which frees the blocks.

        An error that the file system has left to be told now is of bytes that are not needed any more.
        """
        with suppress(OSError):
            os.close(self.fd)
        for seconds in (0.0, 0.01, 0.1):  # file systems in user space hear of a close later
            if self._left_behind is not None and self._left_behind.exists():
                time.sleep(seconds)
                with suppress(OSError):
                    self._left_behind.rmdir()

    def abandon(self) -> None:
        """Close the descriptor in a forked child, which would keep the disk space; the parent goes on."""
        os.close(self.fd)

    def failure(self, what: str, error: OSError) -> StoreError:
        """Return the error of a system call with the directory and a remedy."""
        return _store_error(what, error, self.name)

    def check_moved(self, verb: str, nbytes: int, offset: int, moved: int) -> None:
        """Check that a transfer moved all of its bytes.

        Raises:
            ShortTransferError: It moved fewer.
        """
        if moved != nbytes:
            what = f"{verb} of {nbytes} bytes at offset {offset} stopped after {moved}"
            why = "the drive or the file system is failing, or another process truncated the file"
            raise ShortTransferError(errno.EIO, f"{what}; {why}: check the system log", self.name)

    def taken(self, fd: int) -> None:
        """Do what needs the file's name; called once, while the file has it."""

    def _extend(self, size: int) -> bool:
        """Try one size; return False if there is no room for it."""
        try:
            posix.fallocate(self.fd, self.size, size - self.size)
        except OSError as error:
            if error.errno in _NO_FALLOCATE:
                os.ftruncate(self.fd, size)
            else:
                os.ftruncate(self.fd, self.size)  # gives back what the failed attempt did get
                if error.errno in _FULL:
                    return False
                raise self.failure("the file cannot grow", error) from error
        self.size = size
        return True

    def _create(self) -> int:
        """Create the file in a new directory, where nobody can touch its name, and remove both names."""
        directory = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with ExitStack() as stack:
            parent, name = open_directory(self.name), f"tba-{secrets.token_hex(8)}"
            stack.callback(os.close, parent)
            os.mkdir(name, 0o700, dir_fd=parent)
            stack.callback(self._remove, name, parent)
            run = os.open(name, directory, dir_fd=parent)
            stack.callback(os.close, run)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open("extents", flags, 0o600, dir_fd=run)
            stack.callback(os.unlink, "extents", dir_fd=run)
            try:
                self._check_own(os.fstat(run), os.fstat(fd))
                self.taken(fd)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _check_own(self, run: os.stat_result, file: os.stat_result) -> None:
        """Check that the directory is the one that was made, and that others cannot read the file.

        A server may give all files another owner than this process. The new file shows which: a directory of
        the same owner is our own.
        """
        mode = (run.st_mode | file.st_mode) & 0o777
        if run.st_uid != file.st_uid:
            what = f"user {run.st_uid} replaced a new directory there; name one that only you may write to"
        elif mode & 0o077:
            what = (
                f"the file system keeps no modes, so that others may read a new file ({mode:04o}); mount it "
            )
            what += f"with umask=077 and uid={os.geteuid()}, or name another directory"
        else:
            return
        raise StoreError(errno.EPERM, what, self.name)

    def _remove(self, name: str, parent: int) -> None:
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in _IN_USE:
                raise
            self._left_behind = Path(self.name).expanduser().absolute() / name
            why = "the file system keeps the names of open files, as those of networks do"
            logger.warning(
                "%s stays until the store is closed, after a crash for good: %s", self._left_behind, why
            )


class FileStore(UnlinkedFile):
    """A store in one unlinked file that system calls write and read.

    Args:
        directory: Where to create the file: a directory that exists.
        device: The device that activations are on.
        slabs: Pinned staging slabs to make at once for a GPU, one for each I/O thread: pinning memory inside
            a step would block the device.
        settings: ``capacity`` and ``checksum``, as of :class:`UnlinkedFile`.

    Raises:
        StoreError: The directory cannot be used.
    """

    kind = "file"

    def __init__(self, directory: str | Path, *, device: Device, slabs: int = 0, **settings: Any) -> None:
        super().__init__(directory, device=device, **settings)
        self._slabs: list[torch.Tensor] = []
        try:
            self._turn_on_direct_io()
            self._stable_pages = posix.needs_stable_pages(self.fd)
            self._slabs += [device.host_memory(SLAB_BYTES) for _ in range(slabs if device.pins_memory else 0)]
        except BaseException:
            self.close()
            raise
        self.alignment = 1 if device.pins_memory else self.block  # what passes through slabs may be anywhere

    def write(self, extent: Extent, source: ByteRange) -> int | None:
        """Write the bytes of an extent, from where they are if that is possible; see :meth:`Store.write`."""
        hasher, span = self.checksum.begin(), self._span(extent)
        padded = span != extent.nbytes
        if self._is_in_place(extent, source) and not (padded and self._stable_pages):
            self.checksum.add(hasher, source.address, extent.nbytes)
            self._move("write", posix.pwrite, source.address - extent.lead, span, extent.offset)
        else:
            data = source.tensor()
            with self._slab() as slab:
                for start, length, payload, at in _pieces(extent, span):
                    staged = slab[payload]
                    self.device.copy(staged, data[at : at + staged.numel()], READY)
                    self.checksum.add(hasher, staged.data_ptr(), staged.numel())
                    self._move("write", posix.pwrite, slab.data_ptr(), length, extent.offset + start)
        return None if hasher is None else hasher.intdigest()

    def read(self, extent: Extent, target: ByteRange) -> int | None:
        """Read the bytes of an extent, to where they belong if that is possible; see :meth:`Store.read`."""
        hasher, span = self.checksum.begin(), self._span(extent)
        start = target.start - extent.lead
        if self._is_in_place(extent, target) and 0 <= start <= target.storage.nbytes() - span:
            self._move("read", posix.pread, target.address - extent.lead, span, extent.offset)
            self.checksum.add(hasher, target.address, extent.nbytes)
        else:
            data = target.tensor()
            with self._slab() as slab:
                for start, length, payload, at in _pieces(extent, span):
                    self._move("read", posix.pread, slab.data_ptr(), length, extent.offset + start)
                    staged = slab[payload]
                    self.checksum.add(hasher, staged.data_ptr(), staged.numel())
                    self.device.copy(data[at : at + staged.numel()], staged, READY)
        return None if hasher is None else hasher.intdigest()

    def close(self) -> None:
        """Free the file and the staging slabs."""
        super().close()
        self._slabs.clear()
        self.device.give_back_host_memory()

    def abandon(self) -> None:
        """In a forked child: close the descriptor, and leave the slabs to the parent."""
        never_freed(self._slabs)
        super().abandon()

    def _span(self, extent: Extent) -> int:
        """Return the bytes that move: lead, payload and padding up to the block."""
        return round_up(extent.lead + extent.nbytes, self.block)

    def _is_in_place(self, extent: Extent, memory: ByteRange) -> bool:
        return not self.device.pins_memory and memory.address % self.block == extent.lead

    def _move(self, verb: str, call: posix.Call, address: int, nbytes: int, offset: int) -> None:
        try:
            moved = posix.transfer(call, self.fd, address, nbytes, offset, self.block)
        except OSError as error:
            raise self.failure(f"{verb} of {nbytes} bytes at offset {offset} failed", error) from error
        self.check_moved(verb, nbytes, offset, moved)

    @contextmanager
    def _slab(self) -> Iterator[torch.Tensor]:
        """Lend a staging slab; no more are made than transfers run at once."""
        try:
            slab = self._slabs.pop()
        except IndexError:
            slab = self.device.host_memory(SLAB_BYTES)
        yield slab
        self._slabs.append(slab)

    def _turn_on_direct_io(self) -> None:
        """Find the block of direct I/O, or the reason why the I/O is buffered."""
        block, flags = posix.direct_alignment(self.fd), fcntl.fcntl(self.fd, fcntl.F_GETFL)
        if self.mount.place == posix.MEMORY:
            self.reason = f"{self.mount.kind} lies in memory"
        elif block == 0 or BLOCK % block:
            self.reason = "the file system does not offer direct I/O of 4096 bytes"
        else:
            try:
                fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
                self._probe(block)
            except OSError as error:
                if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise self.failure("a probe of direct I/O failed", error) from error
                self.reason = f"the file system refuses direct I/O ({error.strerror})"
        if self.reason is None:
            self.block = block
            logger.info("%s: direct I/O, aligned to %d bytes", self.name, block)
            return
        self.path = "buffered"
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        what = "buffered I/O instead of direct I/O, so bytes pass through the page cache"
        logger.warning("%s: %s: %s", self.name, what, self.reason)

    def _probe(self, block: int) -> None:
        """Move one block each way, because some systems accept the flag and refuse the transfer."""
        page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
        for verb, call in (("write", posix.pwrite), ("read", posix.pread)):
            moved = posix.transfer(call, self.fd, page.data_ptr(), block, 0, block)
            self.check_moved(f"a probing {verb}", block, 0, moved)
        os.ftruncate(self.fd, 0)


def _pieces(extent: Extent, span: int) -> Iterator[tuple[int, int, slice, int]]:
    """Cut an extent into parts that fit a slab.

    Yields:
        First byte in the extent and length of what moves, where in the slab its payload is, and where the
        payload begins in the tensor.
    """
    end = extent.lead + extent.nbytes
    for start in range(0, span, SLAB_BYTES):
        length = min(SLAB_BYTES, span - start)
        first = max(start, extent.lead)
        yield start, length, slice(first - start, min(start + length, end) - start), first - extent.lead


def left_to_others(room: os.statvfs_result) -> int:
    """Return the bytes of a file system that a store without a capacity never takes."""
    return max(room.f_blocks * room.f_frsize // _LEFT_FREE_SHARE, _LEFT_FREE_BYTES)


# ---- the way to a directory --------------------------------------------------------------------------------


def check_directory(path: str) -> None:
    """Check that a store could be opened in a directory, as far as the way to it goes.

    Raises:
        StoreError: It could not; the message says what to do.
    """
    with explained(path):
        os.close(open_directory(path))


def open_directory(path: str) -> int:
    """Open a directory, for use as ``dir_fd``.

    Symbolic links are followed, except one that another user has put into a directory that everybody may
    write to. A directory that is missing is not made: its path is likely mistyped, or on a drive that is not
    mounted, and files would fill the disk of the system.

    Raises:
        StoreError: A part of the path does not exist, or a link on the way is not to be trusted.
        OSError: The directory cannot be reached.
    """
    here = Path(path).expanduser().absolute()
    for _ in range(_MOST_LINKS):
        link = next((part for part in (*reversed(here.parents), here) if part.is_symlink()), None)
        if link is None:
            break
        if link.parent.stat().st_mode & stat.S_IWOTH and link.lstat().st_uid not in {0, os.geteuid()}:
            why = f"another user put the link {link.name!r} into a directory that everybody may write to"
            raise StoreError(errno.ELOOP, f"{why}; name the directory that it points to", path)
        here = link.parent / link.readlink() / here.relative_to(link)
    try:
        return os.open(here, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        wrong = next(part for part in (*reversed(here.parents), here) if not part.is_dir())
        if wrong.exists():
            raise StoreError(error.errno, f"{wrong.name!r} is not a directory; name one", path) from None
        remedy = f"mount its drive, or, if the path is right, make it: mkdir -p {shlex.quote(str(here))}"
        raise StoreError(errno.ENOENT, f"{wrong.name!r} does not exist; {remedy}", path) from None


@contextmanager
def explained(directory: str) -> Iterator[None]:
    """Give an error of the system the directory's name and a remedy."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise _store_error("cannot create a file there", error, directory) from error


_REMEDIES = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "name a directory that you may write to"),
    **dict.fromkeys(_FULL, "free some space, name another directory or set store.capacity"),
}


def _store_error(what: str, error: OSError, directory: str) -> StoreError:
    remedy = _REMEDIES.get(error.errno or 0, "check the drive and the system log, or name another directory")
    kind = StoreFullError if error.errno in _FULL else StoreError
    return kind(error.errno, f"{what}: {error.strerror}; {remedy}", directory)
