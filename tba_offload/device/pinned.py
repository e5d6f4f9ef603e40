"""Pinned host memory of exactly the size that is asked for, aligned to pages.

PyTorch's own pinned memory is neither: it is rounded up to a power of two, kept until the process ends, and,
where ``pinned_use_cuda_host_register`` is set in ``PYTORCH_CUDA_ALLOC_CONF``, aligned as ``malloc`` aligns,
which direct I/O refuses.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PORTABLE = 1
"""Flag of CUDA's runtime: the memory is pinned for all devices."""


class _Pinned(mmap.mmap):
    """Anonymous pages that CUDA has pinned; both end with the last tensor on them."""

    _unpin: Callable[[], Any] | None = None

    def pin(self, address: int, nbytes: int) -> None:
        # A forked child has no use for the pages, and would keep them after they are given back here.
        self.madvise(mmap.MADV_DONTFORK)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(address, nbytes, PORTABLE)
        if int(status):
            raise RuntimeError(
                f"CUDA cannot pin {nbytes} bytes of host memory: {runtime.cudaGetErrorString(status)}"
            )
        self._unpin = lambda: runtime.cudaHostUnregister(address)
        self._getpid, self._owner = os.getpid, os.getpid()

    def __del__(self) -> None:
        # In a forked child CUDA must not be called. Where the runtime is gone, so is what it had pinned.
        if self._unpin is not None and self._getpid() == self._owner:
            self._unpin()


def pinned_memory(nbytes: int) -> torch.Tensor:
    """Pins whole pages, which blocks the device: do it rarely, outside a step.

    Returns:
        A 1-D uint8 tensor of ``nbytes``; the memory is given back with it.

    Raises:
        RuntimeError: CUDA cannot pin that many bytes.
        OSError: There is no such memory.
    """
    pages = _Pinned(-1, nbytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    pages.pin(memory.data_ptr(), nbytes)
    return memory
