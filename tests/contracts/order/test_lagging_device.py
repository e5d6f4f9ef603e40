"""Training on a device that really lags, with PyTorch's own streams, events and allocator interface.

PyTorch has one accelerator for each process, so the tests are those of ``on_lagging_device.py``, run by a
pytest of their own. A compiler has to make the device first, once for each machine and version of PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from children import environment
from places import SUPPORT

TESTS = Path(__file__).with_name("on_lagging_device.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lane", ["main", pytest.param("full", marks=pytest.mark.full)])
def test_on_a_device_that_lags(lane: str) -> None:
    variables = environment()
    variables["PYTHONPATH"] += f"{os.pathsep}{SUPPORT}"
    for name in ("FULL", "SAMPLE", "SEED"):
        variables.pop(name, None)
    if lane == "full":
        variables["FULL"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lagging", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [*command, str(TESTS)], capture_output=True, text=True, env=variables, check=False, timeout=840
    )
    assert done.returncode == 0, done.stdout + done.stderr
