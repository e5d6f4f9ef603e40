"""Small models of megatron-core, with the sizes of those in plain torch, and one micro-batch of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import models
import torch
import torch.nn.functional as F
from models import HEADS, HIDDEN, SEQUENCE, VOCAB, History, make_tokens
from torch import Tensor, nn

from tba_lab.gpt import (
    DTYPES,
    Batch,
    GptShape,
    build_gpt,
    causal_mask,
    drawing_weights,
    gpt_loss,
    transformer_config,
)
from tba_lab.megatron_cpu import seed_all, training_device

if TYPE_CHECKING:
    from collections.abc import Callable

PADDING = 5


def build_encoder(shape: GptShape, *, seed: int) -> nn.Module:
    """A bidirectional ``TransformerBlock`` of megatron-core, as BERT has it, without embeddings.

    It takes hidden states of shape (sequence, batch, hidden) and a mask, or ``None``.
    """
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    with drawing_weights(seed):
        block: nn.Module = TransformerBlock(transformer_config(shape), bert_layer_local_spec)
    return block.to(training_device(), DTYPES[shape.dtype])


class Encoder(nn.Module):
    """Like BERT: embedding, megatron-core's bidirectional block under a padding mask, head."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.encoder = build_encoder(shape, seed=1)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(0, 1).contiguous()
        forbidden = padding[:, None, :, None] | padding[:, None, None, :]
        return self.head(self.encoder(x, forbidden)).transpose(0, 1)


def make_megatron_model(
    kind: str, *, layers: int = 4, dtype: torch.dtype = torch.float32, dropout: float = 0.0
) -> nn.Module:
    """A model, inside ``single_process``.

    Args:
        kind: ``gpt`` (LayerNorm, GELU, biases, learned positions), ``llama`` (RMSNorm, SwiGLU, no biases,
            rotary positions, one head of keys and values) or ``encoder``.
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
    if kind != "encoder":
        return build_gpt(shape, seed=1)
    torch.manual_seed(1)
    return Encoder(shape).to(training_device(), dtype)


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


def masked_loss(model: nn.Module, number: int) -> Tensor:
    """The loss of tokens that were hidden, one in seven; every other text ends in padding."""
    tokens = make_tokens(number)[:, :-1].to(training_device())
    places = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[::2, -PADDING:] = True
    hidden = (places % 7 == 0) & ~padding
    logits = model(tokens.masked_fill(hidden, 0), padding)
    return F.cross_entropy(logits[hidden].float(), tokens[hidden])


def train_megatron(model: nn.Module, session: object = None, **how: object) -> History:
    """``models.train`` with megatron-core's random number regions; their states belong to the history."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    loss: Callable[[nn.Module, int], Tensor] = masked_loss if isinstance(model, Encoder) else causal_loss
    history = models.train(model, session, loss=loss, seed=seed_all, **how)  # type: ignore[arg-type]
    history.random_states += [state.clone() for state in get_cuda_rng_tracker().get_states().values()]
    return history
