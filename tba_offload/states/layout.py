"""Where each state of a sub-group lies in the bytes that travel."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device.ranges import CACHE_LINE
from tba_offload.states.shards import local, wrap_of
from tba_offload.store.extents import BLOCK, round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tba_offload.states.pieces import Piece
    from tba_offload.states.shards import Wrap


@dataclass(frozen=True, slots=True)
class Place:
    """One state of one piece.

    Attributes:
        piece: Whose state it is.
        key: Its name in ``state[parameter]``.
        start: Where its first byte lies in the sub-group.
        size: Of the state of the piece; of a slice it is 1-D.
        stride: Likewise, elements.
        dtype: Likewise.
        wrap: Makes the state of its bytes, where that is a distributed tensor.
    """

    piece: Piece
    key: str
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    wrap: Wrap | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def wrapped(self, value: torch.Tensor) -> torch.Tensor:
        """Return the state whose local bytes these are."""
        return value if self.wrap is None else self.wrap(value)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the state in those of its sub-group, with its size and data type."""
        part = flat[self.start : self.start + self.nbytes].view(self.dtype)
        return part.as_strided(self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Layout:
    """The states of one sub-group.

    Attributes:
        places: One for each state that travels.
        nbytes: Bytes of all, padded to blocks: extents are cut at multiples of them, for direct I/O.
        keys: Names of the states.
    """

    places: tuple[Place, ...]
    nbytes: int
    keys: frozenset[str]

    @classmethod
    def of(cls, states: Mapping[Piece, Mapping[str, Any]]) -> Layout:
        """Return the layout of the states that an update made, each aligned as PyTorch aligns a tensor."""
        found = [
            (piece, key, local(value), wrap_of(value))
            for piece, entry in states.items()
            for key, value in entry.items()
            if travels(value, piece.parameter)
        ]
        starts, end = side_by_side(own.nbytes for _, _, own, _ in found)
        places = tuple(
            Place(piece, key, start, tuple(own.shape), own.stride(), own.dtype, wrap)
            for start, (piece, key, own, wrap) in zip(starts, found, strict=True)
        )
        return cls(places, round_up(end, BLOCK), frozenset(place.key for place in places))


def side_by_side(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offset of each of consecutive tensors of these sizes, and the end of the last.

    Each begins at a cache line, as PyTorch's own do.
    """
    *starts, end = accumulate((round_up(size, CACHE_LINE) for size in sizes), initial=0)
    return starts, end


def travels(value: object, parameter: torch.Tensor) -> bool:
    """Whether a state can be away: a dense tensor, or shard, of more than one element that owns its memory.

    What is something else (a number, a step count, a tensor of a subclass, a view of memory that other
    tensors share) stays where the optimizer put it.
    """
    value = local(value)
    return (
        type(value) is torch.Tensor
        and value.numel() > 1
        and value.layout == torch.strided
        and value.device == parameter.device
        and value.untyped_storage().nbytes() == value.nbytes
        and is_dense(value)
        and not (value.is_conj() or value.is_neg())
    )


def is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
