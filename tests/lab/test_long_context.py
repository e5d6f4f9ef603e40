"""The benchmark of long contexts at a small size: it predicts the bytes, and races drives held to rates."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from around import put_around, taking_time
from harness import MIB
from torch import nn

import tba_offload as tba

ROOT = Path(__file__).resolve().parents[2]
LAYERS, CONTEXT, WIDTH = 3, 256, 512


@pytest.mark.full
def test_the_bytes_of_a_forward_are_predicted_and_the_rate_is_raced(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "rows.json"
    command = f"benchmarks/long_context.py --context {CONTEXT} --layers {LAYERS} --steps 1 --lane host"
    rates = f"--rate 1.2x --directory {tmp_path} --json {file}"
    subprocess.run([sys.executable, *command.split(), *rates.split()], cwd=ROOT, check=True)
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    offloaded = "host", "drive", "drive at 1.2x", "host first at 1.2x"
    assert rows.keys() == {"checkpointing", "checkpointing again", *offloaded}
    saved = LAYERS * WIDTH * CONTEXT * 4  # the inputs; tables of cosines and sines stay in memory
    assert {rows[name]["saved"] for name in offloaded} == {saved}
    for name in ("host", "drive"):
        assert rows[name]["need"] == pytest.approx(saved / rows[name]["forward"])
        assert rows[name]["predicted_need"] == pytest.approx(rows["host"]["predicted_need"])
    assert rows["drive at 1.2x"]["rate"] == pytest.approx(1.2 * rows["drive"]["need"])
    assert all(row["same_losses"] for row in rows.values())


SECONDS, DEPTH, INPUT = 0.05, 16, MIB


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(SECONDS)
        ctx.save_for_backward(x)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert ctx.saved_tensors
        time.sleep(2 * SECONDS)
        return gradient * 1.5


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleeps.apply(x) * self.scale


def waits(directory: Path, share: float, **store: Any) -> tuple[float, float]:
    """The wait of a step on a drive with a share of the rate that is needed, and the wait that this says."""
    model, rate = nn.Sequential(*(Sleeper() for _ in range(DEPTH))), share * INPUT / SECONDS

    policy = {"default": "recompute-offload", "budget": {"in_flight_bytes": 3 * INPUT}}
    where = {"kind": "file", "directories": [directory], "readers": 1, "writers": 1, **store}
    with tba.attach(model, policy | {"store": where}, layers=list(model), measure_memory=False) as session:
        put_around(session.store, partial(taking_time, rate), tier="drive")
        found = []
        for _ in range(4):
            began = time.perf_counter()
            with session.step():
                output = model(torch.ones(INPUT // 4, requires_grad=True) * 1)
                forward = time.perf_counter() - began
                output.sum().backward()
            wait = session.records[-1].stall_seconds
            # All inputs but a window are written at the rate, from the second save on.
            computes = (forward - wait) * (DEPTH - 2) / DEPTH
            found.append((wait, max((DEPTH - 3) * INPUT / rate - computes, 0.0)))
    return min(found[1:])


@pytest.mark.full
def test_a_drive_with_too_low_a_rate_costs_what_the_rate_says_and_host_memory_first_takes_it_away(
    tmp_path: Path,
) -> None:
    wait, _ = waits(tmp_path, 1.2)
    assert wait < SECONDS / 2
    wait, expected = waits(tmp_path, 0.4)
    assert wait == pytest.approx(expected, abs=2 * SECONDS)
    assert expected > 4 * SECONDS
    first = {"order": ["host", "drive"], "host_capacity": DEPTH * INPUT * 3 // 4}
    wait, _ = waits(tmp_path, 0.4, **first)
    assert wait < SECONDS / 2
