from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest
from children import environment
from click.testing import CliRunner, Result

import tba_offload
from tba_offload import cli
from tba_offload.errors import TbaError
from tba_offload.report.log import RunHeader, RunLogWriter, StepRecord

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two run logs of six steps each: keep, and offload at a fifth of its memory."""
    return [
        write_run(tmp_path / f"{strategy}.jsonl", strategy, peak=peak, seconds=seconds)
        for strategy, peak, seconds in (("keep", 1000, 0.50), ("offload", 200, 0.52))
    ]


def write_run(path: Path, strategy: str, *, peak: int, seconds: float) -> str:
    header = RunHeader(strategy=strategy, model={"batch_size": 2})
    with RunLogWriter(path, header) as log:
        for step in range(6):
            log.write(
                StepRecord(
                    step=step,
                    seconds=seconds + (step == 1),
                    model_flops=1e12,
                    activation_peak_bytes=peak * 2**20,
                    peak_source="cuda allocator",
                    gradients_allocated=True,
                )
            )
    return str(path)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def test_rok_prints_table_pareto_set_and_advice(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("rok", *runs)
    assert (result.exit_code, result.stderr) == (0, "")
    heading, _, keep, offload, *rest = result.stdout.splitlines()
    assert heading.startswith("| Strategy ")
    assert keep.split()[1:10:2] == ["keep", "2", "1000", "2.00", "0.500"]
    assert offload.split()[1:10:2] == ["offload", "2", "200", "1.92", "0.520"]
    assert "Pareto set: offload at batch size 2; keep at batch size 2." in rest
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take the output for a terminal
    assert "───" in call("rok", *runs).stdout


def test_rok_json_is_one_object_beside_every_picture_asked_for(runs: list[str], tmp_path: Path) -> None:
    svg, png = tmp_path / "rok.svg", tmp_path / "rok.png"
    result = call("rok", "--json", *runs, "-o", str(svg), "--output", str(png), "--warmup", "0")
    document = json.loads(result.stdout)
    assert set(document) == {"points", "advice"}
    assert [point["strategy"] for point in document["points"]] == ["keep", "offload"]
    assert [point["steps"] for point in document["points"]] == [6, 6]
    assert svg.read_bytes().startswith(b"<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_rok_csv_goes_to_the_standard_output_or_to_a_file(runs: list[str], tmp_path: Path) -> None:
    said = call("rok", *runs, "--csv", "-").stdout
    assert [line["source"] for line in csv.DictReader(io.StringIO(said))] == runs
    result = call("rok", *runs, "--csv", str(tmp_path / "points.csv"))
    assert result.stdout.startswith("| Strategy ")
    assert (tmp_path / "points.csv").read_text() == said


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'RUN.jsonl...'"),
        (("a.jsonl", "--warmup", "-1"), "-1 is not in the range x>=0"),
        (("a.jsonl", "--json", "--csv", "-"), "--json and --csv - both want the standard output"),
        (("a.jsonl", "--nonsense"), "No such option"),
    ],
)
def test_a_wrong_command_line_has_exit_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = call("rok", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def assert_one_line(result: Result, message: str) -> None:
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"Error: {message}\n"


def test_rok_leaves_out_a_run_that_failed_before_its_first_step(runs: list[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    RunLogWriter(empty, RunHeader(strategy="recompute")).close()
    result = call("rok", *runs, str(empty))
    assert result.exit_code == 0
    assert result.stderr == f"{empty}: has no steps, so it is left out\n"
    assert result.stdout == call("rok", *runs).stdout
    assert call("rok", str(empty)).exit_code == 1


def test_a_log_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    message = f"{path}: the run log cannot be read: No such file or directory"
    assert_one_line(call("rok", str(path)), message)
    assert_one_line(call("rok", "--json", str(path)), message)


def test_what_cannot_be_done_is_one_line(runs: list[str]) -> None:
    assert_one_line(
        call("rok", *runs, "--warmup", "6"), f"{runs[0]}: 6 steps, and none counts after the warm-up"
    )
    message = "rok.pdf: a picture's name must end in .svg or .png"
    assert_one_line(call("rok", *runs, "-o", "rok.pdf"), message)
    message = f"{runs[0]}: is a run log, and stays as it is; choose another name"
    assert_one_line(call("rok", *runs, "--csv", runs[0]), message)


@pytest.mark.parametrize(("option", "name"), [("-o", "rok.svg"), ("--csv", "rok.csv")])
def test_a_file_that_cannot_be_written_is_one_line(
    runs: list[str], tmp_path: Path, option: str, name: str
) -> None:
    path = tmp_path / "missing" / name
    result = call("rok", *runs, option, str(path))
    assert_one_line(result, f"{path}: cannot be written: No such file or directory")


def test_any_command_may_raise_what_the_package_raises() -> None:
    @click.group(cls=type(cli.main))
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        raise TbaError("first\n  second")

    assert_one_line(CliRunner().invoke(group, ["fail"]), "first second")


def test_a_bug_is_not_dressed_up_as_a_users_error() -> None:
    @click.group(cls=type(cli.main))
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        raise KeyError("bug")

    assert isinstance(CliRunner().invoke(group, ["fail"]).exception, KeyError)


# The program


def test_help_names_the_commands() -> None:
    result = call("-h")
    assert result.exit_code == 0
    assert "rok" in result.stdout


def test_version() -> None:
    assert call("--version").stdout == f"tba-offload, version {tba_offload.__version__}\n"


def test_the_module_is_the_same_program(runs: list[str]) -> None:
    command = [sys.executable, "-m", "tba_offload", "rok", "--json", *runs]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    assert done.stdout == call("rok", "--json", *runs).stdout
    assert done.stderr == ""


def test_rok_never_imports_torch(runs: list[str], tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from tba_offload.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'megatron', 'matplotlib.pyplot'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", script, "rok", *runs, "-o", str(tmp_path / "rok.png")]
    subprocess.run(command, check=True, capture_output=True, env=environment())
