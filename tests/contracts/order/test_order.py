"""Nothing races on a device that runs behind the host; and what would race is found.

The device is a twin that knows what orders two accesses, see ``ordered_device.py``. Bytes take the way of a
GPU: through staging slabs, by copies on side streams, while the host runs ahead.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from covering import of_which, product_with
from harness import KIB, assert_all_given_back, wait_until
from models import assert_same_history, loss_of, make_model, make_tokens, same_bits, train
from ordered_device import OrderedDevice, RaceError, attached, interval
from programs import SAFE, make_layers, run
from torch import nn

from tba_offload.device import READY
from tba_offload.errors import TransferError
from tba_offload.store.engine import QueuedStore
from tba_offload.store.tiered import TieredStore
from tba_offload.transfer.storage import Span

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ordered_device import Interval

    from tba_offload.store.base import ReadOrder, WriteOrder

STORES = ("file", "host", "tiered")


def place(store: str, tmp_path: Path) -> dict[str, Any]:
    """Settings of the store."""
    return {
        "file": {"directory": tmp_path},
        "host": {},
        "tiered": {"directory": tmp_path, "host_capacity": 256 * KIB},
    }[store]


# Nothing races


KINDS = ("gpt", "llama", "encoder")
WINDOWS = (None, 60 * KIB)
SOME = [
    (KINDS[(i + j) % 3], store, window) for i, store in enumerate(STORES) for j, window in enumerate(WINDOWS)
]
"""What is run every time: each window on each store, the models in turn."""


@pytest.mark.parametrize(("kind", "store", "in_flight"), product_with(SOME, KINDS, STORES, WINDOWS))
def test_training_races_with_nothing(kind: str, store: str, in_flight: int | None, tmp_path: Path) -> None:
    expected = train(make_model(kind, dropout=0.1), steps=2, micro_batches=2)
    device, model = OrderedDevice(), make_model(kind, dropout=0.1)
    with attached(device, model, place(store, tmp_path), in_flight=in_flight) as session:
        with device.computing():
            found = train(model, session, steps=2, micro_batches=2)
        assert_all_given_back(session)
        if isinstance(session.store, TieredStore):
            assert min(session.store.drives.high_water_bytes, session.store.host.high_water_bytes) > 0
    assert_same_history(found, expected)
    # With a window activations must travel; without one, how many are still in memory depends on the drive.
    assert device.copies > (0 if in_flight is None else 100)
    assert device.races == []


@pytest.mark.parametrize("store", of_which(STORES, "file"))
def test_recomputing_from_inputs_that_travel_races_with_nothing(store: str, tmp_path: Path) -> None:
    expected = train(make_model("llama", dropout=0.1), steps=2, micro_batches=2)
    device, model = OrderedDevice(), make_model("llama", dropout=0.1)
    where = place(store, tmp_path)
    with attached(device, model, where, in_flight=40 * KIB, default="recompute-offload") as session:
        with device.computing():
            found = train(model, session, steps=2, micro_batches=2)
        assert_all_given_back(session)
    assert_same_history(found, expected)
    assert device.copies >= 16
    assert device.races == []


@pytest.mark.parametrize(("seed", "store"), product_with(enumerate(STORES), range(8), STORES))
def test_a_program_races_with_nothing(seed: int, store: str, tmp_path: Path) -> None:
    expected = run(make_layers(seed, SAFE), None, 2)
    device, layers = OrderedDevice(), make_layers(seed, SAFE)
    where = place(store, tmp_path)
    with (
        attached(
            device, layers, where, layers=list(layers), in_flight=20 * KIB, min_tensor_bytes=64
        ) as session,
        device.computing(),
    ):
        found = run(layers, session, 2)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert device.races == []


@pytest.mark.parametrize("store", STORES)
def test_a_graph_that_is_used_twice_races_with_nothing(store: str, tmp_path: Path) -> None:
    device, model = OrderedDevice(), make_model()
    with attached(device, model, place(store, tmp_path)) as session, device.computing():
        for number in range(2):
            with session.step():
                loss = loss_of(model, make_tokens(number))
                loss.backward(retain_graph=True)
                once = [parameter.grad.clone() for parameter in model.parameters()]
                model.zero_grad()
                loss.backward()
            assert all(same_bits(p.grad, a) for p, a in zip(model.parameters(), once, strict=True))
            model.zero_grad()
    assert device.races == []


class OnStreams(nn.Module):
    """Layers that take turns on two streams, ordered by events as a careful program orders them."""

    def __init__(self, device: OrderedDevice, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(layers)
        )
        self.device = device
        self.streams = [device.stream(), device.new_stream()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            stream = self.streams[number % 2]
            self.device.event().wait(stream)
            with self.device.on(stream):
                x = layer(x)
                done = self.device.event()
            done.wait(self.device.stream())
        return x


@pytest.mark.parametrize("store", STORES)
def test_writes_wait_for_the_stream_that_made_the_bytes(store: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    device = OrderedDevice()
    model = OnStreams(device)
    x = torch.randn(64, 64)
    expected = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    with (
        attached(device, model, place(store, tmp_path), layers=list(model.layers), in_flight=None) as session,
        device.computing(),
    ):
        for _ in range(2):
            with session.step():
                found = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert device.races == []


# What would race is found


READ_MANY, WRITE_MANY = QueuedStore.read_many, QueuedStore.write_many


def read_many_at_once(self: QueuedStore, orders: Sequence[ReadOrder], *, padded: bool) -> Any:
    return READ_MANY(self, [(extent, target, READY) for extent, target, _ in orders], padded=padded)


def write_many_at_once(self: QueuedStore, orders: Sequence[WriteOrder]) -> Any:
    return WRITE_MANY(self, [(extent, source, READY, done) for extent, source, _, done in orders])


HASTY: dict[str, dict[str, Any]] = {
    "from": {"write_many": write_many_at_once},
    "to": {"read_many": read_many_at_once},
}
"""Stores that do not wait before they read memory, or fill it."""


class EarlyEvents(OrderedDevice):
    """Events are those of the operation before."""

    def event(self, stream: object = None) -> Any:
        event = super().event(stream)
        for number in event._clock:  # type: ignore[attr-defined]
            event._clock[number] -= 40  # type: ignore[attr-defined]
        return event


class HastyCopies(OrderedDevice):
    """Copies have only begun when they return, as on a stream that nobody waits for."""

    def _end(self, moved: list[tuple[Interval, bool]]) -> None:
        pass


class LateReads(OrderedDevice):
    """Copies to the device end when the training has, or has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def _end(self, moved: list[tuple[Interval, bool]]) -> None:
        if any(writes for _, writes in moved):
            self.is_over.wait(60)
        super()._end(moved)


