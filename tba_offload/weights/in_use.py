"""Which layers compute now, and so need their weights: in a forward, or in a backward pass."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class _Pass(NamedTuple):
    """A backward pass: what autograd calls at its end and holds until then, and the layer that it is at."""

    at_end: weakref.ref[Callable[[], object]]
    layer: int


class InUse:
    """The layers that compute: in a forward by the thread in which they do, in backward by the pass.

    Autograd runs a pass in threads of its own where there is an accelerator. That an exception has ended one
    is not told: autograd only lets go of its callback.
    """

    def __init__(self) -> None:
        self._forward: dict[int, list[int]] = {}
        self._backward: dict[int, _Pass] = {}

    def __contains__(self, number: int) -> bool:
        return any(number in layers for layers in self._forward.values()) or any(
            each.layer == number and each.at_end() is not None for each in self._backward.values()
        )

    def begin(self, number: int) -> None:
        """Record that the forward of a layer begins in this thread."""
        layers = self._forward.setdefault(threading.get_ident(), [])
        if number in layers:  # an interrupt has ended it, and what it ran inside, untold
            del layers[layers.index(number) :]
        layers.append(number)

    def end(self, number: int) -> bool:
        """Return the forward of a layer has ended in this thread; whether its beginning was told."""
        thread = threading.get_ident()
        layers = self._forward.get(thread, [])
        if number not in layers:
            return False
        del layers[layers.index(number) :]
        if not layers:
            del self._forward[thread]
        return True

    def follow(self, number_of_pass: int, number: int, at_end: Callable[[], object]) -> None:
        """Record that a pass has come to its first layer.

        Args:
            number_of_pass: The pass.
            number: The layer.
            at_end: What autograd calls when the pass has ended, and lets go of where that is by an exception.
        """
        alive = {which: each for which, each in self._backward.items() if each.at_end() is not None}
        self._backward = {**alive, number_of_pass: _Pass(weakref.ref(at_end), number)}

    def reach(self, number_of_pass: int, number: int) -> int | None:
        """Return a pass has come to a layer: the one where it was before; ``None`` if it is not followed."""
        followed = self._backward.get(number_of_pass)
        if followed is None:
            return None
        self._backward[number_of_pass] = followed._replace(layer=number)
        return followed.layer

    def leave(self, number_of_pass: int) -> None:
        """Record that a backward pass has ended."""
        self._backward.pop(number_of_pass, None)
