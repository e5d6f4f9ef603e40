"""Training on a device that really lags, with PyTorch's own streams, events and allocator interface.

PyTorch has one accelerator for each process, so the tests are those of ``on_lagging_device.py``, run by a
pytest of their own. A compiler has to make the device first, once for each machine and version of PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_tests

TESTS = Path(__file__).with_name("on_lagging_device.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lane", ["main", pytest.param("full", marks=pytest.mark.full)])
def test_on_a_device_that_lags(lane: str) -> None:
    done = run_tests(TESTS, lane, "-p", "lagging", "-n", "0", timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
