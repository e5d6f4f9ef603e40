"""Tells whether two tensors have the same bits without keeping either of them."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_AT_ONCE = 8
"""Tensors whose digests are made together: on an accelerator it is launching kernels that takes time."""

_SAMPLES = 64
"""Elements that are compared one by one; more cost memory, and the sum sees what they miss."""

_OF_64_BITS = (1, 8)
"""Sizes of elements that may be numbers of 64 bits, or parts of them."""

_CHUNK = 2**20
"""Words of 64 bits of which the upper halves are in memory at a time."""

_COLUMNS = 1021
"""Columns in which words are summed: a prime number, so that moving words changes the sums."""

_NUMBERS = 2 * _COLUMNS + 7
"""Sums of columns, then words that fill no row, then elements that fill no word."""

_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Odd, and without a pattern in its bits: each sum counts with another multiple of it."""

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
        """Return the digest of a plain strided tensor; wait for nothing.

        Args:
            tensor: The tensor.
            samples_only: Leaves out the sum, for which all of the tensor has to be read.
        """
        return digests_of([tensor], samples_only=samples_only)[0]

    def equals(self, other: Digest) -> bool:
        """Whether both tensors have the same bits, as far as digests tell; waits for the device."""
        return are_equal([self], [other])


def digests_of(tensors: Iterable[torch.Tensor], *, samples_only: bool = False) -> list[Digest]:
    """Return the digests of plain strided tensors, in order; wait for nothing.

    Args:
        tensors: The tensors, each of which may be freed when the next is asked for.
        samples_only: Leaves out the sum, for which all of a tensor has to be read.
    """
    digests = map(partial(_Raw.of, samples_only=samples_only), tensors)
    if samples_only:  # which are not mixed, so that there is nothing to be done together
        return [Digest(each.shape, each.dtype, each.samples) for each in digests]
    found: list[Digest] = []
    while some := list(islice(digests, _AT_ONCE)):
        found += _together(some)
    return found


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


class _Raw(NamedTuple):
    """A digest to be: its parts, as they are before they are mixed, 17 KiB.

    Attributes:
        shape: Of the tensor.
        dtype: Likewise.
        samples: Some of its bits, at equal distances.
        sums: Of all of them, and of upper halves where these need a sum of their own.
    """

    shape: torch.Size
    dtype: torch.dtype
    samples: torch.Tensor
    sums: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, *, samples_only: bool) -> _Raw:
        plain = tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        plain = plain.resolve_neg().contiguous()
        count = min(plain.numel(), _SAMPLES)
        step = plain.numel() // max(count, 1)
        step = max(step - 1 + step % 2, 1)  # odd, or all samples would have an even place
        bits = plain.view(_WORDS[plain.itemsize]).as_strided((count,), (step,))
        sums = () if samples_only else _sums(plain)
        return cls(tensor.shape, tensor.dtype, bits.to(torch.int64, copy=True), sums)

    @property
    def form(self) -> tuple[torch.device, int, int]:
        """Equal for those whose parts can be stacked."""
        return self.samples.device, self.samples.numel(), len(self.sums)


def _together(some: Sequence[_Raw]) -> list[Digest]:
    bits: dict[int, torch.Tensor] = {}
    for form in {each.form for each in some}:
        alike = {number: each for number, each in enumerate(some) if each.form == form}
        samples = torch.stack([each.samples for each in alike.values()])
        sums = list(map(torch.stack, zip(*(each.sums for each in alike.values()), strict=True)))
        rows = torch.cat((samples, *map(_mixed, sums[:1]), *sums[1:]), 1)
        bits.update(zip(alike, rows.unbind(), strict=True))
    return [Digest(each.shape, each.dtype, bits[number]) for number, each in enumerate(some)]


def _sums(plain: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (_columns(plain), _upper_halves(plain)) if plain.itemsize in _OF_64_BITS else (_columns(plain),)


def _columns(plain: torch.Tensor) -> torch.Tensor:
    """Numbers that other bits of a contiguous tensor, or the same in another order, are unlikely to have.

    One sum of all would stay as it is if the sign of two elements is changed, which is the highest bit of a
    word, or if words change places: columns are summed, and what fills no row has places of its own. Sums of
    integers shorter than 64 bits take twenty times as long on a CPU.
    """
    words, rest = _words(plain)
    rows = words.numel() // _COLUMNS
    left = words[rows * _COLUMNS :]
    numbers = words.new_zeros(_NUMBERS)
    torch.sum(words[: rows * _COLUMNS].view(rows, _COLUMNS), 0, out=numbers[:_COLUMNS])
    for start, others in ((_COLUMNS, left), (2 * _COLUMNS, rest)):
        if others.numel():
            numbers[start : start + others.numel()] = others
    return numbers


def _words(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Get the bits of a contiguous tensor as integers of 64 bits, and the elements that do not fill one."""
    flat = plain.as_strided((plain.numel(),), (1,))  # also of a single element whose stride is 0
    if plain.storage_offset() * plain.itemsize % 8:
        flat = flat.clone()
    count = flat.numel() * flat.itemsize // 8 * 8 // flat.itemsize
    return flat[:count].view(torch.int64), flat[count:].view(_WORDS[plain.itemsize])


def _upper_halves(plain: torch.Tensor) -> torch.Tensor:
    """Return the sum of the upper halves of words, those of each chunk by another factor; a single element.

    The lower half of a round number in 64 bits is zero, and of a few thousand such numbers that are alike the
    sum is zero too.
    """
    words, _ = _words(plain)
    total = words.new_zeros(1)
    for number, start in enumerate(range(0, words.numel(), _CHUNK)):
        total.add_((words[start : start + _CHUNK] >> 32).sum(), alpha=2 * number + 1)
    return total


def _mixed(columns: torch.Tensor) -> torch.Tensor:
    """Return a number for each row, in a column, that depends on each of its elements and on their order."""
    factors = torch.arange(1, 2 * _NUMBERS, 2, device=columns.device) * _FACTOR
    return ((columns ^ (columns >> 29)) * factors).sum(1, keepdim=True)
