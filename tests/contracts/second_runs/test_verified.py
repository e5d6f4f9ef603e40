"""A recomputed layer gives the bits of its first run, or an error names it; the planner chooses no other."""

from __future__ import annotations

import gc
import os
import random
import re
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import in_turn
from harness import KIB, Drive, assert_all_given_back, session_for
from models import assert_same_tensors, same_bits
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tba_offload.config.policy import Placement
from tba_offload.errors import RecomputationError, SavedTensorModifiedError, UnsupportedError
from tba_offload.recompute.digest import digest
from tba_offload.torch_private import is_recomputation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.session import Session

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
WIDTH, ROWS, LAYERS = 64, 32, 4
RECOMPUTED = [placement for placement in Placement if placement.recomputes]
INNER = 2 * WIDTH
ONLY_RECOMPUTE = [Placement.RECOMPUTE, Placement.AUTO]


class Plain(nn.Module):
    make_inner: Callable[[], nn.Module] = nn.Identity

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = type(self).make_inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.noise(F.gelu(self.inner(self.first(x)))))

    def noise(self, x: Tensor) -> Tensor:
        return x


def layer_of(noise: Any = Plain.noise, *, inner: Callable[[], nn.Module] = nn.Identity) -> type[Plain]:
    return type("Layer", (Plain,), {"noise": noise, "make_inner": staticmethod(inner)})


class Net(nn.Module):
    def __init__(self, kind: type[Plain]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        kind = getattr(self.layers[0], "remembers", None)
        more = {"memory": kind({"seen": []})} if kind is not None else {}
        for layer in self.layers:
            x = layer(x, **more)
        return x


def make(kind: type[Plain], net: Callable[[type[Plain]], Net] = Net) -> Net:
    torch.manual_seed(0)
    return net(kind)


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def train(
    net: Net,
    session: Session | None = None,
    *,
    steps: int = 6,
    parts: int = 1,
    between: Callable[[Net], object] = id,
) -> list[Tensor]:
    """All losses, gradients and buffers of some steps, whose parts all go forward before one goes back."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # of all generators that layers share
        seed(1)
    found: list[Tensor] = []
    for number in range(steps):
        net.train()
        with session.step() if session is not None else nullcontext():
            losses = [net(batch(number + part)).pow(2).mean() for part in range(parts)]
            between(net)
            for loss in losses:
                loss.backward()
        found += [*(loss.detach() for loss in losses), *(buffer.clone() for buffer in net.buffers())]
        found += [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found


def auto_session(net: Net) -> Session:
    """On a drive that takes many times as long as computing a layer anew."""
    drive = Drive()
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = 6e6
    limits = {"activation": 400 * KIB, "in_flight": 64 * KIB}
    return session_for(net, drive=drive, default=Placement.AUTO, on_slow="wait", **limits)


def session_of(net: Net, placement: Placement) -> Session:
    return auto_session(net) if placement is Placement.AUTO else session_for(net, default=placement)


def failure(kind: type[Exception], function: Callable[[], object]) -> str:
    """What an error says; the error itself would keep the graph of its step."""
    try:
        function()
    except kind as error:
        return str(error)
    pytest.fail(f"{kind.__name__} was not raised")


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    """What a process allocates once, in its first step, is more than the budgets here."""
    net = make(Plain)
    with auto_session(net) as session:
        train(net, session, steps=1)


# Layers that can be repeated


class Recurrent(nn.LSTM):
    """Its kernel saves a workspace of which it fills a part."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.unsqueeze(0))[0].squeeze(0)  # type: ignore[no-any-return]


def with_table(layer: Any, x: Tensor) -> Tensor:
    if not hasattr(layer, "table"):
        layer.register_buffer("table", torch.linspace(0, 1, INNER))
    return x * layer.table


def counting(layer: Any, x: Tensor) -> Tensor:
    layer.runs = getattr(layer, "runs", 0) + 1
    layer.auxiliary = x.detach().square().mean()
    return x


def drawing(_: Any, x: Tensor) -> Tensor:
    return x * random.random() * float(np.random.random())  # noqa: NPY002 - as users do


def differentiating(_: Any, x: Tensor) -> Tensor:
    """Records the graph of a gradient, which saves a sum's gradient: one element, expanded."""
    return x + torch.autograd.grad(torch.tanh(x).square().sum(), x, create_graph=True)[0]


def attending(_: Any, x: Tensor) -> Tensor:
    heads = x.view(1, 4, ROWS, -1)
    return F.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)


