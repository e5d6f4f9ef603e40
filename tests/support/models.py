"""Small models of the kinds that people train, in plain torch, and one training step of each."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tba_offload.report.log import StepRecord
    from tba_offload.session import Session

HIDDEN, HEADS, SEQUENCE, VOCAB = 64, 4, 32, 128


class GptBlock(nn.Module):
    """Pre-norm block: fused QKV whose parts are strided views, stock attention, GELU, dropout."""

    def __init__(self, dropout: float, *, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.causal = causal

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, HEADS, 3 * HIDDEN // HEADS).transpose(1, 2).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        if self.causal:
            scores = scores.masked_fill(
                torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1), float("-inf")
            )
        weights = self.dropout(torch.softmax(scores.float(), dim=-1).to(x.dtype))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class EncoderBlock(GptBlock):
    """Post-norm, bidirectional, as in BERT."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout, causal=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attend(x)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class LlamaBlock(nn.Module):
    """RMSNorm, SwiGLU by ``chunk``, grouped-query attention, rotary embedding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.groups, self.head = 2, HIDDEN // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * self.groups) * self.head, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up, self.down = nn.Linear(HIDDEN, 344, bias=False), nn.Linear(172, HIDDEN, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        per_group = HEADS // self.groups
        mixed = self.qkv(self.norm1(x)).view(batch, length, self.groups, per_group + 2, self.head)
        q, k, v = mixed[..., :per_group, :], mixed[..., per_group, :], mixed[..., per_group + 1, :]
        q = rotate(q.reshape(batch, length, HEADS, self.head).transpose(1, 2), rotary)
        k = rotate(k.transpose(1, 2), rotary).repeat_interleave(per_group, dim=1)
        v = v.transpose(1, 2).repeat_interleave(per_group, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.silu(gate) * up))


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Model(nn.Module):
    def __init__(self, kind: str, *, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        block: Callable[[float], nn.Module] = {"gpt": GptBlock, "llama": LlamaBlock, "encoder": EncoderBlock}[
            kind
        ]
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.kind = kind
        angles = torch.outer(
            torch.arange(SEQUENCE), 1e4 ** -torch.linspace(0, 1, HIDDEN // HEADS // 2)
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, (self.cos.to(x.dtype), self.sin.to(x.dtype))) if self.kind == "llama" else layer(x)
        return self.head(self.norm(x))


def make_model(
    kind: str = "gpt", *, seed: int = 1, dtype: torch.dtype = torch.float32, **sizes: object
) -> Model:
    torch.manual_seed(seed)
    return Model(kind, **sizes).to(dtype)  # type: ignore[arg-type]


def make_tokens(seed: int, batch: int = 4) -> Tensor:
    return torch.randint(0, VOCAB, (batch, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


def numbered_loss(model: nn.Module, number: int) -> Tensor:
    return loss_of(model, make_tokens(number))


def one_step(session: Session, model: nn.Module, number: int = 0) -> StepRecord:
    with session.step() as step:
        numbered_loss(model, number).backward()
    model.zero_grad()
    assert step.record is not None
    return step.record


@dataclass
class History:
    """What must not change: losses and gradients of every step, parameters and random states at the end."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    random_states: list[Tensor] = field(default_factory=list)

    def tensors(self) -> Iterator[Tensor]:
        yield from (*self.losses, *self.gradients, *self.parameters, *self.random_states)


def train(
    model: nn.Module,
    session: object = None,
    *,
    steps: int = 3,
    micro_batches: int = 1,
    before_step: Callable[[int], object] | None = None,
    loss: Callable[[nn.Module, int], Tensor] = numbered_loss,
    seed: Callable[[int], object] = torch.manual_seed,
) -> History:
    history = History()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seed(7)
    for step in range(steps):
        if before_step is not None:
            before_step(step)
        with session.step() if session is not None else nullcontext():  # type: ignore[attr-defined]
            for micro_batch in range(micro_batches):
                result = loss(model, 100 * step + micro_batch) / micro_batches
                result.backward()
                history.losses.append(result.detach())
        history.gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    history.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    history.random_states = [torch.get_rng_state()]
    return history


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: -0 is not +0, and a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def assert_same_tensors(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    pairs = list(zip(found, expected, strict=True))
    assert pairs
    different = [index for index, (a, b) in enumerate(pairs) if not same_bits(a.detach(), b.detach())]
    assert not different, f"{len(different)} of {len(pairs)} tensors differ, first is number {different[0]}"


def assert_same_history(found: History, expected: History) -> None:
    assert_same_tensors(found.tensors(), expected.tensors())
