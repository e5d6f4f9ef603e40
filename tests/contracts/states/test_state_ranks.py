"""States of models that PyTorch itself has spread over ranks: each rank's part travels."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from places import SUPPORT

if TYPE_CHECKING:
    from warm import Warm

PROGRAM = SUPPORT / "state_ranks.py"
WHOLE = 2 * 4 * (6 * 64 * 65 + 64)
"""Bytes of the states of the model that the program trains, but for its one bias of one number."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, python_with_torch: Warm) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    done = python_with_torch.run(str(PROGRAM), str(directory), timeout=180)
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


@pytest.mark.parametrize("spread", ["FSDP2", "FSDP2, many roots"])
def test_updates_in_backward_of_fsdp2_have_the_same_bits(spread: str, ranks: list[dict[str, Any]]) -> None:
    """Its hooks come when gradients are reduced."""
    for found in ranks:
        result = found[f"{spread} in backward"]
        assert result["differing"] == [0] * 5
        assert result["in_backward"] == [False, True, False, True, True]
        assert "is freed, since backward has updated" in result["clipped"]
        assert result["on host"].startswith(
            "FSDP2 may tell of gradients that it copies to host memory before"
        )


def test_a_rank_moves_its_own_part_only(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert WHOLE <= found["DDP"]["away"] < 1.2 * WHOLE  # padded to pages
        for spread in ("FSDP2", "FSDP1"):
            assert WHOLE / 2 * 0.98 <= found[spread]["away"] < 1.3 * WHOLE / 2