class Remembering(Plain):
    remembers: Any = dict

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        if memory is None:
            return super().forward(x)
        memory.setdefault("first", self.first(x))
        memory["seen"].append(self.first(x))
        return x + self.second(F.gelu(torch.stack(memory["seen"]).sum(0) + memory["first"]))


class Catching(Plain):
    """Catches all exceptions and goes another way, as layers with kernels of their own do."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        try:
            return torch.sin(x)
        except Exception:  # noqa: BLE001 - that is the point
            return torch.cos(x) * torch.tan(x)


def leaky(x: Tensor, noise: Tensor) -> Tensor:
    """Saves the noise, and then draws it; no version tells."""
    return torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.4, True)  # type: ignore[no-any-return]


def stale(_: Any, x: Tensor) -> Tensor:
    """Has its noise in memory that holds the very same from an earlier run, as an allocator may give it."""
    noise = torch.zeros_like(x)
    if is_recomputation():
        state = torch.get_rng_state()
        leaky(x.detach(), noise)
        torch.set_rng_state(state)
    return leaky(x, noise)


class Last(Plain):
    fill: Callable[[Any, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.fill(self.second(F.gelu(self.first(x))))


def ending_with(fill: Callable[[Any, Tensor], Tensor]) -> type[Plain]:
    return type("Last", (Last,), {"fill": fill})


STALE = ending_with(stale)
DROPPING = layer_of(lambda _, x: F.dropout(F.rrelu(x, training=True), 0.3))
NORMED = layer_of(inner=partial(nn.BatchNorm1d, INNER))
ATTENDING = layer_of(attending)
REPEATED: dict[str, type[Plain]] = {
    "plain": Plain,
    "dropout": DROPPING,
    "batch norm": NORMED,  # changes small buffers in place; no version tells
    "spectral norm": layer_of(inner=lambda: parametrizations.spectral_norm(nn.Linear(INNER, INNER))),
    "buffers made later": layer_of(with_table),
    "recurrent": layer_of(inner=partial(Recurrent, INNER, INNER, batch_first=True)),
    "attributes": layer_of(counting),
    "generators": layer_of(drawing),
    "dict": Remembering,
    "gradient of gradient": layer_of(differentiating),
    "catches": Catching,
    "attention": ATTENDING,
    "filled last": ending_with(lambda _, x: F.rrelu(x, training=True)),
    # As parameters are that were gathered.
    "filled last in a view": ending_with(lambda _, x: leaky(x, torch.zeros(2 * ROWS, WIDTH)[:ROWS])),
    # Running statistics, which backward does not need.
    "statistics last": ending_with(lambda it, x: F.batch_norm(x, it.mean, it.variance, training=True)),
    "stale memory": STALE,
}


@pytest.mark.parametrize(("name", "placement"), in_turn(list(REPEATED), [*RECOMPUTED, Placement.AUTO]))
def test_a_second_run_gives_the_bits_of_the_first_and_leaves_no_trace(
    name: str, placement: Placement
) -> None:
    plain, net = make(REPEATED[name]), make(REPEATED[name])
    expected = train(plain)
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    with session_of(net, placement) as session:
        assert_same_tensors(train(net, session), expected)
        records = session.records
        assert_all_given_back(session)
    assert (random.getstate(), repr(np.random.get_state())) == states[:2]  # noqa: NPY002
    assert same_bits(torch.get_rng_state(), states[2])
    if placement is not Placement.AUTO:
        assert {record.recomputed_scopes for record in records} == {LAYERS}
        runs = [[getattr(layer, "runs", 0) for layer in each.layers] for each in (net, plain)]
        assert runs[0] == runs[1]


# Layers that cannot


class Holding(Plain):
    holds: Callable[[], Any]
    changes: Callable[[Any], float]

    def __init__(self) -> None:
        super().__init__()
        self.held = type(self).holds()

    def noise(self, x: Tensor) -> Tensor:
        return x * (1 + float(type(self).changes(self.held)) / 8)


def holding(holds: Callable[[], Any], changes: Callable[[Any], Any]) -> type[Plain]:
    return type("Layer", (Holding,), {"holds": staticmethod(holds), "changes": staticmethod(changes)})


def first_of(array: Any) -> float:
    array += 1
    return float(array[0])


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1 << 19))

    def forward(self, x: Tensor) -> Tensor:
        self.table.data.add_(1)  # type: ignore[operator, union-attr] # which no version tells
        return x + self.table[0]  # type: ignore[index]


class Cache:
    __slots__ = ("items",)

    def __init__(self, _: object) -> None:
        self.items: deque[Tensor] = deque()


class GivenObject(Plain):
    remembers = Cache

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        memory.items.append(self.first(x))
        return super().forward(x)


class GivenTensor(Plain):
    remembers = staticmethod(lambda _: torch.zeros(3))

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        return super().forward(x) + memory.add_(1).sum().detach()


def nested(_: Any, x: Tensor) -> Tensor:
    rows = torch.nested.as_nested_tensor([x[:5], x[5:]], layout=torch.jagged)
    return torch.cat(torch.sin(rows).unbind())


class Doubled(torch.autograd.Function):
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


REFUSED: dict[str, tuple[type[Plain], str]] = {
    "list": (holding(list, lambda held: held.append(0) or len(held)), "self.held"),
    "array": (holding(lambda: np.zeros(1 << 16), first_of), "self.held"),
    "tensor": (holding(lambda: torch.zeros(INNER), first_of), "self.held"),
    "generator of numpy": (
        holding(lambda: [np.random.default_rng(3)], lambda held: held[0].random()),
        "self.held",
    ),
    "large buffer": (layer_of(inner=Large), "self.inner.table"),
    "object given": (GivenObject, "its argument memory"),
    "tensor given": (GivenTensor, "its argument memory"),
    "TorchScript": (
        layer_of(inner=lambda: torch.jit.script(nn.Sequential(nn.Linear(INNER, INNER), nn.Tanh()))),
        "TorchScript",
    ),
    "transform": (layer_of(lambda _, x: torch.func.vjp(torch.sin, x)[0]), "forbids saved-tensor hooks"),
    "nested": (layer_of(nested), "nested tensors"),
    "sparse": (layer_of(lambda _, x: torch.sparse.mm(torch.eye(ROWS).to_sparse(), x)), "torch.sparse_coo"),
}
"""Kinds of layers that their first run shows, and what errors name."""


@pytest.mark.parametrize(("name", "placement"), in_turn(list(REFUSED), RECOMPUTED))
def test_a_layer_that_cannot_be_recomputed_is_refused_at_its_first_step(
    name: str, placement: Placement
) -> None:
    kind, named = REFUSED[name]
    net = make(kind)
    with session_for(net, default=placement) as session:
        message = failure(UnsupportedError, lambda: train(net, session))
        assert re.match(rf"layer 0 \(layers.0\) cannot be recomputed: .*{named}", message)
        assert message.endswith("Set the layer's placement to 'keep' or 'offload'.")
        gc.collect()  # frames of the error know the graph
        assert_all_given_back(session)


TWICE = layer_of(lambda _, x: Doubled.apply(x, torch.sin(x)))  # type: ignore[no-untyped-call]
"""Its backward asks for each saved tensor twice."""


@pytest.mark.parametrize("name", ["list", "tensor", "object given", "TorchScript", "transform", "nested"])
def test_the_planner_leaves_such_layers_alone_and_says_so_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, named = REFUSED[name]
    net, expected = make(kind), train(make(kind))
    if name == "TorchScript":  # which compiles the first runs of a process otherwise than later ones
        expected = train(make(kind))
    with caplog.at_level("INFO", "tba_offload"), auto_session(net) as session:
        assert_same_tensors(train(net, session), expected)
        assert {record.recomputed_scopes for record in session.records} == {0}
    said = [line for line in caplog.messages if "the planner does not recompute" in line]
    assert len(said) == 1
    assert named in said[0] or name == "transform"


FICKLE = layer_of(lambda _, x: x * (1 + int.from_bytes(os.urandom(2), "big") / 65536))
"""Has a state that is nowhere in the layer."""


@pytest.mark.parametrize(
    ("kind", "named", "placement"),
    [(FICKLE, "other numbers", RECOMPUTED[0]), (TWICE, "already unpacked once", RECOMPUTED[1])],
)
def test_a_layer_whose_second_run_is_of_no_use_is_named_before_the_update(
    kind: type[Plain], named: str, placement: Placement
) -> None:
    net = make(kind)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with session_for(net, default=placement) as session:
        message = failure(RecomputationError, lambda: train(net, session))
    assert re.match(rf"layer \d \(layers.\d\) cannot be recomputed: .*{named}", message)
    assert_same_tensors(net.parameters(), before)


def test_the_planner_warns_of_a_layer_that_gives_other_numbers_each_time() -> None:
    net = make(FICKLE)
    with auto_session(net) as session:
        with pytest.warns(RuntimeWarning, match="planner does not recompute.*other numbers"):
            train(net, session)
        assert {record.recomputed_scopes for record in session.records} == {0}


# What is set around forward only


SCALE = {"now": 1.0}


class Around(Net):
    """From its third forward on, something is set around forward that is not set around backward."""

    around: Callable[[Net], Any] = nullcontext
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with type(self).around(self) if self.calls > 2 else nullcontext():
            return super().forward(x)


def around(context: Callable[[Net], Any], calls: int = 0) -> type[Net]:
    return type("Net", (Around,), {"around": staticmethod(context), "calls": calls})


@contextmanager
def other_scale(_: Net) -> Iterator[None]:
    with mock.patch.dict(SCALE, now=1.25):
        yield


@contextmanager
def other_kernels(_: Net) -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


class Scaled(Plain):
    def noise(self, x: Tensor) -> Tensor:
        return x * SCALE["now"]


class ScaledAtTheEnd(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.noise(self.second(F.gelu(self.first(x)))))


@pytest.mark.parametrize("before", [2, 3, 6])
@pytest.mark.parametrize(("kind", "placement"), [(Scaled, RECOMPUTED[0]), (ScaledAtTheEnd, RECOMPUTED[1])])
def test_what_is_set_around_forward_only_is_noticed_in_the_step_in_which_it_differs(
    kind: type[Plain], placement: Placement, before: int
) -> None:
    """From the fourth step on not every byte is compared, but every last tensor."""
    net = make(kind)
    with session_for(net, default=placement) as session:
        train(net, session, steps=before)
        net.__class__ = around(other_scale, calls=2)
        assert "other numbers" in failure(RecomputationError, lambda: train(net, session, steps=1))


@pytest.mark.parametrize("placement", ONLY_RECOMPUTE)
def test_kernels_that_are_chosen_around_forward_only_are_chosen_again(placement: Placement) -> None:
    net = make(ATTENDING, around(other_kernels))
    with session_of(net, placement) as session:
        assert_same_tensors(train(net, session), train(make(ATTENDING, around(other_kernels))))


# What happens between forward and backward


@pytest.mark.parametrize("placement", ONLY_RECOMPUTE)
def test_modules_that_change_their_mode_before_backward(placement: Placement) -> None:
    net = make(DROPPING)
    expected = train(make(DROPPING), between=Net.eval)
    with session_of(net, placement) as session:
        assert_same_tensors(train(net, session, between=Net.eval), expected)
    assert not any(module.training for module in net.modules())


def test_a_small_buffer_that_is_changed_between_has_the_values_of_forward() -> None:
    """The second micro-batch changes running statistics before the first goes back."""
    net, expected = make(NORMED), train(make(NORMED), steps=1, parts=2)
    with session_for(net, default=Placement.RECOMPUTE) as session:
        assert_same_tensors(train(net, session, steps=1, parts=2), expected)


def double(which: str) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        with torch.no_grad():
            net.get_parameter(which).mul_(2)

    return change


def test_what_plain_training_may_change_before_backward_the_planner_may_not_forbid() -> None:
    """A bias is not needed by backward, so that autograd does not look at it."""
    net, between = make(Plain), double("layers.1.first.bias")
    expected = train(make(Plain), between=between)
    with auto_session(net) as session, pytest.warns(RuntimeWarning, match="other numbers"):
        assert_same_tensors(train(net, session, between=between), expected)


def test_a_parameter_changed_before_backward_raises() -> None:
    net = make(Plain)
    with session_for(net, default=RECOMPUTED[1]) as session:
        between = double("layers.1.second.weight")
        message = failure(SavedTensorModifiedError, lambda: train(net, session, between=between))
        assert re.search(r"second.weight of layer 1 \(layers.1\) was changed in place", message)
        assert_all_given_back(session)


class Stateful(Plain):
    remembers = staticmethod(lambda _: [torch.zeros(1 << 10)])

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        return super().forward(x) + memory[0].sum()


class Overwriting(Net):
    """Overwrites the state that its layers are given in a list, as xLSTM does, or their input."""

    what = "state"

    def forward(self, x: Tensor) -> Tensor:
        state = [torch.zeros(1 << 10)]
        for layer in self.layers:
            given = x * 1
            x = layer(given, memory=state)
            with torch.no_grad():
                (state[0] if self.what == "state" else given).flatten()[: 1 << 10].fill_(1)
        return x


@pytest.mark.parametrize(("what", "placement"), [("state", RECOMPUTED[0]), ("input", RECOMPUTED[1])])
def test_an_argument_changed_before_backward_raises(what: str, placement: Placement) -> None:
    net: Any = make(Stateful, Overwriting)
    net.what = what
    with session_for(net, default=placement) as session:
        assert "changed in place" in failure(SavedTensorModifiedError, lambda: train(net, session))


# Programs around layers


def test_layers_that_a_program_has_hooked_into_are_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    """Their hooks would run twice, and what they collect would be there twice."""

    class Collecting(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            for feature in found:
                x = x + feature.pow(2).mean()
            found.clear()
            return x

    found: list[Tensor] = []
    nets = [make(Plain, Collecting) for _ in range(2)]
    for net in nets:
        for layer in net.layers:
            layer.second.register_forward_hook(lambda *seen: found.append(seen[-1]))  # type: ignore[operator, union-attr]
    with auto_session(nets[0]) as session, caplog.at_level("INFO"):
        assert_same_tensors(train(nets[0], session), train(nets[1]))
        assert {record.recomputed_scopes for record in session.records} == {0}
    assert sum("the program has added hooks to the layer's forward" in line for line in caplog.messages) == 1


def test_a_layer_that_stands_in_the_list_twice_is_one_layer() -> None:
    def shared() -> Net:
        net = make(DROPPING)
        net.layers[2] = net.layers[0]
        return net

    expected = train(shared())
    for placement in ("offload", *RECOMPUTED, "offload-remat", "keep"):
        net = shared()
        with session_for(net, default=Placement(placement)) as session:
            assert [layer.id.number for layer in session.layers] == [0, 1, 3]
            assert_same_tensors(train(net, session), expected)
            assert {record.scopes for record in session.records} == {LAYERS}


# What is compared


class Flipping(Plain):
    place: int | slice | None = None

    def noise(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 16)
        if self.place is not None and is_recomputation():
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
                assert_same_tensors(net.parameters(), weights)
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


# The digest by which saved bytes are compared


@pytest.mark.parametrize("count", [2**12, 2**16, 2**22])
def test_round_numbers_in_64_bits_count(count: int) -> None:
    """The sum of the bit patterns of ``count`` equal round numbers is zero in 64 bits."""
    zeros = torch.zeros(count, dtype=torch.float64)
    ones = torch.ones_like(zeros)
    assert digest(zeros[1:]) != digest(ones[1:])
    for one, other in ((zeros, ones), (zeros.view(torch.uint8), ones.view(torch.uint8))):
        assert digest(one) != digest(other)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all signs": torch.neg,
    "signs of the odd ones": lambda flat: flat.index_fill(0, _odd(flat), 0) - flat * _is_odd(flat),
    "two signs": lambda flat: torch.cat((flat[:3], -flat[3:5], flat[5:])),
    "two that change places": lambda flat: torch.cat((flat[:3], flat[5:6], flat[4:5], flat[3:4], flat[6:])),
    "one bit": lambda flat: torch.cat((flat[:9], flat[9:10].abs() + 1, flat[10:])),
    "two at the end": lambda flat: torch.cat((flat[:-4], flat[-4:-3] + 8, flat[-3:-1], flat[-1:] + 8)),
    "the order": lambda flat: flat.flip(0),
}


def _is_odd(flat: torch.Tensor) -> torch.Tensor:
    return (torch.arange(flat.numel()) % 2).to(flat.dtype)


def _odd(flat: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, flat.numel(), 2)


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.float32, 50_257), (torch.float64, 16), (torch.bfloat16, 4091)]
)
def test_other_bits_give_another_digest(change: str, dtype: torch.dtype, count: int) -> None:
    """Also in words that fill no row, and elements that fill no word."""
    torch.manual_seed(count)
    flat = torch.randn(count).to(dtype)
    flat[:16] = torch.arange(1, 17)
    assert digest(flat.clone()) == digest(flat)
    assert digest(CHANGES[change](flat)) != digest(flat)
