"""What a run log promises: what is written is read back, a crash costs a line, and training goes on."""

from __future__ import annotations

import json
import resource
import signal
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from children import run_python
from commands import call
from store_contract import descriptors

from tba_offload.errors import RunLogError
from tba_offload.report.log import (
    RunHeader,
    RunLog,
    RunLogWriter,
    StepRecord,
    counted_steps,
    read_run_log,
    timed_steps,
)
from tba_offload.report.ranks import merged, path_of_rank, paths_of_ranks, read_runs

HEADER = RunHeader(
    strategy="offload",
    versions={"torch": "2.13.0"},
    hardware={"gpu": None, "cores": 2},
    model={"name": "gpt", "layers": 24, "batch_size": 4},
    policy="default: offload\n",
    store={"kind": "file", "paths": {"/mnt/a": "O_DIRECT"}, "alignment": 512},
)
SAMPLES = {"int": 7, "float": 0.1 + 0.2, "bool": True, "str": "cuda allocator"}
"""A value of each type, by its first word."""

RECORD = StepRecord(**{each.name: SAMPLES[str(each.type).split()[0]] for each in fields(StepRecord)})


def write_log(path: Path, *records: StepRecord, header: RunHeader = HEADER) -> Path:
    with RunLogWriter(path, header) as log:
        for record in records:
            log.write(record)
    return path


# What is written is read back


def test_every_field_comes_back(tmp_path: Path) -> None:
    assert not [each.name for each in fields(StepRecord) if getattr(RECORD, each.name) == each.default]
    plain = StepRecord(step=4, seconds=1.0)
    path = write_log(tmp_path / "run.jsonl", RECORD, plain)
    log = read_run_log(path)
    assert (log.header, log.steps, log.path) == (HEADER, (RECORD, plain), path)
    assert log.others == ()
    assert all(line.isascii() for line in path.read_text().splitlines())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("loss", [float("nan"), float("-inf"), 5e-324])
def test_every_loss_comes_back_from_plain_json(tmp_path: Path, loss: float) -> None:
    path = write_log(tmp_path / "run.jsonl", StepRecord(step=1, seconds=1.0, loss=loss))
    assert str(read_run_log(path).steps[0].loss) == str(loss)
    json.loads(path.read_text().splitlines()[1], parse_constant=pytest.fail)


# What is written outlives a crash, and is nobody else's


def test_a_killed_process_leaves_every_line(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from tba_offload.report.log import RunHeader, RunLogWriter, StepRecord\n"
        "log = RunLogWriter(sys.argv[1], RunHeader(strategy='keep'))\n"
        "for step in range(3):\n"
        "    log.write(StepRecord(step=step, seconds=1.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "run.jsonl"
    done = run_python("-c", program, path)
    assert done.returncode == -signal.SIGKILL
    assert [step.step for step in read_run_log(path).steps] == [0, 1, 2]


def test_cut_anywhere_a_log_keeps_its_whole_lines(tmp_path: Path) -> None:
    content = write_log(tmp_path / "run.jsonl", StepRecord(step=1, seconds=1.0), RECORD).read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]
    cut = tmp_path / "cut.jsonl"
    for length in (*ends, *range(ends[0], len(content), 7)):
        cut.write_bytes(content[:length])
        log = read_run_log(cut)
        assert len(log.steps) == sum(end <= length for end in ends) - 1
    for begin in (b"", b"\n\n", content[: ends[0] - 1]):
        cut.write_bytes(begin)
        with pytest.raises(RunLogError, match="not a run log: the file has no complete line"):
            read_run_log(cut)


def test_a_log_is_never_overwritten_and_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, HEADER) as log:
        with pytest.raises(RunLogError, match=r"the file exists.*for example run\.rank0\.jsonl"):
            RunLogWriter(path, HEADER)
        log.write(RECORD)
    before, opened = path.read_bytes(), descriptors()
    with pytest.raises(RunLogError, match="the file exists, and run logs are never overwritten"):
        RunLogWriter(path, HEADER)
    assert path.read_bytes() == before
    assert descriptors() == opened


@pytest.mark.parametrize(
    ("name", "said"),
    [("link", "the file exists"), ("absent/run.jsonl", "the directory does not exist: mkdir -p ")],
)
def test_only_a_new_file_becomes_a_log(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(RunLogError, match=said):
        RunLogWriter(tmp_path / name, HEADER)
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("cause", ["full", "removed"])
def test_a_log_that_cannot_be_written_is_told_once_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, HEADER) as log:
        log.write(RECORD)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            if cause == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
            else:
                path.unlink()
            log.write(replace(RECORD, step=4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        log.write(replace(RECORD, step=5))
        log.note("news", {})
    (record,) = caplog.records
    assert "run.jsonl: the run log cannot be written: " in record.getMessage()
    assert "Training continues. Make room on the disk" in record.getMessage()
    if cause == "full":
        assert read_run_log(path).steps == (RECORD,)


# What is no run log is named


@pytest.mark.parametrize("schema", [2, "1", None])
def test_another_schema_is_refused_and_both_are_named(tmp_path: Path, schema: object) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"event": "run", "schema": schema, "strategy": "keep"}) + "\n")
    with pytest.raises(RunLogError, match=rf"has schema {schema!r}, and this version reads schema 1"):
        read_run_log(path)


