"""Profiles of steps that never ran, drives for them, and strategies that draw both."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from tba_offload.config.policy import Placement
from tba_offload.planner.model import Bandwidth, LayerKind, Plan, Saved, Slot, StepProfile, Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

KEEP, OFFLOAD, RECOMPUTE, AUTO = Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.AUTO
RECOMPUTE_OFFLOAD, OFFLOAD_REMAT = Placement.RECOMPUTE_OFFLOAD, Placement.OFFLOAD_REMAT
MIB = 1 << 20
FAST = Bandwidth(100e9, 100e9)


def steps_of(layers: int, micro_batches: int, warm_up: int) -> list[tuple[int, int, bool]]:
    """1F1B as one stage sees it: some forwards ahead, then in turn, then the backwards that are left."""
    forward = [[(layer, m, False) for layer in range(layers)] for m in range(micro_batches)]
    backward = [[(layer, m, True) for layer in reversed(range(layers))] for m in range(micro_batches)]
    ahead = min(warm_up, micro_batches)
    order = [*forward[:ahead]]
    for m in range(micro_batches - ahead):
        order += [forward[ahead + m], backward[m]]
    order += backward[micro_batches - ahead :]
    return [slot for part in order for slot in part]


def make_profile(
    layers: int = 8,
    *,
    sizes: Sequence[int] = (2 * MIB,) * 6,
    micro_batches: int = 1,
    warm_up: int = 1,
    forward: float = 0.03,
    backward: float = 0.06,
    gap: float = 0.01,
) -> StepProfile:
    count = len(sizes)
    saved = tuple(Saved(n, (i + 0.5) / count, 1 - (i + 0.5) / count) for i, n in enumerate(sizes))
    kind = LayerKind(saved, small_bytes=1000, input_bytes=min(sizes))
    slots = tuple(
        Slot(layer, m, backward, gap if layer == 0 and not backward else 0.0)
        for layer, m, backward in steps_of(layers, micro_batches, warm_up)
    )
    timing = {KEEP: (Timing(forward, backward),)}
    return StepProfile((kind,), (0,) * layers, (timing,), slots, tail=0.02, headroom=MIB)


profiles = st.builds(
    make_profile,
    st.integers(1, 6),
    sizes=st.lists(st.integers(1, 8 * MIB), min_size=1, max_size=5),
    micro_batches=st.integers(1, 4),
    warm_up=st.integers(1, 3),
    forward=st.floats(0.001, 0.1),
    backward=st.floats(0.001, 0.1),
)


def rebuilding(
    profile: StepProfile, which: Sequence[bool] = (False, True, False), *, seconds: float | None = None
) -> StepProfile:
    (kind,), (timing,) = profile.kinds, profile.timings
    flags = [which[number % len(which)] for number in range(len(kind.activations))]
    activations = [saved._replace(rebuilt=flag) for saved, flag in zip(kind.activations, flags, strict=True)]
    if seconds is not None:
        forward, backward = profile.timing(0, OFFLOAD)
        timing = timing | {OFFLOAD_REMAT: (Timing(forward, backward + seconds),)}
    kind = dataclasses.replace(kind, activations=tuple(activations))
    return dataclasses.replace(profile, kinds=(kind,), timings=(timing,))


rebuilding_profiles = st.builds(
    rebuilding,
    profiles,
    st.lists(st.booleans(), min_size=1, max_size=4),
    seconds=st.one_of(st.none(), st.floats(0.0, 0.02)),
)

all_profiles = st.one_of(profiles, rebuilding_profiles)
small_capacities = st.integers(0, 32 * MIB)
_rates = st.floats(5e7, 2e10)
hosts = st.none() | st.builds(Bandwidth, _rates, _rates, small_capacities)
drives = st.builds(Bandwidth, _rates, _rates, host=hosts, host_first=st.booleans())
windows = st.one_of(st.none(), st.integers(MIB, 64 * MIB))
shares = st.floats(0.05, 1.2)


def all_of(profile: StepProfile, placement: Placement, window: int | None = None) -> Plan:
    return Plan((placement,) * len(profile.layers), window=window)
