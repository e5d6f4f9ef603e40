"""Streams, events and memory of a device, and what measures that memory.

The CPU is a device on which everything is ready at once. The rest of the package never asks which device it
runs on. It takes an event where bytes were produced, hands the event to the thread that moves the bytes, and
copies with :meth:`Device.copy`.

An accelerator works later than the host calls it, so the host's clock does not time its work.
:meth:`Device.mark` marks a point of that work without waiting for it, and :meth:`Device.seconds` returns
afterwards when each mark was reached.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import threading
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tba_offload.device.host_memory import mapped_memory
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CACHE_LINE = 64
"""PyTorch aligns CPU allocations to this many bytes; kernels may choose their path by it."""

Mark = Any
"""A point in the work of a device, and the time when it is reached; only its device can read it."""


class Event:
    """A point in the work of a device, as ``torch.cuda.Event``; this one is reached when it is made."""

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached."""

    def wait(self, stream: object = None) -> None:
        """Make a stream, by default the current one, wait for the point; the calling thread goes on."""

    def query(self) -> bool:
        """Return whether the point is reached."""
        return True


READY = Event()
"""The event of work that is done when its call returns, as all work of a CPU is."""


class Device:
    """The CPU, and what transfers need of any device.

    Attributes:
        torch_device: PyTorch's name for it.
        pins_memory: Whether no system call reaches its memory. Then bytes are copied from and to pinned
            :meth:`host_memory`, and allocating that blocks the device.
        runs_behind: Whether work may be still to be done when the call that gave it has returned.
    """

    torch_device = torch.device("cpu")
    pins_memory = False
    runs_behind = False

    def stream(self) -> Any:
        """Return the calling thread's current stream; ``None`` where there are none."""

    def event(self, stream: Any = None) -> Event:  # noqa: ARG002 - a CPU has no streams
        """Return the point that a stream, by default the calling thread's, has been given work up to."""
        return READY

    def mark(self) -> Mark:
        """Mark the point that the calling thread's stream has been given work up to; nothing waits.

        On CUDA a mark costs a microsecond or two and a place in the queue of the device: a few for a layer
        are cheap, one for each activation is not.
        """
        return time.perf_counter()

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Return when marks were reached, by the clock of the device.

        Blocks until all are reached: not inside a step.

        Returns:
            Seconds, one for each mark. Only differences within one list mean something.
        """
        return list(marks)

    def use(self, memory: torch.Tensor, stream: Any) -> None:
        """Keep memory that was allocated on another stream from being reused before ``stream`` is done.

        Args:
            memory: A tensor on it.
            stream: Of this device.
        """

    def bind_thread(self) -> None:
        """Make this the current device of the calling thread; every I/O thread calls it."""

    def on_side_stream(self) -> AbstractContextManager[None]:
        """Give the calling I/O thread a stream of its own for the block; wait for that stream at the end."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copy bytes and return when they have arrived; meant for I/O threads.

        On the host ``memmove`` copies: it neither holds the GIL nor wakes PyTorch's thread pool.

        Args:
            target: 1-D uint8 tensor on the host or on this device.
            source: 1-D uint8 tensor of as many bytes, on the host or on this device.
            after: The copy starts when this point is reached.

        Raises:
            ValueError: The sizes differ.
        """
        after.synchronize()
        if target.nbytes != source.nbytes:
            raise ValueError(f"cannot copy {source.nbytes} bytes into {target.nbytes}")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-aligned host memory that this device can reach quickly.

        On an accelerator the memory is pinned, which blocks the device: do it rarely, outside a step.

        Returns:
            A 1-D uint8 tensor of ``nbytes``; the memory is freed with it.
        """
        return mapped_memory(nbytes)

    def is_capturing(self) -> bool:
        """Return whether the calling thread's work is recorded into a graph instead of being done."""
        return False


class Accelerator(Device):
    """A GPU of CUDA or ROCm, which PyTorch calls CUDA too, or a device with the same functions.

    Args:
        device: The device; without an index the current one of its type.

    Raises:
        UnsupportedError: PyTorch has no such functions for the device.
    """

    pins_memory = True
    runs_behind = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        wanted = torch.device(device)
        self._module: Any = getattr(torch, wanted.type, None)
        make_event = getattr(self._module, "Event", object).__new__
        # CUDA's threads otherwise ask over and over: one core at 100 % for each I/O thread.
        if "blocking" not in inspect.signature(make_event).parameters:
            raise UnsupportedError(
                f"activations on a {wanted.type!r} device cannot be offloaded: PyTorch has no events for it "
                "that let a thread sleep. Train on 'cpu' or 'cuda'"
            )
        index = torch.accelerator.current_device_index() if wanted.index is None else wanted.index
        self.torch_device = torch.device(wanted.type, index)
        self._local = threading.local()

    def stream(self) -> Any:
        """Return the calling thread's current stream of this device."""
        return self._module.current_stream(self.torch_device)

    def event(self, stream: Any = None) -> Event:
        """Record an event on a stream, by default the calling thread's; threads that wait for it sleep."""
        event: Event = self._module.Event(blocking=True)
        event.record(self.stream() if stream is None else stream)  # type: ignore[attr-defined]
        return event

    def mark(self) -> Any:
        """Record a timing event on the calling thread's current stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self.stream())
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return seconds from the first of the events to each, precise to about a microsecond."""
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
        """Switch to the calling thread's side stream and wait, at the end, for that stream only."""
        local = self._local
        if not hasattr(local, "stream"):
            local.stream = self._module.Stream(self.torch_device)
            local.done = self._module.Event(blocking=True)
        with self._module.stream(local.stream):
            yield
            local.done.record(local.stream)
        local.done.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copy on the calling thread's side stream, and wait, on the host, for this copy only."""
        if target.is_cpu and source.is_cpu:
            super().copy(target, source, after)
            return
        # Waiting here, on the host, orders the copy for any kind of event; the thread has nothing else to do.
        after.synchronize()
        with self.on_side_stream():
            target.copy_(source, non_blocking=True)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Pin pages of our own on CUDA; elsewhere PyTorch pins."""
        if self.torch_device.type == "cuda":
            return mapped_memory(nbytes, pinned=True)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is captured on the current stream."""
        return bool(self._module.is_current_stream_capturing())


