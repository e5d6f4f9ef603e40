"""Layers that save as those of Transformer Engine do: raw parts of quantized tensors, fused functions.

The first half follows what Transformer Engine documents, with small classes of its own, and runs anywhere.
The second half trains layers of Transformer Engine itself, where it is installed and there is a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from fused_layers import SIZE, FusedLayer
from harness import KIB, assert_all_given_back, session_for
from torch import Tensor, nn


class Block(nn.Module):
    """Some of these layers, quantized or wrapped."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(FusedLayer() for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def optimizer_step(self) -> None:
        with torch.no_grad():
            for layer in self.layers:
                layer.weight -= 0.01 * layer.weight.grad
                layer.weight.grad = None
                layer.workspace = None


def train(model: Block, session: Any, *, steps: int = 3, micro_batches: int = 3) -> list[Tensor]:
    """Losses of all micro-batches, then the weights."""
    seen: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        with session.step() if session is not None else torch.enable_grad():
            for _ in range(micro_batches):
                hidden = torch.randn(32, 2, SIZE, generator=generator, requires_grad=True)
                loss = model(hidden).square().mean()
                loss.backward()
                seen += [loss.detach(), hidden.grad]
        model.optimizer_step()
    return [*seen, *(layer.weight.detach().clone() for layer in model.layers)]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("in_flight", [None, 8 * KIB])
def test_raw_parts_of_quantized_tensors_travel(in_flight: int | None) -> None:
    plain = train(Block(), None)
    model = Block()
    with session_for(model, layers=list(model.layers), in_flight=in_flight) as session:
        assert equal(train(model, session), plain)
        assert_all_given_back(session)
        first, *_, last = session.report()
    payload = 32 * 2 * SIZE  # one byte for each number
    assert first.offloaded_bytes + first.forwarded_bytes + first.held_bytes > 0
    assert last.offloaded_bytes + last.forwarded_bytes >= payload
    if in_flight is not None:
        assert last.read_bytes > 0


def test_a_quantized_copy_of_a_weight_stays_once_it_is_known_to_stay_anyway() -> None:
    """The layers hold it from micro-batch to micro-batch: writing it frees nothing."""
    model = Block()
    with session_for(model, layers=list(model.layers), in_flight=8 * KIB) as session:
        train(model, session, steps=4)
        records = session.report()
    copies = len(model.layers) * SIZE * SIZE
    assert records[0].held_bytes > 0
    assert records[-1].held_bytes == 0
    assert records[-1].kept_bytes >= copies


# Transformer Engine itself


def build_te_gpt(*, fp8: bool) -> Any:
    """A GPT of megatron-core on Transformer Engine's layers, in bf16 or in FP8."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import TransformerConfig

    precision = {"fp8": "hybrid", "fp8_recipe": "delayed"} if fp8 else {}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        **precision,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_with_transformer_engine_spec()
    return GPTModel(config, spec, vocab_size=512, max_sequence_length=128).cuda()


@pytest.mark.gpu
@pytest.mark.megatron
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "placement",
    ["keep", "offload", "recompute", "recompute-offload", "recompute-except-attention", "offload-remat"],
)
def test_layers_of_transformer_engine(*, fp8: bool, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; the attention kernels are told to be deterministic."""
    from tba_lab.megatron_cpu import seed_all, single_process

    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

    def run(default: str | None) -> list[Tensor]:
        model = build_te_gpt(fp8=fp8)
        seed_all(3)
        tokens = torch.randint(0, 512, (2, 128), device="cuda")
        positions = torch.arange(128, device="cuda").expand(2, -1)

        def steps(session: Any) -> list[Tensor]:
            losses = []
            for _ in range(3):
                with session.step() if session is not None else torch.enable_grad():
                    loss = model(tokens, positions, None, labels=tokens).mean()
                    loss.backward()
                losses.append(loss.detach())
            return losses

        if default is None:
            losses = steps(None)
        else:
            with session_for(model, default=default, in_flight=1024 * KIB) as session:
                losses = steps(session)
                assert all(record.scopes == 4 for record in session.report())
        return [*losses, *(parameter.grad for parameter in model.parameters())]

    with single_process(seed=1):
        assert equal(run(placement), run(None))
