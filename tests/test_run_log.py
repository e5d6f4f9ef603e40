from __future__ import annotations

import ast
import errno
import fcntl
import io
import json
import math
import stat
import subprocess
import sys
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tba_offload.errors import RunLogError
from tba_offload.report import run_log
from tba_offload.report.run_log import SCHEMA, RunHeader, RunLogWriter, StepRecord, read_run_log

HEADER = RunHeader(
    strategy="offload",
    versions={"torch": "2.13.0"},
    hardware={"gpu": None, "cores": 2},
    model={"name": "gpt", "layers": 24, "batch_size": 4},
    policy="default: offload\n",
    store={"kind": "file", "paths": {"/mnt/a": "O_DIRECT"}, "alignment": 512},
    notes={"why": "a test, naïve"},
)
RECORD = StepRecord(
    step=3,
    seconds=1.25,
    optimizer_seconds=0.05,
    skipped=True,
    forward_seconds=0.4,
    backward_seconds=0.8,
    stall_seconds=0.0,
    tokens=4096,
    model_flops=1.5e15,
    loss=0.1 + 0.2,
    activation_peak_bytes=2**31,
    gradient_bytes=2**20,
    state_bytes=2**21,
    peak_source="cuda allocator",
    own_peak_bytes=2**31 - 5,
    resident_peak_bytes=2**33,
    gradients_allocated=True,
    offloaded_bytes=1,
    read_bytes=2,
    host_offloaded_bytes=1,
    host_read_bytes=1,
    forwarded_bytes=3,
    deduplicated_bytes=4,
    rebuilt_bytes=12,
    kept_bytes=5,
    recomputed_scopes=6,
    scopes=24,
    in_flight_peak_bytes=7,
    given_up_bytes=8,
    held_bytes=9,
    fallback_kept_bytes=10,
    left_alone_scopes=11,
    predicted_peak_bytes=11,
    predicted_seconds=1.3,
)


def write_log(path: Path, *records: StepRecord, header: RunHeader = HEADER) -> Path:
    with RunLogWriter(path, header) as log:
        for record in records:
            log.write(record)
    return path


def write_lines(path: Path, *events: object) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def run_event(**more: object) -> dict[str, object]:
    return {"event": "run", "schema": SCHEMA, "strategy": "keep"} | more


def step_event(**more: object) -> dict[str, object]:
    return {"event": "step", "step": 0, "seconds": 1.0} | more


class FullDrive(io.FileIO):
    """A file that takes ``room`` more bytes, in small pieces, and then reports a full drive."""

    room = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        taken = min(len(data), FullDrive.room, 100)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        FullDrive.room -= taken
        return super().write(data[:taken])


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


# What is written is read back


def test_every_field_comes_back(tmp_path: Path) -> None:
    plain = StepRecord(step=4, seconds=1.0)
    log = read_run_log(write_log(tmp_path / "run.jsonl", RECORD, plain))
    assert log.header == HEADER
    assert log.steps == (RECORD, plain)
    assert log.path == tmp_path / "run.jsonl"
    assert not log.truncated
    assert log.others == ()


def test_the_example_record_leaves_no_field_at_its_default() -> None:
    untouched = [item.name for item in fields(RECORD) if getattr(RECORD, item.name) == item.default]
    assert untouched == []


def test_the_file_is_json_lines_of_ascii(tmp_path: Path) -> None:
    header, step = write_log(tmp_path / "run.jsonl", RECORD).read_text(encoding="ascii").splitlines()
    assert json.loads(header)["event"] == "run"
    assert json.loads(header)["schema"] == 1
    assert json.loads(step)["event"] == "step"
    assert json.loads(step)["loss"] == 0.30000000000000004


@given(loss=st.floats(allow_nan=False), seconds=st.floats(min_value=0, allow_infinity=False))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_floats_come_back_bit_for_bit(tmp_path: Path, loss: float, seconds: float) -> None:
    path = tmp_path / "run.jsonl"
    path.unlink(missing_ok=True)
    (step,) = read_run_log(write_log(path, StepRecord(step=0, seconds=seconds, loss=loss))).steps
    assert step.loss is not None
    assert (step.loss.hex(), step.seconds.hex()) == (loss.hex(), seconds.hex())


def test_a_nan_loss_comes_back_and_the_line_stays_strict_json(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl", StepRecord(step=0, seconds=1.0, loss=math.nan))

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads(path.read_text().splitlines()[1], parse_constant=refuse)
    assert line["loss"] == "nan"
    (step,) = read_run_log(path).steps
    assert step.loss is not None
    assert math.isnan(step.loss)


def test_not_finite_numbers_in_free_form_stay_words(tmp_path: Path) -> None:
    header = RunHeader(strategy="keep", notes={"clip": math.inf, "deep": [{"a": (-math.inf, 1.0)}]})
    log = read_run_log(write_log(tmp_path / "run.jsonl", header=header))
    assert log.header.notes == {"clip": "inf", "deep": [{"a": ["-inf", 1.0]}]}


def test_a_whole_number_is_a_float_where_the_field_is_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", run_event(), step_event(seconds=2, loss=3))
    (step,) = read_run_log(path).steps
    assert (type(step.seconds), type(step.loss)) == (float, float)


def test_a_new_header_says_when_it_was_made_in_utc() -> None:
    started = datetime.fromisoformat(RunHeader(strategy="keep").started)
    assert started.utcoffset() == timedelta(0)
    assert abs(datetime.now(started.tzinfo) - started) < timedelta(minutes=1)


# Writing


def test_each_line_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, HEADER) as log:
        assert read_run_log(path).steps == ()
        log.write(RECORD)
        assert read_run_log(path).steps == (RECORD,)


