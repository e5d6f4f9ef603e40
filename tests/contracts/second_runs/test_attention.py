"""Layers placed ``recompute-except-attention``: fused attention runs once, and no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from harness import COMPILER_LOOKS, KIB, session_for
from models import assert_same_tensors
from torch import Tensor, nn

from tba_offload.errors import SavedTensorModifiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.session import Session

    Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

PLACEMENT = "recompute-except-attention"
LAYERS = 3
BATCH, LENGTH, HEADS, HEAD = 2, 64, 4, 16
WIDTH = HEADS * HEAD
OUTPUT_BYTES = BATCH * LENGTH * WIDTH * 4
SUM_BYTES = BATCH * HEADS * LENGTH * 4
"""Of the logarithms of sums that attention puts out beside its output."""

ran: list[Tensor] = []
"""The sums of what the stand-in for another package has computed attention of."""


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2), 0.1)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k, v) + causal(v, k, q)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * HEAD**-0.5, dim=-1) @ v


@torch.compile(backend="aot_eager")
def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q * 1.5, k, v) * 0.5


class Layer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), attend
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, HEADS, HEAD)
        attended = self.attend(*mixed.permute(2, 0, 3, 1, 4).unbind())
        x = x + self.out(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


def layers_of(attend: Attend, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(attend) for _ in range(LAYERS))).to(dtype)


def step(model: nn.Sequential, number: int = 0, *, times: int = 1) -> list[Tensor]:
    torch.manual_seed(number)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=next(model.parameters()).dtype)
    loss = model(x).float().square().mean()
    for time in range(times):
        loss.backward(retain_graph=time + 1 < times)
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(4)]
    model.zero_grad()
    return found


def session_over(model: nn.Sequential, placement: str = PLACEMENT) -> Session:
    return session_for(model, layers=list(model), default=placement, min_tensor_bytes=KIB, in_flight=4 * KIB)


def assert_same_steps(
    attend: Attend, placement: str = PLACEMENT, dtype: torch.dtype = torch.float32, *, times: int = 1
) -> int:
    """Compare three steps with plain ones; return the bytes that the last one saves for the store."""
    model = layers_of(attend, dtype)
    expected = [step(model, number, times=times) for number in range(3)]
    with session_over(model, placement) as session:
        for number, plain in enumerate(expected):
            ran.clear()
            with session.step() as current:
                found = step(model, number, times=times)
            assert_same_tensors(found, plain)
    assert current.record is not None
    return current.record.offloaded_bytes + current.record.forwarded_bytes


CALLS = {causal: 1, twice: 2, grouped: 1, by_products: 0, compiled: 0, masked: None, dropping: None}
"""Outputs of fused attention that travel, where their number is known."""


@COMPILER_LOOKS
@pytest.mark.parametrize(
    ("attend", "calls"), CALLS.items(), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_all_attention_has_the_bits_of_plain_training(attend: Attend, calls: int | None) -> None:
    """What fused attention puts out travels."""
    sent = assert_same_steps(attend)
    if calls is not None:
        more = sent - assert_same_steps(attend, "recompute-offload")
        assert more == LAYERS * calls * (OUTPUT_BYTES + SUM_BYTES)


# Operations of other packages


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """The name under which FlashAttention has its forward."""
    ran.append(q.sum())
    weights = q @ k.transpose(-1, -2)
    return torch.softmax(weights, dim=-1) @ v, weights.logsumexp(-1)


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        output, sums = torch.ops.flash_attn._flash_attn_forward(q, k, v, dropout_p)
        ctx.save_for_backward(q, k, v, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, sums = ctx.saved_tensors
        weights = (q @ k.transpose(-1, -2) - sums.unsqueeze(-1)).exp()
        (given,) = gradients
        of_scores = weights * (given @ v.transpose(-1, -2) - (given * output).sum(-1, keepdim=True))
        return of_scores @ k, of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ given, None


@pytest.mark.parametrize(("dropout", "runs", "times"), [(0.0, 1, 1), (0.0, 1, 2), (0.1, 2, 2)])
def test_it_runs_once_unless_it_draws_random_numbers(dropout: float, runs: int, times: int) -> None:
    assert_same_steps(lambda q, k, v: Flash.apply(q, k, v, dropout), times=times)
    assert len(ran) == LAYERS * (1 + (runs - 1) * times)


# What else may happen


def test_what_is_changed_in_place_is_noticed_as_autograd_would() -> None:
    def changing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = causal(q, k, v)
        with torch.no_grad():
            output.mul_(2)
        return output

    model = layers_of(changing)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)
    with session_over(model) as session:
        with pytest.raises(SavedTensorModifiedError), session.step():
            step(model)
