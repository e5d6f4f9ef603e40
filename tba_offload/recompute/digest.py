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

_ROWS = 32
"""Rows that are added up at a time: 256 KiB."""


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that hold the bytes of ``tensor``: the local part of a distributed one.

    Raises:
        TypeError: The bytes of this kind of tensor cannot be read.
    """
    kind: Any = tensor
    if tensor.is_nested:
        raise TypeError("nested tensors")
    if hasattr(kind, "trigger_wait"):  # what a collective operation that runs will have put there
        yield from plain_parts(kind.trigger_wait())
    elif hasattr(kind, "__tensor_flatten__"):  # DTensor, quantized weights
        inner = (getattr(kind, name) for name in kind.__tensor_flatten__()[0])
        for part in inner:
            if isinstance(part, torch.Tensor):  # a device mesh may be among them
                yield from plain_parts(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"tensors of layout {tensor.layout} and type {tensor.dtype}")
    else:
        yield tensor.detach()


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums over every byte of a strided tensor, from one reading of it.

    Returns:
        ``COLUMNS`` integers of 64 bits on the device of the tensor: 8 KiB.
    """
    if not tensor.untyped_storage().nbytes():
        tensor = tensor.new_empty(0)  # its memory was freed, to be filled again before backward
    data = _elements(tensor).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # a view that begins within a word
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    sums, begin = torch.zeros(COLUMNS, dtype=torch.int64, device=data.device), 0
    for rows in (_ROWS, 1):  # a few rows at a time: memory is read in its order, in a quarter of the time
        end = begin + (words.numel() - begin) // (rows * COLUMNS) * rows * COLUMNS
        if end > begin:
            blocks = words[begin:end].view(-1, rows, COLUMNS)
            sums += blocks.sum(1).sum(0)
            if tensor.itemsize >= 8:  # the sum of an even number of changed signs would be the same
                for block in blocks:
                    sums += (block >> 32).sum(0) * 3
        begin = end
    sums[: words.numel() - begin] += words[begin:] * 5
    if rest := data.numel() % 8:
        sums[-rest:] += data[-rest:].to(torch.int64) * 7
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
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0 and tensor.size(dim):  # expanded: the same element many times
            tensor = tensor.select(dim, 0)
    if not tensor.is_contiguous():
        strides: Sequence[int] = tensor.stride()
        permuted = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        tensor = permuted if permuted.is_contiguous() else tensor.contiguous()
    flat = tensor.reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
