"""The policy of a program, and what is below its store."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from faults import inject

if TYPE_CHECKING:
    from pathlib import Path

    from .choices import Program


def policy_of(program: Program, directory: Path) -> dict[str, Any]:
    budget: dict[str, Any] = {"in_flight_bytes": program.window}
    if program.budget is not None:
        which, size = program.budget.split()
        budget[f"{which}_bytes"] = size
    made: dict[str, Any] = {
        "default": program.layers[0].placement,
        "layers": [{"match": str(n), "placement": each.placement} for n, each in enumerate(program.layers)],
        "budget": budget,
        "store": store_of(program, directory),
        "min_tensor_bytes": program.min_tensor_bytes,
        "on_slow": program.on_slow,
    }
    if program.states is not None:
        made["states"] = states_of(program)
    if program.frozen_weights != "keep":
        made["weights"] = {"frozen": program.frozen_weights}
    return made


def store_of(program: Program, directory: Path) -> dict[str, Any]:
    threads = {"readers": program.readers, "writers": program.writers}
    if program.store.endswith("host"):
        return {"kind": "host", **threads, "capacity": "64KiB" if program.store == "small host" else None}
    names = ("a", "b") if program.store == "striped" else ("a",)
    return {
        "kind": "file",
        "directories": [str(directory / name) for name in names],
        "host_capacity": "64KiB" if program.store == "tiered" else None,
        "capacity": "64KiB" if program.store == "small file" else None,
        "checksum": program.checksum,
        **threads,
    }


def states_of(program: Program) -> dict[str, Any]:
    made: dict[str, Any] = {"sub_group_bytes": program.sub_group}
    if program.states == "auto":
        return {**made, "default": "auto"}
    if program.states == "backward":
        passes = 1 if program.order == "sum of losses" else max(program.micro_batches)
        return {**made, "when": "backward", "micro_batches": passes}
    return made


FAULTS = {
    "slow": ("delay-write:chance=0.3,seconds=0.003", "delay-read:chance=0.3,seconds=0.003"),
    "slow writes": ("delay-write:seconds=0.004",),
    "fails to write": ("fail-write:chance=0.2",),
    "cuts short": ("short-write:chance=0.3", "short-read:chance=0.3"),
}


def drive_of(program: Program) -> AbstractContextManager[object]:
    return inject(*FAULTS[program.drive]) if program.drive in FAULTS else nullcontext()
