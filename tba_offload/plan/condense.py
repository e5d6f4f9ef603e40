"""Makes a profile of very many activations small enough to be simulated many times.

What is equal is treated as one: of many micro-batches a few show everything, neighbouring layers of one kind
get one placement, and activations of a layer that are saved one after the other travel as one. Plans that are
found on the small profile are made exact on the large one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing, moved_slots

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from tba_offload.config.policy import Placement


@dataclass(frozen=True, slots=True)
class Condensed:
    """A small profile, and what it stands for.

    Attributes:
        profile: The small profile.
        members: For each of its layers, those of the large profile that it stands for.
    """

    profile: StepProfile
    members: tuple[tuple[int, ...], ...]

    def expanded(self, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return the placements of the large profile's layers."""
        of_layer = {
            layer: placement
            for placement, layers in zip(placements, self.members, strict=True)
            for layer in layers
        }
        return tuple(of_layer[layer] for layer in range(len(of_layer)))


def count_items(profile: StepProfile) -> int:
    """How many activations the step saves."""
    runs = Counter(slot.layer for slot in profile.slots if slot.backward)
    return sum(len(profile.kind_of(layer).activations) * count for layer, count in runs.items())


def condensed(profile: StepProfile, alike: Sequence[Hashable], items: int) -> Condensed:
    """Return a profile of about so many activations that behaves like ``profile``.

    Args:
        profile: The step.
        alike: For each layer, what must be equal, beside the kind, in layers that get one placement.
        items: How many activations it may save.
    """
    small = with_few_micro_batches(profile)
    members: tuple[tuple[int, ...], ...] = tuple((layer,) for layer in range(len(profile.layers)))
    runs = sum(slot.backward for slot in small.slots)
    if count_items(small) > items:
        small = _with_few_activations(small, max(items // max(runs, 1), 1))
    if (too_many := -(-count_items(small) // items)) > 1:
        groups = tuple(_groups(small, alike, too_many))
        grouped = _with_few_layers(small, groups)
        if grouped is not None:
            small, members = _with_few_activations(grouped, 1), groups
    return Condensed(small, members)


# Micro-batches


def with_few_micro_batches(profile: StepProfile) -> StepProfile:
    """Get the step with the micro-batches that are under way when most of them are, and their neighbours."""
    ends: dict[int, int] = defaultdict(int)
    for place, slot in enumerate(profile.slots):
        ends[slot.micro_batch] = max(ends[slot.micro_batch], place, (slot.held_until or 0) - 1)
    ending: dict[int, list[int]] = defaultdict(list)
    for micro_batch, place in ends.items():
        ending[place].append(micro_batch)
    order = list(dict.fromkeys(slot.micro_batch for slot in profile.slots))
    under_way: dict[int, None] = {}
    most: list[int] = []
    for place, slot in enumerate(profile.slots):
        under_way[slot.micro_batch] = None
        if len(under_way) > len(most):
            most = list(under_way)
        for micro_batch in ending[place]:
            del under_way[micro_batch]
    first, last = (order.index(each) for each in (most[0], most[-1])) if most else (0, 0)
    kept = {*order[max(first - 2, 0) : first], *most, *order[last + 1 : last + 3]}
    if len(kept) == len(order):
        return profile
    slots = [slot for slot in profile.slots if slot.micro_batch in kept]
    places = [0, *accumulate(slot.micro_batch in kept for slot in profile.slots)]
    return dataclasses.replace(profile, slots=moved_slots(slots, places))


# Activations


def _with_few_activations(profile: StepProfile, parts: int) -> StepProfile:
    kinds = tuple(
        dataclasses.replace(kind, activations=_merged(kind.activations, parts)) for kind in profile.kinds
    )
    return dataclasses.replace(profile, kinds=kinds)


def _merged(activations: Sequence[Saved], parts: int) -> tuple[Saved, ...]:
    """About so many, in the order of saving; those that ``offload-remat`` rebuilds apart from the others."""
    if len(activations) <= parts:
        return tuple(activations)
    rebuilt = [saved for saved in activations if saved.rebuilt]
    others = [saved for saved in activations if not saved.rebuilt]
    if not rebuilt or not others:
        return tuple(_merged_alike(activations, parts))
    share = sum(saved.nbytes for saved in rebuilt) / max(sum(saved.nbytes for saved in activations), 1)
    few = min(max(round(parts * share), 1), max(parts - 1, 1))
    merged = [*_merged_alike(rebuilt, few), *_merged_alike(others, max(parts - few, 1))]
    return tuple(sorted(merged, key=lambda saved: saved.at))


def _merged_alike(activations: Sequence[Saved], parts: int) -> list[Saved]:
    """At most so many, each of about as many bytes, in the order of saving."""
    share = sum(saved.nbytes for saved in activations) / parts
    buckets: list[list[Saved]] = [[] for _ in range(parts)]
    before = 0
    for saved in sorted(activations, key=lambda saved: saved.at):
        buckets[min(int((before + saved.nbytes / 2) / share), parts - 1) if share else 0].append(saved)
        before += saved.nbytes
    return [_mean(bucket) for bucket in buckets if bucket]


def _mean(bucket: Sequence[Saved]) -> Saved:
    nbytes = sum(saved.nbytes for saved in bucket)
    weights = [saved.nbytes / nbytes if nbytes else 1 / len(bucket) for saved in bucket]

    def mean(values: Iterable[float]) -> float:
        return min(sum(weight * value for weight, value in zip(weights, values, strict=True)), 1.0)

    is_needed_early = any(saved.needed is not None for saved in bucket)
    return Saved(
        nbytes,
        mean(saved.at for saved in bucket),
        mean(saved.until for saved in bucket),
        bucket[0].rebuilt,
        mean(saved.fetched for saved in bucket) if is_needed_early else None,
    )


# Layers


def _groups(profile: StepProfile, alike: Sequence[Hashable], size: int) -> Iterator[tuple[int, ...]]:
    """Neighbouring layers of one kind, at most so many in a group, each group as large as the others."""
    same = itertools.groupby(
        range(len(profile.layers)), key=lambda layer: (profile.layers[layer], alike[layer])
    )
    for _, run in same:
        layers = tuple(run)
        count = -(-len(layers) // size)
        borders = [len(layers) * place // count for place in range(count + 1)]
        yield from (layers[a:b] for a, b in itertools.pairwise(borders))


def _with_few_layers(profile: StepProfile, groups: Sequence[tuple[int, ...]]) -> StepProfile | None:
    """Return the step with a layer for each group; None if those of a group do not always run in one go."""
    slots = _grouped_slots(profile, groups)
    if slots is None:
        return None
    shapes = sorted({(profile.layers[group[0]], len(group)) for group in groups})
    return dataclasses.replace(
        profile,
        kinds=tuple(_kind_of_several(profile.kinds[kind], size) for kind, size in shapes),
        layers=tuple(shapes.index((profile.layers[group[0]], len(group))) for group in groups),
        timings=tuple(_timings_of_several(profile.timings[kind], size) for kind, size in shapes),
        samples=(),
        slots=slots,
    )


def _grouped_slots(profile: StepProfile, groups: Sequence[tuple[int, ...]]) -> tuple[Slot, ...] | None:
    group_of = {layer: number for number, group in enumerate(groups) for layer in group}
    slots: list[Slot] = []
    places: list[int] = []  # of each slot of the large profile: how many begin before it
    expected: list[int] = []  # layers that the last slot still waits for
    for slot in profile.slots:
        places.append(len(slots))
        if expected:
            last = slots[-1]
            if slot[:3] != (expected.pop(), last.micro_batch, last.backward):
                return None
            held = [until for until in (last.held_until, slot.held_until) if until is not None]
            slots[-1] = last._replace(
                gap=last.gap + slot.gap,
                held_until=max(held, default=None),
                gradients=max(last.gradients, slot.gradients),
            )
            continue
        group = groups[group_of[slot.layer]]
        order = group[::-1] if slot.backward else group
        if slot.layer != order[0]:
            return None
        slots.append(slot._replace(layer=group_of[slot.layer]))
        expected = list(order[:0:-1])
    return None if expected else moved_slots(slots, [*places, len(slots)])


def _kind_of_several(kind: LayerKind, size: int) -> LayerKind:
    """So many layers of a kind, one after the other."""
    activations = tuple(
        saved._replace(
            at=(place + saved.at) / size,
            until=(size - 1 - place + saved.until) / size,
            needed=None if saved.needed is None else (size - 1 - place + saved.needed) / size,
        )
        for place in range(size)
        for saved in kind.activations
    )
    attention = None if kind.attention_bytes is None else kind.attention_bytes * size
    sizes = kind.small_bytes * size, kind.input_bytes * size, kind.recomputed_bytes, attention
    return LayerKind(activations, *sizes, kind.beside)


def _timings_of_several(timings: dict[Placement, Timing], size: int) -> dict[Placement, Timing]:
    return {
        placement: Timing(timing.forward * size, timing.backward * size)
        for placement, timing in timings.items()
    }
