"""Small models of megatron-core, with the sizes of those in plain torch, and one micro-batch of each."""

from __future__ import annotations

import models
import torch
from models import HEADS, HIDDEN, SEQUENCE, VOCAB, History, make_tokens
from torch import Tensor, nn

from tba_lab.gpt import (
    Batch,
    GptShape,
    build_gpt,
    causal_mask,
    gpt_loss,
)
from tba_lab.megatron_cpu import seed_all


def make_megatron_model(
    kind: str, *, layers: int = 4, dtype: torch.dtype = torch.float32, dropout: float = 0.0
) -> nn.Module:
    """A model, inside ``single_process``.

    Args:
        kind: ``gpt`` (LayerNorm, GELU, biases, learned positions) or ``llama`` (RMSNorm, SwiGLU, no biases,
            rotary positions, one head of keys and values).
        layers: How many.
        dtype: Of parameters, activations and gradients.
        dropout: On the hidden states and within attention.
    """
    shape = GptShape(
        layers=layers,
        hidden=HIDDEN,
        heads=HEADS,
        sequence=SEQUENCE,
        vocab=VOCAB,
        dtype="bf16" if dtype == torch.bfloat16 else "fp32",
        dropout=dropout,
        style="llama" if kind == "llama" else "gpt",
    )
    return build_gpt(shape, seed=1)


def causal_loss(model: nn.Module, number: int) -> Tensor:
    """The loss of the next token on micro-batch ``number``."""
    tokens = make_tokens(number)
    batch = Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        position_ids=torch.arange(SEQUENCE).expand(len(tokens), -1),
        attention_mask=causal_mask(SEQUENCE),
        loss_mask=torch.ones(len(tokens), SEQUENCE),
    )
    return gpt_loss(model, batch)


def train_megatron(model: nn.Module, session: object = None, **how: object) -> History:
    """``models.train`` with megatron-core's random number regions; their states belong to the history."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    history = models.train(model, session, loss=causal_loss, seed=seed_all, **how)  # type: ignore[arg-type]
    history.random_states += [state.clone() for state in get_cuda_rng_tracker().get_states().values()]
    return history
