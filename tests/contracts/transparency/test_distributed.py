"""Models that PyTorch itself spreads over ranks: the same bits, with all that is offloaded.

The ranks are processes that talk over the loopback interface; what they do is in ``distributed_ranks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from covering import of_which
from distributed_ranks import (
    COMPARED,
    FROZEN,
    FROZEN_BYTES,
    INNER,
    LAYERS,
    LENGTH,
    RANKS,
    ROWS,
    WIDTH,
    Net,
    by_parameters,
    run_ranks,
)

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
    *("offload, by shards", "offload, by columns", "offload, in stages", "auto, by columns"),
    *("offload-remat, by sequence", "offload-remat, by parameters, in bf16"),
    *("recompute, by parameters, gathered once", "recompute-offload, by shards, with the parameters"),
    "recompute-except-attention, by shards",
}
"""Every placement and every way to spread a model, but not each with each."""

Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, python_with_torch: Warm
) -> Found:
    chosen = [item for item in request.session.items if item.path == request.path]
    cases = {item.callspec.params["case"] for item in chosen}  # type: ignore[attr-defined]
    return run_ranks(python_with_torch, tmp_path_factory.mktemp("ranks"), cases)


@pytest.mark.parametrize(
    "case", of_which([f"{default}, {spread}" for default in COMPARED for spread in COMPARED[default]], *MAIN)
)
def test_a_spread_model_trains_to_the_same_bits(found: Found, case: str) -> None:
    """It offloads its activations, and not its weights.

    Cheap parts are not made again where they are distributed tensors: calls of one rank say nothing of the
    others.
    """
    default, _, spread = case.partition(", ")
    for rank in found:
        assert rank[case]["different"] == 0
        steps = rank[case]["steps"]
        recomputed = [step["recomputed_scopes"] for step in steps]
        if default.startswith("recompute"):
            assert min(recomputed) > 0
        elif default != "auto":
            assert set(recomputed) == {0}
        last = steps[-1]
        moved = last["offloaded_bytes"] + last["forwarded_bytes"]
        if default == "offload-remat" and spread in SAVED:
            assert moved + last["rebuilt_bytes"] == SAVED[spread]
            assert (last["rebuilt_bytes"] > 0) is (spread not in {"by columns", "by sequence"})
        if default == "offload" and spread in SAVED:
            for step in steps:
                assert step["offloaded_bytes"] + step["forwarded_bytes"] == SAVED[spread]
                assert step["kept_bytes"] <= 4096  # statistics of the norms
                assert step["left_alone_scopes"] == 0


# Optimizer states


STATES = ("by batch", "by parameters", "by shards, with the parameters")
STATES_BYTES = 2 * 4 * (sum(parameter.numel() for parameter in Net(outputs=1).parameters()) - 1)
"""Of the model that the ranks train, but for its one bias of one number."""


@pytest.mark.parametrize("case", [f"states, {spread}" for spread in STATES])
def test_a_rank_moves_its_own_part_of_states_only(found: Found, case: str) -> None:
    own, least, most = (STATES_BYTES, 1.0, 1.2) if "batch" in case else (STATES_BYTES / RANKS, 0.98, 1.3)
    for rank in found:
        result = dict(rank[case])
        assert result.pop("read") > 0
        assert least <= result.pop("away") / own < most  # padded to pages
        assert set(result.values()) == {0}
        assert len(result) == (2 if "shards" in case else 3)


@pytest.mark.parametrize("case", ["backward, by_parameters", "backward, by_layers"])
def test_updates_in_backward_of_fsdp2_have_the_same_bits(found: Found, case: str) -> None:
    """Its hooks come when gradients are reduced."""
    for rank in found:
        assert rank[case]["differing"] == [0] * 4
        assert rank[case]["in_backward"] == [False, True, False, True]
        assert "was freed when backward updated" in rank[case]["clipped"]
        assert "FSDP2's CPUOffloadPolicy may mark a gradient as ready" in rank[case]["refused"]


# Frozen weights: the same bits, or a named error


SHARDED = by_parameters.__name__
FROZEN_WHOLE = [spread.__name__ for spread in FROZEN if spread is not by_parameters]


@pytest.mark.parametrize("case", [f"frozen, {spread}, after" for spread in FROZEN_WHOLE])
def test_ranks_that_have_all_frozen_weights_train_to_the_same_bits(found: Found, case: str) -> None:
    for rank in found:
        assert rank[case] == {"different": 0, "offloaded": FROZEN_BYTES}


@pytest.mark.parametrize("case", [f"frozen, {spread}, before" for spread in (*FROZEN_WHOLE, SHARDED)])
def test_a_model_that_is_attached_before_it_is_spread(found: Found, case: str) -> None:
    for rank in found:
        result = rank[case]
        assert result.get("different") == 0 or "frozen weight" in result["refused"], result


@pytest.mark.parametrize("case", [f"frozen, {SHARDED}, after"])
def test_sharded_frozen_weights_are_refused_by_name(found: Found, case: str) -> None:
    """Before the first step; they are in memory as shards."""
    for rank in found:
        result = rank[case]
        assert result.get("different") == 0 or "frozen weight" in result["refused"], result
        assert result.get("different") == 0 or "DTensor" in result["refused"]
