"""However a run log ends, each command gives a result or names the error; what is printed is text."""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

import pytest
from commands import call
from run_logs import plan_event

from tba_offload.formatting import visible

if TYPE_CHECKING:
    from pathlib import Path

EVIL = "\x1b[2J\x1b]0;owned\x07=cmd|'/c calc'!A1 <script>&\u202e\ud800$x_1$[red]"


def outcome(*arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error; any exception but that of an exit is the test's."""
    result = call(*arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in {0, 1, 2}
    assert "Traceback" not in result.stderr
    assert result.exit_code == 0 or result.stderr.strip() or result.stdout.strip()
    for printed in (result.stdout, result.stderr):
        assert not [
            each for each in printed if each != "\n" and unicodedata.category(each) in {"Cc", "Cf", "Cs"}
        ]
    return result.exit_code, result.stdout, result.stderr


# Run logs


def write_log(path: Path, **header: Any) -> Path:
    first: dict[str, Any] = {
        "event": "run",
        "schema": 1,
        "strategy": "offload",
        "policy": "default: offload\n",
    }
    step = {"event": "step", "seconds": 1.0, "tokens": 100, "activation_peak_bytes": 2**20}
    events = [first | header, *(step | {"step": number} for number in range(2)), plan_event()]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


@pytest.mark.parametrize("command", ["rok", "plan", "why"])
def test_a_log_that_is_cut_off_is_read_or_named(tmp_path: Path, command: str) -> None:
    whole = write_log(tmp_path / "whole.jsonl").read_bytes()
    path = tmp_path / "cut.jsonl"
    statuses = []
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        statuses.append(outcome(command, path)[0])
    assert set(statuses) <= {0, 1}
    assert statuses[0] == 1
    assert outcome(command, tmp_path / "whole.jsonl")[0] == 0


# What is printed is text


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    status, said, _ = outcome("rok", write_log(tmp_path / "evil.jsonl", strategy=EVIL))
    assert status == 0
    assert visible(EVIL).replace("|", "\\|") in said