# Which steps count


def test_steps_that_count_for_figures_are_told_by_one_rule() -> None:
    sources = {1: "mallinfo2", 6: "mallinfo2"}
    steps = tuple(
        StepRecord(step=number, seconds=1.0, skipped=number == 5, peak_source=sources.get(number))
        for number in range(1, 9)
    )
    log = RunLog(header=HEADER, steps=steps, path=Path("run.jsonl"))
    counted = counted_steps(log)
    assert [step.step for step in counted] == [4, 6, 7, 8]
    assert [step.step for step in timed_steps(counted)] == [4, 7, 8]
    assert timed_steps(counted[1:2]) == counted[1:2]  # better than none
    counts = [len(counted_steps(replace(log, steps=steps[:total]))) for total in (0, 1, 2, 7)]
    assert counts == [0, 1, 1, 3]


# The run logs of several ranks, put together


GIB = 2**30


def write(path: Path, rank: int, *, steps: int = 3, run: str = "one") -> Path:
    """The log of one rank; rank 1 is slower and has less in memory than rank 0, and knows the loss."""
    header = RunHeader(strategy="offload", run=run, rank=rank, ranks=2, model={"batch_size": 4})
    with RunLogWriter(path, header) as writer:
        for step in range(1, steps + 1):
            times = {"seconds": 1.0 + rank, "stall_seconds": 0.5 - 0.25 * rank}
            sizes = {"activation_peak_bytes": (2 - rank) * GIB, "in_flight_peak_bytes": 10 + rank}
            more = {"tokens": 100, "model_flops": 1e12, "offloaded_bytes": 1000, "scopes": 4}
            figures: dict[str, Any] = {**times, **sizes, **more, "loss": float(step) if rank else None}
            writer.write(StepRecord(step=step, peak_source="cuda allocator", **figures))
    return path


@pytest.fixture
def two_ranks(tmp_path: Path) -> list[Path]:
    return [write(path_of_rank(tmp_path / "run.jsonl", rank), rank) for rank in (1, 0)]


def test_a_step_is_as_slow_as_its_slowest_rank_and_as_full_as_its_fullest(two_ranks: list[Path]) -> None:
    (log,) = read_runs(two_ranks)
    assert (log.path.name, log.header.rank, len(log.steps)) == ("run.jsonl", 0, 3)
    step = log.steps[1]
    assert (step.step, step.seconds, step.stall_seconds, step.loss) == (2, 2.0, 0.5, 2.0)
    assert (step.tokens, step.model_flops, step.offloaded_bytes, step.scopes) == (200, 2e12, 2000, 8)
    assert (step.activation_peak_bytes, step.in_flight_peak_bytes) == (2 * GIB, 11)
    assert step.peak_source == "cuda allocator"
    assert step.backward_seconds is None


def test_the_name_of_the_run_stands_for_its_ranks(two_ranks: list[Path], tmp_path: Path) -> None:
    write(tmp_path / "running.rank0.jsonl", 0, run="another")  # a longer name is another run
    (tmp_path / "run.rank9.txt").touch()
    assert paths_of_ranks(tmp_path / "run.jsonl") == sorted(two_ranks)
    done = call("rok", tmp_path / "run.jsonl", "--json")
    assert done.exit_code == 0, done.output
    (point,) = json.loads(done.output)["points"]
    assert (point["strategy"], point["batch_size"]) == ("offload", 4)
    assert (point["activation_peak_bytes"], point["step_seconds"]) == (2 * GIB, 2.0)
    assert (point["throughput"], point["unit"]) == (1e12, "FLOP/s")


def test_a_rank_that_stopped_a_step_earlier_ends_the_run(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{rank}.jsonl", rank, steps=3 - rank) for rank in (0, 1)]
    (log,) = read_runs(paths)
    assert [step.step for step in log.steps] == [1, 2]


def test_a_missing_or_doubled_rank_is_an_error(two_ranks: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="the log of rank 0 is missing"):
        read_runs(two_ranks[:1])
    again = write(tmp_path / "again.jsonl", 0)
    with pytest.raises(RunLogError, match="one rank has two logs"):
        merged([read_run_log(path) for path in [*two_ranks, again]])
    with pytest.raises(RunLogError, match=r"none\.jsonl: the run log cannot be read"):
        read_runs([tmp_path / "none.jsonl"])
