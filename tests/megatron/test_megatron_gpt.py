"""The megatron-core models that the demonstration and the tests train."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tba_lab.gpt import GptShape, build_gpt, gpt_loss, model_flops, random_batch
from tba_lab.megatron_cpu import single_process

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

GPT = GptShape(layers=2, hidden=32, heads=4, sequence=16, vocab=64, dtype="fp32", dropout=0.0)
LLAMA = dataclasses.replace(GPT, style="llama")


@pytest.fixture
def megatron() -> Iterator[None]:
    with single_process(seed=1):
        yield


class TestModelFlops:
    @pytest.mark.parametrize(
        "shape",
        [GPT, LLAMA, dataclasses.replace(LLAMA, hidden=96, heads=12)],
    )
    def test_is_what_the_model_multiplies(self, shape: GptShape) -> None:
        model = build_gpt(shape, seed=0)
        with FlopCounterMode(display=False) as counter:
            loss = gpt_loss(model, random_batch(shape, batch_size=3, seed=0))
            torch.autograd.backward(loss)
        assert model_flops(shape, 3) == counter.get_total_flops()
