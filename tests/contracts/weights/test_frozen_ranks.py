"""Frozen weights of models that PyTorch spreads over ranks: the same bits, or a named error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from distributed_ranks import FROZEN, FROZEN_BYTES, by_parameters, run_ranks

if TYPE_CHECKING:
    from warm import Warm

SHARDED = by_parameters.__name__
WHOLE = [spread.__name__ for spread in FROZEN if spread is not by_parameters]
"""Each rank has the frozen weights as a whole."""


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, python_with_torch: Warm
) -> list[dict[str, dict[str, Any]]]:
    cases = [f"frozen, {spread.__name__}, {when}" for spread in FROZEN for when in ("before", "after")]
    return run_ranks(python_with_torch, tmp_path_factory.mktemp("ranks"), cases)


@pytest.mark.parametrize("spread", WHOLE)
def test_ranks_that_have_all_frozen_weights_train_to_the_same_bits(
    found: list[dict[str, dict[str, Any]]], spread: str
) -> None:
    for rank in found:
        assert rank[f"frozen, {spread}, after"] == {"different": 0, "offloaded": FROZEN_BYTES}


@pytest.mark.parametrize(
    "case", [*(f"{spread}, before" for spread in WHOLE), f"{SHARDED}, after", f"{SHARDED}, before"]
)
def test_other_ranks_train_to_the_same_bits_or_are_refused(
    found: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank in found:
        result = rank[f"frozen, {case}"]
        assert result.get("different") == 0 or "frozen weight" in result["refused"], result


def test_sharded_frozen_weights_are_refused_by_name(found: list[dict[str, dict[str, Any]]]) -> None:
    """Before the first step; they are in memory as shards."""
    for rank in found:
        case = rank[f"frozen, {SHARDED}, after"]
        assert case.get("different") == 0 or "DTensor" in case["refused"]
