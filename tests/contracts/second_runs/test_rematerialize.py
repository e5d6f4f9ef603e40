"""Layers placed ``offload-remat``: what is made again, not written, its views, lifetimes, failures."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from blocks import (
    INNER,
    LENGTH,
    ONE,
    ROWS,
    SCHEDULES,
    WIDTH,
    Block,
    Net,
    assert_same,
    assert_transparent,
    attached,
    forward_backward,
    gradients,
    make_input,
    make_net,
    plain,
    run,
    schedule,
)
from covering import of_which, product_with
from harness import KIB, Drive, assert_all_given_back, session_for
from live_bytes import LiveBytes
from models import (
    HEADS,
    SEQUENCE,
    all_written,
    assert_same_history,
    loss_of,
    make_model,
    make_tokens,
    same_bits,
    train,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tba_offload as tba
from tba_offload.capture import recipes
from tba_offload.capture.rematerialize import Rebuilds
from tba_offload.device import CpuDevice
from tba_offload.errors import SavedTensorModifiedError, TransferError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.report.log import StepRecord
    from tba_offload.session import Session

LAYERS = 3
STEPS = 3
OFFLOAD_REMAT = {"default": "offload-remat"}


class Normed(Block):
    """A block with a norm, or something else that has parameters, where others have a function."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mix = make()  # type: ignore[assignment]


def normed(make: Callable[..., nn.Module], *arguments: Any, **settings: Any) -> Callable[[], nn.Module]:
    return partial(Normed, partial(make, *arguments, **settings))


def mixing(mix: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return partial(Block, mix)


def halves(make: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """For what puts out half as much as it takes."""
    return mixing(lambda h: make(torch.cat((h, h), dim=-1)))


def rebuilt(records: list[StepRecord]) -> list[int]:
    """Bytes that each layer had computed anew, step by step."""
    found = [divmod(record.rebuilt_bytes, LAYERS) for record in records]
    assert all(rest == 0 for _, rest in found)
    return [nbytes for nbytes, _ in found]


def dropped(h: Tensor) -> Tensor:
    return F.dropout(torch.softmax(h, dim=-1), 0.2)


def dropped_in_half(h: Tensor) -> Tensor:
    """As attention does it in low precision."""
    return F.dropout(torch.softmax(h, dim=-1).bfloat16(), 0.2)


def natively_dropped(h: Tensor) -> Tensor:
    return torch.native_dropout(torch.softmax(h, dim=-1), 0.2, train=True)[0]


def gated(h: Tensor) -> Tensor:
    return F.silu(h) * h


def unsafely_viewed(h: Tensor) -> Tensor:
    """As products of many dimensions put it out: a view that does not know of what."""
    return torch.ops.aten._unsafe_view(F.gelu(h), [ROWS * LENGTH, INNER]).view(ROWS, LENGTH, INNER)


# What is made again: bytes of each layer. Each of them takes what it is made of as it was saved.
MADE_AGAIN: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gelu": (mixing(F.gelu), ONE),
    "gelu by tanh": (mixing(partial(F.gelu, approximate="tanh")), ONE),
    "silu": (mixing(F.silu), ONE),
    "mish": (mixing(F.mish), ONE),
    "hardswish": (mixing(F.hardswish), ONE),
    "leaky relu": (mixing(partial(F.leaky_relu, negative_slope=0.2)), ONE),
    "glu": (halves(partial(F.glu, dim=-1)), ONE),
    "gate": (mixing(gated), 2 * ONE),
    "dropout": (mixing(dropped), ONE),
    "native dropout": (mixing(natively_dropped), ONE),
    "layer norm": (normed(nn.LayerNorm, INNER, eps=1e-3), ONE),
    "layer norm without a bias": (normed(nn.LayerNorm, INNER, bias=False), ONE),
    "layer norm without parameters": (normed(nn.LayerNorm, INNER, elementwise_affine=False), ONE),
    "layer norm over two dimensions": (normed(nn.LayerNorm, (LENGTH, INNER)), ONE),
    "rms norm": (normed(nn.RMSNorm, INNER, eps=1e-3), 2 * ONE),
    "norm of a function": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        ),
        2 * ROWS * LENGTH * WIDTH * 4,
    ),
    "a view that does not know of what": (mixing(unsafely_viewed), ONE),
}


