"""Plans by which the same share of each layer travels: how layers can be divided, and where that is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Container

    from tba_offload.plan.profile import StepProfile

Shares = tuple[Placement | None, ...]
"""The placement of each kind of layers under one share; ``None`` for kinds of which all would travel."""


def ways_to_share(profile: StepProfile) -> list[Shares]:
    """One for each way to divide what layers save; fewest bytes travel under the first.

    Kinds of which nothing would travel are kept.

    Args:
        profile: Has the kinds.
    """
    found: dict[tuple[frozenset[int], ...], int] = {}
    for percent in range(1, 100):
        found.setdefault(tuple(kind.staying(percent) for kind in profile.kinds), percent)
    return [
        tuple(
            (Placement.KEEP if len(stays) == len(kind.activations) else Placement(f"offload-{percent}%"))
            if stays
            else None
            for kind, stays in zip(profile.kinds, staying, strict=True)
        )
        for staying, percent in found.items()
        if any(staying)
    ]


def with_shares(
    profile: StepProfile, placements: tuple[Placement, ...], layers: Container[int], shares: Shares
) -> tuple[Placement, ...]:
    """Return some placements, but that of some layers the share of their kind travels.

    Args:
        profile: Has the kind of each layer.
        placements: One for each layer.
        layers: Those of which a share travels.
        shares: Of the kinds.
    """
    return tuple(
        (shares[kind] if layer in layers else None) or placement
        for layer, (placement, kind) in enumerate(zip(placements, profile.layers, strict=True))
    )
