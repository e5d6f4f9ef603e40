"""The matrix of faults, in short: no case changes a number in silence, hangs, or leaves something behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from places import BENCHMARKS

BENCHMARK = BENCHMARKS / "faults.py"


@pytest.mark.timeout(600)
@pytest.mark.full
def test_no_fault_is_silent() -> None:
    command = [sys.executable, str(BENCHMARK), "--short", "--json", "--processes", "1"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    struck = {row["fault"] for row in rows if row["struck"]}
    assert struck == {row["fault"] for row in rows}
    for row in rows:
        assert row["reaction"] not in {"SILENT", "HUNG"}, row
        assert not row["left"], row
        chosen = row["reaction"] == "unnoticed, as chosen"
        assert not (chosen and row["checksum"]), row
        assert chosen or (row["losses"] and row["next_step"]), row
