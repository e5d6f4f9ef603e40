"""The link between a device and host memory: what it carries, bare and through stores, beside computing.

    python benchmarks/link.py                             host store, and file store in memory; 1 to 256 MiB
    python benchmarks/link.py --size 16MiB --threads 2    one cell of the table

A copy of the largest extent from and to pinned memory, with nothing else to do, is the bound. Then for each
store, number of I/O threads and size of extents the same amount is written and read, handed over at once as
a batch of the offloader is, while matrices are multiplied on the stream of the model. Each row has the
rates to the host, from the host and both at once, the share of them that the bound allows, by how much the
products take longer, the processor time of all threads but the one that computes for each GiB, by how many
places a transfer ended before one that was asked for earlier, and what PyTorch's allocator had reserved
beside what was allocated. What is read is compared with what was written. Results are written as they come.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from ends import Ends
from gpu import machine_of, versions
from rich.console import Console
from rich.table import Table

from tba_offload.config import parse_size
from tba_offload.device import ByteRange, device_of
from tba_offload.errors import StoreError
from tba_offload.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.device import Device
    from tba_offload.store.base import ActivationStore, Extent, IoFuture

MIB, GIB = 1 << 20, 1 << 30
STORES = ("host", "file")
DIRECTIONS = ("write", "read", "both")
AHEAD = 2
"""Products that the device has been given and not done: it never idles, and the host sees transfers end."""

WAIT_SECONDS = 120.0


@dataclass(frozen=True)
class Row:
    """What a store did with one size of extents and one direction.

    Attributes:
        store: Its kind.
        threads: I/O threads for each direction.
        extent_bytes: Size of an extent.
        direction: One of :data:`DIRECTIONS`.
        bytes_per_second: Median of the rounds.
        of_bound: That as a share of what a bare copy carries; for both directions, of the sum of two.
        slowdown: Time of a product by that of one with nothing beside it.
        cpu_seconds_per_gib: Processor time of all threads but the one that computes.
        places: The most places that a transfer was overtaken by.
        allocated_bytes: Peak of live bytes of the device.
        reserved_bytes: Peak of what its allocator had taken; both are 0 on a CPU.
    """

    store: str
    threads: int
    extent_bytes: int
    direction: str
    bytes_per_second: float
    of_bound: float
    slowdown: float
    cpu_seconds_per_gib: float
    places: int
    allocated_bytes: int
    reserved_bytes: int


class Compute:
    """Products of matrices on the calling thread's stream, one after another.

    Args:
        device: The device.
        width: Rows and columns.
    """

    def __init__(self, device: Device, width: int) -> None:
        self._device = device
        dtype = torch.float32 if device.torch_device.type == "cpu" else torch.bfloat16
        self._one = torch.ones(width, width, dtype=dtype, device=device.torch_device)
        self._made = torch.empty_like(self._one)
        self.until(_after(10))  # the library is loaded
        self.alone = self.until(_after(20))

    def until(self, is_over: Callable[[], bool]) -> float:
        """Compute until something is over, at least a few; seconds of a product by the device's clock."""
        device, marks = self._device, [self._device.mark()]
        while len(marks) <= AHEAD + 1 or not is_over():
            torch.mm(self._one, self._one, out=self._made)
            marks.append(device.mark())
            if len(marks) > AHEAD:
                device.seconds([marks[-AHEAD - 1]])  # waits
        began, ended = device.seconds([marks[0], marks[-1]])
        return (ended - began) / (len(marks) - 1)


