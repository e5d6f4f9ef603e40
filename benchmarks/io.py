"""How close the file store comes to the drive: the store as the offloader drives it, against fio.

    python benchmarks/io.py DIRECTORY [--json FILE]

For every extent size and direction the two take turns on the same drive, several times, so that whatever
else the machine does disturbs both alike. The yardstick is ``fio --ioengine=psync`` with the same block size
and as many jobs as the store has threads for that direction, on a file that was written before. "mixed" is a
write and a read of the same amount at once, from the start of the first to the end of the last.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.config.store import threads_per_direction
from tba_offload.device import READY, CpuDevice
from tba_offload.device.ranges import CACHE_LINE, ByteRange
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.store.base import Extent, IoFuture

MIB = 1 << 20
PAGE = 4096
IN_FLIGHT = 64 * MIB
"""Bytes queued in each direction, but at least two transfers a thread."""

DIRECTIONS = ("write", "read", "mixed")
THREADS = {"write": "writers", "read": "readers"}
CPU = CpuDevice()


@dataclass
class Result:
    """One line of the table; rates in bytes a second, one for each round."""

    direction: str
    size: int
    store: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Store over fio, round by round."""
        return [ours / theirs for ours, theirs in zip(self.store, self.fio, strict=True)]

    def drop_first(self) -> None:
        """Forgets a round that does not count."""
        del self.store[0], self.fio[0]

    def as_json(self) -> dict[str, Any]:
        """The result for a program."""
        return {
            "direction": self.direction,
            "extent_bytes": self.size,
            "store_bytes_per_second": self.store,
            "fio_bytes_per_second": self.fio,
            "median_ratio": statistics.median(self.ratios),
            "ratios": self.ratios,
        }

    def __str__(self) -> str:
        ours, theirs = statistics.median(self.store) / 1e9, statistics.median(self.fio) / 1e9
        low, high = min(self.ratios), max(self.ratios)
        return (
            f"{self.direction:<6} {self.size // MIB:>4} MiB   {ours:6.2f} GB/s   {theirs:6.2f} GB/s   "
            f"{statistics.median(self.ratios):5.2f}  ({low:.2f} - {high:.2f})"
        )


class Lane:
    """Transfers of one direction, of which a bounded number is queued.

    The main thread comes by when half of them have moved, as a training thread does between two kernels, and
    queues more.
    """

    def __init__(self, transfers: Iterator[IoFuture], depth: int, calls: SimpleQueue[Lane]) -> None:
        self._transfers = transfers
        self._depth = depth
        self._calls = calls
        self._lock = threading.Lock()
        self._in_flight = 0
        self._low = depth // 2
        self._error: BaseException | None = None

    def refill(self) -> bool:
        """Queues transfers; whether more of them will end."""
        while self._in_flight < self._depth and self._low:
            future = next(self._transfers, None)
            with self._lock:
                if future is None:
                    self._low = 0  # call at the end only
                else:
                    self._in_flight += 1
            if future is not None:
                future.add_done_callback(self._ended)
        if self._error is not None:
            raise self._error
        return self._in_flight > 0

    def _ended(self, future: IoFuture) -> None:
        with self._lock:
            self._in_flight -= 1
            self._error = self._error or future.error
            low = self._in_flight == self._low
        if low:
            self._calls.put(self)


