"""The stores of this process: they end with it, and are inert in its forked children."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

    from tba_offload.store.engine import QueuedStore

_SECONDS_AT_FORK = 10.0
"""Seconds that a fork waits for running reads."""


_open_stores: weakref.WeakSet[QueuedStore] = weakref.WeakSet()
_held_at_fork: list[threading.Lock] = []


def opened(store: QueuedStore) -> None:
    """Record that a store is in use from now on."""
    _open_stores.add(store)


def ended(store: QueuedStore) -> None:
    """Record that it was closed, or given up."""
    _open_stores.discard(store)


def open_stores() -> list[QueuedStore]:
    """Return the stores of this process that are in use: neither closed nor given up."""
    return list(_open_stores)


def close_all() -> None:
    """Close every store, also if one of them raises."""
    with ExitStack() as stack:
        for store in open_stores():
            stack.callback(store.close)


def _before_fork() -> None:
    """Let no read run during a fork.

    Direct I/O into private memory must not overlap with one: before Linux 6.3 the bytes may arrive in a page
    that copy-on-write has given to the child. A drive that hangs shall not hang the fork too.
    """
    deadline = time.monotonic() + _SECONDS_AT_FORK
    reading = [busy for store in open_stores() for busy in store.reading()]
    _held_at_fork.extend(
        busy for busy in reading if busy.acquire(timeout=max(deadline - time.monotonic(), 0))
    )


def _after_fork_in_parent() -> None:
    while _held_at_fork:
        _held_at_fork.pop().release()


def _after_fork_in_child() -> None:
    _held_at_fork.clear()
    for store in open_stores():
        store.abandon()
    _open_stores.clear()


atexit.register(close_all)
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
