"""State that neither a layer's tensors nor its generators show: turned back for a second run, or told.

Each of these once trained wrongly, or ended training with an error that named no layer.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import warnings
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import in_turn
from harness import KIB, session_for
from models import same_bits
from repeatable import (
    RECOMPUTED,
    WIDTH,
    Net,
    Plain,
    assert_same,
    auto_session,
    batch,
    failure,
    make,
    seed,
    session_of,
    train,
    warm_up,
)
from torch import Tensor

from tba_offload.config.policy import Placement
from tba_offload.errors import RecomputationError, SavedTensorModifiedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
EVERYWHERE = [*RECOMPUTED, Placement.AUTO]
SMALL = 200 * KIB
"""A budget that holds only if layers are recomputed."""


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    warm_up()


# What is set around forward

LOCAL = threading.local()
LOCAL.scale = 1.0


class AroundForward(Net):
    """From its third forward on, something is set around forward that is not set around backward."""

    def __init__(self, kind: type[Plain], around: Callable[[], Any]) -> None:
        super().__init__(kind)
        self.around, self.calls = around, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with self.around() if self.calls > 2 else nullcontext():
            return super().forward(x)


class OfStranger(Plain):
    """Reads state that nothing of the layer reaches."""

    def noise(self, x: Tensor) -> Tensor:
        return x * warnings.__dict__.get("_scale_of_this_test", 1.0)


@contextmanager
def other_scale() -> Iterator[None]:
    with mock.patch.object(warnings, "_scale_of_this_test", 1.25, create=True):
        yield


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_state_out_of_reach_is_noticed_in_the_step_in_which_it_differs(
    placement: Placement,
) -> None:
    net = make(OfStranger, lambda kind: AroundForward(kind, other_scale))
    with session_for(net, default=placement) as session:
        train(net, session, steps=2)
        assert "other numbers" in failure(RecomputationError, lambda: train(net, session, steps=1))


class OfStrangerAtTheEnd(OfStranger):
    """Of what it saves the state changes the last tensor only."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.noise(self.second(F.gelu(self.first(x)))))


@pytest.mark.parametrize("placement", RECOMPUTED)
@pytest.mark.parametrize("layer", [1, 2])
def test_state_that_changes_one_saved_tensor_is_noticed_within_a_step(
    layer: int,
    placement: Placement,
) -> None:
    net = make(Plain, lambda kind: AroundForward(kind, other_scale))
    assert len(net.layers) % 2 == 0
    net.layers[layer] = OfStrangerAtTheEnd()
    with session_for(net, default=placement) as session:
        train(net, session, steps=2)
        assert "other numbers" in failure(RecomputationError, lambda: train(net, session, steps=1))


# What cannot be turned back


