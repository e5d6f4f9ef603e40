"""Compare the rates of the file store with the rates of fio on the same drive.

    python benchmarks/io.py DIRECTORY [--json FILE]
    python benchmarks/io.py DIRECTORY --device cuda      bytes of a GPU

For each extent size and direction, the store and fio alternate several times, so that other load on the
machine affects all of them. The ratio of ``store again`` is noise. fio runs with ``--ioengine=psync``, the
same block size and as many jobs as the store has threads for the direction. If the kernel permits it, fio
also runs with ``--ioengine=io_uring`` and the store's batches, two in flight for each job. All runs use a
file that was written before. "mixed" is a write and a read of the same number of bytes at once.

The output also has the processor time. ``places`` is the largest number of transfers that ended before an
earlier transfer. Without fio, the store is measured alone. On a CPU, set
``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``.
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
import time
from collections import defaultdict, deque
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.config import parse_size
from tba_offload.device import CACHE_LINE, READY, aligned_range, device_of
from tba_offload.store.file import FileStore
from tba_offload.store.multi import MultiStore
from tba_offload.store.open import threads_per_direction
from tba_offload.store.pool import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import ByteRange, Device
    from tba_offload.store.base import Extent

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096
STORE, AGAIN = "store", "store again"
BATCH_BYTES = 4 * MIB
IN_FLIGHT = 64 * MIB
"""Number of bytes queued in each direction. At least two transfers for each thread are queued."""

DIRECTIONS = ("write", "mixed", "read")
"""Order of the runs. Each run reads the bytes that an earlier run has written."""


class Run(NamedTuple):
    """Result of one run.

    Attributes:
        rate: Bytes per second.
        cpu: Seconds of processor time for each GiB.
        places: Largest number of transfers that ended before an earlier transfer.
    """

    rate: float
    cpu: float
    places: int = 0


class Lane:
    """Transfers of one direction, queued in batches.

    Args:
        store: The store.
        transfers: Function that returns up to a given number of next transfers, or an empty list at the end.
        depth: Largest number of queued transfers.
        batch: Number of transfers in a batch.
    """

    def __init__(
        self, store: MultiStore, transfers: Callable[[int], list[Transfer]], depth: int, batch: int
    ) -> None:
        self._store, self._transfers, self._depth, self._batch = store, transfers, depth, batch
        self._queued: deque[Transfer] = deque()
        self._all: dict[Transfer, int] = {}
        self._is_filled = False

    def refill(self) -> None:
        """Queue batches until ``depth`` transfers are queued."""
        while not self._is_filled and len(self._queued) + self._batch <= self._depth:
            transfers = self._transfers(self._batch)
            self._is_filled = not transfers
            for transfer in transfers:
                self._all[transfer] = len(self._all)
            self._queued += transfers
            ways = self._store.write, self._store.read
            if transfers:
                ways[transfers[0].extent is not None](transfers)

    def wait(self) -> bool:
        """Wait until half of the queued transfers have ended, or all at the end. Return False at the end."""
        left = 0 if self._is_filled else self._depth // 2
        while len(self._queued) > left:
            self._store.wait(self._queued.popleft())
        return not self._is_filled

    def places(self, ended: Sequence[Transfer]) -> int:
        """Return the largest number of transfers that ended before an earlier transfer."""
        order = [self._all[transfer] for transfer in ended if transfer in self._all]
        return max((sum(later > own for later in order[:at]) for at, own in enumerate(order)), default=0)

    def extents(self) -> list[Extent]:
        """Return the extents of all transfers in the order in which the transfers were queued."""
        return [transfer.extent for transfer in self._all if transfer.extent is not None]


class Driver:
    """User of a store that works like the offloader: writes take new extents, and reads free the extents.

    As in fio, each transfer that runs has one buffer. Buffers are allocated again for each round, because a
    buffer that is used again would stay in the processor's cache.
    """

    def __init__(
        self, store: MultiStore, threads: dict[str, int], device: Device, size: int, amount: int
    ) -> None:
        self._store, self._device, self._size, self._count = store, device, size, amount // size
        self._batch = batch_of(size)
        self._depths = {
            name: max(2 * count * self._batch, IN_FLIGHT // size) for name, count in threads.items()
        }
        self._buffers = {
            name: [self._buffer() for _ in range(count * self._batch)] for name, count in threads.items()
        }
        self._full: list[Extent] = []

    def _buffer(self) -> ByteRange:
        buffer = aligned_range(self._size, CACHE_LINE, PAGE, self._device)  # aligned as PyTorch aligns memory
        block = min(self._size, MIB)
        values = torch.randint(0, 256, (block,), dtype=torch.uint8)  # nothing that compresses
        buffer.tensor().view(-1, block).copy_(values)
        return buffer

    def run(self, direction: str) -> Run:
        """Write all bytes, read the bytes of the last write, or do both at once."""
        ways = {"write": self._writes(), "read": self._reads()}
        wanted = ways if direction == "mixed" else {direction: ways[direction]}
        self._device.event().synchronize()  # all buffers are full
        self._store.completed = ended = deque()
        start, cpu = time.perf_counter(), time.process_time()
        lanes = {
            name: Lane(self._store, way, self._depths[name], self._batch) for name, way in wanted.items()
        }
        active = list(lanes.values())
        while active:
            for lane in active:
                lane.refill()
            active = [lane for lane in active if lane.wait()]
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if "read" in lanes:
            for extent in lanes["read"].extents():
                self._store.release(extent)
        self._full = lanes["write"].extents() if "write" in lanes else []
        moved = len(lanes) * self._count * self._size
        return Run(moved / seconds, cpu / moved * GIB, max(lane.places(ended) for lane in lanes.values()))

    def _writes(self) -> Callable[[int], list[Transfer]]:
        numbers = iter(range(self._count))
        buffers = self._buffers["write"]
        return lambda most: [
            Transfer(buffers[number % len(buffers)], READY) for number in islice(numbers, most)
        ]

    def _reads(self) -> Callable[[int], list[Transfer]]:
        extents = iter(enumerate(self._full))
        buffers = self._buffers["read"]
        return lambda most: [
            Transfer(buffers[number % len(buffers)], READY, extent=extent)
            for number, extent in islice(extents, most)
        ]


class Fio:
    """The same transfers by fio, in the file of the store, because other areas of a drive may be faster."""

    def __init__(self, store: FileStore, threads: dict[str, int], amount: int) -> None:
        store.grow(2 * amount)
        self._file, self._amount, self._jobs = f"/proc/{os.getpid()}/fd/{store.fd}", amount, threads
        self._direct = store.path == "O_DIRECT"
        fill = ["--name=fill", "--rw=write", "--bs=4M", f"--size={2 * amount}"]
        self._run("psync", fill)
        self.engines = ["psync"]
        with suppress(subprocess.CalledProcessError):  # fio was built without it, or the kernel forbids it
            self._run("io_uring", fill)
            self.engines.append("io_uring")

    def run(self, engine: str, direction: str, size: int) -> Run:
        """Run fio once."""
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
    """Return the smallest number of transfers in a batch of the offloader."""
    return max(1, BATCH_BYTES // size)


def measure(
    store: MultiStore,
    threads: dict[str, int],
    device: Device,
    fio: Fio | None,
    size: int,
    amount: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Run all directions of one size with the store and fio in turn. The first round does not count."""
    runs: dict[str, dict[str, list[Run]]] = {name: defaultdict(list) for name in DIRECTIONS}
    for turn in range(rounds + 1):
        for who in (STORE, AGAIN):
            driver = Driver(store, threads, device, size, amount)
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
    """Return one line of the table. Ratios divide the store's rate by another rate of the same round."""
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
    """Return a result as text."""
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
    parser.add_argument("directory", help="directory on the drive, with free space for twice --amount")
    sizes = [256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes, help="such as 256KiB")
    parser.add_argument("--amount", type=int, default=512, help="MiB of each run in each direction")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds of the store and fio")
    parser.add_argument("--writers", type=int, default=usual, help="number of threads that write")
    parser.add_argument("--readers", type=int, default=usual, help="number of threads that read")
    parser.add_argument("--device", default="cpu", help="device of the bytes, such as cuda")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--require", type=float, default=0.0, help="fail if a median ratio is below this")
    options = parser.parse_args(given)
    if shutil.which("fio") is None:
        print(
            "fio is not installed, so only the store is measured. Run apt install fio, or dnf install fio",
            file=sys.stderr,
        )
        if options.require:
            return 2
    amount, device, results = options.amount * MIB, device_of(options.device), []
    threads = {"write": options.writers, "read": options.readers}
    # fio checks nothing, so neither does the store.
    file = FileStore(options.directory, device=device, checksum=False, slabs=sum(threads.values()))
    with MultiStore([file], readers=options.readers, writers=options.writers) as store:
        fio = Fio(file, threads, amount) if shutil.which("fio") else None
        path = store.description
        print(f"{file.name}: {path['path']}, {options.writers} writers, {options.readers} readers")
        print("medians: rate, ms of processor time for each GiB; x: the store's rate / another rate (range)")
        for size in options.sizes:
            for result in measure(store, threads, device, fio, size, amount, options.rounds):
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
