"""Tells whether two tensors have the same bits without keeping either of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

_SAMPLES = 64
"""Elements that are compared one by one; more cost memory, and the sum sees what they miss."""

_OF_64_BITS = (1, 8)
"""Sizes of elements that may be numbers of 64 bits, or parts of them."""

_CHUNK = 2**20
"""Words of 64 bits of which the upper halves are in memory at a time."""

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
        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and bool(torch.equal(self.bits, other.bits))
        )


def _sums(plain: torch.Tensor) -> torch.Tensor:
    """Sums of the bits of a contiguous tensor as 64-bit integers, and the sum of what is left at its end.

    A sum of shorter integers takes twenty times as long on a CPU. But the lower half of a round number in 64
    bits is zero, and of a few thousand such numbers that are alike the sum is zero too: upper halves are
    added apart.
    """
    flat = plain.as_strided((plain.numel(),), (1,))  # also of a single element whose stride is 0
    if plain.storage_offset() * plain.itemsize % 8:
        flat = flat.clone()
    count = flat.numel() * flat.itemsize // 8 * 8 // flat.itemsize
    words, rest = flat[:count].view(torch.int64), flat[count:].view(_WORDS[plain.itemsize])
    sums = [words.sum(), rest.sum(dtype=torch.int64)]
    if plain.itemsize in _OF_64_BITS:
        starts = range(0, words.numel(), _CHUNK)
        sums += [(words[start : start + _CHUNK] >> 32).sum() for start in starts]
    return torch.stack(sums)
