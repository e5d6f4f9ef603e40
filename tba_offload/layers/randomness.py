"""The state of random generators: taken before a layer's first run, put back for its second."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import random
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


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
        has_rested: Tells, without the time that it takes to take its state, that nothing was drawn since it
            had a state; may say no although that is so. ``None`` where there is no such way.
    """

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    is_turned_back: bool = True
    are_equal: Callable[[Any, Any], bool] = _are_equal
    has_rested: Callable[[Any], bool] | None = None


def generators_of(devices: Iterable[torch.device]) -> tuple[Generator, ...]:
    """Return the generators that all code shares.

    PyTorch's of the host and of accelerators, Python's and NumPy's.

    Args:
        devices: What layers compute on.
    """
    shared = [Generator(torch.get_rng_state, torch.set_rng_state)]
    pythons = random.getstate, random.setstate
    shared.append(Generator(*pythons, is_turned_back=False, are_equal=operator.eq))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpys = numpy.random.get_state, numpy.random.set_state
        shared.append(Generator(*numpys, is_turned_back=False, has_rested=_has_numpy_rested))
    return (*shared, *(_generator_of(device) for device in devices if device.type not in {"cpu", "meta"}))


def _generator_of(device: torch.device) -> Generator:
    module = torch.get_device_module(device)
    return Generator(partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device))


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
        """Return the state of some generators, sharing with an earlier one what is still the same."""
        known = {} if before is None else dict(zip(before._generators, before._states, strict=True))
        return cls(generators, [_shared(each, known.get(each)) for each in generators])

    def is_current(self) -> bool:
        """Whether nothing was drawn since, as far as the states tell."""
        return all(map(_is_at, self._generators, self._states))

    def drawn(self) -> RandomState:
        """Return the same without the generators of which nothing was drawn since."""
        found = zip(self._generators, self._states, strict=True)
        moved = [(generator, state, _has_drawn(generator, state)) for generator, state in found]
        kept = [(each, state) for each, state, has_moved in moved if has_moved or each.is_turned_back]
        are_drawn = any(has_moved for *_, has_moved in moved)
        return RandomState([each for each, _ in kept], [state for _, state in kept], are_drawn=are_drawn)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the same numbers again inside the block; after it all is as before."""
        if not self._are_drawn and self.is_current():
            yield
            return
        before = [generator.state() for generator in self._generators]
        try:
            self._restore(self._states)
            yield
        finally:
            self._restore(before)

    def _restore(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.restore(state)


def _has_numpy_rested(state: Any) -> bool:
    """Whether nothing was drawn from NumPy's generator since it had this state, as far as its memory tells.

    To take its state takes 25 microseconds, or 100 where its code is in no cache; to read its memory one.
    """
    bits_now = getattr(sys.modules["numpy"].random, "get_bit_generator", None)  # not in old versions
    if bits_now is None or type(state) is not tuple or state[0] != "MT19937":
        return False
    _, keys, position, has_another, _ = state
    if has_another:  # a normal number that was made with the last one; to draw it leaves no trace there
        return False
    bits = bits_now()
    if type(bits).__name__ != "MT19937":
        return False
    before = keys.tobytes() + int(position).to_bytes(4, sys.byteorder)
    return bool(ctypes.string_at(bits.ctypes.state_address, len(before)) == before)


def _has_drawn(generator: Generator, state: object) -> bool:
    """Whether something was drawn since a generator had a state, unless it was turned back to that."""
    if generator.has_rested is not None and generator.has_rested(state):
        return False
    return not _is_at(generator, state)


def _is_at(generator: Generator, state: object) -> bool:
    return generator.are_equal(generator.state(), state)


def _shared(generator: Generator, known: object) -> object:
    if generator.has_rested is not None and known is not None and generator.has_rested(known):
        return known
    state = generator.state()
    return known if generator.are_equal(state, known) else state
