"""The program ``tba-offload``: its streams, its exit status, and logs that are cut off or hostile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
import pytest
from children import run_python
from click.testing import CliRunner
from commands import call
from run_logs import write_run

import tba_offload
from tba_offload import cli
from tba_offload.errors import TbaError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        str(
            write_run(
                tmp_path / f"{strategy}.jsonl",
                header={"strategy": strategy, "model": {"batch_size": 2}},
                seconds=seconds,
                model_flops=1e12,
                activation_peak_bytes=peak * 2**20,
                peak_source="cuda allocator",
            )
        )
        for strategy, peak, seconds in (("keep", 1000, 0.50), ("offload", 200, 0.52))
    ]


def test_json_is_alone_on_the_standard_output(runs: list[str]) -> None:
    document = json.loads(call("rok", "--json", *runs).stdout)
    assert [point["strategy"] for point in document["points"]] == ["keep", "offload"]
    assert [point["activation_peak_bytes"] for point in document["points"]] == [1000 * 2**20, 200 * 2**20]
    assert document["advice"][0].startswith("At batch size 2, ")
    assert [point["source"] for point in document["points"]] == runs


# Errors


@pytest.mark.parametrize("error", [TbaError("first\n  second"), KeyError("bug")])
def test_a_bug_is_not_dressed_up_as_a_users_error(error: Exception) -> None:
    @click.group(cls=type(cli.main))
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        raise error

    result = CliRunner().invoke(group, ["fail"])
    assert result.stderr == ("Error: first second\n" if isinstance(error, TbaError) else "")
    assert (result.exception is error) == isinstance(error, KeyError)


# The program


def test_the_module_is_the_same_program_and_needs_no_torch(runs: list[str], tmp_path: Path) -> None:
    assert call("--version").stdout == f"tba-offload, version {tba_offload.__version__}\n"
    script = (
        "import runpy, sys\n"
        "try: runpy.run_module('tba_offload', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'megatron', 'matplotlib.pyplot'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run_python("-c", script, "rok", *runs, "-o", tmp_path / "rok.png")
    assert (done.returncode, done.stdout, done.stderr) == (0, call("rok", *runs).stdout, "")
