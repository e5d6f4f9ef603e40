"""How a drive moves blocks of several sizes by several threads, through the package's own store.

A number of transfers is in flight all the time: whenever the oldest has ended, another one is queued.
A transfer's latency is the time from when it was queued to when it has ended, so it holds what
the transfer waited for others.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.store import StoreOptions
from tba_offload.device.ranges import aligned_range
from tba_offload.errors import StoreError, StoreFullError
from tba_offload.store.probe import TRANSFER_SECONDS, on_trial, random_bytes
from tba_offload.store.thread_count import STORES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.device import Device, Event
    from tba_offload.store.base import ActivationStore, Extent, IoFuture

WRITE, READ, MIXED = "write", "read", "mixed"
DIRECTIONS = (WRITE, READ, MIXED)

BLOCKS = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Bytes; the sizes that activations of a layer have, from small to large models."""

THREADS = (1, 2, 4)
"""Threads in each direction."""

_AHEAD = 2
"""Transfers in flight for each thread: one that moves, and one that it takes next."""

MOST_MEMORY = 1 << 30
"""Bytes of memory that a measurement takes at most; it has fewer transfers in flight for that."""

_LEAST_HELD = 4
"""Blocks that the store holds at least; two for each that is in flight."""

_ENOUGH = 0.95
"""Share of the highest rate that counts as that: less is within what a drive differs by."""

_WORTH_IT = 0.5
"""Share of the highest rate below which a size of blocks is not worth a transfer."""

_MOST_LEFT = 1 << 20
"""Bytes of the largest activations that may stay in memory because they are small: more is worth freeing."""


class Cell(NamedTuple):
    """What one size of blocks by one number of threads moved in one direction.

    Attributes:
        direction: "write", "read", or "mixed", where every other transfer reads.
        block_bytes: Size of a transfer.
        threads: Threads in each direction.
        in_flight: Transfers in flight at once.
        transfers: How many were measured.
        bytes_per_second: Bytes moved.
        p50_seconds: Median latency.
        p99_seconds: Latency that one transfer of a hundred exceeds.
    """

    direction: str
    block_bytes: int
    threads: int
    in_flight: int
    transfers: int
    bytes_per_second: float
    p50_seconds: float
    p99_seconds: float


def bench(
    directory: str,
    device: Device,
    *,
    kind: str = "file",
    blocks: Sequence[int] = BLOCKS,
    threads: Sequence[int] = THREADS,
    seconds: float = 0.5,
    checksum: bool = True,
    told: Callable[[Cell], object] = lambda _: None,
    left_out: Callable[[int, int], object] = lambda _block, _threads: None,
) -> list[Cell]:
    """Measures a directory; whatever happens, nothing stays there.

    Args:
        directory: Where to write.
        device: The device that the bytes lie on.
        kind: "file" or "gds".
        blocks: Sizes of transfers, bytes.
        threads: Numbers of threads for each direction.
        seconds: How long each size is measured in each direction.
        checksum: Whether checksums are taken and compared, as in training.
        told: Is given each cell when it is known.
        left_out: Is given the size of blocks, and the number of threads, from which on larger blocks have no
            room; smaller ones had.

    Raises:
        StoreError: The directory cannot be used, or a transfer failed.
        TimeoutError: A transfer hangs.
    """
    cells: list[Cell] = []
    for count in threads:
        options = StoreOptions(
            directories=(directory,),
            readers=count,
            writers=count,
            checksum=checksum,
            stall_seconds=TRANSFER_SECONDS,
        )
        with on_trial(STORES[kind], directory, device, options, TRANSFER_SECONDS) as store:
            for block in sorted(blocks):
                try:
                    for cell in _Blocks(store, device, block, count).measured(seconds):
                        cells.append(cell)
                        told(cell)
                except StoreFullError:
                    if not cells:
                        raise
                    left_out(block, count)
                    break
    return cells


