"""Digests of tensors: 64 bits over every byte, computed on the device without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = 8
"""Parts of a tensor that can be read one at a time."""

_COLUMNS = 1021
"""Words of 64 bits are summed in so many columns: a prime, so that no stride of a tensor lines up."""

_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Odd, and without a pattern in its bits: each column counts with another multiple of it."""

_ROWS = 32
"""Rows that are added up at a time: memory is read in its order, in a quarter of the time."""


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


def fold(tensor: torch.Tensor, part: int | None = None) -> torch.Tensor:
    """Return sums over the bytes of a strided tensor, from one reading of it.

    Args:
        tensor: The tensor.
        part: Which of :data:`PARTS` parts to read: every eighth row of 8 KiB, from this one on. ``None``
            reads every byte, and so does any part of a tensor below 64 KiB.

    Returns:
        1021 integers of 64 bits on the device of the tensor: 8 KiB.
    """
    words, rest = _words(tensor)
    count, begin = words.numel() // _COLUMNS, words.storage_offset()
    if part is None or count < PARTS:
        rows, reads_tail = words.as_strided((count, _COLUMNS), (_COLUMNS, 1)), True
    else:
        shape, stride = (len(range(part, count, PARTS)), _COLUMNS), (PARTS * _COLUMNS, 1)
        rows, reads_tail = words.as_strided(shape, stride, begin + part * _COLUMNS), part == count % PARTS
    even = rows.size(0) // _ROWS * _ROWS
    sums = rows[even:].sum(0) if even else rows.sum(0)
    if even:
        sums += rows[:even].view(-1, _ROWS, _COLUMNS).sum(1).sum(0)
    if tensor.itemsize >= 8:  # the sum of an even number of changed signs would be the same
        for block in torch.split(rows, _ROWS):
            sums.add_((block >> 32).sum(0), alpha=3)
    if reads_tail:
        tail = words[count * _COLUMNS :]
        sums[: tail.numel()].add_(tail, alpha=5)
        if rest is not None:
            sums[-rest.numel() :].add_(rest, alpha=7)
    return sums


def chain(before: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return sums that depend on all tensors before, on the next one, and on their order."""
    return torch.add(sums, before ^ (before >> 29), alpha=_FACTOR)


def mix(sums: torch.Tensor) -> torch.Tensor:
    """Return one integer of 64 bits for the sums of :func:`fold` or :func:`chain`."""
    factors = torch.arange(1, 2 * _COLUMNS, 2, device=sums.device) * _FACTOR
    return ((sums ^ (sums >> 29)) * factors).sum()


def digest(tensor: torch.Tensor) -> list[int]:
    """Return the digest of a tensor of any kind; waits for its device.

    Raises:
        TypeError: Its bytes cannot be read.
    """
    return [int(mix(fold(part))) for part in plain_parts(tensor)]


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bytes of a tensor, each element once, as words of 64 bits, and those that fill no word.

    Elements are copied only if they are not dense in memory.
    """
    if not tensor.untyped_storage().nbytes():
        tensor = tensor.new_empty(0)  # its memory was freed, to be filled again before backward
    tensor = tensor.resolve_conj().resolve_neg()
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0 and tensor.size(dim):  # expanded: the same element many times
            tensor = tensor.select(dim, 0)
    if not tensor.is_contiguous():
        strides = tensor.stride()
        permuted = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        tensor = permuted if permuted.is_contiguous() else tensor.contiguous()
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # a view that begins within a word
    count, rest = divmod(flat.nbytes, 8)
    if not rest:
        return flat.view(torch.int64), None
    data = flat.view(torch.uint8)
    return data[: 8 * count].view(torch.int64), data[8 * count :]
