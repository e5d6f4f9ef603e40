"""Old names and words work, and what to write instead is said once; or an error says where to look."""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

import tba_offload as tba
from tba_offload import renamed
from tba_offload.megatron.arguments import add_arguments, config_of
from tba_offload.plan.profile import StepProfile
from tba_offload.report.plan_event import checked_plan
from tba_offload.what_if import Situation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEW = tba.Placement.OFFLOAD_REMAT
SAID = "the placement 'selective' is called 'offload-remat' now"

# What was public at 2ea67f7: the names that its packages list, and the modules.
PUBLIC = {
    "tba_offload": [
        *("BudgetConfig", "ChecksumError", "ConfigError", "LayerId", "MissingDependencyError"),
        *("OffloadConfig", "PatchError", "Placement", "Policy", "Rule", "RunLogError"),
        *("SavedTensorModifiedError", "Session", "SessionError", "ShortTransferError", "Step", "StepRecord"),
        *("StoreConfig", "StoreError", "StoreFullError", "TbaError", "TransferError", "UnsupportedError"),
        *("attach", "keep_freed_pages", "load_config", "read_run_log"),
    ],
    "tba_offload.device": [
        *("READY", "ByteRange", "CpuDevice", "CudaDevice", "Device", "Event", "Mark", "device_of"),
    ],
    "tba_offload.store": ["ActivationStore", "Extent", "IoFuture", "open_store"],
}
MODULES = [
    "__main__",
    "attachment",
    "capture",
    "capture.hooks",
    "capture.identity",
    "capture.layers",
    "capture.recipes",
    "capture.recompute",
    "capture.resize",
    "capture.scope",
    "capture.selective",
    "capture.trace",
    "capture.transforms",
    "cli",
    "config",
    "demo",
    "demo.console",
    "demo.race",
    "demo.run",
    "demo.text",
    "demo.trainer",
    "device",
    "device.memory",
    "device.ranges",
    "device.staging",
    "device.streams",
    "device.sums",
    "doctor",
    "errors",
    "forecast",
    "megatron",
    "megatron.arguments",
    "megatron.cpu",
    "megatron.cpu_scripts",
    "megatron.gpt",
    "megatron.launch",
    "megatron.layers",
    "megatron.patch",
    "megatron.recipes",
    "megatron.training",
    "plan",
    "plan.bandwidth",
    "plan.condense",
    "plan.plan",
    "plan.planner",
    "plan.profile",
    "plan.simulator",
    "plan.what_if",
    "planning",
    "policy",
    "profiling",
    "report",
    "report.picture",
    "report.ranks",
    "report.rok",
    "report.run_log",
    "session",
    "store",
    "store.base",
    "store.choice",
    "store.combined",
    "store.directory",
    "store.extents",
    "store.file",
    "store.gds",
    "store.host",
    "store.posix",
    "store.queued",
    "store.striped",
    "store.tiered",
    "transfer",
    "transfer.books",
    "transfer.offloader",
    "transfer.patience",
    "transfer.record",
]
OF_MODULES = {  # of those that a program may have used, beside what the packages list
    "capture.identity": ["look"],
    "capture.layers": ["Layer", "LayerStack", "find_layers", "first_differentiable"],
    "capture.recompute": ["torch_checkpoint", "is_recomputation"],
    "capture.selective": ["Rebuild", "SelectiveHooks"],
    "capture.trace": ["Fate"],
    "demo.run": ["DemoSettings", "run_demo", "summarize"],
    "demo.text": ["ByteTokenizer"],
    "device.sums": ["sums"],
    "doctor": ["Findings", "examine", "lines"],
    "forecast": ["EVENT", "Situation", "composition"],
    "megatron.gpt": ["GptShape", "build_gpt"],
    "megatron.training": ["CURVES"],
    "plan.bandwidth": ["SPILL_BYTES", "SPILL_SHARE"],
    "plan.plan": ["Plan", "Prediction"],
    "plan.planner": ["Limits", "default_objective", "explain", "is_better", "make_plan"],
    "plan.simulator": ["Outcome", "simulate"],
    "planning": ["AutoPlanner"],
    "policy": ["LayerId", "Objective", "Placement", "Policy", "Rule"],
    "profiling": ["ComputeClock", "profile_of"],
    "report.rok": ["Unit", "draw_frontier", "point", "points"],
    "session": ["Session", "Step", "read_config"],
    "store.choice": ["Probe", "choose", "measure"],
    "store.directory": ["RunFile", "open_directory"],
    "store.queued": ["QueuedStore", "Transfer"],
    "transfer.books": ["Books", "TransferStats"],
    "transfer.patience": ["Patience"],
    "transfer.record": ["Handle", "Record"],
}


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a process of its own, as far as old names go."""
    monkeypatch.setattr(renamed, "_told", set())
    yield
    for name in renamed.MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("module", PUBLIC)
def test_what_packages_listed_is_there(module: str) -> None:
    home = importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tba.RenamedWarning)
        assert all(getattr(home, name) is not None for name in PUBLIC[module])


@pytest.mark.parametrize("module", MODULES)
def test_old_modules_can_be_imported(module: str) -> None:
    assert importlib.import_module(f"tba_offload.{module}").__name__ == f"tba_offload.{module}"


@pytest.mark.parametrize("module", OF_MODULES)
def test_names_of_old_modules_work(module: str) -> None:
    home = importlib.import_module(f"tba_offload.{module}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tba.RenamedWarning)
        assert all(getattr(home, name) is not None for name in OF_MODULES[module])


def test_every_renamed_name_has_the_new_one() -> None:
    for names in renamed.NAMES.values():
        for place in names.values():
            home, _, name = place.rpartition(".")
            assert hasattr(importlib.import_module(home), name), place
    for places in renamed.MODULES.values():
        assert all(importlib.import_module(place) for place in places)


def test_an_old_name_is_told_once() -> None:
    with pytest.warns(tba.RenamedWarning, match=r"tba_offload\.policy\.Rule is called tba_offload\.config"):
        from tba_offload.policy import Rule  # type: ignore[import-not-found]
    assert Rule is tba.Rule
    assert importlib.import_module("tba_offload.policy").Rule is tba.Rule


def test_an_old_name_that_is_gone_says_where_to_look() -> None:
    module = importlib.import_module("tba_offload.planning")
    with pytest.raises(AttributeError, match=r"ASTRAY' any more; what it had is in .*tba_offload\.plan\.tun"):
        _ = module.ASTRAY
    with pytest.raises(ImportError, match="ASTRAY"):
        from tba_offload.planning import ASTRAY  # type: ignore[import-not-found] # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tba_offload.never_was")
    with pytest.raises(AttributeError, match="never_was"):
        _ = importlib.import_module("tba_offload.capture.trace").never_was


def test_nothing_is_told_of_names_of_today() -> None:
    program = (
        "import tba_offload as t, tba_offload.cli; t.Placement('offload-remat'); print(list(t.Placement))"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True)


def test_the_old_placement_in_python() -> None:
    with pytest.warns(tba.RenamedWarning, match=SAID):
        assert tba.Placement.SELECTIVE is NEW  # type: ignore[attr-defined]
    assert tba.Placement("selective") is NEW  # it was told
    assert tba.Rule("0", "selective").placement is NEW  # type: ignore[arg-type]
    assert tba.OffloadConfig(default="selective").default is NEW  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(NEW)) is NEW
    assert "selective" not in {str(each) for each in tba.Placement}
    with pytest.raises(AttributeError, match="SELECTED"):
        _ = tba.Placement.SELECTED  # type: ignore[attr-defined]


def test_the_old_placement_in_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("default: selective\nlayers:\n  - {match: '0', placement: selective}\n")
    with pytest.warns(tba.RenamedWarning, match=SAID) as told:
        config = tba.load_config(path)
    assert len(told) == 1
    assert (config.default, config.layers[0].placement) == (NEW, NEW)
    assert "selective" not in config.to_yaml()


def test_the_old_placement_as_a_flag_of_megatron() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    with pytest.warns(tba.RenamedWarning, match=SAID):
        arguments = parser.parse_args(["--tba-placement", "selective"])
    assert config_of(arguments).default is NEW


def test_the_old_placement_in_a_run_log(tmp_path: Path) -> None:
    seconds = [0.01, 0.02]
    profile = {
        "kinds": [{"activations": [[100, 0.5, 0.5, True, 0.4]], "small_bytes": 0, "input_bytes": 10}],
        "layers": [0],
        "timings": [{"keep": seconds, "selective": seconds}],
        "slots": [[0, 0, False, 0.0], [0, 0, True, 0.0]],
        "tail": 0.0,
        "rest_bytes": 0,
    }
    plan = {"event": "plan", "step": 3, "names": ["one"], "profile": profile}
    plan |= {"drive": {"write": 1e9, "read": 1e9}, "limits": {"window": None}}
    run = {"event": "run", "schema": 1, "strategy": "selective", "policy": "default: selective\n"}
    run["plan"] = {"other": {"layer": 1, "placement": "selective", "why": "default"}}
    checked_plan(plan)
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in (run, plan)))
    with pytest.warns(tba.RenamedWarning, match=SAID) as told:
        situation = Situation.of(path)
    assert len(told) == 1
    assert situation.config.default is NEW
    assert situation.elsewhere == (("other", NEW),)
    assert set(situation.profile.timings[0]) == {tba.Placement.KEEP, NEW}
    assert "selective" not in json.dumps(situation.profile.as_json())
    assert StepProfile.from_json(situation.profile.as_json()) == situation.profile
