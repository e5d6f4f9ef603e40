"""What an extent costs the I/O thread of a file store: one call for each, and one call for neighbours.

    python benchmarks/batches.py DIRECTORY

Extents of 64 KiB to 4 MiB are written and read back one by one, and in batches of neighbours, in turns. A
third lane repeats the first: how far apart the two are is what the machine does by itself. Times are of the
processor, from the clock of the thread, for each extent; the rate is that of the whole way.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from tba_offload.device import READY, ByteRange, CpuDevice
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.store.base import Extent

KIB = 1 << 10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
TOGETHER = 16 << 20
"""Bytes that are handed to the store at once: four calls."""

WAYS = {"one by one": 1, "together": None, "one by one again": 1}
"""How many transfers are queued by one call; ``None`` for as many as come to :data:`TOGETHER`."""


@dataclass
class Lane:
    """The rounds of one way: microseconds of each extent on the I/O thread and here, and bytes a second."""

    io: list[float] = field(default_factory=list)
    here: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)

    def add(self, clocks: Clocks, extents: int, nbytes: int) -> None:
        """Add a round."""
        io, here, wall = clocks.passed()
        self.io.append(io / extents * 1e6)
        self.here.append(here / extents * 1e6)
        self.rate.append(nbytes / wall)

    def __str__(self) -> str:
        low, _, high = statistics.quantiles(self.io, n=4)
        io, here, rate = (statistics.median(each) for each in (self.io, self.here, self.rate))
        return f"{io:8.1f} us ({low:.1f} - {high:.1f})   here {here:6.1f} us   {rate / 1e9:5.2f} GB/s"


class Clocks:
    """Processor time of one I/O thread and of this thread, and the time of the wall."""

    def __init__(self, thread: str) -> None:
        (ident,) = [each.ident for each in threading.enumerate() if each.name == thread]
        self._clock = time.pthread_getcpuclockid(ident or 0)
        self._began = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.clock_gettime(self._clock), time.thread_time(), time.perf_counter()

    def passed(self) -> tuple[float, float, float]:
        """Seconds since the beginning, of each."""
        io, here, wall = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return io, here, wall


def write(store: FileStore, sources: Sequence[ByteRange], step: int) -> list[Extent]:
    """Write all, so many by each call."""
    extents = store.reserve_many([(source.nbytes, source.address) for source in sources])
    while len(extents) < len(sources):
        rest = [(source.nbytes, source.address) for source in sources[len(extents) :]]
        extents += store.reserve_many(rest)
    orders = [(extent, source, READY, None) for extent, source in zip(extents, sources, strict=True)]
    futures = [
        each for at in range(0, len(orders), step) for each in store.write_many(orders[at : at + step])
    ]
    for future in futures:
        future.wait()
    return extents


def read(store: FileStore, extents: Sequence[Extent], targets: Sequence[ByteRange], step: int) -> None:
    """Read all, the last first as backward does."""
    orders = [(extent, target, READY) for extent, target in zip(extents, targets, strict=True)][::-1]
    batches = (orders[at : at + step] for at in range(0, len(orders), step))
    for future in [each for batch in batches for each in store.read_many(batch, padded=True)]:
        future.wait()


def compare(directory: Path, size: int, amount: int, rounds: int) -> dict[tuple[str, str], Lane]:
    """All ways in turn, with extents of one size."""
    lanes = {(way, direction): Lane() for way in WAYS for direction in ("write", "read")}
    count = amount // size
    with FileStore(directory, device=CpuDevice(), writers=1, readers=1) as store:
        store.prepare(2 * amount)
        room = torch.randint(0, 256, (count * size + 4096,), dtype=torch.uint8)
        start = -room.data_ptr() % 4096
        memory = [ByteRange.of(room[start + at : start + at + size]) for at in range(0, count * size, size)]
        for _ in range(rounds + 1):
            for way, wanted in WAYS.items():
                step = wanted or max(1, TOGETHER // size)
                clocks = Clocks("tba-write-0")
                extents = write(store, memory, step)
                lanes[way, "write"].add(clocks, count, count * size)
                clocks = Clocks("tba-read-0")
                read(store, extents, memory, step)
                lanes[way, "read"].add(clocks, count, count * size)
                for extent in extents:
                    store.release(extent)
    for lane in lanes.values():
        del lane.io[0], lane.here[0], lane.rate[0]  # the first round warms up
    return lanes


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--amount", default=128, show_default=True, help="MiB that each round moves in each direction.")
@click.option("--rounds", default=9, show_default=True, help="How often the ways take turns.")
def main(directory: Path, amount: int, rounds: int) -> None:
    """Print a line for each size, direction and way."""
    for size in SIZES:
        for (way, direction), lane in compare(directory, size, amount << 20, rounds).items():
            click.echo(f"{size // KIB:>5} KiB {direction:<5} {way:<16} {lane}")


if __name__ == "__main__":
    main()
