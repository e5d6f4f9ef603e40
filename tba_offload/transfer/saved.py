"""One storage that autograd saved, and the weak handle by which the offloader's own lists know it.

::

    PENDING ──► WRITING ──► STORED ──► read ahead, or on demand
       │           │
       └───────────┴──► KEPT: its use came first, or its write failed
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
    """Where the bytes of a saved storage are."""

    PENDING = "in memory; its write is not queued yet"
    WRITING = "in memory until its write ends"
    STORED = "in the store, perhaps restored to memory as well"
    KEPT = "in memory until the last handle is gone"


class Unread:
    """All handles of a saved storage but the first that backward has not used yet; each holds this object.

    With the last of them, used or dropped, restored data loses its strong reference. A count would need a
    finalizer.

    Attributes:
        memory: The restored storage.
    """

    __slots__ = ("__weakref__", "memory")

    memory: torch.UntypedStorage


NOBODY: weakref.ref[Unread] = weakref.ref(Unread())
FIRST = Unread()


class Handle:
    """A saved tensor's share of a saved storage. Autograd owns it.

    Most storages have one handle. It makes no object more, because each costs the cyclic collector time.

    Attributes:
        saved: The saved storage.
        unread: Held until backward uses this handle; ``FIRST`` for the first one.
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
    """One storage at one version. Only autograd's handles hold it strongly: it dies with the last of them.

    Attributes:
        key: Names the activation; its text has the layer and the micro-batch.
        nbytes: Size in bytes.
        memory: The storage while this object keeps it in memory: pending, kept, or restored for the first
            handle. A write has its own reference.
        alive: Weak reference to the original storage; to the restored one after a read.
        start: First byte of the payload in the storage; not 0 where a read placed it to suit direct I/O.
        address: Where the payload lay. Restored bytes lie at the same address modulo the alignment.
        state: Where the bytes are.
        stream: The stream that produced the bytes; after a read, the stream that the memory belongs to.
        is_filling: Whether the operation that saved it may still write to it.
        is_restored: Whether ``alive`` refers to restored memory.
        was_used: Whether backward has used it.
        was_held: Whether its memory was alive at its first use although nothing here kept it.
        first_waits: Whether the first handle was not used yet; ``None`` before there is one.
        unread: Weak reference to what the other unread handles hold.
        ref: The offloader's weak handle.
        source: Weak reference to the storage that was saved; not ``alive`` where a sparse view was copied.
        probe: Shares the version counter of the saved tensor.
        version: What that counter said when the storage was saved.
        trace: What the step's trace has of it.
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
        self.unread = NOBODY
        self.ref = ref = SavedRef(self, died)  # without a constructor of its own, which would be a call more
        ref.key = key
        ref.nbytes = ref.charged = nbytes
        ref.settled = 0
        ref.epoch = epoch
        ref.is_pending = True
        ref.extent = ref.write = ref.read = None


class SavedRef(weakref.ref["SavedStorage"]):
    """Weak handle of a :class:`SavedStorage`, with all that must be given back when it dies.

    The callback is a function written in C that appends to a queue. The cyclic collector may run it inside
    any lock, and no interrupt can strike in it.

    Attributes:
        key: As of the saved storage.
        nbytes: As of the saved storage.
        epoch: Number of the step that saved it; steps that were thrown away count.
        charged: Bytes that count as in flight.
        settled: Bytes that count as kept outside the window.
        is_pending: Whether its bytes count in the queue of pending writes.
        extent: Where in the store it is, once it was written.
        write: Its write while that is queued or running.
        read: Its read until the bytes are used.
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
