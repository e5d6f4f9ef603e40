"""Saved tensors that wait for their batch: until it is due nothing is undone if backward comes for them."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from harness import KIB, assert_all_given_back, in_time, session_for
from models import same_bits
from torch import Tensor, nn

from tba_offload.capture import hooks
from tba_offload.errors import SessionError
from tba_offload.transfer.storage import Handle

if TYPE_CHECKING:
    from tba_offload.session import Session

SIZE = 64 * KIB


# ---- in training ---------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def small_session(net: Net) -> Session:
    return session_for(net, layers=[net.layer], in_flight=64 * SIZE)


def gradients(net: Net, x: Tensor, *, passes: int) -> list[Tensor]:
    net.zero_grad()
    loss = net(x).square().sum()
    for number in range(passes):
        loss.backward(retain_graph=number < passes - 1)
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_graph_that_is_retained(passes: int) -> None:
    net, x = Net(), torch.randn(256, 64)
    expected = gradients(net, x, passes=passes)
    with small_session(net) as session, session.step() as step:
        found = gradients(net, x, passes=passes)
    assert all(map(same_bits, found, expected))
    assert step.record.forwarded_bytes > 0
    gc.collect()
    session.offloader.drain()
    assert session.offloader.own_bytes == 0


@pytest.mark.parametrize("is_retained", [True, False])
def test_a_forked_child_is_given_nothing(*, is_retained: bool) -> None:
    net, x = Net(), torch.randn(256, 64)
    with small_session(net) as session, session.step():
        loss = net(x).square().sum()
        session.offloader.become_inert()
        with pytest.raises(SessionError, match="forked child"):
            loss.backward(retain_graph=is_retained)
        del loss


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def test_two_threads_save_one_storage_at_once() -> None:
    """The second comes between any two operations of the first that make the record."""
    layers, leaf = [Square(), Square()], torch.randn(256, 64, requires_grad=True)
    found: list[Tensor] = []

    def new_handle(*arguments: Any, **options: Any) -> Handle:
        if not found:
            found.append(leaf)
            found[0] = in_time(lambda: layers[1](hidden[0]))
        return Handle(*arguments, **options)

    with session_for(layers, layers=layers, in_flight=64 * SIZE) as session, session.step():
        hidden = [leaf * 1]
        with mock.patch.object(hooks, "Handle", new_handle):
            found.append(layers[0](hidden[0]))
        session.offloader.writer.flush()
        hidden.clear()
        (found.pop() + found.pop()).sum().backward()
        assert leaf.grad is not None
        assert same_bits(leaf.grad, 4 * leaf.detach())
        assert_all_given_back(session)


def test_one_thread_saves_a_storage_that_another_one_has_done_with() -> None:
    """The last handle of its record goes, and is taken note of, just before the new one is made."""
    layers, leaf = [Square(), Square()], torch.randn(256, 64, requires_grad=True)
    first: list[Tensor] = []

    def new_handle(*arguments: Any, **options: Any) -> Handle:
        if first:
            first.clear()
            in_time(session.offloader.drain)
        return Handle(*arguments, **options)

    with session_for(layers, layers=layers, in_flight=64 * SIZE) as session, session.step():
        hidden = [leaf * 1]
        first.append(layers[0](hidden[0]))
        session.offloader.quiesce()
        with mock.patch.object(hooks, "Handle", new_handle):
            second = layers[1](hidden.pop())
        session.offloader.quiesce()
        second.sum().backward()
        assert leaf.grad is not None
        assert same_bits(leaf.grad, 2 * leaf.detach())
        del second
        assert_all_given_back(session)


class Remembering(nn.Module):
    """Its operations save what it has computed, one of them in vain; knows the memory of that."""

    def __init__(self, *, in_vain: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.in_vain = in_vain
        self.memory: weakref.ref[torch.UntypedStorage] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.memory = weakref.ref(hidden.untyped_storage())
        if self.in_vain:
            hidden.square()
        return hidden.square()

    def is_in_memory(self) -> bool:
        gc.collect()
        assert self.memory is not None
        return self.memory() is not None


@pytest.mark.parametrize("is_used", [True, False])
def test_its_memory_goes_with_the_graph_and_not_with_the_step(*, is_used: bool) -> None:
    layer, x = Remembering(in_vain=False), torch.randn(256, 64)
    with session_for(layer, layers=[layer], in_flight=64 * SIZE) as session, session.step():
        loss = layer(x).sum()
        assert layer.is_in_memory()
        if is_used:
            loss.backward()
        del loss
        assert not layer.is_in_memory()


def test_what_is_saved_again_after_a_use_in_vain_leaves_memory() -> None:
    layer, x = Remembering(in_vain=True), torch.randn(256, 64)
    with session_for(layer, layers=[layer], in_flight=64 * SIZE) as session, session.step():
        loss = layer(x).sum()
        session.offloader.quiesce()
        assert session.offloader.in_flight == 0
        assert not layer.is_in_memory()
        loss.backward()


def test_a_change_in_place_is_noticed() -> None:
    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            out = x.exp()
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (out,) = ctx.saved_tensors
            out.mul_(2)
            return grad * ctx.saved_tensors[0]

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Saving.apply(x)

    net, x = nn.Sequential(Layer()), torch.randn(256, 64, requires_grad=True)
    with (
        session_for(net, layers=list(net), in_flight=64 * SIZE) as session,
        pytest.raises(RuntimeError, match="in place"),
        session.step(),
    ):
        net(x).sum().backward()
