"""``tba-offload plan``: plans from a run log alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from commands import call
from harness import MIB, config_for, made
from models import make_model, train

import tba_offload as tba
from tba_offload.config import load_config
from tba_offload.config.policy import LayerId, Placement
from tba_offload.planner.model import Bandwidth, Plan
from tba_offload.planner.play import play
from tba_offload.planner.what_if import FRONTIER, Situation
from tba_offload.report.log import read_run_log
from tba_offload.report.plans import plans_figure
from tba_offload.report.rok import drawing

if TYPE_CHECKING:
    from pathlib import Path

KEEP, OFFLOAD, AUTO = Placement.KEEP, Placement.OFFLOAD, Placement.AUTO
LAYERS = 8


@pytest.fixture(scope="module")
def run_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "run.jsonl"
    model = make_model(layers=LAYERS)
    config = config_for(in_flight=MIB, default=OFFLOAD)
    with tba.attach(model, config, run_log=path, measure_memory=False) as session:
        train(model, session, steps=4, micro_batches=2)
    return path


def invoke_plan(*arguments: object, whole_sweep: bool = False) -> Any:
    """What the command prints; of the budgets of its sweep two, unless the test is about the sweep."""
    with mock.patch("tba_offload.planner.what_if.FRONTIER", FRONTIER if whole_sweep else (0.25, 1.05)):
        return call("plan", *arguments)


def run_plan(*arguments: object, whole_sweep: bool = False) -> Any:
    result = invoke_plan(*arguments, whole_sweep=whole_sweep)
    assert result.exit_code == 0, result.output
    return result


def with_rates(run_log: Path, path: Path, rate: float, **more: Any) -> Path:
    events = list(map(json.loads, run_log.read_text().splitlines()))
    for event in events:
        if event["event"] == "plan":
            event["drive"] |= {"write": rate, "read": rate, **more}
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_a_run_that_was_not_auto_can_be_planned_from(run_log: Path) -> None:
    found = json.loads(run_plan(run_log, "--json", whole_sweep=True).output)
    assert len(found["frontier"]) >= 8
    assert found["names"] == [f"layers.{layer}" for layer in range(LAYERS)]
    fitting = [row for row in found["frontier"] if row["fits"]]
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in fitting)
    seconds = [round(row["seconds"], 9) for row in fitting]
    assert seconds == sorted(seconds, reverse=True)


def test_the_picture_has_the_plans_the_budget_and_the_run(run_log: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plans.svg"
    run_plan(run_log, "--budget", "3MiB", "--picture", picture)
    assert picture.read_bytes().startswith(b"<?xml")
    log = read_run_log(run_log)
    log = replace(log, steps=tuple(replace(each, activation_peak_bytes=4 * MIB) for each in log.steps))
    log = replace(log, header=replace(log.header, model={"name": "GPT"}, hardware={"device": "H200"}))
    found, _ = Situation.of(run_log).changed(drives=2).report(3 * MIB)
    with drawing():
        (axes,) = plans_figure(found, log).axes
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)
    assert axes.get_title(loc="left").startswith("GPT, device H200. Planned: 8 layers. Rates of the store:")
    drawn = {str(line.get_label()).partition(":")[0]: line.get_xydata() for line in axes.lines}
    assert drawn["chosen plan"].tolist() == [[found.step.activation_peak / MIB, found.step.seconds]]
    assert drawn["budget 3.00 MiB"][0][0] == 3
    assert drawn["the run, measured"][0][0] == 4
    assert len(drawn["best plan for each budget, predicted"]) == sum(each.fits for each in found.frontier) > 3


def test_host_memory_beside_the_drives_of_the_run_is_planned_with(run_log: Path, tmp_path: Path) -> None:
    host = {"write": 1e10, "read": 1e10, "capacity": 64 * MIB}
    path = with_rates(run_log, tmp_path / "run.jsonl", 1e6, host=host, host_first=True)
    assert "; host memory: 10.0 GB/s written" in run_plan(path).output
    situation = Situation.of(path, Bandwidth(1e9, 1e9))
    offloaded = play(situation.profile, Plan((OFFLOAD,) * LAYERS), situation.bandwidth)
    assert offloaded.host_bytes > 0 == offloaded.sent_bytes


def test_the_policy_file_reproduces_the_plan(run_log: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    slow = with_rates(run_log, tmp_path / "slow.jsonl", 1e5)
    found = json.loads(run_plan(slow, "--budget", "3MiB", "-o", policy, "--json").output)
    assert set(found["plan"]["placements"]) != {"offload"}
    model = make_model(layers=LAYERS)
    config = load_config(policy)
    with tba.attach(model, config, measure_memory=False) as session:
        assert [placement.value for placement in session.plan.placements] == found["plan"]["placements"]
        assert session.plan.window == found["plan"]["window"]


def test_a_plan_for_a_device_has_what_the_run_left_on_it(tmp_path: Path, run_log: Path) -> None:
    path, policy = tmp_path / "run.jsonl", tmp_path / "policy.yaml"
    model = make_model(layers=LAYERS)
    with tba.attach(model, config_for(in_flight=MIB, default=OFFLOAD), run_log=path) as session:
        train(model, session, steps=4, micro_batches=2)
        records = session.records
    beside = max(record.base_bytes or 0 for record in records)
    gradients = max(record.gradient_peak_bytes or 0 for record in records)
    device_bytes = beside + gradients + 4 * MIB
    options = ("--device-bytes", f"{device_bytes}B")
    said = run_plan(path, *options, "-o", policy).output
    assert re.search(
        r"^3\.9\d MiB are left for activations: .*, minus .* in use before a step and", said, re.MULTILINE
    )
    assert load_config(policy).budget.device_bytes is None  # each layer is placed, and waits for its drive
    for arguments, what in (
        ((path, "--device-bytes", "1MiB"), "no memory is left for activations: 1.00 MiB, minus"),
        ((path, *options, "--layers", "9"), "does not say how much memory the weights take"),
        ((run_log, *options), "does not say how much memory the weights take"),
        ((path, *options, "--budget", "3MiB"), "--budget and --device-bytes cannot be combined"),
    ):
        failed = invoke_plan(*arguments)
        assert failed.exit_code != 0
        assert what in failed.output


def test_the_policy_of_one_stage_leaves_the_others_as_they_were(run_log: Path, tmp_path: Path) -> None:
    """Those that are not in the log of this rank: the header of each names all."""
    header, *lines = run_log.read_text().splitlines()
    document = json.loads(header)
    for layer in range(LAYERS, 3 * LAYERS):
        document["plan"][f"layers.{layer}"] = {"layer": layer, "placement": "auto", "why": "default"}
    stage, policy = tmp_path / "run.rank0.jsonl", tmp_path / "policy.yaml"
    stage.write_text("\n".join([json.dumps(document), *lines]) + "\n")
    found = json.loads(run_plan(stage, "--budget", "3MiB", "-o", policy, "--json").output)
    placed = load_config(policy).policy
    layers = [LayerId(layer, f"layers.{layer}") for layer in range(3 * LAYERS)]
    own, others = layers[:LAYERS], layers[LAYERS:]
    assert [placed.explain(layer)[0].value for layer in own] == found["plan"]["placements"]
    assert {placed.explain(layer)[0] for layer in others} == {AUTO}
    assert placed.resolve(layers)
    assert Situation.of(stage).changed(layers=LAYERS + 1).elsewhere == ()


def test_an_existing_file_is_replaced_only_on_request(run_log: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: keep  # by hand\n")
    result = invoke_plan(run_log, "-o", policy)
    assert result.exit_code == 1
    assert "policy.yaml: the file exists and was not replaced" in result.output
    assert policy.read_text() == "default: keep  # by hand\n"
    run_plan(run_log, "-o", policy, "--force")
    assert "by hand" not in policy.read_text()
    before = run_log.read_bytes()
    result = invoke_plan(run_log, "-o", run_log, "--force")
    assert result.exit_code == 1
    assert "the file is a run log and was not replaced" in result.output
    assert run_log.read_bytes() == before


def test_a_plan_foretells_what_its_own_log_measured_and_its_policy_can_be_attached(tmp_path: Path) -> None:
    """Also after the directory of the run has gone."""
    drive, path, policy = made(tmp_path / "drive"), tmp_path / "run.jsonl", tmp_path / "policy.yaml"
    model, config = make_model(layers=LAYERS), config_for(in_flight=MIB, default=OFFLOAD, directory=drive)
    with tba.attach(model, config, run_log=path) as session:
        train(model, session, steps=6)
        measured = max(record.activation_peak_bytes or 0 for record in session.records)
    drive.rmdir()
    situation = Situation.of(path)
    same = Plan((OFFLOAD,) * LAYERS, window=MIB)
    assert play(situation.profile, same, situation.bandwidth).activation_peak >= measured
    run_plan(path, "--budget", "64MiB", "-o", policy)
    assert "null" not in policy.read_text()
    with tba.attach(make_model(layers=LAYERS), policy, measure_memory=False) as session:
        assert set(session.plan.placements) == {KEEP}


def test_a_run_that_keeps_all_can_be_planned_from_with_given_rates(run_log: Path, tmp_path: Path) -> None:
    path, model = tmp_path / "keep.jsonl", make_model(layers=LAYERS)
    with tba.attach(model, config_for(in_flight=MIB, default=KEEP), run_log=path) as session:
        train(model, session, steps=4, micro_batches=2)
    failed = invoke_plan(path)
    assert failed.exit_code == 1
    assert "the run wrote to no drive, so the drive rates are unknown" in failed.output
    kept, offloaded = Situation.of(path, Bandwidth(1e9, 1e9)).profile, Situation.of(run_log).profile
    assert {kind.nbytes for kind in kept.kinds} == {kind.nbytes for kind in offloaded.kinds}
    found = json.loads(run_plan(path, "--budget", "3MiB", "--write", "2GB/s", "--json").output)
    assert set(found["plan"]["placements"]) - {"keep"}
    assert found["step"]["activation_peak"] <= 3 * MIB
    run_plan(path, "--dir", made(tmp_path / "drive"))
