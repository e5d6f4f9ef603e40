"""States of models that PyTorch itself has spread over ranks: each rank's part travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from distributed_ranks import RANKS, Net, run_ranks

if TYPE_CHECKING:
    from warm import Warm

SPREAD = ("by batch", "by parameters", "by shards, with the parameters")
IN_BACKWARD = ("by_parameters", "by_layers")
WHOLE = 2 * 4 * (sum(parameter.numel() for parameter in Net(outputs=1).parameters()) - 1)
"""Bytes of the states of the model that the ranks train, but for its one bias of one number."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, python_with_torch: Warm) -> list[dict[str, Any]]:
    cases = [f"states, {spread}" for spread in SPREAD] + [f"backward, {spread}" for spread in IN_BACKWARD]
    return run_ranks(python_with_torch, tmp_path_factory.mktemp("ranks"), cases)


@pytest.mark.parametrize("spread", SPREAD)
def test_a_rank_moves_its_own_part_only_and_no_bit_differs(spread: str, ranks: list[dict[str, Any]]) -> None:
    own, least, most = (WHOLE, 1.0, 1.2) if spread == "by batch" else (WHOLE / RANKS, 0.98, 1.3)
    for found in ranks:
        case = found[f"states, {spread}"]
        assert case.pop("read") > 0
        assert least <= case.pop("away") / own < most  # padded to pages
        assert set(case.values()) == {0}
        assert len(case) == (2 if "shards" in spread else 3)


@pytest.mark.parametrize("spread", IN_BACKWARD)
def test_updates_in_backward_of_fsdp2_have_the_same_bits(spread: str, ranks: list[dict[str, Any]]) -> None:
    """Its hooks come when gradients are reduced."""
    for found in ranks:
        case = found[f"backward, {spread}"]
        assert case["differing"] == [0] * 4
        assert case["in_backward"] == [False, True, False, True]
        assert "was freed when backward updated" in case["clipped"]
        assert "FSDP2's CPUOffloadPolicy may mark a gradient as ready" in case["refused"]
