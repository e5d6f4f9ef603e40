"""Completes a step with the runs of layers that were skipped in it, and may run in the next one.

Layers are dropped at random (LayerDrop, stochastic depth), skipped in turn, or trained in stages. A plan must
hold for all of them at once, although perhaps no step ever runs them all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from tba_offload.plan.profile import moved_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.profile import Slot, StepProfile

    Orders = dict[int, list[int]]
    """For each micro-batch, the layers that it may run, in the order of their forward."""


def with_skipped(profile: StepProfile, before: StepProfile | None) -> StepProfile:
    """Return a step with the runs of layers that were skipped in it.

    Micro-batches that share a layer are of one kind: each may run what any of them ran, in ``before`` too.

    Args:
        profile: The step.
        before: The steps before it, completed. Where more micro-batches were under way at once in those,
            their schedule counts.
    """
    slots, others = profile.slots, before.slots if before is not None else ()
    if _most_under_way(others) > _most_under_way(slots):
        slots, others = others, slots
    return dataclasses.replace(profile, slots=_completed(slots, _orders(slots, others)))


def _most_under_way(slots: Sequence[Slot]) -> int:
    """How many micro-batches wait for the end of their backward at once."""
    left = Counter(slot.micro_batch for slot in slots)
    under_way, most = set[int](), 0
    for slot in slots:
        under_way.add(slot.micro_batch)
        most = max(most, len(under_way))
        left[slot.micro_batch] -= 1
        if not left[slot.micro_batch]:
            under_way.remove(slot.micro_batch)
    return most


def _orders(slots: Sequence[Slot], others: Sequence[Slot]) -> Orders:
    ran: defaultdict[int, list[int]] = defaultdict(list)
    for micro_batch, order in [*_as_run(slots).items(), *_as_run(others).items()]:
        ran[micro_batch] = _merged(ran[micro_batch], order)
    kinds: list[tuple[list[int], list[int]]] = []  # micro-batches that share layers, and those
    for micro_batch, order in ran.items():
        alike = [kind for kind in kinds if not set(order).isdisjoint(kind[1])]
        micro_batches, all_of_them = [micro_batch], order
        for numbers, layers in alike:
            micro_batches += numbers
            all_of_them = _merged(layers, all_of_them)
        kinds = [*(kind for kind in kinds if kind not in alike), (micro_batches, all_of_them)]
    return {number: layers for numbers, layers in kinds for number in numbers}


def _as_run(slots: Sequence[Slot]) -> Orders:
    orders: defaultdict[int, list[int]] = defaultdict(list)
    for slot in slots:
        if not slot.backward:
            orders[slot.micro_batch].append(slot.layer)
    return orders


def _merged(ours: list[int], theirs: list[int]) -> list[int]:
    """All layers of two orders; between the same neighbours a lower number comes first."""
    if ours == theirs:
        return ours
    mine, others = set(ours), set(theirs)
    merged: list[int] = []
    place = 0
    for layer in theirs:
        if layer in mine:
            end = max(ours.index(layer) + 1, place)
            merged += ours[place:end]
            place = end
        else:
            while place < len(ours) and ours[place] not in others and ours[place] < layer:
                merged.append(ours[place])
                place += 1
            merged.append(layer)
    return merged + ours[place:]


def _completed(slots: Sequence[Slot], orders: Orders) -> tuple[Slot, ...]:
    """Return the compute of a step with the runs that it lacks, of the micro-batches that it has.

    Each lies within the run before it: its forward follows the forward of that one, and its backward comes
    before the backward of that one. Those before the first run lie around it.
    """
    present = {slot[:2] for slot in slots}
    around: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    within: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for micro_batch in {micro_batch for _, micro_batch in present}:
        order = orders[micro_batch]
        lacking = around[next(layer for layer in order if (layer, micro_batch) in present), micro_batch]
        for layer in order:
            if (layer, micro_batch) in present:
                lacking = within[layer, micro_batch]
            else:
                lacking.append(layer)
    completed: list[Slot] = []
    places: list[int] = []  # where what lies around each slot begins
    for slot in slots:
        places.append(len(completed))
        before, after = around[slot[:2]], within[slot[:2]]
        if slot.backward:
            before, after = after[::-1], before[::-1]
        completed += (slot._replace(layer=layer, gap=0.0) for layer in before)
        completed.append(slot)
        completed += (slot._replace(layer=layer, gap=0.0) for layer in after)
    return moved_slots(completed, [*places, len(completed)])
