"""The run logs of several ranks, put together."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from tba_offload.cli import main
from tba_offload.errors import RunLogError
from tba_offload.report import rok
from tba_offload.report.log import RunHeader, RunLog, RunLogWriter, StepRecord, read_run_log
from tba_offload.report.ranks import merged, path_of_rank, paths_of_ranks, read_runs

GIB = 2**30


def write(
    path: Path, rank: int, ranks: int = 2, *, steps: int = 3, run: str | None = "one", **more: object
) -> Path:
    """The log of one rank; rank 1 is slower and has less in memory than rank 0, and knows the loss."""
    header = RunHeader(strategy="offload", run=run, rank=rank, ranks=ranks, model={"batch_size": 4})
    with RunLogWriter(path, header) as writer:
        for step in range(1, steps + 1):
            record = StepRecord(
                step=step,
                seconds=1.0 + rank,
                stall_seconds=0.5 - 0.25 * rank,
                loss=float(step) if rank else None,
                tokens=100,
                model_flops=1e12,
                activation_peak_bytes=(2 - rank) * GIB,
                peak_source="cuda allocator",
                offloaded_bytes=1000,
                in_flight_peak_bytes=10 + rank,
                scopes=4,
            )
            writer.write(record)
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


def two_logs(*records: StepRecord) -> list[RunLog]:
    headers = [RunHeader(strategy="keep", run="a", rank=rank, ranks=2) for rank in (0, 1)]
    return [
        RunLog(header=header, steps=(record,), path=Path(f"run.rank{header.rank}.jsonl"))
        for header, record in zip(headers, records, strict=True)
    ]


def test_a_step_that_a_rank_skipped_is_skipped_and_memory_is_that_of_the_fullest() -> None:
    one = StepRecord(step=1, seconds=1.0, gradient_bytes=5, loss=math.inf)
    other = StepRecord(step=1, seconds=1.0, gradient_bytes=7, loss=-math.inf, skipped=True)
    (both,) = merged(two_logs(one, other)).steps
    assert (both.skipped, both.gradient_bytes, both.state_bytes) == (True, 7, None)
    assert both.loss is not None
    assert math.isnan(both.loss)


def test_a_step_takes_as_long_as_on_the_slowest_rank_with_its_update() -> None:
    """Ranks wait for one another in backward or in the update."""
    times = [(1.0, 0.5), (1.375, 0.125)]
    logs = two_logs(*(StepRecord(step=1, seconds=one, optimizer_seconds=two) for one, two in times))
    (step,) = merged(logs).steps
    assert step.seconds_with_update == 1.5


def test_a_run_of_ranks_is_one_point(two_ranks: list[Path]) -> None:
    (point,) = rok.points(two_ranks)
    assert point.activation_peak_bytes == 2 * GIB
    assert point.throughput == 2e12 / 2.0
    assert point.source.endswith("run.jsonl")


def test_the_name_of_the_run_stands_for_its_ranks(two_ranks: list[Path], tmp_path: Path) -> None:
    write(tmp_path / "running.rank0.jsonl", 0, run="another")  # a longer name is another run
    (tmp_path / "run.rank9.txt").touch()
    assert paths_of_ranks(tmp_path / "run.jsonl") == sorted(two_ranks)
    done = CliRunner().invoke(main, ["rok", str(tmp_path / "run.jsonl"), "--csv", "-"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[1].startswith(f"offload,4,{2 * GIB},{1e12},FLOP/s,2.0")


def test_a_rank_that_stopped_a_step_earlier_ends_the_run(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{rank}.jsonl", rank, steps=3 - rank) for rank in (0, 1)]
    (log,) = read_runs(paths)
    assert [step.step for step in log.steps] == [1, 2]


def test_a_missing_or_doubled_rank_is_an_error(two_ranks: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="that of rank 0 is missing"):
        read_runs(two_ranks[:1])
    again = write(tmp_path / "again.jsonl", 0)
    with pytest.raises(RunLogError, match="one rank has two"):
        merged([read_run_log(path) for path in [*two_ranks, again]])
    with pytest.raises(RunLogError, match=r"none\.jsonl: the run log cannot be read"):
        read_runs([tmp_path / "none.jsonl"])
