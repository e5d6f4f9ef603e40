"""A recomputed layer gives the bits of its first run, or an error names it; the planner chooses no other."""

from __future__ import annotations

import gc
import os
import random
import re
from collections import UserDict, deque
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import in_turn
from harness import assert_all_given_back, session_for
from models import same_bits
from repeatable import (
    LAYERS,
    RECOMPUTED,
    ROWS,
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
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tba_offload.config.policy import Placement
from tba_offload.errors import RecomputationError, SavedTensorModifiedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.session import Session

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
EVERYWHERE = [*RECOMPUTED, Placement.AUTO]


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    warm_up()


# Layers that can be repeated


class Dropping(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return F.dropout(F.rrelu(x, training=True), 0.3)


class Normed(Plain):
    """Changes small buffers in place; no version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2 * WIDTH)


class Spectral(Plain):
    """Changes the vectors by which it estimates the norm of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.utils.parametrizations.spectral_norm(self.first)


class Lazy(Plain):
    """Makes a table when it first needs it."""

    def noise(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0, 1, 2 * WIDTH))
        return x * self.table


class Averaging(Plain):
    """Replaces its buffer by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2 * WIDTH))

    def noise(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x + self.average


class Numbered(Plain):
    """Counts its runs in an attribute, and keeps a loss for the model there."""

    runs = 0

    def noise(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.auxiliary = x.detach().square().mean()
        return x


class Drawing(Plain):
    """Draws from the generators that Python and NumPy share among all."""

    def noise(self, x: Tensor) -> Tensor:
        return x * random.random() * float(np.random.random())  # noqa: NPY002 - as users do


class Remembering(Plain):
    """Appends to what it is given in a dict, and reads what other layers have appended."""

    remembers: Any = dict

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        if memory is None:
            return super().forward(x)
        memory.setdefault("first", self.first(x))
        memory["seen"].append(self.first(x))
        return x + self.second(F.gelu(torch.stack(memory["seen"]).sum(0) + memory["first"]))


class RememberingElsewhere(Remembering):
    """As layers of Gemma share keys and values."""

    remembers = UserDict


class Recurrent(Plain):
    """Its kernel saves a workspace of which it fills a part."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(2 * WIDTH, 2 * WIDTH, batch_first=True)

    def noise(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(0))[0].squeeze(0)


class Penalized(Plain):
    """Goes backward through a part of itself."""

    def noise(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.gelu(inside).pow(2).sum(), inside)
        return x + slope


class Differentiating(Plain):
    """Records the graph of a gradient, which saves a sum's gradient: one element, expanded."""

    def noise(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(torch.tanh(x).square().sum(), x, create_graph=True)
        return x + slope


class Catching(Plain):
    """Catches all exceptions and goes another way, as layers with kernels of their own do."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        try:
            return torch.sin(x)
        except Exception:  # noqa: BLE001 - that is the point
            return torch.cos(x) * torch.tan(x)


class Attending(Plain):
    def noise(self, x: Tensor) -> Tensor:
        heads = x.view(1, 4, ROWS, -1)
        return F.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)


REPEATED = [
    *(Plain, Dropping, Normed, Spectral, Lazy, Averaging, Numbered, Drawing, Remembering, Recurrent),
    RememberingElsewhere,
    *(Penalized, Differentiating, Catching, Attending),
]


@pytest.mark.parametrize(("kind", "placement"), in_turn(REPEATED, EVERYWHERE))
def test_a_second_run_gives_the_bits_of_the_first_and_leaves_no_trace(
    kind: type[Plain], placement: Placement
) -> None:
    plain, net = make(kind), make(kind)
    expected = train(plain)
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    with session_of(net, placement) as session:
        assert_same(train(net, session), expected)
        records = session.report()
        assert_all_given_back(session)
    assert (random.getstate(), repr(np.random.get_state())) == states[:2]  # noqa: NPY002
    assert same_bits(torch.get_rng_state(), states[2])
    if placement is not Placement.AUTO:
        assert {record.recomputed_scopes for record in records} == {LAYERS}
        assert [getattr(layer, "runs", 0) for layer in net.layers] == [
            getattr(layer, "runs", 0) for layer in plain.layers
        ]


# Layers that cannot, as their first run shows


class Tallying(Plain):
    """Adds to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2 * WIDTH)

    def noise(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean()
        return x + self.total[0]


class Large(Plain):
    """Has a buffer that is too large to be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1 << 19))

    def noise(self, x: Tensor) -> Tensor:
        self.table.data.add_(1)  # which no version tells
        return x + self.table[0]


class Schedule:
    calls = 0

    def call(self) -> int:
        self.calls += 1
        return self.calls


class Holding(Plain):
    """Has state in an object that it holds."""

    holds: Callable[[], Any]
    changes: Callable[[Any], float]

    def __init__(self) -> None:
        super().__init__()
        self.held = type(self).holds()

    def noise(self, x: Tensor) -> Tensor:
        return x * (1 + float(type(self).changes(self.held)) / 8)


def holding(name: str, holds: Callable[[], Any], changes: Callable[[Any], Any]) -> type[Plain]:
    return type(name, (Holding,), {"holds": staticmethod(holds), "changes": staticmethod(changes)})


def length_of(items: Any) -> int:
    items.append(0)
    return len(items)


def norm_of(modules: list[nn.Module]) -> float:
    modules[0](torch.ones(2, 4))
    return float(modules[0].running_mean[0])  # type: ignore[index]


def first_of(array: Any) -> float:
    array += 1
    return float(array[0])


HELD = [
    holding("list", list, length_of),
    holding("object", Schedule, Schedule.call),
    holding("array", lambda: np.zeros(1 << 16), first_of),
    holding("module", lambda: [nn.BatchNorm1d(4)], norm_of),
    holding("Generator", lambda: [np.random.default_rng(3)], lambda held: held[0].random()),
    holding(
        "torch.Generator",
        lambda: torch.Generator().manual_seed(3),
        lambda held: torch.rand((), generator=held),
    ),
]
CHANGING = {Tallying: "self.total", Large: "self.table"}


class Cache:
    """A cache of a kind that nobody has thought of."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: deque[Tensor] = deque()


class Given(Plain):
    """Changes its argument, of whatever kind."""

    given: Callable[[], Any]
    remembers: Any = dict

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        if isinstance(memory, dict):
            memory = memory.setdefault("given", type(self).given())
        if isinstance(memory, Tensor):
            memory.add_(1)
            return super().forward(x) + memory.sum().detach()
        if memory is not None:
            memory.items.append(self.first(x))
        return super().forward(x)


class GivenNet(Net):
    given: Callable[[], Any] = Cache

    def forward(self, x: Tensor) -> Tensor:
        given = type(self).given()
        for layer in self.layers:
            x = layer(x, given)
        return x


class TensorNet(GivenNet):
    given = staticmethod(lambda: torch.zeros(3))


class Scripted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Tanh()))


