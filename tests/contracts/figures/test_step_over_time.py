"""What a log tells of a step over time is what its record tells of it as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from models import loss_of, make_model, make_tokens

import tba_offload as tba
from tba_offload.report.run_log import read_run_log
from tba_offload.report.timeline import timeline_of, timelines

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 4


def logged(tmp_path: Path, *, steps: int, measure_memory: bool = True) -> Path:
    model = make_model(layers=LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {
        "default": "offload",
        "budget": {"in_flight_bytes": "64KiB"},
        "store": {"kind": "file", "directories": [str(tmp_path)]},
        "min_tensor_bytes": "1KiB",
    }
    path = tmp_path / "run.jsonl"
    with tba.attach(model, policy, run_log=path, measure_memory=measure_memory):
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
    assert told.points[-1].written <= record.offloaded_bytes
    assert told.points[-1].written > 0.8 * record.offloaded_bytes
    assert told.points[-1].read == record.read_bytes
    assert max(point.live for point in told.points) <= (record.activation_peak_bytes or 0)
    assert max(point.live for point in told.points) > 0.9 * (record.activation_peak_bytes or 0)
    assert max(point.in_flight for point in told.points) <= record.in_flight_peak_bytes


def test_every_run_of_a_layer_has_its_forward_and_its_backward(tmp_path: Path) -> None:
    told = timeline_of(read_run_log(logged(tmp_path, steps=3)))
    runs = [(micro_batch, layer) for micro_batch in range(2) for layer in range(LAYERS)]
    assert [(scope.micro_batch, scope.layer) for scope, *_ in told.forwards()] == runs
    order = sorted(told.backwards(), key=lambda run: run[1])
    assert [(scope.micro_batch, scope.layer) for scope, *_ in order] == [
        (micro_batch, layer) for micro_batch in range(2) for layer in reversed(range(LAYERS))
    ]
    assert all(began < ended for _, began, ended in [*told.forwards(), *told.backwards()])


def test_few_steps_are_told(tmp_path: Path) -> None:
    assert [told.step for told in timelines(read_run_log(logged(tmp_path, steps=17)))] == [3, 16]


def test_without_a_measure_of_memory_no_step_is_told(tmp_path: Path) -> None:
    log = read_run_log(logged(tmp_path, steps=5, measure_memory=False))
    assert timelines(log) == [] or log.steps[2].activation_peak_bytes is not None
