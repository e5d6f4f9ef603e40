"""What a plan writes to drives in a day, and whether the limit of that decides where layers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.days import bytes_per_day
from tba_offload.formatting import readable_size
from tba_offload.plan.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Limits, Plan
    from tba_offload.plan.profile import LayerKind, StepProfile


class Writes(NamedTuple):
    """What a plan writes.

    Attributes:
        bytes_per_day: The most that steps write that follow each other day and night.
        allowed: What ``store.write_bytes_per_day`` allows.
        bounds: Whether no layer more could be offloaded within that.
    """

    bytes_per_day: float
    allowed: int
    bounds: bool

    def __str__(self) -> str:
        bound = ", which leaves room for no layer more" if self.bounds else ""
        return (
            f"writes up to {readable_size(self.bytes_per_day)} a day of the {readable_size(self.allowed)} "
            f"that store.write_bytes_per_day allows{bound}"
        )


def writes_of(
    profile: StepProfile, plan: Plan, bandwidth: Bandwidth, limits: Limits, policy: Sequence[Placement]
) -> Writes | None:
    """Return what a plan writes; ``None`` if nothing limits that.

    Args:
        profile: The step.
        plan: The plan.
        bandwidth: How fast offloaded bytes travel.
        limits: The limit among others.
        policy: For each layer, what the user wants; the planner decides on those that are ``auto``.
    """
    allowed = limits.written_per_day
    if allowed is None:
        return None
    found = simulate(profile, plan, bandwidth)
    runs = [0] * len(profile.layers)
    for slot in profile.slots:
        runs[slot.layer] += not slot.backward
    left = [
        stays * runs[layer]
        for layer, wanted in enumerate(policy)
        if wanted is Placement.AUTO and (stays := _stays(plan, layer, profile.kind_of(layer)))
    ]
    room = limits.planned_in(found.seconds) - found.sent_bytes
    return Writes(
        bytes_per_day=bytes_per_day(found.sent_bytes, found.seconds),
        allowed=allowed,
        bounds=bool(left) and min(left) > room,
    )


def _stays(plan: Plan, layer: int, kind: LayerKind) -> int:
    """Bytes of a layer's activations that stay, or of which none travel because it is recomputed."""
    return plan.kept_bytes(layer, kind) if plan.placements[layer].offloads else kind.nbytes
