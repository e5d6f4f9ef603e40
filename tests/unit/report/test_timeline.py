"""One step over time: the trace is what viewers of traces read, and the picture is of the same step."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result
from run_logs import MIB, write_run

import tba_offload as tba
from tba_offload import cli
from tba_offload.errors import ConfigError, MissingDependencyError, RunLogError
from tba_offload.report.run_log import TIMELINE, read_run_log
from tba_offload.report.timeline import timeline_of, trace_of, write_timeline

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["layers.0", "layers.1"]


def event(step: int = 3, **more: Any) -> dict[str, Any]:
    """Two layers forward, then backward; 4 MiB are written and read, and there is one wait."""
    return {
        "event": TIMELINE,
        "step": step,
        "source": "mallinfo2",
        "names": NAMES,
        "scopes": [[0, 0, 0.0, 0.1, 0.4], [1, 0, 0.1, 0.2, 0.3]],
        "backward_ends": [0.5],
        "stalls": [[0.15, 0.18]],
        "points": [
            [0.0, 0, 0, 0, 0, 0],
            [0.2, 8 * MIB, 4 * MIB, 0, 4 * MIB, 0],
            [0.3, 6 * MIB, 2 * MIB, 2 * MIB, 4 * MIB, 1 * MIB],
            [0.5, 0, 0, 0, 4 * MIB, 4 * MIB],
        ],
    } | more


def logged(path: Path, *events: dict[str, Any]) -> Path:
    write_run(path, steps=3)
    with path.open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in events))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, arguments)))


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, held against the format: kinds, fields, and slices that do not cross."""
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    for each in trace["traceEvents"]:
        assert each["ph"] in {"M", "X", "C"}
        assert isinstance(each["name"], str)
        assert isinstance(each["pid"], int)
        assert isinstance(each["tid"], int)
        assert each["ts"] >= 0
        assert each["ph"] != "X" or each["dur"] >= 0
        assert each["ph"] != "C" or all(map(math.isfinite, each["args"].values()))
    for row in {each["tid"] for each in trace["traceEvents"]}:
        slices = [each for each in trace["traceEvents"] if (each["ph"], each["tid"]) == ("X", row)]
        for before, after in pairwise(sorted(slices, key=lambda each: each["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    return trace["traceEvents"]


def test_the_trace_has_rows_of_layers_and_waits_and_counters(tmp_path: Path) -> None:
    events = check_trace(trace_of(timeline_of(read_run_log(logged(tmp_path / "run.jsonl", event())))))
    slices = [(each["name"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"]
    assert [(name, round(ts / 1e5), round(dur / 1e3)) for name, ts, dur in slices] == [
        ("forward layers.0", 0, 100),
        ("forward layers.1", 1, 100),
        ("backward layers.0", 4, 100),
        ("backward layers.1", 3, 100),
        ("wait", 2, 30),
    ]
    live = [each["args"]["live"] for each in events if each["name"] == "memory (bytes)"]
    assert max(live) == 8 * MIB


def test_the_traffic_of_a_trace_adds_up(tmp_path: Path) -> None:
    events = trace_of(timeline_of(read_run_log(logged(tmp_path / "run.jsonl", event()))))["traceEvents"]
    rates = [each for each in events if each["name"] == "traffic (bytes/s)"]
    ends = [each["ts"] for each in rates[1:]] + [0.5e6]
    moved = [
        (end - each["ts"]) / 1e6 * each["args"]["written"] for each, end in zip(rates, ends, strict=True)
    ]
    assert round(sum(moved)) == 4 * MIB


def test_the_last_step_is_taken_unless_one_is_named(tmp_path: Path) -> None:
    log = read_run_log(logged(tmp_path / "run.jsonl", event(3), event(16)))
    assert timeline_of(log).step == 16
    assert timeline_of(log, 3).step == 3
    with pytest.raises(RunLogError, match=r"step 4 is not told over time; those that are: 3, 16"):
        timeline_of(log, 4)


def test_a_log_that_tells_no_step_over_time_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="no step is told over time"):
        timeline_of(read_run_log(logged(tmp_path / "run.jsonl")))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"scopes": [[2, 0, 0.0, 0.1, 0.2]]}, "a run is of no layer"),
        ({"points": []}, "points: List should have at least 1 item"),
        ({"points": [[0.0, -1, 0, 0, 0, 0]]}, "points.0.1: Input should be greater"),
        ({"stalls": [[0.0, "nan"]]}, "stalls.0.1"),
    ],
)
def test_a_damaged_event_is_named_and_left_out(tmp_path: Path, damage: dict[str, Any], said: str) -> None:
    log = read_run_log(logged(tmp_path / "run.jsonl", event(), event() | damage))
    assert len(log.others) == 1
    assert "the timeline event is damaged: " in log.complaints[0]
    assert said in log.complaints[0]


def test_the_picture_is_a_file_of_its_own_without_names(tmp_path: Path) -> None:
    odd = event(names=["<script>alert(1)</script>", "\x1b[2J"])
    output = tmp_path / "step.svg"
    write_timeline(timeline_of(read_run_log(logged(tmp_path / "run.jsonl", odd))), output)
    text = output.read_text()
    ET.fromstring(text)
    assert "script" not in text
    assert "var(" not in text
    for label in ("live, measured", "MB/s", "forward", "backward", "waits", "seconds since the step began"):
        assert label in text
    assert not re.findall(r"(?:href|src)=\"(?!#)", text)


@pytest.mark.parametrize(
    "bare",
    [
        {"scopes": [], "backward_ends": [], "stalls": [], "points": [[0.0, 0, 0, 0, 0, 0]]},
        {"scopes": [[0, 0, 0.1, None, None]]},
        {"points": [[0.1, 5, 0, 0, 7, 0], [0.1, 5, 0, 0, 9, 0]]},
        {"points": [[0.1, 5, 0, 0, 7, 0], [math.nextafter(0.1, 1), 5, 0, 0, 9, 0]]},
        *(
            {"scopes": [], "backward_ends": [], "stalls": [], "points": [[0.0] + [0] * 5, [tiny] + [9] * 5]}
            for tiny in (5e-324, 1e-310, 1e-100, 1e-9)
        ),
    ],
)
def test_odd_steps_can_be_drawn(tmp_path: Path, bare: dict[str, Any]) -> None:
    found = timeline_of(read_run_log(logged(tmp_path / "run.jsonl", event(**bare))))
    write_timeline(found, tmp_path / "step.svg")
    check_trace(trace_of(found))


def test_the_command_writes_picture_and_trace(tmp_path: Path) -> None:
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    result = call("timeline", logged(tmp_path / "run.jsonl", event()), "-o", svg, "-o", trace)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"step 3: {svg}, {trace}\n"
    check_trace(json.loads(trace.read_text()))


def test_another_suffix_is_told_before_anything_is_read(tmp_path: Path) -> None:
    result = call("timeline", tmp_path / "none.jsonl", "-o", tmp_path / "step.gif")
    assert result.exit_code == 2
    assert "must end in .svg, for a picture, or .json, for a trace" in result.stderr
    with pytest.raises(ConfigError):
        write_timeline(None, "step.gif")  # type: ignore[arg-type]


def test_a_missing_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = timeline_of(read_run_log(logged(tmp_path / "run.jsonl", event())))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"drawing a timeline needs matplotlib"):
        write_timeline(found, tmp_path / "step.svg")
    assert tba.MissingDependencyError is MissingDependencyError
