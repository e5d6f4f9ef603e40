"""What is remembered of classes and functions keeps neither a model nor a step's tensors in memory."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Callable


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, change: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
        y = torch.tanh(self.a(x))
        return x + self.b(y if change is None else change(y, 2))


def step(blocks: nn.ModuleList, change: Callable[[Tensor, int], Tensor] | None = None) -> None:
    x = torch.randn(4, 8)
    for block in blocks:
        x = block(x, change)
    x.sum().backward()
    blocks.zero_grad()


@pytest.mark.filterwarnings("ignore::tba_offload.NoEffectWarning")
@pytest.mark.parametrize("placement", ["recompute", "recompute-offload", "auto"])
def test_a_parametrized_model_does_not_outlive_its_session(placement: str) -> None:
    blocks = nn.ModuleList(Block() for _ in range(2))
    weight = weakref.ref(blocks[0].a.parametrizations.weight.original1)
    with tba.attach(blocks, {"default": placement}, layers=list(blocks)) as session:
        step(blocks)
    del blocks, session
    gc.collect()
    assert weight() is None


@pytest.mark.filterwarnings("ignore::tba_offload.NoEffectWarning")
@pytest.mark.parametrize("placement", ["recompute", "auto"])
def test_a_function_of_a_step_that_reaches_itself_does_not_outlive_the_step(placement: str) -> None:
    blocks = nn.ModuleList(Block() for _ in range(2))
    noises: list[weakref.ref[Tensor]] = []

    def one_step() -> None:
        noise = torch.randn(4, 8)
        noises.append(weakref.ref(noise))

        def change(x: Tensor, times: int) -> Tensor:
            return x if times == 0 else change(x + noise, times - 1)

        step(blocks, change)

    with tba.attach(blocks, {"default": placement}, layers=list(blocks)):
        for _ in range(6):
            one_step()
        gc.collect()
        assert sum(noise() is not None for noise in noises) <= 1
