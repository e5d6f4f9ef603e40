"""The budget is hard: by the allocator, in every step, the first included, of each schedule."""

from __future__ import annotations

import random
import re
import warnings
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from covering import full, of_which
from exact_memory import exact_memory
from faults import inject
from harness import KIB, Drive, session_for
from models import HIDDEN, SEQUENCE, loss_of, make_model, make_tokens

import tba_offload as tba
from tba_offload.config import BudgetConfig, OffloadConfig, StoreConfig
from tba_offload.config.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch import Tensor, nn


STEPS = 9
BATCH = 16
LAYERS = 4
LARGEST = BATCH * SEQUENCE * 4 * HIDDEN * 4
"""Bytes of the largest activation of a layer, by which a step may need more than another way of running it
does at the least, where no plan fits."""


@pytest.fixture(autouse=True)
def peaks_are_exact() -> Iterator[None]:
    with exact_memory():
        yield


class Job(NamedTuple):
    """A loss, and the order of the forwards and backwards of its micro-batches in a step."""

    loss: Callable[[nn.Module, int], Tensor]
    order: str


def plain_loss(model: nn.Module, number: int) -> Tensor:
    return loss_of(model, make_tokens(number, BATCH))


def plain(order: str) -> Job:
    return Job(plain_loss, order)


class Run(NamedTuple):
    peaks: list[int]
    told: list[str]
    """What was warned of, and after how many steps."""