def _after(calls: int) -> Callable[[], bool]:
    """Return a function that is true from its call number ``calls`` + 1 on."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


class Lane:
    """Transfers of one direction that were handed over together.

    Args:
        futures: In the order in which they were asked for.
    """

    def __init__(self, futures: Sequence[IoFuture]) -> None:
        self._futures = futures
        self.ends = Ends()
        for number, future in enumerate(futures):
            future.add_done_callback(partial(self._note, number))

    def _note(self, number: int, _: IoFuture) -> None:
        self.ends.note(number)

    def is_over(self) -> bool:
        """Whether all have ended."""
        return len(self.ends) == len(self._futures)

    def check(self) -> None:
        """Raise the error of the first that failed."""
        for future in self._futures:
            future.wait(WAIT_SECONDS)


class Mover:
    """Moves extents of one size between a device and a store.

    Args:
        store: The store.
        device: The device.
        nbytes: Of an extent.
        count: How many are moved at once in each direction.
    """

    def __init__(self, store: ActivationStore, device: Device, nbytes: int, count: int) -> None:
        self._store, self._device, self._count = store, device, count
        words = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), generator=torch.Generator().manual_seed(0))
        source = words.view(torch.uint8).to(device.torch_device)
        self._source = ByteRange.of(source)
        self._targets = [ByteRange.of(torch.zeros_like(source)) for _ in range(count)]
        self._full: list[Extent] = []

    def start(self, direction: str) -> list[Lane]:
        """Hands transfers over; what is written is read the next time."""
        device, full, lanes = self._device, self._full, []
        after = device.event()
        after.synchronize()
        if direction != "write":
            orders = [(extent, target, after) for extent, target in zip(full, self._targets, strict=True)]
            lanes.append(Lane(self._store.read_many(orders, padded=False)))
        if direction != "read":
            self._full = self._extents()
            lanes.append(
                Lane(self._store.write_many([(extent, self._source, after, None) for extent in self._full]))
            )
        return lanes

    def _extents(self) -> list[Extent]:
        found: list[Extent]
        wanted, found = [(self._source.nbytes, self._source.address)] * self._count, []
        while len(found) < len(wanted):
            found += self._store.reserve_many(wanted[len(found) :])
        return found

    def run(self, direction: str, compute: Compute) -> tuple[float, float, float, int]:
        """Seconds, of a product meanwhile, of the processor without the computing thread, and places."""
        before = self._full
        began, busy, own = time.perf_counter(), time.process_time(), time.thread_time()
        lanes = self.start(direction)
        ended: list[float] = []

        def is_over() -> bool:
            if not ended and all(lane.is_over() for lane in lanes):
                ended.append(time.perf_counter())
            return bool(ended)

        product = compute.until(is_over)
        busy, own = time.process_time() - busy, time.thread_time() - own
        for lane in lanes:
            lane.check()
        if direction != "read":
            for extent in before:
                self._store.release(extent)
        return ended[0] - began, product, busy - own, max(lane.ends.places() for lane in lanes)

    def check(self) -> None:
        """Compare what was read with what was written.

        Raises:
            AssertionError: It differs.
        """
        for target in self._targets:
            if not torch.equal(self._source.tensor(), target.tensor()):
                raise AssertionError("other bytes came back than were written")
            target.tensor().zero_()

    def close(self) -> None:
        """Give the extents back."""
        for extent in self._full:
            self._store.release(extent)


def bare(device: Device, nbytes: int) -> dict[str, float]:
    """Bytes a second of copying `nbytes` to pinned memory, and from it."""
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
    here = device.host_memory(nbytes)
    found = {}
    for direction, (target, source) in {"write": (here, there), "read": (there, here)}.items():
        seconds = []
        for _ in range(5):
            after = device.event()
            after.synchronize()
            began = time.perf_counter()
            device.copy(target, source, after)
            seconds.append(time.perf_counter() - began)
        found[direction] = nbytes / min(seconds)
    return found | {"both": found["write"] + found["read"]}


def measure(
    kind: str, threads: int, nbytes: int, settings: Settings, bound: dict[str, float], compute: Compute
) -> Iterator[Row]:
    """Yield the rows of one cell."""
    device, count = settings.device, max(settings.amount // nbytes, 2)
    _reset_peak(device)
    with contextlib.closing(_opened(kind, threads, settings)) as store:
        mover = Mover(store, device, nbytes, count)
        runs: dict[str, list[tuple[float, float, float, int]]] = {direction: [] for direction in DIRECTIONS}
        for turn in range(settings.rounds + 1):
            for direction in DIRECTIONS:
                found = mover.run(direction, compute)
                if turn:  # in the first the store grows
                    runs[direction].append(found)
            mover.check()
        mover.close()
    allocated, reserved = _peaks(device)
    for direction, found in runs.items():
        seconds, products, cpu, places = zip(*found, strict=True)
        moved = count * nbytes * (2 if direction == "both" else 1)
        rate = moved / statistics.median(seconds)
        yield Row(
            store=kind,
            threads=threads,
            extent_bytes=nbytes,
            direction=direction,
            bytes_per_second=rate,
            of_bound=rate / bound[direction],
            slowdown=statistics.median(products) / compute.alone,
            cpu_seconds_per_gib=statistics.median(cpu) / moved * GIB,
            places=max(places),
            allocated_bytes=allocated,
            reserved_bytes=reserved,
        )


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        device: The device.
        stores: Kinds of stores.
        threads: I/O threads for each direction.
        sizes: Of extents, bytes.
        amount: Bytes that are moved at once in each direction.
        rounds: How often.
        width: Of the matrices.
        directory: Where the file store has its file.
    """

    device: Device
    stores: Sequence[str]
    threads: Sequence[int]
    sizes: Sequence[int]
    amount: int
    rounds: int
    width: int
    directory: Path


