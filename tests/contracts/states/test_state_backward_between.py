"""What programs do between backward and the step, after updates in backward: no number differs silently."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from covering import EVERYTHING, full, of_which
from faults import inject
from models import same_bits
from optimizers import MAKERS, Training, assert_same, pair, plain_copy, policy
from torch import nn, optim
from torch.nn.modules.module import register_module_forward_pre_hook

import tba_offload as tba
from tba_offload.errors import SessionError, TransferError
from tba_offload.states.basis import Basis
from tba_offload.states.figures import Tally
from tba_offload.states.journal import Journal
from tba_offload.states.stream import Stream
from tba_offload.states.subgroup import SubGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import CodeType, FrameType

    Act = Callable[[Training], Any]


def offloaded(training: Training, directory: Path, gradients: str = "keep") -> tba.OptimizerStates:
    made = policy(directory)
    made["states"] |= {"when": "backward", "gradients": gradients}
    return tba.offload_optimizer(training.optimizer, made, model=training.model)


def both(found: Training, expected: Training, seed: int, act: Act) -> list[Any]:
    """A step of each with something between backward and the step; what that gives."""
    results = []
    for training in (found, expected):
        training.optimizer.zero_grad()
        training.backward(seed)
        results.append(act(training))
        training.optimizer.step()
    return results


# ---- gradients and settings that are changed -----------------------------------------------------


def with_other_signs(training: Training) -> None:
    training.model.layers[0].weight.grad[:, 1::2].neg_()  # type: ignore[union-attr, index]


def with_other_rows(training: Training) -> None:
    gradient: Any = training.model.layers[0].weight.grad
    gradient[[5, 6]] = gradient[[6, 5]]


def with_another_number_in_a_list(training: Training) -> None:
    training.optimizer.param_groups[0]["betas"][0] *= 0.9


@pytest.mark.parametrize("act", [with_other_signs, with_other_rows, with_another_number_in_a_list])
def test_what_is_changed_in_place_is_seen(act: Act, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    for training in (found, expected):
        training.optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    with offloaded(found, tmp_path) as states:
        for seed in range(3):
            both(found, expected, seed, act)
            assert_same(found, expected)
        assert states.records[-1].taken_back > 0


def test_any_element_of_a_parameter_that_data_changes_is_an_error(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        found.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        found.model.layers[0].weight.data[3, 5] = 0
        with pytest.raises(
            SessionError, match=r"^(parameter \d+|one of .*) was changed between backward and step"
        ):
            found.optimizer.step()


# ---- an optimizer that changes gradients ---------------------------------------------------------


def nesterov(parameters: Any, *, uses: bool = True) -> optim.Optimizer:
    """One whose update changes gradients, as on GPUs by default."""
    return optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=uses, foreach=True)


@pytest.mark.parametrize("most", [1e9, 1e-3])
def test_gradients_that_an_update_changes_are_those_of_backward_until_then(
    most: float, tmp_path: Path
) -> None:
    found, expected = pair(nesterov)
    with offloaded(found, tmp_path):
        for seed in range(4):
            norms = both(
                found, expected, seed, lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), most)
            )
            assert norms[0] == norms[1]
            assert_same(found, expected)


def test_gradients_that_are_freed_may_be_changed(tmp_path: Path) -> None:
    found, expected = pair(nesterov)
    with offloaded(found, tmp_path, "free") as states:
        for seed in range(3):
            found.step(seed)
            expected.step(seed)
            assert_same(found, expected)
        assert states.records[-1].in_backward > 0


def test_an_optimizer_that_begins_to_change_gradients_is_an_error_once(tmp_path: Path) -> None:
    found, expected = pair(lambda parameters: nesterov(parameters, uses=False))
    with offloaded(found, tmp_path):
        found.step(0)
        expected.step(0)
        for training in (found, expected):
            training.optimizer.param_groups[0]["nesterov"] = True
        found.optimizer.zero_grad()
        with pytest.raises(SessionError, match="changes gradients with its present settings"):
            found.backward(1)
        for seed in range(1, 3):
            found.step(seed)
            expected.step(seed)
            assert_same(found, expected)


@pytest.mark.parametrize("of", ["all", "one"])
def test_freed_gradients_that_are_cleared_are_an_error(of: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, "free"):
        found.step(0)
        expected.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        if of == "all":
            found.model.zero_grad()
        found.model.head.weight.grad = None
        with pytest.raises(SessionError, match="other gradients came after gradients were used"):
            found.optimizer.step()
        found.optimizer.zero_grad()
        assert_same(found, expected)


def test_attributes_that_are_set_before_the_step_stay_so(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    optimizer: Any = found.optimizer
    optimizer.number = optimizer.removed = 0
    with offloaded(found, tmp_path) as states:
        for seed in range(3):
            optimizer.zero_grad()
            found.backward(seed)
            optimizer.number = seed
            if seed == 2:
                del optimizer.removed
            optimizer.step()
            assert optimizer.number == seed
        assert states.records[-1].in_backward > 0
        assert not hasattr(optimizer, "removed")


def test_a_model_that_gets_another_data_type(tmp_path: Path) -> None:
    """Its old values take twice the bytes."""
    found, expected = pair("sgd")
    with offloaded(found, tmp_path) as states:
        for seed in range(5):
            for training in (found, expected):
                if seed == 2:
                    training.model.double()
                    training.dtype = torch.float64
                clipped(training, seed, LOWERED if seed == 4 else NO_LIMIT)
            assert_same(found, expected)
        assert states.records[-1].taken_back > 0


# ---- what reads parameters and states ------------------------------------------------------------


def forward_of_a_part(training: Training) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = training.model.layers[3](torch.ones(2, 48))
    return found


def checkpoint_of_a_part(training: Training) -> torch.Tensor:
    return training.model.layers[3].state_dict()["weight"].clone()


@pytest.mark.parametrize("act", [forward_of_a_part, checkpoint_of_a_part])
def test_a_part_of_the_model_is_as_before_the_step(act: Act, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path):
        for seed in range(3):
            assert same_bits(*both(found, expected, seed, act))
            assert_same(found, expected)


class Chain(nn.Module):
    """Layers that can be compiled without a break."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("way", ["model.compile", "torch.compile"])
