"""A look at a layer's modules and objects that runs share, as long as another one would find the same."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tba_offload.recompute.modules import Modules

if TYPE_CHECKING:
    from collections.abc import Callable

factor = 1.0


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Settings:
    """An object with a dictionary."""

    def __init__(self) -> None:
        self.scale: object = 1.5
        self.nothing = None


class Layer(nn.Module):
    """Holds something of each kind that can be looked at."""

    kept = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = 1.5
        self.nothing = None
        self.settings = Settings()
        self.slotted = Slotted()
        self.numbers = [1.5, 2.5]
        self.names = {"a": object(), "b": object()}
        self.ordered = OrderedDict(a=object(), b=object())
        self.chosen = {1, 2}
        cell = 1.5

        def inner() -> float:
            return cell

        def change(value: float) -> None:
            nonlocal cell
            cell = value

        self.inner, self.change = inner, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * factor * self.kept * self.inner()


class Other(Layer):
    """Another class of layers."""


def rename(owner: Any) -> None:
    """Leaves the same objects under another name."""
    del owner.nothing
    owner.missing = None


def replace_dictionary(owner: Any) -> None:
    owner.__dict__ = {**vars(owner), "scale": 2.5}


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda layer: setattr(layer, "scale", 2.5),
    "an equal attribute": lambda layer: setattr(layer, "scale", float("1.5")),
    "a new attribute": lambda layer: setattr(layer, "more", 1),
    "an attribute that is gone": lambda layer: delattr(layer, "scale"),
    "another name": rename,
    "the mode": lambda layer: layer.linear.eval(),
    "a class": lambda layer: setattr(layer, "__class__", Other),
    "an attribute of the class": lambda _: setattr(Layer, "kept", 4),
    "a new attribute of the class": lambda _: setattr(Layer, "more", 4),
    "a module": lambda layer: setattr(layer, "linear", nn.Linear(2, 2)),
    "a new module": lambda layer: layer.add_module("more", nn.Linear(2, 2)),
    "a buffer": lambda layer: setattr(layer.norm, "running_mean", torch.zeros(2)),
    "a new buffer": lambda layer: layer.register_buffer("more", torch.zeros(2)),
    "a graph of a buffer": lambda layer: layer.norm.running_mean.mul_(layer.linear.weight[0]),
    "a hook": lambda layer: layer.linear.register_forward_hook(lambda *_: None),
    "a hook before": lambda layer: layer.linear.register_forward_pre_hook(lambda *_: None),
    "an attribute of an object": lambda layer: setattr(layer.settings, "scale", 2.5),
    "another name in an object": lambda layer: rename(layer.settings),
    "the dictionary of an object": lambda layer: replace_dictionary(layer.settings),
    "a slot": lambda layer: setattr(layer.slotted, "value", 2),
    "an item of a list": lambda layer: layer.numbers.__setitem__(0, 3.5),
    "a new item of a list": lambda layer: layer.numbers.append(3.5),
    "the order of a list": lambda layer: layer.numbers.reverse(),
    "an item of a dictionary": lambda layer: layer.names.__setitem__("a", object()),
    "the order of a dictionary": lambda layer: layer.names.__setitem__("a", layer.names.pop("a")),
    "the order of an ordered dictionary": lambda layer: layer.ordered.move_to_end("a"),
    "an item of a set": lambda layer: layer.chosen.add(3),
    "a variable of a function": lambda layer: layer.change(2.5),
    "a name of the file": lambda _: globals().__setitem__("factor", 2.0),
    "a function by that name": lambda _: globals().__setitem__("factor", abs),
}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests change of this file is changed back."""
    monkeypatch.setitem(globals(), "factor", 1.0)
    monkeypatch.setattr(Layer, "kept", 3)
    monkeypatch.setattr(Layer, "more", 0, raising=False)
    monkeypatch.delattr(Layer, "more")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_looked_at_again(change: Callable[[Any], object]) -> None:
    layer = Layer()
    found = Modules(layer)
    layer(torch.ones(2, 2))  # whose normalization is not used
    assert found.is_shared
    assert found.are_as_found()
    change(layer)
    assert not found.are_as_found()


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(lambda: torch.ones(2), id="tensor"),
        pytest.param(lambda: torch.ones(2, 2)[0], id="view"),
        pytest.param(lambda: [torch.ones(2)], id="tensor in a list"),
        pytest.param(lambda: torch.ones(2).numpy(), id="array"),
        pytest.param(lambda: iter([1]), id="iterator"),
        pytest.param(lambda: torch.ones(2, requires_grad=True) * 2, id="graph"),
    ],
)
def test_values_are_taken_down_in_each_run(held: Callable[[], object]) -> None:
    layer = Layer()
    layer.held = held()
    found = Modules(layer)
    assert not found.is_shared
    assert not found.are_as_found()


def test_what_a_second_run_changes_is_put_back() -> None:
    layer = Layer()
    found = Modules(layer)
    named = dict(layer.names)
    with ExitStack() as undo:
        found.put_back(undo.callback)
        layer.scale = 2.5
        layer.names.clear()
        layer.settings.scale = [layer]
        layer.norm.running_mean = torch.ones(2)
        layer.linear.register_forward_hook(lambda *_: None)
    assert (layer.scale, layer.names, layer.settings.scale) == (1.5, named, 1.5)
    assert not layer.norm.running_mean.any()
    assert not layer.linear._forward_hooks
    assert found.are_as_found()


class Unsized(nn.Module):
    """As what ``torch.compile`` makes of a module: it has no length, and says so by an error."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __len__(self) -> int:
        raise TypeError("no length")


class Empty(Unsized):
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [Unsized, Empty])
def test_a_part_is_looked_at_whatever_its_length(kind: type[Unsized]) -> None:
    layer = Layer()
    layer.part = part = kind()
    found = Modules(layer)
    with ExitStack() as undo:
        found.put_back(undo.callback)
        part.count = 1
    assert part.count == 0


def test_a_later_change_is_not_lost_by_an_earlier_run() -> None:
    """A run in between has another look, and each second run finds what its first one did."""
    layer = Layer()
    first = Modules(layer)
    layer.scale = 2.5
    second = Modules(layer)
    seen = []
    for found in (second, first):
        with ExitStack() as undo:
            found.put_back(undo.callback)
            seen.append(layer.scale)
    assert (*seen, layer.scale) == (2.5, 1.5, 2.5)
