"""The demo: tiny runs through the command line, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from commands import call

from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

pytestmark = pytest.mark.megatron

TINY = (
    *("--layers", "2", "--hidden", "64", "--sequence", "32", "--steps", "8"),
    *("--batch-size", "2", "--dtype", "fp32", "--window", "64KiB"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    output = tmp_path_factory.mktemp("demo")
    result = call("demo", *TINY, "--output", output)
    assert result.exit_code == 0, result.output
    return output, result


def summary_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return found


def test_a_run_leaves_logs_pictures_and_figures(run: tuple[Path, Result]) -> None:
    output, result = run
    strategies = ("keep", "recompute", "offload")
    logs = {f"{name}-b2.jsonl" for name in strategies}
    assert {path.name for path in output.iterdir()} == logs | {"rok.svg", "rok.png", "summary.json"}
    assert "losses of the 3 strategies over 8 steps: identical to the last bit" in result.stdout
    assert "parameters of the 3 strategies over 8 steps: identical to the last bit" in result.stdout
    for text in ("activation peak MiB", "resident peak MiB", "report.html", "tba-offload doctor"):
        assert text in result.stdout
    assert "starting 3 processes" in result.stderr
    summary = summary_of(output)
    assert summary["identical_losses"]
    assert summary["identical_parameters"]
    assert all(tuple(found) == strategies for found in summary["batch_sizes"].values())
    assert summary["batch_sizes"]["2"]["offload"]["offloaded_bytes"] > 0
    assert summary["ratios"]["2"]["offload_over_keep"]["activation_peak"] < 1


@pytest.mark.full
@pytest.mark.parametrize("states", ["offload", "backward"])
def test_a_lane_that_offloads_optimizer_states_too(states: str, tmp_path: Path) -> None:
    wide = ("--hidden", "512", "--output", str(tmp_path), "--states", states)  # or all states fit the slots
    result = call("demo", *TINY, *wide)
    assert result.exit_code == 0, result.output
    summary = summary_of(tmp_path)
    assert summary["identical_parameters"]
    assert summary["ratios"]["2"]["states_over_keep"]["device_peak"] < 1
    events = [event["event"] for event in read_run_log(tmp_path / "states-b2.jsonl").others]
    assert events.count("states") == 8


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--dtype", "fp64"), 2, "'fp64' is not one of"),
        (("--steps", "3"), 2, "3 is not in the range x>=8"),
        (("--policy", "no-such-policy.yaml"), 1, "no-such-policy.yaml: cannot be read"),
        (("--window", "10"), 1, "'10' has no unit; write a number and a unit"),
        (("--window", "1MiB", "--policy", "auto"), 1, "--window has no effect with --policy"),
        (("--budget", "64MiB"), 1, "a budget needs --policy auto"),
        (("--policy", "auto", "--budget", "x%"), 1, "not a budget: 'x%'. Pass a size such as 64MiB"),
        (("--policy", "auto", "--states", "auto"), 1, "--states auto needs --device-budget"),
        (("--hidden", "100000", "--layers", "1000"), 1, "are free. Pass a smaller --hidden"),
    ],
)
def test_what_makes_no_run_is_one_line(
    arguments: tuple[str, ...], status: int, message: str, tmp_path: Path
) -> None:
    result = call("demo", "--output", tmp_path / "out", "--dtype", "fp32", *arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []
