"""How fast a store moves bytes: measured through the package's own stores, as activations move."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tba_offload.device.ranges import ByteRange, aligned_range
from tba_offload.errors import StoreFullError
from tba_offload.store.base import take_back
from tba_offload.store.hanging import opened
from tba_offload.store.open import STORES
from tba_offload.store.options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.device import Device
    from tba_offload.store.base import ActivationStore, Extent, IoFuture
    from tba_offload.store.engine import QueuedStore

TRANSFER_SECONDS = 60.0
"""Seconds after which a transfer of a measurement is taken to hang."""

EXTENT_BYTES = 16 << 20
"""Bytes of one activation of a large layer."""

BLOCKS = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Sizes of transfers that :func:`bench` tries: activations from small to large models."""

THREADS = (1, 2, 4)
"""Numbers of threads for each direction that :func:`bench` tries."""

_MOST_MEMORY = 1 << 30
"""Bytes that transfers in flight take at most."""

_ENOUGH = 0.95
"""Share of the highest rate that counts as the highest: drives differ by that from run to run."""

_WORTH_IT = 0.5
"""Share of the highest rate below which a size of blocks is not worth a transfer."""

_MOST_LEFT = 1 << 20
"""Bytes up to which activations may stay in memory because they are small."""


class Rates(NamedTuple):
    """Bytes a second of a store.

    Attributes:
        write: To the store.
        read: From the store.
        both: To and from the store at once, added.
    """

    write: float
    read: float
    both: float


class Row(NamedTuple):
    """Rates of transfers of one size with one number of threads.

    Attributes:
        block_bytes: Size of a transfer.
        threads: Threads in each direction.
        write: Bytes a second to the store.
        read: Bytes a second from the store.
        both: To and from the store at once, added.
    """

    block_bytes: int
    threads: int
    write: float
    read: float
    both: float


def measure(
    store: ActivationStore,
    device: Device,
    *,
    extent_bytes: int = EXTENT_BYTES,
    extents: int = 2,
    seconds: float = 0.2,
) -> Rates:
    """Return the rates of a store, with a constant number of transfers in flight.

    The store is left as empty as it was. The random generators of PyTorch keep their state.

    Args:
        store: The store.
        device: The device that the bytes lie on.
        extent_bytes: Size of a transfer.
        extents: Transfers in flight.
        seconds: How long each of the three rates is measured.

    Raises:
        StoreError: A transfer failed, or there is no room.
        TimeoutError: A transfer hangs.
    """
    source = random_bytes(extent_bytes, device)
    targets = [aligned_range(extent_bytes, source.address, store.alignment, device) for _ in range(extents)]
    held: list[Extent] = []
    in_flight: deque[IoFuture] = deque()
    after = device.event()
    after.synchronize()

    def wait_for(most: int) -> None:
        while len(in_flight) > most:
            in_flight[0].wait(TRANSFER_SECONDS)
            in_flight.popleft()

    def move(number: int, *, writes: bool) -> None:
        wait_for(extents - 1)  # then the last transfer of this extent, and into this target, has ended
        extent, target = held[number % len(held)], targets[number % extents]
        if writes:
            in_flight.append(store.write(extent, source, after))
        else:
            in_flight.append(store.read(extent, target, after, padded=True))

    def rate(writes: Callable[[int], bool]) -> float:
        began, number = time.perf_counter(), 0
        while number < 2 * extents or time.perf_counter() - began < seconds:
            move(number, writes=writes(number))
            number += 1
        wait_for(0)
        return number * extent_bytes / (time.perf_counter() - began)

    try:
        held.extend(store.reserve(extent_bytes, source.address) for _ in range(2 * extents))
        rate(lambda _: True)  # not counted: the file grows, memory is pinned, drivers start
        return Rates(
            write=rate(lambda _: True),
            read=rate(lambda _: False),
            both=rate(lambda number: bool((number + number // len(held)) % 2)),  # each extent in turn
        )
    finally:
        take_back(in_flight, TRANSFER_SECONDS)
        for extent in held:
            store.release(extent)
        store.take_loads()


def bench(
    directory: str, device: Device, kind: str, *, seconds: float = 0.2, show: Callable[[Row], object]
) -> list[Row]:
    """Measure a directory by size of blocks and number of threads, with two transfers in flight a thread.

    Nothing stays in the directory. Larger blocks are left out where there is no room for them.

    Args:
        directory: Where to write.
        device: The device that the bytes lie on.
        kind: ``"file"`` or ``"gds"``.
        seconds: How long each rate is measured.
        show: Called with each row when it is known.

    Raises:
        StoreError: The directory cannot be used, or a transfer failed.
        TimeoutError: A transfer hangs.
    """
    rows: list[Row] = []
    for count in THREADS:
        with on_trial(kind, directory, device, threads=count) as store:
            for nbytes in BLOCKS:
                extents = max(min(2 * count, _MOST_MEMORY // nbytes), 1)
                try:
                    rates = measure(store, device, extent_bytes=nbytes, extents=extents, seconds=seconds)
                except StoreFullError:
                    if not rows:
                        raise
                    break
                rows.append(Row(nbytes, count, *rates))
                show(rows[-1])
    return rows


def advised(rows: Sequence[Row]) -> dict[str, int]:
    """Return the settings that follow from a measurement.

    Returns:
        ``writers`` and ``readers``, the fewest threads within 5 % of the highest rate, and
        ``min_tensor_bytes``, the smallest block that reaches half of that rate both ways, at most 1 MiB.
    """
    threads, least = {}, 0
    for name in ("write", "read"):
        rates = {row: getattr(row, name) for row in rows}
        best = max(rows, key=lambda row: rates[row])
        same = (row for row in rows if row.block_bytes == best.block_bytes)
        threads[name] = min(row.threads for row in same if rates[row] >= _ENOUGH * rates[best])
        worth = min(row.block_bytes for row in rows if rates[row] >= _WORTH_IT * rates[best])
        least = max(least, min(worth, _MOST_LEFT))
    return {"writers": threads["write"], "readers": threads["read"], "min_tensor_bytes": least}


@contextmanager
def on_trial(kind: str, directory: str, device: Device, *, threads: int) -> Iterator[QueuedStore]:
    """Open a store for a measurement, and close it afterwards; one whose transfers hang is given up.

    Raises:
        StoreError: The directory cannot be used.
    """
    options = StoreOptions(
        directories=(directory,), readers=threads, writers=threads, stall_seconds=TRANSFER_SECONDS
    )
    make = partial(STORES[kind], directory, device=device, options=options)
    store = opened(make, directory, device, TRANSFER_SECONDS)
    try:
        yield store
    except TimeoutError:
        store.give_up()
        raise
    finally:
        store.close()  # of one that was given up nothing


def random_bytes(nbytes: int, device: Device) -> ByteRange:
    """Return bytes on a device that no drive can compress, from a generator of their own."""
    generator = torch.Generator().manual_seed(0)  # of the CPU: not every device has generators
    words = torch.randint(-(2**63), 2**63 - 1, (-(-nbytes // 8),), generator=generator)
    return ByteRange.of(words.view(torch.uint8)[:nbytes].to(device.torch_device))