def test_a_killed_process_leaves_every_line(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from tba_offload.report.run_log import *\n"
        "log = RunLogWriter(sys.argv[1], RunHeader(strategy='keep'))\n"
        "for step in range(3): log.write(StepRecord(step=step, seconds=1.0))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "run.jsonl"], check=False)
    assert done.returncode == -9
    assert [step.step for step in read_run_log(tmp_path / "run.jsonl").steps] == [0, 1, 2]


def test_missing_parents_are_made_and_the_file_is_private(tmp_path: Path) -> None:
    path = write_log(tmp_path / "new" / "deeper" / "run.jsonl")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_with_content_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with pytest.raises(RunLogError, match=r"run\.jsonl: not empty, and run logs are never overwritten"):
        RunLogWriter(path, HEADER)
    assert path.read_text() == "precious"


def test_an_empty_file_is_used_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.touch(mode=0o640)
    path.chmod(0o640)
    assert read_run_log(write_log(path, RECORD)).steps == (RECORD,)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_another_writer_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunLogError, match="another process is writing this run log"):
            RunLogWriter(path, HEADER)


def test_a_file_system_without_locks_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = write_log(tmp_path / "run.jsonl", RECORD)
    assert read_run_log(path).steps == (RECORD,)
    with pytest.raises(RunLogError, match="not empty"):
        RunLogWriter(path, HEADER)


def test_a_directory_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="cannot be opened: Is a directory"):
        RunLogWriter(tmp_path, HEADER)


def test_a_step_of_an_older_version_has_what_it_did_not_write(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl", RECORD)
    header, step = map(json.loads, path.read_text().splitlines())
    for name in ("skipped", "optimizer_seconds", "gradient_bytes", "state_bytes"):
        del step[name]
    path.write_text(f"{json.dumps(header)}\n{json.dumps(step)}\n")
    (found,) = read_run_log(path).steps
    assert found.skipped is False
    assert (found.optimizer_seconds, found.gradient_bytes, found.state_bytes) == (None, None, None)


@pytest.mark.parametrize("refused", ["not empty", "no room"])
def test_no_descriptor_is_left_open_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    path = tmp_path / "run.jsonl"
    if refused == "not empty":
        path.write_text("precious")
    else:
        monkeypatch.setattr(io, "FileIO", FullDrive)
        FullDrive.room = 0
    before = open_descriptors()
    with pytest.raises(RunLogError):
        RunLogWriter(path, HEADER)
    assert open_descriptors() == before


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "FileIO", FullDrive)
    FullDrive.room = 1_000_000
    assert read_run_log(write_log(tmp_path / "run.jsonl", RECORD)).steps == (RECORD,)


def test_a_full_drive_closes_the_log_and_leaves_it_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "FileIO", FullDrive)
    FullDrive.room = 1_000_000
    path = tmp_path / "run.jsonl"
    log = RunLogWriter(path, HEADER)
    log.write(RECORD)
    FullDrive.room = 50
    with pytest.raises(RunLogError, match="cannot be written: No space left on device"):
        log.write(RECORD)
    FullDrive.room = 1_000_000
    with pytest.raises(RunLogError, match="closed"):
        log.write(RECORD)
    read = read_run_log(path)
    assert read.truncated
    assert read.steps == (RECORD,)


def test_a_closed_log_refuses_records_and_may_be_closed_again(tmp_path: Path) -> None:
    log = RunLogWriter(tmp_path / "run.jsonl", HEADER)
    log.close()
    log.close()
    with pytest.raises(RunLogError, match=r"run\.jsonl: the run log is closed"):
        log.write(RECORD)


