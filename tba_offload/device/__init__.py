"""Streams, events, memory and memory meters of a device.

On a CPU, all work is finished when its call returns. Other modules do not depend on the kind of device. A
training thread records an event when bytes are produced, and the I/O thread that moves the bytes waits for
this event.

An accelerator runs asynchronously, so the host's clock cannot time the work of an accelerator.
:meth:`Device.mark` marks a point in the work of a device without a wait. :meth:`Device.seconds` later returns
the time at which each mark was reached.
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

from tba_offload.device.host_memory import REFUSALS, mapped_memory
from tba_offload.errors import UnsupportedError, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CACHE_LINE = 64
"""Alignment of PyTorch's CPU allocations in bytes.

Kernels may choose between implementations by the alignment of memory.
"""

Mark = Any
"""A point in the work of a device. :meth:`Device.seconds` returns the time at which the point was reached."""


class Event:
    """A point in the work of a CPU, like ``torch.cuda.Event``.

    The point is reached when the event is created.
    """

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached."""

    def wait(self, stream: object = None) -> None:
        """Make a stream (by default, the current stream) wait for the point, without blocking the thread."""

    def query(self) -> bool:
        """Return True if the point is reached."""
        return True


READY = Event()
"""The event of work that is already finished. All work of a CPU is finished when its call returns."""


class Device:
    """Operations of a CPU that transfers need. Subclasses implement the same operations for accelerators.

    Attributes:
        torch_device: The PyTorch device.
        pins_memory: Whether bytes are copied through pinned :meth:`host_memory`, because system calls cannot
            access the device's memory. Allocating pinned memory blocks the device.
        runs_behind: Whether the device runs asynchronously, so that work may still run after its call has
            returned.
        refuses_pinning: Whether pinning has failed, so that :meth:`host_memory` is pageable.
    """

    refuses_pinning = False
    torch_device = torch.device("cpu")
    pins_memory = False
    runs_behind = False

    def stream(self) -> Any:
        """Return the calling thread's current stream; ``None`` if the device has no streams."""

    def event(self, stream: Any = None) -> Event:  # noqa: ARG002 - a CPU has no streams
        """Record an event after all work submitted to a stream (by default, the thread's current stream)."""
        return READY

    def mark(self) -> Mark:
        """Mark the point after all work submitted to the calling thread's stream, without a wait.

        On CUDA, a mark costs one or two microseconds, which is too much for a mark at each activation.
        """
        return time.perf_counter()

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Return the times at which marks were reached, by the clock of the device.

        The call blocks until all marks are reached, so do not call this method inside a step.

        Returns:
            Seconds, one for each mark. Only differences within one list are meaningful.
        """
        return list(marks)

    def use(self, memory: torch.Tensor, stream: Any) -> None:
        """Prevent the allocator from reusing memory while work of ``stream`` uses the memory.

        Args:
            memory: A tensor whose memory ``stream`` uses.
            stream: A stream of this device.
        """

    def bind_thread(self) -> None:
        """Make this device the current device of the calling thread. Every I/O thread calls this method."""

    def on_side_stream(self) -> AbstractContextManager[None]:
        """Run a ``with`` block on a stream of the calling I/O thread, then wait for this stream."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copy bytes, and return when the copy is complete. I/O threads call this method.

        Copies within the host use ``memmove``, which does not hold the GIL and does not wake PyTorch's thread
        pool.

        Args:
            target: 1-D uint8 tensor on the host or on this device.
            source: 1-D uint8 tensor of the same size, on the host or on this device.
            after: The copy starts when the device has reached this event.

        Raises:
            ValueError: The sizes differ.
        """
        after.synchronize()
        if target.nbytes != source.nbytes:
            raise ValueError(f"cannot copy {source.nbytes} bytes into memory of {target.nbytes} bytes")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-aligned host memory that this device can reach quickly.

        On an accelerator, the memory is pinned, which blocks the device. Call this method rarely, and outside
        a step.

        Returns:
            A 1-D uint8 tensor of ``nbytes`` bytes. The memory is freed with the tensor.
        """
        return mapped_memory(nbytes)

    def is_capturing(self) -> bool:
        """Return True if the calling thread's work is recorded into a graph instead of being executed."""
        return False


