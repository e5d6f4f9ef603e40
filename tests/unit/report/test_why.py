"""What is concluded from a log; whether it is true, ``tests/contracts/figures/test_causes.py`` asks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from commands import call
from run_logs import MIB, memory_event, peak, write_run

from tba_offload.report.ranks import path_of_rank
from tba_offload.report.why import Diagnosis, why

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["layers.0", "layers.1"]


def event(step: int = 2, **more: Any) -> dict[str, Any]:
    phases = {
        "forward": peak(30, layer=1, in_flight=4),
        "loss": peak(100, layer=1, beside=2),
        "backward": peak(40, layer=1, in_flight=4, gradients=10),
    }
    return memory_event(step, NAMES, **phases) | more


def diagnosed(tmp_path: Path, *events: dict[str, Any], **fields: Any) -> Diagnosis:
    log = write_run(tmp_path / "run.jsonl", *events, **fields)
    found = why(log)
    log.unlink()
    return found


def test_the_first_step_and_steps_of_another_plan_do_not_count(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, event(1)).step.step == 1
    assert diagnosed(tmp_path, event(1), event(2), event(4)).step.step == 2
    tried = event(2, placements=["keep", "keep"])
    assert diagnosed(tmp_path, tried, event(4)).step.step == 4


def test_a_log_without_memory_events_says_so(tmp_path: Path) -> None:
    found = diagnosed(tmp_path)
    assert (found.cause, found.peak.nbytes) == (None, 100 * MIB)
    assert "The run log has no list of tensors in memory" in str(found)


@pytest.mark.parametrize(("born", "is_named"), [(0, True), (9, False)])
def test_what_grows_is_told_unless_an_optimizer_makes_states(
    born: int, is_named: bool, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run.jsonl", event())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step":
            line |= {"base_bytes": 50 * line["step"] * MIB, "state_bytes": 50 * MIB if born else 0}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = why(path)
    assert (found.cause == "graphs of earlier steps") is is_named
    assert ("The change saves 150 MiB in the last step of the run log." in str(found)) is is_named


def test_of_several_ranks_the_fullest_is_explained(tmp_path: Path) -> None:
    for rank, mib in enumerate((50, 400, 60)):
        name = path_of_rank(tmp_path / "run.jsonl", rank)
        fuller = event(phases={"loss": peak(mib)})
        write_run(name, fuller, header={"run": "one", "rank": rank, "ranks": 3})
    assert "In step 2 of rank 1, memory peaks" in str(why(tmp_path / "run.jsonl"))


def test_the_command_prints_tables_and_advice_or_json(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.jsonl", event())
    result = call("why", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("In step 2, memory peaks in the loss, after the last layer: 110")
    assert "Most effective change: compute the loss in 8 chunks" in result.stdout
    told = json.loads(call("why", "--json", path).stdout)
    assert told["cause"] == told["findings"][0]["cause"] == "logits and loss"
    assert told["peak_bytes"] == 110 * MIB
    assert {phase["phase"] for phase in told["phases"]} == {"forward", "loss", "backward", "update"}
