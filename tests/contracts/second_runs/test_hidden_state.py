"""State that neither a layer's tensors nor its generators show: turned back for a second run, or told.

Each of these once trained wrongly, or ended training with an error that named no layer.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import importlib
import itertools
import os
import random
import threading
import warnings
from array import array
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import EVERYTHING, each_once, in_turn, of_which
from harness import KIB, session_for
from models import same_bits
from repeatable import (
    LAYERS,
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
from torch.overrides import TorchFunctionMode

from tba_offload.config.policy import Placement
from tba_offload.errors import RecomputationError, SavedTensorModifiedError, UnsupportedError
from tba_offload.layers.checkpoint import is_recomputation
from tba_offload.recompute.observation import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tba_offload.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
EVERYWHERE = [*RECOMPUTED, Placement.AUTO]
SMALL = 200 * KIB
"""A budget that holds only if layers are recomputed."""


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    warm_up()


# What is set around forward

VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0


class OfVariable(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return x * VARIABLE.get()


class OfLocal(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return x * LOCAL.scale


class OfMode(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        return output * 2 if function is torch.sin else output


@contextmanager
def other_variable() -> Iterator[None]:
    token = VARIABLE.set(1.25)
    yield
    VARIABLE.reset(token)


@contextmanager
def other_local() -> Iterator[None]:
    LOCAL.scale = 1.25
    yield
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


SET_AROUND = [(OfVariable, other_variable), (OfLocal, other_local), (OfMode, Doubling)]


@pytest.mark.parametrize(("case", "placement"), in_turn(SET_AROUND, EVERYWHERE))
def test_what_is_set_around_forward_is_set_for_the_second_run(
    case: tuple[type[Plain], Callable[[], Any]], placement: Placement
) -> None:
    kind, around = case

    def made() -> Net:
        return make(kind, lambda kind: AroundForward(kind, around))

    net = made()
    with session_of(net, placement) as session:
        assert_same(train(net, session), train(made()))


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


class Operating(Plain):
    """Holds what draws from the operating system, and does not draw."""

    def __init__(self) -> None:
        super().__init__()
        self.source = random.SystemRandom()


def test_random_numbers_of_the_operating_system_are_told_and_no_error() -> None:
    net = make(Operating)
    with session_for(net, default=Placement.RECOMPUTE) as session:
        with pytest.warns(RuntimeWarning, match="random numbers of the operating system"):
            assert_same(train(net, session), train(make(Operating)))


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


# What can


class Array(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.counts = array("d", [0.0])

    def noise(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return x * (1 + self.counts[0] / 8)


class Ordered(Plain):
    """Takes turns by an order that is not that of the names."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = OrderedDict((number, number / 8) for number in range(3))

    def noise(self, x: Tensor) -> Tensor:
        name, scale = self.turns.popitem(last=False)
        self.turns[name] = scale
        self.turns.move_to_end((name + 1) % 3)
        return x * (1 + scale)


