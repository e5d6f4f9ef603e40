"""Decisions that are made in slices, after steps."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import TYPE_CHECKING

from harness import MIB, config_for
from machine import Machine
from models import loss_of, make_model, make_tokens
from profiles import AUTO, make_profile

import tba_offload as tba
from tba_offload.adapt.controller import Controller
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
