"""Recomputation of one layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable


def torch_checkpoint(forward: Callable[..., Any], *args: object, **kwargs: object) -> object:
    """Runs ``forward`` so that backward runs it again instead of keeping its activations.

    The random state is saved and restored, so that dropout draws the same masks. Inputs stay in memory.
    """
    again: Callable[..., object] = partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
    return again(forward, *args, **kwargs)


def is_recomputation() -> bool:
    """Whether the calling forward runs inside a backward pass.

    Holds for torch's and Megatron's checkpoints alike: what is saved then is used at once and stays.
    """
    return torch._C._current_graph_task_id() != -1
