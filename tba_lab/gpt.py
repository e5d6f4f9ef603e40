"""megatron-core models in GPT and Llama style, and the choice of the faster dtype of a machine.

The models use megatron-core's "local" layers, without Transformer Engine, Apex and fused kernels, so a model
runs on a CPU and on a GPU.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tba_lab.megatron_cpu import training_device
from tba_offload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Batch = dict[str, Tensor]
"""Micro-batch of shape (batch, sequence). The attention mask is True where attention is forbidden."""


@dataclass(frozen=True)
class GptShape:
    """Size, dtype and style of a model.

    Style ``gpt`` has LayerNorm, GELU, biases and learned positions. Style ``llama`` has RMSNorm, SwiGLU, no
    biases, rotary positions, and grouped keys and values.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int = 256
    dtype: str = "bf16"
    dropout: float = 0.1
    style: str = "gpt"

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"the hidden size {self.hidden} is not a multiple of the {self.heads} heads")

    @property
    def ffn_width(self) -> int:
        """Width of the MLP: 4 x hidden, or for ``llama`` 8/3 x hidden, rounded up to a multiple of 64."""
        return 4 * self.hidden if self.style == "gpt" else -(-8 * self.hidden // 3 // 64) * 64

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and values. Style ``llama`` has a quarter of the attention heads."""
        return self.heads if self.style == "gpt" or self.heads % 4 else self.heads // 4

    @property
    def layer_parameters(self) -> int:
        """Number of weights in a layer, without biases and norms (about 0.1 %)."""
        attention = 2 * self.hidden * (self.hidden + self.hidden * self.key_value_heads // self.heads)
        return attention + (2 if self.style == "gpt" else 3) * self.hidden * self.ffn_width


def build_gpt(shape: GptShape, *, seed: int) -> nn.Module:
    """Build a megatron-core ``GPTModel``. For bf16, wrap the model in ``Float16Module``.

    megatron-core must be initialised, as :func:`~tba_lab.megatron_cpu.single_process` does. Equal seeds give
    equal weights on every device. The states of random number generators do not change.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    with drawing_weights(seed):
        config = transformer_config(shape)
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


@contextlib.contextmanager
def drawing_weights(seed: int) -> Iterator[None]:
    """Draw weights from a separate generator within the block, and hide warnings of megatron-core."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated", module=r"megatron\.")
        warnings.filterwarnings("ignore", message="MLP requires ffn_hidden_size", module=r"megatron\.")
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed GPUs
        yield


_LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
}


def transformer_config(shape: GptShape) -> Any:
    """Return the megatron-core configuration of a shape."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_value_heads,
        ffn_hidden_size=shape.ffn_width,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        params_dtype=DTYPES[shape.dtype],
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


def gpt_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the next token in fp32, on the model's device."""
    device = next(model.parameters()).device
    losses: Tensor = model(
        batch["tokens"].to(device),
        batch["position_ids"].to(device),
        batch["attention_mask"].to(device),
        labels=batch["labels"].to(device),
    )
    weights = batch["loss_mask"].to(device)
    return (losses.float() * weights).sum() / weights.sum()


def batch_of(text: Tensor) -> Batch:
    """Return a micro-batch from tokens of shape (batch, sequence + 1), for next-token prediction."""
    count, sequence = len(text), text.shape[1] - 1
    return Batch(
        tokens=text[:, :-1].clone(),
        labels=text[:, 1:].clone(),
        position_ids=torch.arange(sequence).repeat(count, 1),
        attention_mask=causal_mask(sequence),
        loss_mask=torch.ones(count, sequence),
    )


def random_batch(shape: GptShape, *, batch_size: int, seed: int) -> Batch:
    """Return a micro-batch of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return batch_of(torch.randint(0, shape.vocab, (batch_size, shape.sequence + 1), generator=generator))


def causal_mask(sequence: int) -> Tensor:
    """Return the causal mask, bool of shape (1, 1, sequence, sequence): True for later tokens."""
    return torch.ones(sequence, sequence, dtype=torch.bool).triu(diagonal=1)[None, None]


def model_flops(shape: GptShape, batch_size: int) -> float:
    """Return the floating point operations of forward and backward in one step.

    A product of (m, k) and (k, n) matrices counts 2mkn, and backward counts twice the forward. Attention
    counts the whole square, and recomputation does not count. With the defaults of ``gpt``, the result is
    72 B s l h^2 (1 + s / 6h + V / 12lh): equation 3 of Narayanan et al. (SC 2021) without recomputation.
    """
    layer = shape.layer_parameters + 2 * shape.sequence * shape.hidden
    return 6.0 * (shape.layers * layer + shape.hidden * shape.vocab) * shape.sequence * batch_size


def choose_dtype(dtype: str, device: torch.device) -> tuple[str, str]:
    """Return the dtype for training, and a text with the reason.

    ``auto`` times the matrix products of a linear layer in each dtype on one thread. CPUs without bf16
    instructions multiply bf16 up to a hundred times slower than fp32, in some orientations only.
    """
    instructions = f"instruction set {torch.backends.cpu.get_cpu_capability()}"
    if dtype != "auto":
        return dtype, f"dtype {dtype} (given by --dtype), {instructions}"
    rows, width = (2048, 2048) if device.type == "cuda" else (128, 384)
    seconds = dict.fromkeys(DTYPES, float("inf"))
    threads, began = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)  # on a busy machine threads wait for each other, which would be timed too
    try:
        for number in range(5):
            if number < 2 or time.perf_counter() - began < 0.3:  # the first product loads kernels
                for name, each in DTYPES.items():
                    x, gradient = (torch.ones(rows, width, dtype=each, device=device) for _ in range(2))
                    weight = torch.ones(width, width, dtype=each, device=device)
                    start = time.perf_counter()
                    (x @ weight.t() + gradient @ weight)[0, 0].item()
                    (gradient.t() @ x)[0, 0].item()
                    seconds[name] = min(seconds[name], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    rates = {name: 6e-9 * rows * width * width / each for name, each in seconds.items()}
    chosen = max(rates, key=lambda name: rates[name])
    measured = ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items())
    return chosen, f"dtype {chosen} (the faster one: {measured} GFLOP/s on one core), {instructions}"
