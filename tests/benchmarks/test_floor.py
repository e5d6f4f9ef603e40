"""The process that moves bytes beside training writes and reads its whole file, as often as it is told to."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from places import BENCHMARKS

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def moved(file: Path, said: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(BENCHMARKS / "mover.py"), str(file), str(8 * MIB)]
    return subprocess.run(program, input=said, capture_output=True, text=True, timeout=60, check=False)


def test_a_file_is_written_and_read_when_it_is_told(tmp_path: Path) -> None:
    done = moved(tmp_path / "bytes", "write 0\nread 0.01\nread 0\n")
    assert (done.returncode, done.stdout.split()) == (0, ["ready", "done", "done", "done"]), done.stderr
    assert (tmp_path / "bytes").stat().st_size == 8 * MIB
    assert (tmp_path / "bytes").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("said", ["erase 0\n", "write\n"])
def test_what_is_not_understood_ends_it(tmp_path: Path, said: str) -> None:
    assert moved(tmp_path / "bytes", said).returncode != 0
