"""Layers that are recomputed, and those whose inputs travel meanwhile: what hooks see, is freed, or fails."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from blocks import (
    SCHEDULES,
    Block,
    Net,
    assert_same,
    assert_transparent,
    forward_backward,
    gradients,
    make_input,
    make_net,
    run,
    schedule,
)
from harness import KIB, Drive, assert_all_given_back, session_for
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tba_offload as tba
from tba_offload.errors import RecomputationError, SavedTensorModifiedError, TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.session import Session

INPUTS = tba.Placement.RECOMPUTE_OFFLOAD
RECOMPUTED = [tba.Placement.RECOMPUTE, INPUTS]
WIDTH, ROWS, LAYERS = 64, 64, 3
INPUT = 4 * 16 * 64 * 4
"""Bytes of an input of the blocks that are shared with other tests."""

dropping = partial(Block, partial(F.dropout, p=0.2))


def hooks_on_top() -> str | None:
    """Whose hooks see what is saved now."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return None if top is None else top[0].__qualname__


# Arguments of all kinds


class DecoderLayer(nn.Module):
    """Takes tensors by position and by name, alone and in tuples, with and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        *,
        context: Tensor,
        rotary: tuple[Tensor, tuple[Tensor, None]],
        notes: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        notes["runs"] += 1  # a second run changes a copy
        turned = self.linear(hidden) * rotary[0] + rotary[1][0]
        if mask is not None:
            turned = turned.masked_fill(mask, 0.5)
        return hidden + F.dropout(torch.tanh(turned) * context, 0.1), context


class Decoder(nn.Module):
    """Layers that share a context with a gradient, a mask, a table of the model's and one of the step's.

    Attributes:
        given: The storages that the layers were given, as weak references.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.table = [torch.rand(ROWS, WIDTH)]
        self.notes: dict[str, Any] = {"runs": 0}
        self.given: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden, context, shift = x * 1, x * 2, torch.full((ROWS, WIDTH), 0.1)
        mask = x.detach() > 1
        self.given = []
        for number, layer in enumerate(self.layers):
            freed = (hidden, context, shift, mask)
            self.given += [weakref.ref(tensor.untyped_storage()) for tensor in freed]
            more = {"context": context, "rotary": (self.table[0], (shift, None)), "notes": self.notes}
            if number:  # the mask by position, and hidden states by name
                hidden, context = layer(mask=mask, hidden=hidden, **more)
            else:
                hidden, context = layer(hidden, None, **more)
        return hidden


def make_decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def decode(decoder: Decoder, session: Session | None, *, steps: int = 3) -> list[list[Tensor]]:
    """Losses and all gradients of some steps; everything is in the store before backward begins."""
    history = []
    for number in range(steps):
        torch.manual_seed(number)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with session.step() if session is not None else nullcontext():
            loss = decoder(x).pow(2).mean()
            if session is not None:
                session.offloader.quiesce()
            loss.backward()
        assert x.grad is not None
        history.append([loss.detach(), x.grad, *gradients(decoder)])
    return history


@pytest.mark.parametrize("default", RECOMPUTED)
def test_layers_with_arguments_of_all_kinds_are_recomputed_bit_for_bit(default: str) -> None:
    expected = decode(make_decoder(), None)
    decoder = make_decoder()
    with session_for(decoder, default=default, in_flight=40 * KIB) as session:
        assert_same(decode(decoder, session), expected)
        assert_all_given_back(session)
        assert [record.recomputed_scopes for record in session.report()] == [LAYERS] * 3
    assert decoder.notes["runs"] == LAYERS * 3


def test_inputs_are_freed_however_they_were_given() -> None:
    decoder = make_decoder()
    with session_for(decoder, default=INPUTS) as session, session.step():
        loss = decoder(torch.randn(ROWS, WIDTH)).sum()
        session.offloader.quiesce()
        assert len(decoder.given) == 4 * LAYERS
        assert [storage() for storage in decoder.given] == [None] * 4 * LAYERS
        loss.backward()
    with session_for(decoder, default="recompute") as session, session.step():
        loss = decoder(torch.randn(ROWS, WIDTH)).sum()
        assert None not in [storage() for storage in decoder.given]
        loss.backward()


