"""A layer in autograd's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tba_offload.errors import SavedTensorModifiedError
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.torch_private import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import Node

    Function = TypeVar("Function", bound=Callable[..., Any])


def first_differentiable(output: object) -> torch.Tensor | None:
    """Return the first tensor of a layer's output through which gradients will come back."""
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, torch.Tensor) and first.requires_grad:  # nearly always: at once
        return first
    try:
        return next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
    except TooManyError:
        return None


def nearest_nodes(root: Node, count: int, *, after: int) -> list[Node]:
    """Return the first nodes of a graph of autograd on the way from its root, breadth first.

    Nodes that accumulate gradients are left out: they belong to parameters. Where a loop holds its loss until
    the next one, they are part of the next graph too.

    Args:
        root: Where to begin.
        count: Most nodes.
        after: Only those that were made later than the one of this number in autograd's sequence.
    """
    found, seen = [root], {root}
    for node in found:
        for following, _ in node.next_functions:
            if following is None or following in seen or len(found) >= count:
                continue
            if number_of(following) > after and not hasattr(following, "variable"):
                seen.add(following)
                found.append(following)
    return found


def check_version(witness: torch.Tensor, version: int, what: object) -> None:
    """Check that a saved tensor has not changed since.

    Raises:
        SavedTensorModifiedError: It was changed in place.
    """
    if witness._version != version:
        raise SavedTensorModifiedError(
            f"a tensor that backward needs was changed in place after it was saved ({what}): it is at "
            f"version {witness._version}, saved was version {version}; change a copy instead, or find the "
            "operation with torch.autograd.set_detect_anomaly(True)"
        )
