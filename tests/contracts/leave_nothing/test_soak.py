"""The short form of the soak benchmark, and its rule for what is flat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from places import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

from soak import Look, what_grew

if TYPE_CHECKING:
    from pathlib import Path

FOUND = Look(
    step=0,
    descriptors=9,
    threads=3,
    extents=0,
    window=0,
    resident=1 << 28,
    store=1 << 20,
    run_log=0,
    failed_steps=0,
)


LOADING = (
    "tba-offload: loading torch._dynamo, which recomputation needs, so that no step has to (some seconds)"
)


@pytest.mark.full
def test_three_hundred_steps_with_faults_leave_everything_flat(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "soak.py",
            "--steps",
            "300",
            "--json",
            "--directory",
            tmp_path,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stderr.splitlines() == [LOADING]
    found = json.loads(done.stdout)
    assert found["verdict"] == "flat"
    assert len(found["looks"]) == 20
    assert found["looks"][-1]["failed_steps"] > 0
    assert list(tmp_path.iterdir()) == []


def test_flat_is_flat() -> None:
    assert what_grew([replace(FOUND, step=step, run_log=step) for step in range(20)]) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"descriptors": 10}, "descriptors"),
        ({"threads": 4}, "threads"),
        ({"extents": 4096}, "extents"),
        ({"window": 1}, "window"),
        ({"resident": FOUND.resident + (8 << 20)}, "resident"),
        ({"store": FOUND.store + (1 << 20)}, "store"),
    ],
)
def test_what_grows_is_named(change: dict[str, Any], name: str) -> None:
    looks = [replace(FOUND, step=step) for step in range(20)]
    looks[-1] = replace(looks[-1], **change)
    assert what_grew(looks) == [name]
