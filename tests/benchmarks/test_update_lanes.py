"""The model of where optimizer states are updated, against what it must hold to."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from places import BENCHMARKS

sys.path.append(str(BENCHMARKS))  # after all others: it has an io.py

import states
import update_lanes
from update_lanes import A100, H100, Machine, Run, ends_first, every, never, simulate

RUNS = [(machine, run) for machine in (H100, A100) for run in machine.runs]
by_name = pytest.mark.parametrize(("machine", "run"), RUNS, ids=[f"{m.name}-{r.name}" for m, r in RUNS])


@by_name
def test_the_cpu_alone_takes_what_was_logged(machine: Machine, run: Run) -> None:
    assert simulate(machine, run, never).seconds == pytest.approx(run.cpu)


@pytest.mark.parametrize("run", H100.runs, ids=lambda run: run.name)
def test_every_second_on_the_gpu_comes_near_to_what_was_logged(run: Run) -> None:
    assert 0.85 < simulate(H100, run, every(2)).seconds / run.every[2] < 1.0


@by_name
def test_the_lane_that_ends_first_is_no_worse_than_any_fixed_share(machine: Machine, run: Run) -> None:
    best = simulate(machine, run, ends_first)
    # One sub-group may end later than where host memory, which the choice does not know of, is the bound.
    grain = max(run.work) / run.cpu_rate
    assert best.seconds <= min(simulate(machine, run, every(k)).seconds for k in range(1, 12)) + grain


@by_name
def test_the_gpu_alone_is_nearly_as_fast_and_faster_than_every_second(machine: Machine, run: Run) -> None:
    """That is why updates on the CPU are not built."""
    alone = simulate(machine, run, every(1)).seconds
    assert alone < 1.16 * simulate(machine, run, ends_first).seconds
    assert 1.1 * alone < simulate(machine, run, every(2)).seconds


@by_name
def test_its_share_is_that_of_the_formula(machine: Machine, run: Run) -> None:
    many = dataclasses.replace(run, sub_groups=1000)
    lanes = simulate(machine, many, ends_first)
    share = machine.link / (machine.link + update_lanes.STATE_BYTES * many.cpu_rate)
    assert lanes.on_gpu / (lanes.on_gpu + lanes.on_cpu) == pytest.approx(share, abs=0.01)


def test_a_link_that_is_slower_than_the_cpu_gets_little() -> None:
    slow = dataclasses.replace(H100, link=1e9)
    run = H100.runs[0]
    assert simulate(slow, run, ends_first).on_gpu < 0.1 * run.parameters


def test_three_slots_hide_travel_but_for_the_first_and_the_last() -> None:
    run = H100.runs[-1]
    lanes = simulate(dataclasses.replace(H100, gpu=1e15), run, every(1))
    travel = update_lanes.STATE_BYTES * run.work[0] / H100.link
    assert lanes.gpu == pytest.approx(travel * (len(run.work) + 1), rel=1e-3)


def test_an_update_that_is_slower_than_travel_is_what_is_waited_for() -> None:
    run = H100.runs[-1]
    lanes = simulate(dataclasses.replace(H100, gpu=1e9), run, every(1))
    travel, update = update_lanes.STATE_BYTES * run.work[0] / H100.link, run.work[0] / 1e9
    assert lanes.gpu == pytest.approx(2 * travel + len(run.work) * update)


def test_the_command_needs_no_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: list[Any] = ["states.py", "--simulate", "h100"]
    monkeypatch.setattr("sys.argv", arguments)
    states.main()
    printed = capsys.readouterr().out
    assert "k = 2, logged" in printed
    assert "30B" in printed
    assert "22 thousand tokens" in printed
