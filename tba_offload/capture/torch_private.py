"""Functions of PyTorch that are wrapped while a session is open.

Megatron's ``CheckpointWithoutOutput`` and FSDP free a tensor's memory by resizing its storage to zero and
fill the same storage again before backward. Holding a reference does not prevent that, so a write that is
queued or running would read freed memory. ``UntypedStorage.resize_`` therefore asks each session first.

A ``torch.func`` transform raises if any saved-tensor hooks are active where it starts. A layer that uses one
inside its forward would fail only because it is offloaded. So the hooks of a session are taken off the stack
for as long as hooks are forbidden; what is saved meanwhile stays in memory.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING

import torch

from tba_offload.capture.hooks import Capture, set_aside
from tba_offload.capture.rematerialize import unwrap_classes

if TYPE_CHECKING:
    from collections.abc import Iterator

_captures: weakref.WeakSet[Capture] = weakref.WeakSet()
_resize = torch.UntypedStorage.resize_
_disable = torch.autograd.graph.disable_saved_tensors_hooks


@functools.wraps(_resize)
def _guarded_resize(storage: torch.UntypedStorage, size: int) -> object:
    for capture in list(_captures):
        capture.protect(storage)
    return _resize(storage, size)


@contextlib.contextmanager
def _disable_without_ours(error_message: str) -> Iterator[None]:
    with set_aside(), _disable(error_message):
        yield


def watch(capture: Capture) -> None:
    """From now on ask ``capture`` before a storage is resized, and have transforms in its layers work."""
    _captures.add(capture)
    torch.UntypedStorage.resize_ = _guarded_resize  # type: ignore[method-assign,assignment]
    torch.autograd.graph.disable_saved_tensors_hooks = _disable_without_ours


def unwatch(capture: Capture) -> None:
    """End :func:`watch`; with the last one PyTorch's own functions are back."""
    _captures.discard(capture)
    unwrap_classes()
    if not _captures:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        torch.autograd.graph.disable_saved_tensors_hooks = _disable
