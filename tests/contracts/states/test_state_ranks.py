"""States of models that PyTorch itself has spread over ranks: each rank's part travels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("state_ranks.py")
WHOLE = 2 * 4 * (6 * 64 * 65 + 64)
"""Bytes of the states of the model that the program trains, but for its one bias of one number."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(directory)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((directory / f"{number}.json").read_text()) for number in range(2)]


@pytest.mark.parametrize("spread", ["DDP", "FSDP2", "FSDP1"])
def test_same_bits(spread: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert {name: value for name, value in found[spread].items() if name not in {"away", "read"}} == (
            dict.fromkeys(("trained", "resumed", "closed"), 0)
            if spread != "FSDP1"
            else dict.fromkeys(("trained", "closed"), 0)
        )
        assert found[spread]["read"] > 0


def test_a_rank_moves_its_own_part_only(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert WHOLE <= found["DDP"]["away"] < 1.2 * WHOLE  # padded to pages
        for spread in ("FSDP2", "FSDP1"):
            assert WHOLE / 2 * 0.98 <= found[spread]["away"] < 1.3 * WHOLE / 2
