"""Activations are read ahead in the order of the step before, with restraint across forward passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tba_offload.capture.scope import ActivationKey, Lookahead, ScopeKey

if TYPE_CHECKING:
    from collections.abc import Iterable

LAYERS = 2


class Asked:
    """Stands for a reader with room: notes what is read ahead, and what with restraint."""

    def __init__(self) -> None:
        self.ledger = SimpleNamespace(stats=SimpleNamespace(given_up=0), noted=frozenset())
        self.plainly: list[tuple[int, int]] = []
        self.across: list[tuple[int, int]] = []

    def is_worth_a_start(self, *, begins: bool) -> bool:
        return begins or self.has_room()

    def has_room(self) -> bool:
        return True

    def start(self, upcoming: Iterable[tuple[Any, bool]]) -> None:
        for record, across_forward in upcoming:
            if not self.reads(record, across_forward=across_forward):
                break

    def reads(self, record: Any, *, across_forward: bool) -> bool:
        key = record.key.scope.micro_batch, record.key.scope.layer
        (self.across if across_forward else self.plainly).append(key)
        return not across_forward


class Window(Asked):
    """With room for two records that were read and not used."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[ActivationKey] = set()
        self.used: set[ActivationKey] = set()

    def has_room(self) -> bool:
        return len(self.read - self.used) < 2

    def reads(self, record: Any, *, across_forward: bool) -> bool:
        if record.key in self.read | self.used:
            return True
        if not self.has_room():
            return False
        self.read.add(record.key)
        return super().reads(record, across_forward=across_forward)


def key_of(micro_batch: int, layer: int) -> ActivationKey:
    return ActivationKey(ScopeKey(layer, micro_batch, 0, f"layers.{layer}"), 0)


def play(lookahead: Lookahead, asked: Asked, order: str) -> list[tuple[list[Any], list[Any]]]:
    """One step: ``F0`` saves micro-batch 0, ``B0`` uses it. What each pass of backward asked for."""
    lookahead.begin_step()
    found = []
    for word in order.split():
        micro_batch = int(word[1:])
        if word[0] == "F":
            for layer in range(LAYERS):
                record: Any = mock.Mock(key=key_of(micro_batch, layer), nbytes=10 + layer)
                lookahead.saved(record)
            continue
        asked.plainly, asked.across = [], []
        for layer in reversed(range(LAYERS)):
            lookahead.used(key_of(micro_batch, layer))
        found.append((asked.plainly, asked.across))
    return found


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def lookahead(asked: Asked) -> Lookahead:
    return Lookahead(asked)  # type: ignore[arg-type]


def test_what_a_pass_uses_is_read_ahead_plainly_and_the_next_pass_with_restraint(
    lookahead: Lookahead, asked: Asked
) -> None:
    order = "F0 F1 B0 F2 B1 B2"
    play(lookahead, asked, order)
    first, second, third = play(lookahead, asked, order)
    assert first == ([(0, 0)], [(1, 1), (1, 1)])  # a forward pass comes before micro-batch 1
    assert second == ([(1, 0), (2, 1), (2, 0)], [])  # none comes before micro-batch 2
    assert third == ([], [])


def test_reads_start_when_backward_comes_to_a_layer_of_which_nothing_travels(
    lookahead: Lookahead, asked: Asked
) -> None:
    """Such as the last ones, which a plan keeps: else the first that was offloaded would come too late."""
    play(lookahead, asked, "F0 B0")
    asked.plainly = []
    play(lookahead, asked, "F0")
    assert asked.plainly == []
    lookahead.reached()
    assert asked.plainly == [(0, 1), (0, 0)]


def test_a_step_in_another_order_than_the_last_is_read_ahead_all_the_same(
    lookahead: Lookahead, asked: Asked
) -> None:
    """Fewer turns between forward and backward than expected must not mean restraint until its end."""
    for order in ("F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2"):
        play(lookahead, asked, order)
    last = play(lookahead, asked, "F0 F1 F2 B0 B1 B2")[-1]
    assert last == ([(2, 0)], [])


def saves(lookahead: Lookahead, *layers: int, micro_batch: int = 0) -> None:
    for layer in layers:
        lookahead.saved(SimpleNamespace(key=key_of(micro_batch, layer)))  # type: ignore[arg-type]


def step_in_order(lookahead: Lookahead, window: Window, order: tuple[int, ...]) -> list[int]:
    """Saves six layers, and uses them in an order; returns what was used before it was read."""
    lookahead.begin_step()
    window.read, window.used = set(), set()
    saves(lookahead, *range(6))
    on_demand = []
    for layer in order:
        key = key_of(0, layer)
        if key not in window.read:
            on_demand.append(layer)
        window.used.add(key)
        lookahead.used(key)
    return on_demand


def test_what_comes_before_its_turn_does_not_mean_that_all_between_are_left_out() -> None:
    """As a mask that the first layer saved, and all others use."""
    window = Window()
    lookahead = Lookahead(window)  # type: ignore[arg-type]
    step_in_order(lookahead, window, (5, 4, 3, 2, 1, 0))
    assert step_in_order(lookahead, window, (5, 4, 3, 2, 1, 0)) == [5]
    assert step_in_order(lookahead, window, (5, 0, 4, 3, 2, 1)) == [5, 0]
    assert step_in_order(lookahead, window, (5, 0, 4, 3, 2, 1)) == [5]