def _opened(kind: str, threads: int, settings: Settings) -> ActivationStore:
    where = {"directories": (settings.directory,)} if kind == "file" else {}
    capacity = 2 * max(settings.amount, 2 * max(settings.sizes)) + 64 * MIB
    return open_store(
        device=settings.device, kind=kind, capacity=capacity, readers=threads, writers=threads, **where
    )


def _reset_peak(device: Device) -> None:
    if device.pins_memory:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device.torch_device)


def _peaks(device: Device) -> tuple[int, int]:
    """Peak of live bytes, and of those that the allocator had taken."""
    if not device.pins_memory:
        return 0, 0
    where = device.torch_device
    return torch.accelerator.max_memory_allocated(where), torch.accelerator.max_memory_reserved(where)


def run(settings: Settings, tell: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """All cells; what there is by now is told after each."""
    device = settings.device
    bound, compute = bare(device, max(settings.sizes)), Compute(device, settings.width)
    document: dict[str, Any] = {
        "machine": machine_of(device.torch_device),
        "versions": versions(),
        "bare_bytes_per_second": bound,
        "product_seconds": compute.alone,
        "amount_bytes": settings.amount,
        "rows": [],
        "left_out": {},
    }
    for kind in settings.stores:
        for threads in settings.threads:
            for nbytes in settings.sizes:
                try:
                    document["rows"] += map(asdict, measure(kind, threads, nbytes, settings, bound, compute))
                except StoreError as error:  # memory is short, or the file system is small
                    document["left_out"][f"{kind}, {threads} threads, {nbytes} bytes"] = str(error)
                tell(document)
    return document


def table_of(document: dict[str, Any]) -> Table:
    """All rows."""
    bound = document["bare_bytes_per_second"]
    table = Table(
        title=f"bare copies: {bound['write'] / 1e9:.1f} GB/s out, {bound['read'] / 1e9:.1f} GB/s in"
    )
    for name in (
        "store",
        "threads",
        "MiB",
        "direction",
        "GB/s",
        "of bare",
        "product x",
        "CPU s/GiB",
        "places",
    ):
        table.add_column(name, justify="right")
    table.add_column("reserved / allocated", justify="right")
    for row in document["rows"]:
        allocated = row["allocated_bytes"]
        table.add_row(
            row["store"],
            str(row["threads"]),
            f"{row['extent_bytes'] / MIB:g}",
            row["direction"],
            f"{row['bytes_per_second'] / 1e9:.2f}",
            f"{row['of_bound']:.2f}",
            f"{row['slowdown']:.2f}",
            f"{row['cpu_seconds_per_gib']:.3f}",
            str(row["places"]),
            f"{row['reserved_bytes'] / allocated:.2f}" if allocated else "",
        )
    return table


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--store", "stores", type=click.Choice(STORES), multiple=True, help="Which.  [default: both]")
@click.option("--threads", type=int, multiple=True, default=(1, 2, 4), show_default=True)
@click.option("--size", "sizes", multiple=True, help="Of extents.  [default: 1, 4, 16, 64, 256 MiB]")
@click.option("--amount", default="1GiB", show_default=True, help="Bytes at once in each direction.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--width", default=8192, show_default=True, help="Of the matrices that are multiplied.")
@click.option("--tmpfs", default="/dev/shm", show_default=True, help="A directory in memory.")  # noqa: S108
@click.option(
    "--output", type=click.Path(path_type=Path), default="benchmarks/results/link.json", show_default=True
)
def main(
    *,
    device: str,
    stores: tuple[str, ...],
    threads: tuple[int, ...],
    sizes: tuple[str, ...],
    amount: str,
    rounds: int,
    width: int,
    tmpfs: str,
    output: Path,
) -> None:
    """Measure the link between a device and host memory."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tmpfs, prefix="link-") as directory:
        settings = Settings(
            device=device_of(device),
            stores=stores or STORES,
            threads=threads,
            sizes=tuple(parse_size(size) for size in sizes) or tuple(4**power * MIB for power in range(5)),
            amount=parse_size(amount),
            rounds=rounds,
            width=width,
            directory=Path(directory),
        )
        document = run(settings, lambda found: output.write_text(json.dumps(found, indent=2) + "\n"))
    Console().print(table_of(document))


if __name__ == "__main__":
    main()
