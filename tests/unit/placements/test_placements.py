"""Placements by name, and layers of which a share of the bytes is offloaded."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from harness import Drive, assert_all_given_back, session_for
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same_history, make_model, train
from profiles import KEEP, MIB, OFFLOAD, RECOMPUTE, make_profile

import tba_offload as tba
from tba_offload import Placement
from tba_offload.cli import main
from tba_offload.placements import Staying, staying
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.model import Limits, Plan
from tba_offload.plan.search import make_plan
from tba_offload.plan.simulate import simulate

if TYPE_CHECKING:
    from pathlib import Path

HALF = Placement("offload-50%")

sizes = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=40)


@given(sizes, sizes, st.integers(1, 99))
def test_the_share_is_met_by_each_beginning(nbytes: list[int], others: list[int], percent: int) -> None:
    stays = staying(nbytes, percent)
    away = (100 - percent) * sum(nbytes) - 100 * sum(nbytes[number] for number in stays)
    assert abs(away) <= 50 * max(nbytes)
    assert stays == {number for number in staying([*nbytes, *others], percent) if number < len(nbytes)}
    rule = Staying(percent)  # what has no size counts neither way
    assert stays == {n for n, size in enumerate(nbytes) if (rule.stays(0), rule.stays(size))[1]}


def test_equal_tensors_stay_in_turn() -> None:
    assert staying([MIB] * 8, 50) == {1, 3, 5, 7}
    assert staying([MIB] * 8, 75) == {2, 6}
    assert staying([MIB], 50) == set()


@pytest.mark.parametrize("placement", [*Placement, HALF, Placement("offload-7%")], ids=str)
def test_a_placement_is_its_name(placement: Placement) -> None:
    assert Placement(placement.value) is copy.deepcopy(placement) is placement
    assert pickle.loads(pickle.dumps(placement)) is placement
    assert f"{placement}" == placement.value == placement
    assert {placement: 1}[placement.value] == 1  # type: ignore[index]


def test_a_share_is_a_placement() -> None:
    assert [Placement(f"offload-{n}%").percent for n in range(1, 100)] == list(range(1, 100))
    assert HALF.is_offloaded
    assert HALF not in list(Placement)


@pytest.mark.parametrize(
    "word", ["offload-0%", "offload-100%", "offload-05%", "offload-5.5%", "offload-50", "offload-N%", "Keep"]
)
def test_other_words_are_errors_that_list_the_names(word: str) -> None:
    with pytest.raises(ValueError, match=r"is not one of keep, .*auto, offload-N%"):
        Placement(word)
    with pytest.raises(tba.ConfigError, match=r"offload-N%"):
        tba.OffloadConfig.from_yaml(f"default: {word}")


def test_policies_and_commands_know_shares(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: offload-50%\nlayers: [{match: last 1, placement: offload-25%}]\n")
    config = tba.load_config(policy)
    assert config.default is HALF
    assert tba.OffloadConfig.from_yaml(config.to_yaml()) == config
    done = CliRunner().invoke(main, ["check", str(policy), "--layers", "3"])
    assert done.exit_code == 0
    assert "offload-50%" in done.output
    assert "offload-25%" in done.output


@pytest.mark.parametrize("percent", [25, 75])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_keeps_its_bits(percent: int, micro_batches: int) -> None:
    expected = train(make_model(layers=4), micro_batches=micro_batches)
    model = make_model(layers=4)
    with session_for(model, default=Placement(f"offload-{percent}%")) as session:
        assert_same_history(train(model, session, micro_batches=micro_batches), expected)
        assert_all_given_back(session)


def test_the_smaller_the_share_the_more_stays() -> None:
    kept, moved = [], []
    for word in ("offload", "offload-66%", "offload-33%"):
        model, options = make_model(layers=8), {"in_flight": 1 << 16, "on_slow": "wait"}
        with session_for(model, drive=Drive(), default=Placement(word), **options) as session:
            train(model, session, steps=2)
            record = session.report()[-1]
        kept.append(record.kept_bytes)
        moved.append(record.offloaded_bytes + record.forwarded_bytes)
    assert kept == sorted(set(kept))
    assert len({sum(both) for both in zip(kept, moved, strict=True)}) == 1


def test_the_planner_finds_the_share_that_the_drive_has_time_for() -> None:
    profile = make_profile(4, sizes=(MIB,) * 16, forward=0.1, backward=0.2)
    drive = Bandwidth(80 * MIB, 80 * MIB)  # half of what layers save in their time
    budget = int(0.6 * simulate(profile, Plan((KEEP,) * 4), drive).peak_bytes)
    plan = make_plan(profile, drive, Limits(budget), policy=(Placement.AUTO,) * 4)
    assert any(40 <= placement.percent <= 60 for placement in plan.placements)
    found = simulate(profile, plan, drive)
    whole = (
        simulate(profile, Plan((way,) * (4 - kept) + (KEEP,) * kept, window=window * MIB), drive)
        for way in (OFFLOAD, RECOMPUTE)
        for kept in range(4)
        for window in (3, 12, 48)
    )
    fastest = min(each.seconds for each in whole if each.peak_bytes <= budget)
    assert found.peak_bytes <= budget
    assert found.seconds < 0.95 * fastest
