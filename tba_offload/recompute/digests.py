"""Digests of all tensors in a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tba_offload.device.digest import digests_of
from tba_offload.layers.nested import tensors_in

if TYPE_CHECKING:
    from tba_offload.device.digest import Digest


def digests(value: object, *, samples_only: bool = False) -> list[Digest]:
    """Return the digests of all strided tensors in a value, in order.

    Of distributed ones those of the local part.

    Raises:
        TooManyError: There is more in it than is looked at.
    """
    parts = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors_in(value))
    return digests_of(filter(_is_plain, parts), samples_only=samples_only)


def equal(one: list[Digest], other: list[Digest]) -> bool:
    """Whether two lists of digests are the same."""
    return len(one) == len(other) and all(a.equals(b) for a, b in zip(one, other, strict=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
    )
