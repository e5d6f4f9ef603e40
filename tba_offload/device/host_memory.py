"""Memory of the host: pinned pages, and what malloc does with memory that was freed.

PyTorch rounds pinned memory up to a power of two and keeps it until the process ends. With
``pinned_use_cuda_host_register`` in ``PYTORCH_CUDA_ALLOC_CONF`` its alignment is malloc's, which direct I/O
refuses. So pages are mapped and pinned here.
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
"""Flag of CUDA's runtime: the memory is pinned for all devices."""


class _Pinned(mmap.mmap):
    """Anonymous pages that CUDA may have pinned; both end with the last tensor on them."""

    unpin: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def mapped_memory(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Map whole pages outside malloc, whose count of live bytes stands for device memory on a CPU.

    Args:
        nbytes: Size.
        pinned: Whether CUDA pins the pages. That blocks the device: do it rarely, outside a step.

    Returns:
        A 1-D uint8 tensor of ``nbytes``; the pages are given back with it.

    Raises:
        RuntimeError: CUDA cannot pin that many bytes.
        OSError: The host has no such memory.
    """
    pages = _Pinned(-1, nbytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        address, runtime = memory.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # A forked child has no use for the pages, and would keep them after they are given back here.
        pages.madvise(mmap.MADV_DONTFORK)
        status = runtime.cudaHostRegister(address, nbytes, PORTABLE)
        if int(status):
            raise RuntimeError(
                f"CUDA cannot pin {nbytes} bytes of host memory: {runtime.cudaGetErrorString(status)}. "
                "Lower host_capacity, or raise the limit of locked memory (ulimit -l)"
            )
        # In a forked child CUDA must not be called.
        pid, owner = os.getpid, os.getpid()
        pages.unpin = lambda: pid() == owner and runtime.cudaHostUnregister(address)
    return memory


def never_freed(memory: Iterable[torch.Tensor]) -> None:
    """Leak host memory in a forked child: freeing pinned pages would call the driver of the device."""
    for tensor in memory:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


# malloc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = 2**31 - 1
_THRESHOLD = 128 * 1024  # glibc's own, before it adapts
_MOST_MAPPINGS = 32768  # half of what Linux allows a process: others need mappings too
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.mmap_threshold")

_environment = " ".join(os.environ) + os.environ.get("GLIBC_TUNABLES", "")
_is_decided = any(name in _environment for name in _SETTINGS)
"""Whether the user, the program or a step that wasted some has chosen what malloc does with freed memory."""


def keep_freed_pages() -> bool:
    """Tell malloc to keep freed memory mapped, so that the next step does not fault it in again.

    By default glibc serves large allocations by ``mmap`` and returns them at once. Every step then pays a
    page fault for each 4 KiB of every activation, with or without offloading: several milliseconds for
    8 MiB. With this setting the process keeps its largest footprint. It concerns training on a CPU only
    and holds for the whole process, so it is the caller's decision.

    Returns:
        Whether the C library accepted it.
    """
    return _set_thresholds(_NEVER)


def return_freed_pages() -> None:
    """Tell malloc to give large blocks back when they are freed, once, unless another choice was made before.

    glibc raises the size from which it maps blocks to that of the largest one freed. From then on tensors are
    on its heap. ``posix_memalign`` of glibc before 2.38 fits no block into a hole of the same size, so a heap
    with small live blocks between large freed ones grows: seven times the live bytes were seen.

    A process that called :func:`keep_freed_pages`, or set a threshold in its environment, is left alone.
    """
    if not _is_decided and _set_thresholds(_THRESHOLD):
        ctypes.CDLL(None).mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(nbytes: int) -> bool:
    """Have blocks from ``nbytes`` on mapped, and that much freed memory kept; only glibc accepts it."""
    global _is_decided  # noqa: PLW0603 - malloc is one for the process
    _is_decided = True
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda _setting, _value: 0)
    return bool(mallopt(_M_MMAP_THRESHOLD, nbytes) and mallopt(_M_TRIM_THRESHOLD, nbytes))
