"""Functions for the autograd graph of a layer, and for the versions of its saved tensors."""

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
    """Return the first tensor in a layer's output that requires a gradient; ``None`` if there is none."""
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, torch.Tensor) and first.requires_grad:  # the usual case
        return first
    try:
        return next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
    except TooManyError:
        return None


def nearest_nodes(root: Node, count: int, *, after: int) -> list[Node]:
    """Return the nodes of an autograd graph that are nearest to the root, in breadth-first order.

    ``AccumulateGrad`` nodes are left out, because several steps may share them.

    Args:
        root: The first node.
        count: Maximum number of nodes.
        after: Nodes with a sequence number up to ``after`` are left out.
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
    """Check that a saved tensor was not changed in place.

    Args:
        witness: The tensor, or a tensor that shares its version counter.
        version: The version of the tensor when autograd saved the tensor.
        what: Name of the tensor in the error.

    Raises:
        SavedTensorModifiedError: The tensor was changed in place.
    """
    if witness._version != version:
        raise SavedTensorModifiedError(
            f"a tensor that backward needs ({what}) was changed in place: the version of the tensor was "
            f"{version} and is now {witness._version}. Change a copy instead, or find the operation with "
            "torch.autograd.set_detect_anomaly(True)"
        )