def test_what_layers_share_travels_once_and_what_the_model_keeps_not_at_all() -> None:
    """A context and masks are one activation for all layers; a table is found to be held elsewhere."""
    decoder, one = make_decoder(), ROWS * WIDTH * 4
    with session_for(decoder, default=INPUTS) as session:
        decode(decoder, session)
        first, *later = session.report()
    mask = ROWS * WIDTH
    of_a_step = LAYERS * one + 2 * one + mask  # hidden states, context and shift, the mask
    assert (first.offloaded_bytes, first.held_bytes) == (of_a_step + one, one)
    assert first.deduplicated_bytes == (LAYERS - 1) * 3 * one + (LAYERS - 2) * mask
    for record in later:
        assert (record.offloaded_bytes, record.read_bytes) == (of_a_step, of_a_step)
        assert (record.held_bytes, record.kept_bytes - first.kept_bytes) == (0, one)


def test_inputs_that_somebody_keeps_are_found_out() -> None:
    """As the hidden states of all layers, where a model returns them."""
    kept: list[Tensor] = []

    def work(net: Net, number: int) -> list[Tensor]:
        x, states = make_input(number), []
        y = x * 1
        for layer in net.layers:
            states.append(y)
            y = layer(y)
        y.pow(2).mean().backward()
        kept[:] = states
        assert x.grad is not None
        return [x.grad]

    records = assert_transparent(work, dropping, default=INPUTS, steps=4)
    assert [record.held_bytes for record in records] == [3 * INPUT, 0, 0, 0]
    assert [record.offloaded_bytes for record in records] == [3 * INPUT, 0, 0, 0]
    assert [record.kept_bytes for record in records] == [0, *[3 * INPUT] * 3]


