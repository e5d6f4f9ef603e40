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
from run_logs import MIB, logged

import tba_offload as tba
from tba_offload import cli
from tba_offload.errors import ConfigError, MissingDependencyError, RunLogError
from tba_offload.report.log import (
    TIMELINE,
    RunHeader,
    RunLogWriter,
    StepRecord,
    TimelineEvent,
    read_event,
    read_run_log,
)
from tba_offload.report.ranks import path_of_rank
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


OF_DRIVES = {
    "updates": [[0.5, 0.6]],
    "budget": 10 * MIB,
    "window": 4 * MIB,
    "drives": [[0, "/mnt/a"], [2, "/mnt/<c>"], [3, "host memory"]],
    "moves": [
        [0, True, 0.0, 0.1, 3 * MIB, 0],
        [1, True, 0.05, 0.15, 1 * MIB, 1],
        [0, False, 0.3, 0.4, 2 * MIB, 2],
        [0, False, 0.35, 0.45, 1 * MIB, 3],
        [2, False, 0.4, 0.4, 1 * MIB, 4],
    ],
}
"""What logs tell since drives are told apart; the third drive moves a MiB in less than a microsecond."""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, arguments)))


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, held against the format: kinds, fields, and slices of a row that nest."""
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
        ends: list[float] = []
        for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
            ends = [end for end in ends if end > each["ts"] + 2e-3]
            assert all(each["ts"] + each["dur"] <= end + 2e-3 for end in ends)
            ends.append(each["ts"] + each["dur"])
    return trace["traceEvents"]


def test_the_trace_has_rows_of_layers_and_waits_and_counters(tmp_path: Path) -> None:
    events = check_trace(trace_of(timeline_of(read_run_log(logged(tmp_path / "run.jsonl", event())))))
    slices = [(each["name"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"]
    assert [(name, round(ts / 1e5), round(dur / 1e3)) for name, ts, dur in slices] == [
        ("step 3", 0, 500),
        ("forward", 0, 200),
        ("backward", 3, 200),
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
        (OF_DRIVES | {"drives": []}, "bytes were moved by no drive"),
        (OF_DRIVES | {"moves": [[0, "x", 0.0, 0.1, 5, 0]]}, "moves.0.1"),
        ({"points": [[0.0, -1, 0, 0, 0, 0]]}, "points.0.1: Input should be greater"),
        ({"stalls": [[0.0, "nan"]]}, "stalls.0.1"),
    ],
)
def test_a_damaged_event_is_named(tmp_path: Path, damage: dict[str, Any], said: str) -> None:
    log = read_run_log(logged(tmp_path / "run.jsonl", event() | damage))
    with pytest.raises(RunLogError, match=rf"run\.jsonl: the timeline event is damaged: .*{re.escape(said)}"):
        timeline_of(log)


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


def test_each_drive_has_rows_and_counters_that_add_up(tmp_path: Path) -> None:
    told = timeline_of(read_run_log(logged(tmp_path / "run.jsonl", event(**OF_DRIVES))))
    events = check_trace(trace_of(told))
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    moved = [
        (rows[each["tid"]], each["name"], each["args"]["bytes"] // MIB)
        for each in events
        if each.get("cat") == "transfer"
    ]
    assert moved == [
        ("drive 0 (/mnt/a): write 0", "write", 3),
        ("drive 2 (/mnt/<c>): write 0", "write", 1),
        ("drive 0 (/mnt/a): read 0", "read", 2),
        ("drive 0 (/mnt/a): read 1", "read", 1),
        ("host memory: read 0", "read", 1),
    ]
    for name, word, mib in (
        ("drive 0: written (bytes/s)", "written", 3),
        ("drive 2: written (bytes/s)", "written", 1),
        ("drive 0: read (bytes/s)", "read", 3),
        ("host memory: read (bytes/s)", "read", 1),
    ):
        counts = [(each["ts"], each["args"][word]) for each in events if each["name"] == name]
        nbytes = sum((until - since) / 1e6 * rate for (since, rate), (until, _) in pairwise(counts))
        assert round(nbytes / MIB, 6) == mib
        assert round(counts[-1][1]) == 0


def test_updates_and_the_budget_are_in_the_trace(tmp_path: Path) -> None:
    told = timeline_of(read_run_log(logged(tmp_path / "run.jsonl", event(**OF_DRIVES))))
    events = check_trace(trace_of(told))
    updates = [(each["ts"], each["dur"]) for each in events if each["name"] == "update"]
    assert updates == [(500_000, 100_000)]
    limits = [(each["ts"], each["args"]) for each in events if each["name"] == "budget (bytes)"]
    both = {"activations": 10 * MIB, "in flight": 4 * MIB}
    assert limits == [(0, both), (600_000, both)]


def test_phases_of_several_micro_batches_are_told_apart() -> None:
    """Forward, forward, backward, forward, backward, backward, as pipelines have them."""
    scopes = [[0, 0, 0.0, 0.1, 0.3], [0, 1, 0.1, 0.2, 0.6], [0, 2, 0.4, 0.5, 0.7]]
    told = read_event(
        TimelineEvent, event(scopes=scopes, backward_ends=[0.35, 0.65, 0.8], updates=[[0.8, 0.9]])
    )
    assert told.phases() == [
        ("forward", 0.0, 0.2),
        ("backward", 0.3, 0.35),
        ("forward", 0.4, 0.5),
        ("backward", 0.6, 0.65),
        ("backward", 0.7, 0.8),
        ("update", 0.8, 0.9),
    ]


def test_backward_of_the_first_layer_ends_where_that_of_embeddings_begins() -> None:
    until = [ended for _, _, ended in read_event(TimelineEvent, event(layers_left=[0.42])).backwards()]
    assert until == [0.42, 0.4]
    assert [ended for _, _, ended in read_event(TimelineEvent, event()).backwards()] == [0.5, 0.4]


def test_the_picture_tells_drives_parts_of_memory_and_the_budget(tmp_path: Path) -> None:
    points = [[0.0, 0, 0, 0, 0, 0, 0, 0], [0.2, 8 * MIB, 2 * MIB, MIB, 0, 0, MIB, MIB]]
    told = read_event(TimelineEvent, event(**OF_DRIVES, points=points))
    write_timeline(told, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert "mnt" not in text
    for label in (
        *("drive 0", "drive 2", "host memory", "written", "update", "peak 8.00 MiB", "budget 10.0 MiB"),
        *(
            "in flight",
            "read ahead",
            "in use, or refused by drives",
            "left by layers",
            "all else",
            "backward",
        ),
    ):
        assert f">{label}<" in text, label


def test_a_step_that_moves_nothing_has_no_panel_of_drives(tmp_path: Path) -> None:
    still = event(points=[[0.0, 0, 0, 0, 0, 0], [0.2, 8 * MIB, 0, 0, 0, 0]])
    picture = tmp_path / "step.svg"
    assert call("timeline", logged(tmp_path / "run.jsonl", still), "-o", picture).exit_code == 0
    assert "peak 8.00 MiB" in picture.read_text()
    assert "all drives" not in picture.read_text()


def test_a_budget_far_above_the_step_does_not_flatten_it(tmp_path: Path) -> None:
    write_timeline(read_event(TimelineEvent, event(budget=1000 * MIB)), tmp_path / "step.svg")
    assert ">budget 1000 MiB, above<" in (tmp_path / "step.svg").read_text()


def test_a_picture_of_many_points_is_small_and_has_the_peak(tmp_path: Path) -> None:
    heights = [MIB] * 20_000
    heights[12_345] = 77 * MIB
    points = [[number / 1e5, live, 0, 0, 0, 0] for number, live in enumerate(heights)]
    write_timeline(read_event(TimelineEvent, event(points=points)), tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert ">peak 77.0 MiB<" in text
    assert len(text) < 200_000


def test_many_drives_share_the_last_panel(tmp_path: Path) -> None:
    drives = [[number, f"/mnt/{number}"] for number in range(11)]
    moves = [[number, True, 0.0, 0.5, MIB, number] for number in range(11)]
    write_timeline(read_event(TimelineEvent, event(drives=drives, moves=moves)), tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert ">drive 6<" in text
    assert ">drive 7<" not in text
    assert ">4 others<" in text


@pytest.mark.parametrize(
    "bare",
    [
        {"scopes": [], "backward_ends": [], "stalls": [], "points": []},
        OF_DRIVES | {"points": []},
        {"updates": [[0.1, 0.2], [0.6, 0.6]]},
        {"scopes": [], "backward_ends": [], "stalls": [], "points": [[0.0, 0, 0, 0, 0, 0]]},
        {"scopes": [[0, 0, 0.1, None, None]]},
        {"points": [[0.1, 5, 0, 0, 7, 0], [0.1, 5, 0, 0, 9, 0]]},
        {"points": [[0.1, 5, 0, 0, 7, 0], [math.nextafter(0.1, 1), 5, 0, 0, 9, 0]]},
        *(
            {"scopes": [], "backward_ends": [], "stalls": [], "points": [[0.0] + [0] * 5, [tiny] + [9] * 5]}
            for tiny in (1e-9,)
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


def test_of_several_ranks_the_fullest_is_drawn(tmp_path: Path) -> None:
    for rank, mib in enumerate((3, 9, 6)):
        points = [[0.0, 0, 0, 0, 0, 0], [0.2, mib * MIB, 0, 0, 0, 0]]
        path = path_of_rank(tmp_path / "run.jsonl", rank)
        with RunLogWriter(path, RunHeader(strategy="offload", run="a", rank=rank, ranks=3)) as log:
            log.write(StepRecord(step=3, seconds=0.5, activation_peak_bytes=mib * MIB))
            log.note(TIMELINE, event(points=points))
    assert call("timeline", tmp_path / "run.jsonl", "-o", tmp_path / "step.svg").exit_code == 0
    assert "peak 9.00 MiB" in (tmp_path / "step.svg").read_text()


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
