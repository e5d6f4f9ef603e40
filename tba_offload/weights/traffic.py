"""What frozen weights move, and how long layers wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.states.home import Homes
    from tba_offload.store.base import Moved

_MOST_WAITS = 20_000
"""Waits that are remembered: as many as a timeline tells."""


class WeightsMoved(NamedTuple):
    """What was moved in a while.

    Attributes:
        read_bytes: Bytes that were read.
        waited_seconds: How long layers waited for them.
        waits: When, by :func:`time.perf_counter`: from, until; the latest 20,000.
    """

    read_bytes: int
    waited_seconds: float
    waits: tuple[tuple[float, float], ...]


class WeightsTraffic:
    """What the frozen weights of a model move while they live in a store.

    What is noted may be taken by another thread, as where one evaluates while a step ends in another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._homes: Homes | None = None
        self._read = 0  # bytes that were taken note of
        self._waited = 0.0
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MOST_WAITS)

    def begin(self, homes: Homes) -> None:
        """Weights are taken over.

        Args:
            homes: Where they live from now on.
        """
        self._homes = homes
        self._read = homes.read_bytes

    def end(self) -> None:
        """Record that the weights are in memory for good."""
        self._homes = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for reads, if they have not ended."""
        homes = self._homes
        if homes is None:
            yield
            return
        before, began = homes.waited, time.perf_counter()
        try:
            yield
        finally:
            if homes.waited > before:
                with self._lock:
                    self._waited += homes.waited - before
                    self._waits.append((began, time.perf_counter()))

    def begin_step(self, resident: int) -> None:
        """Record that a step begins: what was moved before is none of it, but for what is in memory.

        Args:
            resident: Bytes of weights that are.
        """
        if self.take() is not None:
            with self._lock:
                self._read -= resident

    def take(self) -> WeightsMoved | None:
        """Return what was moved since the step began, or the last call; None without weights in a store."""
        homes = self._homes
        if homes is None:
            return None
        with self._lock:
            now = homes.read_bytes
            read, self._read = now - self._read, now
            waited, self._waited = self._waited, 0.0
            waits = tuple(self._waits)
            self._waits.clear()
        return WeightsMoved(read, waited, waits)

    def watch_moves(self, seen: Callable[[Moved], object] | None) -> None:
        """Has a function told of each call that moves bytes; see :meth:`ActivationStore.watch_moves`."""
        if self._homes is not None:
            self._homes.store.watch_moves(seen)
