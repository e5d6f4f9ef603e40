"""The system calls of stores in files, with raw addresses, and where a file system keeps its bytes.

Python's own ``os.pwrite`` takes buffers, not addresses, and there is no ``os.fallocate``. The GIL is released
while a call runs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

Call = Callable[[int, int, int, int], int]
"""Type of :func:`pwrite` and :func:`pread`: descriptor, address, bytes, offset to bytes moved."""

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS of most architectures
_NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
# Takes an address instead of building an array type for each length, which ctypes would never forget.
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_READ_ONLY, _WRITABLE = 0x100, 0x200


def pwrite(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write bytes at an address to a file; return how many went.

    Raises:
        OSError: The call failed.
    """
    return os.pwrite(fd, _memory(address, nbytes, _READ_ONLY), offset)


def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read bytes of a file to an address; return how many came, 0 at the end of the file.

    Raises:
        OSError: The call failed.
    """
    return os.preadv(fd, [_memory(address, nbytes, _WRITABLE)], offset)


def fallocate(fd: int, offset: int, nbytes: int) -> None:
    """Allocate blocks of a file, which grows if the range ends after its end; data stays as it is.

    ``os.posix_fallocate`` is no substitute: where the file system has no such call it writes zeros.

    Raises:
        OSError: The call failed; ``EOPNOTSUPP`` where the file system has no such call.
    """
    while _libc.fallocate(fd, 0, offset, nbytes) < 0:
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))


def view(address: int, nbytes: int) -> memoryview:
    """Return the bytes at an address, read-only; the caller keeps the memory alive."""
    window: memoryview = _memory(address, nbytes, _READ_ONLY)
    return window


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

MEMORY, NETWORK, LAYERS, DRIVE = "memory", "network", "layers", "drive"
"""Where a file system keeps its bytes: the values of :attr:`Mount.place`."""

_PLACES = {
    **dict.fromkeys(("tmpfs", "ramfs", "rootfs", "hugetlbfs"), MEMORY),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "afs"), NETWORK),
    **dict.fromkeys(("9p", "virtiofs", "orangefs", "gfs2", "ocfs2"), NETWORK),
    "overlay": LAYERS,
}


class Mount(NamedTuple):
    """Where a file system is mounted from.

    Attributes:
        kind: Its type by the kernel, such as ``"nfs4"`` or ``"fuse.sshfs"``; "unknown" if it does not tell.
        source: The mounted device or export, such as ``"/dev/nvme0n1p1"``; empty if unknown.
        place: Where it keeps its bytes: "memory", "network" (also behind a process in user space), "layers"
            (an overlay whose upper layer is not seen to be in memory), or "drive" for every other one.
    """

    kind: str = "unknown"
    source: str = ""
    place: str = DRIVE


def mount_of(path: str) -> Mount:
    """Return how the file system of a path is mounted; ``/proc/self/fd/N`` for an open file."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            info = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
        finally:
            os.close(fd)
        mounts = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    except OSError:
        return Mount()
    number = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    line = number and re.search(rf"^{number[1]} .* - (\S*) (\S*) (\S*)$", mounts, re.MULTILINE)
    if not line:
        return Mount()
    kind, source, options = map(_unescaped, line.groups())
    place = NETWORK if kind.startswith("fuse") else _PLACES.get(kind, DRIVE)
    upper = re.search(r"(?:^|,)upperdir=(/[^,]*)", options)  # a container does not see its host's
    if upper and mount_of(upper[1]).place == MEMORY:
        place = MEMORY
    return Mount(kind, source, place)


def _unescaped(text: str) -> str:
    """Return a word of ``mountinfo``, in which white space and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
