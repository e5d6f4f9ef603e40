"""How ``auto`` plans while a program trains: plans settle, a slower drive is answered, errors end no step.

Times are simulated: the device's clock moves only in layers, and the store reports the rate of its drive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from exact_memory import exact_memory
from harness import KIB, MIB, Drive, DrivenStore, session_for
from models import assert_same_history, make_model, train
from torch import Tensor, nn

from tba_offload.config.policy import Placement
from tba_offload.device import Device
from tba_offload.store.base import DriveLoad, Load

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, SAVED = 8, 256 * KIB  # bytes of each layer
FIRST = 3 + 3 * 2  # steps before HOLD: three to learn, and two for each of at most three plans


class SimulatedDevice(Device):
    runs_behind, now = True, 0.0

    def mark(self) -> float:
        return self.now


class SimulatedStore(DrivenStore):
    """A store that reports ``rate`` bytes per second of the device, and enough bytes to believe the rate."""

    rate: Any = 1.5 * SAVED

    def take_loads(self) -> list[DriveLoad]:
        parts = [(load.write, load.read) for load in super().take_loads()]
        return [DriveLoad(*(Load(KIB * n, KIB * n / self.rate) for n, _ in part)) for part in parts]


class Layer(torch.autograd.Function):
    """Takes one second of the device in forward and two in backward."""

    device: SimulatedDevice

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x + 1, x + 2, x + 3, x + 4)
        Layer.device.now += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Layer.device.now += 2
        return gradient + (len(ctx.saved_tensors) - 4)


class Module(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Layer.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Training:
    """A session whose budget is 0.7 of what its layers save, and a drive for which no layer waits."""

    def __init__(self) -> None:
        Layer.device, self.store = SimulatedDevice(), SimulatedStore(Drive())
        self.model = nn.Sequential(*(Module() for _ in range(LAYERS)))
        limits = {"activation": int(0.7 * LAYERS * SAVED), "in_flight": 2 * SAVED, "measure_memory": True}
        settings: dict[str, Any] = limits | {"layers": list(self.model), "default": Placement.AUTO}
        with mock.patch("tba_offload.session.session.device_of_model", return_value=Layer.device):
            self.session = session_for(self.model, store=self.store, **settings)

    def run(self, steps: int) -> list[tuple[Placement, ...]]:
        """Train; return the placements of each step."""
        found = []
        for _ in range(steps):
            found.append(self.session.plan.placements)
            with self.session.step():
                self.model(torch.ones(SAVED // 16, requires_grad=True)).sum().backward()
        return found


@pytest.fixture
def training() -> Iterator[Training]:
    with exact_memory(), (found := Training()).session:
        yield found


def test_plans_settle_within_nine_steps(training: Training) -> None:
    plans = training.run(FIRST + 16)
    assert len(set(plans[:FIRST])) > 2
    assert len(set(plans[FIRST:])) == 1
    assert Placement.OFFLOAD in plans[-1]


def test_a_drive_that_falls_to_a_quarter_gets_another_plan_within_three_steps(training: Training) -> None:
    before = training.run(FIRST + 1)[-1]
    training.store.rate /= 4
    plans = training.run(3)
    assert plans[0] == before
    assert sum(way.recomputes for way in plans[-1]) > sum(way.recomputes for way in before)
    assert plans[-1].count(Placement.OFFLOAD) < before.count(Placement.OFFLOAD)


def test_an_error_of_the_planner_ends_no_step_and_is_told_once() -> None:
    expected = train(make_model(), steps=6)
    model, store = make_model(), SimulatedStore(Drive())
    store.rate = 1j  # cannot be compared with other rates
    with session_for(model, store=store, in_flight=MIB, default=Placement.AUTO) as session:
        with pytest.warns(
            RuntimeWarning, match=r"no plan could be made after step 1: TypeError.*Please report"
        ) as told:
            found = train(model, session, steps=6)
        assert set(session.plan.placements) == {Placement.AUTO}  # offloaded, as in the first step
    assert_same_history(found, expected)
    assert sum("no plan could be made" in str(each.message) for each in told) == 1
