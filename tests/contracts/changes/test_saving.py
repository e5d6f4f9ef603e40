"""Backward is given what autograd would have given it: complete bytes, at the version of the tensor."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from blocks import INNER, LENGTH, ONE, ROWS, Block, assert_same, attached, make_input, make_net, run
from covering import in_turn
from harness import KIB, quiesce
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tba_offload.errors import SavedTensorModifiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blocks import Net

    from tba_offload.session import Session

# ---- operations that fill what they have saved ---------------------------------------------------


def leaky(h: Tensor, **settings: Any) -> Tensor:
    return F.rrelu(h, training=True, **settings)


def leaky_in_part(h: Tensor) -> Tensor:
    """The noise is a small view of a large storage."""
    noise = torch.full((ROWS * LENGTH * INNER * 64,), torch.inf)[: 8 * INNER].view(8, INNER)
    rest = torch.ops.aten.rrelu_with_noise(h[0, :8], noise, 0.1, 0.4, True)
    return torch.cat((rest, h[0, 8:])).expand_as(h)


def normed(h: Tensor) -> Tensor:
    """Batch normalization of many channels whose running statistics are no buffers."""
    rows = h.reshape(ROWS, -1)
    mean, variance = rows.new_zeros(rows.shape[1]), rows.new_ones(rows.shape[1])
    return F.batch_norm(rows, mean, variance, training=True).view_as(h)


class Leaky(torch.autograd.Function):
    """Saves what operations within it, which are recorded too, have saved already."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        noise = torch.full_like(h, torch.inf)
        with torch.enable_grad():
            leaky(h.detach().requires_grad_())
            out = torch.ops.aten.rrelu_with_noise(h.detach().requires_grad_(), noise, 0.1, 0.4, True)
        ctx.save_for_backward(noise)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (noise,) = ctx.saved_tensors
        return gradients[0] * noise


FILLING: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu_with_noise": leaky,
    "rrelu_with_noise_": lambda h: leaky(h.clone(), inplace=True),
    "a small view": leaky_in_part,
    "several": lambda h: leaky(leaky(h)),
    "a function": Leaky.apply,
    # A checkpoint stops recomputing at the last tensor that was saved, before its operation fills it.
    "in a checkpoint": partial(checkpoint, lambda h: leaky(h).tanh(), use_reentrant=False),
    "after a checkpoint": lambda h: leaky(checkpoint(torch.tanh, h, use_reentrant=True)),
    "native_batch_norm": normed,
}


@contextmanager
def written_at_once(mix: Callable[[Tensor], Tensor], **settings: Any) -> Iterator[tuple[Net, Session]]:
    """A model of which every write has ended before the call that wants it returns."""
    with attached(lambda: Block(mix), **settings) as (net, session):
        offloader = session.offloader

        def waiting(write: Callable[..., object]) -> Callable[..., Any]:
            def wait(*arguments: Any, **options: Any) -> object:
                found = write(*arguments, **options)
                quiesce(offloader)
                return found

            return wait

        offloader.save = waiting(offloader.save)  # type: ignore[method-assign]
        yield net, session


def train(net: Net, number: int) -> list[Tensor]:
    x = torch.randn(ROWS, LENGTH, 64, generator=torch.Generator().manual_seed(number), requires_grad=True)
    loss = net(x).pow(2).mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


@pytest.mark.parametrize("placement", ["offload", "offload-remat"])
@pytest.mark.parametrize("name", FILLING)
def test_what_an_operation_fills_after_it_has_saved_it(name: str, placement: str) -> None:
    mix = FILLING[name]
    expected = run(make_net(lambda: Block(mix)), train, None, 2)
    assert all(value.isfinite().all() for step in expected for value in step)
    with written_at_once(mix, default=placement) as (net, session):
        assert_same(run(net, train, session, 2), expected)
        assert all(record.offloaded_bytes >= ONE for record in session.records)


# ---- what backward changes in place --------------------------------------------------------------


class Squaring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (ctx.saved_tensors[0] * 2)


