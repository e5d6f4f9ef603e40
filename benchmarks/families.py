"""Models of several families for the benchmarks: those of transformers, and one of wide and narrow layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from paced import Paced
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from tba_lab.gpt import GptShape

VOCABULARY = 1024
"""Tokens: logits shall not be what peaks."""

NARROW = 8
"""Divisor of the width inside the MLP of every other layer of ``mixed``."""


def _llama(shape: GptShape) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(intermediate_size=3 * shape.hidden, **_common(shape)))


def _mixed(shape: GptShape) -> nn.Module:
    """Return a Llama of which every other layer has a narrow MLP: layers of two kinds in turn."""
    config = LlamaConfig(intermediate_size=4 * shape.hidden, **_common(shape))
    model = LlamaForCausalLM(config)
    narrow = LlamaConfig(intermediate_size=4 * shape.hidden // NARROW, **_common(shape))
    for layer in model.model.layers[1::2]:
        layer.mlp = LlamaMLP(narrow)
    return model


def _gpt2(shape: GptShape) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_positions=shape.sequence,
            vocab_size=VOCABULARY,
            use_cache=False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout),
        )
    )


def _moe(shape: GptShape) -> nn.Module:
    config = MixtralConfig(
        intermediate_size=2 * shape.hidden, num_local_experts=4, num_experts_per_tok=2, **_common(shape)
    )
    return MixtralForCausalLM(config)


def _common(shape: GptShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.sequence,
        "vocab_size": VOCABULARY,
        "use_cache": False,
    }


FAMILIES: dict[str, Callable[[GptShape], nn.Module]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "moe": _moe,
    "mixed": _mixed,
    "paced": Paced,
}
"""What the names of the option stand for."""


def build(family: str, shape: GptShape, *, seed: int) -> nn.Module:
    """Return a model of a family with weights from a seed."""
    torch.manual_seed(seed)
    model = FAMILIES[family](shape).train()
    return model.to(torch.bfloat16 if shape.dtype == "bf16" else torch.float32)


def loss_of(model: nn.Module, shape: GptShape, *, batch_size: int, seed: int) -> torch.Tensor:
    """Return the loss of a micro-batch of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (batch_size, shape.sequence), generator=generator)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss
