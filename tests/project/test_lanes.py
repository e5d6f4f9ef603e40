"""Which tests a run takes."""

from __future__ import annotations

import re
import subprocess
import sys

import lanes
import pytest
from children import environment
from places import ROOT

TESTS = """
import pytest

def test_always(): pass

@pytest.mark.full
@pytest.mark.parametrize("number", range(200))
def test_one_of_many(number): pass
"""

CONFTEST = """
import os
import lanes

def pytest_configure(config):
    config.addinivalue_line("markers", "full: many of a kind")

def pytest_collection_modifyitems(config, items):
    lanes.leave_out(config, items, os.environ)
"""

CONTRACTS = ROOT / "tests" / "contracts"

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def variables(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A suite with one test for each run and two hundred of a kind, and no variable that chooses."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_suite=TESTS)
    for name in ("FULL", "SAMPLE", "SEED"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def counts(pytester: pytest.Pytester, *arguments: str) -> tuple[int, int]:
    """How many passed, and how many were left out."""
    found = pytester.inline_run("-q", *arguments).getcalls("pytest_deselected")
    left = sum(len(call.items) for call in found)
    return 201 - left, left


def test_the_main_lane_leaves_out_what_is_marked(pytester: pytest.Pytester) -> None:
    assert counts(pytester) == (1, 200)


def test_the_full_lane_takes_all(pytester: pytest.Pytester, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("FULL", "1")
    assert counts(pytester) == (201, 0)


def test_a_sample_is_a_share_that_the_seed_chooses(
    pytester: pytest.Pytester, variables: pytest.MonkeyPatch
) -> None:
    variables.setenv("SAMPLE", "10")
    taken = set()
    for seed in ("1", "2", "1"):
        variables.setenv("SEED", seed)
        assert 8 <= counts(pytester)[0] <= 38
        taken.add(
            tuple(number for number in range(200) if lanes.is_in_sample(f"test[{number}]", 10, int(seed)))
        )
    assert len(taken) == 2


def test_what_is_named_runs(pytester: pytest.Pytester) -> None:
    call = pytester.inline_run("test_suite.py::test_one_of_many[7]")
    call.assertoutcome(passed=1)
    pytester.inline_run("test_suite.py::test_one_of_many").assertoutcome(passed=200)


def test_every_folder_of_contracts_keeps_a_test_in_the_main_lane(request: pytest.FixtureRequest) -> None:
    folders = {folder.name for folder in CONTRACTS.iterdir() if list(folder.glob("test_*.py"))}
    collected = [item for item in request.session.items if item.path.is_relative_to(CONTRACTS)]
    kept = {item.path.parent.name for item in collected if item.get_closest_marker("full") is None}
    if kept != folders:  # this run is of a part of the tests
        kept = collected_by_the_main_lane()
    assert kept == folders


def collected_by_the_main_lane() -> set[str]:
    """The folders, as a pytest of its own finds them."""
    chosen = {name: value for name, value in environment().items() if name not in {"FULL", "SAMPLE"}}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", str(CONTRACTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=chosen)
    assert done.returncode == 0, done.stdout
    return set(re.findall(r"^tests/contracts/(\w+)/", done.stdout, re.MULTILINE))