class _Blocks:
    """Blocks of one size on their way.

    The store holds more of them than are in flight, and they are taken in turn: when a block's turn comes,
    its last transfer has ended.

    Args:
        store: The store; it is left as empty as it was.
        device: The device that the bytes lie on.
        nbytes: Size of a block.
        threads: Of the store, in each direction.
    """

    def __init__(self, store: ActivationStore, device: Device, nbytes: int, threads: int) -> None:
        self._store = store
        self._nbytes = nbytes
        self._threads = threads
        self._in_flight = max(min(_AHEAD * threads, MOST_MEMORY // nbytes), 1)
        self._source = random_bytes(nbytes, device)
        self._targets = [
            aligned_range(nbytes, self._source.address, store.alignment, device)
            for _ in range(self._in_flight)
        ]
        self._after: Event = device.event()
        self._extents: list[Extent] = []
        self._flying: deque[IoFuture] = deque()
        self._noted: SimpleQueue[float] = SimpleQueue()

    def measured(self, seconds: float) -> Iterator[Cell]:
        """Yield what they do in each direction.

        Args:
            seconds: How long each direction is measured.
        """
        self._after.synchronize()
        try:
            for _ in range(max(_LEAST_HELD, 2 * self._in_flight)):
                self._extents.append(self._store.reserve(self._nbytes, self._source.address))
            for number in range(len(self._extents)):  # the file grows, memory is pinned, drivers start
                self._queue(number, writes=True)
            self._latencies(len(self._extents))
            for direction in DIRECTIONS:
                yield self._cell(direction, seconds)
        finally:
            self._end()

    def _cell(self, direction: str, seconds: float) -> Cell:
        began, number = time.perf_counter(), 0
        # Every place in flight is used twice, or there would be no latency to tell of a slow drive.
        while number < 2 * self._in_flight or time.perf_counter() - began < seconds:
            # Writes and reads alternate, and from round to round those of one block do, too.
            mixed = bool((number + number // len(self._extents)) % 2)
            self._queue(number, writes=mixed if direction == MIXED else direction == WRITE)
            number += 1
        self._land(0)
        taken = time.perf_counter() - began
        latencies = sorted(self._latencies(number))
        return Cell(
            direction,
            self._nbytes,
            self._threads,
            self._in_flight,
            number,
            number * self._nbytes / taken,
            statistics.median(latencies),
            latencies[int(0.99 * number)],
        )

    def _queue(self, number: int, *, writes: bool) -> None:
        """Queues the transfer of this number, and waits for the oldest where too many are in flight."""
        self._land(self._in_flight - 1)
        extent, done = self._extents[number % len(self._extents)], partial(self._note, time.perf_counter())
        if writes:
            self._flying.append(self._store.write(extent, self._source, self._after, done=done))
        else:
            target = self._targets[number % self._in_flight]
            self._flying.append(self._store.read(extent, target, self._after, padded=True))
            self._flying[-1].add_done_callback(done)

    def _note(self, queued: float, _: IoFuture) -> None:
        self._noted.put(time.perf_counter() - queued)

    def _latencies(self, count: int) -> list[float]:
        """Those of the last transfers, when all have landed; I/O threads may note them a little later."""
        self._land(0)
        return [self._noted.get(timeout=TRANSFER_SECONDS) for _ in range(count)]

    def _land(self, most: int) -> None:
        """Wait for the oldest transfers until no more than ``most`` are in flight."""
        while len(self._flying) > most:
            self._flying[0].wait(TRANSFER_SECONDS)
            self._flying.popleft()

    def _end(self) -> None:
        """Give all extents back, also after an error, when some transfers may still run."""
        for future in self._flying:
            future.cancel()
        while self._flying:
            with suppress(StoreError):
                self._flying[0].wait(TRANSFER_SECONDS)
            self._flying.popleft()
        while self._extents:
            self._store.release(self._extents.pop())


class Advice(NamedTuple):
    """The settings that follow from a measurement.

    Attributes:
        writers: The fewest threads that write nearly as fast as any number.
        readers: The same of reading.
        least_bytes: The smallest blocks that are worth a transfer in both directions, at most a MiB.
        write: Bytes a second that may be hoped for.
        read: The same of reading.
    """

    writers: int
    readers: int
    least_bytes: int
    write: float
    read: float


def advised(cells: Sequence[Cell]) -> Advice:
    """Return the settings that follow.

    The threads by the best size of blocks, and the sizes worth a transfer.
    """

    def best(direction: str) -> Cell:
        return max(_of(cells, direction), key=lambda cell: cell.bytes_per_second)

    def threads(direction: str) -> int:
        most = best(direction)
        same = [cell for cell in _of(cells, direction) if cell.block_bytes == most.block_bytes]
        enough = [cell for cell in same if cell.bytes_per_second >= _ENOUGH * most.bytes_per_second]
        return min(cell.threads for cell in enough)

    def least(direction: str) -> int:
        most = best(direction).bytes_per_second
        worth = [cell for cell in _of(cells, direction) if cell.bytes_per_second >= _WORTH_IT * most]
        return min(_MOST_LEFT, *(cell.block_bytes for cell in worth))

    return Advice(
        writers=threads(WRITE),
        readers=threads(READ),
        least_bytes=max(least(WRITE), least(READ)),
        write=best(WRITE).bytes_per_second,
        read=best(READ).bytes_per_second,
    )


def _of(cells: Sequence[Cell], direction: str) -> list[Cell]:
    return [cell for cell in cells if cell.direction == direction]