def races_of(device: OrderedDevice, where: dict[str, Any]) -> list[str]:
    """What is found in a training that is allowed to fail."""
    model = make_model()
    with attached(device, model, where) as session, device.computing():
        try:
            train(model, session, micro_batches=2)
        except (RaceError, TransferError, ValueError):
            # Where nobody waits for reads, the store may be the first to notice: extents come back too early.
            with suppress(ValueError):
                session.offloader.abandon()
        if isinstance(device, LateReads):
            device.is_over.set()
        wait_until(lambda: session.store.pending() == 0, "transfers are still pending")
    return device.races


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("way", HASTY)
def test_a_transfer_that_does_not_wait_is_found(way: str, store: str, tmp_path: Path) -> None:
    with mock.patch.multiple(QueuedStore, **HASTY[way]):
        races = races_of(OrderedDevice(), place(store, tmp_path))
    assert any(f"a copy {way} memory that operation" in race for race in races)


@pytest.mark.parametrize("store", STORES)
def test_an_event_that_comes_too_early_is_found(store: str, tmp_path: Path) -> None:
    assert races_of(EarlyEvents(), place(store, tmp_path))


@pytest.mark.parametrize("store", STORES)
def test_bytes_that_are_used_before_they_have_come_are_found(store: str, tmp_path: Path) -> None:
    with mock.patch.object(Span, "has_come", return_value=True):
        races = races_of(LateReads(), place(store, tmp_path))
    assert any("while a copy to it is under way" in race or "a copy to memory" in race for race in races)


@pytest.mark.parametrize("store", STORES)
def test_a_copy_that_nobody_waits_for_is_found(store: str, tmp_path: Path) -> None:
    assert races_of(HastyCopies(), place(store, tmp_path))


# The twin itself


def test_operations_of_two_streams_need_an_event_between_them() -> None:
    device = OrderedDevice()
    other = device.new_stream()
    with device.computing():
        x = torch.zeros(100)
        x.add_(1)
        with device.on(other), pytest.raises(RaceError, match="on another stream"):
            x * 2
        device.event().wait(other)
        with device.on(other):
            assert bool((x * 2 == 2).all())


def test_a_thread_knows_what_it_has_waited_for() -> None:
    device = OrderedDevice()
    with device.computing():
        x = torch.zeros(100, dtype=torch.uint8)
        x.add_(1)
    room = device.host_memory(100)
    with pytest.raises(RaceError, match="a copy from memory that operation"):
        device.copy(room, x, READY)
    device.copy(room, x, device.event())
    assert bool((room == 1).all())
    assert device.event().query()


def test_views_touch_nothing_and_intervals_are_those_of_elements() -> None:
    device = OrderedDevice()
    with device.computing():
        x = torch.zeros(10, 10)
        before = dict(device.stream().clock)
        x.view(100)[5:].detach()
        x.t().expand(2, 10, 10)
        assert dict(device.stream().clock) == before
    assert interval(x[2:4, 3:5]) == (x.data_ptr() + 92, x.data_ptr() + 92 + 48)
