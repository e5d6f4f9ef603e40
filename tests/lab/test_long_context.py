"""Drives held to rates: what a step waits for them, and that host memory first takes the wait away."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from around import put_around, taking_time
from harness import MIB
from torch import nn

import tba_offload as tba

if TYPE_CHECKING:
    from pathlib import Path

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