def run(
    job: Job,
    directory: Path,
    *,
    steps: Iterable[int] = range(STEPS),
    default: Placement,
    capacity: int | None = None,
    **budget: int,
) -> Run:
    config = OffloadConfig(
        default=default,
        budget=BudgetConfig(**budget),
        store=StoreConfig(kind="file", directories=(directory,), capacity=capacity),
        min_tensor_bytes=KIB,
    )
    model = make_model(layers=LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    told: list[str] = []
    with tba.attach(model, config) as session:
        for number, step in enumerate(steps, start=1):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with session.step():
                    play(job, model, step)
            told += [f"{number}: {each.message}" for each in caught if each.category is RuntimeWarning]
            optimizer.step()
            optimizer.zero_grad()
        peaks = [record.activation_peak_bytes for record in session.records]
    assert None not in peaks
    return Run([peak for peak in peaks if peak is not None], told)


def play(job: Job, model: nn.Module, step: int) -> None:
    losses: list[Tensor] = []
    number = 100 * step
    for letter in job.order:
        if letter == "F":
            losses.append(job.loss(model, number))
            number += 1
        else:
            losses.pop(0).backward()


@pytest.fixture(scope="module")
def peak_of_recompute(tmp_path_factory: pytest.TempPathFactory) -> int:
    with exact_memory():
        return max(
            run(
                plain("FB"), tmp_path_factory.mktemp("drive"), steps=range(3), default=Placement.RECOMPUTE
            ).peaks
        )


@pytest.mark.parametrize(
    ("capacity", "faults"),
    [
        pytest.param(64 * KIB, (), marks=full),
        (None, ("fail-write:after=40",)),
        (None, ("fail-grow:errno=ENOSPC",)),
    ],
)
def test_where_drives_have_no_room_layers_are_recomputed(
    capacity: int | None, faults: tuple[str, ...], peak_of_recompute: int, tmp_path: Path
) -> None:
    """From the step on after the one that has shown it."""
    job, budget = plain("FB"), int(1.4 * peak_of_recompute)
    with inject(*faults):
        found = run(job, tmp_path, default=Placement.AUTO, capacity=capacity, activation_bytes=budget)
    over = next((step for step, peak in enumerate(found.peaks) if peak > budget), 0)
    assert max(found.peaks[over + 1 :]) <= budget
    assert not any("cannot be met" in each for each in found.told)


def least_of(job: Job, directory: Path, steps: Iterable[int]) -> int:
    """The peak where next to nothing may be in flight."""
    window = {"in_flight_bytes": 64 * KIB}
    return max(run(job, directory, steps=steps, default=Placement.OFFLOAD, **window).peaks)


@pytest.mark.parametrize("order", of_which(["FB", "FFBFBB"], "FB"))
def test_no_step_is_over_the_budget_where_a_plan_fits(order: str, tmp_path: Path) -> None:
    """And where none does, that is said after the second step, and no step needs more than the least."""
    job = plain(order)
    whole = max(run(job, tmp_path, steps=range(3), default=Placement.KEEP).peaks)
    least = least_of(job, tmp_path, range(3))
    for budget in (int(1.4 * least), int(0.3 * whole)):
        found = run(job, tmp_path, default=Placement.AUTO, activation_bytes=budget)
        assert max(found.peaks) <= budget
        assert found.told == []
    found = run(job, tmp_path, default=Placement.AUTO, activation_bytes=int(0.6 * least))
    assert max(found.peaks) <= least + LARGEST
    (told,) = found.told
    assert re.match(
        r"2: the budget of .* cannot be met: the lowest peak found is .*raise budget", told, re.IGNORECASE
    )


STEP_OF_GROWTH = 6
LENGTHS: dict[str, Callable[[int, int], int]] = {
    "growing": lambda step, _: SEQUENCE if step >= STEP_OF_GROWTH else SEQUENCE // 2,
    "alternating": lambda step, _: SEQUENCE if step >= 3 and step % 2 else SEQUENCE // 2,
    "growing inside a step": lambda step, number: (
        SEQUENCE if step >= STEP_OF_GROWTH and number else SEQUENCE // 2
    ),
}
"""How long the sequences are, by step and micro-batch."""


def longest(name: str) -> list[int]:
    """The first step, whatever it is, and the two of the longest sequences: what shows the peaks of all."""
    lengths = [[LENGTHS[name](step, number) for number in range(3)] for step in range(STEPS)]
    by_length = sorted(range(1, STEPS), key=lambda step: (-max(lengths[step]), -sum(lengths[step])))
    return [0, *sorted(by_length[:2])]


def of_lengths(name: str, order: str) -> Job:
    def loss(model: nn.Module, number: int) -> Tensor:
        length = LENGTHS[name](*divmod(number, 100))
        return loss_of(model, make_tokens(number, BATCH)[:, : length + 1])

    return Job(loss, order)


@pytest.mark.parametrize(
    ("name", "order"), [("growing", "FB"), ("alternating", "FBFB"), ("growing inside a step", "FFBFBB")]
)
def test_no_step_is_over_the_budget_whatever_the_lengths_are(name: str, order: str, tmp_path: Path) -> None:
    job = of_lengths(name, order)
    whole = max(run(job, tmp_path, steps=longest(name), default=Placement.KEEP).peaks)
    least = least_of(job, tmp_path, longest(name))
    budget = max(int(0.6 * whole), 2 * least)
    found = run(job, tmp_path, default=Placement.AUTO, activation_bytes=budget)
    assert max(found.peaks) <= budget
    assert found.told == []
    if name == "growing":
        assert found.peaks[STEP_OF_GROWTH] < 0.7 * budget  # it runs as the first one does
        assert found.peaks[-1] > found.peaks[STEP_OF_GROWTH]  # then there is a plan for it


SLOWED = 6
"""Steps before a drive changes."""
FAST, SLOW = 400e6, 30e6
SPEEDS: dict[str, Callable[[int], float]] = {
    "slow from a step on": lambda step: FAST if step < SLOWED else SLOW,
    "another one in each step": lambda step: 10 ** random.Random(step).uniform(6.8, 8.8),
}
"""Bytes a second of the drive, by step."""


@pytest.mark.parametrize(
    ("name", "order"), [("slow from a step on", "FB"), ("another one in each step", "FFBFBB")]
)
def test_no_step_is_over_the_budget_however_fast_the_drive_is(name: str, order: str, tmp_path: Path) -> None:
    """Though a plan is made for a drive as it was seen, and is in force when that has become another."""
    job, drive, peaks = plain(order), Drive(), []
    model = make_model(layers=LAYERS)
    budget = int(0.6 * max(run(job, tmp_path, steps=range(3), default=Placement.KEEP).peaks))
    with session_for(model, drive=drive, default="auto", activation=budget, measure_memory=True) as session:
        for step in range(STEPS + 5):
            drive.writes.bytes_per_second = drive.reads.bytes_per_second = SPEEDS[name](step)
            with session.step():
                play(job, model, step)
            peaks.append(session.records[-1].activation_peak_bytes or 0)
            model.zero_grad()
    assert 0 < max(peaks) <= budget
