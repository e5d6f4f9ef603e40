"""Steps aside for code that forbids saved-tensor hooks.

A ``torch.func`` transform raises if any saved-tensor hooks are active where it starts. A layer that uses one
inside its forward would therefore fail only because it is offloaded. While a session is open, our hooks are
taken off the stack for as long as they are forbidden; what is saved meanwhile stays in memory.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

import torch

from tba_offload.capture.hooks import Capture, set_aside

if TYPE_CHECKING:
    from collections.abc import Iterator

_original = torch.autograd.graph.disable_saved_tensors_hooks
_captures: weakref.WeakSet[Capture] = weakref.WeakSet()


@contextlib.contextmanager
def _disable_without_ours(error_message: str) -> Iterator[None]:
    with set_aside(), _original(error_message):
        yield


def watch(capture: Capture) -> None:
    """From now on transforms inside the layers of ``capture`` work."""
    _captures.add(capture)
    torch.autograd.graph.disable_saved_tensors_hooks = _disable_without_ours


def unwatch(capture: Capture) -> None:
    """End :func:`watch`; with the last one PyTorch's own function is back."""
    _captures.discard(capture)
    if not _captures:
        torch.autograd.graph.disable_saved_tensors_hooks = _original
