from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import resource
import stat
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tba_offload.errors import RunLogError
from tba_offload.report import log_reader
from tba_offload.report.log_reader import read_run_log
from tba_offload.report.log_writer import RunLogWriter
from tba_offload.report.run_log import SCHEMA, RunHeader, StepRecord

HEADER = RunHeader(
    strategy="offload",
    versions={"torch": "2.13.0"},
    hardware={"gpu": None, "cores": 2},
    model={"name": "gpt", "layers": 24, "batch_size": 4},
    policy="default: offload\n",
    store={"kind": "file", "paths": {"/mnt/a": "O_DIRECT"}, "alignment": 512},
    extra={"why": "a test, naïve"},
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
    gradient_peak_bytes=2**19,
    state_bytes=2**21,
    peak_source="cuda allocator",
    base_bytes=2**32,
    earlier_outputs_bytes=2**20,
    reserved_peak_bytes=44 * 2**30,
    device_peak_bytes=43 * 2**30,
    activation_budget_bytes=40 * 2**30,
    weights_read_bytes=2**25,
    weights_waited_seconds=0.03,
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
    reread_bytes=12,
    rescued_bytes=13,
    fallback_kept_bytes=10,
    checksum_seconds=0.004,
    drives_out_of_service=1,
    left_alone_scopes=11,
    planning_seconds=0.003,
    predicted_peak_bytes=11,
    predicted_seconds=1.3,
    predicted_device_peak_bytes=2**31,
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
    header = RunHeader(strategy="keep", hardware={"clip": math.inf, "deep": [{"a": (-math.inf, 1.0)}]})
    log = read_run_log(write_log(tmp_path / "run.jsonl", header=header))
    assert log.header.hardware == {"clip": "inf", "deep": [{"a": ["-inf", 1.0]}]}


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
        "from tba_offload.report.log_writer import *\n"
        "from tba_offload.report.run_log import *\n"
        "log = RunLogWriter(sys.argv[1], RunHeader(strategy='keep'))\n"
        "for step in range(3): log.write(StepRecord(step=step, seconds=1.0))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "run.jsonl"], check=False)
    assert done.returncode == -9
    assert [step.step for step in read_run_log(tmp_path / "run.jsonl").steps] == [0, 1, 2]


def test_the_file_is_private(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_directory_is_made_that_was_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "my logs" / "deeper" / "run.jsonl"
    with pytest.raises(RunLogError, match=rf"does not exist; make it: mkdir -p '{path.parent}'"):
        RunLogWriter(path, HEADER)
    assert list(tmp_path.iterdir()) == []


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


def events_of(path: Path) -> list[dict[str, Any]]:
    """Every line of a log, each of which has to be whole."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def write_steps(log: RunLogWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.write(StepRecord(step=step, seconds=1.0))


def test_a_full_drive_leaves_a_gap_that_the_log_tells_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(io, "FileIO", FullDrive)
    FullDrive.room = 1_000_000
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, HEADER) as log:
        write_steps(log, 1, 1)
        FullDrive.room = 50  # a part of the next line
        write_steps(log, 2, 2)
        assert [event["event"] for event in events_of(path)] == ["run", "step"]  # and no torn line
        write_steps(log, 3, 3)
        log.note("plan", {"step": 3})
        FullDrive.room = 1_000_000
        write_steps(log, 4, 6)
    _, *events = events_of(path)
    said = {"missing_steps": 3, "missing_events": 1, "reason": "No space left on device"}
    assert [event.get("step") for event in events] == [1, None, 5, 6]
    assert events[1] == {"event": "gap", **said}
    (warning,) = caplog.messages
    assert f"{path}: the run log cannot be written: No space left on device; training goes on" in warning


def test_a_log_on_a_full_drive_is_tried_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    class CountingDrive(FullDrive):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            tries.append(step)
            return super().write(data)

    monkeypatch.setattr(io, "FileIO", CountingDrive)
    FullDrive.room, step = 1_000_000, 0
    log = RunLogWriter(tmp_path / "run.jsonl", HEADER)
    FullDrive.room = 0
    tries.clear()
    for step in range(1, 200):
        log.write(StepRecord(step=step, seconds=1.0))
    assert tries == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    FullDrive.room = 1_000_000
    log.close()
    assert events_of(tmp_path / "run.jsonl")[-1]["missing_steps"] == 199


def test_a_limit_on_the_size_of_files_ends_no_training(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, HEADER) as log:
        write_steps(log, 1, 1)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
        try:
            write_steps(log, 2, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        write_steps(log, 4, 5)
    assert [event.get("missing_steps", event.get("step")) for event in events_of(path)[1:]] == [1, 3, 5]


def test_a_failing_drive_that_cannot_even_cut_the_line_off_is_cut_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(io, "FileIO", FullDrive)
    FullDrive.room = 1_000_000
    with RunLogWriter(path, HEADER) as log:
        FullDrive.room = 50
        with monkeypatch.context() as failing:
            failing.setattr(os, "ftruncate", fail)
            write_steps(log, 1, 1)
            assert read_run_log(path).truncated
            FullDrive.room = 1_000_000
            write_steps(log, 2, 2)
        write_steps(log, 3, 4)
    assert [event.get("missing_steps", event.get("step")) for event in events_of(path)[1:]] == [3, 4]


@pytest.mark.parametrize("gone", ["file", "directory"])
def test_a_log_that_vanished_is_made_anew_where_its_directory_is_there_again(
    tmp_path: Path, gone: str
) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    path = directory / "run.jsonl"
    with RunLogWriter(path, HEADER) as log:
        write_steps(log, 1, 1)
        path.unlink()
        if gone == "directory":
            directory.rmdir()
        write_steps(log, 2, 3)
        assert path.exists() == (gone == "file")  # a directory is not made twice
        directory.mkdir(exist_ok=True)
        write_steps(log, 4, 5)
    read = read_run_log(path)
    assert read.header == HEADER
    assert [step.step for step in read.steps] == ([3, 4, 5] if gone == "file" else [5])
    assert read.others == ({"event": "gap", "missing_steps": 1, **GONE},) or gone == "directory"


GONE = {"missing_events": 0, "reason": "the file was removed"}


@pytest.mark.parametrize("kept", ["nothing", "half a header", "the header", "half a step", "a step"])
def test_a_log_that_another_program_shortens_keeps_its_header_and_whole_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: str
) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, HEADER) as log:
        head = path.stat().st_size
        write_steps(log, 1, 1)
        step = path.stat().st_size
        write_steps(log, 2, 2)
        lengths = {"nothing": 0, "half a header": head // 2, "the header": head, "a step": step}
        os.truncate(path, lengths.get(kept, step - 20))
        write_steps(log, 3, 5)
    read = read_run_log(path)
    assert read.header == HEADER
    assert [step.step for step in read.steps] == ([1, 4, 5] if kept == "a step" else [4, 5])
    shortened = "another program has shortened the file"
    assert read.others == ({"event": "gap", "missing_steps": 1, "missing_events": 0, "reason": shortened},)
    assert read.complaints == ()
    assert caplog.text.count(shortened) == 1


def test_a_log_that_another_program_has_written_to_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, HEADER) as log:
        write_steps(log, 1, 1)
        path.write_text("mine\n")
        write_steps(log, 2, 5)
    assert path.read_text() == "mine\n"


def test_a_log_that_cannot_be_closed_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Remote(io.FileIO):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(io, "FileIO", Remote)
    log = RunLogWriter(tmp_path / "run.jsonl", HEADER)
    log.close()
    log.close()
    assert len(caplog.messages) == 1
    assert "Disk quota exceeded" in caplog.text


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "device"])
def test_only_a_regular_file_that_is_no_link_becomes_a_log(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.jsonl"
    target = tmp_path / "precious"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/full")
    else:
        path.symlink_to(target)
        if kind == "link":
            target.touch()
    with pytest.raises(RunLogError, match=r"symbolic link|not a regular file|cannot be opened"):
        RunLogWriter(path, HEADER)
    assert target.exists() == (kind == "link")
    assert not target.exists() or target.stat().st_size == 0


def test_a_name_that_is_too_long_is_an_error_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="cannot be opened: File name too long"):
        RunLogWriter(tmp_path / ("a" * 300), HEADER)


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
    (line, count) = read_run_log(path).complaints
    assert line.startswith(f'{path}:2: "{field}" must be {legal}, and is ')
    assert count == f"{path}: a line was damaged and left out"


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
        b'{"event": "x", "deep": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"event": "step", "step": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_corrupt_line_that_is_not_the_cut_off_end_is_named_and_skipped(tmp_path: Path, line: bytes) -> None:
    path = write_log(tmp_path / "run.jsonl", RECORD)
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes().splitlines()[1] + b"\n")
    log = read_run_log(path)
    assert log.steps == (RECORD, RECORD)
    assert log.skipped == 1
    assert log.bad_lines[0].startswith(f"{path}:3: not a line of a run log: ")
    path.write_bytes(line + b"\n" + path.read_bytes())
    with pytest.raises(RunLogError, match=r"run\.jsonl:1: not a line of a run log"):
        read_run_log(path)


def test_the_first_bad_lines_are_named_and_all_are_counted(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.jsonl", RECORD)
    path.write_bytes(path.read_bytes() + b"?\n" * 1000)
    log = read_run_log(path)
    assert log.skipped == 1000
    assert len(log.complaints) == 11
    assert log.complaints[-1] == f"{path}: 1000 lines were damaged and left out"


def test_a_line_of_any_length_is_read_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "LONGEST_LINE", 5000)
    path = write_log(tmp_path / "run.jsonl", RECORD)
    path.write_bytes(path.read_bytes() + b"x" * 12_000 + b"\n" + path.read_bytes().splitlines()[1] + b"\n")
    log = read_run_log(path)
    assert log.steps == (RECORD, RECORD)
    assert log.bad_lines == (f"{path}:3: longer than 5000 bytes",)


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_LINES"])
def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(log_reader, limit, 2)
    with pytest.raises(RunLogError, match=r"larger than 2 bytes|run\.jsonl:3: too long"):
        read_run_log(write_log(tmp_path / "run.jsonl", RECORD, RECORD))


@pytest.mark.parametrize("event", [step_event(), {"event": "other"}])
def test_lines_of_many_small_values_take_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: dict[str, Any]
) -> None:
    """An empty list of two bytes takes 64 bytes of memory."""
    monkeypatch.setattr(log_reader, "MOST_VALUES", 2500)
    hog = event | {"a": [[]] * 500}
    log = read_run_log(write_lines(tmp_path / "run.jsonl", run_event(), hog, hog, hog, step_event()))
    assert len(log.steps) + len(log.others) == 3
    assert log.bad_lines == (f"{log.path}:4: with what came before it, it holds more than 2500 values",)


def test_steps_of_a_long_run_are_read_whatever_they_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "MOST_VALUES", 10)
    log = read_run_log(write_log(tmp_path / "run.jsonl", *[RECORD] * 100, header=RunHeader(strategy="keep")))
    assert log.steps == (RECORD,) * 100


@pytest.mark.parametrize("header", [b"", b'{"event": "run", "schema": 1, "strategy": "keep"}\n'])
def test_a_line_without_an_end_is_not_read_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    """A file of /proc says that it is empty, and may come to terabytes."""
    monkeypatch.setattr(log_reader, "LONGEST_LINE", 1000)
    monkeypatch.setattr(log_reader, "MOST_BYTES", 5000)
    path = tmp_path / "run.jsonl"
    path.write_bytes(header + b"x" * 1_000_000)
    with path.open("rb") as file:
        monkeypatch.setattr(log_reader, "open_regular", lambda path, most: nullcontext(file))
        with pytest.raises(RunLogError, match=rf"run\.jsonl:{1 + bool(header)}: too long to be a run log"):
            read_run_log(path)
        assert file.tell() < 10_000


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.mkdir()
    before = open_descriptors()
    with pytest.raises(RunLogError, match=f"{path}: the run log cannot be read: (not a regular|a directory)"):
        read_run_log(path)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"names": ["a", "b"]}, "there are not as many names as layers"),
        ({"names": "a"}, "names: "),
        ({"drive": {"write": 0, "read": 1e9}}, "drive.write: "),
        ({"drive": {"write": "nan", "read": 1e9}}, "drive.write: "),
        ({"limits": {}}, "limits.window: "),
        ({"profile": {}}, "profile.kinds: "),
        ({"rates": [{}]}, "rates.0.tier: "),
    ],
)
def test_a_damaged_plan_is_named_and_skipped(tmp_path: Path, damage: dict[str, Any], said: str) -> None:
    plan = plan_event()
    log = read_run_log(write_lines(tmp_path / "run.jsonl", run_event(), plan, plan | damage))
    assert log.others == (plan,)
    assert f"run.jsonl:3: the plan event is damaged: {said}" in log.bad_lines[0]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"layers": [1]}, "do not fit together"),
        ({"timings": []}, "do not fit together"),
        ({"slots": [[1, 0, False, 0.0]]}, "a slot is of no layer"),
        ({"slots": [[0, 0, True, 0.0]]}, "its backward comes before its forward"),
        ({"slots": []}, "slots"),
        ({"rest_bytes": 2**60}, "rest_bytes"),
        ({"tail": -1.0}, "tail"),
        ({"timings": [{"auto": [1.0, 1.0]}]}, "timings"),
    ],
)
def test_a_damaged_profile_is_named_and_skipped(tmp_path: Path, damage: dict[str, Any], said: str) -> None:
    plan = plan_event()
    plan["profile"] = plan["profile"] | damage
    log = read_run_log(write_lines(tmp_path / "run.jsonl", run_event(), plan))
    assert log.others == ()
    assert "run.jsonl:2: the plan event is damaged: profile" in log.bad_lines[0]
    assert said in log.bad_lines[0]


def plan_event() -> dict[str, Any]:
    return {
        "event": "plan",
        "names": ["layers.0"],
        "profile": {
            "kinds": [{"activations": [[4096, 0.5, 0.5]], "small_bytes": 1, "input_bytes": 2}],
            "layers": [0],
            "timings": [{"offload": [0.5, 1.0]}],
            "slots": [[0, 0, False, 0.0], [0, 0, True, 0.0]],
            "tail": 0.0,
            "rest_bytes": 0,
        },
        "drive": {"write": 1e9, "read": 1e9},
        "limits": {"window": None},
    }


def test_a_step_without_what_it_must_have_is_named_and_skipped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", run_event(), {"event": "step", "step": 1})
    assert read_run_log(path).bad_lines == (f"{path}:2: the step event lacks seconds",)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"step": -5}, '"step" must be at least 0, and is -5'),
        ({"seconds": "nan"}, '"seconds" must be finite and at least 0, and is nan'),
        ({"seconds": "inf"}, '"seconds" must be finite and at least 0, and is inf'),
        ({"seconds": -1.5}, '"seconds" must be finite and at least 0, and is -1.5'),
        ({"stall_seconds": "-inf"}, '"stall_seconds" must be finite and at least 0, and is -inf'),
    ],
)
def test_a_step_that_cannot_have_been_is_named_and_skipped(
    tmp_path: Path, damage: dict[str, Any], said: str
) -> None:
    path = write_lines(tmp_path / "run.jsonl", run_event(), step_event() | damage, step_event(loss="nan"))
    log = read_run_log(path)
    assert log.bad_lines == (f"{path}:2: {said}",)
    assert len(log.steps) == 1


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
    other = {"event": "weather", "keep": [1, 2]}
    log = read_run_log(write_lines(tmp_path / "run.jsonl", run_event(), other, step_event()))
    assert log.others == (other,)
    assert len(log.steps) == 1


@pytest.mark.parametrize("key", ["seconds", "event"])
def test_an_extra_key_may_not_shadow_a_known_one(tmp_path: Path, key: str) -> None:
    with RunLogWriter(tmp_path / "run.jsonl", HEADER) as log:
        with pytest.raises(RunLogError, match=f"extra may not hold {key}"):
            log.write(StepRecord(step=0, seconds=1.0, extra={key: 2}))


def test_nothing_heavy_is_imported_to_read_steps() -> None:
    script = (
        "import sys; from tba_offload.report.log_reader import read_run_log\n"
        "print({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
