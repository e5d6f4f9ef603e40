"""Streams, events and host memory of a device, and a CPU twin that has the same methods.

The rest of the package never asks which device it runs on: it takes an event where bytes were produced,
hands the event to the thread that moves the bytes, and copies with :meth:`Device.copy`. On a CPU all of that
is trivially ready; on an accelerator bytes are copied on a stream of each direction.

A device that runs behind the host has a time of its own: the host's clock says when work was given, not when
it was done. :meth:`Device.mark` notes a point of that work without waiting for it, and :meth:`Device.seconds`
tells afterwards when it was reached.
"""

from __future__ import annotations

import ctypes
import inspect
import mmap
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tba_offload.device.pinned import pinned_memory
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class Event(Protocol):
    """A point in the work of a device; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached."""

    def wait(self, stream: Any = None) -> None:
        """Make a stream, by default the current one, wait for the point; the calling thread goes on."""

    def query(self) -> bool:
        """Whether the point is reached."""
        ...


class _Ready:
    """The event of work that is done when its call returns, as all work of a CPU is."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self, stream: object = None) -> None:
        """Return at once; no stream has to wait."""

    def query(self) -> bool:
        """Record that always true."""
        return True


READY = _Ready()

Mark = Any
"""A point in the work of a device, and the time when it is reached; only its device knows what it is."""


class Device(ABC):
    """What the transfers need of a device."""

    torch_device: torch.device
    pins_memory: bool
    """Whether activations lie where no system call reaches them, so that :meth:`host_memory` is pinned: its
    bytes are copied from and to the device, and allocating it blocks that."""
    runs_behind: bool
    """Whether work may be still to be done when the call that gave it has returned."""

    @abstractmethod
    def stream(self) -> Any:
        """Return the calling thread's current stream; ``None`` where there are none."""

    @abstractmethod
    def event(self, stream: Any = None) -> Event:
        """Return the point that a stream, by default the calling thread's, has been given work up to."""

    @abstractmethod
    def mark(self) -> Mark:
        """Mark the point that the calling thread's stream has been given work up to; nothing waits.

        On CUDA one costs a microsecond or two and a place in the queue of the device: a few for a layer are
        cheap, one for each activation is not.
        """

    @abstractmethod
    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """When marks were reached, by the clock of the device; blocks until they all are: not inside a step.

        Returns:
            Seconds, one for each mark. Only differences within one list mean something.
        """

    @abstractmethod
    def use(self, memory: torch.Tensor, stream: Any) -> None:
        """Keep memory that was allocated on another stream from being reused before ``stream`` is done.

        Args:
            memory: A tensor on it.
            stream: Of this device.
        """

    @abstractmethod
    def bind_thread(self) -> None:
        """Make this the current device of the calling thread; every I/O thread calls it."""

    @abstractmethod
    def on_side_stream(self) -> AbstractContextManager[None]:
        """Around work of an I/O thread: it gets a stream of its own, and is done at the end of the block."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copy bytes and return when they have arrived; meant for I/O threads.

        Args:
            target: 1-D uint8 tensor on the host or on this device.
            source: 1-D uint8 tensor of as many bytes, on the host or on this device.
            after: The copy starts when this point is reached.
        """
        self.copy_all([(target, source)], after)

    @abstractmethod
    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event) -> None:
        """Copy several ranges of bytes of one transfer, and return when all have arrived.

        Args:
            pairs: Targets and sources as of :meth:`copy`; all go the same way.
            after: The first copy starts when this point is reached.
        """

    @abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-aligned host memory that this device can reach quickly.

        On CUDA it is pinned, which blocks the device while it is allocated: do it rarely, outside a step.

        Returns:
            A 1-D uint8 tensor of ``nbytes``; the memory is freed with it.
        """

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a small tensor to host memory.

        Returns:
            Its numbers, which are there when the work up to :meth:`event` is done.
        """
        return tensor.detach().to("cpu", copy=True)

    def give_back_host_memory(self) -> None:  # noqa: B027 - most have none to give
        """Give host memory that was freed back to the system, where an allocator keeps it for later."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's work is recorded into a graph instead of being done."""
        return False

    def compiled_graph(self) -> object:
        """Return what ``torch.compile`` has run last as a graph of this device.

        Another object after each run.

        Returns:
            ``None`` if it has run none.
        """
        return None


