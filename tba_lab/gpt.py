"""Real megatron-core models of any size: GPT, Llama-style, and an encoder block.

They use the layers that megatron-core itself brings ("local"), which need neither Transformer Engine nor
Apex, with every fused kernel off: the same model runs on a CPU and on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from tba_lab.megatron_cpu import training_device
from tba_offload.errors import ConfigError
from tba_offload.megatron import require_core

if TYPE_CHECKING:
    from collections.abc import Iterator

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STYLES = ("gpt", "llama")


class Batch(TypedDict):
    """One micro-batch, on any device.

    Attributes:
        tokens: Input token numbers, int64 of shape (batch, sequence).
        labels: The token that follows each of them, int64 of shape (batch, sequence).
        position_ids: Positions from 0, int64 of shape (batch, sequence).
        attention_mask: True where attention is forbidden, bool of shape (1, 1, sequence, sequence).
        loss_mask: Weight of each label in the loss, float32 of shape (batch, sequence).
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor


@dataclasses.dataclass(frozen=True)
class GptShape:
    """What distinguishes one model from another.

    Attributes:
        layers: Number of transformer layers.
        hidden: Width of the hidden states.
        heads: Number of attention heads; divides ``hidden``.
        sequence: Tokens in a sequence.
        vocab: Size of the vocabulary.
        ffn: Width inside the MLP; by default 4 x hidden for ``gpt``, and for ``llama``, whose MLP has
            three matrices in place of two, 8/3 x hidden rounded up to a multiple of 64.
        kv_heads: Heads that keys and values have; by default all for ``gpt``, a quarter for ``llama``.
        dtype: ``fp32``, or ``bf16`` for parameters, activations and gradients.
        dropout: Probability of dropout on the hidden states and within attention.
        style: ``gpt`` (LayerNorm, GELU, biases, learned positions) or ``llama`` (RMSNorm, SwiGLU, no
            biases, rotary positions, grouped keys and values).

    Raises:
        ConfigError: The numbers do not make a model.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int = 256
    ffn: int | None = None
    kv_heads: int | None = None
    dtype: Literal["fp32", "bf16"] = "bf16"
    dropout: float = 0.1
    style: Literal["gpt", "llama"] = "gpt"

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ConfigError(f"no such model: {problem}")

    @property
    def ffn_width(self) -> int:
        """Width inside the MLP, the default filled in."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.hidden if self.style == "gpt" else -(-8 * self.hidden // 3 // 64) * 64

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values, the default filled in."""
        if self.kv_heads is not None:
            return self.kv_heads
        return self.heads if self.style == "gpt" or self.heads % 4 else self.heads // 4

    def _problems(self) -> Iterator[str]:
        counts = dataclasses.asdict(self)
        for name in ("layers", "hidden", "heads", "sequence", "vocab", "ffn", "kv_heads"):
            if counts[name] is not None and counts[name] < 1:
                yield f"{name} is {counts[name]}, and must be at least 1"
        if self.dtype not in _DTYPES:
            yield f"dtype is {self.dtype!r}, and must be one of {', '.join(_DTYPES)}"
        if self.style not in _STYLES:
            yield f"style is {self.style!r}, and must be one of {', '.join(_STYLES)}"
        if not 0 <= self.dropout < 1:
            yield f"dropout is {self.dropout}, and must be at least 0 and below 1"
        if self.hidden % self.heads:
            yield f"hidden {self.hidden} is not a multiple of heads {self.heads}"
        if self.heads % self.key_value_heads:
            yield f"heads {self.heads} is not a multiple of kv_heads {self.key_value_heads}"
        if self.style == "llama" and (self.hidden // self.heads) % 2:
            yield f"rotary positions need an even head size, not {self.hidden // self.heads}"


def build_gpt(shape: GptShape, *, seed: int) -> nn.Module:
    """Build a megatron-core ``GPTModel``; where it is bf16, inside its ``Float16Module``.

    Needs :func:`~tba_lab.megatron_cpu.single_process` or an initialised megatron-core around it.

    Args:
        shape: The model.
        seed: Decides the weights: they are the same for a seed on every device. The random number
            generators are left as they were.

    Returns:
        The model, in training mode, on the device that megatron-core trains on.

    Raises:
        MissingDependencyError: megatron-core is not installed.
    """
    require_core("building a GPT model")
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    with _building(seed):
        config = _config(shape)
        model: nn.Module = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=config.normalization),
            vocab_size=shape.vocab,
            max_sequence_length=shape.sequence,
            position_embedding_type="learned_absolute" if shape.style == "gpt" else "rope",
            share_embeddings_and_output_weights=shape.style == "gpt",
        )
    if shape.dtype == "bf16":
        model = Float16Module(config, model)
    return model.to(training_device())


def build_encoder(shape: GptShape, *, seed: int) -> nn.Module:
    """Build a bidirectional ``TransformerBlock`` of megatron-core, as BERT has it, without embeddings.

    Call it with hidden states of shape (sequence, batch, hidden) in the shape's dtype and
    ``attention_mask=None``; it returns the same shape.

    Args:
        shape: The model; ``sequence`` and ``vocab`` play no part.
        seed: Decides the weights, as in :func:`build_gpt`.

    Raises:
        ConfigError: The shape is Llama-style: its rotary positions come with the embeddings.
        MissingDependencyError: megatron-core is not installed.
    """
    require_core("building an encoder")
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    if shape.style != "gpt":
        raise ConfigError(f"an encoder block has the style 'gpt', not {shape.style!r}")
    with _building(seed):
        block: nn.Module = TransformerBlock(_config(shape), bert_layer_local_spec)
    return block.to(training_device(), _DTYPES[shape.dtype])


def gpt_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the next token, a scalar in fp32.

    Args:
        model: What :func:`build_gpt` returned, wrapped or not.
        batch: One micro-batch; it is moved to the model's device.
    """
    device = next(model.parameters()).device
    losses: Tensor = model(
        batch["tokens"].to(device),
        batch["position_ids"].to(device),
        batch["attention_mask"].to(device),
        labels=batch["labels"].to(device),
    )
    weights = batch["loss_mask"].to(device)
    return (losses.float() * weights).sum() / weights.sum()


