"""Layers of Transformer Engine, where it is installed and there is a GPU: the bits of plain training."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import KIB, session_for
from models import same_bits
from torch import Tensor


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
        losses = []
        settings: dict[str, Any] = {"default": default, "in_flight": 1024 * KIB}
        with nullcontext() if default is None else session_for(model, **settings) as session:
            for _ in range(3):
                with nullcontext() if session is None else session.step():
                    loss = model(tokens, positions, None, labels=tokens).mean()
                    loss.backward()
                losses.append(loss.detach())
            assert session is None or all(record.scopes == 4 for record in session.records)
        return [*losses, *(parameter.grad for parameter in model.parameters())]

    with single_process(seed=1):
        assert all(map(same_bits, run(placement), run(None)))
