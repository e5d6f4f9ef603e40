"""Steps that open and end by themselves: what a loop that knows nothing of them is recorded as."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import of_which
from exact_memory import exact_memory
from harness import session_for
from models import assert_same_tensors, loss_of, make_model, make_tokens
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from pathlib import Path

    from models import Model
    from warm import Warm

LAYERS = 3


@pytest.fixture
def model() -> Model:
    return make_model(layers=LAYERS)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def micro_batch(model: nn.Module, number: int = 0) -> None:
    loss_of(model, make_tokens(number)).backward()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    micro_batch(model, number)
    optimizer.step()
    optimizer.zero_grad()


def scopes_of(session: tba.Session) -> list[int]:
    assert not any(record.skipped for record in session.records)
    return [record.scopes or 0 for record in session.records]


# The loops that people write


@pytest.mark.parametrize("zeroed", ["none at the end", "none before backward", "zeros at the end"])
def test_all_micro_batches_are_one_step(model: Model, zeroed: str) -> None:
    optimizer = adam(model)
    with session_for(model) as session:
        for _ in range(3):
            for number in range(4):
                loss = loss_of(model, make_tokens(number))
                if zeroed == "none before backward" and number == 0:
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            if zeroed != "none before backward":
                optimizer.zero_grad(set_to_none=zeroed == "none at the end")
        assert scopes_of(session) == [4 * LAYERS] * 3


def test_an_evaluation_is_no_part_of_a_step(model: Model) -> None:
    """Without a graph between micro-batches, and with one whose backward never comes."""
    optimizer = adam(model)
    with session_for(model) as session:
        micro_batch(model)
        with torch.no_grad():
            loss_of(model.eval(), make_tokens(1))
        model.train()
        one_step(model, optimizer)
        for _ in range(2):
            loss_of(model, make_tokens(0)).item()
            one_step(model, optimizer)
        loss_of(model, make_tokens(0)).item()
        assert scopes_of(session) == [2 * LAYERS, LAYERS, LAYERS]


def test_a_loop_that_updates_the_weights_itself(model: Model) -> None:
    with session_for(model) as session:
        for number in range(3):
            micro_batch(model, number)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 1e-3 * parameter.grad
                    parameter.grad = None
        assert scopes_of(session) == [LAYERS] * 3


# Optimizers


def test_a_step_ends_with_the_last_of_two_optimizers(model: Model) -> None:
    halves = list(model.layers.parameters()), [*model.embedding.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.SGD(half, lr=1e-3) for half in halves]
    optimizers[1].add_param_group({"params": list(model.norm.parameters())})
    with session_for(model) as session:
        for count in range(1, 3):
            micro_batch(model)
            optimizers[0].step()
            assert len(session.records) == count - 1
            optimizers[1].step()
            assert len(session.records) == count
            model.zero_grad()
        assert scopes_of(session) == [LAYERS] * 2


def test_an_optimizer_of_something_else_ends_no_step(model: Model) -> None:
    other = nn.Linear(2, 2)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    with session_for(model) as session:
        micro_batch(model)
        other(torch.ones(2)).sum().backward()
        stranger.step()
        assert session.records == []
        one_step(model, adam(model))
        assert scopes_of(session) == [2 * LAYERS]


def test_optimizers_that_step_within_backward(model: Model) -> None:
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1e-3) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with session_for(model, measure_memory=True) as session:
        for number in range(3):
            micro_batch(model, number)
        assert scopes_of(session) == [LAYERS] * 3
        for record in session.records:
            assert record.optimizer_seconds is not None
            assert 0 < record.optimizer_seconds < record.seconds + record.optimizer_seconds


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_step_that_a_gradient_scaler_skips(model: Model, *, skipped: int, set_to_none: bool) -> None:
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with session_for(model) as session:
        for number in range(4):
            loss = loss_of(model, make_tokens(number))
            if number == skipped:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
    found = [(record.scopes, record.skipped) for record in session.records]
    assert found == [(LAYERS, number == skipped) for number in range(4)]


def add_up_elsewhere(model: nn.Module, through: str) -> list[Any]:
    """Has hooks take each gradient as soon as it is made, as a data-parallel wrapper does."""
    kept = []
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

        def take(*_: object, of: Any = parameter) -> None:
            of.main_grad.add_(of.grad)
            of.grad = None

        if through == "parameters":
            parameter.register_post_accumulate_grad_hook(take)
        else:
            kept.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
            kept[-1].register_hook(take)
    return kept


@pytest.mark.parametrize("through", ["nodes", "parameters"])
def test_gradients_that_hooks_add_up_elsewhere_end_no_step(model: Model, through: str) -> None:
    plain = make_model(layers=LAYERS)
    theirs, ours = adam(plain), adam(model)
    nodes = add_up_elsewhere(model, through)
    with session_for(model) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            for number in range(4):
                micro_batch(plain, 4 * step + number)
                micro_batch(model, 4 * step + number)
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad  # type: ignore[attr-defined]
            theirs.step()
            ours.step()
            theirs.zero_grad()
            for parameter in model.parameters():
                parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)  # type: ignore[attr-defined]
        assert scopes_of(session) == [4 * LAYERS] * 3
    assert nodes or through == "parameters"
    assert_same_tensors(model.parameters(), plain.parameters())


def test_where_no_update_is_ever_seen_steps_have_to_be_told(model: Model) -> None:
    """Hooks as of ZeRO, which takes gradients away as soon as they are made and updates copies."""

    def update(parameter: Tensor) -> None:
        parameter.data.sub_(parameter.grad, alpha=1e-3)  # type: ignore[arg-type]
        parameter.grad = None

    with session_for(model) as session:  # before the hooks, or no gradient is seen at all
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for number in range(128):
            micro_batch(model, number)
        with pytest.warns(tba.NoEffectWarning, match="no optimizer updated the model's parameters"):
            micro_batch(model)
        found = session.records
        assert [(record.scopes, record.skipped) for record in found] == [(128 * LAYERS, True)]
        with session.step() as step:
            micro_batch(model)
        assert step.record is not None
        assert (step.record.scopes, step.record.skipped) == (LAYERS, False)


@pytest.mark.parametrize("explicit", [False, True])
def test_layers_that_backward_never_reaches_are_told(model: Model, *, explicit: bool) -> None:
    """As of a linear probe, with a head that trains."""
    head = nn.Linear(128, 8)
    whole = nn.Sequential(model, head)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)

    def step() -> None:
        with session.step() if explicit else contextlib.nullcontext():
            hidden = model(make_tokens(0)[:, :-1])
            head(hidden.detach()).sum().backward()
            del hidden
        optimizer.step()
        optimizer.zero_grad()

    with session_for(whole, layers=list(model.layers)) as session:
        for _ in range(2):  # one model may have steps of several kinds
            step()
        with pytest.warns(tba.NoEffectWarning, match="no backward pass reached an attached layer"):
            step()
        step()


@pytest.mark.parametrize("explicit", [False, True])
def test_layers_that_were_replaced_are_warned_of(model: Model, *, explicit: bool) -> None:
    with session_for(model) as session, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", tba.NoEffectWarning)
        one_step(model, adam(model), 0)
        model.layers = copy.deepcopy(model.layers)
        optimizer = adam(model)
        for number in range(3):
            with session.step() if explicit else contextlib.nullcontext():
                one_step(model, optimizer, number)
    (warning,) = [each for each in found if each.category is tba.NoEffectWarning]
    assert "attached layers are no longer in the model (layers.0, layers.1" in str(warning.message)


# Times


@pytest.mark.parametrize("way", ["plain", "closure", "explicit", "explicit, optimizer outside"])
def test_the_time_of_optimizers_is_told_apart(model: Model, way: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: time.sleep(0.2))  # nothing else here takes so long
    with session_for(model) as session:
        for number in range(2):
            if way == "plain":
                one_step(model, optimizer, number)
            elif way == "closure":
                optimizer.step(lambda: micro_batch(model) or 0.0)  # type: ignore[func-returns-value]
            else:
                with session.step():
                    micro_batch(model, number)
                    if way == "explicit":
                        optimizer.step()
                if way != "explicit":
                    optimizer.step()
            optimizer.zero_grad()
    first, second = session.records
    if "outside" in way:  # the next step tells it
        assert first.optimizer_seconds is None
    else:
        assert (first.optimizer_seconds or 0) >= 0.2
    assert (second.optimizer_seconds or 0) >= 0.2
    assert second.seconds_with_update == second.seconds + (second.optimizer_seconds or 0)


# Memory


@pytest.mark.parametrize("explicit", of_which([False, True], False))
def test_gradients_and_states_are_no_activations(*, explicit: bool) -> None:
    def trained(*, set_to_none: bool) -> list[tba.StepRecord]:
        optimizer = adam(wide := make_model(layers=6))
        for parameter in wide.parameters():
            parameter.grad = None if set_to_none else torch.zeros_like(parameter)
        with exact_memory(), session_for(wide, default="keep", measure_memory=True) as session:
            for _ in range(4):
                with session.step() if explicit else contextlib.nullcontext():
                    loss_of(wide, make_tokens(0)[:1, :9]).backward()
                    optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            return session.records

    nbytes = sum(parameter.nbytes for parameter in make_model(layers=6).parameters())
    none, zeros = trained(set_to_none=True), trained(set_to_none=False)
    assert [record.gradient_bytes for record in none] == [nbytes] * 4
    assert [record.gradient_bytes for record in zeros] == [0] * 4
    assert 2 * nbytes <= (none[0].state_bytes or 0) < 2.1 * nbytes
    assert [record.state_bytes for record in none[1:]] == [0] * 3
    peaks = [record.activation_peak_bytes or 0 for record in (none[0], none[-1], zeros[-1])]
    assert nbytes > 0.5 * min(peaks)  # or there would be nothing to see
    assert max(peaks) < 1.1 * min(peaks)


# What goes wrong


@pytest.mark.parametrize("where", ["forward", "head", "loss", "backward", "optimizer"])
def test_after_an_exception_the_next_step_is_a_whole_one(model: Model, where: str) -> None:
    optimizer = adam(model)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hooks = {
        "forward": model.layers[1].register_forward_pre_hook,
        "head": model.head.register_forward_pre_hook,  # after the layers, within the model's forward
        "backward": model.layers[1].qkv.weight.register_hook,
        "optimizer": optimizer.register_step_pre_hook,
    }
    with session_for(model) as session:
        handle = hooks[where](fail) if where in hooks else None
        with pytest.raises(ZeroDivisionError):
            if where == "loss":
                loss_of(model, make_tokens(0)).item() / 0
            one_step(model, optimizer)
        if handle is not None:
            handle.remove()
        optimizer.zero_grad()
        one_step(model, optimizer)
        assert scopes_of(session) == [LAYERS]


NEVER_CLOSED = """
import sys, warnings
warnings.simplefilter("error")
import torch
import tba_offload as tba

torch.set_num_threads(1)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = tba.OffloadConfig(min_tensor_bytes=0, budget=tba.BudgetConfig(in_flight_bytes=8192))
session = tba.attach(model, config, run_log=sys.argv[1], tokens=32)
for _ in range(2):
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model(torch.ones(32, 64)).sum().backward()
"""


def test_a_session_that_is_never_closed_has_a_whole_run_log(tmp_path: Path, python_with_torch: Warm) -> None:
    log = tmp_path / "run.jsonl"
    done = python_with_torch.run("-c", NEVER_CLOSED, str(log))
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()  # what the run has cost
    assert line.startswith("tba-offload: ")
    assert "x the prediction for 'keep', " in line
    read = read_run_log(log)
    assert [step.scopes for step in read.steps] == [3, 3, 3]
    assert [step.tokens for step in read.steps] == [32, 32, 32]
