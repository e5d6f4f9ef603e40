"""Digests of tensors: 64 bits each, over every byte, computed on the device without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COLUMNS = 1021
"""Words of 64 bits are summed in so many columns: a prime, so that no stride of a tensor lines up."""

_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Odd, and without a pattern in its bits: each column counts with another multiple of it."""

_ROWS = 1024
"""Rows of which the upper halves are in memory at a time."""


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that hold the bytes of ``tensor``: the local part of a distributed one.

    Raises:
        TypeError: The bytes of this kind of tensor cannot be read.
    """
    kind: Any = tensor
    if hasattr(kind, "__tensor_flatten__"):  # DTensor, nested tensors, quantized weights
        for name in kind.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(kind, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise TypeError(f"tensors of layout {tensor.layout} and type {tensor.dtype}")
    else:
        yield tensor.detach()


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums over every byte of a strided tensor, from one reading of it.

    Returns:
        ``COLUMNS`` integers of 64 bits on the device of the tensor: 8 KiB.
    """
    data = _elements(tensor).view(torch.uint8)
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()  # a view that begins within a word
    body = data.numel() // (8 * COLUMNS) * 8 * COLUMNS
    if body:
        rows = data[:body].view(torch.int64).view(-1, COLUMNS)
        sums = rows.sum(0)
        if tensor.itemsize >= 8:  # the sum of an even number of changed signs would be the same
            for start in range(0, len(rows), _ROWS):
                sums += (rows[start : start + _ROWS] >> 32).sum(0) * 3
    else:
        sums = torch.zeros(COLUMNS, dtype=torch.int64, device=data.device)
    words = (data.numel() - body) // 8
    if words:
        sums[:words] += data[body : body + 8 * words].view(torch.int64) * 3
    if rest := data.numel() - body - 8 * words:
        sums[-rest:] += data[-rest:].to(torch.int64) * 5
    return sums


def mix(folded: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one integer of 64 bits for each of some sums of :func:`fold`, which lie on one device."""
    sums = torch.stack(list(folded))
    factors = torch.arange(1, 2 * COLUMNS, 2, device=sums.device) * _FACTOR
    return ((sums ^ (sums >> 29)) * factors).sum(1)


def digest(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the digests of tensors of any kind; waits for their devices.

    Raises:
        TypeError: The bytes of one of them cannot be read.
    """
    return [int(mix([fold(part)])) for tensor in tensors for part in plain_parts(tensor)]


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return each element once, flat; copied only if the elements are not dense in memory."""
    tensor = tensor.resolve_conj().resolve_neg()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:  # expanded: the same element many times
            tensor = tensor.narrow(dim, 0, 1)
    if not tensor.is_contiguous():
        strides: Sequence[int] = tensor.stride()
        permuted = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        tensor = permuted if permuted.is_contiguous() else tensor.contiguous()
    flat = tensor.reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
