"""Every fault of a drive against placements, drives and schedules: no number changes in silence.

Each case trains three steps: one on healthy drives, one with the fault, which is done again if a named error
ended it, and one after the fault is gone. Losses and parameters are those of training without offloading.
"""

from __future__ import annotations

import gc
import itertools
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from faults import Fault, inject
from harness import made
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.errors import TbaError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FAULTS = (
    *("fail-write:n=3", "fail-write:after=3,errno=EROFS", "fail-write:after=3,errno=ENODEV"),
    *("fail-write:n=3,errno=EAGAIN", "fail-write:n=3,errno=ENOMEM", "fail-write:bytes=256KiB,errno=ENOSPC"),
    *("fail-read:n=2", "fail-read:after=2", "fail-read:n=2,errno=EAGAIN"),
    *("short-write:n=2", "short-read:n=2", "nothing-write:n=2", "nothing-read:n=2"),
    *("zeros-write:n=2", "zeros-read:n=2", "flip-write:n=2", "flip-read:n=2", "flip-read", "lost-write:n=2"),
    *("delay-write:seconds=0.01", "delay-read:seconds=0.01", "hang-write:n=2", "hang-read:n=2"),
)
MIXED = [
    {"match": 0, "placement": "keep"},
    {"match": 2, "placement": "recompute"},
    {"match": 3, "placement": "recompute-offload"},
]
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {"default": "offload"},
    {"default": "offload", "layers": MIXED},
    {"default": "auto"},
)
SCHEDULES = (("f0", "b0"), ("f0", "b0", "f1", "b1"), ("f0", "f1", "b0", "f2", "b1", "b2"))
WAYS = itertools.cycle(itertools.product(PLACEMENTS, (1, 2), SCHEDULES))
CASES = [(fault, *next(WAYS)) for fault in FAULTS]
WIDTH, ROWS = 128, 160


class Training:
    """A model whose weights and batches are the same each time."""

    def __init__(self, schedule: Sequence[str]) -> None:
        torch.manual_seed(1)
        layers = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(5)
        )
        self.model, self.schedule = nn.Sequential(*layers), schedule
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def passes(self, step: int) -> list[float]:
        losses: dict[str, Tensor] = {}
        for what, number in self.schedule:
            if what == "f":
                generator = torch.Generator().manual_seed(100 * step + int(number))
                losses[number] = self.model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean()
            else:
                losses[number].backward()
                losses[number] = losses[number].detach()
        return [loss.item() for loss in losses.values()]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        return [each.detach().view(torch.int32) for each in self.model.parameters()]


@pytest.mark.full
@pytest.mark.parametrize(("spec", "placement", "drives", "schedule"), CASES, ids=FAULTS)
def test_no_fault_is_silent(
    spec: str, placement: dict[str, Any], drives: int, schedule: Sequence[str], tmp_path: Path
) -> None:
    fault = Fault.parse(spec)
    plain, ours, losses = Training(schedule), Training(schedule), []
    directories = [made(tmp_path / str(number)) for number in range(drives)]
    policy = {
        **placement,
        "budget": {"in_flight_bytes": "64KiB"},
        "store": {
            "kind": "file",
            "directories": list(map(str, directories)),
            "checksum": True,
            "stall_seconds": 0.5 if fault.kind == "hang" else 60,
        },
        "min_tensor_bytes": 0,
        "on_slow": "wait",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tba.attach(ours.model, policy, measure_memory=False) as session:
            for number in range(3):
                losses.append(_step(session, ours, number, spec if number == 1 else None))
                ours.update()
            deadline = time.monotonic() + 15
            while session.store.used_bytes and time.monotonic() < deadline:
                gc.collect()
                session.offloader.quiesce()
                time.sleep(0.001)
            assert session.store.used_bytes == 0
    for number in range(3):
        assert losses[number] == plain.passes(number), number
        plain.update()
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    assert all(not list(directory.iterdir()) for directory in directories)


def _step(session: tba.Session, training: Training, number: int, spec: str | None) -> list[float]:
    if spec is not None:
        try:
            with inject(spec) as faults, session.step():
                losses = training.passes(number)
        except TbaError:
            training.optimizer.zero_grad()
        else:
            assert faults.fired
            return losses
        assert faults.fired
    with session.step():
        return training.passes(number)
