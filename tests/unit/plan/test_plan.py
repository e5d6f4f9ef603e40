"""Profiles, the simulator and the planner: pure functions, so their properties hold for any step."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from covering import EVERYTHING, each_once, of_which
from hypothesis import example, given, settings
from hypothesis import strategies as st
from profiles import (
    AUTO,
    FAST,
    KEEP,
    MIB,
    OFFLOAD,
    OFFLOAD_REMAT,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    all_of,
    all_profiles,
    behind,
    drives,
    make_profile,
    profiles,
    rebuilding,
    shares,
    small_capacities,
    small_hosts,
    windows,
)

from tba_offload.config.policy import Objective, Placement
from tba_offload.plan import trials
from tba_offload.plan.bandwidth import Bandwidth, HostTier, MeasuredRate
from tba_offload.plan.condense import condensed, count_items, with_few_micro_batches
from tba_offload.plan.model import Limits, Plan
from tba_offload.plan.profile import Saved, StepProfile, Timing
from tba_offload.plan.search import is_better, make_plan
from tba_offload.plan.simulate import Outcome, simulate
from tba_offload.plan.tuning import TUNING, Tuning

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

CONDENSING = Tuning(many_items=1000, few_items=300)
"""Steps are condensed that are searched as a whole by default."""


quick = settings(max_examples=60 if EVERYTHING else 30)


def compute_seconds(profile: StepProfile, plan: Plan) -> float:
    """Time of a step in which nothing waits."""
    return profile.tail + sum(
        slot.gap + profile.timing(slot.layer, plan.placements[slot.layer])[slot.backward]
        for slot in profile.slots
    )


# Profiles


@given(all_profiles)
@quick
def test_a_profile_survives_its_way_through_a_run_log(profile: StepProfile) -> None:
    assert StepProfile.from_json(json.loads(json.dumps(profile.as_json()))) == profile


# Rates


def test_a_rate_follows_a_drive_that_gets_slower() -> None:
    rate = MeasuredRate()
    assert rate.rate is None
    for _ in range(10):
        rate.add(1000, 1.0)
    rate.add(0, 0.0)  # nothing moved, nothing learned
    assert rate.rate == pytest.approx(1000)
    assert rate.spread == 0.0
    for _ in range(3):
        rate.add(500, 1.0)
    assert rate.rate is not None
    assert 500 <= rate.rate < 600
    assert rate.spread > 0.1


# The simulator


def test_what_is_kept_moves_nothing_and_peaks_with_everything() -> None:
    profile = make_profile(8)
    outcome = simulate(profile, all_of(profile, KEEP), FAST)
    assert outcome.peak_bytes == 8 * (12 * MIB + 1000) + MIB
    assert outcome.stall_seconds == outcome.written_bytes == outcome.read_bytes == 0
    assert outcome.seconds == pytest.approx(8 * 0.09 + 0.03)


def test_what_is_recomputed_keeps_inputs_and_one_layer() -> None:
    profile = make_profile(8)
    outcome = simulate(profile, all_of(profile, RECOMPUTE), FAST)
    assert outcome.peak_bytes == 7 * 2 * MIB + 12 * MIB + 1000 + MIB
    assert outcome.seconds == pytest.approx(8 * 0.12 + 0.03)


@pytest.mark.parametrize("layers", [4, 8, 32])
def test_recomputed_with_its_input_offloaded_peaks_with_one_layer_however_deep(layers: int) -> None:
    profile = make_profile(layers)
    outcome = simulate(profile, all_of(profile, RECOMPUTE_OFFLOAD, 8 * MIB), FAST)
    assert outcome.peak_bytes <= 8 * MIB + 12 * MIB + 1000 + MIB
    assert outcome.seconds == pytest.approx(layers * 0.12 + 0.03)
    assert outcome.read_bytes + outcome.forwarded_bytes == layers * 2 * MIB


@pytest.mark.parametrize("layers", [4, 8, 32])
def test_what_is_offloaded_peaks_with_its_window_however_deep(layers: int) -> None:
    profile = make_profile(layers)
    outcome = simulate(profile, all_of(profile, OFFLOAD, 8 * MIB), FAST)
    assert outcome.peak_bytes <= 8 * MIB + 3 * 2 * MIB + layers * 1000 + MIB
    assert outcome.stall_seconds < 0.01 * outcome.seconds
    assert outcome.read_bytes + outcome.forwarded_bytes == layers * 12 * MIB


def test_a_drive_at_half_the_needed_rate_takes_twice_the_forward() -> None:
    """As much as the writes cannot do while forward computes, it waits; and so with reads."""
    profile = make_profile(40, gap=0.0)
    rate = 40 * 12 * MIB / (40 * 0.03) / 2
    outcome = simulate(profile, all_of(profile, OFFLOAD, 8 * MIB), Bandwidth(rate, 100e9))
    assert outcome.stall_seconds == pytest.approx(40 * 0.03, rel=0.05)
    outcome = simulate(profile, all_of(profile, OFFLOAD, 8 * MIB), Bandwidth(100e9, rate / 2))
    assert outcome.stall_seconds == pytest.approx(40 * 0.06, rel=0.05)


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="a plan for 3 layers does not fit a profile of 8"):
        simulate(make_profile(8), Plan((KEEP,) * 3), FAST)


@pytest.mark.parametrize(
    ("gradients", "taken"),
    [
        ((0, 0, 5, 10), 24 - 5),  # half of them come with each layer
        ((0, 0, 10, 10), 24),  # all with the last layer, or before it as those of a head
        ((10, 10, 0, 10), 24),  # those of the step before are there in forward
        ((0, 0, 0, 0), 24),  # nothing is known of them
        ((0, 0, 0, 60), 12),  # more than there are activations: what is left when they come
    ],
)
def test_activations_may_lie_where_gradients_come_later(gradients: Sequence[int], taken: int) -> None:
    """MiB: two layers keep 12 each."""
    profile = dataclasses.replace(make_profile(2), rest_bytes=0)
    kind = dataclasses.replace(profile.kinds[0], small_bytes=0)
    slots = [
        slot._replace(gradients=nbytes * MIB) for slot, nbytes in zip(profile.slots, gradients, strict=True)
    ]
    profile = dataclasses.replace(profile, kinds=(kind,), slots=tuple(slots))
    outcome = simulate(profile, all_of(profile, KEEP, None), FAST)
    assert (outcome.activation_bytes, outcome.peak_bytes) == (24 * MIB, taken * MIB)
    assert outcome.prediction.activation_peak == 24 * MIB
    assert profile.gradient_bytes == max(gradients) * MIB
    assert StepProfile.from_json(profile.as_json()) == profile
    assert ("gradients" in profile.as_json()) is any(gradients)
    without = simulate(profile.without_gradients(), all_of(profile, KEEP, None), FAST)
    assert without.peak_bytes == without.activation_bytes == outcome.activation_bytes


@given(
    all_profiles, drives, st.one_of(st.none(), st.integers(MIB, 64 * MIB)), st.randoms(use_true_random=False)
)
@quick
def test_every_byte_and_every_second_is_accounted_for(
    profile: StepProfile, bandwidth: Bandwidth, window: int | None, chance: random.Random
) -> None:
    share = Placement(f"offload-{chance.randrange(1, 100)}%")
    choices = [KEEP, OFFLOAD, share, RECOMPUTE, RECOMPUTE_OFFLOAD, OFFLOAD_REMAT]
    placements = tuple(chance.choice(choices) for _ in profile.layers)
    (kind,) = profile.kinds
    plan = Plan(placements, window=window)
    outcome = simulate(profile, plan, bandwidth)
    travels = {
        OFFLOAD: kind.nbytes,
        share: kind.nbytes - sum(kind.activations[number].nbytes for number in kind.staying(share.percent)),
        RECOMPUTE_OFFLOAD: kind.input_bytes,
        OFFLOAD_REMAT: kind.nbytes - kind.rebuilt_bytes,
    }
    saved = sum(slot.backward * travels.get(placements[slot.layer], 0) for slot in profile.slots)
    assert outcome.read_bytes + outcome.forwarded_bytes == saved
    assert outcome.read_bytes <= outcome.written_bytes <= saved
    assert outcome.seconds == pytest.approx(compute_seconds(profile, plan) + outcome.stall_seconds)
    # No more is moved than the drive can move in the time.
    assert outcome.read_seconds <= outcome.seconds * (1 + 1e-9)
    assert outcome.read_seconds * bandwidth.read >= outcome.read_bytes * (1 - 1e-9)
    assert outcome.write_seconds * bandwidth.write >= outcome.written_bytes * (1 - 1e-9)
    assert simulate(profile, plan, bandwidth) == outcome


@given(profiles, drives)
@quick
def test_a_faster_drive_never_makes_keep_or_recompute_slower(
    profile: StepProfile, bandwidth: Bandwidth
) -> None:
    for placement in (KEEP, RECOMPUTE):
        plan = all_of(profile, placement)
        assert simulate(profile, plan, bandwidth) == simulate(profile, plan, bandwidth.scaled(2))


# Host memory beside the drive


@given(profiles, behind, small_hosts, windows, st.randoms(use_true_random=False))
@quick
def test_host_memory_holds_no_more_than_its_capacity(
    profile: StepProfile, bandwidth: Bandwidth, host: HostTier, window: int | None, chance: object
) -> None:
    placements = tuple(chance.choice([OFFLOAD, OFFLOAD, KEEP, RECOMPUTE]) for _ in profile.layers)  # type: ignore[attr-defined]
    plan = Plan(placements, window=window)
    outcome = simulate(profile, plan, dataclasses.replace(bandwidth, host=host))
    assert outcome.host_peak_bytes <= host.capacity
    runs = sum(slot.backward and placements[slot.layer] is OFFLOAD for slot in profile.slots)
    moved = runs * profile.kinds[0].nbytes
    assert outcome.read_bytes + outcome.host_read_bytes + outcome.forwarded_bytes == moved
    assert outcome.read_bytes <= outcome.written_bytes
    assert outcome.host_read_bytes <= outcome.host_written_bytes
    assert outcome.written_bytes + outcome.host_written_bytes <= moved
    assert outcome.seconds == pytest.approx(compute_seconds(profile, plan) + outcome.stall_seconds)
    assert outcome.write_seconds * bandwidth.write >= outcome.written_bytes * (1 - 1e-9)


def test_host_memory_takes_what_a_drive_at_half_the_needed_rate_cannot() -> None:
    """And with less of it the rest of the waiting stays."""
    profile = make_profile(40, gap=0.0)
    whole = 40 * 12 * MIB
    plan = all_of(profile, OFFLOAD, 16 * MIB)
    bandwidth = Bandwidth(whole / (40 * 0.03) / 2, 100e9)
    stalls = []
    for share in (0.0, 0.125, 0.25, 0.6):
        outcome = simulate(profile, plan, bandwidth.with_host(int(share * whole), write=100e9, read=100e9))
        assert outcome.host_written_bytes == pytest.approx(min(share, 0.5) * whole, abs=24 * MIB)
        stalls.append(outcome.stall_seconds)
    assert stalls == pytest.approx([1.2, 0.9, 0.6, 0.0], abs=0.06)


@given(profiles, drives, small_capacities, windows, st.randoms(use_true_random=False))
@quick
def test_what_no_drive_has_room_for_stays(
    profile: StepProfile, bandwidth: Bandwidth, capacity: int, window: int | None, chance: random.Random
) -> None:
    placements = tuple(chance.choice([OFFLOAD, OFFLOAD, KEEP, RECOMPUTE]) for _ in profile.layers)
    plan = Plan(placements, window=window)
    outcome = simulate(profile, plan, dataclasses.replace(bandwidth, capacity=capacity))
    runs = sum(slot.backward and placements[slot.layer] is OFFLOAD for slot in profile.slots)
    moved = runs * profile.kinds[0].nbytes
    assert outcome.read_bytes + outcome.forwarded_bytes + outcome.fallback_bytes == moved
    assert outcome.read_bytes <= outcome.written_bytes <= moved - outcome.fallback_bytes
    roomy = dataclasses.replace(bandwidth, capacity=1 << 40)
    assert simulate(profile, plan, roomy) == simulate(profile, plan, bandwidth)


def test_plans_keep_to_the_budget_with_the_room_that_there_is() -> None:
    profile = make_profile(16)
    budget = peak_of_keep(profile) // 2
    recomputed = []
    for layers in (0, 2, 6, 16):
        bandwidth = dataclasses.replace(FAST, capacity=layers * profile.kinds[0].nbytes)
        found = plan_for(profile, bandwidth, budget)
        assert found.prediction is not None
        assert found.prediction.peak_bytes <= budget
        recomputed.append(sum(placement.recomputes for placement in found.placements))
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] >= 8
    assert recomputed[-1] == 0


# The planner


def peak_of_keep(profile: StepProfile) -> int:
    return simulate(profile, all_of(profile, KEEP), FAST).peak_bytes


def plan_for(profile: StepProfile, bandwidth: Bandwidth, budget: int | None, **options: object) -> Plan:
    limits = Limits(budget, window=32 * MIB)
    return make_plan(profile, bandwidth, limits, policy=(AUTO,) * len(profile.layers), **options)  # type: ignore[arg-type]


def outcome_of(profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> Outcome:
    return simulate(profile, plan, bandwidth)


@given(all_profiles, drives, shares)
@quick
def test_a_budget_is_kept_or_nothing_that_was_tried_keeps_it(
    profile: StepProfile, bandwidth: Bandwidth, share: float
) -> None:
    budget = int(share * peak_of_keep(profile))
    plan = plan_for(profile, bandwidth, budget)
    found = outcome_of(profile, plan, bandwidth)
    assert plan.prediction == found.prediction
    if found.peak_bytes > budget:
        for placement in (OFFLOAD, RECOMPUTE, KEEP, OFFLOAD_REMAT):
            other = simulate(profile, all_of(profile, placement, 32 * MIB), bandwidth)
            assert other.peak_bytes > 0.98 * budget


@given(all_profiles, drives, shares)
@quick
def test_no_simple_plan_within_the_budget_is_faster(
    profile: StepProfile, bandwidth: Bandwidth, share: float
) -> None:
    budget = int(share * peak_of_keep(profile))
    plan = plan_for(profile, bandwidth, budget)
    found = outcome_of(profile, plan, bandwidth)
    for placement in (KEEP, OFFLOAD, RECOMPUTE, OFFLOAD_REMAT):
        other = simulate(profile, all_of(profile, placement, 32 * MIB), bandwidth)
        if other.peak_bytes <= 0.98 * budget:
            assert found.peak_bytes <= budget
            assert found.seconds <= other.seconds * (1 + 1e-9)


@given(all_profiles, drives)
@quick
def test_without_a_budget_nothing_waits_and_nothing_is_recomputed(
    profile: StepProfile, bandwidth: Bandwidth
) -> None:
    plan = plan_for(profile, bandwidth, None)
    assert not any(placement.recomputes for placement in plan.placements)
    found = outcome_of(profile, plan, bandwidth)
    lost = found.seconds - compute_seconds(profile, all_of(profile, OFFLOAD))
    assert lost <= 0.01 * found.seconds + 1e-9
    assert found.peak_bytes <= peak_of_keep(profile)


def with_cost(profile: StepProfile, share: float) -> StepProfile:
    """The same step, but layers that offload compute for longer by a share: for hooks and transfers."""
    (timing,) = profile.timings
    offloaded = Timing(*((1 + share) * seconds for seconds in timing[KEEP]))
    return dataclasses.replace(profile, timings=({**timing, OFFLOAD: offloaded},))


def seconds_of_keep(profile: StepProfile, bandwidth: Bandwidth) -> float:
    return simulate(profile, all_of(profile, KEEP), bandwidth).seconds


@given(profiles, drives, st.floats(0.0, 2.0))
@quick
def test_without_a_budget_no_plan_is_slower_than_keep(
    profile: StepProfile, bandwidth: Bandwidth, share: float
) -> None:
    profile = with_cost(profile, share)
    plan = plan_for(profile, bandwidth, None)
    found = outcome_of(profile, plan, bandwidth)
    assert found.seconds <= (1 + TUNING.no_slower) * seconds_of_keep(profile, bandwidth)


def test_where_a_budget_has_room_for_everything_nothing_travels() -> None:
    """Also before a layer was seen to keep, when it seems to take no less time."""
    profile = make_profile(12)
    unknown = dataclasses.replace(profile, timings=({OFFLOAD: profile.timings[0][KEEP]},))
    assert outcome_of(unknown, all_of(unknown, OFFLOAD), FAST).stall_seconds == 0
    assert plan_for(unknown, FAST, 2 * peak_of_keep(unknown)).placements == (KEEP,) * 12


@given(all_profiles, drives, shares)
@quick
def test_the_same_question_has_the_same_answer(
    profile: StepProfile, bandwidth: Bandwidth, share: float
) -> None:
    budget = int(share * peak_of_keep(profile))
    assert plan_for(profile, bandwidth, budget) == plan_for(profile, bandwidth, budget)


@given(all_profiles, drives, shares)
@quick
def test_the_policy_of_the_user_stands(profile: StepProfile, bandwidth: Bandwidth, share: float) -> None:
    count = len(profile.layers)
    policy = tuple((AUTO, OFFLOAD_REMAT, KEEP, RECOMPUTE, OFFLOAD)[layer % 5] for layer in range(count))
    limits = Limits(int(share * peak_of_keep(profile)), window=32 * MIB)
    plan = make_plan(profile, bandwidth, limits, policy=policy)
    for wanted, found in zip(policy, plan.placements, strict=True):
        assert found is not AUTO
        assert wanted in {AUTO, found}


@pytest.mark.parametrize("share", of_which([0.2, 0.35, 0.5, 0.75], 0.2, 0.5))
def test_a_slower_drive_means_more_recomputation(share: float) -> None:
    profile = make_profile(16)
    budget = int(share * peak_of_keep(profile))
    plans = [plan_for(profile, Bandwidth(rate, rate), budget) for rate in (4e9, 4e8, 2e8, 1e8)]
    recomputed = [sum(placement.recomputes for placement in plan.placements) for plan in plans]
    assert recomputed == sorted(recomputed)
    assert recomputed[0] == 0 < recomputed[-1]


@given(
    profiles, behind, st.integers(MIB, 64 * MIB), shares, st.sampled_from([Objective.TIME, Objective.MEMORY])
)
@quick
def test_no_window_is_larger_than_the_user_allows(
    profile: StepProfile, bandwidth: Bandwidth, window: int, share: float, objective: Objective
) -> None:
    limits = Limits(int(share * peak_of_keep(profile)), window)
    largest = max(window, TUNING.narrowest * max(saved.nbytes for saved in profile.kinds[0].activations))
    tried: list[Plan] = []

    def noted(profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> Outcome:
        tried.append(plan)
        return simulate(profile, plan, bandwidth)

    with mock.patch.object(trials, "simulate", noted):
        every = frozenset(range(len(profile.layers)))
        policy = (AUTO,) * len(every)
        make_plan(profile, bandwidth, limits, policy=policy, objective=objective, not_recomputed=every)
    assert tried
    assert all(plan.window is not None and plan.window <= largest for plan in tried)


@pytest.mark.parametrize("share", [0.2, 0.35])
def test_what_is_cheap_to_rebuild_spares_a_drive_that_cannot_follow(share: float) -> None:
    unknown = make_profile(16)
    profile = rebuilding(unknown, seconds=0.001)
    bandwidth = Bandwidth(0.75 * 12 * MIB / 0.03, 0.75 * 12 * MIB / 0.03)
    budget = int(share * peak_of_keep(profile))
    plan, before = (plan_for(each, bandwidth, budget) for each in (profile, unknown))
    assert OFFLOAD_REMAT in plan.placements
    assert outcome_of(profile, plan, bandwidth).peak_bytes <= budget
    assert outcome_of(profile, plan, bandwidth).seconds < outcome_of(unknown, before, bandwidth).seconds


plans = st.builds(
    lambda numbers, window: (numbers, window),
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
    st.sampled_from([4 * MIB, 32 * MIB, None]),
)


@given(all_profiles, drives, plans, plans, st.sampled_from(Objective), st.floats(0.2, 1.2) | st.none())
@example(  # two that free next to nothing
    profile=make_profile(4, sizes=[4001], micro_batches=2, forward=0.0625, backward=0.0625),
    bandwidth=Bandwidth(5e7, 5e7),
    one=([0] * 8, 4 * MIB),
    other=([0, 0, 0, 2, 0, 0, 0, 0], 4 * MIB),
    objective=Objective.MEMORY,
    share=None,
)
@quick
def test_two_plans_never_replace_each_other(
    profile: StepProfile,
    bandwidth: Bandwidth,
    one: Any,
    other: Any,
    objective: Objective,
    share: float | None,
) -> None:
    """Nor one itself."""
    ways = (KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD, OFFLOAD_REMAT)
    count = len(profile.layers)
    first, second = (
        Plan(tuple(ways[numbers[layer % 8]] for layer in range(count)), window=window)
        for numbers, window in (one, other)
    )
    budget = None if share is None else int(share * peak_of_keep(profile))

    def is_(new: Plan, old: Plan) -> bool:
        limits = Limits(budget, 32 * MIB)
        policy = (AUTO,) * (count - 1) + (OFFLOAD,)
        return is_better(
            profile, bandwidth, limits, new, old, policy=policy, objective=objective, worth=TUNING.worth_it
        )

    assert not is_(first, first)
    assert not (is_(first, second) and is_(second, first))


@pytest.mark.parametrize("sizes", [(), (0, 0)])
@pytest.mark.parametrize("window", [None, 32 * MIB])
def test_a_step_that_saves_nothing_has_a_plan(sizes: tuple[int, ...], window: int | None) -> None:
    profile = make_profile(4)
    kind = dataclasses.replace(profile.kinds[0], activations=tuple(Saved(n, 0.5, 0.5) for n in sizes))
    profile = dataclasses.replace(profile, kinds=(kind,))
    plan = make_plan(profile, FAST, Limits(None, window), policy=(AUTO,) * 4)
    assert plan.prediction is not None
    assert plan.prediction.written_bytes == 0


# Very many activations


@given(all_profiles, st.integers(1, 40))
@quick
def test_a_condensed_step_saves_the_same_bytes_in_the_same_time(profile: StepProfile, items: int) -> None:
    small = condensed(profile, [None] * len(profile.layers), items)
    assert [layer for group in small.members for layer in group] == list(range(len(profile.layers)))
    for group, kind in zip(small.members, small.profile.layers, strict=True):
        found, each = small.profile.kinds[kind], profile.kinds[0]
        assert found.nbytes == len(group) * each.nbytes
        assert found.rebuilt_bytes == len(group) * each.rebuilt_bytes
        assert found.small_bytes == len(group) * each.small_bytes
        assert found.recomputed_bytes == each.recomputed_bytes
        assert all(0 <= saved.at <= 1 and 0 <= saved.until <= 1 for saved in found.activations)
        assert all(saved.needed is None or 0 <= saved.needed <= 1 for saved in found.activations)
    shorter = with_few_micro_batches(profile)
    for placement in (KEEP, RECOMPUTE):
        few, all_ = (simulate(p, all_of(p, placement), FAST) for p in (small.profile, shorter))
        assert few.seconds == pytest.approx(all_.seconds)
        assert few.peak_bytes == all_.peak_bytes or placement is RECOMPUTE
    assert simulate(shorter, all_of(profile, KEEP), FAST).peak_bytes == peak_of_keep(profile)


@pytest.mark.parametrize(
    ("which", "rate", "share"), each_once([(False,), (False, True, False)], [1.5, 0.5], [0.2, 0.5])
)
def test_a_plan_of_a_condensed_step_is_nearly_as_good(
    which: tuple[bool, ...], rate: float, share: float
) -> None:
    profile = make_profile(16, sizes=(MIB,) * 20, micro_batches=4, warm_up=2)
    profile = rebuilding(profile, which, seconds=0.002 * any(which))
    bandwidth = Bandwidth(rate * 20 * MIB / 0.03, rate * 20 * MIB / 0.03)
    budget = int(share * peak_of_keep(profile))
    whole = outcome_of(profile, plan_for(profile, bandwidth, budget), bandwidth)
    found = outcome_of(profile, plan_for(profile, bandwidth, budget, tuning=CONDENSING), bandwidth)
    assert max(whole.peak_bytes, found.peak_bytes) <= budget
    assert found.seconds <= 1.05 * whole.seconds


@pytest.mark.parametrize("shape", of_which([(100, 50, 4), (5000, 1, 1), (100, 50, 50)], (5000, 1, 1)))
@pytest.mark.parametrize("which", of_which([[False], [False, True, False]], [False]))
def test_a_hundred_thousand_activations_are_planned_in_a_few_simulations(
    shape: tuple[int, int, int], which: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, micro_batches, warm_up = shape
    profile = make_profile(layers, sizes=(MIB,) * 20, micro_batches=micro_batches, warm_up=warm_up)
    profile = rebuilding(profile, which, seconds=0.002)
    budget = int(0.35 * peak_of_keep(profile))
    played: list[int] = []

    def counted(profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> Outcome:
        played.append(count_items(profile))
        return simulate(profile, plan, bandwidth)

    monkeypatch.setattr(trials, "simulate", counted)
    plan = plan_for(profile, Bandwidth(1e9, 1e9), budget)
    assert count_items(profile) == 100_000
    assert played.count(100_000) <= 4
    assert sum(played) < 700_000
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= budget


def test_a_policy_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="3 placements for a profile of 8 layers"):
        make_plan(make_profile(8), FAST, Limits(), policy=(AUTO,) * 3)