class Counting(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: Any = itertools.count()

    def noise(self, x: Tensor) -> Tensor:
        return x * (1 + next(self.numbers) / 8)


class Generating(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number / 4 for number in range(1000))


@pytest.mark.parametrize("kind", [Counting, Generating])
def test_the_planner_does_not_even_try_what_no_second_run_can_turn_back(
    kind: type[Plain], caplog: pytest.LogCaptureFixture
) -> None:
    net = make(kind)
    with auto_session(net) as session, caplog.at_level("INFO"):
        assert_same(train(net, session), train(make(kind)))
        assert {record.recomputed_scopes for record in session.report()} == {0}
    assert any("an iterator or generator" in message for message in caplog.messages)


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_recomputing_it_all_the_same_is_warned_of_and_noticed(placement: Placement) -> None:
    net = make(Counting)
    with session_for(net, default=placement) as session:
        with pytest.warns(RuntimeWarning, match="an iterator or generator"):
            assert "other numbers" in failure(RecomputationError, lambda: train(net, session))


class LargeArray(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = np.zeros(64 << 10)

    def noise(self, x: Tensor) -> Tensor:
        self.table += 1
        return x * float(1 + self.table[0] / 8)


class LargeBuffer(Plain):
    """Changes its buffer past autograd's counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(128 << 10))

    def noise(self, x: Tensor) -> Tensor:
        self.table.data += 1
        return x * (1 + self.table[0] / 8)


@pytest.mark.parametrize("kind", [LargeArray, LargeBuffer])
def test_large_state_that_changes_is_refused_by_name_and_left_alone_by_the_planner(kind: type[Plain]) -> None:
    net = make(kind)
    with session_for(net, default=Placement.RECOMPUTE) as session:
        assert "would change it twice" in failure(UnsupportedError, lambda: train(net, session))
    net = make(kind)
    with auto_session(net) as session:
        assert_same(train(net, session), train(make(kind)))
        assert {record.recomputed_scopes for record in session.report()} == {0}


# What trains the layer


class Flat(Plain):
    """Reaches a buffer that the gradients of all layers lie in, and the model."""

    def noise(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


class FlatNet(Net):
    """Keeps all gradients in one buffer, as data parallelism does."""

    padding = 0

    def __init__(self, kind: type[Plain]) -> None:
        super().__init__(kind)
        parameters = list(self.parameters())
        sizes = [self.padding, *map(Tensor.numel, parameters)]
        flat = torch.zeros(sum(sizes))
        for parameter, part in zip(parameters, flat.split(sizes)[1:], strict=True):
            parameter.grad = part.view_as(parameter)
        for layer in self.layers:
            layer.__dict__ |= {"gradients": flat, "model": self}


class LargeFlatNet(FlatNet):
    """The buffer is larger than what is copied for a second run."""

    padding = 100_000


def accumulate(net: Net, session: Session | None = None) -> list[Tensor]:
    """Losses and gradients of steps of three micro-batches."""
    found = []
    seed()
    for number in range(5):
        with session.step() if session is not None else nullcontext():
            for part in range(3):
                loss = net(batch(3 * number + part)).pow(2).mean()
                loss.backward()
                found.append(loss.detach())
        found += [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]
        net.zero_grad(set_to_none=False)
    return found


@pytest.mark.parametrize(("net", "placement"), in_turn([FlatNet, LargeFlatNet], EVERYWHERE))
def test_gradients_that_a_layer_reaches_are_left_alone(
    net: Callable[[type[Plain]], Net], placement: Placement
) -> None:
    trained = make(Flat, net)
    with session_of(trained, placement) as session:
        found = accumulate(trained, session)
        # The planner decides by the times that it has measured, and may keep on a busy machine.
        assert session.report()[-1].recomputed_scopes > 0 or placement is Placement.AUTO
    assert_same(found, accumulate(make(Flat, net)))


# Parameters


class Square(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2 * WIDTH, 2 * WIDTH) / 8)

    def noise(self, x: Tensor) -> Tensor:
        return x @ self.weight


def call_steps(net: Net, session: Session | None, change: Callable[[str, Tensor], Tensor]) -> list[Tensor]:
    """Losses and gradients where ``functional_call`` gives the layers other parameters from step 4 on."""
    found = []
    for number in range(8):
        given = {name: change(name, p) if number > 3 else p for name, p in net.named_parameters()}
        with session.step() if session is not None else nullcontext():
            loss = torch.func.functional_call(net, given, (batch(number),)).pow(2).mean()
            loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        net.zero_grad()
    return found


def transposed(_: str, parameter: Tensor) -> Tensor:
    return parameter.t() if parameter.dim() == 2 and len(set(parameter.shape)) == 1 else parameter


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_the_transpose_of_a_square_weight_is_another_parameter(placement: Placement) -> None:
    net = make(Square)
    with session_of(net, placement) as session:
        found = call_steps(net, session, transposed)
    assert_same(found, call_steps(make(Square), None, transposed))


def bias_detached(name: str, parameter: Tensor) -> Tensor:
    return parameter.detach() if name.endswith("first.bias") else parameter


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_parameters_that_are_detached_for_a_call(placement: Placement) -> None:
    net = make(Plain)
    with session_of(net, placement) as session:
        found = call_steps(net, session, bias_detached)
    assert_same(found, call_steps(make(Plain), None, bias_detached))


class Scaling(Plain):
    """Saves its small buffer for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0, 1, 2 * WIDTH))

    def noise(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_a_small_buffer_that_is_changed_before_backward_has_the_values_of_forward(
    placement: Placement,
) -> None:
    net, plain = make(Scaling), make(Scaling)
    with session_for(net, default=placement) as session, session.step():
        loss = net(batch(0)).pow(2).mean()
        for layer in net.layers:
            layer.scale.mul_(3)
        loss.backward()
    plain(batch(0)).pow(2).mean().backward()
    for found, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert same_bits(found.grad, wanted.grad)
    assert all(same_bits(layer.scale, 3 * torch.linspace(0, 1, 2 * WIDTH)) for layer in net.layers)


# A layer that stops being one that can be repeated


class Appending(Plain):
    """Appends to its argument from some step on."""

    def forward(self, x: Tensor, memory: list[Tensor] | None = None) -> Tensor:
        if memory is not None:
            memory.append(x.detach().mean())
        return super().forward(x)


class Late(Net):
    """Begins to give its layers a list when it is told to."""

    gives = False

    def forward(self, x: Tensor) -> Tensor:
        more = {"memory": []} if self.gives else {}
        for layer in self.layers:
            x = layer(x, **more)
        return x


def train_until_recomputed(net: Net, session: Session) -> None:
    """Until layers are going to be recomputed in the next step."""
    for _ in range(30):
        train(net, session, steps=1)
        if any(placement.recomputes for placement in session.plan.placements):
            return
    pytest.fail("the planner recomputes nothing")


def test_the_planner_takes_its_choice_back_when_a_layer_changes_its_ways() -> None:
    net = make(Appending, Late)
    with auto_session(net, activation=SMALL) as session:
        train_until_recomputed(net, session)
        net.gives = True
        message = failure(UnsupportedError, lambda: train(net, session, steps=1))
        assert "repeat the step" in message
        train(net, session, steps=8)
        assert {record.recomputed_scopes for record in session.report()[-8:]} == {0}


def test_a_bias_that_is_changed_before_backward_is_an_error_once() -> None:
    net = make(Plain)
    with auto_session(net, activation=SMALL) as session:
        train_until_recomputed(net, session)

        def step() -> None:
            with session.step():
                loss = net(batch(0)).pow(2).mean()
                with torch.no_grad():
                    for layer in net.layers:
                        layer.first.bias.add_(0.0)
                loss.backward()

        assert "place the layer keep or offload" in failure(SavedTensorModifiedError, step)
        for _ in range(8):
            step()


# What layers do inside


class Penalized(Plain):
    """Goes backward through a part of itself."""

    def noise(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.gelu(inside).pow(2).sum(), inside)
        return x + slope


class Catching(Plain):
    """Catches all exceptions and goes another way, as layers with kernels of their own do."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        try:
            return torch.sin(x)
        except Exception:  # noqa: BLE001 - that is the point
            return torch.cos(x) * torch.tan(x)


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_layers_that_catch_exceptions(placement: Placement) -> None:
    net = make(Catching)
    with session_of(net, placement) as session:
        assert_same(train(net, session), train(make(Catching)))


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_layers_that_go_backward_inside_are_refused_by_name(placement: Placement) -> None:
    net = make(Penalized)
    with session_for(net, default=placement) as session:
        message = failure(RecomputationError, lambda: train(net, session))
    assert message.startswith("layer 3 (layers.3) cannot be recomputed")
    assert "there is no backward through a second run" in message


def test_layers_that_go_backward_inside_are_left_alone_by_the_planner() -> None:
    net = make(Penalized)
    with auto_session(net) as session:
        assert_same(train(net, session), train(make(Penalized)))


class _Doubled(torch.autograd.Function):
    """Its backward asks for what it has saved one after the other, and so for all of that each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0]
        factor = ctx.saved_tensors[1]
        return gradient * factor, gradient * x


