"""The run logs of several ranks, put together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from commands import call

from tba_offload.errors import RunLogError
from tba_offload.report.log import RunHeader, RunLogWriter, StepRecord, read_run_log
from tba_offload.report.ranks import merged, path_of_rank, paths_of_ranks, read_runs

if TYPE_CHECKING:
    from pathlib import Path

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
