"""When the activation budget is derived from what lies on the device, and who is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tba_offload.planner.budget import Budget
from tba_offload.planner.model import DeviceShare, Limits, Plan
from tba_offload.report.log import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def __init__(self, limits: Limits) -> None:
        self.planner, self.capture = Planner(), SimpleNamespace(budget_bytes=None)
        self.live = SimpleNamespace(nbytes=0)
        self.short: list[DeviceShare] = []
        self.steps = 0
        make: Callable[..., Budget] = Budget
        self.budget = make(limits, self.planner, self.capture, self.live, self.short.append)

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


def of_device(nbytes: int, window: int | None = None) -> Bench:
    return Bench(Limits(None, window).on_device(DeviceShare(nbytes)))


def share(nbytes: int) -> int:
    return nbytes * 63 // 64


def test_it_is_known_better_from_step_to_step() -> None:
    bench = of_device(80 * GIB, GIB)
    assert bench.budget.limits.budget == share(80 * GIB)
    assert bench.step(10 * GIB, gradients=8 * GIB, states=20 * GIB) == share(70 * GIB)
    assert bench.budget.limits.budget == bench.capture.budget_bytes == share(42 * GIB)  # for its plan
    assert [limits.budget for limits in bench.planner.told] == [share(70 * GIB), share(42 * GIB)]
    assert {limits.window for limits in bench.planner.told} == {GIB}
    assert bench.step(30 * GIB, gradients=8 * GIB) == share(42 * GIB)
    assert len(bench.planner.told) == bench.planner.begun == 2  # told of what is another, asked in each step


def test_states_that_come_outside_of_steps_count_from_the_next_one_on() -> None:
    bench = of_device(80 * GIB)
    bench.step(10 * GIB, gradients=8 * GIB)
    assert bench.budget.limits.budget == share(62 * GIB)
    assert bench.step(30 * GIB, gradients=8 * GIB) == share(42 * GIB)


def test_gradients_that_exist_already_count_at_once() -> None:
    bench = of_device(80 * GIB)
    bench.live.nbytes = 8 * GIB
    assert bench.step(10 * GIB) == share(62 * GIB)


def test_the_most_gradients_of_any_step_but_the_first_count() -> None:
    """In the first no optimizer can free them in backward."""
    bench = of_device(80 * GIB)
    for gradients in (9 * GIB, 8 * GIB, 2 * GIB, 0):
        bench.step(30 * GIB, gradients=gradients)
    assert bench.budget.limits.budget == share(42 * GIB)


def test_what_is_freed_is_given_to_activations() -> None:
    bench = of_device(80 * GIB)
    bench.step(40 * GIB)
    assert bench.step(30 * GIB) == share(50 * GIB)


def test_small_changes_are_not_told() -> None:
    bench = of_device(80 * GIB)
    for base in (30 * GIB, 30 * GIB + GIB // 2, 30 * GIB - GIB // 2):
        bench.step(base)
    assert len(bench.planner.told) == 1


def test_the_window_is_no_larger_than_what_is_left() -> None:
    bench = of_device(32 * GIB, 4 * GIB)
    bench.step(30 * GIB)
    assert bench.budget.limits.window == share(2 * GIB)


def test_without_a_measurement_nothing_changes() -> None:
    bench = of_device(80 * GIB)
    assert bench.step(None) == share(80 * GIB)
    assert bench.planner.told == []


@pytest.mark.parametrize("budget", [None, 5 * GIB])
def test_without_a_limit_of_the_device_nothing_is_derived(budget: int | None) -> None:
    bench = Bench(Limits(budget))
    assert bench.step(30 * GIB) == budget
    assert (bench.planner.told, bench.planner.begun) == ([], 0)
    assert not bench.budget.is_of_device


def test_where_nothing_is_left_that_is_told() -> None:
    bench = of_device(10 * GIB)
    bench.step(8 * GIB)
    assert bench.short == []
    bench.step(8 * GIB, gradients=4 * GIB)
    assert bench.short[0] == DeviceShare(10 * GIB, 8 * GIB, 4 * GIB)
    assert bench.budget.limits.budget == bench.budget.limits.window == 0
