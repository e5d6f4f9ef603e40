"""Memory of the device: how malloc treats it, and how many bytes are live.

Two meters with one interface tell the activation peak of a step. On CUDA it comes from the statistics of
the caching allocator. On a CPU it comes from malloc's own count of live bytes (``mallinfo2``), which a
thread samples, because malloc keeps no peak. Neither looks at our own books.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.device.streams import Device

FAST_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment of a process in which malloc asks for huge pages (glibc 2.35).

Direct I/O pins the pages that it moves, one by one; with huge pages there are 512 times fewer. Compute gains
too, through the translation buffer. It concerns training on a CPU only.
"""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1


def keep_freed_pages() -> bool:
    """Tells malloc to keep freed memory mapped, so that the next step does not fault it in again.

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


class MemoryMeter(ABC):
    """The most bytes that were live on the device since the last :meth:`reset`."""

    source: str
    """Where the figure comes from, for the run log."""

    @abstractmethod
    def live(self) -> int:
        """Bytes that are live now."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets the peak and starts to watch."""

    @abstractmethod
    def peak(self) -> int:
        """The most live bytes since :meth:`reset`; stops watching."""

    @abstractmethod
    def close(self) -> None:
        """Ends what the meter started."""


class CudaMeter(MemoryMeter):
    """Peak by the statistics of PyTorch's caching allocator, exact."""

    source = "cuda allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def live(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def reset(self) -> None:
        """Sets the allocator's peak to what is live now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The allocator's peak."""
        return torch.cuda.max_memory_allocated(self._device)

    def close(self) -> None:
        """Nothing was started."""


class _MallInfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class MallocMeter(MemoryMeter):
    """Peak of malloc's live bytes over all arenas, sampled by a thread.

    Args:
        period: Seconds between two samples. A peak shorter than that can be missed.

    Raises:
        UnsupportedError: The C library has no ``mallinfo2`` (glibc before 2.33, musl).
    """

    def __init__(self, period: float = 0.002) -> None:
        self._mallinfo2 = _load_mallinfo2()
        self.source = f"mallinfo2, sampled every {period * 1e3:g} ms"
        self._period = period
        self._lock = threading.Lock()
        self._peak = 0
        self._watching = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def live(self) -> int:
        """Bytes in use in the heaps plus bytes in mappings of their own."""
        info = self._mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def reset(self) -> None:
        """Takes a first sample and lets the thread take the others."""
        with self._lock:
            self._peak = self.live()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="tba-memory", daemon=True)
            self._thread.start()
        self._watching.set()

    def peak(self) -> int:
        """The largest sample; takes a last one."""
        self._watching.clear()
        self._sample()
        return self._peak

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._watching.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _sample(self) -> None:
        with self._lock:  # or a sample from before a reset could come after it
            self._peak = max(self._peak, self.live())

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._watching.wait()
            self._sample()
            self._closed.wait(self._period)


def _load_mallinfo2() -> Callable[[], Any]:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        raise UnsupportedError(
            "the activation peak on a CPU is read from glibc's mallinfo2 (glibc 2.33 or later), which this "
            "C library lacks; switch the measurement off with measure_memory=False"
        )
    function = libc.mallinfo2
    function.restype = _MallInfo2
    return function


class ResidentPeak:
    """The operating system's peak of this process's resident memory, reset at will (Linux)."""

    _CLEAR = Path("/proc/self/clear_refs")
    _STATUS = Path("/proc/self/status")

    def reset(self) -> None:
        """Sets VmHWM to what is resident now; where that is not allowed the peak is of the whole run."""
        try:
            self._CLEAR.write_text("5")
        except OSError:
            return

    def read(self) -> int | None:
        """VmHWM in bytes, or ``None`` where there is no such thing."""
        try:
            lines = self._STATUS.read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None


def meter_of(device: Device) -> MemoryMeter:
    """The meter for a device.

    Raises:
        UnsupportedError: The C library cannot count live bytes.
    """
    return CudaMeter(device.torch_device) if device.torch_device.type == "cuda" else MallocMeter()
