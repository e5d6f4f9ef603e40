"""The state of random generators: taken before a layer's first run, put back for its second."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_turn = threading.RLock()
"""Held while a generator is turned back: PyTorch's generators are shared by all threads of the process."""


class Generator(NamedTuple):
    """A source of random numbers that layers draw from.

    Attributes:
        state: Returns its state: a tensor, or tensors by name.
        restore: Puts such a state back.
    """

    state: Callable[[], Any]
    restore: Callable[[Any], object]


def generators_of(device: torch.device) -> tuple[Generator, ...]:
    """The generators that all code shares: PyTorch's of the host and an accelerator, Python's and NumPy's."""
    shared = [Generator(torch.get_rng_state, torch.set_rng_state)]
    shared.append(Generator(random.getstate, random.setstate))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        shared.append(Generator(numpy.random.get_state, numpy.random.set_state))
    if device.type == "cpu":
        return tuple(shared)
    module = torch.get_device_module(device)
    return *shared, Generator(
        partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device)
    )


class RandomState:
    """What some generators are about to draw.

    Args:
        generators: The generators.
    """

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators
        self._states = [generator.state() for generator in generators]

    def is_current(self) -> bool:
        """Whether nothing was drawn since."""
        now = (generator.state() for generator in self._generators)
        return all(_are_equal(state, then) for state, then in zip(now, self._states, strict=True))

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draws the same numbers again inside the block; after it all is as before.

        One thread at a time: two backward passes that turn the same generator back would draw each other's.
        """
        with _turn:
            before = [generator.state() for generator in self._generators]
            try:
                self._restore(self._states)
                yield
            finally:
                self._restore(before)

    def _restore(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.restore(state)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two states are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):  # NumPy's arrays
        return bool(one.tobytes() == other.tobytes())
    return type(one) is type(other) and bool(one == other)
