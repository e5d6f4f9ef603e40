"""Training on a device that really lags, with PyTorch's own streams, events and allocator interface.

PyTorch has one kind of accelerator in a process, so the tests are those of the files below, each run by a
pytest of its own. A compiler has to make the device first, once for each machine and version of PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_tests

TESTS = ("on_lagging_device.py", "on_two_devices.py", "../states/on_state_lanes.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lane", ["main", pytest.param("full", marks=pytest.mark.full)])
@pytest.mark.parametrize("tests", TESTS)
def test_on_a_device_that_lags(tests: str, lane: str) -> None:
    done = run_tests(Path(__file__).parent / tests, lane, "-p", "lagging", "-n", "0", timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
