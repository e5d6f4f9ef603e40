"""Profiles, the simulator and the planner: pure functions, so their properties hold for any step."""

from __future__ import annotations

import dataclasses
import json
import math
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
    hosts,
    make_profile,
    profiles,
    rebuilding,
    rebuilding_profiles,
    shares,
    small_capacities,
    small_hosts,
    windows,
)

from tba_offload.config.policy import Objective, Placement
from tba_offload.plan import trials
from tba_offload.plan.bandwidth import Bandwidth, HostTier, MeasuredRate
from tba_offload.plan.condense import condensed, count_items, with_few_micro_batches
from tba_offload.plan.describe import explain
from tba_offload.plan.model import Limits, Plan
from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing
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


@given(profiles)
@quick
def test_a_run_log_of_the_time_before_offload_remat_can_be_read(profile: StepProfile) -> None:
    document = json.loads(json.dumps(profile.as_json()))
    for kind in document["kinds"]:
        kind["activations"] = [saved[:3] for saved in kind["activations"]]
    assert StepProfile.from_json(document) == profile


@pytest.mark.parametrize(
    "broken", [{}, {"kinds": 3}, *({"kinds": [{"activations": [[1] * n]}]} for n in (1, 2, 4, 6))]
)
def test_what_is_no_profile_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a step profile"):
        StepProfile.from_json(broken)


def test_times_that_were_not_measured_are_estimated() -> None:
    profile = make_profile()
    assert profile.timing(0, OFFLOAD) == profile.timing(0, KEEP) == (0.03, 0.06)
    assert profile.timing(0, RECOMPUTE) == (0.03, 0.09)
    only = dataclasses.replace(profile, timings=({RECOMPUTE: Timing(0.03, 0.09)},))
    assert only.timing(0, KEEP) == pytest.approx((0.03, 0.06))
    measured = {KEEP: Timing(0.03, 0.06), OFFLOAD: Timing(0.02, 0.07)}
    noisy = dataclasses.replace(make_profile(), timings=(measured,))
    assert noisy.timing(0, KEEP) == (0.02, 0.06)
    hooks = TUNING.hook_seconds * len(
        noisy.kinds[0].activations
    )  # or equal times would look like memory for nothing
    assert noisy.timing(0, OFFLOAD) == (0.02 + hooks, 0.07)
    measured = {KEEP: Timing(0.03, 0.06), RECOMPUTE: Timing(0.03, 0.07)}
    odd = dataclasses.replace(make_profile(), timings=(measured,))
    assert odd.timing(0, RECOMPUTE) == (0.03, 0.09)  # a second forward is not that cheap
    measured[RECOMPUTE] = Timing(0.03, 0.08)
    assert odd.timing(0, RECOMPUTE) == (0.03, 0.08)


def test_rebuilding_takes_its_share_of_a_forward_until_it_was_measured() -> None:
    profile = rebuilding(make_profile())
    assert profile.kinds[0].rebuilt_bytes == 4 * MIB
    assert profile.timing(0, OFFLOAD_REMAT) == pytest.approx((0.03, 0.06 + 0.03 / 3))
    assert rebuilding(make_profile(), seconds=0.002).timing(0, OFFLOAD_REMAT) == (0.03, 0.062)
    assert make_profile().timing(0, OFFLOAD_REMAT) == (0.03, 0.06)


def test_a_layer_that_keeps_everything_is_never_slower_than_one_that_rebuilds() -> None:
    profile = make_profile()
    odd = dataclasses.replace(profile, timings=({**profile.timings[0], OFFLOAD_REMAT: Timing(0.02, 0.07)},))
    assert odd.timing(0, OFFLOAD_REMAT) == (0.03, 0.07)
    only = dataclasses.replace(profile, timings=({OFFLOAD_REMAT: Timing(0.02, 0.07)},))
    assert {only.timing(0, placement) for placement in (KEEP, OFFLOAD, OFFLOAD_REMAT)} == {(0.02, 0.07)}


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


