"""Saved storages, and the handles through which autograd uses saved storages.

::

    PENDING ──► WRITING ──► STORED ──► prefetched, or read on demand
       │           │
       └───────────┴──► KEPT: used before its write ended, or its write failed
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import torch

    from tba_offload.store.base import Extent
    from tba_offload.store.pool import Transfer


class State(enum.Enum):
    """State of a saved storage."""

    PENDING = "in memory, before the write is queued"
    WRITING = "in memory until the write ends"
    STORED = "in the store, and perhaps also restored to memory"
    KEPT = "in memory until the last handle is gone"


class Unread:
    """Owner of a restored storage. All unused handles share the owner, except the storage's first handle.

    After the last of these handles is used or dropped, Python frees the ``Unread`` and the restored storage.

    Attributes:
        memory: The restored storage.
    """

    __slots__ = ("__weakref__", "memory")

    memory: torch.UntypedStorage


NO_HANDLES: weakref.ref[Unread] = weakref.ref(Unread())
FIRST = Unread()


class Handle:
    """Reference from one saved tensor to a saved storage. Autograd owns the handle.

    Most storages have one handle. The first handle of a storage creates no :class:`Unread`, because each
    object takes time in the cyclic garbage collector.

    Attributes:
        saved: The saved storage.
        unread: ``FIRST`` or an :class:`Unread` until backward uses this handle; then ``None``.
    """

    __slots__ = ("saved", "unread")

    def __init__(self, saved: SavedStorage) -> None:
        self.saved = saved
        self.unread: Unread | None = FIRST
        if saved.first_waits is None:
            saved.first_waits = True
            return
        unread = saved.unread()
        if unread is None:
            unread = Unread()
            saved.unread = weakref.ref(unread)
        self.unread = unread


class SavedStorage:
    """A storage that autograd saved, at one version. Only autograd's handles keep this object alive.

    Attributes:
        key: Name of the activation, with the layer and the micro-batch.
        nbytes: Size in bytes.
        memory: Strong reference to the storage until the write is queued; then ``None``. The reference is
            set again if the storage stays in memory, or is restored for the first handle.
        alive: Weak reference to the original storage or, after a read, to the restored storage.
        start: First byte of the payload in the storage; above 0 if a read aligned the payload for direct I/O.
        address: Original address of the payload. Restored bytes have the same address modulo the store's
            alignment.
        state: State of the storage.
        stream: The stream that produced the bytes or, after a read, the stream of the restored memory.
        is_filling: Whether the operation that saves the tensor may still write to the storage.
        is_restored: Whether ``alive`` refers to restored memory.
        was_used: Whether backward has used the storage.
        was_held: Whether another reference kept the memory alive until the first use.
        first_waits: Whether the first handle is still unused; ``None`` before the first handle exists.
        unread: Weak reference to the :class:`Unread` that all unused handles except the first handle share.
        ref: Weak reference to this object, for the offloader's lists.
        source: Weak reference to the storage that autograd saved. For a dense copy, ``source`` and ``alive``
            differ.
        probe: A tensor that shares the version counter of the saved tensor.
        version: Version of the saved tensor when the tensor was saved.
        trace: The record of this storage in the step's trace.
    """

    __slots__ = (
        *("__weakref__", "address", "alive", "first_waits", "is_filling", "is_restored", "key", "memory"),
        *("nbytes", "probe", "ref", "source", "start", "state", "stream", "trace", "unread", "version"),
        *("was_held", "was_used"),
    )

    probe: Any
    version: int
    trace: Any

    def __init__(
        self,
        storage: torch.UntypedStorage,
        nbytes: int,
        key: Hashable,
        epoch: int,
        died: Callable[[SavedRef], object],
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.memory: torch.UntypedStorage | None = storage
        self.alive = self.source = weakref.ref(storage)
        self.start = self.address = 0
        self.state = State.PENDING
        self.stream: Any = None
        self.is_filling = self.is_restored = self.was_used = self.was_held = False
        self.first_waits: bool | None = None
        self.unread = NO_HANDLES
        self.ref = ref = SavedRef(self, died)  # the class has no __init__, which would cost another call
        ref.key = key
        ref.nbytes = ref.charged = nbytes
        ref.settled = 0
        ref.epoch = epoch
        ref.is_pending = True
        ref.extent = ref.write = ref.read = None


class SavedRef(weakref.ref["SavedStorage"]):
    """Weak reference to a :class:`SavedStorage`, with the data that is needed after the object is freed.

    The callback of the reference is a C function that appends to a queue. The callback may run while any lock
    is held, so the callback must not take a lock. An interrupt can abort a Python function, but not a C
    function.

    Attributes:
        key: The key of the saved storage.
        nbytes: The size of the saved storage.
        epoch: Number of steps that were discarded before the storage was saved.
        charged: Bytes that count as in flight.
        settled: Bytes that are counted as kept, and not as in flight.
        is_pending: Whether the bytes are counted as pending writes.
        extent: The extent in the store, after the write.
        write: The write, while it is queued or running.
        read: The read, until the bytes are used.
    """

    __slots__ = ("charged", "epoch", "extent", "is_pending", "key", "nbytes", "read", "settled", "write")

    key: Hashable
    nbytes: int
    epoch: int
    charged: int
    settled: int
    is_pending: bool
    extent: Extent | None
    write: Transfer | None
    read: Transfer | None
