"""Functions that find the experts that a call reads or that a router selects."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def numbers_in(value: Any, count: int) -> set[int] | None:
    """Return the indices in a tensor of integers, from 0 to ``count`` - 1; ``None`` for any other value."""
    if not isinstance(value, torch.Tensor) or value.dtype not in {torch.int32, torch.int64}:
        return None
    return {number % count for number in set(value.flatten().tolist())}


def experts_for(func: Any, args: Any, kwargs: Any, every: Sequence[int]) -> Collection[int]:
    """Return the indices of the experts that a call reads from a parameter with all experts.

    The result is empty if the call reads no bytes, because the call returns a view of the parameter.

    Args:
        func: The function that is called with the parameter.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        every: The indices of all experts, which are returned if ``func`` is unknown.
    """
    if func is torch.Tensor.transpose and {dim % 3 for dim in args[1:]} == {1, 2}:
        return ()
    if func is torch.Tensor.__getitem__:
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        found = {index % len(every)} if type(index) is int else numbers_in(index, len(every))
        return every if found is None else found
    if "grouped_mm" in str(func) and isinstance(ends := kwargs.get("offs"), torch.Tensor):
        return [number for number, (start, end) in enumerate(pairwise([0, *ends.tolist()])) if start < end]
    return every
