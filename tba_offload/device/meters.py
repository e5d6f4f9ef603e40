"""How many bytes of a device are live, how many were at most, and how many a process may still take.

A meter measures the activation peak of a step. On an accelerator the peak comes from the statistics of the
caching allocator. On a CPU a meter samples glibc's own count of live bytes, because malloc keeps no peak.
Neither looks at our own ledger.

Gradients and optimizer states that are allocated in the middle of a step are no activations. They are counted
where they come into being (:class:`LiveBytes`), and the meters leave them out.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from tba_offload.device.host_memory import return_freed_pages
from tba_offload.errors import UnsupportedError
from tba_offload.torch_private import is_transform_wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.device import Device


class MemoryMeter:
    """The most bytes that were live on an accelerator, by the statistics of PyTorch's caching allocator.

    The allocator reports the peak of a stretch, not when in the stretch it was. So a stretch ends where bytes
    are born that do not count. Where such bytes are freed inside a stretch its peak is an upper bound.

    Args:
        device: The accelerator.
        static: Returns how many of the live bytes are not to be counted at the moment.

    Attributes:
        source: Source of the figure, for the run log.
        samples: Whether the meter knows only the moments at which it looks.
        seen: Called, on whatever thread, with the live bytes that the meter sees: those that count, and those
            that did not at that moment.
        whole_peak: The most live bytes, those that do not count included.
        reserved: The most bytes that the allocator held; None if it does not say.
        samples_taken: How many samples the peak is of; None if it is exact.
        is_thin: After :meth:`peak`, whether samples may have missed it.
    """

    samples = False

    _COARSE = 1 / 64
    """Share of the peak that may be allocated uncounted in one stretch.

    Reading the statistics takes the host about 100 us, too much for every single parameter.
    """

    def __init__(self, device: torch.device, static: Callable[[], int] = lambda: 0) -> None:
        self.source = f"{device.type} allocator"
        self.seen: Callable[[int, int], object] = lambda _live, _aside: None
        self.reserved: int | None = None
        self.samples_taken: int | None = None
        self.is_thin = self._is_paused = False
        self._peak = self.whole_peak = self._static_before = 0
        self._device, self._static = device, static
        self._module = torch.get_device_module(device)

    def live(self) -> int:
        """Return the bytes that are live now and count."""
        return int(self._module.memory_allocated(self._device)) - self._static()

    def reset(self, *, closely: bool = False) -> None:  # noqa: ARG002 - it misses nothing
        """Forget the peak and start to watch.

        Args:
            closely: Whether a meter that samples looks more often, to learn where in a step the peak is.
        """
        self._peak = self.whole_peak = self.reserved = 0
        self._is_paused = False
        self._begin_stretch()

    def sample(self, grows_by: int = 0) -> None:
        """Look at a moment that may be high, or before ``grows_by`` bytes more are left out."""
        born = self._static() + grows_by - self._static_before
        if not self._is_paused and born > self._COARSE * self._peak:
            self._end_stretch()
            self._begin_stretch(grows_by)

    def cut(self) -> int:
        """Begin a new section of the peak; return the live bytes.

        Earlier moments do not count for the new section, however coarsely the meter looks.
        """
        self._end_stretch()
        self._begin_stretch()
        return self.live()

    def pause(self) -> None:
        """Leave what is live until :meth:`resume` out of the peak; ``seen`` is still called."""
        self.cut()
        self._is_paused = True

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self.cut()
        self._is_paused = False

    def peak(self) -> int:
        """Return the most live bytes since :meth:`reset`, and stop watching."""
        self.cut()
        return self._peak

    def close(self) -> None:
        """End what the meter started."""

    def _begin_stretch(self, grows_by: int = 0) -> None:
        self._static_before = self._static() + grows_by
        self._module.reset_peak_memory_stats(self._device)

    def _end_stretch(self) -> None:
        static, whole = self._static(), self._module.max_memory_allocated(self._device)
        self._saw(whole, whole - min(self._static_before, static))
        if not self._is_paused:
            self.reserved = max(self.reserved or 0, self._module.max_memory_reserved(self._device))

    def _saw(self, whole: int, live: int) -> None:
        self.seen(live, whole - live)
        if not self._is_paused:
            self._peak = max(self._peak, live)
            self.whole_peak = max(self.whole_peak, whole)


REST, REST_CLOSELY = 49, 9
"""Rest after a sample that may be skipped, in samples: all of them take a fiftieth of a core at most.

