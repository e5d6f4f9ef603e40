"""``store.write_bytes_per_day``: ``auto`` writes no more, by the store's own count, and changes no bit."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from harness import KIB, MIB
from machine import Machine
from models import assert_same_history, make_model, train
from profiles import make_profile

import tba_offload as tba
from tba_offload.adapt.controller import Controller
from tba_offload.adapt.profiler import profile_of
from tba_offload.adapt.rates import Rates
from tba_offload.adapt.task import Task
from tba_offload.config import BudgetConfig, OffloadConfig, StoreConfig
from tba_offload.config.policy import Objective, Placement
from tba_offload.days import DAY
from tba_offload.errors import ConfigError, NoEffectWarning
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.model import Limits, Plan
from tba_offload.plan.profile import Timing
from tba_offload.plan.search import make_plan
from tba_offload.plan.simulate import simulate
from tba_offload.plan.what_if import Situation
from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from models import History

    from tba_offload.plan.profile import StepProfile

AUTO, KEEP, OFFLOAD, RECOMPUTE = Placement.AUTO, Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE
FAST = Bandwidth(1e12, 1e12)
LAYERS, STEPS, LEARNING = 8, 14, 3
FORWARD, BACKWARD = 0.01, 0.02
SECONDS = LAYERS * (FORWARD + BACKWARD)
"""Seconds of a step, as plans see it: whatever this machine is busy with, they know the same times."""


@pytest.fixture
def known_times() -> Iterator[None]:
    """Layers take a known time, whichever way they are placed, and the drive none."""

    def profiled(*arguments: Any, **options: Any) -> StepProfile | None:
        found = profile_of(*arguments, **options)
        if found is None:
            return None
        timing = {KEEP: Timing(FORWARD, BACKWARD)}
        slots = tuple(slot._replace(gap=0.0) for slot in found.slots)
        return dataclasses.replace(found, timings=(timing,) * len(found.kinds), slots=slots, tail=0.0)

    with ExitStack() as stack:
        stack.enter_context(mock.patch("tba_offload.adapt.knowledge.profile_of", profiled))
        stack.enter_context(mock.patch.object(Rates, "bandwidth", return_value=FAST))
        yield


def run(directory: Path, limit: int | None, log: Path | None = None) -> tuple[History, list[int], Plan]:
    """Trains; what the store says that it has written in each step, and the plan at the end."""
    config = OffloadConfig(
        default=AUTO,
        budget=BudgetConfig(in_flight_bytes=MIB),
        store=StoreConfig(kind="file", directories=(directory,), write_bytes_per_day=limit),
        min_tensor_bytes=KIB,
    )
    model = make_model(layers=LAYERS, dropout=0.1)
    with tba.attach(model, config, run_log=log) as session:
        moved: list[int] = []
        take_loads = session.store.take_loads

        def counted() -> Any:
            loads = take_loads()
            moved.append(sum(load.write.nbytes for load in loads))
            return loads

        # A controller that decides at once, however busy the machine is.
        assert session.planning.controller is not None
        session.planning.start(session.plan, Controller(session.planning.controller.task))
        with mock.patch.object(session.store, "take_loads", counted):
            history = train(model, session, steps=STEPS)
        # Asked at the begin and at the end of each step; what ended between two steps belongs to the first.
        assert len(moved) == 2 * STEPS
        written = [sum(each) for each in zip(moved[1::2], [*moved[2::2], 0], strict=True)]
        return history, written, session.plan


@pytest.mark.usefixtures("known_times")
def test_a_run_writes_no_more_than_its_share_of_a_day(tmp_path: Path) -> None:
    """From the first plan on, in excursions too; and the bits are those of a run without any offloading."""
    expected = train(make_model(layers=LAYERS, dropout=0.1), steps=STEPS)
    unlimited, written, plan = run(tmp_path, None)
    assert_same_history(unlimited, expected)
    most = max(written[LEARNING:])
    assert plan.placements.count(KEEP) <= 2
    share = most // 2
    found, written, plan = run(tmp_path, int(share / SECONDS * DAY), tmp_path / "run.jsonl")
    assert_same_history(found, expected)
    assert max(written[LEARNING:]) <= share
    assert any(written[LEARNING:])
    assert any(placement is KEEP or placement.percent < 100 for placement in plan.placements)
    assert any(placement.is_offloaded for placement in plan.placements)

    log = read_run_log(tmp_path / "run.jsonl")
    writes = [event for event in log.others if event["event"] == "plan"][-1]["writes"]
    assert isinstance(writes, dict)
    assert writes["bytes_per_day"] <= writes["allowed"] == int(share / SECONDS * DAY)
    assert writes["bounds"]

    # And a plan from its log keeps to the limit too.
    situation = Situation.of(tmp_path / "run.jsonl")
    planned = situation.plan(None)
    assert situation.outcome(planned).sent_bytes <= share
    report, _ = situation.report()
    assert any("that store.write_bytes_per_day allows" in note for note in report.notes)


# On a machine that no test waits for


def task_of(limits: Limits, objective: Objective = Objective.MEMORY) -> Task:
    layers = tuple((0, f"layers.{layer}") for layer in range(LAYERS))
    return Task((AUTO,) * LAYERS, layers, limits, objective)


PROFILE = make_profile(LAYERS)
DRIVE = Bandwidth(4e9, 4e9)
WINDOW = 8 * MIB
ALL = simulate(PROFILE, Plan((OFFLOAD,) * LAYERS, window=WINDOW), DRIVE)


def limit_for(share: float) -> int:
    """What allows to write this share of what a step saves."""
    return int(share * ALL.sent_bytes / ALL.seconds * DAY)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.05])
@pytest.mark.parametrize("budget", [None, 48 * MIB, 80 * MIB])
def test_every_plan_keeps_to_the_limit(share: float, budget: int | None) -> None:
    limits = Limits(budget, WINDOW, limit_for(share))
    objective = Objective.MEMORY if budget is None else Objective.TIME
    plan = make_plan(PROFILE, DRIVE, limits, policy=(AUTO,) * LAYERS, objective=objective)
    found = simulate(PROFILE, plan, DRIVE)
    assert found.sent_bytes <= limits.written_in(found.seconds)
    assert budget is None or found.peak_bytes <= budget
    free = make_plan(PROFILE, DRIVE, Limits(budget, WINDOW), policy=(AUTO,) * LAYERS, objective=objective)
    assert found.sent_bytes <= simulate(PROFILE, free, DRIVE).sent_bytes


@pytest.mark.filterwarnings("ignore:the budget of")
def test_a_limit_that_cannot_be_met_is_said() -> None:
    """Half of the layers are placed offload, whatever is planned."""
    layers = tuple((0, f"layers.{layer}") for layer in range(LAYERS))
    policy = (OFFLOAD,) * (LAYERS // 2) + (AUTO,) * (LAYERS // 2)
    task = Task(policy, layers, Limits(None, WINDOW, limit_for(0.2)), Objective.MEMORY)
    machine = Machine(Controller(task), PROFILE, DRIVE)
    with pytest.warns(RuntimeWarning, match=r"store\.write_bytes_per_day of .* cannot be met: .* a day"):
        machine.run(4)


# Settings


def test_the_limit_has_to_have_an_effect(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no effect with kind: host"):
        StoreConfig(kind="host", write_bytes_per_day="1TB")  # type: ignore[arg-type]
    config = OffloadConfig(store=StoreConfig(directories=(tmp_path,), write_bytes_per_day=10**12))
    with pytest.warns(NoEffectWarning, match=r"write_bytes_per_day: has no effect: no layer is auto"):
        tba.attach(make_model(layers=2), config).close()
    assert OffloadConfig.from_yaml(config.to_yaml()).store.write_bytes_per_day == 10**12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tba.attach(make_model(layers=2), dataclasses.replace(config, default=AUTO)).close()
