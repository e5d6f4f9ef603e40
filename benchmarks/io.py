"""How close the file store comes to the drive: the store as the offloader drives it, against fio.

    python benchmarks/io.py DIRECTORY [--json FILE]

For every extent size and direction the two take turns on the same drive, several times, so that whatever else
the machine does disturbs both alike. The yardstick is ``fio --ioengine=psync`` with the same block size and as
many jobs as the store has threads for that direction, on a file that was written before. "mixed" is a write
and a read of the same amount at once, from the start of the first to the end of the last.
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
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device import READY, CpuDevice
from tba_offload.device.memory import aligned_bytes
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.store.base import Extent, IoFuture

MIB = 1 << 20
DIRECTIONS = ("write", "read", "mixed")
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


class Driver:
    """Uses a store the way the offloader does.

    A few transfers of each direction are queued at a time; a callback tells that one has ended. Writes take
    new extents and come from memory as PyTorch allocates it; reads go into newly allocated buffers and give the
    extents back.
    """

    def __init__(self, store: FileStore, size: int, amount: int, depths: dict[str, int]) -> None:
        self._store = store
        self._size = size
        self._count = amount // size
        self._depths = depths
        self._sources = [torch.empty(size, dtype=torch.uint8).fill_(i) for i in range(depths["write"])]
        self._ended: SimpleQueue[tuple[str, IoFuture]] = SimpleQueue()
        self._full: list[Extent] = []

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

    def drop(self) -> None:
        """Gives back the extents that are written."""
        for extent in self._full:
            self._store.release(extent)
        self._full = []

    def _timed(self, written: list[Extent], lanes: dict[str, Iterator[IoFuture]]) -> float:
        start = time.perf_counter()
        self._drive(lanes)
        seconds = time.perf_counter() - start
        self._full = written
        return len(lanes) * self._count * self._size / seconds

    def _drive(self, lanes: dict[str, Iterator[IoFuture]]) -> None:
        running = sum(
            self._start(name, lane) for name, lane in lanes.items() for _ in range(self._depths[name])
        )
        while running:
            name, future = self._ended.get()
            future.wait()
            running += self._start(name, lanes[name]) - 1

    def _start(self, name: str, lane: Iterator[IoFuture]) -> int:
        """Queues the next transfer of a lane; how many that were."""
        future = next(lane, None)
        if future is None:
            return 0
        future.add_done_callback(lambda ended: self._ended.put((name, ended)))
        return 1

    def _writes(self, written: list[Extent]) -> Iterator[IoFuture]:
        for i in range(self._count):
            source = self._sources[i % len(self._sources)]
            extent = self._store.reserve(self._size, source.data_ptr())
            written.append(extent)
            yield self._store.write(extent, source, READY)

    def _reads(self, extents: list[Extent]) -> Iterator[IoFuture]:
        ended: list[Extent] = []
        for extent in extents:
            while ended:
                self._store.release(ended.pop())
            target = aligned_bytes(extent.nbytes, extent.lead, self._store.alignment, CPU)
            future = self._store.read(extent, target, READY, padded=True)
            del target
            future.add_done_callback(lambda _, extent=extent: ended.append(extent))  # type: ignore[misc]
            yield future
        while self._store.pending():
            time.sleep(0)
        for extent in ended:
            self._store.release(extent)