class CpuDevice(Device):
    """The host as a device: everything is ready when the call that did it returns."""

    torch_device = torch.device("cpu")
    pins_memory = False
    runs_behind = False

    def stream(self) -> None:
        """There are no streams."""
        return

    def event(self, stream: object = None) -> Event:  # noqa: ARG002 - the twin has streams
        """Return the event that is always ready."""
        return READY

    def mark(self) -> float:
        """Return the time on :func:`time.perf_counter`: what was called is done."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Return the marks themselves."""
        return list(marks)

    def use(self, memory: torch.Tensor, stream: object) -> None:
        """Do nothing: what was called is done."""

    def bind_thread(self) -> None:
        """Do nothing: every thread runs on the CPU."""

    def on_side_stream(self) -> AbstractContextManager[None]:
        """Do nothing: there are no streams."""
        return nullcontext()

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event) -> None:
        """Copy with ``memmove``, which neither holds the GIL nor wakes PyTorch's thread pool."""
        after.synchronize()
        for target, source in pairs:
            _copy_on_host(target, source)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Map anonymous memory.

        It comes from ``mmap`` and not from ``malloc``, so that malloc's count of live bytes, which stands
        in for device memory here, holds no bytes that would lie outside the device on CUDA.
        """
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


class Accelerator(Device):
    """A device with streams, by the functions that the modules of PyTorch's accelerators have in common.

    CUDA, ROCm (which PyTorch calls CUDA too) and XPU have them; so may the module of another maker.

    Bytes are copied on one stream for each direction. So transfers that are under way at once do not share
    the link: what was asked for first arrives first.

    Args:
        device: The device, or its index; by default the current one.

    Raises:
        UnsupportedError: The module of the device lacks a function.
    """

    pins_memory = True
    runs_behind = True

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        present = torch.accelerator.current_accelerator(check_available=True)  # not what PyTorch is built for
        wanted = present if device is None else torch.device(device)
        if wanted is None:
            raise UnsupportedError("PyTorch finds no accelerator here; train on 'cpu'")
        module = _module_of(wanted)
        index = torch.accelerator.current_device_index() if wanted.index is None else wanted.index
        self.torch_device = torch.device(wanted.type, index)
        self._module = module
        self._new_event = _waiting_event(module)
        self._local = threading.local()
        self._copy_streams: dict[bool, Any] = {}

    def stream(self) -> Any:
        """Return the calling thread's current stream of this device."""
        return self._module.current_stream(self.torch_device)

    def event(self, stream: Any = None) -> Event:
        """Return an event recorded on a stream, by default the calling thread's current one.

        Where the device can, a thread that waits for it sleeps: I/O threads wait most of their time.
        """
        event: Event = self._new_event()
        event.record(self.stream() if stream is None else stream)  # type: ignore[attr-defined]
        return event

    def mark(self) -> Any:
        """Return a timing event on the calling thread's current stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self.stream())
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from the first of the events to each; it is precise to about a microsecond."""
        for mark in marks:  # they may be on several streams; one that is reached costs next to nothing
            mark.synchronize()
        return [0.0, *(marks[0].elapsed_time(mark) / 1000 for mark in marks[1:])] if marks else []

    def use(self, memory: torch.Tensor, stream: Any) -> None:
        """Tell the caching allocator that ``stream`` reads the memory."""
        memory.record_stream(stream)

    def bind_thread(self) -> None:
        """Set the calling thread's current device: threads start on device 0."""
        self._module.set_device(self.torch_device)

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Switch to the calling thread's side stream and wait for that stream only."""
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = self._module.Stream(self.torch_device)
        with self._module.stream(stream):
            yield
            done = self._own_event()
        done.synchronize()

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event) -> None:
        """Copy on the stream of the direction and wait once, for the last of these copies.

        After each of them the link would idle until the thread is awake again.
        """
        # Waiting here, on the host, orders the copy for any kind of event; the thread has nothing else to do.
        after.synchronize()
        target, source = pairs[0]
        if target.is_cpu and source.is_cpu:
            for target, source in pairs:
                _copy_on_host(target, source)
            return
        with self._module.stream(self._copy_stream(to_host=target.is_cpu)):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done = self._own_event()
        done.synchronize()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Pins pages of its own on CUDA, see :mod:`tba_offload.device.pinned`; elsewhere PyTorch pins."""
        if self.torch_device.type == "cuda":
            return pinned_memory(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy on the calling thread's stream, into pinned memory of PyTorch's own, and wait for nothing.

        PyTorch keeps such memory for the next tensor of the size, so it is pinned in a first step only.
        """
        if tensor.is_cpu:
            return super().to_host(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return copy.copy_(tensor.detach(), non_blocking=True)

    def give_back_host_memory(self) -> None:
        """Empty PyTorch's cache of pinned memory: what lies there is of use to this process only.

        PyTorch up to 2.11 can do so on CUDA only; elsewhere such memory waits for the next store there.
        """
        empty_cache = getattr(torch.accelerator, "empty_host_cache", None)
        if empty_cache is not None:
            empty_cache()
        elif self.torch_device.type == "cuda":
            torch._C._host_emptyCache()

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured on the current stream."""
        told = getattr(self._module, "is_current_stream_capturing", None)
        return told is not None and bool(told())

    def compiled_graph(self) -> object:
        """Return the node that Inductor's trees of CUDA graphs are at."""
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is None:
            return None
        try:
            manager = trees.get_manager(self.torch_device.index, create_if_none_exists=False)
        except AssertionError:  # up to PyTorch 2.11, on a thread that has none although others have
            return None
        return None if manager is None else manager.current_node

    def _own_event(self) -> Event:
        """Return the one event of the calling thread, which waits for it before it needs it again."""
        event: Event | None = getattr(self._local, "event", None)
        if event is None:
            event = self._local.event = self._new_event()
        event.record(self.stream())  # type: ignore[attr-defined]
        return event

    def _copy_stream(self, *, to_host: bool) -> Any:
        stream = self._copy_streams.get(to_host)
        if stream is None:  # of two threads that come at once, both get the stream of the first
            stream = self._copy_streams.setdefault(to_host, self._module.Stream(self.torch_device))
        return stream


_COMMON = (
    *("Event", "Stream", "current_stream", "stream", "set_device"),
    *("memory_allocated", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"),
)
"""Functions that a device's module must have; those of CUDA and XPU do."""


def _module_of(device: torch.device) -> Any:
    """Return the module of a device's maker.

    Raises:
        UnsupportedError: There is none, or it lacks a function.
    """
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        module = None
    missing = [name for name in _COMMON if not hasattr(module, name)]
    if missing:
        why = "PyTorch has no module for it" if module is None else f"its module has no {missing[0]}"
        raise UnsupportedError(
            f"activations on a {device.type!r} device cannot be offloaded: {why}; train on 'cpu', 'cuda' or "
            "'xpu'"
        )
    return module


def _waiting_event(module: Any) -> Callable[[], Event]:
    """Make events for which a thread waits asleep, where the device has such; ``torch.Event`` has none.

    CUDA's threads otherwise ask over and over: one core at 100 % for each I/O thread.
    """
    settings = inspect.signature(module.Event.__new__).parameters
    return partial(module.Event, blocking=True) if "blocking" in settings else module.Event


def default_device() -> Device:
    """Return the current accelerator where there is one, else the CPU."""
    return Accelerator() if torch.accelerator.is_available() else CpuDevice()


def device_of(device: torch.device | str) -> Device:
    """Return the twin of a torch device.

    Raises:
        UnsupportedError: The device is neither a CPU nor an accelerator that PyTorch has a module for.
    """
    device = torch.device(device)
    return CpuDevice() if device.type == "cpu" else Accelerator(device)


def device_of_model(modules: Iterable[torch.nn.Module]) -> Device:
    """Return the twin of the device that the first parameter lies on; of the CPU if there is none.

    Raises:
        UnsupportedError: As :func:`device_of`.
    """
    parameter = next((parameter for each in modules for parameter in each.parameters()), None)
    return device_of("cpu" if parameter is None else parameter.device)


def devices_of(modules: Iterable[torch.nn.Module], first: Device) -> list[torch.device]:
    """Return the devices that parameters and buffers of a model lie on, each once.

    Args:
        modules: The model or its chunks.
        first: The device of the session, which comes first.
    """
    lie_on = dict.fromkeys([first.torch_device])
    for module in modules:
        tensors = chain(torch.nn.Module.parameters(module), torch.nn.Module.buffers(module))
        lie_on.update(dict.fromkeys(tensor.device for tensor in tensors))
    return list(lie_on)


def is_device_failure(error: BaseException) -> bool:
    """Whether an error tells of work that failed on a device, perhaps long before anything waited for it."""
    return isinstance(error, torch.AcceleratorError)


def check_not_captured(device: Device) -> None:
    """Check that bytes which are about to travel are there, or will be.

    Raises:
        UnsupportedError: A CUDA graph is captured, so what computes them is only recorded.
    """
    if device.is_capturing():
        raise UnsupportedError(
            "activations are to travel while a CUDA graph is captured: a graph fixes their addresses, so "
            "they cannot. capture no graph in attached layers, or place them keep"
        )


def never_freed(memory: Iterable[torch.Tensor]) -> None:
    """Leaks host memory, in a forked child: to free what is pinned would call the driver of the device."""
    for tensor in memory:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


def _copy_on_host(target: torch.Tensor, source: torch.Tensor) -> None:
    nbytes = source.nbytes
    if target.nbytes != nbytes:
        raise ValueError(f"cannot copy {nbytes} bytes into {target.nbytes}")
    ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
