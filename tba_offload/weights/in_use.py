"""Which layers compute now, and so need their weights: in a forward, or in a backward pass."""

from __future__ import annotations

import threading


class InUse:
    """The layers that compute, by the threads in which they do."""

    def __init__(self) -> None:
        self._forward: dict[int, list[int]] = {}
        self._backward: dict[int, dict[int, int]] = {}  # of a thread: its passes, and the layer each is at

    def __contains__(self, number: int) -> bool:
        return any(number in layers for layers in self._forward.values()) or any(
            number in passes.values() for passes in self._backward.values()
        )

    def begin(self, number: int, *, within_backward: bool) -> None:
        """The forward of a layer begins in this thread; outside of any pass none that was here is alive."""
        thread = threading.get_ident()
        if not within_backward:
            self._backward.pop(thread, None)
        layers = self._forward.setdefault(thread, [])
        if number in layers:  # an interrupt has ended it, and what it ran inside, untold
            del layers[layers.index(number) :]
        layers.append(number)

    def end(self, number: int) -> bool:
        """The forward of a layer has ended in this thread; whether its beginning was told."""
        thread = threading.get_ident()
        layers = self._forward.get(thread, [])
        if number not in layers:
            return False
        del layers[layers.index(number) :]
        if not layers:
            del self._forward[thread]
        return True

    def reach(self, number_of_pass: int, number: int) -> tuple[bool, int]:
        """A pass of this thread has come to a layer: whether to its first one, and where it was before."""
        passes = self._backward.setdefault(threading.get_ident(), {})
        before = passes.get(number_of_pass)
        passes[number_of_pass] = number
        return before is None, number if before is None else before

    def leave(self, thread: int, number_of_pass: int) -> None:
        """A backward pass has ended."""
        passes = self._backward.get(thread, {})
        passes.pop(number_of_pass, None)
        if not passes:
            self._backward.pop(thread, None)