UNSETTLED = [(name, False) for name in ("gelu", "gate", "dropout", "layer norm", "rms norm")]
"""What is also made again every time where writes may still be under way: of each kind one."""


@pytest.mark.parametrize(
    ("name", "settled"),
    product_with([*((name, True) for name in MADE_AGAIN), *UNSETTLED], MADE_AGAIN, [True, False]),
)
def test_what_is_made_again(name: str, *, settled: bool) -> None:
    """In the first step it is tried, and from then on not written."""
    block, nbytes = MADE_AGAIN[name]
    records = assert_transparent(block=block, steps=STEPS, settled=settled, **OFFLOAD_REMAT)
    assert rebuilt(records) == [0, nbytes, nbytes]
    if settled:
        offloaded = assert_transparent(block=block, steps=STEPS, default="offload")
        saved = [a.offloaded_bytes - b.offloaded_bytes for a, b in zip(offloaded, records, strict=True)]
        assert saved == [0, LAYERS * nbytes, LAYERS * nbytes]


class Cast(Block):
    """Its large activation is of another type."""

    def __init__(self, mix: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__(mix)
        self.down = nn.Linear(INNER, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mix(self.up(x))).float()


def test_dropout_in_low_precision_is_made_from_the_softmax() -> None:
    """The cast in between is not saved by anybody."""
    block = partial(Cast, dropped_in_half, torch.bfloat16)
    records = assert_transparent(block=block, steps=STEPS, **OFFLOAD_REMAT)
    assert rebuilt(records) == [0, ONE // 2, ONE // 2]


class FunctionalNorm(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, (INNER,), eps=1e-2)


class OtherNorm(nn.LayerNorm):
    """Does not do what its eps says."""

    def forward(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, (INNER,), self.weight, self.bias, eps=1e-2)


def changed_by_stealth(h: Tensor) -> Tensor:
    """Behind autograd's back, but not behind that of the version."""
    y = F.gelu(h)
    with torch.no_grad():
        y.mul_(2)
    return y


def changed_openly(h: Tensor) -> Tensor:
    return F.gelu(h).add_(1)


def part_of_a_whole(h: Tensor) -> Tensor:
    whole = torch.empty(2, *h.shape)
    whole[0] = F.gelu(h)
    return whole[0]


def half_of_it(h: Tensor) -> Tensor:
    return F.gelu(h) * 0.5


class SmallPart(Block):
    """Of its function's output only a few elements are saved, and kept."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return x * F.gelu(h)[0, 0, :WIDTH] + self.down(h)


NOT_MADE_AGAIN: dict[str, Callable[[], nn.Module]] = {
    "tanh": mixing(torch.tanh),
    "relu": mixing(F.relu),
    "sum": mixing(lambda h: h + 1),
    "a norm of a function": normed(FunctionalNorm),
    "a norm with a forward of its own": normed(OtherNorm, INNER),
    "changed by stealth": mixing(changed_by_stealth),
    "changed in place": mixing(changed_openly),
    "a part of a larger storage": mixing(part_of_a_whole),
    "few elements": SmallPart,
    "a product with a number": mixing(half_of_it),
    "dropout of what is not saved": mixing(partial(F.dropout, p=0.2)),
    "in place": mixing(lambda h: F.silu(h, inplace=True)),
    "columns first": mixing(lambda h: F.gelu(h.transpose(1, 2)).transpose(1, 2)),
}


@pytest.mark.parametrize("name", NOT_MADE_AGAIN)
def test_what_is_offloaded_as_ever(name: str) -> None:
    """Nor is it tried."""
    block = NOT_MADE_AGAIN[name]
    with counted() as computed:
        records = assert_transparent(block=block, steps=2, **OFFLOAD_REMAT)
    assert not computed
    offloaded = assert_transparent(block=block, steps=2, default="offload")
    assert rebuilt(records) == [0, 0]
    assert [record.offloaded_bytes for record in records] == [r.offloaded_bytes for r in offloaded]


def test_a_recipe_that_is_off_by_a_bit_is_found_out() -> None:
    def almost(x: Tensor) -> Tensor:
        y = F.silu(x)
        y.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
        return y

    with mock.patch.dict(recipes._MAKERS, SiluBackward0=recipes._of_self(almost)):
        records = assert_transparent(block=mixing(F.silu), steps=STEPS, **OFFLOAD_REMAT)
    assert rebuilt(records) == [0, 0, 0]


class Dropping(Block):
    """Its dropout leaves the same graph when it drops nothing."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.up(x), dim=-1)
        return x + self.down(torch.native_dropout(weights, 0.2, train=self.training)[0])


def test_what_was_found_out_in_training_does_not_hold_in_evaluation() -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        return forward_backward(net.train(number < STEPS), number)

    records = assert_transparent(work, Dropping, steps=2 * STEPS, **OFFLOAD_REMAT)
    assert rebuilt(records) == [0, ONE, ONE, 0, 0, 0]


# Verdicts are tried again


class Changing(Block):
    """From some step on its function's output is changed where autograd does not see it, in one row."""

    has_changed = False

    def __init__(self) -> None:
        super().__init__(self.changed)

    def changed(self, h: Tensor) -> Tensor:
        y = F.gelu(h)
        if self.has_changed:
            y.data[1, 3] *= 2
        return y


def changing(layer: int, since: int) -> Callable[[Net, int], list[Tensor]]:
    """A step of a model of which one layer changes."""

    def work(net: Net, number: int) -> list[Tensor]:
        net.layers[layer].has_changed = number >= since  # type: ignore[assignment]
        return forward_backward(net, number)

    return work


@pytest.mark.parametrize("runs_behind", [False, True])
def test_a_layer_that_changes_before_its_turn_is_an_error_and_travels_then(*, runs_behind: bool) -> None:
    work = changing(layer=1, since=2)
    with (
        mock.patch.object(CpuDevice, "runs_behind", runs_behind),
        attached(Changing, **OFFLOAD_REMAT) as found,
    ):
        net, session = found
        assert_same(run(net, work, session, 2), plain(work, Changing, steps=2))
        with pytest.raises(
            UnsupportedError, match=r"GeluBackward0:none\(\) .* layer 1 \(layers.1\), .* wrong"
        ):
            with session.step():
                work(net, 2)
        net.zero_grad()
        always = changing(layer=1, since=0)
        assert_same(run(net, always, session, 2), plain(always, Changing, steps=2))
        assert [record.rebuilt_bytes for record in session.report()[-2:]] == [0, 0]
        assert_all_given_back(session)


# Lifetimes


class Watched(Block):
    """Notes the storages of what its function takes and puts out."""

    seen: ClassVar[list[weakref.ref[torch.UntypedStorage]]] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = self.mix(h)
        Watched.seen += [weakref.ref(tensor.untyped_storage()) for tensor in (h, y)]
        return x + self.down(y)


@contextmanager
def trained(block: Callable[[], nn.Module], **settings: Any) -> Iterator[tuple[Net, Session]]:
    """A session whose recipes have passed their trial."""
    Watched.seen.clear()
    with attached(block, **(OFFLOAD_REMAT | settings)) as (net, session):
        run(net, forward_backward, session, 1)
        Watched.seen.clear()
        yield net, session


def alive() -> int:
    return sum(storage() is not None for storage in Watched.seen)


def test_neither_sources_nor_results_stay_between_forward_and_backward() -> None:
    with trained(partial(Watched, gated)) as (net, session), session.step() as step:
        loss = net(make_input()).sum()
        session.offloader.quiesce()
        assert (len(Watched.seen), alive()) == (2 * LAYERS, 0)
        loss.backward()
    assert step.record is not None
    assert step.record.rebuilt_bytes == 2 * LAYERS * ONE


def test_a_graph_that_is_never_used_gives_everything_back() -> None:
    with trained(partial(Watched, gated), in_flight=4 * ONE) as (net, session):
        with session.step():
            net(make_input()).sum()
        gc.collect()
        assert alive() == 0
        assert_all_given_back(session)


def test_what_is_still_in_memory_is_not_made_again() -> None:
    kept: list[Tensor] = []
    with trained(partial(Watched, F.gelu)) as (net, session), counted() as computed:
        for layer in net.layers:
            layer.mix = lambda h: kept.append(F.gelu(h)) or kept[-1]  # type: ignore[assignment,func-returns-value]
        with session.step() as step:
            net(make_input()).sum().backward()
        assert step.record is not None
        assert step.record.rebuilt_bytes == LAYERS * ONE
        assert not computed


@contextmanager
def counted() -> Iterator[list[str]]:
    """The names of the recipes that are computed."""
    names: list[str] = []
    original = recipes.Recipe.compute

    def compute(recipe: recipes.Recipe, *arguments: Any) -> Tensor:
        names.append(recipe.name)
        return original(recipe, *arguments)

    with mock.patch.object(recipes.Recipe, "compute", compute):
        yield names


class Several(Block):
    """Three products of one norm's output, as queries, keys and values are, each of which saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (up(y) for up in self.ups)
        return x + self.down(torch.tanh(q * k) + v)


def test_several_that_need_it_share_what_is_made() -> None:
    """Once for each layer, though backward of the first is over before the last one asks."""
    with trained(Several) as (net, session), counted() as computed, session.step():
        loss = net(make_input()).sum()
        session.offloader.quiesce()
        loss.backward()
    assert sum(name.startswith("NativeLayerNorm") for name in computed) == LAYERS


def test_bytes_are_read_once_though_a_recipe_needs_them_before_their_owner() -> None:
    with trained(partial(Watched, gated), in_flight=ONE) as (net, session), session.step() as step:
        loss = net(make_input()).sum()
        session.offloader.quiesce()
        loss.backward()
    assert step.record is not None
    assert step.record.read_bytes == step.record.offloaded_bytes


# Graphs and schedules


@pytest.mark.parametrize("settled", [True, False])
def test_a_graph_that_is_used_twice(*, settled: bool) -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        loss = net(make_input(number)).pow(2).mean()
        loss.backward(retain_graph=True)
        once = gradients(net)
        loss.backward()
        return once

    records = assert_transparent(work, mixing(gated), settled=settled, in_flight=2 * ONE, **OFFLOAD_REMAT)
    assert rebuilt(records) == [0, 2 * ONE, 2 * ONE]


def test_a_graph_that_is_kept_keeps_nothing_that_was_made() -> None:
    """Once everybody who needs it was given it."""
    with trained(mixing(gated)) as (net, session), LiveBytes() as bytes_, session.step():
        loss = net(make_input()).sum()
        session.offloader.quiesce()  # what is not written yet would stay in memory as it is
        loss.backward(retain_graph=True)
        net.zero_grad()
        assert bytes_.live < ONE
        loss.backward()


def test_a_gradient_of_a_gradient() -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        (gradient,) = torch.autograd.grad(net(x).pow(2).mean(), x, create_graph=True)
        gradient.pow(2).sum().backward()
        return [gradient.detach()]

    for mix in (F.gelu, Scaled.apply):
        with knowing_scaled():
            records = assert_transparent(work, mixing(mix), **OFFLOAD_REMAT)
        assert rebuilt(records) == [0, ONE, ONE]


class Scaled(torch.autograd.Function):
    """A custom function; that of a product, which autocast would do in low precision."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h @ (3 * torch.eye(INNER))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        assert ctx.saved_tensors
        return gradient * 3


def scaled_again(finder: recipes.Finder, node: Any, _: int) -> recipes.Recipe | None:
    def make(h: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return h @ (3 * torch.eye(INNER))

    saved = finder.all_saved(node)
    return recipes.recipe("Scaled", make, *saved) if saved else None


def knowing_scaled() -> Any:
    """Sessions have a recipe for it."""
    return mock.patch(
        "tba_offload.session.session.Rebuilds", lambda capture, _: Rebuilds(capture, {Scaled: scaled_again})
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_micro_batches(name: str) -> None:
    drive = Drive()
    drive.writes.seconds = drive.reads.seconds = 0.001
    records = assert_transparent(
        schedule(SCHEDULES[name]),
        mixing(gated),
        drive=drive,
        in_flight=2 * ONE,
        settled=False,
        **OFFLOAD_REMAT,
    )
    assert records[-1].rebuilt_bytes >= records[-1].scopes * 2 * ONE - ONE  # one may travel in its turn


def test_batches_of_all_lengths() -> None:
    """What was found out of one holds for the others."""

    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number, LENGTH + number)
        net(x).pow(2).mean().backward()
        assert x.grad is not None
        return [x.grad]

    records = assert_transparent(work, mixing(F.gelu), **OFFLOAD_REMAT)
    assert rebuilt(records) == [0, ONE * (LENGTH + 1) // LENGTH, ONE * (LENGTH + 2) // LENGTH]


def test_a_checkpoint_inside_a_layer_is_left_alone() -> None:
    def mix(h: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda h: gated(F.dropout(h, 0.2)), h, use_reentrant=False)
        return F.gelu(found)

    records = assert_transparent(block=mixing(mix), **OFFLOAD_REMAT)
    assert rebuilt(records) == [0, ONE, ONE]


def test_placements_side_by_side() -> None:
    """What one layer puts out another one saves, placed otherwise."""
    rules = (tba.Rule("0", tba.Placement.OFFLOAD), tba.Rule("2", tba.Placement.RECOMPUTE_OFFLOAD))

    def block() -> nn.Module:
        return nn.Sequential(Block(F.gelu), nn.LayerNorm(WIDTH))

    for order in (rules, (tba.Rule("1", tba.Placement.KEEP),)):
        records = assert_transparent(block=block, rules=order, **OFFLOAD_REMAT)
        assert records[-1].rebuilt_bytes > records[0].rebuilt_bytes == 0


# Precision and memory


def test_under_autocast() -> None:
    """Casts are made again as well: those of outputs of norms, and those of weights, from the weights."""

    def loss(model: nn.Module, number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, make_tokens(number))

    for kind in ("gpt", "llama"):
        expected = train(make_model(kind, layers=2, dropout=0.1), steps=STEPS, loss=loss)
        offloaded = {}
        for default in ("offload", "offload-remat"):
            model = make_model(kind, layers=2, dropout=0.1)
            with session_for(model, default=default, in_flight=256 * KIB) as session:
                found = train(model, session, steps=STEPS, loss=all_written(session, loss))
                assert_same_history(found, expected)
                assert_all_given_back(session)
                record = session.report()[-1]
                offloaded[default] = record.offloaded_bytes
        assert record.rebuilt_bytes > 0
        assert offloaded["offload-remat"] < 0.7 * offloaded["offload"]


def test_backward_under_autocast_makes_what_forward_made() -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        loss = net(x).pow(2).mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        assert x.grad is not None
        return [x.grad]

    with knowing_scaled():
        records = assert_transparent(work, mixing(Scaled.apply), **OFFLOAD_REMAT)
    assert rebuilt(records) == [0, ONE, ONE]


def live_peak(kind: str, default: str, batch: int, *, in_flight: int | None, written: bool) -> int:
    """The most live bytes in a step of a small model, once recipes have passed their trial.

    Everything is written when backward begins, or nothing is.
    """
    drive, model = Drive(), make_model(kind, layers=4, dropout=0.1)
    with session_for(model, drive=drive, default=default, in_flight=in_flight) as session:
        for _ in range(2):  # with the same sizes: smaller tensors have no numbers
            with session.step():
                loss_of(model, make_tokens(0, batch)).backward()
        if not written:
            drive.writes.hold()
        with LiveBytes() as bytes_, session.step() as step:
            loss = loss_of(model, make_tokens(0, batch))
            if written:
                session.offloader.quiesce()
            loss.backward()
    assert step.record is not None
    assert (step.record.rebuilt_bytes > 0) is (default == "offload-remat")
    return bytes_.peak


@pytest.mark.parametrize("kind", of_which(["gpt", "llama", "encoder"], "gpt"))
def test_the_peak_is_that_of_offloading_and_what_one_recipe_takes(kind: str) -> None:
    """Attention's weights are made of the softmax and the mask, which are there while they are used."""
    batch = 16
    weights = batch * HEADS * SEQUENCE * SEQUENCE * 4
    offload, made_again = (
        live_peak(kind, default, batch, in_flight=256 * KIB, written=True)
        for default in ("offload", "offload-remat")
    )
    assert made_again <= offload + 2 * weights


@pytest.mark.parametrize("kind", of_which(["gpt", "llama", "encoder"], "llama"))
def test_on_a_drive_that_is_too_slow_less_is_in_memory(kind: str) -> None:
    offload, made_again = (
        live_peak(kind, default, 16, in_flight=None, written=False)
        for default in ("offload", "offload-remat")
    )
    assert made_again < 0.85 * offload


# What fails


class Taking(Normed):
    """Hands out what its norm takes and puts out."""

    taken: ClassVar[dict[str, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = self.mix(h)
        if Taking.taken:
            Taking.taken.update(source=h, result=y, weight=self.mix.weight)  # type: ignore[attr-defined]
        return x + self.down(y)


@pytest.mark.parametrize("what", ["result", "source", "weight"])
def test_what_is_changed_in_place_is_noticed(what: str) -> None:
    with trained(partial(Taking, partial(nn.LayerNorm, INNER))) as (net, session), session.step():
        Taking.taken["nothing"] = torch.zeros(1)  # what is taken earlier is kept elsewhere
        loss = net(make_input()).sum()
        assert session.capture.trace.rebuilt_bytes == LAYERS * ONE
        with torch.no_grad():
            Taking.taken[what].add_(1)
        Taking.taken.clear()
        session.offloader.quiesce()
        with pytest.raises(SavedTensorModifiedError, match="changed in place"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:a drive failed:RuntimeWarning")
def test_a_source_that_cannot_be_read_is_named() -> None:
    drive = Drive()
    block = mixing(F.gelu)
    with attached(block, drive=drive, in_flight=ONE, **OFFLOAD_REMAT) as (net, session):
        run(net, forward_backward, session, 1)
        drive.reads.fail(OSError(5, "Input/output error"))
        with pytest.raises(TransferError, match=r"could not read .* of layer"), session.step():
            loss = net(make_input()).sum()
            session.offloader.quiesce()
            loss.backward()
        drive.reads.recover()
        net.zero_grad()
        assert_same(run(net, forward_backward, session, 2), plain(block=block, steps=2))


def test_a_layer_that_fails_leaves_no_hook_on_its_norms() -> None:
    class Failing(Normed):
        is_failing = False

        def forward(self, x: Tensor) -> Tensor:
            if Failing.is_failing:
                raise KeyboardInterrupt
            return super().forward(x)

    with trained(partial(Failing, partial(nn.LayerNorm, INNER))) as (net, session):
        Failing.is_failing = True
        with pytest.raises(KeyboardInterrupt), session.step():
            net(make_input())
        Failing.is_failing = False
        assert not any(module._forward_hooks for module in net.layers.modules())
        run(net, forward_backward, session, 2)
        assert not any(module._forward_hooks for module in net.layers.modules())
        assert session.report()[-1].rebuilt_bytes == LAYERS * ONE


def test_what_another_session_saved_is_no_source() -> None:
    """Its offloader is another one."""
    block = mixing(F.gelu)
    torch.manual_seed(0)
    nets = [make_net(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))), make_net(block)]

    def work(sessions: list[Session]) -> list[Tensor]:
        x = make_input()
        with sessions[0].step() if sessions else nullcontext():
            with sessions[1].step() if sessions else nullcontext():
                # The last norm's output is saved by the first layer of the other one.
                nets[1](nets[0](x)).pow(2).mean().backward()
        assert x.grad is not None
        return [x.grad, *gradients(nets[0]), *gradients(nets[1])]

    expected = work([])
    with (
        session_for(nets[0], layers=list(nets[0].layers), **OFFLOAD_REMAT) as first,
        session_for(nets[1], layers=list(nets[1].layers), **OFFLOAD_REMAT) as second,
    ):
        for _ in range(3):
            found = work([first, second])
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        one = ROWS * LENGTH * WIDTH * 4
        assert first.report()[-1].rebuilt_bytes == (LAYERS - 1) * one
        assert second.report()[-1].rebuilt_bytes == LAYERS * ONE
        assert_all_given_back(first)
        assert_all_given_back(second)


class Emptied(Block):
    """Empties the storage of its large activation, as Megatron does with what it makes again itself."""

    refills = True

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        z = self.down(y)
        storage, bytes_ = y.untyped_storage(), y.detach().clone()
        storage.resize_(0)

        def refill(_: Tensor) -> None:
            if self.refills:
                storage.resize_(bytes_.untyped_storage().nbytes())
                torch.empty(0).set_(storage, 0, bytes_.shape).copy_(bytes_)

        z.register_hook(refill)  # type: ignore[no-untyped-call]
        return x + z


def test_a_storage_that_its_owner_empties_and_fills_again() -> None:
    """Once it is made again without the owner's help, that is not needed any more."""
    with attached(partial(Emptied, F.gelu), **OFFLOAD_REMAT) as (net, session):
        found = run(net, forward_backward, session, STEPS)
        assert_same(found, plain(block=mixing(F.gelu), steps=STEPS))
        for layer in net.layers:
            layer.refills = False  # type: ignore[assignment]
        assert_same(run(net, forward_backward, session, STEPS), found)
        assert session.report()[-1].rebuilt_bytes == LAYERS * ONE
        assert_all_given_back(session)
