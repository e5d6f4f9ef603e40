"""Meters of device memory: live bytes, peaks, and the bytes that a process may still allocate.

A meter measures the activation peak of a step. On an accelerator, the peak comes from the statistics of the
caching allocator. On a CPU, a meter samples glibc's count of live bytes, because malloc does not record a
peak. No meter uses the counts of the offloader.

Gradients and optimizer states that are allocated in the middle of a step are not activations.
:class:`LiveBytes` counts the bytes of gradients and optimizer states, and the meters exclude these bytes.
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

from tba_offload.device.host_memory import return_freed_pages, reuse_freed_pages
from tba_offload.errors import UnsupportedError
from tba_offload.torch_private import is_transform_wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.device import Device


class MemoryMeter:
    """The peak of live bytes on an accelerator, by the statistics of PyTorch's caching allocator.

    Gradients and optimizer states are excluded from the peak. The allocator reports the peak of a period, but
    not the time of the peak. A period therefore ends when excluded bytes are allocated. If excluded bytes are
    freed within a period, the measured peak of the period is an upper bound.

    Args:
        device: The accelerator.
        static: Function that returns the excluded live bytes.

    Attributes:
        source: Name of the method that measures the peak, for the run log.
        samples: Whether the meter takes samples, and so knows the live bytes only at some moments.
        seen: Function that any thread may call with two numbers: the live bytes without excluded bytes, and
            the excluded bytes.
        whole_peak: The peak of all live bytes, including excluded bytes.
        reserved: Largest number of bytes that the allocator held; None if the allocator does not report this
            number.
        samples_taken: Number of samples since :meth:`reset`; None if the peak is exact.
        is_thin: Whether the samples may have missed the peak; valid after :meth:`peak`.
        returns_pages: Whether malloc returns freed memory to the system if too much freed memory is held.
            Returned memory causes page faults, so ``returns_pages`` is False for steps that keep all
            activations.
    """

    samples = False
    returns_pages = True

    _COARSE = 1 / 64
    """A period ends when the excluded bytes have grown by more than this fraction of the peak.

    A period does not end at every new gradient or state, because reading the statistics takes about 100 us.
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
        """Return the live bytes without excluded bytes."""
        return int(self._module.memory_allocated(self._device)) - self._static()

    def reset(self, *, closely: bool = False) -> None:  # noqa: ARG002 - the statistics include every moment
        """Set the peak to zero and start to measure.

        Args:
            closely: Whether to take more samples, in order to learn at which moments memory is highest.
        """
        self._peak = self.whole_peak = self.reserved = 0
        self._is_paused = False
        self._begin_stretch()

    def sample(self, grows_by: int = 0) -> None:
        """Measure now, at a moment when memory may be high.

        Args:
            grows_by: Number of excluded bytes that are allocated next.
        """
        born = self._static() + grows_by - self._static_before
        if not self._is_paused and born > self._COARSE * self._peak:
            self._end_stretch()
            self._begin_stretch(grows_by)

    def cut(self) -> int:
        """End a period of measurement, begin the next period, and return the live bytes.

        The peak of the next period does not include earlier moments.
        """
        self._end_stretch()
        self._begin_stretch()
        return self.live()

    def pause(self) -> None:
        """Count no bytes in the peak until :meth:`resume`. :attr:`seen` is still called."""
        self.cut()
        self._is_paused = True

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self.cut()
        self._is_paused = False

    def peak(self) -> int:
        """Return the peak since :meth:`reset`, and stop measuring."""
        self.cut()
        return self._peak

    def close(self) -> None:
        """End the threads of the meter."""

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
"""Length of the pause after a sample, as a multiple of the sample's time: in most steps, and in closely
measured steps.

The sampling thread therefore takes at most a fiftieth of a core, or a tenth in closely measured steps. The
time of a sample is processor time, because wall-clock time would include waits for the GIL.
"""

HIGHEST = 16
"""Number of moments that the meter learns in a closely measured step: the moments of the highest samples.

Later steps always take samples at these moments.
"""

THIN = 0.25, 0.02
"""Two limits for the time without a sample: a fraction of the step, and seconds. If a time without a sample
is longer than both limits, the samples may have missed the peak."""

WASTED = 1.1, 4 * 2**20
"""Factor and constant (in bytes) that limit the memory that malloc holds.

If the live bytes grow by n bytes, malloc may hold ``factor * n + constant`` more bytes. Above this limit,
malloc is set to return freed memory to the system.
"""