class Driver:
    """Uses a store the way the offloader does.

    The bytes in flight are bounded. Writes take new extents, reads give them back. Memory is aligned as
    PyTorch aligns it, to 64 bytes.

    There is a buffer for each thread and no more, as in fio: one that is used again and again stays in the
    processor's cache, which activations do not, and that alone can be worth a third of the rate. And they
    are mapped anew for every round, as in fio: the physical pages that a buffer gets matter as much.
    """

    def __init__(self, store: FileStore, size: int, amount: int) -> None:
        self._store = store
        self._size = size
        self._count = amount // size
        threads = threads_of(store)
        self._depths = {name: max(2 * count, IN_FLIGHT // size) for name, count in threads.items()}
        self._sources = [self._buffer() for _ in range(threads["write"])]
        self._targets = [self._buffer() for _ in range(threads["read"])]
        self._full: list[Extent] = []

    def _buffer(self) -> torch.Tensor:
        room = CPU.host_memory(self._size + 2 * PAGE)
        room[: self._size].view(-1, MIB).copy_(torch.randint(0, 256, (MIB,)))  # nothing that compresses
        return room[PAGE + CACHE_LINE :][: self._size]

    def write(self) -> float:
        """Writes the whole amount; bytes a second."""
        written: list[Extent] = []
        return self._timed(written, {"write": self._writes(written)})

    def read(self) -> float:
        """Reads what was written last; bytes a second."""
        return self._timed([], {"read": self._reads(self._full)})

    def mixed(self) -> float:
        """Reads what was written last while the same amount is written; bytes a second of both together."""
        written: list[Extent] = []
        return self._timed(written, {"write": self._writes(written), "read": self._reads(self._full)})

    def _timed(self, written: list[Extent], lanes: dict[str, Iterator[IoFuture]]) -> float:
        start = time.perf_counter()
        self._drive(lanes)
        seconds = time.perf_counter() - start
        self._full = written
        return len(lanes) * self._count * self._size / seconds

    def _drive(self, transfers: dict[str, Iterator[IoFuture]]) -> None:
        calls: SimpleQueue[Lane] = SimpleQueue()
        lanes = {Lane(lane, self._depths[name], calls) for name, lane in transfers.items()}
        active = {lane for lane in lanes if lane.refill()}
        while active:
            lane = calls.get()
            if not lane.refill():
                active.discard(lane)

    def _writes(self, written: list[Extent]) -> Iterator[IoFuture]:
        for i in range(self._count):
            source = self._sources[i % len(self._sources)]
            extent = self._store.reserve(self._size, source.data_ptr())
            written.append(extent)
            yield self._store.write(extent, ByteRange.of(source), READY)

    def _reads(self, extents: list[Extent]) -> Iterator[IoFuture]:
        for i, extent in enumerate(extents):
            target = self._targets[i % len(self._targets)]
            future = self._store.read(extent, ByteRange.of(target), READY, padded=True)
            future.add_done_callback(partial(self._release, extent))
            yield future

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
        self._run(["--name=fill", "--rw=write", "--bs=4M", f"--size={2 * amount}"])

    def run(self, direction: str, size: int) -> float:
        """One run; bytes a second."""
        names = ("write", "read") if direction == "mixed" else (direction,)
        return self._run([option for name in names for option in self._job(name, direction, size)])

    def _job(self, name: str, direction: str, size: int) -> list[str]:
        # "write" fills the first half, "mixed" reads that and fills the second, "read" reads that.
        first_half = (name, direction) in {("write", "write"), ("read", "mixed")}
        count = self._jobs[name]
        share = self._amount // count // size * size
        return [
            f"--name={name}",
            "--new_group",
            f"--rw={name}",
            f"--bs={size}",
            f"--numjobs={count}",
            f"--size={share}",
            f"--offset={0 if first_half else self._amount}",
            f"--offset_increment={share}",
        ]

    def _run(self, jobs: list[str]) -> float:
        shared = [
            "fio",
            "--output-format=json",
            "--ioengine=psync",
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
        return float(moved / seconds)


def threads_of(store: FileStore) -> dict[str, int]:
    """How many threads serve each direction."""
    return {name: int(str(store.description[key])) for name, key in THREADS.items()}


def measure(store: FileStore, fio: Fio, size: int, amount: int, rounds: int) -> list[Result]:
    """All directions of one size, store and fio in turn."""
    results = {name: Result(name, size) for name in DIRECTIONS}
    for turn in range(rounds + 1):
        driver = Driver(store, size, amount)
        runs = (("write", driver.write), ("mixed", driver.mixed), ("read", driver.read))
        for name, run in runs:  # in this order each run finds what it reads
            if turn % 2:
                results[name].fio.append(fio.run(name, size))
            results[name].store.append(run())
            if not turn % 2:
                results[name].fio.append(fio.run(name, size))
    for result in results.values():
        result.drop_first()  # the first round allocated blocks
    return list(results.values())


def compare(arguments: argparse.Namespace) -> tuple[dict[str, object], list[Result]]:
    """All sizes; prints each as soon as it is known."""
    amount = arguments.amount * MIB
    results = []
    with FileStore(
        arguments.directory,
        device=CPU,
        writers=arguments.writers,
        readers=arguments.readers,
        checksum=False,  # fio checks nothing either
    ) as store:
        fio = Fio(store, amount)
        path, jobs = store.description, threads_of(store)
        print(f"{store.directory}: {path['path']}, {jobs['write']} writers, {jobs['read']} readers")
        print("way      extent        store           fio   ratio  (lowest - highest)")
        for size in arguments.sizes:
            for result in measure(store, fio, size * MIB, amount, arguments.rounds):
                results.append(result)
                print(result, flush=True)
    return path, results


def parse() -> argparse.Namespace:
    """The command line."""
    usual = threads_per_direction()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", help="a directory on the drive to measure; takes twice the amount")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="extent sizes, MiB")
    parser.add_argument("--amount", type=int, default=512, help="MiB that each run moves in each direction")
    parser.add_argument("--rounds", type=int, default=7, help="how often store and fio take turns")
    parser.add_argument("--writers", type=int, default=usual, help="threads that write")
    parser.add_argument("--readers", type=int, default=usual, help="threads that read")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--require", type=float, default=0.0, help="fail if a median ratio is below this")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    arguments = parse()
    if shutil.which("fio") is None:
        print(
            "fio is the yardstick and is not installed; try: apt install fio, or dnf install fio",
            file=sys.stderr,
        )
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
    slow = [result for result in results if statistics.median(result.ratios) < arguments.require]
    for result in slow:
        print(f"below {arguments.require}: {result}", file=sys.stderr)
    return 1 if slow else 0


def fio_version() -> str:
    """What fio calls itself."""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
