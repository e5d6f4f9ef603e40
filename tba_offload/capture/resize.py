"""Protects transfers from storages that their owner empties.

Megatron's ``CheckpointWithoutOutput`` and FSDP free a tensor's memory by resizing its storage to zero and
fill the same storage again before backward. Holding a reference does not prevent that, so a write that is
queued or running would read freed memory. While a session is open, ``UntypedStorage.resize_`` therefore
asks it to take its hands off the storage first.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tba_offload.capture.hooks import Capture

_captures: weakref.WeakSet[Capture] = weakref.WeakSet()
_original = torch.UntypedStorage.resize_


@functools.wraps(_original)
def _guarded_resize(storage: torch.UntypedStorage, size: int) -> object:
    for capture in list(_captures):
        capture.protect(storage)
    return _original(storage, size)


def watch(capture: Capture) -> None:
    """From now on ``capture`` is asked before a storage is resized."""
    _captures.add(capture)
    torch.UntypedStorage.resize_ = _guarded_resize  # type: ignore[method-assign,assignment]


def unwatch(capture: Capture) -> None:
    """End :func:`watch`; with the last one PyTorch's own method is back."""
    _captures.discard(capture)
    if not _captures:
        torch.UntypedStorage.resize_ = _original  # type: ignore[method-assign]
