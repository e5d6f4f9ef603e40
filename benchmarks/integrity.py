"""What checking every byte that a drive gives back costs a training step of the demo's GPT.

    python benchmarks/integrity.py

The first figure is processor time that the I/O threads spend inside the checksum, as a share of the processor
time of all threads of the process, step by step: neither depends on what else the machine does. The others
are ratios of lanes with and without checksums, round by round. It needs megatron-core.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from cost import Lane, Mechanism, MeteredTrainer, cost_command
from xxhash import xxh3_64

import tba_offload as tba
from tba_offload.store import checksums

if TYPE_CHECKING:
    from pathlib import Path

WARM_UP = 2


class TimedHash:
    """A checksum that adds up the processor time of its threads and the bytes that it sees."""

    seconds, nbytes = 0.0, 0

    def __init__(self) -> None:
        self._hash = xxh3_64()
        self.intdigest = self._hash.intdigest

    def update(self, data: memoryview) -> None:
        began = time.thread_time()
        self._hash.update(data)
        TimedHash.seconds += time.thread_time() - began
        TimedHash.nbytes += len(data)


class CheckedTrainer(MeteredTrainer):
    """A strategy of the demo that also says what its checksums took."""

    def step(self) -> dict[str, Any]:
        """One training step; its figures, the checksums' processor seconds and their bytes."""
        checksums.xxh3_64 = TimedHash
        seconds, nbytes = TimedHash.seconds, TimedHash.nbytes
        figures = super().step()
        return {
            **figures,
            "hash_seconds": TimedHash.seconds - seconds,
            "hashed_bytes": TimedHash.nbytes - nbytes,
        }


def config(scratch: Path, *, checksum: bool) -> tba.OffloadConfig:
    """Everything travels, with checksums or without."""
    return tba.OffloadConfig(
        budget=tba.BudgetConfig(in_flight_bytes=10 << 20),
        store=tba.StoreConfig(kind="file", directories=(scratch,), checksum=checksum),
    )


def summarize(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares and rates of the steps after the warm-up."""
    counted = steps[WARM_UP:]
    hashed = sum(step["hashed_bytes"] for step in counted)
    return {
        "share_of_cpu": statistics.median(step["hash_seconds"] / step["cpu_seconds"] for step in counted),
        "checksum_bytes_per_second": hashed / sum(step["hash_seconds"] for step in counted),
        "hashed_bytes_per_step": hashed // len(counted),
        "cpu_seconds_per_step": statistics.median(step["cpu_seconds"] for step in counted),
    }


def told(figures: dict[str, Any]) -> str:
    """The figures for people."""
    return (
        f"checksums: {figures['share_of_cpu']:.2%} of the processor time of a step "
        f"({figures['cpu_seconds_per_step']:.2f} s), {figures['hashed_bytes_per_step'] / 2**20:.0f} MiB "
        f"at {figures['checksum_bytes_per_second'] / 1e9:.1f} GB/s"
    )


CHECKSUMS = Mechanism(
    "offload",
    on=Lane(CheckedTrainer, partial(config, checksum=True)),
    off=Lane(MeteredTrainer, partial(config, checksum=False)),
    summarize=summarize,
    told=told,
)

main = cost_command(__doc__ or "", CHECKSUMS, steps=10, warm_up=WARM_UP)

if __name__ == "__main__":
    main()
