"""What lies in memory beside what layers have saved, learned from the steps in which memory was looked at."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.plan.beside import Beside, own_bytes
from tba_offload.plan.profile import computed_as

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.config.policy import Placement
    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import StepProfile
    from tba_offload.plan.tuning import Tuning


class SeenBeside(NamedTuple):
    """Most bytes that were seen in one step beside the activations of layers.

    Attributes:
        at_loss: Between the last layer's forward and its backward.
        layers: While each layer ran; zeros of one that did not.
    """

    at_loss: int
    layers: Sequence[Beside]


class BesideLayers:
    """The last look at what lies beside layers: for each under each placement, and at the loss.

    Where a layer was looked at under other placements for long, what was seen under one before is forgotten:
    kernels may have taken memory once then. What a step needs beyond all that is the rest of the profile.

    Args:
        tuning: Says how many looks are remembered.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._remembered = tuning.remembered_rests
        self._count = 0
        self._at_loss = 0
        self._looks: defaultdict[int, dict[Placement, tuple[int, Beside]]] = defaultdict(dict)

    def forget(self) -> None:
        """Forget all looks."""
        self._at_loss = 0
        self._looks.clear()

    def grow(self, factor: float) -> None:
        """Layers have grown, and what lies beside them is taken to have grown as they have."""
        self._at_loss = int(factor * self._at_loss)
        for looks in self._looks.values():
            for placement, (number, look) in looks.items():
                looks[placement] = number, Beside(*(int(factor * nbytes) for nbytes in look))

    def note(self, seen: SeenBeside, plan: Plan, profile: StepProfile) -> None:
        """Note what was seen in a step.

        Args:
            seen: The bytes.
            plan: The plan that was in force.
            profile: The step; what its layers save is known.
        """
        self._count += 1
        self._at_loss = seen.at_loss
        for layer, beside in enumerate(seen.layers):
            if any(beside):
                own = own_bytes(profile.kind_of(layer), plan, layer)
                look = Beside(*(max(a - b, 0) for a, b in zip(beside, own, strict=True)))
                looks = self._looks[layer]
                looks[computed_as(plan.placements[layer])] = self._count, look
                self._looks[layer] = {
                    placement: known
                    for placement, known in looks.items()
                    if known[0] > self._count - self._remembered
                }

    def put_in(self, profile: StepProfile) -> StepProfile:
        """Return the profile with what is known: the most of the layers of a kind, under each placement."""
        found: list[dict[Placement, Beside]] = [{} for _ in profile.kinds]
        for layer, looks in self._looks.items():
            of_kind = found[profile.layers[layer]]
            for placement, (_, look) in looks.items():
                of_kind[placement] = look.at_least(of_kind.get(placement, Beside()))
        kinds = (
            dataclasses.replace(kind, beside=beside)
            for kind, beside in zip(profile.kinds, found, strict=True)
        )
        return dataclasses.replace(profile, kinds=tuple(kinds), loss_bytes=self._at_loss)
