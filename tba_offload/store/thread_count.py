"""How many threads a drive is given, where they move the bytes of a device.

On a CPU each thread takes time from those that compute, so there are few. Beside a device cores have little
to do, and what two threads move may be far from what a drive carries, or several under one file system. No
library tells how many threads that takes, so it is tried: twice as many as long as they move more.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tba_offload.errors import StoreError
from tba_offload.store.file import FileStore
from tba_offload.store.gds import GdsStore
from tba_offload.store.hanging import opened
from tba_offload.store.probe import TRANSFER_SECONDS, end, for_trial, has_room, in_turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tba_offload.config.store import StoreOptions
    from tba_offload.device import Device
    from tba_offload.store.engine import QueuedStore

STORES: Mapping[str, type[FileStore | GdsStore]] = {"file": FileStore, "gds": GdsStore}
"""The two ways from a device to a drive."""

_MOST = 16
_WORTH = 1.1
"""Twice as many threads are taken if they move more than this times as much: measurements differ by less."""


class ThreadCount(NamedTuple):
    """How many threads each direction of a drive gets.

    Attributes:
        readers: Threads that read.
        writers: Threads that write.
        rates: Bytes a second in both directions at once, by the numbers that were tried; empty if none was.
    """

    readers: int
    writers: int
    rates: Mapping[int, float] = {}

    def of(self, options: StoreOptions) -> StoreOptions:
        """The options of a store with so many threads."""
        return replace(options, readers=self.readers, writers=self.writers)

    def as_json(self) -> dict[str, object]:
        """What the run log says of what was tried."""
        rates = {str(threads): rate for threads, rate in self.rates.items()}
        return {"bytes_per_second_by_threads": rates} if rates else {}


def threads_that_pay(kind: str, path: str, device: Device, options: StoreOptions) -> ThreadCount:
    """Doubles the threads of each direction as long as that moves more bytes, up to 16.

    Two numbers are compared while the device has work, as in training, with two extents in flight for each
    thread of the larger. Where memory or the drive has no room for more, or fails, what was found until then
    is taken.

    Args:
        kind: "file" or "gds".
        path: The directory of the store.
        device: The device that activations lie on.
        options: Of the store, with the numbers to start with, and whether there may be more.
    """
    found = ThreadCount(options.readers, options.writers)
    if not options.more_threads or not device.pins_memory:
        return found
    fewer = options.writers
    rates: dict[int, float] = {}
    while (more := 2 * fewer) <= _MOST and has_room(options, 2 * more):
        try:
            tried = _rates((fewer, more), kind, path, device, for_trial(options, 2 * more))
        except (StoreError, TimeoutError, torch.OutOfMemoryError):
            break
        rates |= tried
        if tried[more] < _WORTH * tried[fewer]:
            break
        fewer = more
    return ThreadCount(fewer, fewer, rates)


def _rates(
    counts: tuple[int, int], kind: str, path: str, device: Device, options: StoreOptions
) -> dict[int, float]:
    """Bytes a second in both directions at once with each number of threads; they take turns."""
    limit = options.stall_seconds or TRANSFER_SECONDS
    with ExitStack() as stack:
        stores: dict[int, QueuedStore] = {}
        for count in counts:
            chosen = replace(options, readers=count, writers=count)
            make = partial(STORES[kind], path, device=device, options=chosen)
            stores[count] = opened(make, path, device, limit)
            stack.push(partial(end, stores[count]))
        return in_turn(stores, device, limit, extents=2 * max(counts))