class AskingTwice(Plain):
    def noise(self, x: Tensor) -> Tensor:
        doubled: Tensor = _Doubled.apply(x, torch.sin(x))  # type: ignore[no-untyped-call]
        return doubled


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_layers_that_ask_twice_for_what_they_saved_are_refused_by_name(placement: Placement) -> None:
    net = make(AskingTwice)
    with session_for(net, default=placement) as session:
        message = failure(RecomputationError, lambda: train(net, session))
    assert message.startswith("layer 3 (layers.3)")
    assert "was already unpacked once" in message


def test_layers_that_ask_twice_for_what_they_saved_are_left_alone_by_the_planner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = make(AskingTwice)
    with caplog.at_level("INFO"), auto_session(net) as session:
        assert_same(train(net, session), train(make(AskingTwice)))
        assert not any(record.recomputed_scopes for record in session.report())
    assert "its backward asks for a saved tensor twice" in caplog.text


_forbid = torch.autograd.graph.disable_saved_tensors_hooks
"""As a program has it that imports the function itself."""


class Forbidding(Plain):
    """Forbids hooks, as transforms do, with words of its own."""

    def noise(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("none of them here"):
            return torch.sin(x)


class ForbiddingByName(Plain):
    def noise(self, x: Tensor) -> Tensor:
        with _forbid("none of them here"):
            return torch.sin(x)


@pytest.mark.parametrize("kind", [Forbidding, ForbiddingByName])
@pytest.mark.parametrize("placement", RECOMPUTED)
def test_layers_that_forbid_hooks_are_refused_by_name(placement: Placement, kind: type[Plain]) -> None:
    net = make(kind)
    with session_for(net, default=placement) as session:
        message = failure(UnsupportedError, lambda: train(net, session))
    assert (
        "layer 0 (layers.0) cannot be recomputed: it forbids saved-tensor hooks (none of them here)"
        in message
    )


@pytest.mark.parametrize("placement", [Placement.OFFLOAD, Placement.AUTO])
def test_layers_that_forbid_hooks_train_on_where_nothing_is_recomputed(placement: Placement) -> None:
    net = make(Forbidding)
    with session_of(net, placement) as session:
        assert_same(train(net, session), train(make(Forbidding)))


class Recurrent(Plain):
    """Its kernel saves a workspace of which it fills a part."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTM(2 * WIDTH, 2 * WIDTH, batch_first=True)

    def noise(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(0))[0].squeeze(0)


class Workspace(torch.autograd.Function):
    """Saves memory that it does not fill: other numbers in each run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, torch.randint(0, 1 << 30, (512,), generator=SCRATCH))
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cos(ctx.saved_tensors[0]) * gradient


SCRATCH = torch.Generator()


class Unfilled(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return scratched(x)


def scratched(x: Tensor, run: Any = Workspace.apply) -> Tensor:
    return run(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "placement"), in_turn([Recurrent, Unfilled], EVERYWHERE))
def test_memory_that_a_kernel_saves_unfilled_is_no_difference(
    kind: type[Plain], placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randint", functools.partial(hidden_randint, torch.randint))
    net = make(kind)
    with session_of(net, placement) as session:
        assert_same(train(net, session, steps=8), train(make(kind), steps=8))


def hidden_randint(
    draw: Callable[..., Tensor], *arguments: Any, generator: Any = None, **options: Any
) -> Tensor:
    """Whatever turns generators back: other numbers each time."""
    bits = int.from_bytes(os.urandom(4), "big")
    return draw(*arguments, generator=torch.Generator().manual_seed(bits), **options)
