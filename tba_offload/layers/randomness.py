"""The state of random generators: taken before a layer's first run, put back for its second."""

from __future__ import annotations

import contextlib
import operator
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


class Generator(NamedTuple):
    """A source of random numbers that layers draw from.

    Attributes:
        state: Returns its state: a tensor, or tensors by name.
        restore: Puts such a state back.
        is_turned_back: Whether layers may put its state back themselves when they have drawn from it, as
            ``torch.random.fork_rng`` does: that nothing was drawn cannot be told from its state.
        are_equal: Tells whether two states are the same.
    """

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    is_turned_back: bool = True
    are_equal: Callable[[Any, Any], bool] = _are_equal


def generators_of(device: torch.device) -> tuple[Generator, ...]:
    """The generators that all code shares: PyTorch's of the host and an accelerator, Python's and NumPy's."""
    shared = [Generator(torch.get_rng_state, torch.set_rng_state)]
    pythons = random.getstate, random.setstate
    shared.append(Generator(*pythons, is_turned_back=False, are_equal=operator.eq))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpys = numpy.random.get_state, numpy.random.set_state
        shared.append(Generator(*numpys, is_turned_back=False))
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
        states: The states of them.
        are_drawn: Whether something may have been drawn since.
    """

    def __init__(
        self, generators: Sequence[Generator], states: Sequence[Any], *, are_drawn: bool = True
    ) -> None:
        self._generators = generators
        self._states = states
        self._are_drawn = are_drawn

    @classmethod
    def of(cls, generators: Sequence[Generator], before: RandomState | None = None) -> RandomState:
        """The state of some generators, sharing with an earlier one what is still the same."""
        known = {} if before is None else dict(zip(before._generators, before._states, strict=True))
        return cls(generators, [_shared(each, known.get(each)) for each in generators])

    def is_current(self) -> bool:
        """Whether nothing was drawn since, as far as the states tell."""
        return all(map(_is_at, self._generators, self._states))

    def drawn(self) -> RandomState:
        """The same without the generators of which nothing was drawn since."""
        found = zip(self._generators, self._states, strict=True)
        moved = [(generator, state, not _is_at(generator, state)) for generator, state in found]
        kept = [(each, state) for each, state, has_moved in moved if has_moved or each.is_turned_back]
        are_drawn = any(has_moved for *_, has_moved in moved)
        return RandomState([each for each, _ in kept], [state for _, state in kept], are_drawn=are_drawn)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draws the same numbers again inside the block; after it all is as before.

        One thread at a time: two backward passes that turn the same generator back would draw each other's.
        """
        if not self._are_drawn and self.is_current():
            yield
            return
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


def _is_at(generator: Generator, state: object) -> bool:
    return generator.are_equal(generator.state(), state)


def _shared(generator: Generator, known: object) -> object:
    state = generator.state()
    return known if generator.are_equal(state, known) else state
