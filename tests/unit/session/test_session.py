"""What people touch: attach, steps, records, run logs, changes between steps, and mistakes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from exact_memory import exact_memory
from harness import KIB, config_for, quiesce, session_for
from models import assert_same_tensors, loss_of, make_model, make_tokens, one_step, train
from torch import nn

import tba_offload as tba
from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from pathlib import Path

    from models import Model


@pytest.fixture
def model() -> Model:
    return make_model(layers=3)


# Records


def test_a_step_has_a_record(model: Model) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.layers[-1].register_forward_hook(lambda *_: quiesce(session.offloader))
    with session_for(model, in_flight=1 << 20, measure_memory=True) as session:
        with session.step(tokens=128, model_flops=1e9) as step:
            assert step.record is None
            loss = loss_of(model, make_tokens(0))
            loss.backward()
            step.loss = loss.item()
        record = step.record
    assert record is not None
    assert (record.step, record.tokens, record.model_flops, record.loss) == (1, 128, 1e9, loss.item())
    assert record.seconds > (record.forward_seconds or 0) + (record.backward_seconds or 0) > 0
    assert record.stall_seconds is not None
    assert 0 <= record.stall_seconds < record.seconds
    assert record.scopes == 3
    assert 0 < record.read_bytes <= record.offloaded_bytes
    assert 0 < record.in_flight_peak_bytes <= 1 << 20
    assert (record.own_peak_bytes or 0) >= record.in_flight_peak_bytes
    assert (record.activation_peak_bytes or 0) > 100 * KIB
    assert "mallinfo2" in (record.peak_source or "")
    assert (record.resident_peak_bytes or 0) > record.activation_peak_bytes  # type: ignore[operator]


def test_the_run_log_holds_every_step(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    config = config_for(rules=(tba.Rule("0", tba.Placement.KEEP),))
    with tba.attach(model, config, run_log=path, model_info={"name": "small"}) as session:
        train(model, session, steps=2)
        log = read_run_log(path)  # while it is being written
        assert list(log.steps) == session.records
        one_step(session, model)
    log = read_run_log(path)
    assert list(log.steps) == session.records
    assert len(log.steps) == 3
    assert log.header.strategy == "mixed"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert log.header.model == {"layers": 3, "name": "small", "parameters": parameters}
    assert log.header.store["kind"] == "host"
    assert log.header.versions["torch"] == torch.__version__
    assert tba.OffloadConfig.from_yaml(log.header.policy or "") == config
    assert log.header.plan == {
        "layers.0": {"layer": 0, "placement": "keep", "why": "rule '0'"},
        "layers.1": {"layer": 1, "placement": "offload", "why": "default"},
        "layers.2": {"layer": 2, "placement": "offload", "why": "default"},
    }


# What opens and what does not


def test_nothing_is_left_attached_when_the_store_cannot_be_opened(model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(tba.StoreError):
        session_for(model, directory=tmp_path / "file")
    assert "forward" not in vars(model.layers[0])
    threads = threading.active_count()
    with pytest.raises(tba.RunLogError, match="the directory does not exist"):
        tba.attach(model, config_for(), run_log=tmp_path / "none" / "log")
    assert threading.active_count() == threads


# Mistakes


def test_a_backward_after_the_step_or_after_the_session(model: Model) -> None:
    """After the step all is there; after the session what was stored is gone, and that is said."""
    with session_for(model) as session:
        with session.step():
            losses = [loss_of(model, make_tokens(0)) for _ in range(2)]
            quiesce(session.offloader)
        with pytest.warns(UserWarning, match="the step ended before backward"):
            losses[0].backward()
        found = [parameter.grad for parameter in model.parameters()]
    plain = make_model(layers=3)
    loss_of(plain, make_tokens(0)).backward()
    assert_same_tensors(found, [parameter.grad for parameter in plain.parameters()])  # type: ignore[misc]
    with pytest.raises(tba.TbaError, match="closed"):
        losses[1].backward()


def test_a_session_that_was_lost_is_found(model: Model) -> None:
    other = make_model(seed=2)
    session_for(model)  # as a cell of a notebook that is run again
    with session_for(other) as theirs:
        assert tba.session_of(other.layers[0]) is theirs
        assert tba.session_of([nn.Identity(), other]) is theirs
        found = tba.session_of(nn.Sequential(nn.Identity(), model))
        assert found is not None
        one_step(found, model)
        found.close()
        assert tba.session_of(model) is None
    assert tba.session_of(other) is None


# The model is given back as it was


def test_close_gives_the_layers_back(model: Model) -> None:
    own = model.layers[1].forward
    model.layers[1].forward = other = lambda x: own(x) * 1  # type: ignore[method-assign]
    before = [dict(vars(layer)) for layer in model.layers]
    session = session_for(model)
    one_step(session, model)
    session.close()
    session.close()
    assert [dict(vars(layer)) for layer in model.layers] == before
    assert model.layers[1].forward is other
    assert "forward" not in vars(model.layers[0])


# What holds memory, as the run log tells it


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
