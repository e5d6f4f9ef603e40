"""Digests of tensors: 64-bit integers that depend on every byte.

Digests are computed on the device of the tensor. Only :func:`digest` makes the host wait for the device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_COLUMNS = 1021
"""Number of columns in which 64-bit words are summed. A prime number is not a multiple of the usual strides
of tensors."""

_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Odd number whose bits look random. Each column is multiplied by its own odd multiple of this number."""


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that contain the bytes of ``tensor``.

    For a distributed tensor, yield the local tensor. For a tensor subclass, for example a quantized weight,
    yield the inner tensors.

    Raises:
        TypeError: The bytes of this class of tensors cannot be read.
    """
    kind: Any = tensor
    if tensor.is_nested:
        raise TypeError("nested tensors")
    if hasattr(kind, "trigger_wait"):  # a collective operation may still write to the tensor
        yield from plain_parts(kind.trigger_wait())
    elif hasattr(kind, "__tensor_flatten__"):  # DTensor, quantized weights
        inner = (getattr(kind, name) for name in kind.__tensor_flatten__()[0])
        for part in inner:
            if isinstance(part, torch.Tensor):  # an attribute may also be a device mesh
                yield from plain_parts(part)
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"tensors of layout {tensor.layout} and type {tensor.dtype}")
    else:
        yield tensor


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums of the 64-bit words of a strided tensor. A change of any byte changes a sum.

    Returns:
        1021 sums, as a tensor of 64-bit integers (8 KiB) on the same device.
    """
    words, rest = _words(tensor)
    count = words.numel() // _COLUMNS
    rows, tail = words.as_strided((count, _COLUMNS), (_COLUMNS, 1)), words[count * _COLUMNS :]
    sums = rows.sum(0)
    if tensor.itemsize >= 8:  # otherwise an even number of changed signs would leave the sum unchanged
        sums.add_((rows >> 32).sum(0), alpha=3)
    sums[: tail.numel()].add_(tail, alpha=5)
    if rest is not None:
        sums[-rest.numel() :].add_(rest, alpha=7)
    return sums


def chain(before: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Combine the sums of earlier tensors with the sums of the next tensor. The order of tensors matters.

    Args:
        before: Result of :func:`chain` or :func:`fold` for the earlier tensors.
        sums: Result of :func:`fold` for the next tensor.
    """
    return torch.add(sums, before, alpha=_FACTOR)


def mix(sums: torch.Tensor) -> torch.Tensor:
    """Return one 64-bit integer for the sums of :func:`fold` or :func:`chain`."""
    return ((sums ^ (sums >> 29)) * _factors(sums.device)).sum()


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * _COLUMNS, 2, device=device) * _FACTOR


@torch.no_grad()
def digest(tensor: torch.Tensor) -> list[int]:
    """Return one digest for each tensor in :func:`plain_parts`, after waiting for the device of the tensor.

    Raises:
        TypeError: The bytes of the tensor cannot be read.
    """
    return [int(mix(fold(part))) for part in plain_parts(tensor)]


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bytes of a tensor as 64-bit words, and up to seven remaining bytes.

    An element that ``expand`` repeats is returned once. Elements that are not dense in memory are copied.
    """
    if not tensor.untyped_storage().nbytes():
        tensor = tensor.new_empty(0)  # the owner has freed the memory, and will fill it again before backward
    tensor = tensor.resolve_conj().resolve_neg()
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0 and tensor.size(dim):  # an expanded tensor has the same element many times
            tensor = tensor.select(dim, 0)
    if not tensor.is_contiguous():
        strides = tensor.stride()
        permuted = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        tensor = permuted if permuted.is_contiguous() else tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # a view may begin within a word
    whole = flat.nbytes // 8 * 8
    if flat.nbytes == whole:
        return flat.view(torch.int64), None
    data = flat.view(torch.uint8)
    return data[:whole].view(torch.int64), data[whole:]
