"""What a step makes is gone with its graph: nothing of it waits for the cyclic collector.

Long runs switch that off, or have all ranks run it at the same step, hundreds of steps apart (``--manual-gc``
of Megatron-LM). Small objects that wait for it keep malloc from joining the blocks that activations leave.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import loss_of, make_model, make_tokens

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from tba_offload.session import Session

POLICIES: list[dict[str, Any]] = [
    *({"default": placement} for placement in ("keep", "offload", "offload-50%", "offload-remat")),
    *({"default": p} for p in ("recompute", "recompute-offload", "recompute-except-attention")),
    {"default": "auto", "budget": {"activation_bytes": "1MiB"}},
    *(
        {"default": "offload", "states": {"default": "offload", "when": when}}
        for when in ("step", "backward")
    ),
]


@contextmanager
def uncollected() -> Iterator[list[object]]:
    """Gives a list that has, after the block, all that only the cyclic collector could free."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def names_of_ours(objects: list[object]) -> Counter[str]:
    kinds = (f"{thing.__module__}.{thing.__qualname__}" for thing in map(type, objects))
    return Counter(kind for kind in kinds if kind.startswith(("tba_offload.", "torch.Tensor")))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session, *, times: int) -> None:
    for number in range(times):
        with session.step():
            loss_of(model, make_tokens(number)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_no_step_leaves_what_only_the_cyclic_collector_frees(policy: dict[str, Any]) -> None:
    model = make_model("llama")  # which has fused attention
    optimizer = torch.optim.AdamW(model.parameters())
    policy = {"min_tensor_bytes": "1KiB", "store": {"kind": "host"}, **policy}
    with tba.attach(model, policy, optimizer=optimizer if "states" in policy else None) as session:
        step(model, optimizer, session, times=5)
        with uncollected() as left:
            step(model, optimizer, session, times=4)
    assert not names_of_ours(left)


@pytest.mark.parametrize("times", [0, 5])
@pytest.mark.parametrize("policy", POLICIES[1::3], ids=str)
def test_a_model_is_gone_with_its_last_name_after_its_session_is_closed(
    policy: dict[str, Any], times: int
) -> None:
    """Or the next model finds its memory taken, and that goes in the middle of a step that is measured."""
    gc.collect()
    gc.disable()
    try:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        policy = {"min_tensor_bytes": "1KiB", "store": {"kind": "host"}, **policy}
        with tba.attach(model, policy, optimizer=optimizer if "states" in policy else None) as session:
            step(model, optimizer, session, times=times)
            _ = session.records
        alive = weakref.ref(model)
        del model, optimizer, session
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("placement", ["offload", "offload-remat", "recompute", "recompute-offload"])
@pytest.mark.parametrize("weights", ["keep", "offload"])
def test_a_closed_session_keeps_no_model_alive(placement: str, weights: str) -> None:
    def trained() -> list[weakref.ref[torch.Tensor]]:
        model = make_model(layers=2)
        next(each for name, each in model.named_parameters() if "layers.1" in name).requires_grad_(
            weights == "keep"
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = {"default": placement, "store": {"kind": "host"}, "min_tensor_bytes": 0}
        with tba.attach(model, policy | {"weights": {"frozen": weights}}):
            for number in range(4):
                loss_of(model, make_tokens(number)).backward()
                optimizer.step()
        return [weakref.ref(parameter) for parameter in model.parameters()]

    trained()  # what PyTorch and the package make once
    with uncollected():
        assert not any(alive() is not None for alive in trained())
