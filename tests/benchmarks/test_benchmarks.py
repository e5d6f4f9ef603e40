"""The benchmarks find what they measure; what they show is for those who run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from places import BENCHMARKS

if TYPE_CHECKING:
    from warm import Warm

IMPORTING = """
import os, runpy, sys
folder, *paths = sys.argv[1:]
os.chdir(folder)
for path in paths:
    runpy.run_path(path, run_name="imported")
"""


def test_every_benchmark_can_be_imported(python_with_torch: Warm) -> None:
    paths = sorted(map(str, BENCHMARKS.glob("*.py")))
    assert len(paths) > 10
    done = python_with_torch.run("-c", IMPORTING, str(BENCHMARKS), *paths)
    assert done.returncode == 0, done.stderr
