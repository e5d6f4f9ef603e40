"""When the activation budget is derived from what lies on the device, and who is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tba_offload.config import BudgetConfig, OffloadConfig
from tba_offload.plan.model import Plan
from tba_offload.report.log import StepRecord
from tba_offload.session.budget import Budget, Watched, limits_of
from tba_offload.session.notices import Notices

if TYPE_CHECKING:
    from tba_offload.plan.model import Limits

GIB = 2**30


class Planner:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Limits] = []
        self.plan = Plan(())
        self.begun = 0

    def limit(self, limits: Limits) -> None:
        self.told.append(limits)

    def leave_if_over_limits(self) -> None:
        self.begun += 1


class Bench:
    """A budget, and all that keeps to it."""

    def __init__(self, **budget: Any) -> None:
        config = OffloadConfig(budget=BudgetConfig(**budget))
        self.planner, self.capture = Planner(), SimpleNamespace(budget_bytes=None)
        self.live = SimpleNamespace(nbytes=0)
        self.asked = self.steps = 0
        watched: Any = Watched(self.planner, self.capture, self.live, Notices())  # type: ignore[arg-type]
        self.budget = Budget(
            limits_of(config), watched, device_bytes=config.budget.device_bytes, static=self._static
        )

    def _static(self) -> dict[str, int]:
        self.asked += 1
        return {"parameters": 4 * GIB, "gradients": 0, "buffers": 0, "optimizer_states": 3 * GIB}

    def step(self, base: int | None, *, gradients: int = 0, states: int = 0) -> int | None:
        """One step; returns what activations might take in it."""
        self.budget.begin_step(base)
        allowed = self.budget.limits.budget
        self.steps += 1
        record = StepRecord(
            step=self.steps, seconds=1.0, base_bytes=base, gradient_peak_bytes=gradients, state_bytes=states
        )
        self.budget.end_step(record)
        return allowed


def share(nbytes: int) -> int:
    return nbytes * 63 // 64


def test_it_is_known_better_from_step_to_step() -> None:
    bench = Bench(device_bytes=80 * GIB, in_flight_bytes=GIB)
    assert bench.budget.limits.budget == share(80 * GIB)
    assert bench.step(10 * GIB, gradients=8 * GIB, states=20 * GIB) == share(70 * GIB)
    assert bench.budget.limits.budget == bench.capture.budget_bytes == share(42 * GIB)  # for its plan
    assert [limits.budget for limits in bench.planner.told] == [share(70 * GIB), share(42 * GIB)]
    assert {limits.window for limits in bench.planner.told} == {GIB}
    assert bench.step(30 * GIB, gradients=8 * GIB) == share(42 * GIB)
    assert len(bench.planner.told) == bench.planner.begun == 2  # told of what is another, asked in each step


def test_states_that_come_outside_of_steps_count_from_the_next_one_on() -> None:
    bench = Bench(device_bytes=80 * GIB)
    bench.step(10 * GIB, gradients=8 * GIB)
    assert bench.budget.limits.budget == share(62 * GIB)
    assert bench.step(30 * GIB, gradients=8 * GIB) == share(42 * GIB)


def test_gradients_that_exist_already_count_at_once() -> None:
    bench = Bench(device_bytes=80 * GIB)
    bench.live.nbytes = 8 * GIB
    assert bench.step(10 * GIB) == share(62 * GIB)


def test_the_most_gradients_of_any_step_but_the_first_count() -> None:
    """In the first no optimizer can free them in backward."""
    bench = Bench(device_bytes=80 * GIB)
    for gradients in (9 * GIB, 8 * GIB, 2 * GIB, 0):
        bench.step(30 * GIB, gradients=gradients)
    assert bench.budget.limits.budget == share(42 * GIB)


def test_what_is_freed_is_given_to_activations() -> None:
    bench = Bench(device_bytes=80 * GIB)
    bench.step(40 * GIB)
    assert bench.step(30 * GIB) == share(50 * GIB)


def test_small_changes_are_not_told() -> None:
    bench = Bench(device_bytes=80 * GIB)
    for base in (30 * GIB, 30 * GIB + GIB // 2, 30 * GIB - GIB // 2):
        bench.step(base)
    assert len(bench.planner.told) == 1


def test_the_window_is_no_larger_than_what_is_left() -> None:
    bench = Bench(device_bytes=32 * GIB, in_flight_bytes=4 * GIB)
    bench.step(30 * GIB)
    assert bench.budget.limits.window == share(2 * GIB)


def test_without_a_measurement_nothing_changes() -> None:
    bench = Bench(device_bytes=80 * GIB)
    assert bench.step(None) == share(80 * GIB)
    assert bench.planner.told == []


@pytest.mark.parametrize("budget", [{}, {"activation_bytes": 5 * GIB}])
def test_without_a_limit_of_the_device_nothing_is_derived(budget: dict[str, int]) -> None:
    bench = Bench(**budget)
    assert bench.step(30 * GIB) == budget.get("activation_bytes")
    assert (bench.planner.told, bench.planner.begun) == ([], 0)
    assert not bench.budget.is_of_device


def test_where_nothing_is_left_it_is_said_once_what_takes_it() -> None:
    bench = Bench(device_bytes=10 * GIB)
    bench.step(8 * GIB)
    with pytest.warns(RuntimeWarning) as told:
        bench.step(8 * GIB, gradients=4 * GIB)
    bench.step(8 * GIB, gradients=4 * GIB)  # a second warning would be an error of this test
    (warning,) = told
    assert str(warning.message).startswith(
        "budget.device_bytes of 10.0 GiB leaves nothing for activations: 4.00 GiB parameters, 4.00 GiB "
        "gradients, 3.00 GiB optimizer states, 1.00 GiB other things (on a CPU all else of the process) lie "
        "there in a step; offload"
    )
    assert bench.asked == 1
    assert bench.budget.limits.budget == bench.budget.limits.window == 0
