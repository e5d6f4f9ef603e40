"""A profile of torch.profiler and steps of a log in one trace: on one axis, and nothing of either is lost."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from run_logs import logged

from tba_offload import cli
from tba_offload.errors import ConfigError, RunLogError
from tba_offload.report.profile import read_profile
from tba_offload.report.run_log import TIMELINE
from tba_offload.report.timeline import write_merged
from tba_offload.report.timeline_event import checked_timeline

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

BASE = 1_790_857_026_000_000_000
"""Nanoseconds since the epoch at which the axes of the profiles here begin."""


def event(step: int, *, at: float | None, seconds: float = 0.5) -> dict[str, Any]:
    """A step of one layer that begins ``at`` seconds of the axis."""
    return {
        "event": TIMELINE,
        "step": step,
        "source": "mallinfo2",
        "names": ["layer"],
        "scopes": [[0, 0, 0.0, seconds / 2, seconds / 2]],
        "backward_ends": [seconds],
        "stalls": [],
        "points": [[0.0, 0, 0, 0, 0, 0]],
        "began_unix_ns": None if at is None else BASE + round(at * 1e9),
    }


def profile(path: Path, *, since: float = 10.0, until: float = 11.0, **more: Any) -> Path:
    """A profile as torch writes them, of one operation; processes of it are numbers and words."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": since * 1e6, "dur": 9.5},
        {"ph": "X", "name": "end", "pid": "Spans", "tid": "x", "ts": until * 1e6 - 1, "dur": 1},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": until * 1e6},
    ]
    document = {"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": events, **more}
    path.write_text(json.dumps(document))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, list(map(str, arguments)))


def slices(path: Path, name: str) -> list[tuple[float, float]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [(each["ts"], each["dur"]) for each in events if each["name"] == name and each["ph"] == "X"]


def test_a_step_lies_in_the_profile_where_it_was(tmp_path: Path) -> None:
    found = profile(tmp_path / "trace.json", deviceProperties=[{"id": 0}])
    write_merged([checked_timeline(event(4, at=10.25))], tmp_path / "both.json", found)
    assert slices(tmp_path / "both.json", "step 4") == [(10_250_000, 500_000)]
    assert slices(tmp_path / "both.json", "forward layer") == [(10_250_000, 250_000)]
    before, after = (json.loads(path.read_text()) for path in (found, tmp_path / "both.json"))
    assert after["traceEvents"][: len(before["traceEvents"])] == before["traceEvents"]
    assert {name: after[name] for name in before if name != "traceEvents"} == {
        name: value for name, value in before.items() if name != "traceEvents"
    }
    ours = after["traceEvents"][len(before["traceEvents"]) :]
    assert {each["pid"] for each in ours} == {78}


def test_a_profile_without_a_base_counts_from_the_epoch(tmp_path: Path) -> None:
    since = BASE / 1e9 + 10
    found = profile(tmp_path / "trace.json", since=since, until=since + 1, baseTimeNanoseconds=0)
    write_merged([checked_timeline(event(4, at=10.25))], tmp_path / "both.json", found)
    assert slices(tmp_path / "both.json", "step 4") == [(BASE / 1e3 + 10_250_000, 500_000)]


def test_a_compressed_profile_is_read(tmp_path: Path) -> None:
    found = profile(tmp_path / "trace.json")
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(found.read_bytes()))
    assert read_profile(packed).holds(checked_timeline(event(4, at=10.25)))


@pytest.mark.parametrize(
    ("at", "is_held"), [(9.4, False), (9.6, True), (10.2, True), (10.9, True), (11.1, False), (None, False)]
)
def test_a_step_is_profiled_if_a_part_of_it_is(tmp_path: Path, at: float | None, is_held: bool) -> None:
    assert read_profile(profile(tmp_path / "trace.json")).holds(checked_timeline(event(4, at=at))) is is_held


def test_the_command_takes_the_steps_that_were_profiled(tmp_path: Path) -> None:
    events = event(3, at=5.0), event(16, at=10.1, seconds=0.2), event(17, at=10.4, seconds=0.2)
    run, output = logged(tmp_path / "run.jsonl", *events), tmp_path / "both.json"
    result = call("timeline", run, "--profile", profile(tmp_path / "trace.json"), "-o", output)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"step 16: {output}\nstep 17: {output}\n"
    assert [len(slices(output, f"step {step}")) for step in (3, 16, 17)] == [0, 1, 1]


def test_the_command_takes_the_step_that_is_named(tmp_path: Path) -> None:
    run = logged(tmp_path / "run.jsonl", event(3, at=10.1), event(16, at=10.4))
    output, found = tmp_path / "both.json", profile(tmp_path / "trace.json")
    assert call("timeline", run, "--step", 3, "--profile", found, "-o", output).exit_code == 0
    assert [len(slices(output, f"step {step}")) for step in (3, 16)] == [1, 0]


def test_a_profile_of_another_time_is_an_error(tmp_path: Path) -> None:
    run = logged(tmp_path / "run.jsonl", event(3, at=5.0), event(16, at=None))
    found, output = profile(tmp_path / "trace.json"), tmp_path / "both.json"
    result = call("timeline", run, "--profile", found, "-o", output)
    assert result.exit_code == 1
    assert f"{found}: the profile is of another time than step 3, 16: profile a step" in result.stderr
    assert not output.exists()


def test_a_picture_holds_no_profile(tmp_path: Path) -> None:
    result = call("timeline", tmp_path / "none.jsonl", "--profile", "x.json", "-o", tmp_path / "step.svg")
    assert result.exit_code == 1
    assert "step.svg: a picture holds no profile; write a trace" in result.stderr
    with pytest.raises(ConfigError):
        write_merged([], tmp_path / "step.svg", tmp_path / "x.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not JSON",
        b"[1, 2]",
        b"{}",
        b'{"traceEvents": 5}',
        b'{"traceEvents": []}',
        b'{"traceEvents": [5, {"ph": "X"}, {"ph": "X", "ts": "now", "dur": 1}]}',
        b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": NaN}]}',
        b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1}], "baseTimeNanoseconds": "soon"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_profile_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(RunLogError, match=r"trace\.json: no profile of torch\.profiler; write one with"):
        read_profile(tmp_path / "trace.json")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match=r"trace\.json: the profile cannot be read: No such file"):
        read_profile(tmp_path / "trace.json")
    torn = tmp_path / "torn.json.gz"
    torn.write_bytes(gzip.compress(b"x" * 1000)[:-4])
    with pytest.raises(RunLogError, match=r"torn\.json\.gz: the profile cannot be read: "):
        read_profile(torn)
