"""The benchmark against TBA and TERAIO: the rivals keep to their own rules, the accounting adds up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from places import BENCHMARKS

from tba_offload.config.policy import Placement
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.model import Plan
from tba_offload.plan.simulate import simulate

sys.path.append(str(BENCHMARKS))  # behind all others: it has an io.py

import teraio
import teraio_rivals as rivals
from transformer_profile import LayerShape, Operation, llama_layer, megatron_layer, stage

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.plan.profile import StepProfile

MB = 10**6
FAST = Bandwidth(1e15, 1e15)


def random_layer(chance: random.Random) -> LayerShape:
    """Two blocks of operations that save a tensor or two each."""
    blocks = [
        tuple(
            Operation(chance.uniform(1, 9), tuple(chance.uniform(1, 9) for _ in range(chance.randint(1, 2))))
            for _ in range(chance.randint(1, 3))
        )
        for _ in range(2)
    ]
    return LayerShape(tuple(blocks), input_bytes=1.0)


def small_profile(*, seed: int = 0, layers: int = 4, micro_batches: int = 3, ahead: int = 2) -> StepProfile:
    return stage(
        [random_layer(random.Random(seed))] * layers,
        tokens=MB,
        rate=1e9,
        micro_batches=micro_batches,
        ahead=ahead,
    )


def rate_for_all(profile: StepProfile) -> float:
    """The rate at which all activations travel once, in one direction, during the step."""
    nbytes = sum(profile.kind_of(slot.layer).nbytes for slot in profile.slots if slot.backward)
    return nbytes / rivals.everything_kept(profile, FAST).seconds


# The accounting


def test_a_megatron_layer_saves_what_the_formula_says() -> None:
    # Korthikanti et al. 2022, without the scores of attention: 34 s b h, and s b h (10 + 24 / t).
    for parallel, expected in ((1, 34), (2, 22), (8, 13)):
        layer = megatron_layer(hidden=256, sequence=64, tensor_parallel=parallel)
        assert layer.saved_bytes == expected * 256


def test_a_decoder_layer_has_a_second_attention() -> None:
    plain = megatron_layer(hidden=256, sequence=64, tensor_parallel=2)
    cross = megatron_layer(hidden=256, sequence=64, tensor_parallel=2, cross=True)
    assert len(cross.scopes) == len(plain.scopes) + 1
    # Norm 2, input 2, dropout mask 1, and q, k, v and the result, 2 each, over two ranks.
    assert cross.saved_bytes - plain.saved_bytes == (5 + 8 / 2) * 256


def test_the_profile_of_a_layer_is_in_its_order() -> None:
    shape = llama_layer(hidden=64, ffn=224, heads=8, kv_heads=2, sequence=32, bytes_each=4)
    kind = shape.kind(tokens=10)
    assert kind.nbytes == 10 * shape.saved_bytes == 10 * 64 * 96
    assert [saved.at for saved in kind.activations] == sorted(saved.at for saved in kind.activations)
    untils = [saved.until for saved in kind.activations]
    assert untils == sorted(untils, reverse=True)
    assert kind.activations[0].at == 0.0
    assert untils[-1] == pytest.approx(0.0)
    assert untils[0] == 1.0
    assert shape.scopes[-1] == len(kind.activations)


def test_a_stage_holds_as_many_micro_batches_as_it_is_ahead() -> None:
    profile = small_profile(layers=5, micro_batches=4, ahead=2)
    outcome = rivals.everything_kept(profile, FAST)
    assert outcome.peak_bytes == 2 * 5 * profile.kinds[0].nbytes
    assert outcome.seconds == pytest.approx(4 * 5 * profile.timing(0, Placement.KEEP).whole)


@pytest.mark.parametrize("model", [*teraio.MODELS, teraio.LLAMA_70B], ids=lambda model: model.name)
def test_the_accounting_comes_near_to_the_published_peaks(model: teraio.Model) -> None:
    for setting in model.settings:
        assert model.accounted(setting) == pytest.approx(setting.memory, rel=0.1)
        others = (
            dataclasses.replace(model, micro_batch_tokens=int(model.micro_batch_tokens * factor))
            for factor in (0.5, 2)
        )
        for other in others:
            assert abs(other.accounted(setting) - setting.memory) > abs(
                model.accounted(setting) - setting.memory
            )


@pytest.mark.parametrize("model", teraio.MODELS, ids=lambda model: model.name)
def test_the_profile_of_a_model_has_the_published_peak(model: teraio.Model) -> None:
    setting = model.settings[0]
    needed = rivals.everything_kept(model.profile(setting), FAST).peak_bytes
    whole = needed + model.static_bytes + model.outputs(setting)
    assert 100 * whole / teraio.MEMORY_OF_M == pytest.approx(setting.memory, rel=1e-6)


# TBA


def test_the_scopes_of_a_step_are_its_blocks() -> None:
    shape = random_layer(random.Random(3))
    profile = stage([shape] * 3, tokens=MB, rate=1e9)
    scopes = rivals.scopes_of(profile, [shape.scopes])
    assert len(scopes) == 6
    assert sum(scope.nbytes for scope in scopes) == 3 * profile.kinds[0].nbytes
    assert sum(scope.seconds for scope in scopes) == pytest.approx(
        3 * profile.timing(0, Placement.KEEP).forward
    )
    assert rivals.kept_from(profile, scopes, 0) == (frozenset(range(shape.scopes[-1])),) * 3
    assert rivals.kept_from(profile, scopes, 3) == (
        frozenset(),
        frozenset(range(shape.scopes[0], shape.scopes[1])),
        frozenset(range(shape.scopes[1])),
    )


@pytest.mark.parametrize("seed", range(8))
def test_tba_cuts_where_the_rate_no_longer_does(seed: int) -> None:
    chance = random.Random(seed)
    scopes = [rivals.Scope(n, 0, 1, chance.randint(1, 100), chance.uniform(0.1, 2)) for n in range(9)]
    forward = sum(scope.seconds for scope in scopes)
    for rate in (0.1, 5.0, 20.0, 40.0, 80.0, 1e6):
        cut = rivals.tba_cut(scopes, rate)
        enough = []
        for number, scope in enumerate(scopes):
            moved = sum(each.nbytes for each in scopes[:number]) + 2 * scope.nbytes
            # All forwards, and the backwards of what lies behind.
            left = forward + 2 * sum(each.seconds for each in scopes[number:])
            enough.append(moved <= rate * left)
        assert all(enough[:cut])
        assert cut == len(scopes) - 1 or not enough[cut]
    assert rivals.tba_cut(scopes, 1e-9) == 0
    assert rivals.tba_cut(scopes, 1e9) == len(scopes) - 1


@pytest.mark.parametrize("seed", range(6))
def test_nothing_waits_for_what_tba_offloads(seed: int) -> None:
    # What it assumes: one micro-batch, a backward of twice the forward, reads that take nothing from writes.
    shape = random_layer(random.Random(seed))
    profile = stage([shape] * 8, tokens=MB, rate=1e9)
    scopes = rivals.scopes_of(profile, [shape.scopes])
    ideal = rivals.everything_kept(profile, FAST)
    for share in (0.2, 0.6, 1.0, 2.0, 5.0):
        rate = share * rate_for_all(profile)
        played = rivals.play_tba(profile, scopes, Bandwidth(rate, 1e15))
        assert played.outcome.stall_seconds <= 1e-3 * ideal.seconds
        assert played.outcome.peak_bytes <= ideal.peak_bytes
    assert played.outcome.peak_bytes < 0.8 * ideal.peak_bytes


def test_under_a_limit_tba_cuts_later_and_waits() -> None:
    shape = random_layer(random.Random(1))
    profile = stage([shape] * 8, tokens=MB, rate=1e9)
    scopes = rivals.scopes_of(profile, [shape.scopes])
    rate = rate_for_all(profile)
    drive = Bandwidth(rate, rate)
    free = rivals.play_tba(profile, scopes, drive)
    budget = 0.5 * free.outcome.peak_bytes
    fitted = rivals.fit_tba(profile, scopes, drive, budget)
    assert fitted is not None
    assert fitted.outcome.peak_bytes <= budget
    assert fitted.outcome.stall_seconds > free.outcome.stall_seconds
    assert rivals.fit_tba(profile, scopes, drive, 0.01 * budget) is None


def test_a_plan_is_played_with_the_fastest_ceiling_that_fits() -> None:
    profile = small_profile(layers=6)
    rate = 1.2 * rate_for_all(profile)
    drive, kept = Bandwidth(rate, rate), (frozenset[int](),) * 6
    budget = 0.6 * rivals.everything_kept(profile, drive).peak_bytes
    found = rivals.best_fitting(profile, kept, drive, budget)
    assert found is not None
    assert found.outcome.peak_bytes <= budget
    for window in rivals.windows(profile, budget):
        other = rivals.play(profile, kept, drive, window)
        if window <= (found.plan.window or 0):
            assert other.outcome.peak_bytes <= budget
    slowest = rivals.play(profile, kept, drive, rivals.windows(profile, 0)[0])
    assert found.outcome.seconds < slowest.outcome.seconds


def test_a_ceiling_with_which_the_peak_does_not_fit_is_out() -> None:
    profile = small_profile(layers=6)
    rate = 1.2 * rate_for_all(profile)
    peak = rivals.everything_kept(profile, FAST).peak_bytes
    (least, *_) = rivals.windows(profile, 0)
    with mock.patch.object(rivals, "windows", return_value=[least, peak]):
        found = rivals.best_fitting(profile, (frozenset[int](),) * 6, Bandwidth(rate, rate), 0.5 * peak)
    assert found is not None
    assert found.plan.window == least


# TERAIO


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_step_with_a_layer_for_each_execution_is_the_same_step(ahead: int) -> None:
    profile = small_profile(ahead=ahead)
    unrolled = rivals.one_layer_each(profile)
    assert len(unrolled.layers) == 3 * len(profile.layers)
    assert len({(slot.layer, slot.backward) for slot in unrolled.slots}) == len(unrolled.slots)
    rate = rate_for_all(profile)
    window = rivals.windows(profile, 0)[0]
    for placement, limit in ((Placement.KEEP, None), (Placement.OFFLOAD, window)):
        one, other = (
            simulate(each, Plan((placement,) * len(each.layers), window=limit), Bandwidth(rate, rate))
            for each in (profile, unrolled)
        )
        # Layers are numbered anew, nothing else.
        assert other.peak_slot is not None
        known_as = other.peak_slot._replace(layer=other.peak_slot.layer % len(profile.layers))
        assert one == dataclasses.replace(other, peak_slot=known_as)


@pytest.mark.parametrize("seed", range(4))
def test_the_timeline_needs_what_keeping_everything_needs(seed: int) -> None:
    unrolled = rivals.one_layer_each(small_profile(seed=seed))
    unrolled = dataclasses.replace(unrolled, rest_bytes=12345, tail=1.0)
    timeline = rivals.timeline_of(unrolled)
    ideal = rivals.everything_kept(unrolled, FAST)
    assert timeline.needed.max() == ideal.peak_bytes
    assert timeline.seconds.sum() == pytest.approx(ideal.seconds)
    assert (timeline.seconds > 0).all()
    assert timeline.needed[-1] == 12345
    # What a layer has kept goes when its backward ends, not before.
    assert timeline.needed[-2] == 12345 + unrolled.kinds[0].nbytes


def greedy_for(seed: int, share: float, capacity: float) -> rivals.Greedy:
    unrolled = rivals.one_layer_each(small_profile(seed=seed))
    rate = share * rate_for_all(unrolled)
    peak = rivals.everything_kept(unrolled, FAST).peak_bytes
    return rivals.Greedy(rivals.timeline_of(unrolled), Bandwidth(rate, rate), capacity * peak)


def test_only_time_in_which_memory_lacks_counts() -> None:
    periods = [rivals.Inactive(0, 0, 8, 0, 6), rivals.Inactive(1, 0, 8, 3, 6)]
    timeline = rivals.Timeline(
        np.array([1.0, 1.0, 2.0, 4.0, 8.0, 1.0]), np.array([9.0, 30.0, 9.0, 30.0, 30.0, 9.0]), periods
    )
    greedy = rivals.Greedy(timeline, Bandwidth(8.0, 8.0), capacity=10.0)
    assert greedy.gone(periods[0]) == (1, 5)  # written in the first cell, read in the last
    assert greedy.ratio(periods[0]) == (1 + 4 + 8) / (1 / 8 + 1 / 8)
    assert greedy.gone(periods[1]) == (4, 5)
    assert greedy.ratio(periods[1]) == 8 / (1 / 8 + 1 / 8)
    greedy.choose(periods[0])
    assert greedy.needed.tolist() == [9, 22, 1, 22, 22, 9]
    # The last cell has nothing left for reads.
    assert greedy.gone(periods[1]) == (4, 4)
    assert greedy.ratio(periods[1]) == 0


CASES = list(itertools.product(range(3), (0.3, 1.0, 3.0), (0.3, 0.6, 0.9)))


@pytest.mark.parametrize(("seed", "share", "capacity"), CASES)
def test_the_books_never_give_away_more_than_there_is(seed: int, share: float, capacity: float) -> None:
    greedy = greedy_for(seed, share, capacity)
    whole = greedy.writes.copy()
    chosen = greedy.run()
    assert chosen
    for left in (greedy.writes, greedy.reads):
        assert (left >= -1e-6 * whole).all()
        assert (left <= whole).all()
        assert (whole - left).sum() == pytest.approx(sum(period.nbytes for period in chosen))
    assert len({(period.layer, period.number) for period in chosen}) == len(chosen)


@pytest.mark.parametrize(("seed", "share", "capacity"), CASES)
def test_memory_falls_only_where_something_is_away(seed: int, share: float, capacity: float) -> None:
    greedy = greedy_for(seed, share, capacity)
    away = np.zeros_like(greedy.needed)
    choose = greedy.choose

    def watched(period: rivals.Inactive) -> None:
        out, back = greedy.gone(period)
        assert period.start < out < back < period.end + 1
        away[out:back] += period.nbytes
        choose(period)

    with mock.patch.object(greedy, "choose", watched):
        greedy.run()
    assert greedy.needed == pytest.approx(greedy.timeline.needed - away)
    assert (greedy.needed >= 0).all()
    assert greedy.fits == (greedy.needed.max() <= greedy.capacity)


@pytest.mark.parametrize(("seed", "share", "capacity"), CASES)
def test_the_best_is_chosen_every_time(seed: int, share: float, capacity: float) -> None:
    """Ratios are not all computed again in every round; the outcome is as if they were."""
    greedy, naive = greedy_for(seed, share, capacity), greedy_for(seed, share, capacity)
    left = dict(enumerate(naive.timeline.periods))
    while not naive.fits and left:
        number = min(left, key=lambda n: (-naive.ratio(left[n]), -left[n].nbytes, n))
        if naive.ratio(left[number]) <= 0:
            break
        naive.choose(left.pop(number))
    assert greedy.run() == naive.chosen


def test_nothing_is_offloaded_that_needs_no_room() -> None:
    assert greedy_for(0, 1.0, 1.0).run() == []


def test_where_the_books_close_a_fast_drive_makes_nobody_wait() -> None:
    unrolled = rivals.one_layer_each(small_profile(layers=6))
    ideal = rivals.everything_kept(unrolled, FAST)
    played, closed = rivals.play_teraio(unrolled, FAST, 0.5 * ideal.peak_bytes)
    assert closed
    assert played is not None
    assert played.outcome.peak_bytes <= 0.5 * ideal.peak_bytes
    assert played.outcome.seconds == pytest.approx(ideal.seconds)


def test_where_they_do_not_more_travels_and_compute_waits() -> None:
    unrolled = rivals.one_layer_each(small_profile(layers=6))
    ideal = rivals.everything_kept(unrolled, FAST)
    rate = 0.4 * rate_for_all(unrolled)
    played, closed = rivals.play_teraio(unrolled, Bandwidth(rate, rate), 0.4 * ideal.peak_bytes)
    assert not closed
    assert played is not None
    assert played.outcome.peak_bytes <= 0.4 * ideal.peak_bytes
    assert played.outcome.stall_seconds > 0
    assert rivals.play_teraio(unrolled, Bandwidth(rate, rate), 1.0)[0] is None


# The program


@pytest.mark.full
def test_the_tables_come_out(tmp_path: Path) -> None:
    models = tuple(
        dataclasses.replace(
            model, settings=(dataclasses.replace(model.settings[0], batch=4 * tokens // sequence),)
        )
        for model in teraio.MODELS
        for tokens, sequence in [(model.micro_batch_tokens, model.settings[0].sequence)]
    )
    with mock.patch.object(teraio, "MODELS", models), mock.patch.object(rivals, "TRIALS", 2):
        result = CliRunner().invoke(
            teraio.main, ["--rate", "48", "--json", str(tmp_path / "rows.json")], catch_exceptions=False
        )
    assert result.exit_code == 0
    document = json.loads((tmp_path / "rows.json").read_text())
    assert len(document["checks"]) == 9
    assert [(row["ssd_rate"] / 1e9, row["optimizer_away"]) for row in document["rows"]] == [
        *[(16, False)] * 2,
        *[(16, True)] * 2,
        *[(48, False)] * 2,
    ]
    for row in document["rows"]:
        assert 0 < row["teraio"] <= 1 + 1e-9
        assert 0 < row["ours"] <= 1 + 1e-9
        rival = max(row["teraio"], row["tba_fitting"])
        assert row["tba_peak_bytes"] > 0
        assert row["ahead"] == pytest.approx(row["ours"] - rival)
        assert row["ours_plan"]["prediction"]["peak_bytes"] <= row["budget_bytes"] < row["needed_bytes"]
