"""Host memory: pinned pages, and settings of malloc for freed memory.

PyTorch rounds the size of pinned memory up to a power of two, and frees no pinned memory. With
``pinned_use_cuda_host_register`` in ``PYTORCH_CUDA_ALLOC_CONF``, pinned memory has malloc's alignment, which
direct I/O refuses. This module therefore maps and pins pages itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PORTABLE = 1
"""Flag of the CUDA runtime: the memory is pinned for all devices."""

REFUSALS = frozenset({1, 2, 304, 800, 801})
"""Errors by which CUDA and ROCm refuse to pin memory. Other errors come from earlier work of the device.

The numbers mean invalid value, out of memory, error of the operating system, not permitted, and not
supported.
"""


class _Pinned(mmap.mmap):
    """Anonymous pages, which CUDA may pin. The pages are unpinned and freed with their last tensor."""

    unpin: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def mapped_memory(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Allocate whole pages outside malloc.

    On a CPU, malloc's count of live bytes measures the device memory, but does not include pages outside
    malloc.

    Args:
        nbytes: Size in bytes.
        pinned: Whether CUDA pins the pages. Pinning blocks the device, so pin rarely, and outside a step.

    Returns:
        A 1-D uint8 tensor of ``nbytes`` bytes. The pages are freed with the tensor.

    Raises:
        torch.AcceleratorError: CUDA cannot pin the pages, or earlier work of the device failed. The attribute
            ``error_code`` tells these cases apart, see :data:`REFUSALS`.
        OSError: The host does not have enough memory.
    """
    pages = _Pinned(-1, nbytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        address, runtime = memory.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # A forked child does not get the pages, because the child would keep the pages after the parent has
        # freed them.
        pages.madvise(mmap.MADV_DONTFORK)
        status = runtime.cudaHostRegister(address, nbytes, PORTABLE)
        if int(status):
            # The next launch of a kernel reports the error again, unless the error is read before. PyTorch
            # reads errors of its own calls, but not of cudaHostRegister. This library of PyTorch depends on
            # the CUDA runtime that PyTorch calls.
            name = "hipGetLastError" if torch.version.hip else "cudaGetLastError"
            getattr(ctypes.CDLL("libtorch_python.so"), name, int)()
            what = f"CUDA cannot pin {nbytes} bytes: {runtime.cudaGetErrorString(status)}"
            error: Any = torch.AcceleratorError(what)
            error.error_code = int(status)
            raise error
        # A forked child must not call CUDA.
        pid, owner = os.getpid, os.getpid()
        pages.unpin = lambda: pid() == owner and runtime.cudaHostUnregister(address)
    return memory


def never_freed(memory: Iterable[torch.Tensor]) -> None:
    """Leak host memory in a forked child, because freeing pinned pages would call the device's driver."""
    for tensor in memory:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


# malloc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = 2**31 - 1
_THRESHOLD, _HIGHEST = 128 << 10, 32 << 20  # the initial value of glibc, and the highest that glibc sets
_MOST_MAPPINGS = 32768  # half of Linux's limit for one process, because other code needs mappings too
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.mmap_threshold")

_environment = " ".join(os.environ) + os.environ.get("GLIBC_TUNABLES", "")
_is_decided = any(name in _environment for name in _SETTINGS)
"""Whether the user or the program has set how malloc treats freed memory."""

_returns = False
"""Whether :func:`return_freed_pages` has set how malloc treats freed memory."""


def keep_freed_pages() -> bool:
    """Make malloc keep freed memory mapped, so that the next step has no page faults for this memory.

    By default, glibc returns the pages of a large freed allocation to the system. Every step then has a page
    fault for each 4 KiB of every activation, with or without offloading. For 8 MiB, page faults take several
    milliseconds. After a call of ``keep_freed_pages``, the memory of the process never shrinks.
    ``keep_freed_pages`` is useful only for training on a CPU. The package never calls ``keep_freed_pages``,
    because malloc's settings affect the whole process.

    Returns:
        Whether the C library accepted the setting.
    """
    global _is_decided  # noqa: PLW0603 - a process has only one malloc
    _is_decided = True
    return _set_thresholds(_NEVER)


def return_freed_pages() -> None:
    """Make malloc return large blocks to the system when the blocks are freed.

    glibc allocates large blocks by ``mmap``, but raises the minimum size of these blocks to the size of the
    largest freed block. Later tensors are therefore allocated on the heap. Before glibc 2.38,
    ``posix_memalign`` cannot reuse a free block of the same size. Small live blocks between large freed
    blocks then make the heap grow to several times the live bytes.

    Nothing changes if the process called :func:`keep_freed_pages` or set a threshold in its environment.
    """
    global _returns  # noqa: PLW0603 - as above
    if not (_is_decided or _returns) and _set_thresholds(_THRESHOLD):
        _returns = True
        ctypes.CDLL(None).mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
        ctypes.CDLL(None).malloc_trim(0)


def reuse_freed_pages() -> None:
    """Undo :func:`return_freed_pages`, because each page returned by malloc causes a page fault later."""
    global _returns  # noqa: PLW0603 - as above
    if _returns and not _is_decided:
        _returns = not _set_thresholds(_HIGHEST)


def _set_thresholds(nbytes: int) -> bool:
    """Make malloc map blocks of at least ``nbytes`` bytes, and keep up to ``nbytes`` freed bytes.

    Only glibc supports these settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda _setting, _value: 0)
    return bool(mallopt(_M_MMAP_THRESHOLD, nbytes) and mallopt(_M_TRIM_THRESHOLD, nbytes))
