"""A device that runs behind the host, as a GPU does, and finds every access that nothing orders.

It computes on the CPU, at once, so all values are right. But it keeps count of what a GPU would be free to
do later: each operation of PyTorch is work on a stream, and a thread knows only of what it has waited for. A
copy of memory by somebody who does not know that the last operation on it is over is a race, and so is an
operation on memory that is being copied: on a GPU it could have happened the other way round.

What orders two accesses (happens-before, after Lamport 1978): both are on one stream; an event that was
recorded behind the first was waited for by the stream, or by the thread, of the second; the copy of an I/O
thread had returned before the operation was launched.

:class:`TimedDevice` has a clock of its own as well.
"""

from __future__ import annotations

import bisect
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from harness import KIB, config_for
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tba_offload as tba
from tba_offload.device import READY, CpuDevice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from tba_offload.device import Event
    from tba_offload.session import Session

Interval = tuple[int, int]
"""Addresses [lo, hi)."""

_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"}
"""Operations that touch no bytes."""


class RaceError(AssertionError):
    """Two accesses to memory that nothing orders."""


class Clock(dict[int, int]):
    """How far each stream has come, for certain: the number of its last operation."""

    def learn(self, other: Clock) -> None:
        for stream, number in other.items():
            self[stream] = max(self.get(stream, 0), number)

    def has_seen(self, stream: int, number: int) -> bool:
        return self.get(stream, 0) >= number


