"""The simulator of a step, and the solver that finds the best plan by it."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import pytest
from covering import EVERYTHING, of_which
from harness import MIB
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import (
    AUTO,
    FAST,
    KEEP,
    OFFLOAD,
    OFFLOAD_REMAT,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    all_of,
    all_profiles,
    drives,
    make_profile,
    rebuilding,
    shares,
    windows,
)

from tba_offload.config.policy import Objective, Placement
from tba_offload.placements import staying
from tba_offload.planner.model import Bandwidth, Limits, Plan, StepProfile, Timing
from tba_offload.planner.play import play
from tba_offload.planner.solve import Case, solve

if TYPE_CHECKING:
    import random

quick = settings(max_examples=60 if EVERYTHING else 10, deadline=None)
SPARED = Placement.RECOMPUTE_EXCEPT_ATTENTION
WINDOW = 32 * MIB


def case_of(profile: StepProfile, bandwidth: Bandwidth, share: float | None) -> Case:
    """The question for a share of what keeping all takes, or for the lowest peak at no cost in time."""
    budget = None if share is None else int(share * play(profile, all_of(profile, KEEP), FAST).peak_bytes)
    objective = Objective.MEMORY if share is None else Objective.TIME
    limits = Limits(budget, WINDOW)
    return Case(profile, bandwidth, limits, (AUTO,) * len(profile.layers), objective)


# The simulator


@pytest.mark.parametrize("layers", [4, 32])
def test_what_is_offloaded_peaks_with_its_window_however_deep(layers: int) -> None:
    profile = make_profile(layers)
    outcome = play(profile, all_of(profile, OFFLOAD, 8 * MIB), FAST)
    assert outcome.peak_bytes <= 8 * MIB + 3 * 2 * MIB + layers * 1000 + MIB
    assert outcome.stall_seconds < 0.01 * outcome.seconds
    assert outcome.sent_bytes >= layers * 12 * MIB


def test_a_drive_at_half_the_needed_rate_takes_twice_the_forward() -> None:
    """As much as the writes cannot do while forward computes, it waits; and so with reads."""
    profile = make_profile(40, gap=0.0)
    rate = 40 * 12 * MIB / (40 * 0.03) / 2
    outcome = play(profile, all_of(profile, OFFLOAD, 8 * MIB), Bandwidth(rate, 100e9))
    assert outcome.stall_seconds == pytest.approx(40 * 0.03, rel=0.05)
    outcome = play(profile, all_of(profile, OFFLOAD, 8 * MIB), Bandwidth(100e9, rate / 2))
    assert outcome.stall_seconds == pytest.approx(40 * 0.06, rel=0.05)


@pytest.mark.parametrize("host_first", [True, False])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_host_memory_takes_the_wait_for_a_slow_drive_away(share: float, *, host_first: bool) -> None:
    """The drive manages four fifths of what is needed. First or not, host memory takes a fifth or more."""
    profile = make_profile(40, gap=0.0)
    saved, seconds = 40 * 12 * MIB, 40 * 0.03
    drives = Bandwidth(0.8 * saved / seconds, 100e9)
    plan = all_of(profile, OFFLOAD, 32 * MIB)
    alone = play(profile, plan, drives)
    host = Bandwidth(10e9, 10e9, int(share * saved))
    found = play(profile, plan, dataclasses.replace(drives, host=host, host_first=host_first))
    assert alone.stall_seconds > 0.15 * seconds
    assert found.stall_seconds < 0.01 * seconds
    if host_first:  # with as few bytes for the drive as possible
        assert found.written_bytes <= found.sent_bytes <= (1 - share) * saved + 2 * MIB
    else:
        assert found.written_bytes > 0.75 * saved


@given(all_profiles, drives, windows, st.randoms(use_true_random=False))
@quick
def test_every_byte_and_every_second_is_accounted_for(
    profile: StepProfile, bandwidth: Bandwidth, window: int | None, chance: random.Random
) -> None:
    share = Placement(f"offload-{chance.randrange(1, 100)}%")
    choices = [KEEP, OFFLOAD, share, RECOMPUTE, RECOMPUTE_OFFLOAD, OFFLOAD_REMAT]
    placements = tuple(chance.choice(choices) for _ in profile.layers)
    (kind,) = profile.kinds
    sizes = [saved.nbytes for saved in kind.activations]
    plan = Plan(placements, window=window)
    outcome = play(profile, plan, bandwidth)
    moves = {
        OFFLOAD: kind.nbytes,
        share: kind.nbytes - sum(sizes[number] for number in staying(sizes, share.percent)),
        RECOMPUTE_OFFLOAD: kind.input_bytes,
        OFFLOAD_REMAT: kind.nbytes - kind.rebuilt_bytes,
    }
    saved = sum(slot.backward * moves.get(placements[slot.layer], 0) for slot in profile.slots)
    stored = outcome.written_bytes + outcome.host_bytes
    assert stored <= saved <= stored + outcome.forwarded_bytes
    assert outcome.written_bytes <= outcome.sent_bytes <= outcome.written_bytes + outcome.forwarded_bytes
    assert outcome.stall_seconds >= 0
    fastest = bandwidth.read + (bandwidth.host.read if bandwidth.host else 0.0)
    assert (saved - outcome.forwarded_bytes) / fastest <= outcome.seconds * (1 + 1e-9)
    assert play(profile, plan, bandwidth) == outcome
    if not any(placement.percent < 100 for placement in placements):
        times = (profile.timing(slot.layer, placements[slot.layer])[slot.backward] for slot in profile.slots)
        computing = profile.tail + sum(times) + sum(slot.gap for slot in profile.slots)
        assert outcome.seconds == pytest.approx(computing + outcome.stall_seconds)


# The solver


@given(all_profiles, drives, shares)
@quick
def test_a_budget_is_kept_and_no_simple_plan_within_it_is_faster(
    profile: StepProfile, bandwidth: Bandwidth, share: float
) -> None:
    case = case_of(profile, bandwidth, share)
    plan = solve(case)
    found = case.played(plan)
    assert plan == solve(case)
    assert plan.prediction == found
    assert AUTO not in plan.placements
    for placement in (KEEP, OFFLOAD, RECOMPUTE, OFFLOAD_REMAT):
        other = all_of(profile, placement, WINDOW)
        if case.fits(other):
            assert case.fits(plan)
            assert found.seconds <= case.played(other).seconds * (1 + 1e-9)


@given(all_profiles, drives, st.floats(0.0, 2.0))
@quick
def test_for_the_lowest_peak_nothing_waits_and_nothing_is_recomputed(
    profile: StepProfile, bandwidth: Bandwidth, cost: float
) -> None:
    """Layers that offload compute for longer by a share: for hooks and transfers."""
    (timing,) = profile.timings
    offloaded = Timing(*((1 + cost) * seconds for seconds in profile.timing(0, KEEP)))
    profile = dataclasses.replace(profile, timings=({**timing, OFFLOAD: (offloaded,)},))
    case = case_of(profile, bandwidth, None)
    found = case.played(plan := solve(case))
    assert not any(placement.recomputes for placement in plan.placements)
    assert found.seconds <= 1.02 * case.keep.seconds
    assert found.stall_seconds <= 0.01 * found.seconds + 1e-9
    assert found.peak_bytes <= case.keep.peak_bytes


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5])
def test_a_slower_drive_means_more_recomputation(share: float) -> None:
    profile = make_profile(16)
    plans = [solve(case_of(profile, Bandwidth(rate, rate), share)) for rate in (4e9, 4e8, 2e8, 1e8)]
    recomputed = [sum(placement.recomputes for placement in plan.placements) for plan in plans]
    assert recomputed == sorted(recomputed)
    assert recomputed[0] == 0 < recomputed[-1]


def test_the_policy_of_the_user_stands() -> None:
    profile = make_profile(10)
    policy = (AUTO, OFFLOAD_REMAT, KEEP, RECOMPUTE, OFFLOAD) * 2
    plan = solve(dataclasses.replace(case_of(profile, Bandwidth(2e8, 2e8), 0.4), policy=policy))
    assert all(wanted in {AUTO, found} for wanted, found in zip(policy, plan.placements, strict=True))


@pytest.mark.parametrize("share", [0.2, 0.35])
def test_what_is_cheap_to_rebuild_spares_a_drive_that_cannot_follow(share: float) -> None:
    unknown = make_profile(16)
    profile = rebuilding(unknown, seconds=0.001)
    rate = 0.75 * 12 * MIB / 0.03
    case, before = (case_of(each, Bandwidth(rate, rate), share) for each in (profile, unknown))
    plan = solve(case)
    assert OFFLOAD_REMAT in plan.placements
    assert case.fits(plan)
    assert case.played(plan).seconds < before.played(solve(before)).seconds


@pytest.mark.parametrize(("attention", "is_chosen"), [(MIB, True), (0, False), (None, False)])
def test_attention_is_spared_where_the_drive_has_no_time(attention: int | None, *, is_chosen: bool) -> None:
    profile = make_profile(8)
    times = {RECOMPUTE: (Timing(0.03, 0.09),), SPARED: (Timing(0.03, 0.065),)}
    kind = dataclasses.replace(profile.kinds[0], attention_bytes=attention)
    timing = {**profile.timings[0], **times}
    profile = dataclasses.replace(profile, kinds=(kind,), timings=(timing,))
    plan = solve(case_of(profile, Bandwidth(100e6, 100e6), 0.4))
    assert (SPARED in plan.placements) is is_chosen


@pytest.mark.parametrize("shape", of_which([(100, 50, 4), (100, 25, 25)], (100, 50, 4)))
def test_a_large_step_is_planned_in_seconds(shape: tuple[int, int, int]) -> None:
    """50,000 activations and more; by the processor's time, however busy the machine is."""
    layers, micro_batches, warm_up = shape
    profile = make_profile(layers, sizes=(MIB,) * 20, micro_batches=micro_batches, warm_up=warm_up)
    case = case_of(profile, Bandwidth(1e9, 1e9), 0.35)
    began = time.process_time()
    plan = solve(case)
    assert time.process_time() - began < 10
    assert case.fits(plan)
