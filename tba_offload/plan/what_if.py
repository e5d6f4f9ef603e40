"""Other steps than the one that was measured: more layers, more micro-batches; and other budgets."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.config.policy import Placement
from tba_offload.plan.model import Plan
from tba_offload.plan.profile import Slot
from tba_offload.plan.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.profile import StepProfile


@dataclass(frozen=True, slots=True)
class Block:
    """One pass of a micro-batch through the layers of a stage."""

    micro_batch: int
    backward: bool


def one_f_one_b(micro_batches: int, ahead: int) -> list[Block]:
    """Return the schedule of one pipeline stage.

    Some forwards ahead, then one forward and one backward in turn.

    Narayanan et al. 2021 (PipeDream-Flush). Of p stages, stage s (from 0) is p - s micro-batches ahead;
    gradient accumulation without a pipeline is 1 ahead.

    Args:
        micro_batches: How many there are.
        ahead: Forwards before the first backward; at least 1.
    """
    ahead = min(ahead, micro_batches)
    blocks = [Block(number, backward=False) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        blocks += [Block(number, backward=True), Block(ahead + number, backward=False)]
    return blocks + [Block(number, backward=True) for number in range(micro_batches - ahead, micro_batches)]


def stretched(
    profile: StepProfile, *, layers: int | None = None, micro_batches: int | None = None
) -> StepProfile:
    """Return the profile of a step with other numbers of layers or micro-batches.

    Layers are repeated, or left out, evenly. Micro-batches follow one another as 1F1B has them, as many ahead
    as in the step that was measured. Other compute takes as long for each micro-batch as it did.

    Raises:
        ValueError: A number is not positive.
    """
    old = len(profile.layers)
    layers = old if layers is None else layers
    count = 1 + max(slot.micro_batch for slot in profile.slots)
    micro_batches = count if micro_batches is None else micro_batches
    if layers < 1 or micro_batches < 1:
        raise ValueError(f"there is no step of {layers} layers and {micro_batches} micro-batches")
    ahead = _ahead(profile)
    gaps = _gaps(profile)
    slots: list[Slot] = []
    for block in one_f_one_b(micro_batches, ahead):
        order = range(layers - 1, -1, -1) if block.backward else range(layers)
        first, between = gaps[block.backward]
        slots += [
            Slot(layer, block.micro_batch, block.backward, between if place else first)
            for place, layer in enumerate(order)
        ]
    return dataclasses.replace(
        profile,
        layers=tuple(profile.layers[layer * old // layers] for layer in range(layers)),
        slots=tuple(slots),
    )


def _ahead(profile: StepProfile) -> int:
    """Micro-batches whose forward has begun before the first backward."""
    before = itertools.takewhile(lambda slot: not slot.backward, profile.slots)
    return max(len({slot.micro_batch for slot in before}), 1)


def _gaps(profile: StepProfile) -> dict[bool, tuple[float, float]]:
    """For each direction: mean seconds of other compute before the first layer, and between layers."""
    gaps: dict[bool, tuple[list[float], list[float]]] = {False: ([], []), True: ([], [])}
    last: tuple[int, bool] | None = None
    for slot in profile.slots:
        here = slot.micro_batch, slot.backward
        gaps[slot.backward][here == last].append(slot.gap)
        last = here
    return {backward: (_mean(first), _mean(between)) for backward, (first, between) in gaps.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A point of the frontier: a budget, and the best plan for it.

    Attributes:
        budget: Bytes.
        plan: The plan with its prediction.
    """

    budget: int
    plan: Plan

    @property
    def fits(self) -> bool:
        """Whether the plan keeps to the budget; below some budget none does."""
        return self.plan.prediction is not None and self.plan.prediction.peak_bytes <= self.budget

    @property
    def seconds(self) -> float:
        """The predicted step time."""
        return self.plan.prediction.seconds if self.plan.prediction is not None else math.inf


def peak_of_keep(profile: StepProfile, bandwidth: Bandwidth) -> int:
    """Return the activation peak if every layer keeps its activations, bytes."""
    plan = Plan((Placement.KEEP,) * len(profile.layers))
    return simulate(profile, plan, bandwidth).peak_bytes