class Stream:
    """A queue of operations; its clock is what is over when its next operation starts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock = Clock()


class Point:
    """An event: what was in a stream when it was recorded."""

    def __init__(self, device: OrderedDevice, clock: Clock) -> None:
        self._device = device
        self._clock = clock

    def synchronize(self) -> None:
        self._device.known.learn(self._clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.stream()).clock.learn(self._clock)

    def query(self) -> bool:
        return all(self._device.known.has_seen(*each) for each in self._clock.items())


class Cell:
    """The last operations on some bytes, by stream."""

    def __init__(self, writes: dict[int, int] | None = None, reads: dict[int, int] | None = None) -> None:
        self.writes = writes or {}
        self.reads = reads or {}

    def copy(self) -> Cell:
        return Cell(dict(self.writes), dict(self.reads))


class Memory:
    """Who touched which bytes last."""

    def __init__(self) -> None:
        self._bounds = [0]
        self._cells = [Cell()]

    def cells(self, lo: int, hi: int) -> list[Cell]:
        first, end = self._cut(lo), self._cut(hi)
        return self._cells[first:end]

    def _cut(self, address: int) -> int:
        """Has a cell begin at an address; returns which."""
        at = bisect.bisect_left(self._bounds, address)
        if at == len(self._bounds) or self._bounds[at] != address:
            self._bounds.insert(at, address)
            self._cells.insert(at, self._cells[at - 1].copy())
        return at


class OrderedDevice(CpuDevice):
    """The device; run what is to be watched inside :meth:`computing`.

    Attributes:
        copy_seconds: How long each copy takes at least.
        copies: How many copies there were.
        races: What was found, in words.
    """

    pins_memory = True

    def __init__(self, seconds: float = 0.0005) -> None:
        self.copy_seconds = seconds
        self.copies = 0
        self.races: list[str] = []
        self._main = Stream(0)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._memory = Memory()
        self._under_way: list[tuple[Interval, bool]] = []
        self._host: list[Interval] = []
        self._in_use: list[torch.UntypedStorage] = []

    @property
    def known(self) -> Clock:
        """What the calling thread has waited for."""
        if not hasattr(self._local, "known"):
            self._local.known = Clock()
        return self._local.known  # type: ignore[no-any-return]

    def stream(self) -> Stream:  # type: ignore[override]
        return getattr(self._local, "stream", self._main)

    def new_stream(self) -> Stream:
        return Stream(id(object()))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Operations of this thread go to another stream."""
        before, self._local.stream = self.stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def event(self, stream: object = None) -> Event:
        clock = Clock()
        clock.learn(stream.clock if isinstance(stream, Stream) else self.stream().clock)
        return Point(self, clock)

    def use(self, memory: torch.Tensor, stream: object) -> None:
        # What CUDA's allocator does at the end of its block: it is not given to anybody else meanwhile.
        self._in_use.append(memory.untyped_storage())

    def host_memory(self, nbytes: int) -> torch.Tensor:
        room = super().host_memory(nbytes)
        self._host.append((room.data_ptr(), room.data_ptr() + nbytes))
        return room

    # Copies, on I/O threads

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event) -> None:
        after.synchronize()
        for target, source in pairs:
            self._copy(target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        moved = [(each, writes) for each, writes in ((target, True), (source, False)) if self._is_ours(each)]
        for tensor, writes in moved:
            self._begin(interval(tensor), writes=writes)
        try:
            time.sleep(self.copy_seconds)
            super().copy_all([(target, source)], READY)
        finally:
            self._end([(interval(tensor), writes) for tensor, writes in moved])

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return not any(lo <= tensor.data_ptr() < hi for lo, hi in self._host)

    def _begin(self, place: Interval, *, writes: bool) -> None:
        with self._lock:
            self.copies += 1
            for cell in self._memory.cells(*place):
                uses = cell.writes | cell.reads if writes else cell.writes
                for stream, number in uses.items():
                    if not self.known.has_seen(stream, number):
                        self._found(
                            f"a copy {'to' if writes else 'from'} memory that operation {number} uses"
                        )
            self._under_way.append((place, writes))

    def _end(self, moved: list[tuple[Interval, bool]]) -> None:
        with self._lock:
            for each in moved:
                self._under_way.remove(each)

    def _found(self, what: str) -> None:
        self.races.append(what)
        raise RaceError(what)

    # Operations, on the threads that compute

    def computing(self) -> TorchDispatchMode:
        """While this is entered, the operations of the calling thread are work of this device."""
        return _Operations(self)

    def launch(self, name: str, reads: list[Interval], writes: list[Interval]) -> None:
        """An operation is put behind the others of its stream."""
        stream = self.stream()
        stream.clock.learn(self.known)
        number = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        with self._lock:
            for place in reads:
                self._check(name, place, stream, writes=False)
            for place in writes:
                self._check(name, place, stream, writes=True)
            for place in reads:
                for cell in self._memory.cells(*place):
                    cell.reads[stream.number] = number
            for place in writes:
                for cell in self._memory.cells(*place):
                    cell.writes, cell.reads = {stream.number: number}, {}

    def computes(self, name: str) -> None:
        """An operation is done, once however much memory it touches."""

    def _check(self, name: str, place: Interval, stream: Stream, *, writes: bool) -> None:
        for other, copied_to in self._under_way:
            if (writes or copied_to) and place[0] < other[1] and other[0] < place[1]:
                way = "to" if copied_to else "from"
                self._found(f"{name} uses memory while a copy {way} it is under way")
        for cell in self._memory.cells(*place):
            uses = cell.writes | cell.reads if writes else cell.writes
            for user, number in uses.items():
                if not stream.clock.has_seen(user, number):
                    self._found(f"{name} uses memory of operation {number} on another stream")


class Moment(NamedTuple):
    """A mark: when a stream comes to it, by the clock of the device."""

    when: float


class TimedDevice(OrderedDevice):
    """Operations take the seconds that a test says, by a clock that has nothing to do with the host's.

    What the host does takes no time on that clock, so the host is always ahead, until :meth:`runs_dry`.

    Args:
        seconds_of: What operations take, by their name; all others take none.

    Attributes:
        waits: How often a thread that computes has waited for the device, for whatever reason.
    """

    runs_behind = True

    def __init__(self, seconds_of: Mapping[str, float]) -> None:
        super().__init__()
        self.waits = 0
        self._seconds_of = seconds_of
        self._busy_until: dict[Stream, float] = {}
        self._given_at = 0.0
        self._known_until = 0.0

    @property
    def now(self) -> float:
        """When what the calling thread gives next starts."""
        return max(self._busy_until.get(self.stream(), 0.0), self._given_at)

    def computes(self, name: str) -> None:
        self._busy_until[self.stream()] = self.now + self._seconds_of.get(name, 0.0)

    def runs_dry(self, seconds: float) -> None:
        """The host waits, until the device has had nothing to do for so long."""
        self._given_at = self.now + seconds

    def event(self, stream: object = None) -> Event:
        return _Awaited(self, super().event(stream))

    def mark(self) -> Moment:  # type: ignore[override]
        return Moment(self.now)

    def is_reached(self, mark: Moment) -> bool:  # type: ignore[override]
        return mark.when <= self._known_until

    def seconds(self, marks: Sequence[Moment]) -> list[float]:  # type: ignore[override]
        if not all(map(self.is_reached, marks)):
            self.waited()
            self._known_until = max(mark.when for mark in marks)
        return [mark.when for mark in marks]

    def waited(self) -> None:
        """The calling thread has waited for the device."""
        if not threading.current_thread().name.startswith("tba-"):  # of I/O that is all they do
            self.waits += 1


class _Awaited:
    """An event of a device that counts who waits for it."""

    def __init__(self, device: TimedDevice, event: Event) -> None:
        self._device = device
        self._event = event

    def synchronize(self) -> None:
        self._device.waited()
        self._event.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        self._event.wait(stream)

    def query(self) -> bool:
        return self._event.query()


class _Operations(TorchDispatchMode):
    """Tells the device of every operation and of the bytes that it touches."""

    def __init__(self, device: OrderedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in _ALLOCATE:
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        reads = [interval(each) for each in given if each.numel()]
        self._device.computes(name)
        self._device.launch(name, reads, [])  # before: what is not there yet must not be read
        made = func(*args, **kwargs)
        changed = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor) and each.numel()]
        shared = {each.untyped_storage().data_ptr() for each in given}
        in_place = func._schema.is_mutable
        writes = [
            interval(each) for each in changed if in_place or each.untyped_storage().data_ptr() not in shared
        ]
        self._device.launch(name, [], writes)
        return made


def interval(tensor: torch.Tensor) -> Interval:
    """The addresses between a tensor's first and last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


WINDOW = 400 * KIB


@contextmanager
def attached(
    device: OrderedDevice,
    model: nn.Module,
    where: dict[str, Any],
    *,
    layers: list[nn.Module] | None = None,
    in_flight: int | None = WINDOW,
    **settings: Any,
) -> Iterator[Session]:
    config = config_for(in_flight=in_flight, **where, **settings)
    with (
        # Host memory comes first, until it is full.
        mock.patch.multiple("tba_offload.plan.window", SPILL_SHARE=-1.0, SPILL_BYTES=-1),
        mock.patch("tba_offload.session.parts.device_of_model", return_value=device),
        tba.attach(model, config, layers=layers, measure_memory=False) as session,
    ):
        yield session