In steps that are watched closely the thread takes a tenth. The processor time of a sample counts, not its
time by the clock: that has waits for the GIL, which reading the count lets go of.
"""

HIGHEST = 16
"""Looks of a step that was watched closely, its highest ones, that no later step skips."""

THIN = 0.25, 0.02
"""Samples are thin if none was taken for this share of the time, and for so many seconds."""

WASTED = 1.1, 4 * 2**20
"""malloc is told to return freed memory when its memory grows by more than so much beside the live bytes."""


class MallocMeter(MemoryMeter):
    """Peak of malloc's live bytes, sampled by a thread, and by the training thread where memory changes.

    A sample takes 4 us in a small process, and 100 to 700 us in one whose heap has a thousand free blocks,
    since glibc walks them all. So all threads together rest after each sample: what comes sooner is skipped,
    but for :meth:`cut`. On a busy machine the sampling thread gets few turns. But the training thread looks
    at the same moments in each step, so the meter learns at which of them memory is highest.

    Args:
        period: Seconds between two samples of the thread, or more.
        static: Returns how many of the live bytes are not to be counted at the moment.

    Raises:
        UnsupportedError: malloc does not count what PyTorch allocates here.
    """

    samples = True

    def __init__(self, period: float = 0.002, static: Callable[[], int] = lambda: 0) -> None:
        super().__init__(torch.device("cpu"), static)
        self.source = "mallinfo2, sampled"
        self._count = malloc_count()
        self._period, self._lock = period, threading.Lock()
        self._first, self._first_held = self._count()
        self._most = self._first
        self._began = self._sampled_at = self._longest_gap = self._rests_until = 0.0
        self._is_close, self._has_changed = False, True
        self._looks, self._expected = 0, -1  # of this step, and of the one before
        self._heights: list[tuple[int, int]] = []  # live bytes and number of looks in a step watched closely
        self._highest: set[int] = set()  # numbers of the looks that no step skips
        self._watching, self._closed = threading.Event(), threading.Event()
        watched = weakref.ref(self), self._watching, self._closed
        self._thread = threading.Thread(target=_watch, args=watched, name="tba-memory", daemon=True)

    def live(self) -> int:
        """Return the bytes that malloc has given out and that count."""
        return self.cut()

    def reset(self, *, closely: bool = False) -> None:
        """Take a first sample and let the thread, and :meth:`sample`, take the others."""
        with self._lock:
            self._is_paused, self._is_close = False, closely or self._has_changed
            self._peak = self.whole_peak = self.samples_taken = self._looks = 0
            self._longest_gap = 0.0
            self._began = self._sampled_at = time.perf_counter()
            self._heights.clear()
            self._watching.set()
        self.cut()
        if self._thread.ident is None:
            self._thread.start()

    def sample(self, grows_by: int = 0) -> None:  # noqa: ARG002 - a sample is of a moment
        """Take a sample if one is due, or if this moment was among the highest of a step before."""
        self._looks += 1
        if self._is_close:
            self._heights.append((self.cut(), self._looks))
        elif self._looks in self._highest or self._rests_until <= time.perf_counter():
            self.cut()

    def sample_or_rest(self) -> float:
        """Take a sample if one is due; return seconds until the thread may take the next."""
        if self._rests_until <= time.perf_counter():
            self.cut()
        return max(self._period, self._rests_until - time.perf_counter())

    def cut(self) -> int:
        """Take a sample, and return it.

        Reading the count lets go of the GIL. A gradient that is put in place or freed meanwhile is left out
        either way: one sample that is too low does no harm to a maximum, one that is too high does.
        """
        with self._lock:  # or a sample from before a reset could come after it
            static, began = self._static(), time.thread_time()
            whole, held = self._count()
            live = whole - max(static, self._static())
            rest = REST_CLOSELY if self._is_close else REST
            now = time.perf_counter()
            self._rests_until = now + rest * (time.thread_time() - began)
            self._most = max(self._most, whole)
            share, slack = WASTED
            if held - self._first_held > share * (self._most - self._first) + slack:
                return_freed_pages()
            if self._watching.is_set():
                if not self._is_paused:
                    self.samples_taken = (self.samples_taken or 0) + 1
                    self._longest_gap = max(self._longest_gap, now - self._sampled_at)
                self._sampled_at = now
                self._saw(whole, live)
            return live

    def peak(self) -> int:
        """Return the largest sample; take a last one unless the meter is paused.

        The peak is thin if the step looked at other moments than those learned, or long at none.
        """
        peak = super().peak()
        self._watching.clear()
        self._has_changed, self._expected = self._looks != self._expected, self._looks
        self.is_thin = self._has_changed
        if self._is_close:
            self._highest = {look for _, look in sorted(self._heights)[-HIGHEST:]}
            share, seconds = THIN
            self.is_thin = self._longest_gap > max(seconds, share * (self._sampled_at - self._began))
        return peak

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._watching.set()
        if self._thread.ident is not None:
            self._thread.join()


def _watch(meter: weakref.ref[MallocMeter], watching: threading.Event, closed: threading.Event) -> None:
    """Sample for a meter until it is closed; end within a second where it was forgotten."""
    rest = 0.0
    while not closed.wait(rest):
        watching.wait(1.0)
        alive = meter()
        if alive is None:
            return
        rest = alive.sample_or_rest()
        del alive


_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def malloc_count() -> Callable[[], tuple[int, int]]:
    """Return a function that counts the live bytes of this process, and those that malloc has taken for them.

    A process has glibc's functions whatever allocator was preloaded, and there they count next to nothing. So
    the count is tried: it has to follow an allocation of PyTorch's, to a sixteenth, as other threads allocate
    meanwhile.

    Raises:
        UnsupportedError: The count does not follow, as with musl, glibc before 2.33, or another allocator.
    """
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo2

        def count() -> tuple[int, int]:
            info = function()
            return info.uordblks + info.hblkhd, info.arena + info.hblkhd

        before, _ = count()
        probe = torch.empty(8 * 2**20, dtype=torch.uint8)
        if abs(count()[0] - before - probe.nbytes) < probe.nbytes // 16:
            return count
    raise UnsupportedError(
        "the activation peak on a CPU is malloc's, and mallinfo2 of glibc (2.33 or later) does not count "
        "what PyTorch allocates here. Preload no other allocator, or switch it off with measure_memory=False"
    )


def meter_of(device: Device, static: Callable[[], int] = lambda: 0) -> MemoryMeter:
    """Return the meter for a device.

    Args:
        device: Where the model is.
        static: Returns how many of the live bytes are not to be counted at the moment.

    Raises:
        UnsupportedError: malloc does not count live bytes on this CPU.
    """
    where = device.torch_device
    return MallocMeter(static=static) if where.type == "cpu" else MemoryMeter(where, static)


class ResidentPeak:
    """The operating system's peak of this process's resident memory, reset at will (Linux)."""

    def reset(self) -> None:
        """Set VmHWM to what is resident now; where that is not allowed the peak is of the whole run."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int | None:
        """Return VmHWM in bytes, or ``None`` where the kernel does not say it."""
        kib = _statistic(Path("/proc/self/status"), "VmHWM:")
        return None if kib is None else 1024 * kib


