"""The threads on which the processor updates sub-groups."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.states.host_update import Desk, HostStep, HostUpdate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    import torch

    from tba_offload.device import Device, Event
    from tba_offload.states.groups import Entry, SubGroup
    from tba_offload.states.host_ring import HostRing
    from tba_offload.states.masters import Masters
    from tba_offload.states.pieces import Piece

_THREADS = 2
"""While one updates, on all cores, the other copies what it has updated and what it is going to."""


class Done(NamedTuple):
    """An update that was made, and when it had ended, by :func:`time.perf_counter`."""

    update: HostUpdate
    at: float


class HostWorkers:
    """Threads that live as long as this: each has a stream of its own, and a team of threads that compute.

    Args:
        optimizer: The optimizer.
        kind: Its class.
        device: Where its parameters are.
        masters: The master copies among them.
        ring: Host memory for states.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        device: Device,
        masters: Masters,
        ring: HostRing,
    ) -> None:
        self._own = HostStep(optimizer, kind)
        self._computing = threading.Lock()  # one update at a time has all cores
        self._device = device
        self._masters = masters
        self._ring = ring
        self._desks = [Desk(device) for _ in range(_THREADS)]
        self._pool = ThreadPoolExecutor(_THREADS, "tba-update", device.bind_thread)
        self._clock = ThreadPoolExecutor(1, "tba-clock", device.bind_thread)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for copies."""
        return sum(desk.nbytes for desk in self._desks)

    def close(self) -> None:
        """End the threads, and free the memory."""
        self._pool.shutdown()
        self._clock.shutdown()
        self._desks.clear()

    def reached(self, point: Event) -> Future[float]:
        """When the device has come to a point of its work, by :func:`time.perf_counter`."""
        return self._clock.submit(_time_of, point)

    def update(
        self, group: SubGroup, resident: Mapping[Piece, Entry], options: Mapping[str, Any], after: Event
    ) -> Future[Done]:
        """Have a sub-group updated.

        Args:
            group: The sub-group.
            resident: States of its pieces that do not travel.
            options: Further arguments of the optimizer's ``step``.
            after: The device has made the gradients when this point is reached.
        """
        return self._pool.submit(self._update, group, resident, options, after)

    def _update(
        self, group: SubGroup, resident: Mapping[Piece, Entry], options: Mapping[str, Any], after: Event
    ) -> Done:
        states = self._ring.load(group)
        after.synchronize()
        desk = self._desks.pop()
        try:
            with self._device.on_side_stream():  # another one would wait for all that the device has to do
                update = HostUpdate(group, states, resident, self._masters, desk)
                update.fetch()
            with self._computing:
                update.run(self._own, options)
            with self._device.on_side_stream():
                update.give_back(with_gradients=self._own.unscales)
        finally:
            self._desks.append(desk)
            self._ring.store(group)
        return Done(update, time.perf_counter())


def _time_of(point: Event) -> float:
    point.synchronize()
    return time.perf_counter()