def random_batch(shape: GptShape, *, batch_size: int, seed: int) -> Batch:
    """Return a micro-batch of random tokens: the shapes of real ones where their content does not matter."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, shape.vocab, (batch_size, shape.sequence + 1), generator=generator)
    return Batch(
        tokens=text[:, :-1].clone(),
        labels=text[:, 1:].clone(),
        position_ids=torch.arange(shape.sequence).repeat(batch_size, 1),
        attention_mask=causal_mask(shape.sequence),
        loss_mask=torch.ones(batch_size, shape.sequence),
    )


def causal_mask(sequence: int) -> Tensor:
    """Return true where a token would look ahead, bool of shape (1, 1, sequence, sequence)."""
    return torch.ones(sequence, sequence, dtype=torch.bool).triu(diagonal=1)[None, None]


def model_flops(shape: GptShape, batch_size: int) -> float:
    """Floating-point operations that forward and backward of one step need, by the algorithm.

    A multiplication of (m, k) by (k, n) matrices counts 2mkn, backward counts twice the forward, and
    what is not a matrix multiplication counts nothing. Attention counts the whole square, as is usual,
    though half of it is masked. A recomputed forward does not count: it is a price, not progress.

    With ``gpt``'s defaults this is 72 B s l h^2 (1 + s / 6h + V / 12lh), equation 3 of Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021), less the
    recomputation that the paper adds (a quarter of 96 B s l h^2).

    Args:
        shape: The model.
        batch_size: Sequences in the step, over all its micro-batches.
    """
    hidden, sequence = shape.hidden, shape.sequence
    key_value_width = hidden * shape.key_value_heads // shape.heads
    attention_weights = 2 * hidden * hidden + 2 * hidden * key_value_width
    mlp_weights = (2 if shape.style == "gpt" else 3) * hidden * shape.ffn_width
    scores_and_context = 2 * sequence * hidden
    multiplied = shape.layers * (attention_weights + mlp_weights + scores_and_context) + hidden * shape.vocab
    return 3.0 * 2.0 * multiplied * sequence * batch_size


def _config(shape: GptShape) -> Any:
    """Return the megatron-core ``TransformerConfig`` of a shape."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_value_heads,
        ffn_hidden_size=shape.ffn_width,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        params_dtype=_DTYPES[shape.dtype],
        bf16=shape.dtype == "bf16",
        use_cpu_initialization=True,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **(_LLAMA if shape.style == "llama" else {}),
    )


_LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
}


@contextlib.contextmanager
def _building(seed: int) -> Iterator[None]:
    """Draws weights from a generator of their own, on the CPU; ``torch.manual_seed`` would touch a GPU's.

    What is silenced are megatron-core's warnings about its own defaults: the scope of CUDA graphs, which
    are off, and a width that its layers leave to its configuration.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated", module=r"megatron\.")
        warnings.filterwarnings("ignore", message="MLP requires ffn_hidden_size", module=r"megatron\.")
        torch.default_generator.manual_seed(seed)
        yield
