"""Decisions that are made in slices, after steps."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from typing import TYPE_CHECKING

import pytest
from harness import MIB, config_for, in_time
from machine import Machine
from models import loss_of, make_model, make_tokens
from profiles import AUTO, make_profile

import tba_offload as tba
from tba_offload.adapt.controller import Controller
from tba_offload.adapt.phases import Excursion
from tba_offload.adapt.task import Task
from tba_offload.adapt.thinking import AtOnce, InSlices
from tba_offload.config.policy import Objective
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.model import Limits
from tba_offload.plan.search import make_plan
from tba_offload.plan.tuning import TUNING, Tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.plan.model import Plan

LAYERS = 8
DRIVE = Bandwidth(300e6, 300e6)


def search() -> Plan:
    return make_plan(make_profile(LAYERS), DRIVE, Limits(40 * MIB, 8 * MIB), policy=(AUTO,) * LAYERS)


def planners() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "tba-plan"]


def test_slices_find_what_is_found_at_once() -> None:
    thinking, slices = InSlices(search), 1
    while not thinking.go_on(1e-4):
        slices += 1
    assert slices > 3
    assert thinking.answer() == AtOnce(search).answer() == search()
    assert planners() == []


def test_between_slices_the_thread_does_nothing() -> None:
    played = 0

    def work() -> int:
        nonlocal played
        for _ in range(50):
            search()
            played += 1
        return played

    thinking = InSlices(work)
    time.sleep(0.05)
    assert played == 0
    thinking.go_on(0.0)
    before = played
    time.sleep(0.05)
    assert played == before < 50
    thinking.give_up()
    assert planners() == []


def test_what_is_raised_is_raised_where_the_answer_is_taken() -> None:
    def failing() -> None:
        raise ZeroDivisionError("what no test has thought of")

    thinking = InSlices(failing)
    with pytest.raises(ZeroDivisionError):
        thinking.answer()


def test_a_search_that_is_forgotten_leaves_no_thread() -> None:
    thinking = InSlices(search)
    thinking.go_on(0.0)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "tba-plan")
    del thinking
    gc.collect()
    thread.join(10)
    assert planners() == []


class Slow(AtOnce["tuple[object, Plan]"]):
    """Needs a given number of slices."""

    slices = 3

    def __init__(self, work: Callable[[], tuple[object, Plan]]) -> None:
        super().__init__(work)
        self._left = self.slices

    def go_on(self, seconds: float) -> bool:
        self._left -= 1
        return self._left <= 0 and super().go_on(seconds)


def machine_of(*, budget: int | None, excursions: tuple[int, ...] = (99,)) -> Machine:
    layers = tuple((0, f"layers.{layer}") for layer in range(LAYERS))
    objective = Objective.MEMORY if budget is None else Objective.TIME
    task = Task((AUTO,) * LAYERS, layers, Limits(budget, 8 * MIB), objective)
    task = dataclasses.replace(task, tuning=Tuning(excursions=excursions))
    return Machine(Controller(task, think=Slow), make_profile(LAYERS), DRIVE)  # type: ignore[arg-type]


def test_a_plan_comes_some_steps_later_and_the_one_before_stays_in_force() -> None:
    machine = machine_of(budget=None)
    machine.run(5)
    settled = machine.plan.placements
    machine.bandwidth = DRIVE.scaled(0.2)  # of which it is sure after the second step
    plans = [machine.step().placements for _ in range(4 + Slow.slices)]
    assert plans[: 1 + Slow.slices] == [settled] * (1 + Slow.slices)
    assert machine.plan.placements != settled


def test_what_the_plan_in_force_takes_is_foretold_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps as they are now, although it goes on to be thought about what they were like before."""
    machine = machine_of(budget=60 * MIB)
    machine.run(TUNING.learning + 3)  # until what lies beside the layers under the plan is in its prediction
    monkeypatch.setattr(Slow, "slices", 99)
    before, expected = machine.plan, machine.plan.prediction
    assert expected is not None
    machine.run(8, slower=2.0)
    assert dataclasses.replace(machine.plan, prediction=expected) == before
    now = machine.plan.prediction
    assert now is not None
    assert now.seconds > 1.8 * expected.seconds
    assert now.peak_bytes == expected.peak_bytes


def test_something_else_is_tried_a_little_later_if_it_is_thought_when_that_is_due() -> None:
    machine = machine_of(budget=60 * MIB, excursions=(TUNING.learning + 2, 99))
    phases = []
    for _ in range(TUNING.learning + 4 * Slow.slices):
        machine.step()
        phases.append(machine.controller.phase)
    tried = [number for number, phase in enumerate(phases, start=1) if isinstance(phase, Excursion)]
    assert len(tried) == 1
    assert tried[0] > TUNING.learning + 2  # then the plan was made anew, as a step under it had been measured


def test_learning_and_a_broken_budget_wait_for_no_slices() -> None:
    machine = machine_of(budget=60 * MIB)
    machine.run(TUNING.learning)
    assert machine.controller.phase.settled is not None
    machine.run(3)
    under = machine.plan
    machine.step(peak=3.0)  # of the budget, that is
    assert machine.plan != under


def test_a_session_waits_for_its_first_plan_and_tells_for_how_long() -> None:
    """After that it waits for no longer than a slice, and closing it ends the search."""
    model = make_model(layers=LAYERS)
    config = config_for(default=tba.Placement.AUTO, in_flight=MIB, activation=2 * MIB)
    with tba.attach(model, config, measure_memory=False) as session:
        for number in range(TUNING.learning + 4):
            with session.step():
                loss_of(model, make_tokens(number)).backward()
            if number == TUNING.learning - 1:
                assert session.plan.prediction is not None
        report = session.report()
    assert planners() == []
    assert report[0].planning_seconds == 0.0
    assert all(record.planning_seconds for record in report[1:])


def test_whatever_ends_a_search_comes_back_to_training() -> None:
    def work() -> None:
        raise SystemExit

    thinking = InSlices(work)
    assert in_time(lambda: thinking.go_on(1.0))
    with pytest.raises(SystemExit):
        thinking.answer()
