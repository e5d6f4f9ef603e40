"""A meter of the memory that PyTorch has made, whoever holds it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tba_offload.device import ByteRange, aligned_range

if TYPE_CHECKING:
    from collections.abc import Iterator


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made in this context and are still alive, whoever holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for place in ("transfer.offloader", "capture.views", "states.home"):
            self._patches.enter_context(mock.patch(f"tba_offload.{place}.aligned_range", self._allocate))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _allocate(self, *arguments: Any) -> ByteRange:
        found = aligned_range(*arguments)
        self._count(found.storage)
        return found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in self._unknown((args, kwargs)):  # parameters, gradients, inputs
            self._storages[storage._cdata] = weakref.ref(storage)
        result = function(*args, **kwargs)
        for storage in self._unknown(result):
            self._count(storage)
        return result

    def _unknown(self, tree: object) -> Iterator[torch.UntypedStorage]:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None or known() is not storage:
                    yield storage

    def _count(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()

        def died(_: object) -> None:
            self.live -= nbytes

        self._storages[storage._cdata] = weakref.ref(storage, died)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


class ResizedBytes(LiveBytes):
    """Bytes of all storages that were seen, as large as they are now: some lose their memory.

    Attributes:
        most: The most while :meth:`watching`, since it was last set.
    """

    most = 0
    _is_watching = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure at each operation; a look at all storages takes longer than most operations."""
        self.most, self._is_watching = self.now(), True
        yield
        self._is_watching = False

    def now(self) -> int:
        alive = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self._is_watching:
            self.most = max(self.most, self.now())
        return result


def nbytes_of(master: Tensor) -> int:
    """Bytes of memory that a master has, whether it tells of them or not."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        return master.untyped_storage().nbytes()
