"""Streams, events and host memory of a device, and a CPU twin that has the same methods.

The rest of the package never asks which device it runs on: it takes an event where bytes were produced,
hands the event to the thread that moves the bytes, and copies with :meth:`Device.copy`. On a CPU all of that
is trivially ready; on CUDA it is one side stream per I/O thread.

A device that runs behind the host has a time of its own: the host's clock says when work was given, not when
it was done. :meth:`Device.mark` notes a point of that work without waiting for it, and :meth:`Device.seconds`
tells afterwards when it was reached.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tba_offload.device.pinned import pinned_memory
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.device.ranges import ByteRange


_USUAL_KILOHERTZ = 1_500_000


class Event(Protocol):
    """A point in the work of a device; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the point is reached."""

    def wait(self, stream: Any = None) -> None:
        """Makes a stream, by default the current one, wait for the point; the calling thread goes on."""

    def query(self) -> bool:
        """Whether the point is reached."""
        ...


class _Ready:
    """The event of work that is done when its call returns, as all work of a CPU is."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Returns at once."""

    def wait(self, stream: object = None) -> None:
        """Returns at once; no stream has to wait."""

    def query(self) -> bool:
        """Always true."""
        return True


READY = _Ready()

Mark = Any
"""A point in the work of a device, and the time when it is reached; only its device knows what it is."""