class MallocMeter(MemoryMeter):
    """The peak of malloc's live bytes.

    A separate thread takes samples, and the training thread takes samples when memory changes.

    A sample takes 4 us in a small process. A sample takes 100 to 700 us if the heap has a thousand free
    blocks, because glibc visits all free blocks. Each sample is therefore followed by a pause, in which only
    :meth:`cut` takes samples. On a busy machine, the sampling thread runs rarely. The training thread calls
    :meth:`sample` at the same moments of each step. In closely measured steps, the meter learns at which of
    these moments memory is highest, and later steps always take samples at these moments.

    Args:
        period: Minimum number of seconds between two samples of the sampling thread.
        static: Function that returns the excluded live bytes.

    Raises:
        UnsupportedError: malloc does not count PyTorch's allocations.
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
        self._looks, self._expected = 0, -1  # moments to sample in this and in the last step
        self._heights: list[tuple[int, int]] = []  # live bytes and moment, in a step measured closely
        self._highest: set[int] = set()  # moments at which every step takes a sample
        self._watching, self._closed = threading.Event(), threading.Event()
        watched = weakref.ref(self), self._watching, self._closed
        self._thread = threading.Thread(target=_watch, args=watched, name="tba-memory", daemon=True)

    def live(self) -> int:
        """Return malloc's live bytes without excluded bytes."""
        return self.cut()

    def reset(self, *, closely: bool = False) -> None:
        """Take a first sample. The sampling thread and :meth:`sample` take the later samples."""
        with self._lock:
            self._is_paused, self._is_close = False, closely or self._has_changed
            self._peak = self.whole_peak = self.samples_taken = self._looks = 0
            self._longest_gap = 0.0
            self._began = self._sampled_at = time.perf_counter()
            self._heights.clear()
            self._watching.set()
        if not self.returns_pages:
            reuse_freed_pages()
        self.cut()
        if self._thread.ident is None:
            self._thread.start()

    def sample(self, grows_by: int = 0) -> None:  # noqa: ARG002 - a sample has only the bytes of one moment
        """Take a sample if the pause is over, or if memory was highest at this moment of an earlier step."""
        self._looks += 1
        if self._is_close:
            self._heights.append((self.cut(), self._looks))
        elif self._looks in self._highest or self._rests_until <= time.perf_counter():
            self.cut()

    def sample_or_rest(self) -> float:
        """Take a sample if the pause is over; return the seconds until the next sample of the thread."""
        if self._rests_until <= time.perf_counter():
            self.cut()
        return max(self._period, self._rests_until - time.perf_counter())

    def cut(self) -> int:
        """Take a sample, and return its live bytes.

        Reading malloc's count releases the GIL, so another thread may create or free a gradient meanwhile.
        Excluded bytes are therefore read before and after malloc's count, and the larger number is used.
        """
        with self._lock:  # otherwise a sample from before a reset could be added after the reset
            static, began = self._static(), time.thread_time()
            whole, held = self._count()
            live = whole - max(static, self._static())
            rest = REST_CLOSELY if self._is_close else REST
            now = time.perf_counter()
            self._rests_until = now + rest * (time.thread_time() - began)
            self._most = max(self._most, whole)
            share, slack = WASTED
            is_wasteful = held - self._first_held > share * (self._most - self._first) + slack
            if is_wasteful and self.returns_pages:
                return_freed_pages()
            if self._watching.is_set():
                if not self._is_paused:
                    self.samples_taken = (self.samples_taken or 0) + 1
                    self._longest_gap = max(self._longest_gap, now - self._sampled_at)
                self._sampled_at = now
                self._saw(whole, live)
            return live

    def peak(self) -> int:
        """Take a last sample, unless the meter is paused, and return the largest sample.

        In a closely measured step, :attr:`is_thin` becomes True after a long time without a sample. In any
        other step, :attr:`is_thin` becomes True if :meth:`sample` was not called as often as in the previous
        step.
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
    """Take samples for a meter until the meter is closed. End within a second if the meter was freed."""
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
    """Return a function that returns the live bytes of this process, and the bytes that malloc holds.

    If another allocator is preloaded, the process still has glibc's functions, but glibc counts almost no
    bytes. A test therefore allocates a tensor and checks that the count grows by the bytes of the tensor. A
    deviation of a sixteenth is tolerated, because other threads may allocate during the test.

    Raises:
        UnsupportedError: The count does not grow: the C library is musl or glibc before 2.33, or another
            allocator is used.
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
        "the activation peak on a CPU cannot be measured: mallinfo2 of glibc (2.33 or later) does not count "
        "PyTorch's allocations. Use this glibc without a preloaded allocator, or set measure_memory=False"
    )


def meter_of(device: Device, static: Callable[[], int] = lambda: 0) -> MemoryMeter:
    """Return the meter for a device.

    Args:
        device: The device of the model.
        static: Function that returns the excluded live bytes.

    Raises:
        UnsupportedError: malloc does not count live bytes on this CPU.
    """
    where = device.torch_device
    return MallocMeter(static=static) if where.type == "cpu" else MemoryMeter(where, static)


class ResidentPeak:
    """The peak of the resident memory of this process, as Linux counts it."""

    def reset(self) -> None:
        """Reset the peak, which Linux calls VmHWM, to the current resident size.

        If Linux does not allow a reset, :meth:`read` returns the peak of the whole run.
        """
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int | None:
        """Return VmHWM in bytes; ``None`` if the kernel does not report it."""
        kib = _statistic(Path("/proc/self/status"), "VmHWM:")
        return None if kib is None else 1024 * kib