@pytest.mark.parametrize(("write", "read", "latency"), [(0, 1, 0), (1, -1, 0), (1, 1, -1)])
def test_rates_are_positive(write: float, read: float, latency: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Bandwidth(write, read, latency)


def test_a_capacity_is_not_negative() -> None:
    with pytest.raises(ValueError, match="capacity not negative"):
        Bandwidth(1, 1, capacity=-1)


# The simulator


def test_what_stays_of_a_layer_spares_its_share_of_what_offloading_takes() -> None:
    timings = {KEEP: Timing(0.03, 0.06), OFFLOAD: Timing(0.04, 0.08)}
    profile = dataclasses.replace(make_profile(2), timings=(timings,))

    def seconds(placements: tuple[Placement, ...]) -> float:
        return simulate(profile, Plan(placements), FAST).seconds

    some = seconds((Placement("offload-50%"), OFFLOAD))
    assert seconds((KEEP, OFFLOAD)) < some < seconds((OFFLOAD, OFFLOAD))


@pytest.mark.parametrize(("placement", "backward"), [(KEEP, False), (RECOMPUTE, True)])
def test_the_simulator_tells_what_runs_at_the_peak(placement: Placement, *, backward: bool) -> None:
    profile = make_profile(4)
    slot = simulate(profile, all_of(profile, placement), FAST).peak_slot
    assert slot is not None
    assert slot[:3] == (3, 0, backward)


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


def test_what_is_read_ahead_leaves_room_for_the_forward_that_comes_before_it() -> None:
    """Otherwise that forward would wait for every byte that it saves, although the drive has time."""
    profile = make_profile(8, micro_batches=8, warm_up=3)
    needed = 12 * MIB / 0.03
    outcome = simulate(profile, all_of(profile, OFFLOAD, 32 * MIB), Bandwidth(1.5 * needed, 1.5 * needed))
    assert outcome.stall_seconds < 0.01 * outcome.seconds


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


@given(profiles, drives, windows)
@quick
def test_a_layer_of_which_nothing_is_rebuilt_runs_as_if_offloaded(
    profile: StepProfile, bandwidth: Bandwidth, window: int | None
) -> None:
    offloaded = simulate(profile, all_of(profile, OFFLOAD, window), bandwidth)
    for known in (profile, rebuilding(profile, [False])):
        assert simulate(known, all_of(profile, OFFLOAD_REMAT, window), bandwidth) == offloaded


@given(rebuilding_profiles, drives, windows)
@quick
def test_what_is_rebuilt_need_not_be_in_memory_between_forward_and_backward(
    profile: StepProfile, bandwidth: Bandwidth, window: int | None
) -> None:
    """With all the drive's time in between, only what backward holds counts."""
    slots = tuple(
        slot._replace(gap=1e6 if slot.backward and place and not profile.slots[place - 1].backward else 0.0)
        for place, slot in enumerate(profile.slots)
    )
    profile = dataclasses.replace(profile, slots=slots)
    remat, offloaded = (
        simulate(profile, all_of(profile, placement, window), bandwidth)
        for placement in (OFFLOAD_REMAT, OFFLOAD)
    )
    # A window that happens to hold all of one kind back has less of the other to hold back.
    assert remat.written_bytes <= offloaded.written_bytes or offloaded.forwarded_bytes
    # Nor is as much of the one in flight as of the other: activations differ in size.
    uneven = max(saved.nbytes for saved in profile.kinds[0].activations) if offloaded.forwarded_bytes else 0
    assert remat.peak_bytes <= offloaded.peak_bytes + profile.kinds[0].nbytes + uneven


@pytest.mark.parametrize(("size", "peak"), [(4, 2 + 16), (20, 2 + 8 + 20)])
def test_what_is_rebuilt_goes_after_its_use_and_what_it_is_made_of_after_its_own(
    size: int, peak: int
) -> None:
    """MiB: a source of 2, what is rebuilt from it, 8 and 16 that are used before the source is."""
    sizes = [(2, 0.9, False, 0.2), (size, 0.2, True, None), (8, 0.5, False, None), (16, 0.7, False, None)]
    saved = tuple(
        Saved(nbytes * MIB, 0.5, until, rebuilt, needed) for nbytes, until, rebuilt, needed in sizes
    )
    kind = LayerKind(saved, small_bytes=1000, input_bytes=0)
    slots = (Slot(0, 0, False, 0.0), Slot(0, 0, True, 1.0))
    profile = StepProfile((kind,), (0,), ({KEEP: Timing(0.03, 0.06)},), slots)
    outcome = simulate(profile, all_of(profile, OFFLOAD_REMAT, 8 * MIB), FAST)
    assert outcome.peak_bytes == peak * MIB + 1000


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


def test_a_step_may_have_the_most_gradients_of_two() -> None:
    """But not of one whose layers ran in another order, nor where nothing is known of them."""

    def step_with(gradients: Sequence[int], layers: int = 2) -> StepProfile:
        profile = make_profile(layers)
        pairs = zip(profile.slots, gradients, strict=True)
        return dataclasses.replace(profile, slots=tuple(s._replace(gradients=g) for s, g in pairs))

    early, late = step_with((0, 0, 5, 5)), step_with((0, 1, 1, 5))
    assert late.with_gradients_of(early) == step_with((0, 1, 5, 5))
    assert late.with_gradients_of(step_with((9,) * 6, 3)) == late
    assert step_with((0,) * 4).with_gradients_of(early) == step_with((0,) * 4)


def test_layers_that_are_taken_together_have_the_gradients_of_the_last() -> None:
    profile = make_profile(6)
    slots = [slot._replace(gradients=place * MIB) for place, slot in enumerate(profile.slots)]
    profile = dataclasses.replace(profile, slots=tuple(slots))
    small = condensed(profile, [0] * 6, 3).profile
    assert [slot.gradients // MIB for slot in small.slots] == [1, 3, 5, 7, 9, 11]


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


def test_host_memory_is_taken_to_be_faster_until_it_is_measured() -> None:
    bandwidth = Bandwidth(1e9, 2e9, 1e-4)
    assert bandwidth.with_host(MIB).host == HostTier(TUNING.host_speed * 1e9, TUNING.host_speed * 2e9, MIB)
    assert bandwidth.with_host(MIB, write=5e9).host == HostTier(5e9, TUNING.host_speed * 2e9, MIB)
    assert bandwidth.with_host(MIB).with_host(None) == bandwidth
    assert bandwidth.with_host(MIB).scaled(2) == dataclasses.replace(
        bandwidth.scaled(2), host=bandwidth.with_host(MIB).host
    )


@pytest.mark.parametrize("host", [None, HostTier(3e9, 4e9, MIB)])
def test_rates_survive_their_way_through_a_run_log(host: HostTier | None) -> None:
    bandwidth = Bandwidth(1e9, 2e9, 1e-4, host)
    assert Bandwidth.from_json(json.loads(json.dumps(dataclasses.asdict(bandwidth)))) == bandwidth
    assert Bandwidth.from_json({"write": 1e9, "read": 2e9, "latency": 1e-4}) == Bandwidth(1e9, 2e9, 1e-4)


@pytest.mark.parametrize(("write", "read", "capacity"), [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_rates_of_host_memory_are_positive(write: float, read: float, capacity: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        HostTier(write, read, capacity)


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


@given(profiles, drives, hosts, windows)
@quick
def test_without_host_memory_everything_is_as_it_was(
    profile: StepProfile, bandwidth: Bandwidth, host: HostTier, window: int | None
) -> None:
    plan = all_of(profile, OFFLOAD, window)
    alone = simulate(profile, plan, bandwidth)
    empty = dataclasses.replace(host, capacity=0)
    assert simulate(profile, plan, dataclasses.replace(bandwidth, host=empty)) == alone
    with_host = simulate(profile, plan, dataclasses.replace(bandwidth, host=host))
    if not with_host.host_written_bytes:
        assert with_host == alone


def test_a_drive_that_keeps_up_needs_no_host_memory() -> None:
    profile = make_profile(16)
    plan = all_of(profile, OFFLOAD, 8 * MIB)
    assert simulate(profile, plan, FAST.with_host(1 << 30)) == simulate(profile, plan, FAST)


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


def test_host_memory_is_free_again_when_its_bytes_were_used() -> None:
    """So each micro-batch finds it as the first one did."""
    one = make_profile(8, gap=0.0)
    slots = tuple(slot._replace(micro_batch=number) for number in range(6) for slot in one.slots)
    many = dataclasses.replace(one, slots=slots)
    bandwidth = Bandwidth(8 * 12 * MIB / (8 * 0.03) / 4, 100e9).with_host(1 << 30, write=100e9, read=100e9)
    first, all_six = (
        simulate(profile, all_of(profile, OFFLOAD, 16 * MIB), bandwidth) for profile in (one, many)
    )
    assert all_six.host_written_bytes == pytest.approx(6 * first.host_written_bytes, rel=0.2)
    assert 8 * MIB < all_six.host_peak_bytes <= first.host_peak_bytes + 16 * MIB


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


@pytest.mark.parametrize("window", [None, 8 * MIB])
def test_layers_that_no_drive_takes_peak_as_if_kept(window: int | None) -> None:
    profile = make_profile(16)
    full = dataclasses.replace(FAST, capacity=0)
    outcome = simulate(profile, all_of(profile, OFFLOAD, window), full)
    assert outcome.peak_bytes == simulate(profile, all_of(profile, KEEP), FAST).peak_bytes
    assert outcome.fallback_bytes + outcome.forwarded_bytes == 16 * profile.kinds[0].nbytes
    assert outcome.written_bytes == outcome.read_bytes == outcome.stall_seconds == 0


def test_room_on_a_drive_is_free_again_when_its_bytes_were_used() -> None:
    one = make_profile(8)
    slots = tuple(slot._replace(micro_batch=number) for number in range(6) for slot in one.slots)
    many = dataclasses.replace(one, slots=slots)
    enough = dataclasses.replace(FAST, capacity=8 * one.kinds[0].nbytes)
    outcome = simulate(many, all_of(many, OFFLOAD, 8 * MIB), enough)
    assert outcome.fallback_bytes == 0
    assert outcome.written_bytes > 4 * 8 * one.kinds[0].nbytes


def test_host_memory_takes_what_drives_have_no_room_for() -> None:
    profile = make_profile(16)
    full = dataclasses.replace(FAST, capacity=0).with_host(1 << 30)
    outcome = simulate(profile, all_of(profile, OFFLOAD, 8 * MIB), full)
    assert outcome.fallback_bytes == 0
    assert outcome.host_written_bytes > 0


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


def test_a_plan_with_host_memory_recomputes_less() -> None:
    profile = make_profile(16)
    budget = int(0.35 * peak_of_keep(profile))
    slow = Bandwidth(2e8, 2e8)
    capacities = (None, 64 * MIB, 1 << 30)
    found = [
        plan_for(profile, slow.with_host(capacity, write=10e9, read=10e9), budget) for capacity in capacities
    ]
    recomputed = [plan.placements.count(RECOMPUTE) for plan in found]
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] > recomputed[-1]
    seconds = [plan.prediction.seconds for plan in found if plan.prediction is not None]
    assert seconds == sorted(seconds, reverse=True)


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


def test_without_a_budget_nothing_travels_where_that_takes_twice_the_time() -> None:
    """Although nothing would wait."""
    profile = with_cost(make_profile(12), 1.0)
    assert outcome_of(profile, all_of(profile, OFFLOAD, 8 * MIB), FAST).stall_seconds < 0.001
    assert plan_for(profile, FAST, None).placements == (KEEP,) * 12


def test_without_a_budget_as_many_layers_travel_as_the_step_has_time_for() -> None:
    profile = with_cost(make_profile(12), 0.04)
    plan = plan_for(profile, FAST, None)
    assert 4 <= plan.placements.count(OFFLOAD) <= 6
    assert outcome_of(profile, plan, FAST).peak_bytes < 0.7 * peak_of_keep(profile)


def test_where_keep_was_never_measured_only_waits_count() -> None:
    profile = make_profile(12)
    known = with_cost(profile, 1.0)
    unknown = dataclasses.replace(known, timings=({OFFLOAD: known.timings[0][OFFLOAD]},))
    assert profile.is_measured(KEEP)
    assert known.is_measured(KEEP)
    assert not unknown.is_measured(KEEP)
    assert plan_for(unknown, FAST, None).placements == (OFFLOAD,) * 12


def test_where_a_budget_has_room_for_everything_nothing_travels() -> None:
    """Also before a layer was seen to keep, when it seems to take no less time."""
    profile = make_profile(12)
    unknown = dataclasses.replace(profile, timings=({OFFLOAD: profile.timings[0][KEEP]},))
    assert outcome_of(unknown, all_of(unknown, OFFLOAD), FAST).stall_seconds == 0
    assert plan_for(unknown, FAST, 2 * peak_of_keep(unknown)).placements == (KEEP,) * 12


def test_layers_that_the_user_offloads_do_not_count_as_slower_than_keep() -> None:
    """Their time is that of keep, too: nothing else can be done with them."""
    profile, slow = with_cost(make_profile(12), 0.5), Bandwidth(1e8, 1e8)
    policy = (OFFLOAD,) * 2 + (AUTO,) * 10
    plan = make_plan(profile, slow, Limits(None, 32 * MIB), policy=policy)
    assert plan.placements == (OFFLOAD,) * 2 + (KEEP,) * 10


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


def test_a_plan_that_only_the_smallest_window_lets_fit_is_found() -> None:
    """The peak of a slow drive does not fall with the window until that is small."""
    timings = ({KEEP: Timing(0.03, 0.06), OFFLOAD: Timing(0.03, 0.06)},)
    profile = dataclasses.replace(make_profile(3, sizes=(16 * MIB,) * 2), timings=timings)
    slow, every = Bandwidth(3e8, 3e8), frozenset(range(3))
    for budget in range(84, 96, 2):
        limits = Limits(budget * MIB)
        plan = make_plan(profile, slow, limits, policy=(AUTO, AUTO, KEEP), not_recomputed=every)
        assert outcome_of(profile, plan, slow).peak_bytes <= limits.planned


@given(all_profiles, drives, st.lists(shares, min_size=2, max_size=4))
@quick
def test_more_memory_is_never_worse_if_the_plan_for_less_is_known(
    profile: StepProfile, bandwidth: Bandwidth, some: list[float]
) -> None:
    peak, known, before = peak_of_keep(profile), [], None
    for budget in sorted(int(share * peak) for share in some):
        known = [plan_for(profile, bandwidth, budget, known=known)]
        found = outcome_of(profile, known[0], bandwidth)
        score = max(found.peak_bytes - Limits(budget).planned, 0.0), round(found.seconds, 9)
        assert before is None or score <= before
        before = score


@given(all_profiles, drives, shares, st.floats(1.0, 8.0))
@quick
def test_a_faster_drive_is_never_worse_if_the_plan_for_the_slower_is_known(
    profile: StepProfile, bandwidth: Bandwidth, share: float, factor: float
) -> None:
    budget = int(share * peak_of_keep(profile))
    slow, fast = bandwidth, bandwidth.scaled(factor)
    known = plan_for(profile, slow, budget)
    found = outcome_of(profile, plan_for(profile, fast, budget, known=[known]), fast)
    same = outcome_of(profile, known, fast)
    if same.peak_bytes <= Limits(budget).planned:
        assert found.peak_bytes <= budget
        assert found.seconds <= same.seconds + 1e-9


@given(profiles, drives)
@quick
def test_a_plan_without_waits_stays_so_on_a_drive_that_is_a_little_slower(
    profile: StepProfile, bandwidth: Bandwidth
) -> None:
    plan = plan_for(profile, bandwidth, None)
    found = outcome_of(profile, plan, bandwidth.scaled(TUNING.slack))
    assert found.stall_seconds <= TUNING.no_stall * found.seconds + 1e-9


@given(profiles, drives, shares)
@quick
def test_nothing_is_rebuilt_of_which_nobody_knows_that_it_would_be(
    profile: StepProfile, bandwidth: Bandwidth, share: float
) -> None:
    budget = int(share * peak_of_keep(profile))
    for known in (profile, rebuilding(profile, [False])):
        assert OFFLOAD_REMAT not in plan_for(known, bandwidth, budget).placements


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


def test_layers_are_recomputed_beside_others_that_are_rebuilt_in_part() -> None:
    unknown = make_profile(32, sizes=(MIB,) * 12)
    profile = rebuilding(unknown, seconds=0.001)
    bandwidth = Bandwidth(0.3 * 12 * MIB / 0.03, 0.3 * 12 * MIB / 0.03)
    budget = int(0.15 * peak_of_keep(profile))
    plan, before = (plan_for(each, bandwidth, budget) for each in (profile, unknown))
    assert {OFFLOAD_REMAT, RECOMPUTE} <= set(plan.placements)
    assert (
        outcome_of(profile, plan, bandwidth).seconds < 0.97 * outcome_of(unknown, before, bandwidth).seconds
    )


def test_of_a_kind_that_never_ran_so_nothing_is_rebuilt() -> None:
    """Although it is known of another kind."""
    profile = rebuilding(make_profile(8), seconds=0.0)
    kinds = (*profile.kinds, make_profile(8).kinds[0])
    layers = tuple(layer % 2 for layer in range(8))
    mixed = dataclasses.replace(profile, kinds=kinds, layers=layers, timings=profile.timings * 2)
    bandwidth = Bandwidth(0.6 * 12 * MIB / 0.03, 0.6 * 12 * MIB / 0.03)
    budget, held = int(0.25 * peak_of_keep(profile)), frozenset(range(8))
    plan = plan_for(mixed, bandwidth, budget, not_recomputed=held)
    found = {kind: {plan.placements[layer] for layer in range(kind, 8, 2)} for kind in range(2)}
    assert OFFLOAD_REMAT in found[0]
    assert OFFLOAD_REMAT not in found[1]


@pytest.mark.parametrize(("layers", "travel"), [(3, 0), (15, 6)])
def test_without_a_budget_nothing_travels_if_that_frees_next_to_nothing(layers: int, travel: int) -> None:
    """The drive can take so many layers of 24; what is in flight of them is not freed."""
    rate = layers * 12 * MIB / (24 * 0.03) / TUNING.slack
    profile = make_profile(24)
    plan = plan_for(profile, Bandwidth(rate, rate), None)
    assert plan.placements.count(OFFLOAD) >= travel
    if not travel:
        assert plan.placements == (KEEP,) * 24
    else:
        found = outcome_of(profile, plan, Bandwidth(rate, rate))
        assert found.peak_bytes <= (1 - TUNING.least_freed) * peak_of_keep(profile)


@pytest.mark.parametrize("window", [None, 1 << 30, 64 * MIB])
def test_without_a_budget_a_step_that_fits_in_the_window_gets_a_smaller_one(window: int | None) -> None:
    """A window that is never full keeps everything in memory that is read back at once."""
    profile = make_profile(12)
    plan = make_plan(profile, FAST, Limits(None, window), policy=(AUTO,) * 12)
    assert plan.window is not None
    assert plan.window <= 16 * MIB
    assert outcome_of(profile, plan, FAST).peak_bytes <= 0.15 * peak_of_keep(profile)


FORWARD, BACKWARD = 0.03, 0.06


@pytest.mark.parametrize(
    ("objective", "slower", "offloaded", "better"),
    [
        (Objective.TIME, 0.01, 12, False),
        (Objective.TIME, 0.04, 12, True),
        (Objective.MEMORY, 0.04, 12, False),  # it frees much
        (Objective.MEMORY, 0.05, 12, True),  # but takes longer than it may
        (Objective.MEMORY, 0.04, 1, True),  # it does not
    ],
)
def test_the_plan_in_force_stays_unless_another_is_clearly_better(
    objective: Objective, slower: float, offloaded: int, *, better: bool
) -> None:
    """The other keeps everything; the one in force has steps longer by a share."""
    extra = slower * 12 / offloaded
    offload = Timing((1 + extra) * FORWARD, (1 + extra) * BACKWARD)
    profile = make_profile(12, forward=FORWARD, backward=BACKWARD)
    profile = dataclasses.replace(profile, timings=({**profile.timings[0], OFFLOAD: offload},))
    old = Plan((OFFLOAD,) * offloaded + (KEEP,) * (12 - offloaded), window=32 * MIB)
    new = all_of(profile, KEEP)
    policy, limits = (AUTO,) * 12, Limits(None, 32 * MIB)

    def is_(one: Plan, than: Plan) -> bool:
        return is_better(
            profile, FAST, limits, one, than, policy=policy, objective=objective, worth=TUNING.worth_it
        )

    assert is_(new, old) is better


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


@pytest.mark.parametrize(("share", "better"), [(0.03, False), (0.05, True)])
def test_where_memory_is_wanted_a_lower_peak_is_better_if_it_is_clearly_lower(
    share: float, *, better: bool
) -> None:
    profile = make_profile(12, sizes=(MIB // 8,) * 96)
    old = all_of(profile, OFFLOAD, 32 * MIB)
    peak = outcome_of(profile, old, FAST).peak_bytes
    new = all_of(profile, OFFLOAD, int(32 * MIB - share * peak))
    assert outcome_of(profile, new, FAST).peak_bytes == pytest.approx((1 - share) * peak, rel=0.008)
    assert (
        is_better(
            profile,
            FAST,
            Limits(None, 32 * MIB),
            new,
            old,
            policy=(AUTO,) * 12,
            objective=Objective.MEMORY,
            worth=TUNING.worth_it,
        )
        is better
    )


def test_whether_a_plan_fits_the_budget_is_no_matter_of_shares() -> None:
    profile = make_profile(12, sizes=(MIB // 8,) * 96)
    fits, does_not = all_of(profile, OFFLOAD, 32 * MIB), all_of(profile, OFFLOAD, 33 * MIB)
    peak = outcome_of(profile, fits, FAST).peak_bytes
    assert peak < outcome_of(profile, does_not, FAST).peak_bytes < 1.05 * peak
    limits = Limits(math.ceil(peak / (1 - TUNING.margin)), None)
    for objective in Objective:
        policy: Any = {"policy": (AUTO,) * 12, "objective": objective, "worth": TUNING.worth_it}
        assert is_better(profile, FAST, limits, fits, does_not, **policy)
        assert not is_better(profile, FAST, limits, does_not, fits, **policy)


def test_layers_that_the_user_keeps_are_not_counted_as_what_could_be_freed() -> None:
    profile = make_profile(24)
    policy = (AUTO, AUTO) + (KEEP,) * 22
    plan = make_plan(profile, FAST, Limits(None, 32 * MIB), policy=policy)
    assert plan.placements[:2] == (OFFLOAD, OFFLOAD)


@pytest.mark.parametrize("sizes", [(), (0, 0)])
@pytest.mark.parametrize("window", [None, 32 * MIB])
def test_a_step_that_saves_nothing_has_a_plan(sizes: tuple[int, ...], window: int | None) -> None:
    profile = make_profile(4)
    kind = dataclasses.replace(profile.kinds[0], activations=tuple(Saved(n, 0.5, 0.5) for n in sizes))
    profile = dataclasses.replace(profile, kinds=(kind,))
    plan = make_plan(profile, FAST, Limits(None, window), policy=(AUTO,) * 4)
    assert plan.prediction is not None
    assert plan.prediction.written_bytes == 0


@pytest.mark.parametrize(("seconds", "peak"), [(0.001, 22), (0.003, 94), (0.02, 118)])
def test_without_a_budget_a_little_rebuilding_lets_more_travel(seconds: float, peak: int) -> None:
    """MiB, at 80 % of the rate that offloading everything needs; without any rebuilding it is 118."""
    profile = rebuilding(make_profile(24), seconds=seconds)
    rate = 0.8 * 12 * MIB / 0.03
    found = outcome_of(profile, plan_for(profile, Bandwidth(rate, rate), None), Bandwidth(rate, rate))
    assert 0.8 * peak * MIB <= found.peak_bytes <= peak * MIB
    assert found.rebuild_seconds == pytest.approx(found.seconds - found.stall_seconds - 24 * 0.09 - 0.03)
    assert found.rebuild_seconds + found.stall_seconds <= 0.01 * found.seconds


def test_a_plan_says_what_is_rebuilt_and_why() -> None:
    profile = rebuilding(make_profile(2), seconds=0.002)
    plan = all_of(profile, OFFLOAD_REMAT)
    said = [explain(profile, plan, Bandwidth(MIB, 2 * MIB), layer) for layer in range(2)]
    begins = "2.0 ms of compute spare the drive 6000.0 ms for 4.00 MiB; "
    assert said == [f"{begins}8.00 MiB travel"] * 2


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


@pytest.mark.parametrize("items", [60, 200, 500])
def test_a_condensed_step_rebuilds_the_same_bytes_at_the_same_time(items: int) -> None:
    profile = rebuilding(make_profile(24, sizes=(MIB,) * 20), seconds=0.002)
    small = condensed(profile, [None] * 24, items).profile
    assert count_items(small) <= max(items, 24 * 4)
    found, exact = (simulate(each, all_of(each, OFFLOAD_REMAT, 64 * MIB), FAST) for each in (small, profile))
    assert found.read_bytes + found.forwarded_bytes == exact.read_bytes + exact.forwarded_bytes
    assert found.seconds == pytest.approx(exact.seconds)

    def mean_wait(kind: LayerKind, layers: int) -> float:
        """How long, on average over bytes, what others are made from is needed before its own use."""
        waits = [saved.nbytes * (saved.until - saved.fetched) for saved in kind.activations]
        return layers * sum(waits) / kind.nbytes

    groups = [len(group) for group in condensed(profile, [None] * 24, items).members]
    for layer, size in enumerate(groups):
        assert mean_wait(small.kind_of(layer), size) == pytest.approx(mean_wait(profile.kinds[0], 1))


def test_of_a_step_whose_micro_batches_pile_up_late_those_are_planned_for() -> None:
    """First twenty one after the other, then four at once."""
    one = make_profile(10, sizes=(MIB,) * 20)
    slots = [slot._replace(micro_batch=number) for number in range(20) for slot in one.slots]
    for backward in (False, True):
        slots += [
            slot._replace(micro_batch=number)
            for number in range(20, 24)
            for slot in one.slots
            if slot.backward is backward
        ]
    profile = dataclasses.replace(one, slots=tuple(slots))
    assert {slot.micro_batch for slot in with_few_micro_batches(profile).slots} == set(range(18, 24))
    budget = peak_of_keep(profile) // 3
    for rate in (1e9, 5e8):
        bandwidth = Bandwidth(rate, rate)
        assert outcome_of(profile, plan_for(profile, bandwidth, budget), bandwidth).peak_bytes <= budget


def test_layers_that_are_not_alike_are_not_put_together() -> None:
    profile = make_profile(12)
    small = condensed(profile, [layer < 5 for layer in range(12)], 8)
    assert all(len({layer < 5 for layer in group}) == 1 for group in small.members)
    assert len(small.members) < 12
    chosen = tuple(KEEP if group[0] < 5 else OFFLOAD for group in small.members)
    assert small.expanded(chosen) == (KEEP,) * 5 + (OFFLOAD,) * 7


def test_layers_that_do_not_run_in_one_go_are_not_put_together() -> None:
    """Two model chunks whose layers are numbered in turn."""
    profile = make_profile(8)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    slots = [Slot(layer, 0, False, 0.0) for layer in order] + [
        Slot(layer, 0, True, 0.0) for layer in order[::-1]
    ]
    small = condensed(dataclasses.replace(profile, slots=tuple(slots)), [None] * 8, 8)
    assert small.members == tuple((layer,) for layer in range(8))


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


@pytest.mark.parametrize("rate", of_which([1.5, 0.7], 1.5))
def test_a_plan_of_a_condensed_step_frees_nearly_as_much(rate: float) -> None:
    profile = make_profile(24, sizes=(MIB,) * 20, micro_batches=4, warm_up=2)
    bandwidth = Bandwidth(rate * 20 * MIB / 0.03, rate * 20 * MIB / 0.03)
    limits = Limits(None, 1 << 30)
    whole = make_plan(profile, bandwidth, limits, policy=(AUTO,) * 24).prediction
    found = make_plan(profile, bandwidth, limits, policy=(AUTO,) * 24, tuning=CONDENSING).prediction
    assert whole is not None
    assert found is not None
    assert found.peak_bytes <= whole.peak_bytes + 0.1 * peak_of_keep(profile)
    assert max(found.peak_bytes, whole.peak_bytes) <= 0.9 * peak_of_keep(profile)
    assert found.stall_seconds <= 2 * TUNING.no_stall * found.seconds


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
