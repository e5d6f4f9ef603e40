"""The megatron-core models that the demonstration and the tests train."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tba_lab.gpt import GptShape, build_gpt, causal_mask, gpt_loss, model_flops, random_batch
from tba_lab.megatron_cpu import seed_all, single_process

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

GPT = GptShape(layers=2, hidden=32, heads=4, sequence=16, vocab=64, dtype="fp32", dropout=0.0)
LLAMA = dataclasses.replace(GPT, style="llama")
SHAPES = [GPT, LLAMA, dataclasses.replace(GPT, dtype="bf16"), dataclasses.replace(LLAMA, dtype="bf16")]


def name_of(shape: GptShape) -> str:
    return f"{shape.style}-{shape.dtype}"


every_shape = pytest.mark.parametrize("shape", SHAPES, ids=name_of)


@pytest.fixture
def megatron() -> Iterator[None]:
    with single_process(seed=1):
        yield


def bits(model: nn.Module) -> list[bytes]:
    return [parameter.detach().cpu().view(torch.uint8).numpy().tobytes() for parameter in model.parameters()]


class TestBuildGpt:
    @every_shape
    def test_is_a_megatron_model_that_starts_at_the_loss_of_a_guess(self, shape: GptShape) -> None:
        from megatron.core.models.gpt import GPTModel

        model = build_gpt(shape, seed=0)
        assert any(isinstance(module, GPTModel) for module in model.modules())
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[shape.dtype]
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        loss = gpt_loss(model, random_batch(shape, batch_size=2, seed=0))
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(math.log(shape.vocab), rel=0.05)

    @every_shape
    def test_the_seed_decides_the_weights(self, shape: GptShape) -> None:
        seed_all(1)
        first = bits(build_gpt(shape, seed=5))
        seed_all(2)
        before = torch.get_rng_state()
        assert bits(build_gpt(shape, seed=5)) == first
        assert torch.equal(torch.get_rng_state(), before)
        assert bits(build_gpt(shape, seed=6)) != first

    def test_the_styles_are_what_they_say(self) -> None:
        gpt, llama = (
            {type(module).__name__ for module in build_gpt(shape, seed=0).modules()} for shape in (GPT, LLAMA)
        )
        assert "LayerNorm" in gpt
        assert "RotaryEmbedding" not in gpt
        assert "RMSNorm" in llama
        assert "RotaryEmbedding" in llama
        biases = [name for name, _ in build_gpt(LLAMA, seed=0).named_parameters() if name.endswith("bias")]
        assert biases == []

    @pytest.mark.parametrize("shape", [GPT, LLAMA], ids=name_of)
    def test_does_not_look_ahead(self, shape: GptShape) -> None:
        model = build_gpt(shape, seed=0)
        batch = random_batch(shape, batch_size=1, seed=0)
        batch["loss_mask"][:, 8:] = 0
        before = gpt_loss(model, batch).item()
        batch["tokens"][:, 8:] += 1
        batch["tokens"] %= shape.vocab
        assert gpt_loss(model, batch).item() == before
        batch["tokens"][:, 0] += 1
        batch["tokens"] %= shape.vocab
        assert gpt_loss(model, batch).item() != before

    def test_drops_out_when_training_only(self) -> None:
        shape = dataclasses.replace(GPT, dropout=0.5)
        model = build_gpt(shape, seed=0)
        batch = random_batch(shape, batch_size=1, seed=0)
        assert len({gpt_loss(model, batch).item() for _ in range(3)}) == 3
        model.eval()
        assert len({gpt_loss(model, batch).item() for _ in range(3)}) == 1


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

    def test_is_the_formula_of_the_paper_for_gpt(self) -> None:
        b, s, layers, h, v = 8, 2048, 24, 2304, 51200
        shape = GptShape(layers=layers, hidden=h, heads=24, sequence=s, vocab=v)
        paper_with_recomputation = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        recomputation = 2 * b * s * layers * (12 * h**2 + 2 * s * h)
        assert model_flops(shape, b) == pytest.approx(paper_with_recomputation - recomputation, rel=1e-12)


class TestRandomBatch:
    def test_has_the_shapes_of_a_real_one(self) -> None:
        batch = random_batch(GPT, batch_size=3, seed=0)
        tensors = cast("dict[str, torch.Tensor]", batch)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
            "tokens": (3, 16),
            "labels": (3, 16),
            "position_ids": (3, 16),
            "attention_mask": (1, 1, 16, 16),
            "loss_mask": (3, 16),
        }
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


def test_the_causal_mask_forbids_what_lies_ahead() -> None:
    mask = causal_mask(3)[0, 0].tolist()
    assert mask == [[False, True, True], [False, False, True], [False, False, False]]
