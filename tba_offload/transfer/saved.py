"""Saved storages, which hold the bytes of saved tensors until autograd releases the tensors.

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
    KEPT = "in memory until autograd releases the last saved tensor of this storage"


class SavedStorage:
    """A storage that autograd saved, at one version. Only autograd's saved tensors keep this object alive.

    Attributes:
        key: Name of the activation, with the layer and the micro-batch.
        nbytes: Size in bytes.
        memory: Strong reference to the storage until the write is queued; then ``None``. The reference is
            set again if the storage stays in memory, or if a restored storage is needed more than once.
        alive: Weak reference to the original storage or, after a read, to the restored storage.
        start: Index of the first saved byte in the storage; above 0 if direct I/O needs an aligned address.
        address: Original address of the saved bytes. Restored bytes have the same address modulo the
            store's alignment.
        stream: The stream that produced the bytes or, after a read, the stream of the restored memory.
        is_filling: Whether the operation of autograd may still write to the storage.
        is_restored: Whether ``alive`` refers to restored memory.
        was_held: Whether another reference kept the memory alive until backward first used the storage.
        tensors: Number of saved tensors that use the storage.
        uses: Number of times that backward has used a saved tensor of the storage.
        ref: Weak reference to this object, for the offloader's lists.
        source: Weak reference to the storage that autograd saved. For a dense copy, ``source`` and ``alive``
            differ.
        probe: A tensor that shares the version counter of the saved tensor.
        version: Version of the saved tensor when autograd saved the tensor.
        trace: Entry of this storage in the step's trace.
    """

    __slots__ = (
        *("__weakref__", "address", "alive", "is_filling", "is_restored", "key", "memory", "nbytes"),
        *("probe", "ref", "source", "start", "stream", "tensors", "trace", "uses", "version", "was_held"),
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
        self.start = self.address = self.tensors = self.uses = 0
        self.stream: Any = None
        self.is_filling = self.is_restored = self.was_held = False
        self.ref = ref = SavedRef(self, died)  # the class has no __init__, which would cost another call
        ref.key = key
        ref.nbytes = ref.charged = nbytes
        ref.settled = 0
        ref.epoch = epoch
        ref.state = State.PENDING
        ref.extent = ref.write = ref.read = None


class SavedRef(weakref.ref["SavedStorage"]):
    """Weak reference to a :class:`SavedStorage`, with the data that is needed after the object is freed.

    The callback of the reference is a C function that appends to a queue. A C function takes no lock and
    cannot be interrupted by Ctrl-C.

    Attributes:
        key: The key of the saved storage.
        nbytes: The size of the saved storage.
        epoch: Number of steps that were discarded before the storage was saved.
        charged: Bytes that count as in flight.
        settled: Bytes that count as kept, and not as in flight.
        state: State of the saved storage.
        extent: The extent in the store, after the write.
        write: The queued or running write.
        read: The read, until backward uses the bytes.
    """

    __slots__ = ("charged", "epoch", "extent", "key", "nbytes", "read", "settled", "state", "write")

    key: Hashable
    nbytes: int
    epoch: int
    charged: int
    settled: int
    state: State
    extent: Extent | None
    write: Transfer | None
    read: Transfer | None
