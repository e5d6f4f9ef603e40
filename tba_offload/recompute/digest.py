"""Tells whether two tensors have the same bits without keeping either of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tba_offload.layers.nested import tensors_in

_SAMPLES = 64
"""Elements that are compared one by one; more cost memory, and the sum sees what they miss."""

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
        words = plain.view(-1).view(_WORDS[plain.itemsize])
        bits = torch.cat((samples.to(torch.int64), words.sum(dtype=torch.int64).reshape(1)))
        return cls(tensor.shape, tensor.dtype, bits)

    def equals(self, other: Digest) -> bool:
        """Whether both tensors have the same bits, as far as digests tell; waits for the device."""
        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and bool(torch.equal(self.bits, other.bits))
        )


def digests(value: object, *, samples_only: bool = False) -> list[Digest]:
    """The digests of all strided tensors in a value, in order; of distributed ones those of the local part.

    Raises:
        TooManyError: There is more in it than is looked at.
    """
    parts = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors_in(value))
    return [Digest.of(tensor, samples_only=samples_only) for tensor in parts if _is_plain(tensor)]


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
