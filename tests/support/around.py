"""Something around every transfer of a store: a drive of another speed, a clock, a fault of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tba_offload.device import ByteRange, Event
    from tba_offload.store.backend import Backend
    from tba_offload.store.base import Extent
    from tba_offload.store.engine import QueuedStore

    Around = Callable[[str, Extent], AbstractContextManager[object]]


def put_around(store: QueuedStore, around: Around) -> None:
    """Has every transfer of a store run inside a context, on its I/O thread.

    Args:
        store: The store; what is around it already stays, inside.
        around: Makes the context, from "write" or "read" and the extent. It should not refer to the store,
            which could not be collected then.
    """
    store._mover.backend = _Surrounded(store._mover.backend, around)


class _Surrounded:
    """A backend with something around its moves, each of which goes by itself."""

    joined_bytes = 0

    def __init__(self, backend: Backend, around: Around) -> None:
        self._backend = backend
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def move_out(self, extent: Extent, source: ByteRange, after: Event) -> int | None:
        """Write."""
        with self._around("write", extent):
            return self._backend.move_out(extent, source, after)

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> int | None:
        """Read."""
        with self._around("read", extent):
            return self._backend.move_in(extent, target, after, padded=padded)
