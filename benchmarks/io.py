"""How close the file store comes to the drive: the store as the offloader drives it, against fio.

    python benchmarks/io.py DIRECTORY [--json FILE]
    python benchmarks/io.py DIRECTORY --device cuda      bytes of a GPU

For every extent size and direction they take turns on the same drive, several times, so that whatever else
the machine does disturbs all alike; ``store again`` is the store once more, whose ratio is noise. The
yardsticks are ``fio --ioengine=psync`` with the same block size and as many jobs as the store has threads
for that direction, and, where the kernel permits it, ``--ioengine=io_uring`` with the store's batches, two
in flight for each job. All work on a file that was written before. "mixed" is a write and a read of the same
amount at once. Beside each rate stands the processor time, and by how many places a transfer of the store
ended before one that was asked for earlier: one thread ends them in order. Without fio the store is measured
alone. On a CPU run it with ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``, as training there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.config import parse_size
from tba_offload.device import READY, device_of
from tba_offload.device.device import CACHE_LINE, ByteRange
from tba_offload.store.file import JOINED_BYTES, FileStore
from tba_offload.store.options import threads_per_direction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import Device
    from tba_offload.store.base import Extent, IoFuture

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096
STORE, AGAIN = "store", "store again"
IN_FLIGHT = 64 * MIB
"""Bytes queued in each direction, but at least two transfers a thread."""

DIRECTIONS = ("write", "mixed", "read")
"""In this order each run finds what it reads."""


class Run(NamedTuple):
    """One run: bytes a second, processor seconds a GiB, and most places that a transfer was overtaken by."""

    rate: float
    cpu: float
    places: int = 0


class Lane:
    """Transfers of one direction. Batches are queued, up to a bounded number of transfers.

    When half of them have moved, the lane calls the main thread, which queues more.
    """

    def __init__(
        self, transfers: Callable[[int], list[IoFuture]], depth: int, batch: int, calls: SimpleQueue[Lane]
    ) -> None:
        self._transfers, self._depth, self._batch, self._calls = transfers, depth, batch, calls
        self._lock = threading.Lock()
        self._asked, self._low = 0, depth // 2
        self._order: list[int] = []
        self._error: BaseException | None = None

    def refill(self) -> bool:
        """Queue transfers; return whether more of them will end."""
        while self._in_flight() + self._batch <= self._depth and self._low:
            futures = self._transfers(self._batch)
            with self._lock:
                if not futures:
                    self._low = 0  # call at the end only
                first, self._asked = self._asked, self._asked + len(futures)
            for number, future in enumerate(futures, first):
                future.add_done_callback(partial(self._ended, number))
        if self._error is not None:
            raise self._error
        return self._in_flight() > 0

    def places(self) -> int:
        """Return the most transfers that ended before one that was asked for earlier."""
        order = self._order
        return max((sum(later > own for later in order[:at]) for at, own in enumerate(order)), default=0)

    def _in_flight(self) -> int:
        return self._asked - len(self._order)

    def _ended(self, number: int, future: IoFuture) -> None:
        with self._lock:
            self._order.append(number)
            self._error = self._error or future.error
            is_low = self._in_flight() == self._low
        if is_low:
            self._calls.put(self)


class Driver:
    """Uses a store the way the offloader does: writes take new extents, reads give them back.

    As in fio, there is a buffer for each transfer that moves at a time and no more, mapped anew for every
    round: one that is used again stays in the processor's cache, and its physical pages matter as much.
    """

    def __init__(self, store: FileStore, device: Device, size: int, amount: int) -> None:
        self._store, self._device, self._size, self._count = store, device, size, amount // size
        threads = threads_of(store)
        self._batch = batch_of(size)
        self._depths = {
            name: max(2 * count * self._batch, IN_FLIGHT // size) for name, count in threads.items()
        }
        self._buffers = {
            name: [self._buffer() for _ in range(count * self._batch)] for name, count in threads.items()
        }
        self._full: list[Extent] = []

    def _buffer(self) -> torch.Tensor:
        room = torch.empty(self._size + 2 * PAGE, dtype=torch.uint8, device=self._device.torch_device)
        block = min(self._size, MIB)
        values = torch.randint(0, 256, (block,), dtype=torch.uint8)  # nothing that compresses
        room[: self._size].view(-1, block).copy_(values)
        start = -room.data_ptr() % PAGE + CACHE_LINE  # aligned as PyTorch aligns memory
        return room[start : start + self._size]

    def run(self, direction: str) -> Run:
        """Write the whole amount, read what was written last, or both at once."""
        written: list[Extent] = []
        ways = {"write": partial(self._writes, written), "read": partial(self._reads, list(self._full))}
        wanted = ways if direction == "mixed" else {direction: ways[direction]}
        self._device.event().synchronize()  # all buffers are full
        start, cpu = time.perf_counter(), time.process_time()
        calls: SimpleQueue[Lane] = SimpleQueue()
        lanes = [Lane(way, self._depths[name], self._batch, calls) for name, way in wanted.items()]
        active = {lane for lane in lanes if lane.refill()}
        while active:
            lane = calls.get()
            if not lane.refill():
                active.discard(lane)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        self._full = written
        moved = len(lanes) * self._count * self._size
        return Run(moved / seconds, cpu / moved * GIB, max(lane.places() for lane in lanes))

    def _writes(self, written: list[Extent], count: int) -> list[IoFuture]:
        first, count = len(written), min(count, self._count - len(written))
        if not count:
            return []
        buffers = self._buffers["write"]
        sources = [buffers[number % len(buffers)] for number in range(first, first + count)]
        extents = self._store.reserve_many([(self._size, source.data_ptr()) for source in sources])
        written += extents
        pairs = zip(extents, sources, strict=False)
        return self._store.write_many(
            [(extent, ByteRange.of(source), READY, None) for extent, source in pairs]
        )

    def _reads(self, extents: list[Extent], count: int) -> list[IoFuture]:
        wanted, extents[:count] = extents[:count], []
        if not wanted:
            return []
        buffers = self._buffers["read"]
        targets = (ByteRange.of(buffers[number % len(buffers)]) for number in range(len(wanted)))
        orders = [(extent, target, READY) for extent, target in zip(wanted, targets, strict=True)]
        futures = self._store.read_many(orders, padded=not self._device.pins_memory)
        for extent, future in zip(wanted, futures, strict=True):
            future.add_done_callback(lambda _, extent=extent: self._store.release(extent))
        return futures


class Fio:
    """The same transfers by fio, in the file of the store: elsewhere on the drive may be faster or slower."""

    def __init__(self, store: FileStore, amount: int) -> None:
        store.prepare(2 * amount)
        self._file, self._amount = f"/proc/{os.getpid()}/fd/{store.fileno()}", amount
        self._jobs = threads_of(store)
        self._direct = store.description["path"] == "O_DIRECT"
        fill = ["--name=fill", "--rw=write", "--bs=4M", f"--size={2 * amount}"]
        self._run("psync", fill)
        self.engines = ["psync"]
        with suppress(subprocess.CalledProcessError):  # fio was built without it, or the kernel forbids it
            self._run("io_uring", fill)
            self.engines.append("io_uring")

    def run(self, engine: str, direction: str, size: int) -> Run:
        """Do one run."""
        names = ("write", "read") if direction == "mixed" else (direction,)
        jobs = (self._job(engine, name, direction, size) for name in names)
        return self._run(engine, [option for job in jobs for option in job])

    def _job(self, engine: str, name: str, direction: str, size: int) -> list[str]:
        # "write" fills the first half, "mixed" reads that and fills the second, "read" reads that.
        is_first_half = (name, direction) in {("write", "write"), ("read", "mixed")}
        share = self._amount // self._jobs[name] // size * size
        batch = batch_of(size)
        batches = [f"--iodepth={2 * batch}", f"--iodepth_batch={batch}"]
        batches.append(f"--iodepth_batch_complete_min={batch}")
        return [
            *(f"--name={name}", "--new_group", f"--rw={name}", f"--bs={size}", f"--size={share}"),
            *(f"--numjobs={self._jobs[name]}", f"--offset={0 if is_first_half else self._amount}"),
            f"--offset_increment={share}",
            *(batches if engine == "io_uring" else ()),
        ]

    def _run(self, engine: str, jobs: list[str]) -> Run:
        shared = ["fio", "--output-format=json", f"--ioengine={engine}", f"--direct={int(self._direct)}"]
        shared += ["--thread", "--group_reporting", "--fallocate=none", f"--filename={self._file}"]
        ended = subprocess.run([*shared, *jobs], capture_output=True, text=True, check=True)
        groups = json.loads(ended.stdout)["jobs"]
        moved = sum(group[way]["io_bytes"] for group in groups for way in ("read", "write"))
        seconds = max(group[way]["runtime"] for group in groups for way in ("read", "write")) / 1000
        # Percent of the time that the jobs of a group ran, all added up.
        busy = sum((group["usr_cpu"] + group["sys_cpu"]) * group["job_runtime"] for group in groups) / 1e5
        return Run(moved / seconds, busy / moved * GIB)


def batch_of(size: int) -> int:
    """Return how many extents the offloader hands over at a time, at least; one call moves them."""
    return max(1, JOINED_BYTES // size)


def threads_of(store: FileStore) -> dict[str, int]:
    """Return how many threads serve each direction."""
    return {
        name: int(str(store.description[key])) for name, key in (("write", "writers"), ("read", "readers"))
    }


def measure(
    store: FileStore, device: Device, fio: Fio | None, size: int, amount: int, rounds: int
) -> list[dict[str, Any]]:
    """Run all directions of one size, store and fio in turn; the first round, which allocates, counts not."""
    runs: dict[str, dict[str, list[Run]]] = {name: defaultdict(list) for name in DIRECTIONS}
    for turn in range(rounds + 1):
        for who in (STORE, AGAIN):
            driver = Driver(store, device, size, amount)
            for direction in DIRECTIONS:
                lanes: dict[str, Callable[[], Run]] = {who: partial(driver.run, direction)}
                if fio is not None and who == STORE:
                    lanes |= {each: partial(fio.run, each, direction, size) for each in fio.engines}
                for name in list(lanes)[:: -1 if turn % 2 else 1]:
                    found = lanes[name]()
                    if turn:
                        runs[direction][name].append(found)
    return [result_of(direction, size, lanes) for direction, lanes in runs.items()]


def result_of(direction: str, size: int, lanes: dict[str, list[Run]]) -> dict[str, Any]:
    """Return one line of the table; ratios are of the store over the others, round by round."""
    ratios = {
        name: [ours.rate / other.rate for ours, other in zip(lanes[STORE], others, strict=True)]
        for name, others in lanes.items()
        if name != STORE
    }
    return {
        "direction": direction,
        "extent_bytes": size,
        "bytes_per_second": {name: [run.rate for run in runs] for name, runs in lanes.items()},
        "cpu_seconds_per_gib": {name: [run.cpu for run in runs] for name, runs in lanes.items()},
        "places": max(run.places for run in lanes[STORE]),
        "ratios": ratios,
        "median_ratio": {name: statistics.median(each) for name, each in ratios.items()},
    }


def line_of(result: dict[str, Any]) -> str:
    """Return a result for people."""
    text = f"{result['direction']:<6} {result['extent_bytes'] // KIB:>6} KiB"
    for name, rates in result["bytes_per_second"].items():
        cpu = statistics.median(result["cpu_seconds_per_gib"][name])
        text += f"   {name} {statistics.median(rates) / 1e9:5.2f} GB/s {1e3 * cpu:4.0f} ms"
    text += f"   places {result['places']}"
    for name, ratios in result["ratios"].items():
        median = result["median_ratio"][name]
        text += f"   x {name} {median:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return text


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    usual = threads_per_direction()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="a directory on the drive to measure; takes twice the amount")
    sizes = [256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes, help="such as 256KiB")
    parser.add_argument("--amount", type=int, default=512, help="MiB that each run moves in each direction")
    parser.add_argument("--rounds", type=int, default=7, help="how often store and fio take turns")
    parser.add_argument("--writers", type=int, default=usual, help="threads that write")
    parser.add_argument("--readers", type=int, default=usual, help="threads that read")
    parser.add_argument("--device", default="cpu", help="where the bytes are, such as cuda")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--require", type=float, default=0.0, help="fail if a median ratio is below this")
    options = parser.parse_args(given)
    if shutil.which("fio") is None:
        print(
            "fio, the yardstick, is not installed; try: apt install fio, or dnf install fio", file=sys.stderr
        )
        if options.require:
            return 2
    amount, device, results = options.amount * MIB, device_of(options.device), []
    with FileStore(
        options.directory,
        device=device,
        writers=options.writers,
        readers=options.readers,
        checksum=False,  # fio checks nothing either
    ) as store:
        fio = Fio(store, amount) if shutil.which("fio") else None
        path = store.description
        print(f"{store.directory}: {path['path']}, {path['writers']} writers, {path['readers']} readers")
        print(
            "medians; ms of processor time for each GiB; rates of the store over the others', and their range"
        )
        for size in options.sizes:
            for result in measure(store, device, fio, size, amount, options.rounds):
                results.append(result)
                print(line_of(result), flush=True)
    if options.json is not None:
        machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}
        report = {"store": path, "machine": machine, "amount_bytes": amount, "results": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    slow = [each for each in results if min(each["median_ratio"].values()) < options.require]
    for result in slow:
        print(f"below {options.require}: {line_of(result)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
