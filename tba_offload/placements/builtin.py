"""The placements that there are."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.placements.base import Placement, register, register_percentages

if TYPE_CHECKING:
    from typing import Self

    from tba_offload.placements.base import Result_co, Ways


class Keep(Placement):
    """Everything stays in memory."""

    def take(self, ways: Ways[Result_co]) -> Result_co:
        """See :meth:`Placement.take`."""
        return ways.keep()


class Offload(Placement):
    """Everything travels."""

    travels = True

    def take(self, ways: Ways[Result_co]) -> Result_co:
        """See :meth:`Placement.take`."""
        return ways.offload()


class OffloadShare(Offload):
    """Of every layer the same share of bytes travels, the rest stays.

    Args:
        percent: The share, 1 to 99.
    """

    def __new__(cls, percent: int) -> Self:
        """Return the name tells the share."""
        return super().__new__(cls, f"offload-{percent}%")

    @property
    def percent(self) -> int:
        """The share."""
        return int(self.removeprefix("offload-").removesuffix("%"))

    def take(self, ways: Ways[Result_co]) -> Result_co:
        """See :meth:`Placement.take`."""
        return ways.offload(percent=self.percent)


class OffloadRemat(Placement):
    """As offload, but what cheap parts of the layer put out is made again in backward."""

    travels = True
    rebuilds = True

    def take(self, ways: Ways[Result_co]) -> Result_co:
        """See :meth:`Placement.take`."""
        return ways.offload(rebuilds=True)


class Recompute(Placement):
    """The inputs stay, backward runs the layer again."""

    recomputes = True

    def take(self, ways: Ways[Result_co]) -> Result_co:
        """See :meth:`Placement.take`."""
        return ways.recompute()


class RecomputeOffload(Placement):
    """The inputs travel, backward runs the layer again."""

    recomputes = True
    travels = True

    def take(self, ways: Ways[Result_co]) -> Result_co:
        """See :meth:`Placement.take`."""
        return ways.recompute(inputs_travel=True)


class RecomputeExceptAttention(RecomputeOffload):
    """The inputs travel, and what attention puts out; backward runs the rest of the layer again."""

    def take(self, ways: Ways[Result_co]) -> Result_co:
        """See :meth:`Placement.take`."""
        return ways.recompute(attention_travels=True)


class Auto(Offload):
    """Only in a policy: the planner replaces it by one of the others; until it has a plan all travels."""


Placement.KEEP = register(Keep("keep"))
Placement.OFFLOAD = register(Offload("offload"))
Placement.RECOMPUTE = register(Recompute("recompute"))
Placement.RECOMPUTE_OFFLOAD = register(RecomputeOffload("recompute-offload"))
Placement.RECOMPUTE_EXCEPT_ATTENTION = register(RecomputeExceptAttention("recompute-except-attention"))
Placement.OFFLOAD_REMAT = register(OffloadRemat("offload-remat"))
Placement.AUTO = register(Auto("auto"))


@functools.cache
def offload_share(percent: int) -> OffloadShare:
    """Return the placement that has a share of a layer's bytes travel.

    Args:
        percent: The share, 1 to 99.
    """
    return OffloadShare(percent)


register_percentages("offload-N%", offload_share)


class _Shipped(NamedTuple):
    """The ways that layers go, by the placement above that always goes there."""

    layer: int

    def keep(self) -> Placement:
        return Placement.KEEP

    def offload(self, *, rebuilds: bool = False, percent: int = 100) -> Placement:
        if percent < 100:
            return offload_share(percent)
        return Placement.OFFLOAD_REMAT if rebuilds else Placement.OFFLOAD

    def recompute(self, *, inputs_travel: bool = False, attention_travels: bool = False) -> Placement:
        if attention_travels:
            return Placement.RECOMPUTE_EXCEPT_ATTENTION
        return Placement.RECOMPUTE_OFFLOAD if inputs_travel else Placement.RECOMPUTE


_SHIPPED = {type(placement): placement.take(_Shipped(0)) for placement in Placement}
"""The ways of the placements above, which are the same for every layer; the simulator asks often."""


def way_of(placement: Placement, layer: int) -> Placement:
    """Return the placement among those of this module that goes the same way with a layer.

    A placement may go several ways, each with layers of its own: what its attributes say is true of some
    layer, and what those of this one say is true of ``layer``.

    Args:
        placement: Any placement.
        layer: Index of the layer among those of this process.
    """
    return _SHIPPED.get(type(placement)) or placement.take(_Shipped(layer))
