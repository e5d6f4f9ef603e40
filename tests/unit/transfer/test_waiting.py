"""Saved tensors that wait for their batch: until it is due nothing is undone if backward comes for them."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from harness import CPU, KIB, Drive, assert_all_given_back, host_store, in_time, session_for, wait_until
from models import same_bits
from torch import Tensor, nn

from tba_offload.capture import hooks
from tba_offload.errors import SessionError
from tba_offload.transfer.offloader import Offloader
from tba_offload.transfer.storage import Handle, Record, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.session import Session

SIZE = 64 * KIB


class Waiting:
    """A saved tensor: what its node in autograd's graph holds, a copy, and a look at its memory."""

    def __init__(self, offloader: Offloader, number: int) -> None:
        saved = torch.arange(SIZE // 4, dtype=torch.int32) + number
        self.offloader = offloader
        self.expected = saved.clone()
        self.memory = weakref.ref(saved.untyped_storage())
        self.record = Record(saved.untyped_storage(), key=f"layer {number}")
        self.tensor: Tensor | None = saved.detach()
        self.handle: Handle | None = Handle(self.record, 0, SIZE, offloader.drops, tensor=self.tensor)
        offloader.writer.admit(SIZE)
        offloader.writer.collect(self.record)

    def use(self) -> Tensor:
        """Backward asks for it."""
        assert self.handle is not None
        tensor = self.offloader.reader.recall(self.handle)
        if tensor is None:
            storage, shift = self.offloader.reader.fetch(self.handle)
            tensor = torch.empty(0, dtype=torch.int32).set_(storage, shift // 4, (SIZE // 4,))
        return tensor

    def drop(self) -> None:
        """The graph is freed."""
        self.handle = self.tensor = None
        self.offloader.drain()


class Bench:
    """An offloader with room for eight tensors, of which two are held back and two make a batch."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.store = host_store(drive)
        self.offloader = Offloader(self.store, CPU, window=8 * SIZE)

    def save(self, count: int) -> list[Waiting]:
        return [Waiting(self.offloader, number) for number in range(count)]

    def assert_idle(self) -> None:
        self.offloader.quiesce()
        wait_until(lambda: self.store.pending() == 0, "transfers pending")
        assert self.offloader.own_bytes == 0
        assert self.store.used_bytes == 0


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(Drive())
    yield bench
    bench.store.close()


def test_what_backward_comes_for_in_time_never_travels(bench: Bench) -> None:
    saved = bench.save(3)
    assert bench.offloader.in_flight == 3 * SIZE
    assert bench.offloader.stats.in_flight_peak == 3 * SIZE
    for each in reversed(saved):
        assert each.use() is each.tensor
        each.drop()
        assert each.memory() is None
    assert bench.offloader.stats.forwarded == 3 * SIZE
    assert bench.drive.reservations.started == bench.drive.writes.started == 0
    bench.assert_idle()


def test_the_oldest_go_when_a_batch_is_due(bench: Bench) -> None:
    saved = bench.save(4)
    assert [each.record.state for each in saved] == [State.TRAVELS] * 2 + [State.WAITS] * 2
    bench.drive.writes.wait_started()
    assert saved[0].tensor is not None
    assert saved[0].tensor.untyped_storage().nbytes() == 0
    wait_until(lambda: bench.offloader.in_flight == 2 * SIZE, "writes")
    assert saved[0].memory() is None
    assert all(same_bits(each.use(), each.expected) for each in saved)
    for each in saved:
        each.drop()
    bench.assert_idle()


def test_what_is_freed_while_it_waits_is_forgotten(bench: Bench) -> None:
    saved = bench.save(3)
    saved[1].drop()
    assert saved[1].memory() is None
    assert bench.offloader.in_flight == 2 * SIZE
    bench.offloader.writer.flush()
    assert bench.offloader.stats.in_flight_peak == 3 * SIZE
    for each in saved:
        each.drop()
    bench.assert_idle()


def test_what_is_freed_and_not_taken_note_of_does_not_travel(bench: Bench) -> None:
    (saved,) = bench.save(1)
    saved.handle = saved.tensor = None
    bench.offloader.writer.flush()
    assert bench.drive.reservations.started == 0
    bench.assert_idle()


def test_a_record_whose_handle_is_gone_may_be_saved_again(bench: Bench) -> None:
    """Before the end of its handle is taken note of: then it travels as any other."""
    (saved,) = bench.save(1)
    storage = saved.expected.untyped_storage()
    saved.handle = saved.tensor = None
    bench.offloader.writer.join(saved.record)
    assert bench.offloader.in_flight == 0
    again = Handle(saved.record, 0, SIZE, bench.offloader.drops)
    bench.offloader.writer.save(saved.record, storage, 0, SIZE)
    bench.offloader.quiesce()
    assert bench.drive.writes.ended == 1
    assert bench.offloader.in_flight == 0
    del again
    bench.assert_idle()


def test_what_is_looked_at_twice_is_the_same(bench: Bench) -> None:
    (saved,) = bench.save(1)
    assert saved.use() is saved.use()
    assert bench.offloader.stats.forwarded == SIZE
    saved.drop()
    bench.assert_idle()


def test_what_joins_alone_keeps_its_place(bench: Bench) -> None:
    saved = bench.save(3)
    bench.offloader.writer.join(saved[0].record)
    bench.offloader.writer.join(saved[0].record)
    assert [each.record.state for each in saved] == [State.TRAVELS, State.WAITS, State.WAITS]
    assert bench.offloader.in_flight == 3 * SIZE
    assert all(same_bits(each.use(), each.expected) for each in saved)
    for each in saved:
        each.drop()
    bench.assert_idle()


def test_what_is_needed_next_waits_on(bench: Bench) -> None:
    """It stays in flight, and no batch takes it."""
    saved = bench.save(2)
    bench.offloader.ahead.start(iter([(saved[1].record, False)]))
    bench.offloader.writer.flush()
    assert [each.record.state for each in saved] == [State.TRAVELS, State.WAITS]
    bench.offloader.quiesce()
    assert bench.offloader.in_flight == SIZE
    bench.offloader.writer.join(saved[1].record)
    bench.offloader.quiesce()
    assert bench.offloader.in_flight == 0
    assert all(same_bits(each.use(), each.expected) for each in saved)
    for each in saved:
        each.drop()
    bench.assert_idle()


def test_what_was_used_where_it_lay_is_freed_by_the_next_use(bench: Bench) -> None:
    first, second = bench.save(2)
    bench.offloader.writer.join(first.record)
    assert same_bits(first.use(), first.expected)
    first.handle = first.tensor = None
    assert first.memory() is not None
    second.use()
    assert first.memory() is None
    second.drop()
    bench.assert_idle()


def test_after_an_interrupt_it_still_waits(bench: Bench) -> None:
    saved = bench.save(3)
    saved[2].drop()
    bench.offloader.repair()
    assert bench.offloader.in_flight == 2 * SIZE
    bench.offloader.writer.flush()
    assert all(same_bits(each.use(), each.expected) for each in saved[:2])
    for each in saved:
        each.drop()
    bench.assert_idle()


def test_a_forked_child_waits_for_no_lock(bench: Bench) -> None:
    """A thread of the parent may have held it, which the child does not have."""
    (saved,) = bench.save(1)
    bench.offloader.become_inert()
    with bench.offloader.drops.lock:
        in_time(lambda: bench.offloader.writer.join(saved.record))
        with pytest.raises(SessionError, match="forked child"):
            in_time(saved.use)


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