def test_a_header_that_json_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    header = RunHeader(strategy="keep", store={"directory": Path("/mnt/nvme0")})
    with pytest.raises(RunLogError, match=r"the run event holds a value that JSON cannot: .*Path"):
        RunLogWriter(tmp_path / "run.jsonl", header)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("loss", "high", "float or null"),
        ("loss", True, "float or null"),
        ("tokens", 1.5, "int or null"),
        ("step", None, "int"),
        ("scopes", True, "int"),
        ("gradients_allocated", 1, "bool"),
        ("peak_source", 7, "str or null"),
        ("model_flops", 10**400, "float or null"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_both_ways(
    tmp_path: Path, field: str, value: object, legal: str
) -> None:
    values: dict[str, Any] = {"step": 0, "seconds": 1.0} | {field: value}
    with RunLogWriter(tmp_path / "written.jsonl", HEADER) as log:
        with pytest.raises(RunLogError, match=f'^"{field}" must be {legal}, and is '):
            log.write(StepRecord(**values))
        log.write(RECORD)  # a refused record harms nothing
    assert read_run_log(tmp_path / "written.jsonl").steps == (RECORD,)

    path = write_lines(tmp_path / "read.jsonl", run_event(), step_event(**{field: value}))
    with pytest.raises(RunLogError, match=rf'read\.jsonl:2: "{field}" must be {legal}, and is '):
        read_run_log(path)


# Reading what was cut off


def test_cut_anywhere_a_log_keeps_its_whole_lines(tmp_path: Path) -> None:
    content = write_log(tmp_path / "whole.jsonl", RECORD, RECORD).read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]
    path = tmp_path / "cut.jsonl"
    for length in range(ends[0] - 1, len(content)):
        path.write_bytes(content[:length])
        log = read_run_log(path)
        whole = sum(end - 1 <= length for end in ends)  # a line that lost only its end is whole
        assert log.steps == (RECORD,) * (whole - 1)
        assert log.truncated == (length not in {*ends, *(end - 1 for end in ends)})


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"event": "run", "sche'])
def test_a_log_without_a_whole_header_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(RunLogError, match=r"run\.jsonl: no run log, because it has no complete line"):
        read_run_log(path)


def test_zeros_at_the_end_count_as_cut_off(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl", RECORD)
    path.write_bytes(path.read_bytes() + bytes(4096))
    log = read_run_log(path)
    assert log.truncated
    assert log.steps == (RECORD,)


# Reading what is wrong


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "step", "step": 0, "sec',
        b"\xff\xfe",
        b"[1, 2]",
        b"17",
        b'{"step": 0}',
        b'{"event": 5}',
        b"[" * 100_000,
    ],
)
def test_a_corrupt_line_that_is_not_the_cut_off_end_is_an_error(tmp_path: Path, line: bytes) -> None:
    path = write_log(tmp_path / "run.jsonl", RECORD)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(RunLogError, match=r"run\.jsonl:3: not a line of a run log"):
        read_run_log(path)


def test_a_step_without_what_it_must_have_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", run_event(), {"event": "step", "step": 1})
    with pytest.raises(RunLogError, match=r"run\.jsonl:2: the step event lacks seconds"):
        read_run_log(path)


@pytest.mark.parametrize("schema", [2, 0, "1", None])
def test_another_schema_is_refused_and_both_are_named(tmp_path: Path, schema: object) -> None:
    path = write_lines(tmp_path / "run.jsonl", run_event(schema=schema))
    with pytest.raises(RunLogError, match=rf"run\.jsonl: written with schema {schema!r} .* reads schema 1"):
        read_run_log(path)


@pytest.mark.parametrize("first", [step_event(), {"event": "run"}, {"event": "other", "schema": 1}])
def test_a_file_that_starts_otherwise_is_no_run_log(tmp_path: Path, first: object) -> None:
    with pytest.raises(RunLogError, match=r"run\.jsonl:1: no run log"):
        read_run_log(write_lines(tmp_path / "run.jsonl", first))


def test_two_logs_in_one_file_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", run_event(), step_event(), run_event())
    with pytest.raises(RunLogError, match=r"run\.jsonl:3: a second header"):
        read_run_log(path)


def test_a_missing_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match=r"none\.jsonl: the run log cannot be read: No such file"):
        read_run_log(tmp_path / "none.jsonl")


# What a later version may add


def test_unknown_keys_are_kept_aside_and_written_back(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", run_event(cluster="a"), step_event(energy_joules=5.5))
    log = read_run_log(path)
    assert log.header.extra == {"cluster": "a"}
    assert log.steps[0].extra == {"energy_joules": 5.5}
    again = read_run_log(write_log(tmp_path / "again.jsonl", *log.steps, header=log.header))
    assert (again.header, again.steps) == (log.header, log.steps)


def test_unknown_events_are_kept_aside(tmp_path: Path) -> None:
    plan = {"event": "plan", "keep": [1, 2]}
    log = read_run_log(write_lines(tmp_path / "run.jsonl", run_event(), plan, step_event()))
    assert log.others == (plan,)
    assert len(log.steps) == 1


@pytest.mark.parametrize("key", ["seconds", "event"])
def test_an_extra_key_may_not_shadow_a_known_one(tmp_path: Path, key: str) -> None:
    with RunLogWriter(tmp_path / "run.jsonl", HEADER) as log:
        with pytest.raises(RunLogError, match=f"extra may not hold {key}"):
            log.write(StepRecord(step=0, seconds=1.0, extra={key: 2}))


def test_only_the_standard_library_is_imported() -> None:
    tree = ast.parse(Path(run_log.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"tba_offload.errors"}
