"""What is asked of the planner: a goal on a drive within limits, and what it may decide of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.config.policy import Objective
    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Limits
    from tba_offload.plan.profile import StepProfile
    from tba_offload.plan.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Terms:
    """What is wanted, on which drive, within which limits.

    Attributes:
        bandwidth: How fast offloaded bytes travel.
        limits: What plans must keep to.
        objective: What is wanted.
        tuning: The numbers of the search.
    """

    bandwidth: Bandwidth
    limits: Limits
    objective: Objective
    tuning: Tuning


@dataclass(frozen=True, slots=True)
class Freedom:
    """What may be decided of each layer: all but what stands in the way of single ones.

    Attributes:
        policy: What the user wants; the planner decides on those that are ``auto``.
        not_recomputed: Layers that must not be recomputed unless the policy says so.
        not_rebuilt: Layers of which nothing can be rebuilt, or it is not known.
        without_attention: Layers without fused attention, or it is not known.
    """

    policy: tuple[Placement, ...]
    not_recomputed: frozenset[int]
    not_rebuilt: frozenset[int]
    without_attention: frozenset[int]

    @classmethod
    def all_of(
        cls, profile: StepProfile, policy: Sequence[Placement], not_recomputed: frozenset[int]
    ) -> Freedom:
        """Return that of the layers of a step."""
        count = len(profile.layers)
        not_rebuilt = frozenset(layer for layer in range(count) if not profile.kind_of(layer).rebuilt_bytes)
        without = frozenset(layer for layer in range(count) if not profile.kind_of(layer).attention_bytes)
        return cls(tuple(policy), not_recomputed, not_rebuilt, without)

    @property
    def layers(self) -> list[int]:
        """The layers that the planner decides on."""
        return [layer for layer, placement in enumerate(self.policy) if placement is Placement.AUTO]

    @property
    def alike(self) -> list[tuple[Placement, bool]]:
        """Layers for which this is equal can get one placement."""
        return [(wanted, layer in self.not_recomputed) for layer, wanted in enumerate(self.policy)]

    def of(self, groups: Sequence[tuple[int, ...]]) -> Freedom:
        """Return the same of groups of layers that are alike."""

        def of_groups(layers: frozenset[int]) -> frozenset[int]:
            return frozenset(place for place, group in enumerate(groups) if group[0] in layers)

        policy = tuple(self.policy[group[0]] for group in groups)
        sets = (self.not_recomputed, self.not_rebuilt, self.without_attention)
        return Freedom(policy, *map(of_groups, sets))

    def allows(self, layer: int, placement: Placement) -> bool:
        """Whether the planner may give a layer this placement."""
        if placement is Placement.OFFLOAD_REMAT:
            return layer not in self.not_rebuilt
        if placement is Placement.RECOMPUTE_EXCEPT_ATTENTION and layer in self.without_attention:
            return False
        return not placement.recomputes or layer not in self.not_recomputed

    def allows_any(self, placement: Placement) -> bool:
        """Whether the planner may give this placement to some layer that it decides on."""
        return any(self.allows(layer, placement) for layer in self.layers)

    def uniform(self, placement: Placement) -> tuple[Placement, ...]:
        """All layers that may be get this placement, the others are offloaded."""
        return tuple(
            wanted
            if wanted is not Placement.AUTO
            else placement
            if self.allows(layer, placement)
            else Placement.OFFLOAD
            for layer, wanted in enumerate(self.policy)
        )
