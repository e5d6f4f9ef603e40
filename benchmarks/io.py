"""How close the file store comes to the drive: the store as the offloader drives it, against fio.

    python benchmarks/io.py DIRECTORY [--json FILE]
    python benchmarks/io.py DIRECTORY --device cuda      bytes of a GPU

For every extent size and direction they take turns on the same drive, several times, so that whatever else
the machine does disturbs all alike. The yardsticks are ``fio --ioengine=psync`` with the same block size and
as many jobs as the store has threads for that direction, and, where the kernel permits it,
``--ioengine=io_uring`` with the store's batches: each job submits at a time what the store moves by one call,
and has two such batches in flight. Both work on a file that was written before. "mixed" is a write and a read
of the same amount at once, from the start of the first to the end of the last. Beside each rate stands the
processor time: of the whole process for the store, the thread that queues included, and what fio says of its
jobs, and by how many places a transfer of the store ended before one that was asked for earlier: one thread
ends them in order, and what is needed first comes first. Without fio the store is measured alone. Run it
on a CPU with ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``, as training there: with large pages a
call takes about half the processor time.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from ends import Ends

from tba_offload.config import parse_size
from tba_offload.config.store import threads_per_direction
from tba_offload.device import READY, device_of
from tba_offload.device.ranges import CACHE_LINE, ByteRange
from tba_offload.store.file import JOINED_BYTES, FileStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import Device
    from tba_offload.store.base import Extent, IoFuture

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
STORE = "store"
PAGE = 4096
IN_FLIGHT = 64 * MIB
"""Bytes queued in each direction, but at least two transfers a thread."""

DIRECTIONS = ("write", "read", "mixed")
THREADS = {"write": "writers", "read": "readers"}


class Run(NamedTuple):
    """One run.

    Attributes:
        rate: Bytes a second.
        cpu: Seconds of processor time for each GiB.
        places: The most places that a transfer was overtaken by; of fio it is not known.
    """

    rate: float
    cpu: float
    places: int = 0


@dataclass
class Result:
    """One line of the table: of the store and of each engine of fio a run for each round."""

    direction: str
    size: int
    lanes: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))

    def ratios(self, engine: str) -> list[float]:
        """Store over fio, round by round."""
        pairs = zip(self.lanes[STORE], self.lanes[engine], strict=True)
        return [ours.rate / theirs.rate for ours, theirs in pairs]

    @property
    def engines(self) -> list[str]:
        """Those of fio that took part."""
        return [name for name in self.lanes if name != STORE]

    def drop_first(self) -> None:
        """Forgets a round that does not count."""
        for runs in self.lanes.values():
            del runs[0]

    def lowest(self) -> float:
        """Return the median ratio to the engine that was faster; 0 without any."""
        return min((statistics.median(self.ratios(engine)) for engine in self.engines), default=0.0)

    @property
    def places(self) -> int:
        """The most places that a transfer of the store was overtaken by, of all rounds."""
        return max(run.places for run in self.lanes[STORE])

    def as_json(self) -> dict[str, Any]:
        """Return the result for a program."""
        return {
            "direction": self.direction,
            "extent_bytes": self.size,
            "bytes_per_second": {name: [run.rate for run in runs] for name, runs in self.lanes.items()},
            "cpu_seconds_per_gib": {name: [run.cpu for run in runs] for name, runs in self.lanes.items()},
            "ratios": {engine: self.ratios(engine) for engine in self.engines},
            "places": self.places,
            "median_ratio": {engine: statistics.median(self.ratios(engine)) for engine in self.engines},
        }

    def __str__(self) -> str:
        text = f"{self.direction:<6} {self.size // KIB:>6} KiB"
        for name, runs in self.lanes.items():
            rate = statistics.median(run.rate for run in runs)
            cpu = statistics.median(run.cpu for run in runs)
            text += f"   {name} {rate / 1e9:5.2f} GB/s {1e3 * cpu:4.0f} ms"
        text += f"   places {self.places}"
        for engine in self.engines:
            ratios = self.ratios(engine)
            text += f"   x {engine} {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        return text


class Lane:
    """Transfers of one direction, of which a bounded number is queued.

    The main thread comes by when half of them have moved, as a training thread does between two kernels, and
    queues more, a batch at a time.

    Args:
        transfers: Queues a number of transfers at once, or those that are left.
        depth: How many may be queued.
        batch: How many are queued at a time.
        calls: Where it is told that half have moved.
    """

    def __init__(
        self, transfers: Callable[[int], list[IoFuture]], depth: int, batch: int, calls: SimpleQueue[Lane]
    ) -> None:
        self._transfers = transfers
        self._depth = depth
        self._batch = batch
        self._calls = calls
        self._lock = threading.Lock()
        self._asked = 0
        self.ends = Ends()
        self._low = depth // 2
        self._error: BaseException | None = None

    def refill(self) -> bool:
        """Queues transfers; whether more of them will end."""
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

    def _in_flight(self) -> int:
        return self._asked - len(self.ends)

    def _ended(self, number: int, future: IoFuture) -> None:
        with self._lock:
            self.ends.note(number)
            self._error = self._error or future.error
            low = self._in_flight() == self._low
        if low:
            self._calls.put(self)


class Driver:
    """Uses a store the way the offloader does.

    The bytes in flight are bounded. Writes take new extents, reads give them back. Memory is aligned as
    PyTorch aligns it on a CPU, to 64 bytes.

    There is a buffer for each transfer that moves at a time and no more, as in fio: one that is used again
    and again stays in the processor's cache, which activations do not, and that alone can be worth a third of
    the rate. And they are mapped anew for every round, as in fio: the physical pages of a buffer matter
    as much.
    """

    def __init__(self, store: FileStore, device: Device, size: int, amount: int) -> None:
        self._store = store
        self._device = device
        self._size = size
        self._count = amount // size
        threads = threads_of(store)
        self._batch = batch_of(size)
        self._depths = {name: depth_of(size, count) for name, count in threads.items()}
        self._sources = [self._buffer() for _ in range(threads["write"] * self._batch)]
        self._targets = [self._buffer() for _ in range(threads["read"] * self._batch)]
        self._full: list[Extent] = []

    def _buffer(self) -> torch.Tensor:
        where = self._device.torch_device
        room = torch.empty(self._size + 2 * PAGE, dtype=torch.uint8, device=where)  # by malloc, as in fio
        block = min(self._size, MIB)
        values = torch.randint(0, 256, (block,), dtype=torch.uint8)  # nothing that compresses
        room[: self._size].view(-1, block).copy_(values)
        start = -room.data_ptr() % PAGE + CACHE_LINE  # all alike, as what is read ahead is placed
        return room[start : start + self._size]

    def write(self) -> Run:
        """Write the whole amount."""
        written: list[Extent] = []
        return self._timed(written, {"write": partial(self._writes, written)})

    def read(self) -> Run:
        """Read what was written last."""
        return self._timed([], {"read": partial(self._reads, list(self._full))})

    def mixed(self) -> Run:
        """Read what was written last while the same amount is written; the rate is of both together."""
        written: list[Extent] = []
        reads = partial(self._reads, list(self._full))
        return self._timed(written, {"write": partial(self._writes, written), "read": reads})

    def _timed(self, written: list[Extent], lanes: dict[str, Callable[[int], list[IoFuture]]]) -> Run:
        self._device.event().synchronize()  # all buffers are full
        start, cpu = time.perf_counter(), time.process_time()
        ends = self._drive(lanes)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        self._full = written
        moved = len(lanes) * self._count * self._size
        return Run(moved / seconds, cpu / moved * GIB, max(each.places() for each in ends))

    def _drive(self, transfers: dict[str, Callable[[int], list[IoFuture]]]) -> list[Ends]:
        calls: SimpleQueue[Lane] = SimpleQueue()
        lanes = {Lane(lane, self._depths[name], self._batch, calls) for name, lane in transfers.items()}
        active = {lane for lane in lanes if lane.refill()}
        while active:
            lane = calls.get()
            if not lane.refill():
                active.discard(lane)
        return [lane.ends for lane in lanes]

    def _writes(self, written: list[Extent], count: int) -> list[IoFuture]:
        first, count = len(written), min(count, self._count - len(written))
        if not count:
            return []
        sources = [self._sources[i % len(self._sources)] for i in range(first, first + count)]
        extents = self._store.reserve_many([(self._size, source.data_ptr()) for source in sources])
        written += extents
        orders = [
            (extent, ByteRange.of(source), READY, None)
            for extent, source in zip(extents, sources, strict=False)
        ]
        return self._store.write_many(orders)

    def _reads(self, extents: list[Extent], count: int) -> list[IoFuture]:
        wanted, extents[:count] = extents[:count], []
        if not wanted:
            return []
        targets = (ByteRange.of(self._targets[i % len(self._targets)]) for i in range(len(wanted)))
        orders = [(extent, target, READY) for extent, target in zip(wanted, targets, strict=True)]
        futures = self._store.read_many(orders, padded=not self._device.pins_memory)
        for extent, future in zip(wanted, futures, strict=True):
            future.add_done_callback(partial(self._release, extent))
        return futures

    def _release(self, extent: Extent, _: IoFuture) -> None:
        self._store.release(extent)


class Fio:
    """The same transfers by fio, in the file of the store: elsewhere on the drive may be faster or slower.

    Reads find what the run before has written, as with the store: what a drive or a host behind it remembers
    of the last writes helps both alike.
    """

    def __init__(self, store: FileStore, amount: int) -> None:
        store.prepare(2 * amount)
        self._file = f"/proc/{os.getpid()}/fd/{store.fileno()}"
        self._amount = amount
        self._jobs = threads_of(store)
        self._direct = store.description["path"] == "O_DIRECT"
        fill = ["--name=fill", "--rw=write", "--bs=4M", f"--size={2 * amount}"]
        self._run("psync", fill)
        self.engines = ["psync"]
        with suppress(subprocess.CalledProcessError):  # fio was built without it, or the kernel forbids it
            self._run("io_uring", fill)
            self.engines.append("io_uring")

    def run(self, engine: str, direction: str, size: int) -> Run:
        """One run."""
        names = ("write", "read") if direction == "mixed" else (direction,)
        jobs = (self._job(engine, name, direction, size) for name in names)
        return self._run(engine, [option for job in jobs for option in job])

    def _job(self, engine: str, name: str, direction: str, size: int) -> list[str]:
        # "write" fills the first half, "mixed" reads that and fills the second, "read" reads that.
        first_half = (name, direction) in {("write", "write"), ("read", "mixed")}
        count = self._jobs[name]
        share = self._amount // count // size * size
        batches = [
            f"--iodepth={2 * batch_of(size)}",
            f"--iodepth_batch={batch_of(size)}",
            f"--iodepth_batch_complete_min={batch_of(size)}",
        ]
        return [
            f"--name={name}",
            "--new_group",
            f"--rw={name}",
            f"--bs={size}",
            f"--numjobs={count}",
            f"--size={share}",
            f"--offset={0 if first_half else self._amount}",
            f"--offset_increment={share}",
            *(batches if engine == "io_uring" else ()),
        ]

    def _run(self, engine: str, jobs: list[str]) -> Run:
        shared = [
            "fio",
            "--output-format=json",
            f"--ioengine={engine}",
            f"--direct={int(self._direct)}",
            "--thread",
            "--group_reporting",
            "--fallocate=none",
            f"--filename={self._file}",
        ]
        ended = subprocess.run([*shared, *jobs], capture_output=True, text=True, check=True)
        groups = json.loads(ended.stdout)["jobs"]
        moved = sum(group[way]["io_bytes"] for group in groups for way in ("read", "write"))
        seconds = max(group[way]["runtime"] for group in groups for way in ("read", "write")) / 1000
        # Percent of the time that the jobs of a group ran, all added up.
        busy = sum((group["usr_cpu"] + group["sys_cpu"]) * group["job_runtime"] for group in groups) / 1e5
        return Run(moved / seconds, busy / moved * GIB)


def batch_of(size: int) -> int:
    """How many extents the offloader hands over at a time, at least; the store moves them by one call."""
    return max(1, JOINED_BYTES // size)


def depth_of(size: int, threads: int) -> int:
    """How many are in flight."""
    return max(2 * threads * batch_of(size), IN_FLIGHT // size)


def threads_of(store: FileStore) -> dict[str, int]:
    """How many threads serve each direction."""
    return {name: int(str(store.description[key])) for name, key in THREADS.items()}


def measure(
    store: FileStore, device: Device, fio: Fio | None, size: int, amount: int, rounds: int
) -> list[Result]:
    """All directions of one size, store and fio in turn; without fio the store alone."""
    results = {name: Result(name, size) for name in DIRECTIONS}
    for turn in range(rounds + 1):
        driver = Driver(store, device, size, amount)
        runs = (("write", driver.write), ("mixed", driver.mixed), ("read", driver.read))
        for name, run in runs:  # in this order each run finds what it reads
            entrants = [(STORE, run)]
            if fio is not None:
                entrants += [(each, partial(fio.run, each, name, size)) for each in fio.engines]
            for entrant, go in entrants[:: -1 if turn % 2 else 1]:
                results[name].lanes[entrant].append(go())
    for result in results.values():
        result.drop_first()  # the first round allocated blocks
    return list(results.values())


def compare(arguments: argparse.Namespace) -> tuple[dict[str, object], list[Result]]:
    """All sizes; prints each as soon as it is known."""
    amount, device = arguments.amount * MIB, device_of(arguments.device)
    results = []
    with FileStore(
        arguments.directory,
        device=device,
        writers=arguments.writers,
        readers=arguments.readers,
        checksum=False,  # fio checks nothing either
    ) as store:
        fio = Fio(store, amount) if shutil.which("fio") else None
        path, jobs = store.description, threads_of(store)
        print(f"{store.directory}: {path['path']}, {jobs['write']} writers, {jobs['read']} readers")
        print("medians; ms of processor time for each GiB; rates of the store over fio's, and their range")
        for size in arguments.sizes:
            for result in measure(store, device, fio, size, amount, arguments.rounds):
                results.append(result)
                print(result, flush=True)
    return path, results


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    usual = threads_per_direction()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", help="a directory on the drive to measure; takes twice the amount")
    parser.add_argument(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB],
        help="extent sizes, such as 256KiB",
    )
    parser.add_argument("--amount", type=int, default=512, help="MiB that each run moves in each direction")
    parser.add_argument("--rounds", type=int, default=7, help="how often store and fio take turns")
    parser.add_argument("--writers", type=int, default=usual, help="threads that write")
    parser.add_argument("--readers", type=int, default=usual, help="threads that read")
    parser.add_argument("--device", default="cpu", help="where the bytes are, such as cuda")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--require", type=float, default=0.0, help="fail if a median ratio is below this")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Args:
        given: The arguments; those of the command line by default.

    Returns:
        The exit status.
    """
    arguments = parse(given)
    if shutil.which("fio") is None:
        print(
            "fio is the yardstick and is not installed; try: apt install fio, or dnf install fio",
            file=sys.stderr,
        )
        if arguments.require:
            return 2
    path, results = compare(arguments)
    if arguments.json is not None:
        report = {
            "store": path,
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "fio": fio_version(),
            },
            "amount_bytes": arguments.amount * MIB,
            "results": [result.as_json() for result in results],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    slow = [result for result in results if result.lowest() < arguments.require]
    for result in slow:
        print(f"below {arguments.require}: {result}", file=sys.stderr)
    return 1 if slow else 0


def fio_version() -> str | None:
    """Return what fio calls itself, if it is there."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
