"""The record of each step goes where a user wants it: once, complete, in order, under names that stay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness import config_for
from models import make_model, train

import tba_offload as tba
from tba_offload.report.log import FIGURES, StepRecord, read_run_log
from tba_offload.sinks import TensorBoardSink, WandbSink

if TYPE_CHECKING:
    from pathlib import Path


RECORD = StepRecord(step=2, seconds=0.1, loss=math.nan, offloaded_bytes=2**40, stall_seconds=1e-300)
KNOWN = {name: value for name in FIGURES if (value := getattr(RECORD, name)) is not None}


class Writer:
    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))


class Run:
    """As one of W&B, of which only what comes with no step of its own is safe from being dropped."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, str] = {}

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is None
        self.rows.append(data)


def test_each_step_comes_once_and_in_order_to_all(tmp_path: Path) -> None:
    one: list[StepRecord] = []
    other: list[StepRecord] = []
    log = tmp_path / "run.jsonl"
    model, both = make_model(layers=2), [one.append, other.append]
    with tba.attach(model, config_for(), on_step=both, run_log=log) as session:
        train(model, steps=3)
    assert one == other == session.records == list(read_run_log(log).steps)
    assert [record.step for record in one] == [1, 2, 3]


def test_curves_for_tensorboard_and_wandb() -> None:
    writer, run = Writer(), Run()
    TensorBoardSink(writer, steps_before=100)(RECORD)
    WandbSink(run, steps_before=100)(RECORD)
    wanted = {f"tba-offload/{name}": repr(value) for name, value in KNOWN.items()}
    assert {tag: repr(value) for tag, value, _ in writer.points} == wanted
    assert {step for *_, step in writer.points} == {102}
    assert run.axes == {"tba-offload/*": "tba-offload/step"}
    (row,) = run.rows
    assert row.pop("tba-offload/step") == 102
    assert {name: repr(value) for name, value in row.items()} == wanted
