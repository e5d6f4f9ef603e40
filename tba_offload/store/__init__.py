"""Where the bytes of offloaded activations go: files, host memory, several drives at once."""

from __future__ import annotations

from tba_offload.store.base import ActivationStore, Extent, IoFuture
from tba_offload.store.open import open_store
from tba_offload.store.options import register_kind, unregister_kind

__all__ = ["ActivationStore", "Extent", "IoFuture", "open_store", "register_kind", "unregister_kind"]
