"""System calls on files with raw addresses, and the kinds of file systems.

Python's own ``os.pwrite`` takes buffers, not addresses, and Python has no ``os.fallocate``. The system calls
of this module release the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Call = Callable[[int, int, int, int], int]
"""Type of :func:`pwrite` and :func:`pread`. The arguments are a descriptor, an address, a number of bytes and
an offset in the file. The result is the number of bytes moved."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
# This function takes an address. A ctypes array would create a type for each length, and ctypes never frees
# types.
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_READ_ONLY, _WRITABLE = 0x100, 0x200


def pwrite(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write ``nbytes`` bytes from an address to a file, and return the number of bytes written.

    Raises:
        OSError: The call failed.
    """
    return os.pwrite(fd, _memory(address, nbytes, _READ_ONLY), offset)


def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read ``nbytes`` bytes of a file to an address, and return the number of bytes read.

    Raises:
        OSError: The call failed.
    """
    return os.preadv(fd, [_memory(address, nbytes, _WRITABLE)], offset)


def fallocate(fd: int, offset: int, nbytes: int) -> None:
    """Allocate blocks of a file without changing its contents.

    The file grows if the range ends after the end of the file. ``os.posix_fallocate`` is not used, because
    this function writes zeros on file systems that cannot allocate blocks.

    Raises:
        OSError: The call failed. ``EOPNOTSUPP`` means that the file system does not support the call.
    """
    while _libc.fallocate(fd, 0, offset, nbytes) < 0:
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))


def view(address: int, nbytes: int) -> memoryview:
    """Return a read-only view of the bytes at an address. The caller must keep the memory alive."""
    window: memoryview = _memory(address, nbytes, _READ_ONLY)
    return window


# ---- file systems -----------------------------------------------------------------------------------------

MEMORY, NETWORK, DRIVE = "memory", "network", "drive"
"""Values of :attr:`Mount.place`."""

_PLACES = {
    **dict.fromkeys(("tmpfs", "ramfs", "rootfs", "hugetlbfs"), MEMORY),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "afs"), NETWORK),
    **dict.fromkeys(("9p", "virtiofs", "orangefs", "gfs2", "ocfs2"), NETWORK),
}


class Mount(NamedTuple):
    """The mount of a file system.

    Attributes:
        kind: The kernel's name of the file system, such as ``"nfs4"`` or ``"fuse.sshfs"``; ``"unknown"`` if
            the kernel does not report the name.
        source: The mounted device or export, such as ``"/dev/nvme0n1p1"``; empty if unknown.
        place: Where the file system keeps its bytes, ``"memory"``, ``"network"`` or ``"drive"``. File systems
            in user space count as ``"network"``, and overlays count as ``"drive"``.
    """

    kind: str = "unknown"
    source: str = ""
    place: str = DRIVE


def mount_of(path: str) -> Mount:
    """Return the mount of the file system of a path. Use ``/proc/self/fd/N`` for an open file."""
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
    line = number and re.search(rf"^{number[1]} .* - (\S*) (\S*) \S*$", mounts, re.MULTILINE)
    if not line:
        return Mount()
    # White space and backslashes are octal numbers.
    unescaped = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), word) for word in line.groups())
    kind, source = unescaped
    return Mount(kind, source, NETWORK if kind.startswith("fuse") else _PLACES.get(kind, DRIVE))
