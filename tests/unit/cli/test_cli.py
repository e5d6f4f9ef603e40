from __future__ import annotations

import csv
import io
import json
import re
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


def test_rok_prints_table_pareto_set_and_advice(runs: list[str]) -> None:
    result = call("rok", *runs)
    assert result.exit_code == 0
    assert result.stderr == ""
    heading, _, keep, offload, *rest = result.stdout.splitlines()
    assert heading.startswith("| Strategy |")
    assert keep.split()[1:10:2] == ["keep", "2", "1000", "2.00", "0.500"]
    assert offload.split()[1:10:2] == ["offload", "2", "200", "1.92", "0.520"]
    assert "Pareto set: offload at batch size 2; keep at batch size 2." in rest
    assert (
        "- At batch size 2, offload has the lowest activation peak (200 MiB). Against keep, the fastest "
        "(1000 MiB): offload needs 80.0% less at 96.2% of the throughput."
    ) in rest


def test_rok_on_a_terminal_draws_the_table_with_lines(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take the output for a terminal
    result = call("rok", *runs)
    assert result.exit_code == 0
    assert "───" in result.stdout
    assert "| ---" not in result.stdout


@pytest.mark.parametrize(
    ("columns", "left_out"), [(60, "Quartiles, Steps:"), (80, ""), (150, ""), (None, "")]
)
def test_rok_leaves_out_what_has_no_room(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, columns: int | None, left_out: str
) -> None:
    if columns is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", call("rok", *runs).stdout)
    for figures in (["keep", "2", "1000", "2.00", "0.500"], ["offload", "2", "200", "1.92", "0.520"]):
        assert re.search(r"[ |]+".join(map(re.escape, figures)), printed)
    assert ("No room here for" in printed) is bool(left_out)
    assert left_out in printed
    if columns is None:
        assert runs[0] in printed


def test_rok_json_is_one_object_and_nothing_else(runs: list[str]) -> None:
    document = json.loads(call("rok", "--json", *runs).stdout)
    assert set(document) == {"points", "advice"}
    assert [point["strategy"] for point in document["points"]] == ["keep", "offload"]
    assert [point["activation_peak_bytes"] for point in document["points"]] == [1000 * 2**20, 200 * 2**20]
    assert [point["pareto"] for point in document["points"]] == [True, True]
    assert document["advice"][0].startswith("At batch size 2, offload has the lowest activation peak")


def test_rok_csv_to_the_standard_output_is_only_csv(runs: list[str]) -> None:
    lines = list(csv.DictReader(io.StringIO(call("rok", *runs, "--csv", "-").stdout)))
    assert [line["source"] for line in lines] == runs


def test_rok_csv_to_a_file_comes_beside_the_table(runs: list[str], tmp_path: Path) -> None:
    result = call("rok", *runs, "--csv", str(tmp_path / "points.csv"))
    assert result.stdout.startswith("| Strategy |")
    assert (tmp_path / "points.csv").read_text() == call("rok", *runs, "--csv", "-").stdout


def test_rok_draws_every_picture_asked_for(runs: list[str], tmp_path: Path) -> None:
    svg, png = tmp_path / "rok.svg", tmp_path / "rok.png"
    result = call("rok", "--json", *runs, "-o", str(svg), "--output", str(png))
    assert result.exit_code == 0
    assert json.loads(result.stdout)["points"]
    assert svg.read_bytes().startswith(b"<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("warmup", "counted"), [((), 4), (("--warmup", "0"), 6), (("--warmup", "5"), 1)])
def test_rok_warmup_skips_steps(runs: list[str], warmup: tuple[str, ...], counted: int) -> None:
    points = json.loads(call("rok", "--json", *runs, *warmup).stdout)["points"]
    assert [point["steps"] for point in points] == [counted, counted]


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'RUN.jsonl...'"),
        (("a.jsonl", "-o", "rok.pdf"), "rok.pdf: a picture's name must end in .svg or .png"),
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


def test_a_warm_up_that_leaves_nothing_is_one_line(runs: list[str]) -> None:
    result = call("rok", *runs, "--warmup", "6")
    assert_one_line(result, f"{runs[0]}: 6 steps, and none is left after 6 of warm-up")


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