def default_device() -> Device:
    """Return the current GPU of CUDA or ROCm where there is one, else the CPU."""
    return device_of("cuda" if torch.cuda.is_available() else "cpu")


def device_of(device: torch.device | str) -> Device:
    """Return the :class:`Device` of a torch device.

    Raises:
        UnsupportedError: The device is neither a CPU nor a GPU of CUDA or ROCm.
    """
    return Device() if torch.device(device).type == "cpu" else Accelerator(device)


def device_of_model(modules: Iterable[torch.nn.Module]) -> Device:
    """Return the device of the first parameter; the CPU if there is none.

    Raises:
        UnsupportedError: As :func:`device_of`.
    """
    parameter = next((parameter for each in modules for parameter in each.parameters()), None)
    return device_of("cpu" if parameter is None else parameter.device)


def is_device_failure(error: BaseException) -> bool:
    """Return whether work failed on a device, perhaps long before anything waited for it."""
    return isinstance(error, torch.AcceleratorError)


def check_not_captured(device: Device) -> None:
    """Check that bytes which are about to travel are there, or will be.

    Raises:
        UnsupportedError: A CUDA graph is captured, so what computes them is only recorded.
    """
    if device.is_capturing():
        raise UnsupportedError(
            "activations cannot be offloaded while a CUDA graph is captured: a graph fixes their addresses. "
            "Capture no graph in attached layers, or place them keep"
        )


def has_peers() -> bool:
    """Return whether other ranks may run the same layer, and its collective operations."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# Ranges of bytes


class ByteRange:
    """Bytes of a storage, which it keeps alive.

    A transfer needs an address and a length. Making a tensor costs the training thread two calls into
    PyTorch, so that is left to the threads that need one.

    Attributes:
        storage: The storage.
        start: Offset of the first byte in the storage.
        nbytes: Length in bytes.
        address: Address of the first byte.
    """

    __slots__ = ("address", "nbytes", "start", "storage")

    def __init__(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        self.storage = storage
        self.start = start
        self.nbytes = nbytes
        self.address = storage.data_ptr() + start

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ByteRange:
        """Return the bytes of a tensor.

        Raises:
            ValueError: The tensor is not contiguous, so its bytes are no range.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor with strides {tensor.stride()} is not one range of bytes")
        return cls(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)

    def part(self, start: int, nbytes: int) -> ByteRange:
        """Return ``nbytes`` of this range from its byte ``start`` on.

        Raises:
            ValueError: The range is shorter.
        """
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} are not within {self.nbytes}")
        return ByteRange(self.storage, self.start + start, nbytes)

    def tensor(self) -> torch.Tensor:
        """Return a uint8 tensor of shape (nbytes,) that shares the bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.nbytes,), (1,))


@functools.cache
def blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor of that type; shared, never to be written."""
    return torch.empty(0, dtype=dtype, device=device)


def new_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Allocate bytes, with fewer calls than a tensor of them takes."""
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def aligned_range(nbytes: int, address: int, alignment: int, device: Device) -> ByteRange:
    """Allocate bytes at the same place as ``address`` modulo the alignment.

    The same alignment serves two ends. Direct I/O fills the buffer without a copy, because the store kept the
    bytes at that lead. And a kernel that picks its code path by the alignment of its operands picks the same
    one for restored data, so results stay equal to the last bit.

    Args:
        nbytes: Payload in bytes.
        address: Where the bytes were originally.
        alignment: The alignment of the store, bytes; a power of two.
        device: Where to allocate.

    Returns:
        Uninitialized bytes. Their storage extends to the alignment boundary on both sides.
    """
    alignment = max(alignment, CACHE_LINE)
    lead = address % alignment
    padded = -(-(lead + nbytes) // alignment) * alignment
    room = new_storage(padded + alignment - CACHE_LINE, device.torch_device)
    return ByteRange(room, -room.data_ptr() % alignment + lead, nbytes)