class Device(ABC):
    """What the transfers need of a device."""

    torch_device: torch.device
    pins_memory: bool
    """Whether :meth:`host_memory` is pinned, so that allocating it blocks the device."""
    runs_behind: bool
    """Whether work may be still to be done when the call that gave it has returned."""

    @abstractmethod
    def stream(self) -> Any:
        """The calling thread's current stream; ``None`` where there are none."""

    @abstractmethod
    def event(self, stream: Any = None) -> Event:
        """The point that a stream, by default the calling thread's, has been given work up to."""

    @abstractmethod
    def mark(self) -> Mark:
        """Marks the point that the calling thread's stream has been given work up to; nothing waits.

        On CUDA one costs a microsecond or two and a place in the queue of the device: a few for a layer are
        cheap, one for each activation is not.
        """

    @abstractmethod
    def is_reached(self, mark: Mark) -> bool:
        """Whether the device has come to a mark, so that :meth:`seconds` need not wait for it."""

    @abstractmethod
    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """When marks were reached, by the clock of the device; blocks until they all are: not inside a step.

        Returns:
            Seconds, one for each mark. Only differences within one list mean something.
        """

    @abstractmethod
    def occupy(self, seconds: float) -> None:
        """Gives the calling thread's stream work for about so long, as training does; for measurements."""

    def is_host(self, memory: ByteRange) -> bool:
        """Whether a system call can reach the bytes."""
        return memory.storage.device.type == "cpu"

    @abstractmethod
    def use(self, memory: ByteRange, stream: Any) -> None:
        """Keeps memory that was allocated on another stream from being reused before ``stream`` is done."""

    @abstractmethod
    def bind_thread(self) -> None:
        """Makes this the current device of the calling thread; every I/O thread calls it."""

    @abstractmethod
    def on_side_stream(self) -> AbstractContextManager[None]:
        """Around work of an I/O thread: it gets a stream of its own, and is done at the end of the block."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copies bytes and returns when they have arrived; meant for I/O threads.

        Args:
            target: 1-D uint8 tensor on the host or on this device.
            source: 1-D uint8 tensor of as many bytes, on the host or on this device.
            after: The copy starts when this point is reached.
        """

    @abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocates page-aligned host memory that this device can reach quickly.

        On CUDA it is pinned, which blocks the device while it is allocated: do it rarely, outside a step.

        Returns:
            A 1-D uint8 tensor of ``nbytes``; the memory is freed with it.
        """


class CpuDevice(Device):
    """The host as a device: everything is ready when the call that did it returns."""

    torch_device = torch.device("cpu")
    pins_memory = False
    runs_behind = False

    def stream(self) -> None:
        """There are no streams."""
        return

    def event(self, stream: object = None) -> Event:  # noqa: ARG002 - the twin has streams
        """The event that is always ready."""
        return READY

    def mark(self) -> float:
        """The time on :func:`time.perf_counter`: what was called is done."""
        return time.perf_counter()

    def is_reached(self, mark: float) -> bool:  # noqa: ARG002 - the twin has to look
        """Always true."""
        return True

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """The marks themselves."""
        return list(marks)

    def occupy(self, seconds: float) -> None:
        """Does nothing: what a CPU computes needs no waiting for."""

    def use(self, memory: ByteRange, stream: object) -> None:
        """Does nothing: what was called is done."""

    def bind_thread(self) -> None:
        """Does nothing: every thread runs on the CPU."""

    def on_side_stream(self) -> AbstractContextManager[None]:
        """Does nothing: there are no streams."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copies with ``memmove``, which neither holds the GIL nor wakes PyTorch's thread pool."""
        after.synchronize()
        _copy_on_host(target, source)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Maps anonymous memory.

        It comes from ``mmap`` and not from ``malloc``, so that malloc's count of live bytes, which stands
        in for device memory here, holds no bytes that would lie outside the device on CUDA.
        """
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


class CudaDevice(Device):
    """One CUDA device; each I/O thread copies on a side stream of its own."""

    pins_memory = True
    runs_behind = True

    def __init__(self, index: int | None = None) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._local = threading.local()

    def stream(self) -> torch.cuda.Stream:
        """The calling thread's current stream of this device."""
        return torch.cuda.current_stream(self.torch_device)

    def event(self, stream: torch.cuda.Stream | None = None) -> Event:
        """An event recorded on a stream, by default the calling thread's current one."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream() if stream is None else stream)
        return event

    def mark(self) -> torch.cuda.Event:
        """A timing event on the calling thread's current stream."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream())
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Whether the event has completed."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Seconds from the first of the events to each; it is precise to about a microsecond."""
        for mark in marks:  # they may be on several streams; one that is reached costs next to nothing
            mark.synchronize()
        return [0.0, *(marks[0].elapsed_time(mark) / 1000 for mark in marks[1:])] if marks else []

    def occupy(self, seconds: float) -> None:
        """Has one multiprocessor count clock cycles."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        kilohertz = getattr(properties, "clock_rate", 0) or _USUAL_KILOHERTZ  # not every CUDA tells
        torch.cuda._sleep(int(1e3 * kilohertz * seconds))  # type: ignore[no-untyped-call]

    def use(self, memory: ByteRange, stream: torch.cuda.Stream) -> None:
        """Tells the caching allocator that ``stream`` reads the memory."""
        memory.tensor().record_stream(stream)

    def bind_thread(self) -> None:
        """Sets the calling thread's current device: threads start on device 0."""
        torch.cuda.set_device(self.torch_device)

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Switches to the calling thread's side stream and waits for that stream only."""
        stream = self._side_stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copies on the calling thread's side stream and waits for that stream only."""
        # Waiting here, on the host, orders the copy for any kind of event; the thread has nothing else to do.
        after.synchronize()
        if target.is_cpu and source.is_cpu:
            _copy_on_host(target, source)
            return
        with self.on_side_stream():
            target.copy_(source, non_blocking=True)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Pins pages of its own; see :mod:`tba_offload.device.pinned`."""
        return pinned_memory(nbytes)

    def _side_stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        return stream


def default_device() -> Device:
    """The current GPU where there is one, else the CPU."""
    return CudaDevice() if torch.cuda.is_available() else CpuDevice()


def device_of(device: torch.device | str) -> Device:
    """The twin of a torch device.

    Raises:
        UnsupportedError: The device is neither a CPU nor a CUDA device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device.index)
    raise UnsupportedError(
        f"activations on a {device.type!r} device cannot be offloaded; train on 'cpu' or 'cuda'"
    )


def _copy_on_host(target: torch.Tensor, source: torch.Tensor) -> None:
    nbytes = source.nbytes
    if target.nbytes != nbytes:
        raise ValueError(f"cannot copy {nbytes} bytes into {target.nbytes}")
    ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