# Bytes that do not count


class LiveBytes:
    """Bytes of storages that autograd or an optimizer owns, each counted once, from :meth:`add` until freed.

    A gradient counts from the moment at which autograd has put it in place. While backward still computes it,
    it is a temporary like any other, and as it is where gradients exist beforehand and are added to.

    Args:
        device: Storages elsewhere do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._known = weakref.WeakSet[torch.UntypedStorage]()
        self._nbytes = self._shifted = self._added = self._most = 0
        # Bytes of storages that are gone: a finalizer may run inside any lock, so it only appends.
        self._freed: SimpleQueue[int] = SimpleQueue()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(self.parts)

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of storages, and those of :meth:`shift`, at one moment."""
        with self._lock:
            self._take_freed()
            return self._nbytes - self._shifted, self._shifted

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor; of a sparse or a distributed one those that it is made of."""
        for plain in _plain_tensors(tensor):
            self.add_storage(plain.untyped_storage())

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage of the device."""
        with self._lock:
            self._take_freed()
            if storage.device == self._device and storage not in self._known:
                nbytes = storage.nbytes()
                self._known.add(storage)
                weakref.finalize(storage, self._freed.put, nbytes)
                self._added += nbytes
                self._grow(nbytes)

    def shift(self, nbytes: int) -> None:
        """Count bytes that come and go without their storage, as those of weights do; negative ones go."""
        with self._lock:
            self._take_freed()
            self._shifted += nbytes
            self._grow(nbytes)

    def take(self) -> tuple[int, int]:
        """Return the bytes added since the last call, freed ones included, and the most at one time."""
        with self._lock:
            self._take_freed()
            taken = self._added, self._most
            self._added, self._most = 0, self._nbytes
            return taken

    def _grow(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._most = max(self._most, self._nbytes)

    def _take_freed(self) -> None:
        while not self._freed.empty():  # under the lock nothing else takes any out
            self._nbytes -= self._freed.get_nowait()


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with storages of their own that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a device mesh may be one
        return [plain for part in parts if isinstance(part, torch.Tensor) for plain in _plain_tensors(part)]
    return [tensor] if tensor.layout is torch.strided else []


def plain_storage(tensor: object) -> torch.UntypedStorage | None:
    """Return the storage of a plain tensor; ``None`` for one that is made of several or stands for one."""
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return None
    if tensor.layout is not torch.strided or is_transform_wrapper(tensor):
        return None
    return tensor.untyped_storage()


# Memory that is left

FITTING = 0.9
"""Share of a device that layers placed ``auto`` may fill where no budget is given."""


def available_bytes(device: torch.device, *, root: Path = Path("/")) -> int:
    """Return the memory of a device that is free or can be freed at once.

    Args:
        device: An accelerator, or the CPU. The memory of the CPU is that of the host within the limits of the
            control groups (version 2) of this process.
        root: Where ``/proc`` and ``/sys`` are found.

    Raises:
        UnsupportedError: The kernel does not say it.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    host = _statistic(root / "proc/meminfo", "MemAvailable:")  # the page cache counts as free
    if host is None:
        raise UnsupportedError("/proc/meminfo has no MemAvailable, which Linux reports since 3.14")
    return min([1024 * host, *_group_bytes(root)])


def fitting_bytes(device: torch.device) -> int:
    """Return nine tenths of the memory that this process may have on a device, bytes.

    Of an accelerator that is its size less what other processes hold, of a CPU the memory that this process
    has and may still take.

    Raises:
        UnsupportedError: The kernel does not say it.
    """
    if device.type == "cpu":
        taken = 1024 * (_statistic(Path("/proc/self/status"), "VmRSS:") or 0)
    else:
        taken = int(torch.get_device_module(device).memory_reserved(device))
    return int(FITTING * (available_bytes(device) + taken))


def _group_bytes(root: Path) -> Iterator[int]:
    """Yield what each control group that this process is in, or under, has left.

    Inside a container the path may be that of the host, which does not exist there; the mount is then the
    container's own group.
    """
    mount = root / "sys/fs/cgroup"
    _, found, path = _read(root / "proc/self/cgroup").partition("0::/")
    group = mount / path.strip()
    for folder in (group, *group.parents) if found else ():
        limit, usage = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if folder.is_relative_to(mount) and limit.isdecimal() and usage.isdecimal():
            # The kernel gives up page cache first when the group reaches its limit.
            yield int(limit) - int(usage) + (_statistic(folder / "memory.stat", "inactive_file") or 0)


def _statistic(file: Path, name: str) -> int | None:
    """Return the number after a name in a file of the kernel."""
    found = (line.split() for line in _read(file).splitlines())
    return next((int(words[1]) for words in found if words[:1] == [name]), None)


def _read(file: Path) -> str:
    """Return a file of the kernel, or nothing where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""
