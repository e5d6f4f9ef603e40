"""Placements: where a layer's activations are between forward and backward."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable


_FLAGS = ("recomputes", "offloads", "rebuilds", "spares_attention")


class Placement(StrEnum):
    """Where a layer's activations are between forward and backward.

    - ``keep``: activations stay in memory.
    - ``offload``: activations are in the store.
    - ``offload-N%``: N percent of the activation bytes are in the store, with N from 1 to 99.
    - ``recompute``: only the layer's inputs stay in memory, and backward runs the layer's forward again.
    - ``recompute-offload``: like ``recompute``, but the layer's inputs are in the store.
    - ``recompute-except-attention``: like ``recompute-offload``, but the output of fused attention is also in
      the store, and backward does not compute attention again.
    - ``offload-remat``: like ``offload``, but backward computes the outputs of cheap operations again.
    - ``auto``: the planner chooses a placement for each layer.

    Attributes:
        recomputes: Whether backward runs the layer's forward again, on all ranks that share the layer.
        offloads: Whether saved tensors of the layer are written to the store and read back. For a recomputed
            layer, only the inputs are written.
        rebuilds: Whether backward computes the outputs of cheap operations again, so that the outputs are not
            written.
        spares_attention: Whether the output of fused attention is offloaded, so that backward does not
            compute attention again.
        percent: Percentage of the layer's saved bytes that is offloaded, 1 to 100.

    Raises:
        ValueError: No placement has this name.
    """

    recomputes: bool
    offloads: bool
    rebuilds: bool
    spares_attention: bool
    percent: int

    def __new__(cls, word: str, *flags: str, percent: int = 100) -> Self:
        """Create a placement. Flags are plain attributes, because each run of a layer reads the flags."""
        made = str.__new__(cls, word)
        made._value_ = word
        made.percent = percent
        for flag in _FLAGS:
            setattr(made, flag, flag in flags)
        return made

    KEEP = "keep"
    OFFLOAD = "offload", "offloads"
    RECOMPUTE = "recompute", "recomputes"
    RECOMPUTE_OFFLOAD = "recompute-offload", "recomputes", "offloads"
    RECOMPUTE_EXCEPT_ATTENTION = "recompute-except-attention", "recomputes", "offloads", "spares_attention"
    OFFLOAD_REMAT = "offload-remat", "offloads", "rebuilds"
    AUTO = "auto", "offloads"

    @classmethod
    def _missing_(cls, value: object) -> Placement:
        """Return the placement ``offload-N%`` for a number N. The placement of each N is created once."""
        share = re.fullmatch("offload-([1-9][0-9]?)%", value) if isinstance(value, str) else None
        if share is None:
            raise ValueError(f"{value!r} is not a placement. The placements are {', '.join(names())}")
        made = cls._new_member_(cls, share[0], "offloads", percent=int(share[1]))  # type: ignore[attr-defined]
        made._name_ = share[0]
        return cls._value2member_map_.setdefault(share[0], made)  # type: ignore[return-value]

    @property
    def is_offloaded(self) -> bool:
        """Whether the layer's saved tensors are offloaded and the layer is not recomputed."""
        return self.offloads and not self.recomputes

    @property
    def as_run(self) -> Placement:
        """The placement with which a layer runs. ``auto`` runs as ``offload`` until the planner chooses."""
        return Placement.OFFLOAD if self is Placement.AUTO else self


def names() -> list[str]:
    """Return the names of all placements. ``N`` in a name is a whole number from 1 to 99."""
    return [*map(str, Placement), "offload-N%"]


class Staying:
    """Selection of the tensors that stay in memory if a percentage of the bytes is offloaded.

    Each tensor is offloaded or stays in memory as a whole. Writes are spread evenly over forward: at any
    time, about ``percent`` of the bytes saved so far are offloaded, with an error of at most half the largest
    tensor.

    Args:
        percent: Percentage of the bytes that is offloaded.
    """

    __slots__ = ("_owed", "_percent")

    def __init__(self, percent: int) -> None:
        self._percent = 100 - percent
        self._owed = 0  # in hundredths of bytes: bytes that should stay so far, minus bytes that stay

    def stays(self, nbytes: int) -> bool:
        """Return True if the next tensor stays in memory. For a tensor without bytes, return False."""
        self._owed += self._percent * nbytes
        if not nbytes or self._owed <= 50 * nbytes:
            return False
        self._owed -= 100 * nbytes
        return True


def spread(count: int) -> list[int]:
    """Return the numbers from 0 to ``count - 1`` in the order of a van der Corput sequence.

    The first n numbers of the sequence are spread almost evenly over the range, for every n. Callers keep the
    first items of the sequence in memory. While an item in memory is used, the next offloaded item is read.
    """
    bits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))


def staying(sizes: Iterable[int], percent: int) -> frozenset[int]:
    """Return the indices of the tensors that stay in memory if ``percent`` of the bytes is offloaded.

    Args:
        sizes: Bytes of each tensor, in the order of saving.
        percent: Percentage of the bytes that is offloaded.
    """
    rule = Staying(percent)
    return frozenset(number for number, nbytes in enumerate(sizes) if rule.stays(nbytes))
