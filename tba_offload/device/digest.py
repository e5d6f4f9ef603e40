"""Tells whether two tensors have the same bits without keeping either of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_SAMPLES = 64
"""Elements that are compared one by one; more cost memory, and the sum sees what they miss."""

_OF_64_BITS = (1, 8)
"""Sizes of elements that may be numbers of 64 bits, or parts of them."""

_CHUNK = 2**20
"""Words of 64 bits of which the upper halves are in memory at a time."""

_COLUMNS = 1021
"""Columns in which words are summed: a prime number, so that moving words changes the sums."""

_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Odd, and without a pattern in its bits: each word of the sums counts with another multiple of it."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


class Digest(NamedTuple):
    """What is kept of the bits of one tensor.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        bits: Some of its bits as integers, at equal distances, and the sum of all, on its device.
    """

    shape: torch.Size
    dtype: torch.dtype
    bits: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, *, samples_only: bool = False) -> Digest:
        """The digest of a plain strided tensor; waits for nothing.

        Args:
            tensor: The tensor.
            samples_only: Leaves out the sum, for which all of the tensor has to be read.
        """
        plain = tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        plain = plain.contiguous()
        count = min(plain.numel(), _SAMPLES)
        step = plain.numel() // max(count, 1)
        samples = plain.as_strided((count,), (step,)).clone().view(_WORDS[plain.itemsize])
        if samples_only:
            return cls(tensor.shape, tensor.dtype, samples)
        return cls(tensor.shape, tensor.dtype, torch.cat((samples.to(torch.int64), _sums(plain))))

    def equals(self, other: Digest) -> bool:
        """Whether both tensors have the same bits, as far as digests tell; waits for the device."""
        return are_equal([self], [other])


def are_equal(some: Sequence[Digest], others: Sequence[Digest]) -> bool:
    """Whether digests are those of tensors with the same bits, one by one; waits for the device, once.

    Args:
        some: Digests of one device, all with sums or all without.
        others: As many, or there is a difference.
    """
    if [(each.shape, each.dtype) for each in some] != [(each.shape, each.dtype) for each in others]:
        return False
    bits = [torch.cat([each.bits for each in digests]) for digests in (some, others) if digests]
    return not bits or bool(torch.equal(*bits))


def _sums(plain: torch.Tensor) -> torch.Tensor:
    """Numbers that other bits of a contiguous tensor, or the same in another order, are unlikely to have.

    One sum of all would stay as it is if the sign of two elements is changed, which is the highest bit of a
    word, or if words change places: columns are summed, and mixed. Sums of integers shorter than 64 bits take
    twenty times as long on a CPU. But the lower half of a round number in 64 bits is zero, and of a few
    thousand such numbers that are alike the sum is zero too: upper halves are added apart.
    """
    flat = plain.as_strided((plain.numel(),), (1,))  # also of a single element whose stride is 0
    if plain.storage_offset() * plain.itemsize % 8:
        flat = flat.clone()
    count = flat.numel() * flat.itemsize // 8 * 8 // flat.itemsize
    words, rest = flat[:count].view(torch.int64), flat[count:].view(_WORDS[plain.itemsize])
    sums = [_mixed(words, rest)]
    if plain.itemsize in _OF_64_BITS:
        starts = range(0, words.numel(), _CHUNK)
        sums += [(words[start : start + _CHUNK] >> 32).sum() for start in starts]
    return torch.stack(sums)


def _mixed(words: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """A number that depends on each column of words, and on each word and element that is in none."""
    rows = words.numel() // _COLUMNS
    columns = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    parts = torch.cat((columns, words[rows * _COLUMNS :], rest.to(torch.int64)))
    factors = torch.arange(1, 2 * parts.numel(), 2, device=parts.device) * _FACTOR
    return ((parts ^ (parts >> 29)) * factors).sum()
