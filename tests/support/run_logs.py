"""Run logs as a training leaves them, made without one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tba_offload.report.log import MEMORY, RunHeader, RunLogWriter, StepRecord

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
HELD = dict.fromkeys(("in_flight", "settled", "small", "kept", "inputs", "outputs"), 0)


def peak(
    mib: int, *, layer: int = 0, beside: int = 0, gradients: int = 0, frozen: int = 0, **held: int
) -> dict[str, Any]:
    return {
        "nbytes": mib * MIB,
        "layer": layer,
        "held": HELD | {name: size * MIB for name, size in held.items()},
        "beside": beside * MIB,
        "gradients": gradients * MIB,
        "frozen": frozen * MIB,
    }


def memory_event(step: int, names: list[str], **phases: dict[str, Any]) -> dict[str, Any]:
    static = {"parameters": 10 * MIB, "gradients": 0, "states": 0}
    return {
        "step": step,
        "names": names,
        "placements": ["offload"] * len(names),
        "static": static,
        "phases": phases,
    }


def write_run(
    path: Path, *events: dict[str, Any], steps: int = 6, header: dict[str, Any] | None = None, **fields: Any
) -> Path:
    record: dict[str, Any] = {
        "seconds": 0.5,
        "activation_peak_bytes": 100 * MIB,
        "peak_source": "mallinfo2",
        "offloaded_bytes": 300 * MIB,
        "read_bytes": 290 * MIB,
        "in_flight_peak_bytes": 4 * MIB,
        "own_peak_bytes": 8 * MIB,
        "scopes": 4,
    }
    with RunLogWriter(path, RunHeader(**{"strategy": "offload"} | (header or {}))) as log:
        for number in range(1, steps + 1):
            log.write(StepRecord(step=number, **record | fields))
            for event in events:
                if event["step"] == number:
                    log.note(MEMORY, event)
    return path


def logged(path: Path, *events: dict[str, Any], **header: Any) -> Path:
    write_run(path, steps=3, header=header, tokens=1000)
    with path.open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in events))
    return path
