"""The allocator of host memory: how it treats what is freed, and how many bytes are live by its own count."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from tba_offload.errors import UnsupportedError

FAST_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment of a process in which malloc asks for huge pages (glibc 2.35).

Direct I/O pins the pages that it moves, one by one; with huge pages there are 512 times fewer. Compute gains
too, through the translation buffer. It concerns training on a CPU only.
"""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1


def keep_freed_pages() -> bool:
    """Tell malloc to keep freed memory mapped, so that the next step does not fault it in again.

    By default glibc serves large allocations by ``mmap`` and returns them at once. Every step then pays a
    page fault for each 4 KiB of every activation, with or without offloading: several milliseconds for
    8 MiB. With this setting the process keeps its largest footprint. It concerns training on a CPU only
    and holds for the whole process, so it is the caller's decision.

    Returns:
        Whether the C library accepted it.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _NEVER) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


Count = Callable[[], int]

_PROBE_BYTES = 8 * 2**20


def allocator_count() -> tuple[Count, str]:
    """Return what counts the live bytes of this process, and its name.

    A process has glibc's functions whatever allocator was preloaded, and there they count next to nothing. So
    each count is tried: it has to follow an allocation of PyTorch's.

    Raises:
        UnsupportedError: None does, as with musl, glibc before 2.33, or an allocator that is not known here.
    """
    for name, make in (
        ("mallinfo2", _glibc_count),
        ("jemalloc", _jemalloc_count),
        ("tcmalloc", _tcmalloc_count),
    ):
        count = make()
        if count is not None and _follows(count):
            return count, name
    raise UnsupportedError(
        "the activation peak on a CPU is the allocator's, and neither glibc (2.33 or later), jemalloc "
        "nor tcmalloc counts what PyTorch allocates here; switch it off with measure_memory=False"
    )


def _follows(count: Count) -> bool:
    """Whether a count tells of a tensor, to a sixteenth of its size: other threads allocate meanwhile."""
    before = count()
    tensor = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    during = count()
    del tensor
    slack = _PROBE_BYTES // 16
    return abs(during - before - _PROBE_BYTES) < slack and abs(count() - before) < slack


class _MallInfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _glibc_count() -> Count | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    function = libc.mallinfo2
    function.restype = _MallInfo2

    def count() -> int:
        info = function()
        return int(info.uordblks + info.hblkhd)

    return count


def _jemalloc_count() -> Count | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallctl"):
        return None
    epoch, live, size = ctypes.c_uint64(1), ctypes.c_size_t(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_size_t))

    def count() -> int:
        # Its statistics are those of the last epoch.
        libc.mallctl(b"epoch", None, None, ctypes.byref(epoch), ctypes.c_size_t(ctypes.sizeof(epoch)))
        libc.mallctl(b"stats.allocated", ctypes.byref(live), ctypes.byref(size), None, ctypes.c_size_t(0))
        return live.value

    return count


def _tcmalloc_count() -> Count | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "MallocExtension_GetNumericProperty"):
        return None
    live = ctypes.c_size_t()

    def count() -> int:
        libc.MallocExtension_GetNumericProperty(b"generic.current_allocated_bytes", ctypes.byref(live))
        return live.value

    return count
