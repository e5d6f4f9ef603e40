"""The benchmarks can be started; what they measure is for those who run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from places import BENCHMARKS

if TYPE_CHECKING:
    from warm import Warm

PROGRAMS = sorted(path for path in BENCHMARKS.glob("*.py") if path.name != "lanes.py")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_says_what_it_measures(program: object, python_with_torch: Warm) -> None:
    done = python_with_torch.run(str(program), "--help")
    assert done.returncode == 0, done.stderr
    assert "options" in done.stdout.lower()