class Doubling(Squaring):
    """Its backward changes what was saved, as it must not: a second one finds it changed."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return gradients[0] * h.mul_(2)


def doubling_with_gaps(h: Tensor) -> Tensor:
    """A view that needs little of a storage of which nothing else is saved."""
    wide = torch.cat((h, h, h), dim=-1)
    return Doubling.apply(wide[..., :INNER])  # type: ignore[no-any-return]


def doubling_in_part(h: Tensor) -> Tensor:
    wide = torch.cat([h] * 8, dim=-1)
    small = Doubling.apply(wide[0, 0, :INNER])
    return h + small


CHANGING: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any]]] = {
    "offloaded": (Doubling.apply, {}),
    "kept": (Doubling.apply, {"min_tensor_bytes": 1 << 30}),
    "gathered": (doubling_with_gaps, {}),
    "a small view": (doubling_in_part, {"min_tensor_bytes": 2 * KIB}),
    "made again": (lambda h: Doubling.apply(F.gelu(h)), {"default": "offload-remat"}),
}


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", CHANGING)
def test_backward_that_changes_what_was_saved_is_noticed(name: str, step: int, settled: bool) -> None:
    """As autograd does it: not at once, but when the tensor is asked for again."""
    mix, settings = CHANGING[name]
    net = make_net(lambda: Block(mix))
    expected = run(net, train, None, step + 1)
    loss = net(make_input()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with attached(lambda: Block(mix), **settings) as (net, session):
        assert_same(run(net, train, session, step), expected[:step])
        with pytest.raises(SavedTensorModifiedError, match="changed in place"), session.step():
            loss = net(make_input()).sum()
            if settled:
                net.settle()
            loss.backward(retain_graph=True)
            loss.backward()
        net.zero_grad()
        assert_same(run(net, train, session, step + 1), expected)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h, h)
        return h * h

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        one, other = ctx.saved_tensors
        one.mul_(2)
        return gradients[0] * other


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        made = torch.exp(h * 0.1)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        return made.mul_(gradients[0]) * 0.1


def changed_and_used(h: Tensor) -> Tensor:
    return Squaring.apply(h) + Doubling.apply(h)  # type: ignore[no-any-return]


def changed_after_saving(h: Tensor) -> Tensor:
    h = h * 1
    squares = Squaring.apply(h)
    h.add_(1)
    return squares + torch.exp(h * 0.1)


USED_LATER: dict[str, Callable[[Tensor], Tensor]] = {
    "two nodes": changed_and_used,
    "an output": lambda h: Doubling.apply(torch.exp(h * 0.1)),
    "a view is changed": lambda h: Squaring.apply(h) + Doubling.apply(h.view(-1)).view_as(h),
    "a view is used": lambda h: Squaring.apply(h.view(-1)).view_as(h) + Doubling.apply(h),
    "an operation of PyTorch": lambda h: F.gelu(h) + Doubling.apply(h),
    "made again": lambda h: changed_and_used(F.gelu(h)),
    "in forward": changed_after_saving,
}
USED_NO_MORE: dict[str, Callable[[Tensor], Tensor]] = {
    "saved once": Doubling.apply,
    "saved twice by one node": Both.apply,
    "used before": lambda h: Doubling.apply(h) + Squaring.apply(h),
    "its output": Exponential.apply,
    "made again": lambda h: Doubling.apply(F.gelu(h)),
    "with a counter of its own": lambda h: Squaring.apply(h.data) + Doubling.apply(h),
}
PLACEMENTS = ["offload", "recompute", "recompute-offload", "recompute-except-attention", "offload-remat"]


@pytest.mark.parametrize(("name", "placement"), in_turn(list(USED_LATER), PLACEMENTS))
def test_what_one_node_changes_and_another_one_uses_is_noticed(name: str, placement: str) -> None:
    block = partial(Block, USED_LATER[name])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(make_net(block), 0)
    with attached(block, default=placement) as (net, session):
        for step in range(2):  # in the second one what `offload-remat` makes again does not travel
            named = r"layer 2.*changed in place|changed in place.*layer 2"
            with pytest.raises(SavedTensorModifiedError, match=named), session.step():
                train(net, step)


@pytest.mark.parametrize(("name", "placement"), in_turn(list(USED_NO_MORE), PLACEMENTS))
def test_what_a_node_changes_for_itself_is_no_error(name: str, placement: str) -> None:
    block = partial(Block, USED_NO_MORE[name])
    expected = run(make_net(block), train, None, 3)
    with attached(block, default=placement) as (net, session):
        assert_same(run(net, train, session, 3), expected)
