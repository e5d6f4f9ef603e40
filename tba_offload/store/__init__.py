"""Stores for the bytes of offloaded activations: files, host memory, or several drives at once."""

from __future__ import annotations

from tba_offload.store.base import Extent, Store
from tba_offload.store.multi import MultiStore
from tba_offload.store.open import open_store, register_kind, unregister_kind
from tba_offload.store.pool import Transfer

__all__ = ["Extent", "MultiStore", "Store", "Transfer", "open_store", "register_kind", "unregister_kind"]
