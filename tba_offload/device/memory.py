"""How many bytes of a device are live, and how many were at most.

Two meters with one interface tell the activation peak of a step. On an accelerator it comes from the
statistics of the caching allocator. On a CPU it comes from the allocator's own count of live bytes, which a
thread samples, because allocators keep no peak. Neither looks at our own ledger.

Gradients and optimizer states that are allocated in the middle of a step are no activations. They are counted
where they come into being (:class:`~tba_offload.device.live_bytes.LiveBytes`), and the meters leave them out.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tba_offload.device.malloc import allocator_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.device.streams import Device


def _nothing() -> int:
    return 0


def _ignore(_live: int, _aside: int) -> None:
    """Of what a meter sees most is of no use to others."""


class MemoryMeter(ABC):
    """The most bytes that were live on the device since the last :meth:`reset`.

    Args:
        static: Tells how many of the live bytes are not to be counted at the moment.
    """

    source: str
    """Source of the figure, for the run log."""

    samples = False
    """Whether it knows only what it sees at the moments at which it looks."""

    def __init__(self, static: Callable[[], int] = _nothing) -> None:
        self._static = static
        self._seen: Callable[[int, int], object] = _ignore

    def tell(self, seen: Callable[[int, int], object]) -> None:
        """Have a function told of the live bytes that the meter sees, on whatever thread.

        Args:
            seen: Is given those that count, and those that did not at that moment.
        """
        self._seen = seen

    @abstractmethod
    def live(self) -> int:
        """Bytes that are live now and count."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the peak and starts to watch."""

    @abstractmethod
    def pause(self) -> None:
        """Record that what is live until :meth:`resume` is told of still, and is in no peak."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after :meth:`pause`."""

    @abstractmethod
    def sample(self, grows_by: int = 0) -> None:
        """Note what is live, where it may be much, or before ``grows_by`` bytes more are left out."""

    @abstractmethod
    def cut(self) -> int:
        """Begin a new section of the peak; return the live bytes.

        What was seen before does not count for the new section, however coarsely the meter looks.
        """

    @abstractmethod
    def peak(self) -> int:
        """Return the most live bytes since :meth:`reset`; stops watching."""

    def reserved(self) -> int | None:
        """Return the most bytes that the allocator held until :meth:`peak`; ``None`` if it cannot be told."""
        return None

    def whole_peak(self) -> int | None:
        """Return the most live bytes until :meth:`peak`, those that do not count included; None if untold."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End what the meter started."""


class AllocatorMeter(MemoryMeter):
    """Peak by the statistics of PyTorch's caching allocator, on an accelerator.

    The allocator tells the peak of a stretch, and not when in it the peak was. So a stretch ends where bytes
    are born that do not count, and where such bytes are freed inside a stretch its peak is an upper bound.
    """

    _COARSE = 1 / 64
    """A stretch ends before more than this share of the peak is born in it: reading the statistics takes the
    host about 100 us, too much for every single parameter."""

    def __init__(self, device: torch.device, static: Callable[[], int] = _nothing) -> None:
        super().__init__(static)
        self.source = f"{device.type} allocator"
        self._module = torch.get_device_module(device)
        self._device = device
        self._peak = 0
        self._whole = 0
        self._reserved = 0
        self._static_before = 0
        self._paused = False

    def live(self) -> int:
        """Bytes of live tensors that count."""
        return int(self._module.memory_allocated(self._device)) - self._static()

    def reset(self) -> None:
        """Set the allocator's peak to what is live now."""
        self._peak = self._whole = self._reserved = 0
        self._paused = False
        self._begin_stretch()

    def pause(self) -> None:
        """End a stretch; the next one, which lasts until :meth:`resume`, is told of alone."""
        self._end_stretch()
        self._paused = True
        self._begin_stretch()

    def resume(self) -> None:
        """Begin a stretch."""
        self._end_stretch()
        self._paused = False
        self._begin_stretch()

    def sample(self, grows_by: int = 0) -> None:
        """End a stretch before too much is born in it."""
        born = self._static() + grows_by - self._static_before
        if not self._paused and born > self._COARSE * self._peak:
            self._end_stretch()
            self._begin_stretch(grows_by)

    def cut(self) -> int:
        """End a stretch, and begin the next; return live bytes."""
        self._end_stretch()
        self._begin_stretch()
        return self.live()

    def peak(self) -> int:
        """Return the highest peak of a stretch."""
        self._end_stretch()
        return self._peak

    def reserved(self) -> int:
        """Return what the allocator had taken from the device, cached blocks included."""
        return self._reserved

    def whole_peak(self) -> int:
        """Return the highest peak of the allocator in a stretch."""
        return self._whole

    def close(self) -> None:
        """Nothing was started."""

    def _begin_stretch(self, grows_by: int = 0) -> None:
        self._static_before = self._static() + grows_by
        self._module.reset_peak_memory_stats(self._device)

    def _end_stretch(self) -> None:
        static = min(self._static_before, self._static())
        whole = self._module.max_memory_allocated(self._device)
        most = whole - static
        self._seen(most, static)
        if not self._paused:
            self._whole = max(self._whole, whole)
            self._peak = max(self._peak, most)
            self._reserved = max(self._reserved, self._module.max_memory_reserved(self._device))


