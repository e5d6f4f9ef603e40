"""The system calls of the file store, with raw addresses.

Python's own ``os.pwrite`` takes buffers, not addresses, and offers neither ``fallocate`` nor ``statx``. Each
function here is one call through the C library, with the GIL released while it runs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_TRANSFER = 0x7FFFF000
"""Linux moves at most this many bytes in one call."""

MOST_PARTS = 1024
"""Linux takes at most this many pieces of memory in one call, its ``IOV_MAX``."""

Call = Callable[[int, int, int, int], int]
"""Type of :func:`pwrite` and :func:`pread`: descriptor, address, bytes, offset to bytes moved.

Of :func:`pwritev` and :func:`preadv` too, with the pieces of a vector in place of bytes.
"""

BTRFS = 0x9123683E
"""Magic number of Btrfs."""

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS of most architectures
_NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_DIO_MEM_ALIGN = 0x98  # byte offsets in struct statx
_DIO_OFFSET_ALIGN = 0x9C
_PY_BUF_READ = 0x100

_libc = ctypes.CDLL(None, use_errno=True)


def _function(*names: str, result: Any, arguments: list[Any]) -> Any:
    """Return the first of these functions that the C library has, or ``None``."""
    for name in names:
        function = getattr(_libc, name, None)
        if function is not None:
            function.restype = result
            function.argtypes = arguments
            return function
    return None


_transfer_arguments = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_pwrite = _function("pwrite64", "pwrite", result=ctypes.c_ssize_t, arguments=_transfer_arguments)
_pread = _function("pread64", "pread", result=ctypes.c_ssize_t, arguments=_transfer_arguments)
_vector_arguments = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_pwritev = _function("pwritev64", "pwritev", result=ctypes.c_ssize_t, arguments=_vector_arguments)
_preadv = _function("preadv64", "preadv", result=ctypes.c_ssize_t, arguments=_vector_arguments)
_fallocate = _function(
    "fallocate64",
    "fallocate",
    result=ctypes.c_int,
    arguments=[ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64],
)
_fstatfs = _function("fstatfs64", "fstatfs", result=ctypes.c_int, arguments=[ctypes.c_int, ctypes.c_void_p])
_statx = _function(
    "statx",
    result=ctypes.c_int,
    arguments=[ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p],
)
# Takes an address instead of building an array type for each length, which ctypes would never forget.
_memoryview_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_at.restype = ctypes.py_object
_memoryview_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _checked(moved: int) -> int:
    if moved < 0:
        raise _last_error()
    return moved


def pwrite(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write bytes at an address to a file; return how many went.

    Raises:
        OSError: The call failed; ``InterruptedError`` for a signal.
    """
    return _checked(_pwrite(fd, address, nbytes, offset))


def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read bytes of a file to an address; return how many came, 0 at the end of the file.

    Raises:
        OSError: The call failed; ``InterruptedError`` for a signal.
    """
    return _checked(_pread(fd, address, nbytes, offset))


def pwritev(fd: int, address: int, parts: int, offset: int) -> int:
    """As :func:`pwrite`, of pieces of memory that go next to each other.

    Args:
        fd: The file.
        address: Of a C array with address and length of each piece.
        parts: Their number.
        offset: Where in the file the first one goes.

    Raises:
        OSError: The call failed.
    """
    return _checked(_pwritev(fd, address, parts, offset))


def preadv(fd: int, address: int, parts: int, offset: int) -> int:
    """As :func:`pread`, to pieces of memory; see :func:`pwritev`.

    Raises:
        OSError: The call failed.
    """
    return _checked(_preadv(fd, address, parts, offset))


def transfer_together(call: Call, fd: int, parts: Sequence[tuple[int, int]], offset: int) -> bool:
    """Move pieces of memory and neighbouring bytes of a file by one :func:`pwritev` or :func:`preadv`.

    Args:
        call: Which of the two.
        fd: The file.
        parts: Address and length of each piece, at most :data:`MOST_PARTS`.
        offset: Where in the file the first one belongs.

    Returns:
        Whether all bytes have moved. If not, any of them may have.

    Raises:
        OSError: The call failed.
    """
    vector = array("L", [word for part in parts for word in part])  # struct iovec: two words each
    nbytes = sum([length for _, length in parts])  # a list: a generator is a call for each part
    return call(fd, vector.buffer_info()[0], len(parts), offset) == nbytes


def transfer(call: Call, fd: int, address: int, nbytes: int, offset: int, alignment: int) -> int:
    """Repeats :func:`pwrite` or :func:`pread` until all bytes have moved or nothing moves any more.

    A short transfer goes on from the last multiple of the alignment, as direct I/O demands.

    Returns:
        Bytes moved; less than ``nbytes`` only where the file ended or the drive took nothing more.

    Raises:
        OSError: A call failed.
    """
    done = 0
    while done < nbytes:
        try:
            moved = call(fd, address + done, min(nbytes - done, MAX_TRANSFER), offset + done)
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
    if _fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    while _fallocate(fd, 0, offset, nbytes) != 0:
        error = _last_error()
        if error.errno != errno.EINTR:
            raise error


def file_system_magic(fd: int) -> int:
    """Return the magic number of the file system that a file lies on; 0 if the system does not tell."""
    buffer = (ctypes.c_ulong * 64)()
    if _fstatfs is None or _fstatfs(fd, ctypes.addressof(buffer)) != 0:
        return 0
    return int(buffer[0]) & 0xFFFFFFFF


def overwrite_in_place(fd: int) -> None:
    """Have an empty file overwritten in place on Btrfs, which else writes each block to a new place.

    That takes up to twice the room, and the blocks that were allocated are of use once only. The file system
    then has no checksums of it. Nothing happens elsewhere, or where it refuses.
    """
    if file_system_magic(fd) != BTRFS:
        return
    flags = array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        flags[0] |= _NO_COPY_ON_WRITE
        fcntl.ioctl(fd, _SET_FLAGS, flags)


def direct_alignment(fd: int) -> int | None:
    """Return what addresses, offsets and lengths of direct I/O must be multiples of.

    Returns:
        Bytes; 0 where the file allows no direct I/O; ``None`` where kernel or file system do not tell.
    """
    buffer = (ctypes.c_uint32 * 64)()
    if _statx is None or _statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.addressof(buffer)) != 0:
        return None
    if not buffer[0] & _STATX_DIOALIGN:
        return None
    memory, offset = int(buffer[_DIO_MEM_ALIGN // 4]), int(buffer[_DIO_OFFSET_ALIGN // 4])
    return 0 if offset == 0 else max(memory, offset)


def needs_stable_pages(fd: int) -> bool:
    """Whether memory must not change while the file is written from it.

    True where the drive says so (it checksums blocks), and where no drive can be asked: a file system with no
    block device of its own may checksum data itself, as Btrfs does.
    """
    device = os.fstat(fd).st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (node / "queue", node / ".." / "queue"):  # a partition has its disk's queue
        try:
            return (queue / "stable_writes").read_text().strip() != "0"
        except OSError:
            continue
    return True


def view(address: int, nbytes: int) -> memoryview:
    """Return the bytes at an address, read-only; the caller keeps the memory alive."""
    window: memoryview = _memoryview_at(address, nbytes, _PY_BUF_READ)
    return window
