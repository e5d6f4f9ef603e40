"""The short form of the soak benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from places import BENCHMARKS, ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.full
def test_three_hundred_steps_with_faults_leave_everything_flat(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "soak.py", "--steps", "300", "--json", "--directory", tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["verdict"] == "flat"
    assert len(found["looks"]) == 20
    assert found["looks"][-1]["failed_steps"] > 0
    assert list(tmp_path.iterdir()) == []
