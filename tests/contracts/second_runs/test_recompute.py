"""Layers that are recomputed, whole or in part: what they are given, what hooks see, is freed, or fails."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from blocks import (
    ONE,
    Block,
    Net,
    assert_same,
    assert_transparent,
    forward_backward,
    gradients,
    make_input,
    make_net,
    run,
)
from harness import KIB, assert_all_given_back, quiesce, session_for
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import _CheckpointFrame, checkpoint

import tba_offload as tba
from tba_offload.errors import RecomputationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.session import Session

INPUTS = tba.Placement.RECOMPUTE_OFFLOAD
RECOMPUTED = [tba.Placement.RECOMPUTE, INPUTS]
WIDTH, ROWS, LAYERS = 64, 64, 3
INPUT = 4 * 16 * 64 * 4
"""Bytes of an input of the blocks that are shared with other tests."""

dropping = partial(Block, partial(F.dropout, p=0.2))


def gated(h: Tensor) -> Tensor:
    return F.silu(h) * h


def assert_no_hooks() -> None:
    """Nothing sees what is saved, or which functions are called."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore[attr-defined]
    assert torch.overrides._len_torch_function_stack() == 0


# Arguments of all kinds


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        *,
        context: Tensor,
        rotary: tuple[Tensor, tuple[Tensor, Tensor]],
        notes: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        notes["runs"] += 1  # a second run changes a copy
        turned = self.linear(hidden) * rotary[0] + rotary[1][0] + rotary[1][1]
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
        with torch.inference_mode():  # which no operation may save
            offset = torch.linspace(-1, 1, WIDTH)
        self.given = []
        for number, layer in enumerate(self.layers):
            freed = (hidden, context, shift, mask)
            self.given += [weakref.ref(tensor.untyped_storage()) for tensor in freed]
            more = {"context": context, "rotary": (self.table[0], (shift, offset)), "notes": self.notes}
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
                quiesce(session.offloader)
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
        assert [record.recomputed_scopes for record in session.records] == [LAYERS] * 3
    assert decoder.notes["runs"] == LAYERS * 3


def test_inputs_are_freed_however_they_were_given() -> None:
    decoder = make_decoder()
    with session_for(decoder, default=INPUTS) as session, session.step():
        loss = decoder(torch.randn(ROWS, WIDTH)).sum()
        quiesce(session.offloader)
        assert len(decoder.given) == 4 * LAYERS
        assert [storage() for storage in decoder.given] == [None] * 4 * LAYERS
        loss.backward()
    with session_for(decoder, default="recompute") as session, session.step():
        loss = decoder(torch.randn(ROWS, WIDTH)).sum()
        assert None not in [storage() for storage in decoder.given]
        loss.backward()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return F.gelu(self.linear(x)) * table


@pytest.mark.parametrize("has_gradient", [False, True])
def test_masks_that_layers_share_stay_in_memory_so_that_backward_does_not_wait_for_them(
    has_gradient: bool,
) -> None:
    layers = nn.ModuleList(Scaled() for _ in range(2 * LAYERS))
    with session_for(layers, default=INPUTS, layers=list(layers)) as session:
        for _ in range(3):
            with session.step():
                x, shared = torch.randn(ROWS, WIDTH, requires_grad=True) * 1, torch.rand(ROWS, WIDTH)
                shared = shared.requires_grad_(has_gradient) * 1
                for layer in layers:
                    x = layer(x, shared)
                del shared
                x.sum().backward()
        read = [record.read_bytes + record.forwarded_bytes for record in session.records]
    of_shared = [each - 2 * LAYERS * x.nbytes for each in read]
    assert of_shared == ([x.nbytes] * 3 if has_gradient else [x.nbytes, 0, 0])


# Checkpoints of the program

SAVED_AGAIN = hasattr(_CheckpointFrame, "save_inputs")
"""Whether PyTorch lets others save the arguments of a checkpoint again."""


def through(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = F.dropout(layer(x), 0.1)
    return x


def in_checkpoints(net: Net, number: int, *, size: int, use_reentrant: bool) -> list[Tensor]:
    x, layers = make_input(number), list(net.layers)
    y = x * 1
    for at in range(0, len(layers), size):
        part = partial(through, layers[at : at + size])
        y = checkpoint(part, y, use_reentrant=use_reentrant)  # type: ignore[assignment]
    y.pow(2).mean().backward()
    assert x.grad is not None
    return [x.grad]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("default", ["offload", *RECOMPUTED])
def test_layers_in_checkpoints_of_the_program_are_left_alone(
    default: str, size: int, *, use_reentrant: bool
) -> None:
    """The bits are those without a session. Arguments travel where hooks see them; one warning is given."""
    work = partial(in_checkpoints, size=size, use_reentrant=use_reentrant)
    with pytest.warns(UserWarning, match=r"\(layers.[02]\) runs inside saved-tensor hooks") as caught:
        records = assert_transparent(work, dropping, default=default)
    assert sum("saved-tensor hooks" in str(each.message) for each in caught) == 1
    travels = SAVED_AGAIN and not use_reentrant and default != "recompute"
    inputs = math.ceil(3 / size) * INPUT if travels else 0
    for record in records:
        assert (record.left_alone_scopes, record.recomputed_scopes, record.offloaded_bytes) == (3, 0, inputs)


def wrapped(block: Callable[[], nn.Module], *, is_reentrant: bool) -> nn.Module:
    kind = CheckpointImpl.REENTRANT if is_reentrant else CheckpointImpl.NO_REENTRANT
    return checkpoint_wrapper(block(), kind)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_wrappers_that_checkpoint_are_taken_over(is_reentrant: bool) -> None:
    block = partial(wrapped, dropping, is_reentrant=is_reentrant)
    for record in assert_transparent(forward_backward, block, default="offload"):
        assert record.recomputed_scopes == 3
        assert 0 < record.offloaded_bytes <= 3 * INPUT
    net = make_net(block)
    before = [layer.checkpoint_fn for layer in net.layers]
    with session_for(net, layers=list(net.layers)):
        assert not any(layer.checkpoint_fn in before for layer in net.layers)
    assert [layer.checkpoint_fn for layer in net.layers] == before


# What fails


class Fragile(Block):
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


@pytest.mark.parametrize(
    ("default", "error", "in_backward"),
    [
        ("recompute", ZeroDivisionError, True),
        (INPUTS, KeyboardInterrupt, True),
        (INPUTS, ZeroDivisionError, False),
        ("recompute", KeyboardInterrupt, False),
        ("offload-remat", KeyboardInterrupt, False),
    ],
)
def test_a_layer_that_fails_leaves_no_hook_and_nothing_taken(
    default: str, error: type[BaseException], *, in_backward: bool
) -> None:
    """Whether the step goes on or ends with it."""

    def work(net: Net, number: int) -> list[Tensor]:
        if number == 1:
            with failing(error, in_backward=in_backward):
                forward_backward(net, 7)
            assert_no_hooks()
            net.zero_grad()
            torch.manual_seed(number)
        return forward_backward(net, number)

    fragile = partial(Fragile, lambda h: gated(F.dropout(h, 0.2)))
    expected = run(make_net(fragile), forward_backward, None, 3)
    net = make_net(fragile)
    with session_for(net, default=default, in_flight=ONE) as session:
        assert_same(run(net, work, session, 3), expected)
        with failing(error, in_backward=in_backward), session.step():
            forward_backward(net, 0)
        assert_no_hooks()
        net.zero_grad()
        assert_same(run(net, forward_backward, session, 3), expected)
        gc.collect()  # frames of contextlib and pytest know the error, and its frames know the graph
        assert_all_given_back(session)
