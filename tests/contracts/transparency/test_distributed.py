"""Models that PyTorch itself spreads over ranks: same bits, activations travel, gathered weights do not.

The ranks are processes that talk over the loopback interface; what they do is in ``distributed_ranks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from distributed_ranks import COMPARED, INNER, LAYERS, LENGTH, RANKS, ROWS, WIDTH, run_ranks

if TYPE_CHECKING:
    from warm import Warm

SMALL, LARGE = ROWS * LENGTH * WIDTH * 4, ROWS * LENGTH * INNER * 4
"""Bytes of a layer's input, and of what lies between its products."""

WHOLE = LAYERS * (2 * SMALL + 4 * LARGE)
SAVED = {
    "by batch": WHOLE,
    "by shards": WHOLE,
    "by shards, with the parameters": WHOLE,
    "by parameters": WHOLE,
    "by parameters, gathered once": WHOLE,
    "by parameters, in bf16": WHOLE // 2,
    # What goes into the products becomes two distributed tensors, which are two activations.
    "by columns": LAYERS * (3 * SMALL + 4 * LARGE // RANKS),
    "by sequence": LAYERS * (SMALL // RANKS + 2 * SMALL + 4 * LARGE // RANKS),
}
"""Bytes of activations that the layers of one rank save in a step, its weights not among them."""

MAIN = {
    ("offload", "by shards"),
    ("offload", "by columns"),
    ("offload", "in stages"),
    ("offload-remat", "by sequence"),
    ("offload-remat", "by parameters, in bf16"),
    ("recompute", "by parameters, gathered once"),
    ("recompute-offload", "by shards, with the parameters"),
    ("recompute-except-attention", "by shards"),
    ("auto", "by columns"),
}
"""Every placement and every way to spread a model, but not each with each."""

Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, python_with_torch: Warm
) -> Found:
    chosen = [item for item in request.session.items if item.path == request.path]
    cases = {"{default}, {spread}".format(**item.callspec.params) for item in chosen}  # type: ignore[attr-defined]
    return run_ranks(python_with_torch, tmp_path_factory.mktemp("ranks"), cases)


@pytest.mark.parametrize(
    ("default", "spread"),
    [
        pytest.param(default, spread, marks=[pytest.mark.full] * ((default, spread) not in MAIN))
        for default, spreads in COMPARED.items()
        for spread in spreads
    ],
)
def test_a_spread_model_trains_to_the_same_bits(found: Found, default: str, spread: str) -> None:
    """It offloads its activations, and not its weights.

    Cheap parts are not made again where they are distributed tensors: calls of one rank say nothing of the
    others.
    """
    for rank in found:
        case = rank[f"{default}, {spread}"]
        assert case["different"] == 0
        recomputed = [step["recomputed_scopes"] for step in case["steps"]]
        if default.startswith("recompute"):
            assert min(recomputed) > 0
        elif default != "auto":
            assert set(recomputed) == {0}
        last = case["steps"][-1]
        moved = last["offloaded_bytes"] + last["forwarded_bytes"]
        if default == "offload-remat" and spread in SAVED:
            assert moved + last["rebuilt_bytes"] == SAVED[spread]
            assert (last["rebuilt_bytes"] > 0) is (spread not in {"by columns", "by sequence"})
        if default == "offload" and spread in SAVED:
            for step in case["steps"]:
                assert step["offloaded_bytes"] + step["forwarded_bytes"] == SAVED[spread]
                assert step["kept_bytes"] <= 4096  # statistics of the norms
                assert step["left_alone_scopes"] == 0