class MallocMeter(MemoryMeter):
    """Peak of the allocator's live bytes, sampled by a thread and by :meth:`sample`.

    A sample takes 4 us in a small process, and 100 to 700 us in one whose heap has a thousand free blocks,
    since glibc walks them all. So all threads together rest for 49 times its processor time after each: what
    comes sooner is skipped, but for :meth:`cut`. A peak that lasts for less than the rest can be missed.

    Args:
        period: Seconds between two samples of the thread, or more.
        static: Tells how many of the live bytes are not to be counted at the moment.

    Raises:
        UnsupportedError: No allocator that this process uses tells how many bytes are live.
    """

    samples = True

    def __init__(self, period: float = 0.002, static: Callable[[], int] = _nothing) -> None:
        super().__init__(static)
        self._count, name = allocator_count()
        self.source = f"{name}, sampled"
        self._period = period
        self._lock = threading.Lock()
        self._peak = 0
        self._whole = 0
        self._latest = 0  # count that was read
        self._rests_until = 0.0
        self._is_paused = False
        self._watching = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        finalizer = weakref.finalize(self, _end, self._watching, self._closed)
        finalizer.atexit = False

    def live(self) -> int:
        """Bytes that the allocator has given out and that count.

        Reading the count lets go of the GIL. A gradient that is put in place or freed meanwhile is left out
        either way: one sample that is too low does no harm to a maximum, one that is too high does.
        """
        before, began = self._static(), time.thread_time()
        self._latest = count = self._count()
        self._rests_until = time.perf_counter() + REST * (time.thread_time() - began)
        return count - max(before, self._static())

    def reset(self) -> None:
        """Take a first sample and let the thread, and :meth:`sample`, take the others."""
        with self._lock:
            self._is_paused = False
            self._peak = self.live()
            self._whole = self._latest
        if self._thread is None:
            watched = weakref.ref(self), self._watching, self._closed, self._period
            thread = threading.Thread(target=_watch, args=watched, name="tba-memory", daemon=True)
            thread.start()
            self._thread = thread
        self._watching.set()

    def pause(self) -> None:
        """Take a last sample that counts; those until :meth:`resume` are told of alone."""
        if not self._is_paused and self._watching.is_set():
            self._sample()
            self._is_paused = True

    def resume(self) -> None:
        """Sample count again."""
        self._is_paused = False
        self._watching.set()

    def sample(self, grows_by: int = 0) -> None:  # noqa: ARG002 - a sample is of a moment
        """Take a sample if one is due: on a busy machine the thread may get no turn for long."""
        self.sample_or_rest()

    def sample_or_rest(self, period: float = 0.0) -> float:
        """Take a sample if one is due.

        Args:
            period: Seconds until the next that is wanted, if this one is taken.

        Returns:
            Seconds until the next.
        """
        rest = self._rests_until - time.perf_counter()
        if rest > 0:
            return rest
        self._sample()
        return max(period, self._rests_until - time.perf_counter())

    def cut(self) -> int:
        """Take a sample, and return it."""
        return self._sample()

    def peak(self) -> int:
        """Return the largest sample; take a last one unless it is paused."""
        self.pause()
        self._watching.clear()
        with self._lock:
            return self._peak

    def whole_peak(self) -> int:
        """Return the largest count of a sample."""
        with self._lock:
            return self._whole

    def close(self) -> None:
        """End the thread."""
        _end(self._watching, self._closed)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _sample(self) -> int:
        with self._lock:  # or a sample from before a reset could come after it
            live = self.live()
            if not self._watching.is_set():
                return live
            if not self._is_paused:
                self._peak = max(self._peak, live)
                self._whole = max(self._whole, self._latest)
            self._seen(live, self._latest - live)
            return live


def _watch(
    meter: weakref.ref[MallocMeter], watching: threading.Event, closed: threading.Event, period: float
) -> None:
    """Record that the life of a meter's thread, which keeps no meter alive that is forgotten."""
    while not closed.is_set():
        watching.wait()
        rest = period
        alive = meter()
        if alive is not None:
            rest = alive.sample_or_rest(period)
        del alive
        closed.wait(rest)


def _end(watching: threading.Event, closed: threading.Event) -> None:
    closed.set()
    watching.set()


REST = 49
"""Rest after a sample, in samples: those that may be skipped take a fiftieth of a core at most.

Of a sample its processor time counts. Its time by the clock has waits for the GIL, which reading the count
lets go of: beside a thread that is busy in Python there would be seconds without a sample.

With 12 layers of width 768 that found the same peak in every second step, and one lower by 5 % at most in the
others, where 19 found it in all, and 99 one lower by up to 17 %. Plans go by the highest peak of eight steps.
"""


class ResidentPeak:
    """The operating system's peak of this process's resident memory, reset at will (Linux)."""

    _CLEAR = Path("/proc/self/clear_refs")
    _STATUS = Path("/proc/self/status")

    def reset(self) -> None:
        """Set VmHWM to what is resident now; where that is not allowed the peak is of the whole run."""
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


def meter_of(device: Device, static: Callable[[], int] = _nothing) -> MemoryMeter:
    """Return the meter for a device.

    Args:
        device: Where the model is.
        static: Tells how many of the live bytes are not to be counted at the moment.

    Raises:
        UnsupportedError: The allocator of a CPU does not count live bytes.
    """
    where = device.torch_device
    return MallocMeter(static=static) if where.type == "cpu" else AllocatorMeter(where, static)