class Shifted(Block):
    """Is given what inference mode has made, and only adds it: no operation may save it."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        assert shift is not None
        return super().forward(x + shift)


def shifted(net: Net, number: int) -> list[Tensor]:
    x = y = make_input(number)
    with torch.inference_mode():
        shift = torch.linspace(-1, 1, WIDTH)
    for layer in net.layers:
        y = layer(y, shift)
    loss = y.pow(2).mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


@pytest.mark.parametrize("placement", [*RECOMPUTED, tba.Placement.AUTO])
def test_what_inference_mode_has_made_is_given_again(placement: tba.Placement) -> None:
    settings: dict[str, Any] = {"activation": 1024 * KIB} if placement is tba.Placement.AUTO else {}
    assert_transparent(shifted, Shifted, default=placement, settled=False, **settings)


# Graphs and schedules


@pytest.mark.parametrize("settled", [True, False])
def test_a_graph_that_is_used_twice(*, settled: bool) -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        x = make_input(number)
        loss = net(x).pow(2).mean()
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        net.zero_grad()
        loss.backward()
        assert len(once) == len(list(net.parameters()))
        return once

    records = assert_transparent(work, dropping, default=INPUTS, in_flight=INPUT, settled=settled)
    assert {record.recomputed_scopes for record in records} == {LAYERS}


def test_a_graph_that_is_never_used_gives_everything_back() -> None:
    def work(net: Net, number: int) -> list[Tensor]:
        net(make_input(100)).sum()
        return forward_backward(net, number)

    assert_transparent(work, dropping, default=INPUTS, in_flight=2 * INPUT)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_micro_batches(name: str) -> None:
    """The inputs that travel, of all layers but the first, are more than the window of one micro-batch."""
    drive = Drive()
    drive.writes.seconds = drive.reads.seconds = 0.001
    records = assert_transparent(
        schedule(SCHEDULES[name]),
        dropping,
        depth=4,
        drive=drive,
        default=INPUTS,
        in_flight=2 * INPUT,
        settled=False,
    )
    for record in records:
        assert record.in_flight_peak_bytes <= 2 * INPUT
        assert record.recomputed_scopes == record.scopes
    assert records[-1].offloaded_bytes > 0


def test_placements_side_by_side() -> None:
    rules = (tba.Rule("0", INPUTS), tba.Rule("1", tba.Placement.OFFLOAD), tba.Rule("2", INPUTS))
    records = assert_transparent(block=dropping, rules=rules)
    assert [record.recomputed_scopes for record in records] == [2] * 3


def test_a_checkpoint_inside_a_layer() -> None:
    def mix(h: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda h: F.dropout(h.tanh(), 0.2).exp(), h, use_reentrant=False)
        return found * h

    assert_transparent(block=partial(Block, mix), default=INPUTS)


# A slow drive


@pytest.mark.parametrize(
    ("activation", "seconds", "keeps"), [(None, 0.3, True), (100 * KIB, 0.001, False)], ids=["free", "budget"]
)
def test_a_slow_drive_may_mean_keeping_inputs_but_not_under_a_budget(
    activation: int | None, seconds: float, *, keeps: bool
) -> None:
    """What recomputation itself holds in memory is counted by nobody."""
    drive = Drive()
    drive.writes.seconds = seconds
    records = assert_transparent(
        block=dropping,
        drive=drive,
        default=INPUTS,
        in_flight=INPUT,
        activation=activation,
        on_slow="keep",
        settled=False,
    )
    assert any(record.fallback_kept_bytes > 0 for record in records) is keeps


# Somebody else's hooks


def in_checkpoint(net: Net, number: int) -> list[Tensor]:
    x = make_input(number)
    y = x * 1
    for layer in net.layers:
        y = checkpoint(layer, y, use_reentrant=False)
    y.pow(2).mean().backward()
    assert x.grad is not None
    return [x.grad]


def in_save_on_cpu(net: Net, number: int) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return forward_backward(net, number)


def in_transform(net: Net, number: int) -> list[Tensor]:
    x = make_input(number).detach()

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, parameters, (x,)).pow(2).mean()

    return list(torch.func.grad(loss_of)({name: p.detach() for name, p in net.named_parameters()}).values())


@pytest.mark.parametrize("default", ["offload", *RECOMPUTED])
@pytest.mark.parametrize("work", [in_checkpoint, in_save_on_cpu, in_transform])
def test_layers_among_hooks_of_others_are_left_alone(work: Any, default: str) -> None:
    with pytest.warns(UserWarning, match=r"layer 0 \(layers.0\) runs inside saved-tensor hooks") as caught:
        records = assert_transparent(work, dropping, default=default)
    assert sum("saved-tensor hooks" in str(each.message) for each in caught) == 1
    for record in records:
        assert (record.left_alone_scopes, record.recomputed_scopes, record.offloaded_bytes) == (3, 0, 0)


# What fails


class Fragile(Block):
    """Fails on demand, in its forward or when it is recomputed."""

    failing: type[BaseException] | None = None
    in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        recomputing = torch._C._current_graph_task_id() != -1
        if Fragile.failing is not None and recomputing is Fragile.in_backward:
            raise Fragile.failing
        return x + self.down(self.mix(h))


@contextmanager
def failing(error: type[BaseException], *, in_backward: bool) -> Iterator[None]:
    """An error of a second run names the layer."""
    named = in_backward and issubclass(error, Exception)
    with mock.patch.multiple(Fragile, failing=error, in_backward=in_backward):
        with pytest.raises(RecomputationError if named else error):
            yield


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("default", RECOMPUTED)
def test_a_layer_that_fails_leaves_no_hook_and_nothing_taken(
    default: str, error: type[BaseException], *, in_backward: bool
) -> None:
    """Whether the step goes on or ends with it."""

    def work(net: Net, number: int) -> list[Tensor]:
        if number == 1:
            with failing(error, in_backward=in_backward):
                forward_backward(net, 7)
            assert hooks_on_top() is None
            net.zero_grad()
            torch.manual_seed(number)
        return forward_backward(net, number)

    fragile = partial(Fragile, partial(F.dropout, p=0.2))
    expected = run(make_net(fragile), forward_backward, None, 3)
    net = make_net(fragile)
    with session_for(net, default=default, in_flight=INPUT) as session:
        assert_same(run(net, work, session, 3), expected)
        with failing(error, in_backward=in_backward), session.step():
            forward_backward(net, 0)
        assert hooks_on_top() is None
        net.zero_grad()
        assert_same(run(net, forward_backward, session, 3), expected)
        gc.collect()  # frames of contextlib and pytest know the error, and its frames know the graph
        assert_all_given_back(session)


@pytest.mark.filterwarnings("ignore:a drive failed:RuntimeWarning")
def test_a_drive_that_fails_is_named() -> None:
    drive, net = Drive(), make_net(dropping)
    with session_for(net, drive=drive, default=INPUTS, in_flight=INPUT) as session:
        drive.reads.fail(OSError(5, "Input/output error"))
        with (
            pytest.raises(TransferError, match=r"could not read .* of layer . \(layers\..\)"),
            session.step(),
        ):
            loss = net(make_input()).sum()
            session.offloader.quiesce()
            loss.backward()
        drive.reads.recover()
        net.zero_grad()
        assert_same(
            run(net, forward_backward, session, 2), run(make_net(dropping), forward_backward, None, 2)
        )


@pytest.mark.parametrize(
    ("default", "error"), [("recompute", SavedTensorModifiedError), (INPUTS, SavedTensorModifiedError)]
)
def test_an_input_that_was_changed_in_place_is_noticed(default: str, error: type[Exception]) -> None:
    net = make_net(dropping)
    with session_for(net, default=default) as session, session.step():
        x = make_input() * 1
        loss = net(x).sum()
        x.add_(1)
        with pytest.raises(error, match=r"in place|inplace"):
            loss.backward()
