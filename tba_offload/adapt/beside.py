"""What lies in memory beside what layers have saved, learned from the steps in which memory was looked at."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.plan.beside import Beside, own_bytes
from tba_offload.plan.profile import computed_as

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.config.policy import Placement
    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import StepProfile

_LOOKS = 3
"""Looks of which the middle one counts: kernels take memory once for shapes that are new, and where samples
miss a peak, the next do not. What one step needs beyond that is found as the rest of the profile."""


class SeenBeside(NamedTuple):
    """Most bytes that were seen in one step beside the activations of layers.

    Attributes:
        at_loss: Between the last layer's forward and its backward.
        layers: While each layer ran; zeros of one that did not.
    """

    at_loss: int
    layers: Sequence[Beside]


class BesideLayers:
    """The last looks at what lies beside layers: for each under each placement, and at the loss."""

    def __init__(self) -> None:
        self._at_loss: deque[int] = deque(maxlen=_LOOKS)
        self._looks: defaultdict[tuple[int, Placement], deque[Beside]] = defaultdict(
            lambda: deque(maxlen=_LOOKS)
        )

    def forget(self) -> None:
        """Forgets all looks."""
        self._at_loss.clear()
        self._looks.clear()

    def grow(self, factor: float) -> None:
        """Layers have grown, and what lies beside them is taken to have grown as they have."""
        self._at_loss = deque((int(factor * nbytes) for nbytes in self._at_loss), _LOOKS)
        for looks in self._looks.values():
            for _ in range(len(looks)):
                looks.append(Beside(*(int(factor * nbytes) for nbytes in looks.popleft())))

    def note(self, seen: SeenBeside, plan: Plan, profile: StepProfile) -> None:
        """Notes what was seen in a step.

        Args:
            seen: The bytes.
            plan: The plan that was in force.
            profile: The step; what its layers save is known.
        """
        self._at_loss.append(seen.at_loss)
        for layer, beside in enumerate(seen.layers):
            if any(beside):
                own = own_bytes(profile.kind_of(layer), plan, layer)
                looks = self._looks[layer, computed_as(plan.placements[layer], layer)]
                looks.append(Beside(*(max(a - b, 0) for a, b in zip(beside, own, strict=True))))

    def put_in(self, profile: StepProfile) -> StepProfile:
        """The profile with what is known: the most of the layers of a kind, under each placement."""
        found: list[dict[Placement, Beside]] = [{} for _ in profile.kinds]
        for (layer, placement), looks in self._looks.items():
            known = found[profile.layers[layer]]
            known[placement] = _middle_look(looks).at_least(known.get(placement, Beside()))
        kinds = (
            dataclasses.replace(kind, beside=beside)
            for kind, beside in zip(profile.kinds, found, strict=True)
        )
        return dataclasses.replace(profile, kinds=tuple(kinds), loss_bytes=_middle(self._at_loss))


def _middle_look(looks: Iterable[Beside]) -> Beside:
    return Beside(*map(_middle, zip(*looks, strict=True)))


def _middle(values: Iterable[int]) -> int:
    """The higher of the two in the middle, where there are two; 0 if there are none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0
