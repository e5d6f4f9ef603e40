"""Placements: where the activations of a layer are between forward and backward."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable


_FLAGS = ("recomputes", "offloads", "rebuilds", "spares_attention")


class Placement(StrEnum):
    """Where the activations of a layer are between forward and backward.

    ``Placement("offload-25%")`` is a placement, too: the share can be any whole number from 1 to 99.

    Attributes:
        recomputes: Whether backward runs the layer's forward again, on all ranks that share the layer.
        offloads: Whether tensors are written to the store and read back: all that the layer saves or, where
            it is recomputed, its inputs.
        rebuilds: Whether outputs of cheap operations are computed again instead of written.
        spares_attention: Whether the output of fused attention is offloaded instead of computed again.
        percent: Share of the layer's saved bytes that is offloaded, 1 to 100.

    Raises:
        ValueError: ``Placement(name)`` finds no placement of this name.
    """

    recomputes: bool
    offloads: bool
    rebuilds: bool
    spares_attention: bool
    percent: int

    def __new__(cls, word: str, *flags: str, percent: int = 100) -> Self:
        """Return a member whose flags are plain attributes, since each run of a layer reads them."""
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
        """Return the placement with the share that its name gives; each is made once."""
        share = re.fullmatch("offload-([1-9][0-9]?)%", value) if isinstance(value, str) else None
        if share is None:
            raise ValueError(f"{value!r} is not one of {', '.join(names())}")
        made = cls._new_member_(cls, share[0], "offloads", percent=int(share[1]))  # type: ignore[attr-defined]
        made._name_ = share[0]
        return cls._value2member_map_.setdefault(share[0], made)  # type: ignore[return-value]

    @property
    def is_offloaded(self) -> bool:
        """Whether the layer's saved tensors are offloaded, and the layer is not recomputed."""
        return self.offloads and not self.recomputes

    @property
    def as_run(self) -> Placement:
        """The placement by which a layer runs: ``offload`` where the planner has not replaced ``auto``."""
        return Placement.OFFLOAD if self is Placement.AUTO else self


def names() -> list[str]:
    """Return the names of all placements; ``N`` stands for a whole number from 1 to 99."""
    return [*map(str, Placement), "offload-N%"]


class Staying:
    """Decides in the order of saving which tensors stay where a share of the bytes is offloaded.

    Tensors stay whole. The share is met to within half of the largest, also after each part of the sequence,
    so that the store is given bytes evenly.

    Args:
        percent: Share of the bytes that is offloaded.
    """

    __slots__ = ("_owed", "_percent")

    def __init__(self, percent: int) -> None:
        self._percent = 100 - percent
        self._owed = 0  # hundredths of bytes that should have stayed by now, less those that have

    def stays(self, nbytes: int) -> bool:
        """Return True if the next tensor stays; ``nbytes`` is 0 where it does not count."""
        self._owed += self._percent * nbytes
        if not nbytes or self._owed <= 50 * nbytes:
            return False
        self._owed -= 100 * nbytes
        return True


def staying(sizes: Iterable[int], percent: int) -> frozenset[int]:
    """Return the indices of the tensors that stay where ``percent`` of the bytes is offloaded.

    Args:
        sizes: Bytes of each tensor, in the order of saving.
        percent: Share of the bytes that is offloaded.
    """
    rule = Staying(percent)
    return frozenset(number for number, nbytes in enumerate(sizes) if rule.stays(nbytes))
