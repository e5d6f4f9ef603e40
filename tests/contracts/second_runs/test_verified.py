"""A recomputed layer gives the bits of its first run, or it is noticed; the planner chooses no other."""

from __future__ import annotations

import functools
import os
import random
import re
from collections import Counter, deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import in_turn, of_which
from harness import KIB, assert_all_given_back, session_for
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

import tba_offload as tba
from tba_offload.config.policy import Placement
from tba_offload.errors import RecomputationError, SavedTensorModifiedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.session import Session


class Dropping(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


class Normed(Plain):
    """Changes its running statistics in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2 * WIDTH)


class Spectral(Plain):
    """Changes the vectors by which it estimates the norm of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.utils.parametrizations.spectral_norm(self.first)


class Fickle(Plain):
    """Has a state that is nowhere in the layer."""

    def noise(self, x: Tensor) -> Tensor:
        return x * (1 + int.from_bytes(os.urandom(2), "big") / 65536)


class Numbered(Plain):
    """Has a state that no tensor shows."""

    runs = 0

    def noise(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x * (1 + self.runs / 8)


class Averaging(Plain):
    """Replaces its buffer, and a plain tensor, by others in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2 * WIDTH))
        self.total = torch.zeros(())

    def noise(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.total = self.total + x.detach().sum()
        return x + self.average + self.total.sign()


class Tallying(Plain):
    """Adds to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(64 << 10)  # so large that no copy of it is kept

    def noise(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean()
        return x + self.total[0]


class Averages(Plain):
    """Has batch norm change tensors that are no buffers, or views, and counts in a list's subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("both", torch.stack((torch.zeros(2 * WIDTH), torch.ones(2 * WIDTH))))
        self.mean, self.spread = torch.zeros(2 * WIDTH), torch.ones(2 * WIDTH)
        self.runs = Counter()

    def noise(self, x: Tensor) -> Tensor:
        self.runs["noise"] += 1
        x = F.batch_norm(x, self.mean, self.spread, training=True)
        x = F.batch_norm(x, self.both[0], self.both[1], training=True)
        return x * self.runs["noise"] + self.mean


def counting(start: int) -> Callable[[], int]:
    count = start

    def more(steps: list[int] = []) -> int:  # noqa: B006 - that is the point
        nonlocal count
        count += 1
        steps.append(count)
        more.calls = len(steps)  # type: ignore[attr-defined]
        return count + len(steps)

    return more


class Elsewhere(Plain):
    """Counts in its class, a closure, an argument's default, an array, and through a bound method."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.closure, self.array, self.bytes = counting(0), np.zeros(1), bytearray(1)
        self.bound = functools.partial(Schedule().call, 1)

    def noise(self, x: Tensor) -> Tensor:
        Elsewhere.calls += 1
        self.array[0] += 1
        self.bytes[0] += 1
        return x * (1 + (self.closure() + self.array[0] + self.bytes[0] + self.bound()) / 8)


class Hiding(Plain):
    """Has a part that is no child."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.BatchNorm1d(2 * WIDTH)]

    def noise(self, x: Tensor) -> Tensor:
        normed = self.parts[0](x)
        return normed + self.parts[0].running_mean


class Borrowing(Plain):
    """Draws from generators that lie in containers, and from one of NumPy's old kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sources = {"new": [np.random.default_rng(3)], "torch": torch.Generator().manual_seed(3)}
        self.old = np.random.RandomState(3)

    def noise(self, x: Tensor) -> Tensor:
        drawn = torch.rand((), generator=self.sources["torch"])  # type: ignore[call-overload]
        return x * (drawn + float(self.sources["new"][0].uniform()) + float(self.old.uniform()))  # type: ignore[index]


class Schedule:
    calls = 0

    def call(self, more: int) -> int:
        self.calls += more
        return self.calls


class Scheduled(Plain):
    """Counts its runs in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    def noise(self, x: Tensor) -> Tensor:
        self.schedule.calls += 1
        return x * (1 + self.schedule.calls / 8)


class Tally:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Slotted(Plain):
    """Counts them in an object with slots."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def noise(self, x: Tensor) -> Tensor:
        self.tally.calls += 1
        return x * (1 + self.tally.calls / 8)


SOURCE = np.random.default_rng(3)
CALLS = 0


def drawn_from_file() -> float:
    global CALLS
    CALLS += 1
    return float(SOURCE.uniform()) + CALLS / 8


class FromFile(Plain):
    """Draws from a generator of its file, and counts there, by a function of its file."""

    def noise(self, x: Tensor) -> Tensor:
        return x * (1 + drawn_from_file())

    @staticmethod
    def rewind() -> None:
        global CALLS
        CALLS = 0
        SOURCE.bit_generator.state = np.random.default_rng(3).bit_generator.state


class Listing(Plain):
    """Appends to a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def noise(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return x * (1 + len(self.seen) / 8)


class Lazy(Plain):
    """Makes a table when it first needs it."""

    def noise(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0, 1, 2 * WIDTH))
        return x * self.table


class Drawing(Plain):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.torchs = np.random.default_rng(0), torch.Generator()
        self.others = random.Random(3)

    def noise(self, x: Tensor) -> Tensor:
        x = x * torch.from_numpy(self.generator.random(x.shape, dtype=np.float32)) * self.others.random()
        return x * torch.rand(x.shape, generator=self.torchs)


class Guessing(Plain):
    """Draws from the generators that Python and NumPy share among all."""

    def noise(self, x: Tensor) -> Tensor:
        return x * random.random() * float(np.random.random())  # noqa: NPY002 - as users do


class Transforming(Plain):
    """Uses a transform, under which hooks are forbidden."""

    def noise(self, x: Tensor) -> Tensor:
        return torch.func.vjp(torch.sin, x)[0]


class Scripted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Tanh()))


class Nested(Plain):
    def noise(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[:5], x[5:]], layout=torch.jagged)
        return torch.cat(torch.sin(rows).unbind())


class Ragged(Plain):
    """Makes nested tensors of the older kind, which have no shape to be asked for."""

    def noise(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[:5], x[5:]], layout=torch.strided)
        return torch.cat(torch.sin(rows).unbind())


class Remembering(Plain):
    """Appends to what it is given, as attention does to a cache of keys and values."""

    remembers = True

    def forward(self, x: Tensor, memory: dict[str, Any] | None = None) -> Tensor:
        if memory is None:
            return super().forward(x)
        memory["seen"].append(self.first(x))
        return x + self.second(F.gelu(torch.stack(memory["seen"]).sum(0)))


CHANGING = {
    Tallying: "total",
    Remembering: "argument memory",
}
DIFFERENT = {Fickle: "other numbers"}
REPEATED = [
    *(Plain, Dropping, Normed, Spectral, Numbered, Averaging, Listing, Lazy, Drawing, Guessing),
    *(Borrowing, Scheduled, FromFile, Slotted, Averages, Hiding, Elsewhere),
]
SOME_REPEATED = (Plain, Dropping, Normed, Numbered, Lazy, Drawing, Averages, Elsewhere)
"""Those that the planner is asked for every time: without a state, and one for each place of a state."""
ODD = [Transforming, Scripted, Nested, Ragged]


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    warm_up()


# What can be repeated


@pytest.mark.parametrize(("kind", "placement"), in_turn(REPEATED, RECOMPUTED))
def test_a_second_run_finds_what_the_first_one_found_and_leaves_no_trace(
    kind: type[Plain], placement: Placement
) -> None:
    net = make(kind)
    expected = train(make(kind))
    state = random.getstate()
    with session_for(net, default=placement) as session:
        assert_same(train(net, session), expected)
        assert random.getstate() == state


@pytest.mark.parametrize("kind", [Dropping, Guessing])
def test_random_numbers_are_drawn_again_and_the_generator_goes_on_as_it_was(kind: type[Plain]) -> None:
    def states() -> list[str]:
        return [repr(torch.get_rng_state().tolist()), repr(random.getstate()), repr(np.random.get_state())]  # noqa: NPY002

    found = []
    for net in (make(kind), make(kind)):
        seed()
        with session_for(net, default=Placement.RECOMPUTE) if found else nullcontext() as session:
            with session.step() if session else nullcontext():
                loss = net(batch(0)).pow(2).mean()
                numbers = torch.rand(3), random.random(), np.random.random()  # noqa: NPY002
                before = states()
                loss.backward()
                assert states() == before
            if session:
                assert session.report()[-1].recomputed_scopes == LAYERS
        found.append(([loss.detach(), numbers[0], *(each.grad for each in net.parameters())], before))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("placement", [*RECOMPUTED, Placement.AUTO])
def test_settings_that_change_between_forward_and_backward(placement: Placement) -> None:
    """As adapters are switched between two micro-batches."""

    class Scaled(Plain):
        scale, adapter = 1.0, "a"

        def noise(self, x: Tensor) -> Tensor:
            return x * self.scale + (1 if self.adapter == "a" else x.square())

    def step(net: Net, session: Session | None) -> list[Tensor]:
        found = []
        with session.step() if session is not None else nullcontext():
            first = net(batch(0)).pow(2).mean()
            for layer in net.layers:
                layer.scale, layer.adapter = 2.0, "b"
                layer.first.bias.requires_grad_(requires_grad=False)
            second = net(batch(1)).pow(2).mean()
            net.eval()
            (first + second).backward()
        for layer in net.layers:
            assert (layer.scale, layer.adapter, layer.training) == (2.0, "b", False)
            assert not layer.first.bias.requires_grad
            layer.scale, layer.adapter = 1.0, "a"
            layer.first.bias.requires_grad_()
        net.train()
        found = [first.detach(), second.detach()]
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        return found

    plain, net = make(Scaled), make(Scaled)
    expected = [step(plain, None) for _ in range(5)]
    # Two micro-batches at a time need nearly 400 KiB beside their layers, as malloc counts them.
    is_auto = placement is Placement.AUTO
    with auto_session(net, activation=500 * KIB) if is_auto else session_of(net, placement) as session:
        for wanted in expected:
            assert_same(step(net, session), wanted)


@dataclass
class Output:
    hidden: Tensor


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_outputs_in_objects_are_compared(placement: Placement) -> None:
    class Wrapped(Fickle):
        def forward(self, x: Tensor) -> Output:  # type: ignore[override]
            return Output(super().forward(x))

    class WrappedNet(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).hidden
            return x

    net = WrappedNet(Wrapped)
    with session_for(net, default=placement) as session:
        assert "other numbers" in failure(RecomputationError, lambda: train(net, session))


# What cannot be repeated


REFUSED = [
    # What a layer changes is seen when its first run has ended, other numbers when the second one has.
    *((kind, named, UnsupportedError, 0) for kind, named in CHANGING.items()),
    *((kind, named, RecomputationError, LAYERS - 1) for kind, named in DIFFERENT.items()),
    *((kind, "nested tensors", RecomputationError, 0) for kind in (Nested, Ragged)),
]


@pytest.mark.parametrize("placement", RECOMPUTED)
@pytest.mark.parametrize(("kind", "named", "error", "layer"), REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_layer_that_cannot_be_repeated_is_refused_by_name_in_its_first_step(
    kind: type[Plain], named: str, error: type[Exception], layer: int, placement: Placement
) -> None:
    net = make(kind)
    with session_for(net, default=placement) as session:
        message = failure(error, lambda: train(net, session))
        assert re.match(rf"layer {layer} \(layers.{layer}\) cannot be recomputed.*({named})", message)
        assert_all_given_back(session)


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*its second run gives other numbers:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", [*CHANGING, *DIFFERENT, *ODD])
def test_the_planner_leaves_alone_what_cannot_be_repeated(kind: type[Plain]) -> None:
    net = make(kind)
    expected = train(make(kind))
    with auto_session(net) as session:
        if kind is Scripted:  # whose code is compiled by now
            expected = train(make(kind))
        found = train(net, session)
        if kind is not Fickle:  # whose state nothing reaches
            assert_same(found, expected)
        assert {record.recomputed_scopes for record in session.report()} == {0}
        assert_all_given_back(session)


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("kind", of_which(REPEATED, *SOME_REPEATED))
def test_the_planner_recomputes_what_can_be_repeated(kind: type[Plain]) -> None:
    net = make(kind)
    with auto_session(net) as session:
        assert_same(train(net, session), train(make(kind)))
        recomputed = [record.recomputed_scopes for record in session.report()]
    assert recomputed[0] == 0
    assert max(recomputed) > 0


class FickleInEvaluation(Plain):
    """Can be repeated only while it trains."""

    def noise(self, x: Tensor) -> Tensor:
        return x if self.training else x * (1 + int.from_bytes(os.urandom(2), "big") / 65536)


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*its second run gives other numbers:RuntimeWarning")
def test_the_planner_tries_a_layer_again_in_another_mode() -> None:
    """As where a model is tuned with its dropout switched off, and trained before."""
    net = make(FickleInEvaluation)
    with auto_session(net) as session:
        train(net, session)
        net.eval()
        train(net, session)
        recomputed = [record.recomputed_scopes for record in session.report()]
    assert max(recomputed[:6]) > 0
    assert max(recomputed[6:]) == 0


@pytest.mark.parametrize("placement", RECOMPUTED)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_odd_layers_are_recomputed_or_refused_by_name(kind: type[Plain], placement: Placement) -> None:
    net = make(kind)
    with session_for(net, default=placement) as session:
        try:
            found = train(net, session)
        except tba.TbaError as error:
            assert "cannot be recomputed" in str(error)  # noqa: PT017 - either is right
        else:
            assert_same(found, train(make(kind)))


def test_what_changes_later_is_found_out() -> None:
    net = make(Plain)
    with session_for(net, default=Placement.RECOMPUTE) as session:
        train(net, session, steps=2)
        for layer in net.layers:
            layer.__class__ = Fickle
        with pytest.raises(RecomputationError, match="other numbers"):
            train(net, session, steps=1)


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_the_planner_recomputes_nothing_that_other_ranks_may_run_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, expected = make(Plain), train(make(Plain))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with auto_session(net) as session, caplog.at_level("INFO"):
        assert_same(train(net, session), expected)
        assert {record.recomputed_scopes for record in session.report()} == {0}
    assert sum("other ranks may run the same layers" in line for line in caplog.messages) == 1


# What programs do around layers


class Around(Net):
    """Does something around the forward of its layers that it does not do around their backward."""

    def __init__(self, kind: type[Plain], around: Callable[[Net], AbstractContextManager[object]]) -> None:
        super().__init__(kind)
        self.around = around
        self.calls = 0

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        self.calls += 1
        with self.around(self):
            return super().forward(x, **more)


@contextmanager
def hooked(net: Net) -> Iterator[None]:
    """As where activations are steered, more from call to call."""
    scale = 1 + min(net.calls / 20, 1.0)  # type: ignore[operator]
    hooks = [layer.first.register_forward_hook(lambda *seen: seen[-1] * scale) for layer in net.layers]
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def other_kernels(_: Net) -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


class Attending(Plain):
    def noise(self, x: Tensor) -> Tensor:
        heads = x.view(1, 4, ROWS, -1)
        return F.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)


@pytest.mark.parametrize(
    ("case", "placement"),
    in_turn(
        [(Plain, hooked), (Attending, other_kernels)],
        [*RECOMPUTED, Placement.OFFLOAD_REMAT, Placement.AUTO],
    ),
)
def test_a_second_run_goes_by_what_was_around_the_first(
    case: tuple[type[Plain], Callable[[Net], AbstractContextManager[object]]], placement: Placement
) -> None:
    kind, around = case

    def make_net() -> Net:
        torch.manual_seed(0)
        return Around(kind, around)

    net = make_net()
    with session_of(net, placement) as session:
        assert_same(train(net, session, steps=12), train(make_net(), steps=12))


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


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_saved_tensors_may_be_looked_at_before_backward(placement: Placement) -> None:
    """As programs do that draw the graph."""
    expected = train(make(Dropping), steps=2)
    net = make(Dropping)

    class Looking(Net):
        def forward(self, x: Tensor, **more: Any) -> Tensor:
            out = super().forward(x, **more)
            assert saved_in(out) > 4 * LAYERS
            return out

    net.__class__ = Looking
    with session_for(net, default=placement) as session:
        assert_same(train(net, session, steps=2), expected)


# What layers compute with


@pytest.mark.parametrize("placement", RECOMPUTED)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_changed_before_backward_raises(placement: Placement, name: str) -> None:
    net = make(Plain)
    with session_for(net, default=placement) as session:

        def step() -> None:
            with session.step():
                loss = net(batch(0)).pow(2).mean()
                with torch.no_grad():
                    getattr(net.layers[1].second, name).mul_(2)
                loss.backward()

        message = failure(SavedTensorModifiedError, step)
        assert f"second.{name} was changed in place" in message
        assert_all_given_back(session)


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_a_tensor_in_an_object_changed_before_backward_raises(placement: Placement) -> None:
    class Given(Plain):
        def forward(self, x: Tensor, features: list[Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(x) + features[0].detach().sigmoid() * x

    net = make(Given)

    def step() -> None:
        with session.step():
            features = [batch(1)]
            x = batch(0)
            for layer in net.layers:
                x = layer(x, features)
            features[0].mul_(2)
            x.pow(2).mean().backward()

    with session_for(net, default=placement) as session:
        assert "the argument number 1 was changed in place" in failure(SavedTensorModifiedError, step)


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_a_state_that_the_model_overwrites_before_backward_raises(placement: Placement) -> None:
    """As that of xLSTM: the model gives it to a layer, and puts the next one in its place."""

    class Stateful(Plain):
        def forward(self, x: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + state.sum()

    net = make(Stateful)

    def step() -> None:
        with session.step():
            state, x = torch.zeros(1 << 10), batch(0)
            for layer in net.layers:
                x = layer(x, state)
                with torch.no_grad():
                    state.copy_(x.flatten()[: 1 << 10])
            x.pow(2).mean().backward()

    with session_for(net, default=placement) as session:
        said = failure(SavedTensorModifiedError, step)
    assert "changed in place" in said
    assert re.search(r"layer \d", said)


def test_what_plain_training_may_change_before_backward_the_planner_may_not_forbid() -> None:
    """A bias is not needed by backward, so that autograd does not look at it."""

    def step(net: Net, session: Session | None, number: int) -> list[Tensor]:
        with session.step() if session is not None else nullcontext():
            loss = net(batch(number)).pow(2).mean()
            with torch.no_grad():
                net.layers[1].second.bias.mul_(2)
            loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]  # type: ignore[union-attr]

    plain, net = make(Plain), make(Plain)
    with auto_session(net) as session:
        for number in range(5):
            assert_same(step(net, session, number), step(plain, None, number))


class OddCache:
    """A cache of a kind that nobody has thought of."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: deque[Tensor] = deque()

    def __call__(self, item: Tensor) -> None:
        self.items.append(item)


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_caches_of_any_kind_are_found(placement: Placement) -> None:
    class Caching(Plain):
        def forward(self, x: Tensor, cache: OddCache) -> Tensor:  # type: ignore[override]
            cache(self.first(x))
            return x + self.second(F.gelu(torch.stack(list(cache.items)).sum(0)))

    class CachingNet(Net):
        def forward(self, x: Tensor) -> Tensor:
            cache = OddCache()
            for layer in self.layers:
                x = layer(x, cache)
            return x

    net = CachingNet(Caching)
    with session_for(net, default=placement) as session:
        assert "argument number 1" in failure(UnsupportedError, lambda: train(net, session))


@pytest.mark.parametrize("placement", [*RECOMPUTED, Placement.OFFLOAD, Placement.AUTO])
def test_functional_parameters_are_those_of_the_first_run(placement: Placement) -> None:
    """An average of earlier parameters, which the module itself does not hold when backward comes."""

    def step(net: Net, session: Session | None, number: int) -> list[Tensor]:
        given = {name: (tensor.detach() * 0.9).requires_grad_() for name, tensor in net.named_parameters()}
        with session.step() if session is not None else nullcontext():
            loss = torch.func.functional_call(net, given, (batch(number),)).pow(2).mean()
            loss.backward()
        return [loss.detach(), *(tensor.grad for tensor in given.values())]  # type: ignore[misc]

    plain, net = make(Dropping), make(Dropping)
    make_session = auto_session if placement is Placement.AUTO else session_for
    options = {} if placement is Placement.AUTO else {"default": placement}
    torch.manual_seed(1)
    expected = [step(plain, None, number) for number in range(5)]
    torch.manual_seed(1)
    with make_session(net, **options) as session:
        found = [step(net, session, number) for number in range(5)]
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        assert all(own is layer for own, layer in zip(net.layers, session_modules(session), strict=True))
    assert all(same_bits(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def session_modules(session: Session) -> list[nn.Module]:
    return [layer.module for layer in session.layers]


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_gradients_through_an_update_are_those_of_the_first_run(placement: Placement) -> None:
    """As in meta-learning: the parameters of the second forward come from the gradients of the first."""

    def step(net: Net, session: Session | None) -> list[Tensor]:
        with session.step() if session is not None else nullcontext():
            given = dict(net.named_parameters())
            inner = torch.func.functional_call(net, given, (batch(0),)).pow(2).mean()
            gradients = torch.autograd.grad(inner, list(given.values()))
            fast = {name: p - 0.1 * g for (name, p), g in zip(given.items(), gradients, strict=True)}
            outer = torch.func.functional_call(net, fast, (batch(1),)).pow(2).mean()
            outer.backward()
        return [outer.detach(), *(parameter.grad for parameter in net.parameters())]  # type: ignore[misc]

    expected = step(make(Plain), None)
    net = make(Plain)
    with session_for(net, default=placement) as session:
        assert_same(step(net, session), expected)


class Growing(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.exp(weight * 0.1) * 0.1


class Parametrized(Plain):
    """Computes a weight that has as many elements as its inputs, and uses it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.inner = nn.Linear(2 * WIDTH, 2 * WIDTH)
        parametrize.register_parametrization(self.first, "weight", Growing(), unsafe=True)
        torch.nn.utils.parametrizations.weight_norm(self.inner)

    def noise(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.dropout(x, 0.2)


def train_cached(net: Net, session: Session | None, *, inside: bool, steps: int = 6) -> list[Tensor]:
    """Two forwards that share the weights they compute; backward while these are cached, or later."""
    found: list[Tensor] = []
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for number in range(steps):
        with session.step() if session is not None else nullcontext():
            with parametrize.cached():
                losses = [net(batch(2 * number + part)).pow(2).mean() for part in range(2)]
                if inside:
                    torch.stack(losses).sum().backward()
                    assert parametrize._cache_enabled
                    assert len(parametrize._cache) == 2 * LAYERS
            if not inside:
                torch.stack(losses).sum().backward()
            assert not parametrize._cache_enabled
            assert not parametrize._cache
        found += [*losses, *(parameter.grad.clone() for parameter in net.parameters())]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("placement", "inside"),
    in_turn([*RECOMPUTED, Placement.OFFLOAD_REMAT, Placement.OFFLOAD], [True, False]),
)
def test_cached_weights_are_those_of_the_first_run(placement: Placement, inside: bool) -> None:
    expected = train_cached(make(Parametrized), None, inside=inside)
    net = make(Parametrized)
    with session_for(net, default=placement) as session:
        assert_same(train_cached(net, session, inside=inside), expected)
        assert_all_given_back(session)


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_a_cached_weight_changed_before_backward_raises(placement: Placement) -> None:
    def step(net: Net) -> None:
        with parametrize.cached():
            net(batch(0))
            loss = net(batch(1)).sum()
            with torch.no_grad():
                net.layers[1].first.weight.add_(1)  # type: ignore[union-attr, operator]
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(make(Parametrized))
    net = make(Parametrized)
    with session_for(net, default=placement) as session, session.step():
        said = failure(SavedTensorModifiedError, lambda: step(net))
        assert "cached weight" in said
        assert "weight was changed in place" in said


def test_a_layer_that_stands_in_the_list_twice_is_one_layer() -> None:
    def shared() -> Net:
        net = make(Dropping)
        net.layers[2] = net.layers[0]
        return net

    expected = train(shared())
    for placement in (
        "offload",
        "recompute",
        "recompute-offload",
        "recompute-except-attention",
        "offload-remat",
        "keep",
    ):
        net = shared()
        with session_for(net, default=Placement(placement)) as session:
            assert [layer.id.number for layer in session.layers] == [0, 1, 3]
            assert_same(train(net, session), expected)
            assert {record.scopes for record in session.report()} == {LAYERS}
    net = shared()
    with auto_session(net) as session:
        assert_same(train(net, session), expected)