def test_a_forward_of_a_compiled_model_is_seen(way: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    plain = Chain()
    compiled = copy.deepcopy(plain)
    if way == "model.compile":
        compiled.compile(backend="aot_eager")
    call: Any = torch.compile(compiled, backend="aot_eager") if way == "torch.compile" else compiled
    optimizers = [optim.AdamW(model.parameters(), lr=0.1) for model in (compiled, plain)]
    made = policy(tmp_path)
    made["states"] |= {"when": "backward"}
    with tba.offload_optimizer(optimizers[0], made, model=compiled) as states:
        for _ in range(3):
            outputs = []
            for model, optimizer in zip((call, plain), optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(3, 48)).square().sum().backward()
                with torch.no_grad():
                    outputs.append(model(torch.ones(1, 48)))
                optimizer.step()
            assert same_bits(*outputs)
        assert states.records[-1].taken_back > 0


def test_states_that_are_read_are_those_before_the_step(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path) as states:
        found.step(0)
        expected.step(0)
        for training in (found, expected):
            training.optimizer.zero_grad()
            training.backward(1)
        plain = expected.optimizer.state[expected.model.head.weight]
        assert same_bits(states.read(found.model.head.weight)["exp_avg"], plain["exp_avg"])
        found.optimizer.step()
        expected.optimizer.step()
        assert_same(found, expected)


def test_states_that_are_set_and_taken_before_the_step_are_an_error(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path) as states:
        found.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        weight = found.model.head.weight
        found.optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)
        with pytest.raises(SessionError, match="a state was changed between backward and step"):
            states.take(weight)


@pytest.mark.parametrize("gradients", ["keep", "free"])
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_wait_for_the_step(
    factor: float, gradients: str, tmp_path: Path
) -> None:
    """So that what reads parameters after a step that a scaler leaves out does not see them updated.

    Gradients that are freed cannot wait: there it is ``zero_grad`` that takes the update back.
    """
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, gradients=gradients):
        found.step(0)
        expected.step(0)
        found.optimizer.zero_grad()
        weight = found.model.layers[0].weight  # of which the gradient comes late
        handle = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([7]), factor))
        found.backward(1)
        handle.remove()
        if gradients == "free":
            found.optimizer.zero_grad()
        pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
        assert all(same_bits(a.detach(), b.detach()) for a, b in pairs)


