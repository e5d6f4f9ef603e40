"""A share of the bytes of a layer travels, the rest stays: which activations, and what it spares."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from harness import Drive, assert_all_given_back, config_for, session_for
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same_history, make_model, train
from profiles import KEEP, MIB, OFFLOAD, RECOMPUTE, make_profile

import tba_offload as tba
from tba_offload.capture.trace import Treatment
from tba_offload.cli import main
from tba_offload.config import read_config
from tba_offload.config.policy import Placement
from tba_offload.placements import names, register, unregister
from tba_offload.placements.share import Staying, staying
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.model import Limits, Plan
from tba_offload.plan.profile import LayerKind, Saved, StepProfile, Timing
from tba_offload.plan.search import make_plan
from tba_offload.plan.simulate import simulate
from tba_offload.report.log_reader import read_run_log
from tba_offload.what_if import composition

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.placements import Ways
    from tba_offload.placements.base import Result_co

HALF = Placement("offload-50%")
LAYERS = 4

sizes = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=40)
percentages = st.integers(1, 99)


# Which activations


@given(sizes, percentages)
def test_the_share_is_met_to_within_half_of_the_largest_activation(nbytes: list[int], percent: int) -> None:
    stays = sum(nbytes[number] for number in staying(nbytes, percent))
    assert abs(100 * stays - (100 - percent) * sum(nbytes)) <= 50 * max(nbytes)


@given(sizes, sizes, percentages)
def test_it_is_decided_without_a_look_at_what_comes(
    nbytes: list[int], others: list[int], percent: int
) -> None:
    """So what stays is met as well by each beginning of what a layer saves: it is spread evenly."""
    whole, begin = staying([*nbytes, *others], percent), staying(nbytes, percent)
    assert begin == {number for number in whole if number < len(nbytes)}


@given(sizes, percentages, st.data())
def test_what_counts_neither_way_changes_nothing(
    nbytes: list[int], percent: int, data: st.DataObject
) -> None:
    rule, expected, found = Staying(percent), staying(nbytes, percent), set()
    for number, size in enumerate(nbytes):
        if data.draw(st.booleans()):
            assert not rule.stays(0)
        if rule.stays(size):
            found.add(number)
    assert found == expected


def test_equal_activations_stay_in_turn() -> None:
    assert staying([MIB] * 8, 50) == {1, 3, 5, 7}
    assert staying([MIB] * 8, 75) == {2, 6}
    assert staying([MIB] * 8, 25) == {0, 2, 3, 4, 6, 7}
    assert staying([MIB], 50) == set()


# Names


def test_each_percentage_has_one_placement() -> None:
    for percent in range(1, 100):
        placement = Placement(f"offload-{percent}%")
        assert Placement(placement.value) is placement is pickle.loads(pickle.dumps(placement))
        assert placement.percent == percent
    assert HALF not in list(Placement)
    assert names()[-1] == "offload-N%"


@pytest.mark.parametrize(
    "word",
    ["offload-0%", "offload-100%", "offload-05%", "offload-%", "offload-5.5%", "offload-50", "offload-N%"],
)
def test_other_words_are_none(word: str) -> None:
    with pytest.raises(ValueError, match=r"is not one of keep, .*auto, offload-N%"):
        Placement(word)
    with pytest.raises(tba.ConfigError, match=r"offload-N%"):
        tba.OffloadConfig.from_yaml(f"default: {word}")


def test_policies_and_commands_know_it(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: offload-50%\nlayers: [{match: last 1, placement: offload-25%}]\n")
    config = read_config(policy)
    assert config.default is HALF
    assert tba.OffloadConfig.from_yaml(config.to_yaml()) == config
    done = CliRunner().invoke(main, ["check", str(policy), "--layers", "3"])
    assert done.exit_code == 0
    assert "offload-50%" in done.output
    assert "offload-25%" in done.output


# Training


@pytest.mark.parametrize("percent", [25, 50, 75])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_keeps_its_bits_and_the_share_travels(percent: int, micro_batches: int) -> None:
    expected = train(make_model(layers=LAYERS), micro_batches=micro_batches)
    model = make_model(layers=LAYERS)
    with session_for(model, default=Placement(f"offload-{percent}%")) as session:
        assert_same_history(train(model, session, micro_batches=micro_batches), expected)
        trace = session.capture.trace
        assert_all_given_back(session)
    scopes = [scope.key for scope in trace.scopes]
    assert len(scopes) == LAYERS * micro_batches
    for scope in scopes:
        saved = [activation for activation in trace.activations if activation.key.scope == scope]
        stays = {a.key.number for a in saved if a.treatment is Treatment.PLANNED_KEEP}
        assert stays == staying([activation.nbytes for activation in saved], percent)
        assert 0 < len(stays) < len(saved)


def test_the_less_travels_the_more_stays() -> None:
    settings = {"in_flight": 1 << 16, "on_slow": "wait"}
    kept, moved = [], []
    for word in ("offload", "offload-66%", "offload-33%"):
        model = make_model(layers=8)
        with session_for(model, drive=Drive(), default=Placement(word), **settings) as session:
            train(model, session, steps=2)
            record = session.report()[-1]
            kept.append(record.kept_bytes)
            moved.append(record.offloaded_bytes + record.forwarded_bytes)
    assert kept == sorted(set(kept))
    assert moved == sorted(set(moved), reverse=True)
    assert len({sum(both) for both in zip(kept, moved, strict=True)}) == 1


def test_a_planner_beside_it_predicts_what_it_does(tmp_path: Path) -> None:
    log, model = tmp_path / "run.jsonl", make_model(layers=LAYERS)
    policy = config_for(default=Placement.AUTO, rules=(tba.Rule("0-1", HALF),))
    with tba.attach(model, policy, run_log=log, measure_memory=False) as session:
        train(model, session, steps=6)
        ran = [activation.treatment for activation in session.capture.trace.activations if _of(activation, 0)]
    event = [event for event in read_run_log(log).others if event["event"] == "plan"][-1]
    assert event["policy"] == ["offload-50%", "offload-50%", "auto", "auto"]
    kind = StepProfile.from_json(event["profile"]).kind_of(0)
    planned = kind.staying(50)
    assert planned == {number for number, each in enumerate(ran) if each is Treatment.PLANNED_KEEP} != set()


def _of(activation: object, layer: int) -> bool:
    return activation.key.scope.layer == layer  # type: ignore[attr-defined]


# Plans


class HalfOfOddLayers(Placement):
    travels = True

    def take(self, ways: Ways[Result_co]) -> Result_co:
        return ways.offload(percent=50 if ways.layer % 2 else 100)


def test_a_placement_that_gives_shares_is_played_as_they_are() -> None:
    profile, drive = make_profile(LAYERS), Bandwidth(1e9, 1e9)
    mine = register(HalfOfOddLayers("half-of-odd-layers"))
    try:
        own = Plan((mine,) * LAYERS)
        mixed = Plan((OFFLOAD, HALF) * (LAYERS // 2))
        assert simulate(profile, own, drive) == simulate(profile, mixed, drive)
    finally:
        unregister(mine)


def test_tables_count_it() -> None:
    assert composition([HALF, OFFLOAD, HALF, KEEP]) == "1 keep, 1 offload, 2 offload-50%"


def test_half_of_each_layer_waits_less_than_half_of_the_layers() -> None:
    """Whole layers give a slow drive more than it writes in their time, and then nothing."""
    profile = make_profile(LAYERS, sizes=(MIB,) * 16, forward=0.1, backward=0.2)
    drive = Bandwidth(80 * MIB, 80 * MIB)  # half of what layers save in their time
    half, first = (
        simulate(profile, Plan(way, window=12 * MIB), drive)
        for way in ((HALF,) * LAYERS, (OFFLOAD, OFFLOAD, KEEP, KEEP))
    )
    assert half.peak_bytes < 1.05 * first.peak_bytes
    assert half.stall_seconds < 0.5 * first.stall_seconds
    assert half.seconds < 0.96 * first.seconds


@pytest.mark.parametrize("layers", [4, 16])
def test_the_planner_finds_the_share_that_the_drive_has_time_for(layers: int) -> None:
    profile = make_profile(layers, sizes=(MIB,) * 16, forward=0.1, backward=0.2)
    drive = Bandwidth(80 * MIB, 80 * MIB)  # half of what layers save in their time
    budget = int(0.6 * simulate(profile, Plan((KEEP,) * layers), drive).peak_bytes)
    plan = make_plan(profile, drive, Limits(budget), policy=(Placement.AUTO,) * layers)
    assert any(40 <= placement.percent <= 60 for placement in plan.placements)
    found = simulate(profile, plan, drive)
    assert found.peak_bytes <= budget
    whole = [
        simulate(profile, Plan((way,) * (layers - kept) + (KEEP,) * kept, window=window * MIB), drive)
        for way in (OFFLOAD, RECOMPUTE)
        for kept in range(layers)
        for window in (3, 12, 48)
    ]
    assert found.seconds < 0.95 * min(each.seconds for each in whole if each.peak_bytes <= budget)


def test_the_planner_gives_no_share_to_layers_with_nothing_to_divide() -> None:
    profile = make_profile(9, sizes=(MIB,) * 16, forward=0.05, backward=0.1)
    one = LayerKind((Saved(4 * MIB, 0.5, 0.5),), 1000, MIB)
    none = LayerKind((), 1000, MIB)
    timings = ({KEEP: Timing(0.02, 0.04)},) * 2
    profile = replace(
        profile,
        kinds=(*profile.kinds, one, none),
        layers=(0, 1, 2) * 3,
        timings=(*profile.timings, *timings),
    )
    shares = set()
    for rate, share in product((40, 80, 120), (0.3, 0.5, 0.7, None)):
        drive = Bandwidth(rate * MIB, rate * MIB)
        peak = simulate(profile, Plan((KEEP,) * 9), drive).peak_bytes
        limits = Limits(None if share is None else int(share * peak))
        plan = make_plan(profile, drive, limits, policy=(Placement.AUTO,) * 9)
        shares |= {(layer % 3, placement.percent < 100) for layer, placement in enumerate(plan.placements)}
    assert (0, True) in shares
    assert not shares & {(1, True), (2, True)}
