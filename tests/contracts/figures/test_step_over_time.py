"""What a log tells of a step over time is what its record tells of it as a whole."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from harness import KIB, config_for, made, session_for
from models import loss_of, make_model, make_tokens

import tba_offload as tba
from tba_offload.errors import SessionError
from tba_offload.report.log import read_run_log
from tba_offload.report.timeline import TimelineEvent, timeline_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from models import Model

    from tba_offload.session import Session

LAYERS = 4


def logged(tmp_path: Path, *, steps: int, drives: int = 1) -> Path:
    """Trains; each directory is told apart as if it were a drive."""
    directories = [made(tmp_path / f"drive{number}") for number in range(drives)]
    model = make_model(layers=LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {
        "default": "offload",
        "budget": {"in_flight_bytes": "64KiB"},
        "store": {"kind": "file", "directories": list(map(str, directories))},
        "min_tensor_bytes": "1KiB",
    }
    path = tmp_path / "run.jsonl"
    with tba.attach(model, policy, run_log=path, measure_memory=True):
        for number in range(steps):
            for micro_batch in range(2):
                loss_of(model, make_tokens(2 * number + micro_batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_a_step_over_time_adds_up_to_its_record(tmp_path: Path) -> None:
    log = read_run_log(logged(tmp_path, steps=3))
    told, record = timeline_of(log), log.steps[2]
    assert told.step == record.step == 3
    assert max(point.live for point in told.points) <= (record.activation_peak_bytes or 0)
    assert max(point.live for point in told.points) > 0.9 * (record.activation_peak_bytes or 0)
    assert max(point.in_flight for point in told.points) <= record.in_flight_peak_bytes


def test_drives_add_up_to_the_step(tmp_path: Path) -> None:
    log = read_run_log(logged(tmp_path, steps=3, drives=2))
    told, record = timeline_of(log), log.steps[2]
    assert [drive.place for drive in told.drives] == [str(tmp_path / "drive0"), str(tmp_path / "drive1")]
    for writes, nbytes in ((True, record.offloaded_bytes), (False, record.read_bytes)):
        of_drives = [
            sum(move.nbytes for move in told.moves if (move.drive, move.writes) == (drive, writes))
            for drive in range(2)
        ]
        assert sum(of_drives) == nbytes
        assert min(of_drives) > 0
    assert all(0 <= move.began <= move.ended <= told.seconds for move in told.moves)
    for thread in {(move.drive, move.thread) for move in told.moves}:
        own = sorted(move[2:4] for move in told.moves if (move.drive, move.thread) == thread)
        assert all(before[1] <= after[0] for before, after in pairwise(own))


# At a user's word


@pytest.fixture
def model() -> Model:
    return make_model(layers=LAYERS)


@pytest.fixture
def session(model: Model, tmp_path: Path) -> Iterator[Session]:
    """Steps of it are told by hand, and there is no run log."""
    with session_for(model, in_flight=64 * KIB, directory=tmp_path) as session:
        yield session


def test_a_step_is_recorded_at_a_user_s_word(session: Session, model: Model, tmp_path: Path) -> None:
    for number, trace in enumerate([False, True, False, True]):
        with session.step(trace=trace) as step:
            loss_of(model, make_tokens(number)).backward()
        if trace:
            told = step.timeline
            assert told.step == step.record.step == number + 1
            assert len(told.backwards()) == LAYERS
            assert sum(move.nbytes for move in told.moves if not move.writes) == step.record.read_bytes > 0
            assert max(point.live for point in told.points) <= step.record.activation_peak_bytes
        else:
            with pytest.raises(SessionError, match=r"this step recorded no timeline. Call"):
                _ = step.timeline
    for suffix in ("svg", "json"):
        step.timeline.write(tmp_path / f"step.{suffix}")
        assert (tmp_path / f"step.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("opens_itself", [False, True], ids=["told by hand", "opens itself"])
def test_a_step_is_recorded_by_its_number(model: Model, tmp_path: Path, *, opens_itself: bool) -> None:
    log, optimizer = tmp_path / "run.jsonl", torch.optim.SGD(model.parameters(), lr=0.1)
    config = config_for(in_flight=64 * KIB, directory=tmp_path)
    with tba.attach(model, config, run_log=log, measure_memory=False, trace_steps=[2, 5]) as session:
        for number in range(6):
            with contextlib.nullcontext() if opens_itself else session.step():
                loss_of(model, make_tokens(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
    told = read_run_log(log).events(TimelineEvent)
    assert [step.step for step in told] == [2, 5]
    assert all(max(point.live for point in step.points) > 0 for step in told)
