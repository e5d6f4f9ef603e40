"""Sub-groups that the processor updates while a device updates others.

A CPU is no such device, so the tests are those of ``on_state_lanes.py``, on one that lags.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_tests
from optimizers import assert_same, pair, policy

import tba_offload as tba
from tba_offload.states.host_share import HostShare, LaneTime

TESTS = Path(__file__).with_name("on_state_lanes.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lane", ["main", pytest.param("full", marks=pytest.mark.full)])
def test_two_lanes_on_a_device_that_lags(lane: str) -> None:
    done = run_tests(TESTS, lane, "-p", "lagging", "-n", "0", timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_a_cpu_the_memory_of_the_device_is_that_of_the_host(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    chosen = policy(tmp_path)
    chosen["states"]["update"] = "host"
    with tba.offload_optimizer(found.optimizer, chosen) as states:
        for seed in range(3):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)
        assert [record.on_host for record in states.records] == [0, 0, 0]


@pytest.mark.parametrize(("percent", "count"), [(100, 10), (50, 5), (25, 2), (1, 0), (0, 0)])
def test_a_fixed_share(percent: int, count: int) -> None:
    share = HostShare(percent)
    assert share.count([100] * 10, 0) == count
    share.learn(LaneTime(1, 1.0), LaneTime(1, 100.0))
    assert share.count([100] * 10, count) == count


@pytest.mark.parametrize(
    ("device", "host", "count"),
    [(1.0, 1.0, 5), (1.0, 4.0, 2), (1.0, 3.0, 2), (4.0, 1.0, 8), (1.0, 100.0, 0), (100.0, 1.0, 10)],
)
def test_each_sub_group_goes_to_the_lane_that_ends_it_first(device: float, host: float, count: int) -> None:
    """Ten of a thousand bytes; the lane that is slower gets as many as it ends in the same time."""
    share = HostShare(None)
    assert share.count([1000] * 10, 0) == 5
    assert share.expected(5000, 5000) is None
    share.learn(LaneTime(5000, 5 * device), LaneTime(5000, 5 * host))
    assert share.count([1000] * 10, 5) == count
    best = max(device * (10 - count), host * count)
    assert share.expected(1000 * (10 - count), 1000 * count) == pytest.approx(best)


def test_no_sub_group_changes_lanes_for_noise() -> None:
    share = HostShare(None)
    share.learn(LaneTime(5000, 1.0), LaneTime(5000, 1.04))
    assert share.count([1] * 100, 50) == 50
    share.learn(LaneTime(5000, 1.0), LaneTime(5000, 3.0))
    share.learn(LaneTime(5000, 1.0), LaneTime(5000, 3.0))
    assert share.count([1] * 100, 50) == 25


def test_one_update_that_was_disturbed_changes_nothing() -> None:
    share = HostShare(None)
    for seconds in (1.0, 1.0, 9.0, 1.0):
        share.learn(LaneTime(5000, 1.0), LaneTime(5000, seconds))
        assert share.count([1000] * 10, 5) == 5
