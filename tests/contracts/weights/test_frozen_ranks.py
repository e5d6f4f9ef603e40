"""Frozen weights of models that PyTorch spreads over ranks: the same bits, or a named error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import frozen_ranks
import pytest
from frozen_ranks import RANKS
from harness import PATIENCE
from test_frozen_weights import LAYERS, WEIGHTS

if TYPE_CHECKING:
    from warm import Warm

CASES = list(frozen_ranks.cases())
WHOLE = [name for name in CASES if not name.startswith("by_parameters")]
"""Each rank has the frozen weights as a whole."""


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, python_with_torch: Warm
) -> list[dict[str, dict[str, Any]]]:
    """What came out of the cases of the tests that were chosen, rank by rank."""
    chosen = [item for item in request.session.items if item.path == request.path]
    names = sorted({item.callspec.params["case"] for item in chosen if hasattr(item, "callspec")})  # type: ignore[attr-defined]
    directory = tmp_path_factory.mktemp("ranks")
    ended = python_with_torch.run(frozen_ranks.__file__, str(directory), *names, timeout=2 * PATIENCE)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", [name for name in WHOLE if name.endswith("attached last")])
def test_ranks_that_have_all_frozen_weights_train_to_the_same_bits(
    found: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank in found:
        assert rank[case] == {"different": 0, "offloaded": LAYERS * WEIGHTS}


@pytest.mark.parametrize("case", [name for name in CASES if name not in WHOLE or "first" in name])
def test_other_ranks_train_to_the_same_bits_or_are_refused(
    found: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank in found:
        if "refused" in rank[case]:
            assert "frozen weight" in rank[case]["refused"]
        else:
            assert rank[case].get("different") == 0, rank[case]


def test_sharded_frozen_weights_are_refused_by_name(found: list[dict[str, dict[str, Any]]]) -> None:
    """Before the first step; they are in memory as shards."""
    for rank in found:
        case = rank["by_parameters, attached last"]
        assert case.get("different") == 0 or "DTensor" in case["refused"]