@pytest.mark.parametrize(
    "name", of_which(MAKERS, "adamw", "adamw-fused", "sgd-momentum", "adagrad", "adafactor")
)
def test_a_graph_that_is_kept_can_be_used_again(name: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    with offloaded(found, tmp_path):
        for seed in range(4):
            for training in (found, expected):
                training.optimizer.zero_grad()
                loss = training.loss(seed)
                loss.backward(retain_graph=seed > 1)
                if seed > 1:
                    (loss * loss).backward()
                training.optimizer.step()
            assert_same(found, expected)


# ---- what is left --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_pending", [False, True])
def test_a_closed_model_is_freed_at_once(is_pending: bool, tmp_path: Path) -> None:
    found, _ = pair("adamw")
    states = offloaded(found, tmp_path)
    found.step(0)
    if is_pending:
        found.optimizer.zero_grad()
        found.backward(1)
    states.close()
    handle = register_module_forward_pre_hook(lambda *_: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    assert not hooks
    left = [weakref.ref(each) for each in (found.optimizer, found.model, found.model.head.weight, states)]
    gc.collect()
    gc.disable()
    try:
        del found, states
        assert [reference() for reference in left] == [None] * 4
    finally:
        gc.enable()


def test_a_zero_grad_without_arguments_is_called_without_any(tmp_path: Path) -> None:
    class Own(optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override] # as apex's FusedAdam has it
            super().zero_grad()

    found, expected = pair(lambda parameters: Own(parameters, lr=0.1, momentum=0.9))
    made = policy(tmp_path)
    made["states"] |= {"trust": True}
    with tba.offload_optimizer(found.optimizer, made):
        for seed in range(2):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)


def test_parameters_that_cannot_be_read_back_come_with_a_checkpoint(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path) as states:
        for seed in range(2):
            found.step(seed)
            expected.step(seed)
        found.optimizer.zero_grad()
        found.backward(2)
        with inject("fail-read"), pytest.raises(TransferError):
            found.optimizer.zero_grad()
        with pytest.raises(SessionError, match="load a checkpoint"):
            found.step(2)
        found.model.load_state_dict(expected.model.state_dict())
        found.optimizer.load_state_dict(plain_copy(expected.optimizer.state_dict()))
        for seed in range(3, 6):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)
        assert states.records[-1].in_backward > 0


# ---- interrupts ----------------------------------------------------------------------------------


class Interrupt:
    """Raises ``KeyboardInterrupt`` before a line of a function, at the n-th time that one is to be run."""

    def __init__(self, code: CodeType, n: int) -> None:
        self._code = code
        self._left = n
        self.has_struck = False

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, value: object) -> Any:
        return self._line if frame.f_code is self._code else None

    def _line(self, frame: FrameType, event: str, value: object) -> Any:
        if event == "line":
            self._left -= 1
            if self._left == -1:
                self.has_struck = True
                raise KeyboardInterrupt
        return self._line


INTERRUPTED: dict[str, Any] = {
    "Basis.note": Basis.note,
    "Journal.accept": Journal.accept,
    "Journal.note": Journal.note,
    "Journal.take_back": Journal.take_back,
    "Stream.take_back": Stream.take_back,
    "Stream.update_in_backward": Stream.update_in_backward,
    "SubGroup.begin_version": SubGroup.begin_version,
    "SubGroup.end_version": SubGroup.end_version,
    "SubGroup.take_back": SubGroup.take_back,
    "Tally.counted": Tally.counted.__wrapped__,  # type: ignore[attr-defined]
}


def clipped(training: Training, seed: int, most: float) -> None:
    training.optimizer.zero_grad()
    training.backward(seed)
    nn.utils.clip_grad_norm_(training.model.parameters(), most)
    training.optimizer.step()


NO_LIMIT = 1e9
LOWERED = 1e-3
"""Norms to clip gradients to: to the second one all are, and what was updated is taken back."""


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param(name, most, marks=() if ("take_back" in name) == (most == LOWERED) else full)
        for name in INTERRUPTED
        for most in (NO_LIMIT, LOWERED)
    ],
)
def test_an_interrupt_leaves_all_or_nothing(name: str, most: float, tmp_path: Path) -> None:
    """Of a step that is made as it was begun in backward, and of one that is not."""
    for n in count(0, 13 if EVERYTHING else 29):
        found, expected = pair("adamw")
        with offloaded(found, tmp_path):
            found.step(0)
            expected.step(0)
            without = copy.deepcopy(expected)
            clipped(expected, 1, most)
            interrupt = Interrupt(INTERRUPTED[name].__code__, n)
            with interrupt, suppress(KeyboardInterrupt):
                clipped(found, 1, most)
            if not interrupt.has_struck:
                return
            found.optimizer.zero_grad()
            heads = (training.model.head.weight.detach() for training in (found, expected))
            plain = expected if same_bits(*heads) else without
            assert_same(found, plain)
            found.step(2)
            plain.step(2)
            assert_same(found, plain)
