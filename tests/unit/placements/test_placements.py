"""A placement is an object with one method: adding one needs no other file."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from harness import assert_all_given_back, config_for, session_for
from models import assert_same_history, make_model, train

import tba_offload as tba
from tba_offload.cli import main
from tba_offload.config import read_config
from tba_offload.config.policy import Placement, Rule
from tba_offload.placements import register, unregister
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.describe import explain
from tba_offload.plan.model import Plan
from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing
from tba_offload.plan.simulate import simulate
from tba_offload.report.log_reader import read_run_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tba_offload.placements import Ways
    from tba_offload.placements.base import Result_co

LAYERS = 4


class Alternating(Placement):
    """Layers with an even number travel, the others are recomputed."""

    travels = True
    recomputes = True

    def take(self, ways: Ways[Result_co]) -> Result_co:
        return ways.recompute() if ways.layer % 2 else ways.offload()


@pytest.fixture
def alternating() -> Iterator[Placement]:
    placement = register(Alternating("alternating"))
    yield placement
    unregister(placement)


def profile() -> StepProfile:
    layers, size = range(LAYERS), 1 << 20
    forward = [Slot(layer, 0, False, 0.0) for layer in layers]
    backward = [Slot(layer, 0, True, 0.0) for layer in reversed(layers)]
    return StepProfile(
        kinds=(LayerKind((Saved(size, 0.5, 0.5), Saved(size, 0.9, 0.1)), 0, size // 4),),
        layers=(0,) * LAYERS,
        timings=({Placement.OFFLOAD: Timing(0.01, 0.02), Placement.KEEP: Timing(0.01, 0.02)},),
        slots=(*forward, *backward),
    )


def test_training_goes_the_way_that_a_placement_says(alternating: Placement) -> None:
    expected = train(make_model(layers=LAYERS))
    model = make_model(layers=LAYERS)
    with session_for(model, default=alternating) as session:
        assert_same_history(train(model, session), expected)
        record = session.report()[-1]
        ran = [scope.placement for scope in session.capture.trace.scopes]
        told = {step.recomputed_scopes for step in session.report()}
        seen = {activation.key.scope.layer for activation in session.capture.trace.activations}
        assert_all_given_back(session)
    assert seen == {0, 2}
    assert ran == ["offload", "recompute"] * 2  # as each layer ran
    assert told == {2}
    assert record.offloaded_bytes or record.forwarded_bytes


class OddLayers(Placement):
    """Layers with an odd number travel, the others stay."""

    travels = True

    def take(self, ways: Ways[Result_co]) -> Result_co:
        return ways.offload() if ways.layer % 2 else ways.keep()


def test_a_layer_that_it_keeps_is_not_taken_for_one_that_saves_nothing(tmp_path: Path) -> None:
    placement, log = register(OddLayers("odd-layers")), tmp_path / "run.jsonl"
    model = make_model(layers=LAYERS)
    policy = config_for(default=Placement.AUTO, rules=(Rule("0-1", placement),))
    try:
        with tba.attach(model, policy, run_log=log, measure_memory=False) as session:
            train(model, session, steps=5)
    finally:
        unregister(placement)
    event = [event for event in read_run_log(log).others if event["event"] == "plan"][-1]
    assert event["policy"] == ["odd-layers", "odd-layers", "auto", "auto"]
    saved = [StepProfile.from_json(event["profile"]).kind_of(layer).nbytes for layer in range(LAYERS)]
    assert saved == [saved[-1]] * LAYERS > [0] * LAYERS


def test_the_simulator_and_the_words_go_the_same_way(alternating: Placement) -> None:
    drive, layers = Bandwidth(1e9, 1e9), range(LAYERS)
    mixed = tuple(Placement.RECOMPUTE if layer % 2 else Placement.OFFLOAD for layer in layers)
    plan, same = Plan((alternating,) * LAYERS), Plan(mixed)
    assert simulate(profile(), plan, drive) == simulate(profile(), same, drive)
    for layer in layers:
        assert explain(profile(), plan, drive, layer) == explain(profile(), same, drive, layer)
        assert profile().timing(layer, alternating) == profile().timing(layer, mixed[layer])


def test_policies_know_it_by_its_name(alternating: Placement, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: alternating\nlayers: [{match: '0', placement: keep}]\n")
    config = read_config(policy)
    assert config.default is alternating
    assert "default: alternating" in config.to_yaml()
    done = CliRunner().invoke(main, ["check", str(policy), "--layers", "3"])
    assert done.exit_code == 0
    assert "alternating" in done.output


def test_a_placement_is_one_object(alternating: Placement) -> None:
    for placement in Placement:
        assert Placement(placement.value) is placement
        assert copy.deepcopy(placement) is pickle.loads(pickle.dumps(placement)) is placement
        assert f"{placement}" == placement.value == str(placement)
    assert alternating in list(Placement)
    assert repr(alternating) == "Placement('alternating')"


def test_a_name_is_given_once_and_forgotten_names_are_unknown() -> None:
    with pytest.raises(ValueError, match="'keep' is known already"):
        register(Alternating("keep"))
    with pytest.raises(ValueError, match=r"'alternating' is not one of keep, offload, .*auto"):
        Placement("alternating")
    with pytest.raises(ValueError, match="is not one of"):
        Placement(3)  # type: ignore[arg-type]


class Silent(Placement):
    pass


def test_a_placement_that_says_nothing_keeps() -> None:
    model, placement = make_model(layers=2), register(Silent("silent"))
    try:
        with session_for(model, default=placement) as session:
            train(model, session)
            assert session.report()[-1].offloaded_bytes == 0
    finally:
        unregister(placement)
