"""The benchmarks find what they measure; what they show is for those who run them."""

from __future__ import annotations

import subprocess
import sys

from places import BENCHMARKS

IMPORTING = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="imported")
"""


def test_every_benchmark_can_be_imported() -> None:
    paths = sorted(map(str, BENCHMARKS.glob("*.py")))
    assert len(paths) > 10
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, *paths],
        capture_output=True,
        text=True,
        check=False,
        cwd=BENCHMARKS,
    )
    assert done.returncode == 0, done.stderr
