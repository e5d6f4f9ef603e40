"""Layers placed ``recompute-except-attention``: fused attention runs once, and no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from harness import COMPILER_LOOKS, KIB, session_for
from models import same_bits
from torch import Tensor, nn

from tba_offload.errors import SavedTensorModifiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.session import Session

PLACEMENT = "recompute-except-attention"
BATCH, LENGTH, HEADS, HEAD = 2, 64, 4, 16
WIDTH = HEADS * HEAD
OUTPUT_BYTES = BATCH * LENGTH * WIDTH * 4
SUM_BYTES = BATCH * HEADS * LENGTH * 4
"""Of the logarithms of sums that attention puts out beside its output."""


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


WAYS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    *(causal, masked, grouped, dropping, twice, by_products, compiled),
]


class Layer(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), attend
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, HEADS, HEAD)
        attended = self.attend(*mixed.permute(2, 0, 3, 1, 4).unbind())
        x = x + self.out(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


def layers_of(attend: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(attend) for _ in range(3))).to(dtype)


def step(model: nn.Sequential, number: int = 0, *, times: int = 1) -> list[Tensor]:
    """What one step gives: the loss, the gradients, and what is drawn next."""
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


@COMPILER_LOOKS
@pytest.mark.parametrize(
    ("attend", "dtype"),
    [*((attend, torch.float32) for attend in WAYS), *((each, torch.bfloat16) for each in (causal, masked))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_all_attention_has_the_bits_of_plain_training(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    model = layers_of(attend, dtype)
    expected = [step(model, number) for number in range(3)]
    with session_over(model) as session:
        for number, plain in enumerate(expected):
            with session.step():
                found = step(model, number)
            assert len(found) == len(plain)
            assert all(map(same_bits, found, plain))


def sent(attend: Callable[[Tensor, Tensor, Tensor], Tensor], placement: str) -> int:
    """Bytes that a step sends to the store, or would if backward did not come first."""
    model = layers_of(attend, torch.float32)
    with session_over(model, placement) as session:
        for number in range(3):
            with session.step() as current:
                step(model, number)
    assert current.record is not None
    return current.record.offloaded_bytes + current.record.forwarded_bytes


@COMPILER_LOOKS
@pytest.mark.parametrize(
    ("attend", "calls"),
    [(causal, 1), (twice, 2), (grouped, 1), (by_products, 0), (compiled, 0)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_it_puts_out_travels_where_a_gradient_is_wanted(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], calls: int
) -> None:
    more = sent(attend, PLACEMENT) - sent(attend, "recompute-offload")
    assert more == 3 * calls * (OUTPUT_BYTES + SUM_BYTES)


# Operations of other packages


ran: list[Tensor] = []
"""The sums of what the stand-in for another package has computed attention of."""


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """The name under which FlashAttention has its forward."""
    ran.append(q.sum())
    weights = q @ k.transpose(-1, -2)
    return torch.softmax(weights, dim=-1) @ v, weights.logsumexp(-1)


class Flash(torch.autograd.Function):
    operation = "_flash_attn_forward"

    @classmethod
    def forward(cls, ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        output, sums = getattr(torch.ops.flash_attn, cls.operation)(q, k, v, dropout_p)
        ctx.save_for_backward(q, k, v, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, sums = ctx.saved_tensors
        weights = (q @ k.transpose(-1, -2) - sums.unsqueeze(-1)).exp()
        (given,) = gradients
        of_scores = weights * (given @ v.transpose(-1, -2) - (given * output).sum(-1, keepdim=True))
        return of_scores @ k, of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ given, None


def by_package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Flash.apply(q, k, v, 0.0)


def by_package_dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Flash.apply(q, k, v, 0.1)


@pytest.mark.parametrize(
    ("attend", "runs", "times"),
    [(by_package, 1, 1), (by_package, 1, 2), (by_package_dropping, 2, 2)],
)
def test_it_runs_once_unless_it_draws_random_numbers(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], runs: int, times: int
) -> None:
    model = layers_of(attend, torch.float32)
    expected = [step(model, number, times=times) for number in range(3)]
    with session_over(model) as session:
        for number, plain in enumerate(expected):
            ran.clear()
            with session.step():
                found = step(model, number, times=times)
            assert all(map(same_bits, found, plain))
    assert len(ran) == len(model) * (1 + (runs - 1) * times)


# What else may happen


def test_what_is_changed_in_place_is_noticed_as_autograd_would() -> None:
    def changing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = causal(q, k, v)
        with torch.no_grad():
            output.mul_(2)
        return output

    model = layers_of(changing, torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)
    with session_over(model) as session:
        with pytest.raises(SavedTensorModifiedError), session.step():
            step(model)


def test_closing_the_last_session_leaves_the_operation_as_it_was() -> None:
    operation = "aten::_scaled_dot_product_flash_attention_for_cpu"

    def is_looked_at() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operation, "BackendSelect")

    for _ in range(2):
        assert not is_looked_at()
        model = layers_of(causal, torch.float32)
        with session_over(model) as session:
            with session.step():
                step(model)
            assert is_looked_at()
        assert not is_looked_at()
