"""Something around every transfer of a store: a drive of another speed, a clock, a fault of one's own."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tba_offload.device import ByteRange
    from tba_offload.store.base import Extent, Store
    from tba_offload.store.multi import MultiStore

    Around = Callable[[str, Extent], AbstractContextManager[object]]


def put_around(store: MultiStore, around: Around, *, tier: str | None = None) -> None:
    """Run every transfer of a store inside a context, on its I/O thread; it should not refer to the store.

    With a tier, only transfers to and from its places.
    """
    for place in store._places:
        if tier in {None, place.store.tier}:
            _surround(place.store, around)


@contextmanager
def taking_time(rate: float, _: str, extent: Extent) -> Iterator[None]:
    began = time.perf_counter()
    yield
    time.sleep(max(extent.nbytes / rate - (time.perf_counter() - began), 0.0))


def _surround(store: Store, around: Around) -> None:
    write, read = store.write, store.read

    def surrounded_write(extent: Extent, source: ByteRange) -> int | None:
        with around("write", extent):
            return write(extent, source)

    def surrounded_read(extent: Extent, target: ByteRange) -> int | None:
        with around("read", extent):
            return read(extent, target)

    store.write, store.read = surrounded_write, surrounded_read  # type: ignore[method-assign]
