"""The timeline of a step: the trace is what viewers of traces read, and the picture is of the same step."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from commands import call
from run_logs import MIB, logged

from tba_offload.errors import ConfigError
from tba_offload.report import rok
from tba_offload.report.log import TIMELINE, read_run_log
from tba_offload.report.timeline import timeline_figure, timeline_of

if TYPE_CHECKING:
    from pathlib import Path


def event(step: int = 3, **more: Any) -> dict[str, Any]:
    """Two layers forward, then backward; three places move bytes, the last in less than a microsecond."""
    return {
        "event": TIMELINE,
        "step": step,
        "source": "mallinfo2",
        "names": ["layers.0", "layers.1"],
        "scopes": [[0, 0, 0.0, 0.1, 0.4], [1, 0, 0.1, 0.2, 0.3]],
        "backward_ends": [0.5],
        "stalls": [[0.15, 0.18]],
        "points": [
            [0.0, 0, 0, 0, 0, 0],
            [0.2, 8 * MIB, 4 * MIB, 0, 0, 0],
            [0.3, 6 * MIB, 2 * MIB, 2 * MIB, 0, 0],
            [0.5, 0, 0, 0, 0, 0],
        ],
        "updates": [[0.5, 0.6]],
        "budget": 10 * MIB,
        "drives": [[0, "/mnt/a"], [2, "/mnt/<c>"], [3, "host memory"]],
        "moves": [
            [0, True, 0.0, 0.1, 3 * MIB, 0],
            [1, True, 0.05, 0.15, 1 * MIB, 1],
            [0, False, 0.3, 0.4, 2 * MIB, 2],
            [0, False, 0.35, 0.45, 1 * MIB, 3],
            [2, False, 0.4, 0.4, 1 * MIB, 4],
        ],
    } | more


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, held against the format: kinds, fields, and slices of a row that nest."""
    for each in trace["traceEvents"]:
        assert each["ph"] in {"M", "X", "C"}
        assert isinstance(each["name"], str)
        assert isinstance(each["pid"], int)
        assert isinstance(each["tid"], int)
        assert each["ph"] == "M" or each["ts"] >= 0
        assert each["ph"] != "X" or each["dur"] >= 0
        assert each["ph"] != "C" or all(map(math.isfinite, each["args"].values()))
    for row in {each["tid"] for each in trace["traceEvents"]}:
        slices = [each for each in trace["traceEvents"] if (each["ph"], each["tid"]) == ("X", row)]
        ends: list[float] = []
        for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
            ends = [end for end in ends if end > each["ts"] + 2e-3]
            assert all(each["ts"] + each["dur"] <= end + 2e-3 for end in ends)
            ends.append(each["ts"] + each["dur"])
    return trace["traceEvents"]


def test_the_trace_has_rows_and_counters_and_the_bytes_of_each_drive(tmp_path: Path) -> None:
    log, out = logged(tmp_path / "run.jsonl", event()), tmp_path / "step.json"
    result = call("timeline", log, "-o", out)
    assert result.exit_code == 0, result.output
    assert "drive 2: /mnt/<c>" in result.output
    events = check_trace(json.loads(out.read_text()))
    slices = [(each["name"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"]
    assert [(name, round(ts / 1e5), round(dur / 1e3)) for name, ts, dur in slices] == [
        ("step 3", 0, 600),
        ("update", 5, 100),
        ("forward layers.0", 0, 100),
        ("forward layers.1", 1, 100),
        ("backward layers.0", 4, 100),
        ("backward layers.1", 3, 100),
        ("stall", 2, 30),
        ("write", 0, 100),
        ("write", 0, 100),
        ("read", 3, 100),
        ("read", 4, 100),
        ("read", 4, 0),
    ]
    assert max(each["args"]["live"] for each in events if each["name"] == "memory (bytes)") == 8 * MIB
    moved = [each["args"] for each in events if each["name"] in {"read", "write"}]
    assert sum(told["bytes"] for told in moved if told["drive"] == "/mnt/a") == 6 * MIB


def test_the_picture_is_of_the_same_step(tmp_path: Path) -> None:
    timeline = timeline_of(read_run_log(logged(tmp_path / "run.jsonl", event())))
    with rok.drawing():
        memory, *drives, lanes = timeline_figure(timeline).axes
    assert memory.get_ylim()[0] == 0
    assert [axes.get_title(loc="right") for axes in drives] == ["drive 0", "drive 2", "host memory"]
    assert memory.get_legend_handles_labels()[1][-1] == "budget 10.0 MiB"
    written = next(patch for patch in drives[0].patches if patch.get_label() == "written")
    values, edges, _ = written.get_data()  # type: ignore[attr-defined]
    unit = {"MB/s": 1e6}[drives[0].get_ylabel()]
    assert sum(values * (edges[1:] - edges[:-1])) * unit == pytest.approx(3 * MIB)
    assert [label.get_text() for label in lanes.get_yticklabels()] == [
        "forward",
        "backward",
        "update",
        "stall",
    ]
    timeline.write(tmp_path / "a.svg")
    ET.fromstring((tmp_path / "a.svg").read_text())


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    log = logged(tmp_path / "run.jsonl", event())
    with pytest.raises(
        ConfigError, match=r"must end in \.svg or \.png, and the name of a trace must end in \.json"
    ):
        timeline_of(read_run_log(log)).write(tmp_path / "a.pdf")
    assert call("timeline", log).exit_code == 2
    before = log.read_bytes()
    json_log = log.rename(tmp_path / "run.json")
    assert "is a run log" in call("timeline", json_log, "-o", json_log).output
    assert json_log.read_bytes() == before
