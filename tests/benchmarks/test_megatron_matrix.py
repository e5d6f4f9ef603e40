"""The matrix of Megatron layouts shows why a run failed."""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

import pytest
from places import BENCHMARKS

sys.path.append(str(BENCHMARKS))  # behind all others: it has an io.py

from typing import TYPE_CHECKING

import megatron_matrix

if TYPE_CHECKING:
    from pathlib import Path

FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise RuntimeError("the cause")
time.sleep(60)  # until the launcher ends it
"""


def test_the_traceback_of_the_rank_that_failed_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    with pytest.raises(megatron_matrix.RunFailedError) as failed:
        megatron_matrix._output_of([*megatron_matrix._python(2), str(script)], cwd=tmp_path, timeout=300)
    status, rank, *lines = str(failed.value).splitlines()
    assert (status, rank) == ("exit status 1", "rank 1:")
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "RuntimeError: the cause"


def test_where_the_launcher_names_no_rank_all_are_shown(tmp_path: Path) -> None:
    for rank in (0, 1):
        file = tmp_path / megatron_matrix.RANK_ERRORS / "run" / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"line {line} of {rank}\n" for line in range(100)))
    found = megatron_matrix._cause("printed", "waited in vain", tmp_path)
    last = megatron_matrix.LAST_LINES
    assert found[0] == "rank 0:"
    assert found[last] == "line 99 of 0"
    assert found[last + 1] == "rank 1:"
    assert found[-1] == "line 99 of 1"


def test_a_single_process_shows_its_own_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print(1); raise SystemExit('no such policy')"]
    with pytest.raises(megatron_matrix.RunFailedError, match="exit status 1\n1\nno such policy"):
        megatron_matrix._output_of(command, cwd=tmp_path, timeout=300)


def test_a_training_is_resumed_in_the_other_mode(tmp_path: Path) -> None:
    """By way of a checkpoint, which the second process loads and the first one wrote."""
    parts = []

    def way(name: str) -> megatron_matrix.Way:
        return lambda _layout, part: parts.append((name, part)) or name

    matrix = mock.Mock(plain=way("plain"), through=lambda _door, *call: way("offloading")(*call))
    matrix.resumed = partial(megatron_matrix.Matrix.resumed, mock.Mock(_place=tmp_path))
    ways = megatron_matrix.ways_of(matrix, ["launch"], resume=True)
    assert {name: train(megatron_matrix.LAYOUTS[0]) for name, train in ways.items()} == {
        "plain": "plain",
        "plain, then launch": "offloading",
        "launch, then plain": "plain",
    }
    assert [name for name, _ in parts] == ["plain", "plain", "plain", "offloading", "offloading", "plain"]
    for (_, first), (_, second) in zip(parts[::2], parts[1::2], strict=True):
        assert second.loaded == first.saved != second.saved
        assert first.flags[2:] == ["--exit-interval", "3"]
        assert second.flags[2:4] == ["--load", str(first.saved)]
