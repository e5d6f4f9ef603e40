"""Memory of the device: how malloc treats it, and how many bytes are live.

Two meters with one interface tell the activation peak of a step. On an accelerator it comes from the
statistics of the caching allocator. On a CPU it comes from the allocator's own count of live bytes, which a
thread samples, because allocators keep no peak. Neither looks at our own ledger.

Gradients and optimizer states that are allocated in the middle of a step are no activations. They are counted
where they come into being (:class:`LiveBytes`), and the meters leave them out.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from tba_offload.errors import UnsupportedError
from tba_offload.renamed import names_of

if TYPE_CHECKING:
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


class LiveBytes:
    """Bytes of storages that autograd or an optimizer owns, each counted once, from :meth:`add` until freed.

    A gradient counts from the moment at which autograd has put it in place. While backward still computes it,
    it is a temporary like any other, and as it is where gradients exist beforehand and are added to.

    Args:
        device: Storages elsewhere do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._known: dict[int, weakref.KeyedRef[int, torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._nbytes = 0
        self._shifted = 0
        self._added = 0
        self._most = 0
        # A finalizer may run inside any lock, so it only leaves word.
        self._freed: SimpleQueue[weakref.KeyedRef[int, torch.UntypedStorage]] = SimpleQueue()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        with self._lock:
            self._take_freed()
            return self._nbytes

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of storages, and those that :meth:`shift` has told of, at one moment."""
        with self._lock:
            self._take_freed()
            return self._nbytes - self._shifted, self._shifted

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the storage of a tensor; of a sparse or a distributed one those that it is made of."""
        for plain in _plain_tensors(tensor):
            self.add_storage(plain.untyped_storage())

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage of the device."""
        if storage.device != self._device:
            return
        with self._lock:
            self._take_freed()
            key = storage._cdata
            if key in self._known and self._known[key]() is storage:
                return
            self._known[key] = weakref.KeyedRef(storage, self._freed.put, key)
            self._sizes[key] = storage.nbytes()
            self._nbytes += self._sizes[key]
            self._added += self._sizes[key]
            self._most = max(self._most, self._nbytes)

    def shift(self, nbytes: int) -> None:
        """Counts bytes that come and go without their storage, as those of weights do; negative ones go."""
        with self._lock:
            self._take_freed()
            self._nbytes += nbytes
            self._shifted += nbytes
            self._most = max(self._most, self._nbytes)

    def take_added(self) -> int:
        """Bytes that were added since the last call, freed ones included."""
        with self._lock:
            added, self._added = self._added, 0
            return added

    def take_most(self) -> int:
        """Most bytes that were allocated at one time since the last call."""
        with self._lock:
            self._take_freed()
            most, self._most = self._most, self._nbytes
            return most

    def _take_freed(self) -> None:
        while not self._freed.empty():  # under the lock nothing else takes any out
            gone = self._freed.get_nowait()
            key = gone.key
            if self._known.get(key) is gone:
                del self._known[key]
                self._nbytes -= self._sizes.pop(key)


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storages of their own that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten()[0])
        tensors = (part for part in parts if isinstance(part, torch.Tensor))  # a device mesh may be one too
        return [plain for part in tensors for plain in _plain_tensors(part)]
    return [tensor] if tensor.layout is torch.strided else []


def plain_storage(tensor: object) -> torch.UntypedStorage | None:
    """The storage of a plain tensor; others, made of several or standing for one, have none of their own."""
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return None
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()


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
        """Has a function told of the live bytes that the meter sees, on whatever thread.

        Args:
            seen: Is given those that count, and those that did not at that moment.
        """
        self._seen = seen

    @abstractmethod
    def live(self) -> int:
        """Bytes that are live now and count."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets the peak and starts to watch."""

    @abstractmethod
    def pause(self) -> None:
        """What is live until :meth:`resume` is told of still, and is in no peak."""

    @abstractmethod
    def resume(self) -> None:
        """Goes on after :meth:`pause`."""

    @abstractmethod
    def sample(self, grows_by: int = 0) -> None:
        """Notes what is live, where it may be much, or before ``grows_by`` bytes more are left out."""

    @abstractmethod
    def cut(self) -> int:
        """What was seen until now was before what comes, however coarsely it looks; returns live bytes."""

    @abstractmethod
    def peak(self) -> int:
        """The most live bytes since :meth:`reset`; stops watching."""

    def reserved(self) -> int | None:
        """The most bytes that the allocator held until :meth:`peak`; ``None`` if it cannot be told."""
        return None

    def whole_peak(self) -> int | None:
        """The most live bytes until :meth:`peak`, those that do not count included; ``None`` if untold."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Ends what the meter started."""


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
        """Sets the allocator's peak to what is live now."""
        self._peak = self._whole = self._reserved = 0
        self._paused = False
        self._begin_stretch()

    def pause(self) -> None:
        """Ends a stretch; the next one, which lasts until :meth:`resume`, is told of alone."""
        self._end_stretch()
        self._paused = True
        self._begin_stretch()

    def resume(self) -> None:
        """Begins a stretch."""
        self._end_stretch()
        self._paused = False
        self._begin_stretch()

    def sample(self, grows_by: int = 0) -> None:
        """Ends a stretch before too much is born in it."""
        born = self._static() + grows_by - self._static_before
        if not self._paused and born > self._COARSE * self._peak:
            self._end_stretch()
            self._begin_stretch(grows_by)

    def cut(self) -> int:
        """Ends a stretch, and begins the next; returns live bytes."""
        self._end_stretch()
        self._begin_stretch()
        return self.live()

    def peak(self) -> int:
        """The highest peak of a stretch."""
        self._end_stretch()
        return self._peak

    def reserved(self) -> int:
        """What the allocator had taken from the device, cached blocks included."""
        return self._reserved

    def whole_peak(self) -> int:
        """The highest peak of the allocator in a stretch."""
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
        """Takes a first sample and lets the thread, and :meth:`sample`, take the others."""
        with self._lock:
            self._is_paused = False
            self._peak = self.live()
            self._whole = self._latest
        if self._thread is None:
            watched = weakref.ref(self), self._watching, self._closed, self._period
            self._thread = threading.Thread(target=_watch, args=watched, name="tba-memory", daemon=True)
            self._thread.start()
        self._watching.set()

    def pause(self) -> None:
        """Takes a last sample that counts; those until :meth:`resume` are told of alone."""
        if not self._is_paused and self._watching.is_set():
            self._sample()
            self._is_paused = True

    def resume(self) -> None:
        """Samples count again."""
        self._is_paused = False
        self._watching.set()

    def sample(self, grows_by: int = 0) -> None:  # noqa: ARG002 - a sample is of a moment
        """Takes a sample if one is due: on a busy machine the thread may get no turn for long."""
        self.sample_or_rest()

    def sample_or_rest(self, period: float = 0.0) -> float:
        """Takes a sample if one is due.

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
        """Takes a sample, and returns it."""
        return self._sample()

    def peak(self) -> int:
        """The largest sample; takes a last one unless it is paused."""
        self.pause()
        self._watching.clear()
        with self._lock:
            return self._peak

    def whole_peak(self) -> int:
        """The largest count of a sample."""
        with self._lock:
            return self._whole

    def close(self) -> None:
        """Ends the thread."""
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
    """The life of a meter's thread, which keeps no meter alive that is forgotten."""
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


class _MallInfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


REST = 49
"""Rest after a sample, in samples: those that may be skipped take a fiftieth of a core at most.

Of a sample its processor time counts. Its time by the clock has waits for the GIL, which reading the count
lets go of: beside a thread that is busy in Python there would be seconds without a sample.

With 12 layers of width 768 that found the same peak in every second step, and one lower by 5 % at most in the
others, where 19 found it in all, and 99 one lower by up to 17 %. Plans go by the highest peak of eight steps.
"""

Count = Callable[[], int]

_PROBE_BYTES = 8 * 2**20


def allocator_count() -> tuple[Count, str]:
    """What counts the live bytes of this process, and its name.

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


def meter_of(device: Device, static: Callable[[], int] = _nothing) -> MemoryMeter:
    """The meter for a device.

    Args:
        device: Where the model is.
        static: Tells how many of the live bytes are not to be counted at the moment.

    Raises:
        UnsupportedError: The allocator of a CPU does not count live bytes.
    """
    where = device.torch_device
    return MallocMeter(static=static) if where.type == "cpu" else AllocatorMeter(where, static)


if not TYPE_CHECKING:
    __getattr__ = names_of(__name__)
