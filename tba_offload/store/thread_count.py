"""How many threads a drive is given, where they move the bytes of a device.

On a CPU each thread takes time from those that compute, so there are few. Beside a device cores have little
to do, and what two threads move may be far from what a drive carries, or several under one file system. No
library tells how many threads that takes, so it is tried: twice as many as long as they move more.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.errors import HangingError
from tba_offload.store.file import FileStore
from tba_offload.store.gds import GdsStore
from tba_offload.store.probe import TRANSFER_SECONDS, for_trial, has_room, in_turn, on_trial

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tba_offload.config.store import StoreOptions
    from tba_offload.device import Device
    from tba_offload.store.engine import QueuedStore

logger = logging.getLogger(__name__)

STORES: Mapping[str, type[FileStore | GdsStore]] = {"file": FileStore, "gds": GdsStore}
"""The two ways from a device to a drive."""

_MOST = 8
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
        """Return the same options with these numbers of threads."""
        return replace(options, readers=self.readers, writers=self.writers)

    def as_json(self) -> dict[str, object]:
        """Return what run log and doctor say of it."""
        rates = {str(threads): rate for threads, rate in self.rates.items()}
        return {"readers": self.readers, "writers": self.writers, "bytes_per_second_by_threads": rates}


def threads_that_pay(kind: str, path: str, device: Device, options: StoreOptions) -> ThreadCount:
    """Doubles the threads of each direction as long as that moves more bytes, up to 8.

    Two numbers are compared while the device has work, as in training, with an extent in flight for each
    thread of the larger. Where memory, threads or the drive have no room for more, or fail, what was found
    until then is taken.

    Args:
        kind: "file" or "gds".
        path: The directory of the store.
        device: The device that activations lie on.
        options: Of the store, with the numbers to start with, and whether there may be more.

    Raises:
        HangingError: The drive does not answer when a file is opened there.
    """
    found = ThreadCount(options.readers, options.writers)
    if not options.may_add_threads or not device.pins_memory:
        return found
    rates: dict[int, float] = {}
    while (more := 2 * found.writers) <= _MOST and has_room(options, more):
        try:
            tried = _rates((found.writers, more), kind, path, device, for_trial(options, more))
        except HangingError:
            raise  # it would be opened in the same way again
        except (OSError, RuntimeError) as error:  # of the drive, the device, or that pins memory
            logger.info("%s: %d threads for each direction could not be tried: %s", path, more, error)
            break
        rates |= tried
        if tried[more] < _WORTH * tried[found.writers]:
            break
        found = ThreadCount(more, more)
    return found._replace(rates=rates)


def _rates(
    counts: tuple[int, int], kind: str, path: str, device: Device, options: StoreOptions
) -> dict[int, float]:
    """Bytes a second in both directions at once with each number of threads; they take turns."""
    limit = options.stall_seconds or TRANSFER_SECONDS
    with ExitStack() as stack:
        stores: dict[int, QueuedStore] = {}
        for count in counts:
            chosen = replace(options, readers=count, writers=count)
            stores[count] = stack.enter_context(on_trial(STORES[kind], path, device, chosen, limit))
        return in_turn(stores, device, limit, extents=max(counts))