class Accelerator(Device):
    """A GPU of CUDA or ROCm (PyTorch also calls ROCm "cuda"), or an accelerator with the same functions.

    Args:
        device: The device. Without an index, the current device of this type is used.

    Raises:
        UnsupportedError: PyTorch does not have the necessary functions for the device.
    """

    pins_memory = True
    runs_behind = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        wanted = torch.device(device)
        self._module: Any = getattr(torch, wanted.type, None)
        make_event = getattr(self._module, "Event", object).__new__
        # Without blocking events, a thread that waits for CUDA runs a busy loop, which takes one core for
        # each I/O thread.
        if "blocking" not in inspect.signature(make_event).parameters:
            raise UnsupportedError(
                f"activations on a {wanted.type!r} device cannot be offloaded: PyTorch has no blocking "
                "events for this device. Train on 'cpu' or 'cuda'"
            )
        index = torch.accelerator.current_device_index() if wanted.index is None else wanted.index
        self.torch_device = torch.device(wanted.type, index)
        self._local = threading.local()

    def stream(self) -> Any:
        """Return the calling thread's current stream of this device."""
        return self._module.current_stream(self.torch_device)

    def event(self, stream: Any = None) -> Event:
        """Record an event on a stream. Threads that wait for the event sleep."""
        event: Event = self._module.Event(blocking=True)
        event.record(self.stream() if stream is None else stream)  # type: ignore[attr-defined]
        return event

    def mark(self) -> Any:
        """Record a timing event on the calling thread's current stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self.stream())
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds from the first mark to each mark, precise to about a microsecond."""
        for mark in marks:  # marks may be on several streams; waiting for a reached mark takes almost no time
            mark.synchronize()
        return [0.0, *(marks[0].elapsed_time(mark) / 1000 for mark in marks[1:])] if marks else []

    def use(self, memory: torch.Tensor, stream: Any) -> None:
        """Tell the caching allocator that ``stream`` uses the memory."""
        memory.record_stream(stream)

    def bind_thread(self) -> None:
        """Set the calling thread's current device, because threads start on device 0."""
        self._module.set_device(self.torch_device)

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Run a ``with`` block on a side stream of the calling thread, then wait only for this stream."""
        local = self._local
        if not hasattr(local, "stream"):
            local.stream = self._module.Stream(self.torch_device)
            local.done = self._module.Event(blocking=True)
        with self._module.stream(local.stream):
            yield
            local.done.record(local.stream)
        local.done.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copy on the calling thread's side stream, and block until this copy is complete."""
        if target.is_cpu and source.is_cpu:
            super().copy(target, source, after)
            return
        # A wait on the host works for any kind of event. The thread has no other work.
        after.synchronize()
        with self.on_side_stream():
            target.copy_(source, non_blocking=True)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory.

        If pinning is refused, for example because of the limit of locked memory in a container, return
        pageable memory in this call and in later calls.

        Raises:
            torch.AcceleratorError: Earlier work of the device failed.
        """
        if not self.refuses_pinning:
            try:
                if self.torch_device.type == "cuda":
                    return mapped_memory(nbytes, pinned=True)
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except torch.AcceleratorError as error:
                if getattr(error, "error_code", None) not in REFUSALS:
                    raise
                self.refuses_pinning = True
                what = f"host memory cannot be pinned: {error}. Pageable memory is used, which is slower"
                warn(f"{what}. Raise the limit of locked memory (ulimit -l)", RuntimeWarning)
        return mapped_memory(nbytes)

    def is_capturing(self) -> bool:
        """Return True if a CUDA graph is captured on the current stream."""
        return bool(self._module.is_current_stream_capturing())


def default_device() -> Device:
    """Return the current GPU of CUDA or ROCm if there is one, else the CPU."""
    return device_of("cuda" if torch.cuda.is_available() else "cpu")


def device_of(device: torch.device | str) -> Device:
    """Return the :class:`Device` of a torch device.

    Raises:
        UnsupportedError: The device is neither a CPU nor a GPU of CUDA or ROCm.
    """
    return Device() if torch.device(device).type == "cpu" else Accelerator(device)


def device_of_model(modules: Iterable[torch.nn.Module]) -> Device:
    """Return the device of the first parameter of ``modules``; the CPU if there is no parameter.

    Raises:
        UnsupportedError: See :func:`device_of`.
    """
    parameter = next((parameter for each in modules for parameter in each.parameters()), None)
    return device_of("cpu" if parameter is None else parameter.device)


def check_not_captured(device: Device) -> None:
    """Check that no CUDA graph is captured. Kernels do not run during a capture, so no results can be copied.

    Raises:
        UnsupportedError: A CUDA graph is captured.
    """
    if device.is_capturing():
        raise UnsupportedError(
            "activations cannot be offloaded while a CUDA graph is captured: a graph needs fixed addresses. "
            "Capture graphs only outside attached layers, or set the placement of these layers to 'keep'"
        )


def has_peers() -> bool:
    """Return True if ``torch.distributed`` has several ranks, so that layers may run collectives."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# Ranges of bytes


class ByteRange:
    """Bytes of a storage. The range keeps the storage alive.

    The training thread passes ranges instead of tensors to the I/O threads, because creating a tensor takes
    two calls into PyTorch.

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
        """Return the byte range of a tensor.

        Raises:
            ValueError: The tensor is not contiguous, so its bytes are not one range.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor with strides {tensor.stride()} is not contiguous")
        return cls(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)

    def part(self, start: int, nbytes: int) -> ByteRange:
        """Return ``nbytes`` bytes of this range, from offset ``start`` of the range."""
        return ByteRange(self.storage, self.start + start, nbytes)

    def tensor(self) -> torch.Tensor:
        """Return a uint8 tensor of shape (nbytes,) that shares the bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.nbytes,), (1,))


@functools.cache
def blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor of a dtype. The tensor is shared and must not be written."""
    # A storage without data is on the device "meta", but its tensors are on the device of the model.
    return torch.empty(
        0, dtype=dtype, device=default_device().torch_device if device.type == "meta" else device
    )


def new_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Allocate an uninitialized storage, which takes fewer calls than a tensor."""
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def aligned_range(nbytes: int, address: int, alignment: int, device: Device) -> ByteRange:
    """Allocate bytes at an address that equals ``address`` modulo the alignment.

    The offset of the bytes in the store also equals ``address`` modulo the alignment, so direct I/O can fill
    the memory without a copy. Kernels that choose their code path by alignment compute the same bits for
    restored data.

    Args:
        nbytes: Payload in bytes.
        address: Original address of the bytes.
        alignment: Alignment of the store in bytes; a power of two.
        device: The device to allocate on.

    Returns:
        Uninitialized bytes, whose storage extends to an alignment boundary on both sides.
    """
    alignment = max(alignment, CACHE_LINE)
    lead = address % alignment
    padded = -(-(lead + nbytes) // alignment) * alignment
    room = new_storage(padded + alignment - CACHE_LINE, device.torch_device)
    return ByteRange(room, -room.data_ptr() % alignment + lead, nbytes)