class Transforming(Plain):
    """Uses a transform, under which hooks are forbidden."""

    def noise(self, x: Tensor) -> Tensor:
        return torch.func.vjp(torch.sin, x)[0]


REFUSED: list[tuple[type[Plain], type[Net], str]] = [
    *((kind, Net, named) for kind, named in CHANGING.items()),
    *((kind, Net, "self.held") for kind in HELD),
    *((Given, net, "its argument 1") for net in (GivenNet, TensorNet)),
    (Scripted, Net, "TorchScript"),
    (Transforming, Net, "forbids saved-tensor hooks"),
]


@pytest.mark.parametrize(("case", "placement"), in_turn(REFUSED, RECOMPUTED))
def test_a_layer_that_changes_what_a_second_run_would_change_again_is_refused_at_its_first_step(
    case: tuple[type[Plain], type[Net], str], placement: Placement
) -> None:
    kind, model, named = case
    net = make(kind, model)
    with session_for(net, default=placement) as session:
        message = failure(UnsupportedError, lambda: train(net, session))
        assert re.match(rf"layer 0 \(layers.0\) cannot be recomputed: .*{named}", message)
        assert message.endswith("Place it keep or offload.")
        gc.collect()  # frames of the error know the graph
        assert_all_given_back(session)


@pytest.mark.parametrize(
    ("kind", "model", "named"),
    [
        each
        for each in REFUSED
        if each[0] in (Tallying, HELD[0], Scripted, Transforming) or each[1] is GivenNet
    ],
)
def test_the_planner_leaves_such_layers_alone_and_says_so_once(
    kind: type[Plain], model: type[Net], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, expected = make(kind, model), train(make(kind, model))
    if kind is Scripted:  # TorchScript compiles the first runs of a process otherwise than later ones
        expected = train(make(kind, model))
    with caplog.at_level("INFO", "tba_offload"), auto_session(net) as session:
        assert_same(train(net, session), expected)
        assert {record.recomputed_scopes for record in session.report()} == {0}
    said = [line for line in caplog.messages if "not recomputed by the planner" in line]
    assert len(said) == 1
    assert named in said[0] or kind is Transforming


# Layers that cannot, as their second run shows


class Fickle(Plain):
    """Has a state that is nowhere in the layer."""

    def noise(self, x: Tensor) -> Tensor:
        return x * (1 + int.from_bytes(os.urandom(2), "big") / 65536)


class Iterating(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter([1.0 + number / 8 for number in range(1000)])

    def noise(self, x: Tensor) -> Tensor:
        return x * next(self.numbers)


class Nested(Plain):
    def noise(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[:5], x[5:]], layout=torch.jagged)
        return torch.cat(torch.sin(rows).unbind())


class Sparse(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(ROWS).to_sparse(), x)


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


NOTICED = {
    Fickle: "other numbers",
    Iterating: "self.numbers|other numbers",
    Nested: "nested tensors",
    Sparse: "tensors of layout torch.sparse_coo",
    AskingTwice: "already unpacked once",
}


@pytest.mark.parametrize(("kind", "placement"), in_turn(list(NOTICED), RECOMPUTED))
def test_a_layer_whose_second_run_is_of_no_use_is_named_before_the_update(
    kind: type[Plain], placement: Placement
) -> None:
    net = make(kind)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with session_for(net, default=placement) as session:
        message = failure(RuntimeError, lambda: train(net, session))
    assert re.match(rf"layer \d \(layers.\d\) cannot be recomputed: .*({NOTICED[kind]})", message)
    assert_same([parameter.detach() for parameter in net.parameters()], before)


@pytest.mark.parametrize("kind", [Iterating, Nested])
def test_the_planner_leaves_those_alone_as_well(kind: type[Plain], caplog: pytest.LogCaptureFixture) -> None:
    net = make(kind)
    with caplog.at_level("INFO", "tba_offload"), auto_session(net) as session:
        assert_same(train(net, session), train(make(kind)))
        assert {record.recomputed_scopes for record in session.report()} == {0}
    assert sum("not recomputed by the planner" in line for line in caplog.messages) == 1


def test_the_planner_warns_of_a_layer_that_gives_other_numbers_each_time() -> None:
    net = make(Fickle)
    with auto_session(net) as session:
        with pytest.warns(RuntimeWarning, match="not recomputed by the planner.*other numbers"):
            train(net, session)
        assert {record.recomputed_scopes for record in session.report()} == {0}


SCALE = {"now": 1.0}


class Around(Net):
    """From its third forward on, something is set around forward that is not set around backward."""

    around: Callable[[Net], Any] = nullcontext
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with type(self).around(self) if self.calls > 2 else nullcontext():
            return super().forward(x)


@contextmanager
def other_scale(_: Net) -> Iterator[None]:
    with mock.patch.dict(SCALE, now=1.25):
        yield


@contextmanager
def hooked(net: Net) -> Iterator[None]:
    hooks = [layer.first.register_forward_hook(lambda *seen: seen[-1] * 1.25) for layer in net.layers]
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def other_kernels(_: Net) -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


class Scaled(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return x * SCALE["now"]


class ScaledAtTheEnd(Scaled):
    """Of what it saves the scale changes the last tensor only."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.noise(self.second(F.gelu(self.first(x)))))


@pytest.mark.parametrize(
    ("kind", "around", "placement"),
    [
        (kind, around, RECOMPUTED[number])
        for number, (kind, around) in enumerate(
            [(Scaled, other_scale), (ScaledAtTheEnd, other_scale), (Plain, hooked)]
        )
    ],
)
def test_what_is_set_around_forward_only_is_noticed_in_the_step_in_which_it_differs(
    kind: type[Plain], around: Callable[[Net], Any], placement: Placement
) -> None:
    net = make(kind, type("Net", (Around,), {"around": staticmethod(around)}))
    with session_for(net, default=placement) as session:
        train(net, session, steps=2)
        assert "other numbers" in failure(RecomputationError, lambda: train(net, session, steps=1))


@pytest.mark.parametrize("placement", [Placement.RECOMPUTE, Placement.AUTO])
def test_kernels_that_are_chosen_around_forward_only_are_chosen_again(placement: Placement) -> None:
    model = type("Net", (Around,), {"around": staticmethod(other_kernels)})
    net = make(Attending, model)
    with session_of(net, placement) as session:
        assert_same(train(net, session), train(make(Attending, model)))


@pytest.mark.parametrize("around", [other_scale, hooked])
def test_the_planner_does_not_recompute_by_what_is_set_around_forward_only(
    around: Callable[[Net], Any],
) -> None:
    model = type("Net", (Around,), {"around": staticmethod(around), "calls": 2})
    net = make(Scaled, model)
    with auto_session(net) as session:
        with pytest.warns(RuntimeWarning, match="other numbers") if around is other_scale else nullcontext():
            assert_same(train(net, session), train(make(Scaled, model)))
        assert {record.recomputed_scopes for record in session.report()} == {0}


@pytest.mark.parametrize("placement", [Placement.RECOMPUTE, Placement.AUTO])
def test_modules_that_change_their_mode_before_backward(placement: Placement) -> None:
    def step(net: Net, session: Session | None) -> list[Tensor]:
        net.train()
        with session.step() if session is not None else nullcontext():
            loss = net(batch(0)).pow(2).mean()
            net.eval()
            loss.backward()
        assert not any(module.training for module in net.modules())
        found = [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        net.zero_grad()
        return found

    plain, net = make(Dropping), make(Dropping)
    seed()
    expected = [step(plain, None) for _ in range(4)]
    seed()
    with session_of(net, placement) as session:
        for wanted in expected:
            assert_same(step(net, session), wanted)


@pytest.mark.parametrize("kind", [Normed, Averaging])
def test_a_small_buffer_that_is_changed_between_has_the_values_of_forward(kind: type[Plain]) -> None:
    """The second micro-batch changes running statistics before the first goes back."""

    def step(net: Net, session: Session | None) -> list[Tensor]:
        with session.step() if session is not None else nullcontext():
            losses = [net(batch(number)).pow(2).mean() for number in range(2)]
            for loss in losses:
                loss.backward()
        return [*losses, *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]

    net = make(kind)
    with session_for(net, default=Placement.RECOMPUTE) as session:
        assert_same(step(net, session), step(make(kind), None))


# Programs around layers


def test_layers_that_a_program_has_hooked_into_are_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    """Their hooks would run twice, and what they collect would be there twice."""

    def features(net: Net, session: Session | None) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in net.layers:
            layer.second.register_forward_hook(lambda *seen: found.append(seen[-1]))
        losses = []
        for number in range(5):
            with session.step() if session is not None else nullcontext():
                for part in range(2):
                    loss = net(batch(2 * number + part)).pow(2).mean()
                    loss = loss + sum(feature.pow(2).mean() for feature in found)
                    found.clear()
                    loss.backward()
                    losses.append(loss.detach())
        return losses

    net = make(Plain)
    with auto_session(net) as session, caplog.at_level("INFO"):
        assert_same(features(net, session), features(make(Plain), None))
        assert {record.recomputed_scopes for record in session.report()} == {0}
    assert sum("a program has hooked into its forward" in line for line in caplog.messages) == 1


def saved_in(output: Tensor) -> int:
    """How many tensors the graph of an output gives to anyone who asks."""
    waiting, seen, count = [output.grad_fn], set(), 0
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
            count += sum(isinstance(value, Tensor) for value in saved)
            waiting += [following for following, _ in node.next_functions]
    return count


@pytest.mark.parametrize("placement", RECOMPUTED[:1])
def test_saved_tensors_may_be_looked_at_before_backward(placement: Placement) -> None:
    """As programs do that draw the graph."""

    class Looking(Net):
        def forward(self, x: Tensor, **more: Any) -> Tensor:
            out = super().forward(x, **more)
            assert saved_in(out) > 4 * LAYERS
            return out

    net = make(Dropping)
    net.__class__ = Looking
    with session_for(net, default=placement) as session:
        assert_same(train(net, session, steps=2), train(make(Dropping), steps=2))


@pytest.mark.parametrize("placement", RECOMPUTED[1:2])
def test_a_parameter_changed_before_backward_raises(placement: Placement) -> None:
    net = make(Plain)
    with session_for(net, default=placement) as session:

        def step() -> None:
            with session.step():
                loss = net(batch(0)).pow(2).mean()
                with torch.no_grad():
                    net.layers[1].second.weight.mul_(2)  # type: ignore[union-attr, operator]
                loss.backward()

        message = failure(SavedTensorModifiedError, step)
        assert re.search(r"second.weight of layer 1 \(layers.1\) was changed in place", message)
        assert_all_given_back(session)


@pytest.mark.parametrize("placement", RECOMPUTED[:1])
def test_an_argument_changed_before_backward_raises(placement: Placement) -> None:
    """Also in a list, and a state that the model overwrites, as that of xLSTM."""

    class Stateful(Plain):
        def forward(self, x: Tensor, state: list[Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(x) + state[0].sum()

    net = make(Stateful)

    def step() -> None:
        with session.step():
            state, x = [torch.zeros(1 << 10)], batch(0)
            for layer in net.layers:
                x = layer(x, state)
                with torch.no_grad():
                    state[0].copy_(x.flatten()[: 1 << 10])
            x.pow(2).mean().backward()

    with session_for(net, default=placement) as session:
        assert "changed in place" in failure(SavedTensorModifiedError, step)


def test_what_plain_training_may_change_before_backward_the_planner_may_not_forbid() -> None:
    """A bias is not needed by backward, so that autograd does not look at it."""

    def step(net: Net, session: Session | None, number: int) -> list[Tensor]:
        with session.step() if session is not None else nullcontext():
            loss = net(batch(number)).pow(2).mean()
            with torch.no_grad():
                net.layers[1].first.bias.mul_(2)  # type: ignore[union-attr, operator]
            loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]  # type: ignore[union-attr]

    plain, net = make(Plain), make(Plain)
    expected = [step(plain, None, number) for number in range(5)]
    with auto_session(net) as session:
        with pytest.warns(RuntimeWarning, match="other numbers"):
            found = [step(net, session, number) for number in range(5)]
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("placement", [Placement.RECOMPUTE, Placement.OFFLOAD])
def test_functional_parameters_train_or_are_an_error(placement: Placement) -> None:
    """The module itself does not hold them any more when backward comes."""

    def step(net: Net) -> list[Tensor]:
        given = {name: (tensor.detach() * 0.9).requires_grad_() for name, tensor in net.named_parameters()}
        torch.func.functional_call(net, given, (batch(0),)).pow(2).mean().backward()
        return [tensor.grad for tensor in given.values()]  # type: ignore[misc]

    net = make(Plain)
    with session_for(net, default=placement) as session, session.step():
        if placement.recomputes:
            assert "cannot be recomputed" in failure(RecomputationError, lambda: step(net))
        else:
            assert_same(step(net), step(make(Plain)))


class Growing(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.exp(weight * 0.1) * 0.1


class Parametrized(Plain):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.first, "weight", Growing(), unsafe=True)


@pytest.mark.parametrize("placement", [Placement.RECOMPUTE_OFFLOAD, Placement.OFFLOAD])
def test_cached_weights_train_or_are_an_error(placement: Placement) -> None:
    """The cache of weights that are computed is gone when backward comes."""

    def step(net: Net) -> list[Tensor]:
        with parametrize.cached():
            losses = [net(batch(part)).pow(2).mean() for part in range(2)]
        torch.stack(losses).sum().backward()
        return [parameter.grad for parameter in net.parameters()]  # type: ignore[misc]

    net = make(Parametrized)
    with session_for(net, default=placement) as session, session.step():
        if placement.recomputes:
            assert "cannot be recomputed" in failure(RecomputationError, lambda: step(net))
        else:
            assert_same(step(net), step(make(Parametrized)))


def test_a_layer_that_stands_in_the_list_twice_is_one_layer() -> None:
    def shared() -> Net:
        net = make(Dropping)
        net.layers[2] = net.layers[0]
        return net

    expected = train(shared())
    for placement in ("offload", *RECOMPUTED, "offload-remat", "keep"):
        net = shared()
        with session_for(net, default=Placement(placement)) as session:
            assert [layer.id.number for layer in session.layers] == [0, 1, 3]
            assert_same(train(net, session), expected)
            assert {record.scopes for record in session.report()} == {LAYERS}


class Flipping(Plain):
    """Saves 256 KiB, of which the second run may change one bit."""

    place: int | slice | None = None

    def noise(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 16)
        if self.place is not None and torch._C._current_graph_task_id() != -1:
            with torch.no_grad():
                wide.view(torch.int32).view(-1)[self.place] ^= 1
        return x + (wide * wide).view(ROWS, 16, -1).mean(1) * 0  # of which the tensors after it know nothing


def steps_until_noticed(place: int | slice, *, before: int) -> int:
    """After so many steps a bit of the third layer differs in each second run."""
    net = make(Flipping)
    with session_for(net, default=Placement.RECOMPUTE) as session:
        train(net, session, steps=before)
        net.layers[2].place = place  # type: ignore[assignment]
        message = None
        for number in range(9):
            weights = [parameter.detach().clone() for parameter in net.parameters()]
            try:
                train(net, session, steps=1)
            except RecomputationError as error:
                message = str(error)
            if message is not None:
                assert message.startswith("layer 2 (layers.2)")
                assert_same([parameter.detach() for parameter in net.parameters()], weights)
                return number + 1
    pytest.fail("no difference was raised")


PLACES = (0, 1, 777, 30_000, 16 * ROWS * 2 * WIDTH - 1)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_every_saved_byte_is_compared_in_the_first_three_steps(before: int) -> None:
    """A difference is raised before any update has used it."""
    assert {steps_until_noticed(place, before=before) for place in PLACES} == {1}


def test_every_saved_byte_is_compared_within_eight_steps_afterwards() -> None:
    """Each step reads every eighth tensor, others in each step."""
    assert max(steps_until_noticed(place, before=3) for place in PLACES) <= 8
    assert len({steps_until_noticed(0, before=before) for before in (3, 5)}) == 2


@pytest.mark.parametrize("before", [3, 6, 8])
def test_a_difference_that_reaches_the_last_tensor_is_raised_in_its_step(before: int) -> None:
    net = make(Scaled)
    with session_for(net, default=Placement.RECOMPUTE) as session:
        train(net, session, steps=before)
        net.__class__ = type("Net", (Around,), {"around": staticmethod(other_scale), "calls": 3})
        assert "other numbers" in failure(RecomputationError, lambda: train(net, session, steps=1))
