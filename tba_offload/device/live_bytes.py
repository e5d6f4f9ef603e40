"""Bytes of storages that something owns, from when they come into being until they are freed."""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue

import torch


class LiveBytes:
    """Bytes of storages that autograd or an optimizer owns, each counted once, from :meth:`add` until freed.

    A gradient counts from the moment at which autograd has put it in place. While backward still computes it,
    it is a temporary like any other, and as it is where gradients exist beforehand and are added to.

    Args:
        device: Storages elsewhere do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._known: dict[int, weakref.KeyedRef[int, torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._nbytes = 0
        self._shifted = 0
        self._added = 0
        self._most = 0
        # A finalizer may run inside any lock, so it only leaves word.
        self._freed: SimpleQueue[weakref.KeyedRef[int, torch.UntypedStorage]] = SimpleQueue()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        with self._lock:
            self._take_freed()
            return self._nbytes

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of storages, and those that :meth:`shift` has told of, at one moment."""
        with self._lock:
            self._take_freed()
            return self._nbytes - self._shifted, self._shifted

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor; of a sparse or a distributed one those that it is made of."""
        for plain in _plain_tensors(tensor):
            self.add_storage(plain.untyped_storage())

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage of the device."""
        if storage.device != self._device:
            return
        with self._lock:
            self._take_freed()
            key = storage._cdata
            if key in self._known and self._known[key]() is storage:
                return
            self._known[key] = weakref.KeyedRef(storage, self._freed.put, key)
            self._sizes[key] = storage.nbytes()
            self._nbytes += self._sizes[key]
            self._added += self._sizes[key]
            self._most = max(self._most, self._nbytes)

    def shift(self, nbytes: int) -> None:
        """Count bytes that come and go without their storage, as those of weights do; negative ones go."""
        with self._lock:
            self._take_freed()
            self._nbytes += nbytes
            self._shifted += nbytes
            self._most = max(self._most, self._nbytes)

    def take_added(self) -> int:
        """Bytes that were added since the last call, freed ones included."""
        with self._lock:
            added, self._added = self._added, 0
            return added

    def take_most(self) -> int:
        """Most bytes that were allocated at one time since the last call."""
        with self._lock:
            self._take_freed()
            most, self._most = self._most, self._nbytes
            return most

    def _take_freed(self) -> None:
        while not self._freed.empty():  # under the lock nothing else takes any out
            gone = self._freed.get_nowait()
            key = gone.key
            if self._known.get(key) is gone:
                del self._known[key]
                self._nbytes -= self._sizes.pop(key)


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with storages of their own that a tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten()[0])
        tensors = (part for part in parts if isinstance(part, torch.Tensor))  # a device mesh may be one too
        return [plain for part in tensors for plain in _plain_tensors(part)]
    return [tensor] if tensor.layout is torch.strided else []


def plain_storage(tensor: object) -> torch.UntypedStorage | None:
    """Return the storage of a plain tensor.

    Others, made of several or standing for one, have none of their own.
    """
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return None
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()