class Forked(Plain):
    """Leaves the generator as it found it."""

    def noise(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return F.dropout(x, 0.3)


class Drawing(Net):
    """Draws after its layers ran."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(())


class Hooked(Plain):
    """Counts in what only a hook reaches."""

    def __init__(self) -> None:
        super().__init__()
        calls = [0]

        def scaled(_: object, __: object, output: Tensor) -> Tensor:
            calls[0] += 1
            return output * (1 + calls[0] / 8)

        self.first.register_forward_hook(scaled)


@pytest.mark.parametrize(("kind", "placement"), in_turn([Array, Ordered, Forked, Hooked], EVERYWHERE))
def test_state_is_turned_back_and_goes_on_as_without_a_second_run(
    kind: type[Plain], placement: Placement
) -> None:
    net = make(kind, Drawing)
    with session_of(net, placement) as session:
        assert_same(train(net, session, steps=8), train(make(kind, Drawing), steps=8))


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_an_ordered_dictionary_stays_one(placement: Placement) -> None:
    net = make(Ordered)
    with session_for(net, default=placement) as session:
        train(net, session, steps=2)
    for layer in net.layers:
        turns: Any = layer.turns
        assert list(turns) == list(OrderedDict.keys(turns)) == list(dict(turns.items()))
        turns.move_to_end(next(iter(turns)))
        assert len(list(reversed(turns))) == 3


class Meanwhile(Plain):
    """While it runs a second time, another thread draws."""

    def noise(self, x: Tensor) -> Tensor:
        if is_recomputation():
            thread = threading.Thread(target=lambda: DRAWN.put(np.random.random()))  # noqa: NPY002
            thread.start()
            thread.join()
        return F.dropout(x, 0.3)


DRAWN: SimpleQueue[float] = SimpleQueue()
"""No container, whose content would be turned back."""


def test_what_another_thread_draws_during_a_second_run_stays_drawn() -> None:
    net = make(Meanwhile)
    with session_for(net, default=Placement.RECOMPUTE) as session:
        train(net, session, steps=1)
    drawn = [DRAWN.get() for _ in range(DRAWN.qsize())]
    wanted = np.random.RandomState(1)
    assert drawn == [wanted.random_sample() for _ in drawn]
    assert len(drawn) > 1


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


TRAINER = """
import torch


class Trainer:
    def __init__(self):
        self.calls, self.small, self.large = 0, torch.zeros(8), torch.zeros(100_000)

    def begin(self):
        self.calls += 1
        self.small += 1
        self.large += 1
"""


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_methods_of_a_library_that_settings_hold_are_not_followed(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of Megatron-LM's optimizer and of its data parallelism, which change while a step goes on."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "library_that_trains.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(site)
    trainer = importlib.import_module("library_that_trains").Trainer()
    net = make(Flat)
    for layer in net.layers:
        layer.settings = {"begin": trainer.begin}
        layer.second.bias.register_post_accumulate_grad_hook(lambda _: trainer.begin())  # type: ignore[union-attr]
    with session_of(net, placement) as session:
        found = accumulate(net, session)
        assert session.report()[-1].recomputed_scopes > 0 or placement is Placement.AUTO
    assert trainer.calls == 5 * 3 * LAYERS
    assert bool((trainer.small == trainer.calls).all())
    assert_same(found, accumulate(make(Flat)))


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


def test_looking_at_saved_tensors_between_forward_and_backward_does_not_count() -> None:
    """Programs that draw a graph do."""
    net = make(Plain)
    with auto_session(net) as session:
        for number in range(6):
            with session.step():
                loss = net(batch(number)).pow(2).mean()
                waiting: list[Any] = [loss.grad_fn]
                for node in waiting:
                    waiting += [each for each, _ in node.next_functions if each is not None]
                    if node.name() == "GeluBackward0":
                        assert same_bits(node._saved_self, node._saved_self)
                    if number:
                        break  # where a layer is recomputed nothing is there yet
                del node, waiting
                loss.backward()
        assert any(record.recomputed_scopes for record in session.report())


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


class Wordy(Plain):
    """Puts out more objects than are looked through."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), [object() for _ in range(1500)]


class WordyNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_outputs_of_many_objects(placement: Placement) -> None:
    net = make(Wordy, WordyNet)
    with session_of(net, placement) as session:
        assert_same(train(net, session), train(make(Wordy, WordyNet)))


class Remembering(Plain):
    """Keeps its last output, as layers do that others look at."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Routing(Plain):
    """Keeps what nothing goes backward through."""

    def left(self, x: Tensor) -> Tensor:
        return F.gelu(self.first(x)).square()

    def forward(self, x: Tensor) -> Tensor:
        self.logits = self.left(x)
        return super().forward(x)


class RoutingView(Routing):
    def left(self, x: Tensor) -> Tensor:
        return super().left(x).view(2, -1)


class RoutingMuch(Routing):
    """Keeps it in containers and objects."""

    def forward(self, x: Tensor) -> Tensor:
        self.pair = (self.left(x), [self.left(x)])
        self.output = Output(self.left(x), {"left": [self.left(x)]})
        self.slotted = Slotted(self.left(x))
        LEFT["here"] = self.left(x)
        return super().forward(x)


class RoutingBuffer(Routing):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("total", self.left(x), persistent=False)
        return super().forward(x)


@dataclass(slots=True, frozen=True)
class Slotted:
    hidden: Tensor


@dataclass
class Output:
    hidden: Tensor
    others: dict[str, list[Tensor]]


LEFT: dict[str, Tensor] = {}


@pytest.mark.parametrize(
    ("kind", "placement", "goes_back"),
    each_once([Remembering, Routing, RoutingView, RoutingMuch, RoutingBuffer], EVERYWHERE, [True, False]),
)
def test_what_a_layer_keeps_of_its_graph_keeps_no_earlier_graph(
    kind: type[Plain], placement: Placement, goes_back: bool
) -> None:
    gc.collect()
    gc.freeze()  # what was there before is neither counted nor collected again
    net = make(kind)
    with session_of(net, placement) as session:
        if goes_back:
            assert_same(train(net, session, steps=12), train(make(kind), steps=12))
        else:
            for number in range(12):
                with session.step():
                    net(batch(number))
        assert count_observations() <= 2 * len(net.layers)
    LEFT.clear()


def count_observations() -> int:
    gc.collect()
    return sum(type(each) is Observation for each in gc.get_objects())


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


class Tallied(Plain):
    """Changes buffers, and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(2 * WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def noise(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(x, 0.3) * (1 + self.calls / 8)


@pytest.mark.filterwarnings("ignore:no plan could be made:RuntimeWarning")  # of passes side by side
@pytest.mark.parametrize("placement", of_which(EVERYWHERE, Placement.RECOMPUTE))
def test_two_threads_that_go_backward_leave_buffers_in_order(placement: Placement) -> None:
    def run(net: Net, session: Session | None, steps: int = 8) -> list[Tensor]:
        torch.manual_seed(1)
        found: list[Tensor] = []
        for number in range(steps):
            with session.step() if session is not None else nullcontext():
                inputs = [batch(2 * number + each).requires_grad_() for each in range(2)]
                losses = [net(x).pow(2).mean() for x in inputs]
                go_backward(losses, inputs)
            found += [x.grad for x in inputs]  # type: ignore[misc]
            found += [buffer.clone() for buffer in net.buffers()]
        return found

    expected = run(make(Tallied), None)
    for _ in range(4 if EVERYTHING else 2):
        net = make(Tallied)
        with session_of(net, placement) as session:
            assert_same(run(net, session), expected)


def go_backward(losses: list[Tensor], inputs: list[Tensor]) -> None:
    """Of each loss to its input, in a thread of its own."""
    errors: list[BaseException] = []

    def run(loss: Tensor, x: Tensor) -> None:
        try:
            loss.backward(inputs=[x])
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(losses, inputs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
