"""The system calls of stores in files, with raw addresses, and where a file system keeps its bytes.

Python's own ``os.pwrite`` takes buffers, not addresses, and there is neither ``fallocate`` nor ``statx``.
Each call goes through the C library, with the GIL released while it runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tba_offload.config.values import BLOCK

Call = Callable[[int, int, int, int], int]
"""Type of :func:`pwrite` and :func:`pread`: descriptor, address, bytes, offset to bytes moved."""

_MOST = 0x7FFFF000  # Linux moves at most this many bytes in one call
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS of most architectures
_NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_DIO_MEM_ALIGN, _DIO_OFFSET_ALIGN = 0x98 // 4, 0x9C // 4  # words in struct statx

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pwrite.restype = _libc.pread.restype = ctypes.c_ssize_t
_libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_libc.pread.argtypes = _libc.pwrite.argtypes
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
# Takes an address instead of building an array type for each length, which ctypes would never forget.
_memoryview_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_at.restype = ctypes.py_object
_memoryview_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_READ_ONLY = 0x100


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def pwrite(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write bytes at an address to a file; return how many went.

    Raises:
        OSError: The call failed; ``InterruptedError`` for a signal.
    """
    return _checked(_libc.pwrite(fd, address, nbytes, offset))


def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read bytes of a file to an address; return how many came, 0 at the end of the file.

    Raises:
        OSError: The call failed; ``InterruptedError`` for a signal.
    """
    return _checked(_libc.pread(fd, address, nbytes, offset))


def transfer(call: Call, fd: int, address: int, nbytes: int, offset: int, alignment: int) -> int:
    """Repeat :func:`pwrite` or :func:`pread` until all bytes have moved or nothing moves any more.

    A short transfer goes on from the last multiple of ``alignment``, as direct I/O demands.

    Returns:
        Bytes moved; less than ``nbytes`` only where the file ended or the drive took nothing more.

    Raises:
        OSError: A call failed.
    """
    done = 0
    while done < nbytes:
        try:
            moved = call(fd, address + done, min(nbytes - done, _MOST), offset + done)
        except InterruptedError:
            continue
        if done + moved < nbytes:
            moved -= moved % alignment
        if moved == 0:
            break
        done += moved
    return done


def fallocate(fd: int, offset: int, nbytes: int) -> None:
    """Allocate blocks of a file, which grows if the range ends after its end; data stays as it is.

    ``os.posix_fallocate`` is no substitute: where the file system has no such call it writes zeros.

    Raises:
        OSError: The call failed; ``EOPNOTSUPP`` where the file system has no such call.
    """
    while True:
        with suppress(InterruptedError):
            _checked(_libc.fallocate(fd, 0, offset, nbytes))
            return


def view(address: int, nbytes: int) -> memoryview:
    """Return the bytes at an address, read-only; the caller keeps the memory alive."""
    window: memoryview = _memoryview_at(address, nbytes, _READ_ONLY)
    return window


def direct_alignment(fd: int) -> int:
    """Return the number that addresses, offsets and lengths of direct I/O must be multiples of.

    Returns:
        Bytes; 0 where the file allows no direct I/O; 4096 where kernel or file system do not tell.
    """
    buffer = (ctypes.c_uint32 * 64)()
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.addressof(buffer)) != 0:
        return BLOCK
    if not buffer[0] & _STATX_DIOALIGN:
        return BLOCK
    memory, offset = int(buffer[_DIO_MEM_ALIGN]), int(buffer[_DIO_OFFSET_ALIGN])
    return max(memory, offset) if offset else 0


def needs_stable_pages(fd: int) -> bool:
    """Return True if memory must not change while the file is written from it.

    The drive says so if it checksums blocks. Where no drive can be asked, the file system may checksum data.
    """
    device = os.fstat(fd).st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (node / "queue", node / ".." / "queue"):  # a partition has its disk's queue
        with suppress(OSError):
            return (queue / "stable_writes").read_text().strip() != "0"
    return True


def overwrite_in_place(fd: int) -> None:
    """Have an empty file overwritten in place on Btrfs, which else writes each block to a new place.

    That takes up to twice the room, and the blocks that were allocated are of use once only. The file system
    then has no checksums of it.
    """
    flags = array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        flags[0] |= _NO_COPY_ON_WRITE
        fcntl.ioctl(fd, _SET_FLAGS, flags)


# ---- file systems -----------------------------------------------------------------------------------------

DRIVE, MEMORY, NETWORK, PROCESS, LAYERS, UNKNOWN = (
    "drive",
    "memory",
    "network",
    "process",
    "layers",
    "unknown",
)
"""Where a file system keeps its bytes: the values of :attr:`Mount.place`."""

_PLACES = {
    **dict.fromkeys(("tmpfs", "ramfs", "rootfs", "hugetlbfs"), MEMORY),
    **dict.fromkeys(("ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "jfs"), DRIVE),
    **dict.fromkeys(("exfat", "vfat", "ntfs3"), DRIVE),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "afs"), NETWORK),
    **dict.fromkeys(("9p", "virtiofs", "orangefs", "gfs2", "ocfs2"), NETWORK),
    "overlay": LAYERS,
}


class Mount(NamedTuple):
    """Where a file system is mounted from.

    Attributes:
        kind: Its type by the kernel, such as ``"nfs4"`` or ``"fuse.sshfs"``.
        source: What is mounted, such as ``"/dev/nvme0n1p1"`` or ``"server:/export"``; empty if unknown.
        place: Where its bytes are: "drive", "memory", "network", "process" (a file system in user space),
            "layers" (an overlay whose upper layer is not in memory, as far as can be seen) or "unknown".
    """

    kind: str
    source: str
    place: str


_UNKNOWN_MOUNT = Mount("unknown", "", UNKNOWN)


def mount_at(path: str) -> Mount:
    """Return how the file system of a directory is mounted, as far as the directory can be reached."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return _UNKNOWN_MOUNT
    try:
        return mount_of(fd)
    finally:
        os.close(fd)


def mount_of(fd: int) -> Mount:
    """Return how the file system of an open file or directory is mounted."""
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
        number = next(line.split()[1] for line in lines if line.startswith("mnt_id:"))
        mounts = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    except (OSError, StopIteration):
        return _UNKNOWN_MOUNT
    for line in mounts:
        before, _, after = line.partition(" - ")
        words = [_unescaped(word) for word in after.split(" ")]
        if before.split(maxsplit=1)[0] == number and len(words) >= 3:
            kind, source, options = words[:3]
            place = PROCESS if kind.startswith("fuse") else _PLACES.get(kind, UNKNOWN)
            upper = re.search(r"(?:^|,)upperdir=(/[^,]*)", options)  # of a container's host it is not seen
            if place == LAYERS and upper is not None and mount_at(upper[1]).place == MEMORY:
                place = MEMORY
            return Mount(kind, source, place)
    return _UNKNOWN_MOUNT


def _unescaped(text: str) -> str:
    """Return a word of ``mountinfo``, in which white space and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
