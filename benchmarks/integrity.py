"""What checking every byte that a drive gives back costs a training step of the demo's GPT.

    python benchmarks/integrity.py

The first figure is processor time that the I/O threads spend inside the checksum, as a share of the processor
time of all threads of the process, step by step: neither depends on what else the machine does. The others
are ratios of lanes with and without checksums, round by round; in a lane more each checksum is taken of seven
other ranges of memory too, which shows above the machine's noise what one costs the step. It needs
megatron-core.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import torch
from cost import MANY, OFF, ON, Lane, Mechanism, MeteredTrainer, all_offloaded, cost_command
from xxhash import xxh3_64

from tba_offload.store import checksums

if TYPE_CHECKING:
    from cost import Lanes

WARM_UP = 2
TIMES = 8
MEMORY = 256 << 20
"""Bytes, in turn, that further checksums are taken of: more than caches hold."""


class EightfoldHash:
    """A checksum that is taken of as many bytes elsewhere in memory seven times more."""

    memory = memoryview(b"")
    at = 0

    def __init__(self) -> None:
        self._hash = xxh3_64()
        self.intdigest = self._hash.intdigest

    def update(self, data: memoryview) -> None:
        self._hash.update(data)
        for _ in range(TIMES - 1):
            at = EightfoldHash.at if EightfoldHash.at + len(data) <= MEMORY else 0
            EightfoldHash.at = at + len(data)
            xxh3_64().update(EightfoldHash.memory[at : at + len(data)])


class EightfoldTrainer(MeteredTrainer):
    """A strategy of the demo whose checksums cost eight times as much."""

    def step(self) -> dict[str, Any]:
        """One training step and its figures."""
        if not EightfoldHash.memory:
            EightfoldHash.memory = memoryview(torch.ones(MEMORY, dtype=torch.uint8).numpy())
            checksums.xxh3_64 = EightfoldHash
        return super().step()


def summarize(lanes: Lanes) -> dict[str, Any]:
    """Shares and rates of the steps after the warm-up."""
    counted, without, many = (lanes[name][WARM_UP:] for name in (ON, OFF, MANY))
    hashed = sum(step["offloaded_bytes"] + step["read_bytes"] for step in counted)
    if not hashed:
        raise click.UsageError("nothing travels in steps of this size; make the model or the batch larger")
    return {
        "share_of_cpu": statistics.median(step["checksum_seconds"] / step["cpu_seconds"] for step in counted),
        "checksum_bytes_per_second": hashed / sum(step["checksum_seconds"] for step in counted),
        "hashed_bytes_per_step": hashed // len(counted),
        "cpu_seconds_per_step": statistics.median(step["cpu_seconds"] for step in counted),
        "cpu_seconds_for_each_in_checksums": statistics.median(
            (step["cpu_seconds"] - plain["cpu_seconds"]) / step["checksum_seconds"]
            for step, plain in zip(many, without, strict=True)
        ),
    }


def told(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    return (
        f"checksums: {figures['share_of_cpu']:.2%} of the processor time of a step "
        f"({figures['cpu_seconds_per_step']:.2f} s), {figures['hashed_bytes_per_step'] / 2**20:.0f} MiB "
        f"at {figures['checksum_bytes_per_second'] / 1e9:.1f} GB/s\n"
        f"{TIMES} times as many: each second inside them costs a step "
        f"{figures['cpu_seconds_for_each_in_checksums']:.1f} s of processor time"
    )


CHECKSUMS = Mechanism(
    "offload",
    on=Lane(MeteredTrainer, partial(all_offloaded, checksum=True)),
    off=Lane(MeteredTrainer, partial(all_offloaded, checksum=False)),
    summarize=summarize,
    told=told,
    many=Lane(EightfoldTrainer, partial(all_offloaded, checksum=True)),
)

main = cost_command(__doc__ or "", CHECKSUMS, steps=10, warm_up=WARM_UP)

if __name__ == "__main__":
    main()
