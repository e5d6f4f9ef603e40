"""What holds memory, as the run log tells it: by phase, by holder, and what lasts from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from exact_memory import exact_memory
from harness import config_for
from models import loss_of, make_model, make_tokens
from torch import nn

import tba_offload as tba
from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from pathlib import Path


def looks(model: nn.Module, log: Path, steps: int = 2, **settings: Any) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    with exact_memory(), tba.attach(model, config_for(**settings), run_log=log):
        for number in range(steps):
            loss_of(model, make_tokens(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory_events(log)


def memory_events(log: Path) -> list[dict[str, Any]]:
    return [event for event in read_run_log(log).others if event["event"] == "memory"]


@pytest.mark.parametrize(
    ("placement", "holder"), [("keep", "kept"), ("recompute", "inputs"), ("offload", "in_flight")]
)
def test_what_layers_leave_is_told_by_how_they_ran(placement: str, holder: str, tmp_path: Path) -> None:
    found = looks(make_model(layers=3), tmp_path / "run.jsonl", default=placement, in_flight=1 << 30)[-1]
    held = found["phases"]["loss"]["held"]
    assert max(held, key=held.get) == holder
    assert held[holder] > 3 * 8 * 16 * 64 * 4  # the inputs of three layers at least


def test_where_looking_takes_long_few_steps_are_looked_at(tmp_path: Path) -> None:
    found = looks(make_model(layers=1), tmp_path / "run.jsonl", steps=17)
    assert [event["step"] for event in found] == [1, 2, 3, 4, 8, 16]


def test_each_storage_counts_once_for_what_holds_it_first(tmp_path: Path) -> None:
    model = make_model(layers=2)
    model.head.weight = model.embedding.weight  # tied
    model.register_buffer("table", torch.zeros(50))
    model.layers[0].requires_grad_(requires_grad=False)
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    frozen = sum(each.nbytes for each in model.layers[0].parameters())
    buffers = sum(each.nbytes for each in model.buffers())
    first, second = looks(model, tmp_path / "run.jsonl")
    counters = 4 * sum(1 for each in model.parameters() if each.requires_grad)
    assert first["frozen_weights"] == second["frozen_weights"] == frozen
    assert second["static"] == {
        "parameters": trained + frozen + buffers,
        "gradients": trained,
        "states": 2 * trained + counters,
    }


def test_parameters_of_an_optimizer_that_are_not_the_models_count_as_states(tmp_path: Path) -> None:
    model = make_model(layers=2)
    model.head.to(torch.bfloat16)
    master = model.head.weight.detach().float().requires_grad_()
    optimizer = torch.optim.SGD([master, *model.layers.parameters()], lr=0.0)
    with tba.attach(model, config_for(), run_log=tmp_path / "run.jsonl"):
        for _ in range(2):
            model.layers[0](torch.randn(2, 8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert memory_events(tmp_path / "run.jsonl")[-1]["static"]["states"] == master.nbytes
