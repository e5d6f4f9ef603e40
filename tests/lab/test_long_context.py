"""The benchmark of long contexts at a small size: it predicts the bytes, and races drives held to rates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS, CONTEXT, WIDTH, HEAD = 3, 256, 512, 128


@pytest.mark.full
def test_the_bytes_of_a_forward_are_predicted_and_the_rate_is_raced(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "rows.json"
    command = f"benchmarks/long_context.py --context {CONTEXT} --layers {LAYERS} --steps 1 --lane host"
    rates = f"--rate 1.2x --directory {tmp_path} --json {file}"
    subprocess.run([sys.executable, *command.split(), *rates.split()], cwd=ROOT, check=True)
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    offloaded = "host", "drive", "drive at 1.2x", "host first at 1.2x"
    assert rows.keys() == {"checkpointing", "checkpointing again", *offloaded}
    # The inputs of all layers, and one table each of cosines and sines.
    saved = (LAYERS * WIDTH + 2 * HEAD) * CONTEXT * 4
    assert {rows[name]["saved"] for name in offloaded} == {saved}
    for name in ("host", "drive"):
        assert rows[name]["need"] == pytest.approx(saved / rows[name]["forward"])
        assert rows[name]["predicted_need"] == pytest.approx(rows["host"]["predicted_need"])
    assert rows["drive at 1.2x"]["rate"] == pytest.approx(1.2 * rows["drive"]["need"])
    assert all(row["same_losses"] for row in rows.values())