# Bytes that do not count


class LiveBytes:
    """Counter of the live bytes of storages, such as storages of gradients and optimizer states.

    Each storage is counted once, from :meth:`add` until the storage is freed.

    A gradient counts from the moment when autograd stores the gradient in ``Parameter.grad``. A gradient that
    autograd adds to an existing ``Parameter.grad`` never counts.

    Args:
        device: The device. Storages on other devices do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._known = weakref.WeakSet[torch.UntypedStorage]()
        self._nbytes = self._shifted = self._added = self._most = 0
        # Sizes of freed storages. A finalizer may run while any lock is held, so it only appends to this
        # list.
        self._freed: SimpleQueue[int] = SimpleQueue()

    @property
    def nbytes(self) -> int:
        """Live bytes."""
        return sum(self.parts)

    @property
    def parts(self) -> tuple[int, int]:
        """Live bytes of storages, and live bytes counted by :meth:`shift`, both at one moment."""
        with self._lock:
            self._take_freed()
            return self._nbytes - self._shifted, self._shifted

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor.

        For a sparse or distributed tensor, count the storages of its parts.
        """
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
        """Count ``nbytes`` more bytes that have no storage object here, such as frozen weights in use.

        A negative number means that bytes were freed.
        """
        with self._lock:
            self._take_freed()
            self._shifted += nbytes
            self._grow(nbytes)

    def take(self) -> tuple[int, int]:
        """Return the bytes added since the last call, and the largest number of bytes at one time.

        Both numbers include bytes that were added and freed again since the last call.
        """
        with self._lock:
            self._take_freed()
            taken = self._added, self._most
            self._added, self._most = 0, self._nbytes
            return taken

    def _grow(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._most = max(self._most, self._nbytes)

    def _take_freed(self) -> None:
        while not self._freed.empty():  # no other code takes entries, because this runs under the lock
            self._nbytes -= self._freed.get_nowait()


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with their own storages that make up a tensor."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # it may be a device mesh
        return [plain for part in parts if isinstance(part, torch.Tensor) for plain in _plain_tensors(part)]
    return [tensor] if tensor.layout is torch.strided else []


def plain_storage(tensor: object) -> torch.UntypedStorage | None:
    """Return the storage of a plain tensor; ``None`` for a composed tensor or a wrapper."""
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return None
    if tensor.layout is not torch.strided or is_transform_wrapper(tensor):
        return None
    return tensor.untyped_storage()


# Available memory

FITTING = 0.9
"""Fraction of the device memory that a plan may fill if the policy sets no budget."""


def available_bytes(device: torch.device, *, root: Path = Path("/")) -> int:
    """Return the bytes of device memory that are free or that the system can free at once.

    Args:
        device: An accelerator or the CPU. For the CPU, the memory of the host counts, within the limits of
            this process's control groups.
        root: The directory with ``/proc`` and ``/sys``.

    Raises:
        UnsupportedError: The kernel does not report the memory.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    host = _statistic(root / "proc/meminfo", "MemAvailable:")  # the page cache is counted as free
    if host is None:
        raise UnsupportedError("/proc/meminfo has no MemAvailable. Use Linux 3.14 or later")
    return min([1024 * host, *_group_bytes(root)])


def fitting_bytes(device: torch.device) -> int:
    """Return nine tenths of the bytes that this process may use on a device.

    On an accelerator, a process may use the device's memory minus the bytes of other processes. On a CPU, a
    process may use malloc's live bytes plus the bytes that the process may still allocate.

    Raises:
        UnsupportedError: The kernel does not report the memory.
    """
    if device.type == "cpu":
        taken, _ = malloc_count()()
    else:
        taken = int(torch.get_device_module(device).memory_reserved(device))
    return int(FITTING * (available_bytes(device) + taken))


_GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Mounts of control groups of versions 2 and 1, with the names of the files for limit, usage and cache."""


def _group_bytes(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of this process, and of each parent group.

    Inside a container, the path of a group may exist only on the host. The mount itself is then the group of
    the container.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controller, path = line.split(":", 2)
        place, *files, cache = _GROUPS.get(controller, ("", ""))
        mount = root / "sys/fs/cgroup" / place
        group = mount / path.strip("/")
        for folder in (group, *group.parents):
            figures = [_read(folder / name).strip() for name in files]
            if folder.is_relative_to(mount) and figures and all(map(str.isdecimal, figures)):
                # When the group reaches its limit, the kernel frees page cache first.
                yield int(figures[0]) - int(figures[1]) + (_statistic(folder / "memory.stat", cache) or 0)


def _statistic(file: Path, name: str) -> int | None:
    """Return the number after a name in a file of the kernel."""
    found = (line.split() for line in _read(file).splitlines())
    return next((int(words[1]) for words in found if words[:1] == [name]), None)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
