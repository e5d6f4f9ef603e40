"""Sub-groups that the processor updates while a device updates others.

A CPU is no such device, so the tests are those of ``on_state_lanes.py``, on one that lags.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_tests
from optimizers import assert_same, pair, policy, train

import tba_offload as tba

TESTS = Path(__file__).with_name("on_state_lanes.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lane", ["main", pytest.param("full", marks=pytest.mark.full)])
def test_two_lanes_on_a_device_that_lags(lane: str) -> None:
    done = run_tests(TESTS, lane, "-p", "lagging", "-n", "0", timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_a_cpu_the_memory_of_the_device_is_that_of_the_host(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    chosen = policy(tmp_path, states={"update": "host"})
    with tba.offload_optimizer(found.optimizer, chosen) as states:
        train(found, expected, 0, 1, 2)
        assert_same(found, expected)
        assert [record.on_host for record in states.records] == [0, 0, 0]
