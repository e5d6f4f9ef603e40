"""What a layer may do after a linear map: functions of a tensor, (batch, length, width) to the same.

Some are functions of the user's, which save tensors in ways of their own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def attention(x: Tensor, *, fused: bool, dropout: float = 0.0) -> Tensor:
    q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in (x, x.roll(1, -1), x.roll(2, -1)))
    if fused:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    else:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = F.dropout(scores.masked_fill(mask, -math.inf).softmax(-1), dropout) @ v
    return y.transpose(1, 2).flatten(2)


def set_a_part(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] = y[:, 1:].clone() * 0.5
    y[..., 0].add_(1)
    return y.tanh()


def what_was_saved_is_changed(x: Tensor) -> Tensor:
    y = x.tanh()
    z = y * y
    y.add_(1)
    return z


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        target = x.softmax(-1)
    return x * target + (x - x.detach())


def hooked(x: Tensor) -> Tensor:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y * y


def grad_inside(x: Tensor) -> Tensor:
    """An energy's gradient, as in a force field."""
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        (found,) = torch.autograd.grad(y.tanh().square().sum(), y, create_graph=True)
    return found


def backward_inside(x: Tensor) -> Tensor:
    """A small optimization of its own."""
    with torch.enable_grad():
        y = x.detach().clone().requires_grad_()
        y.cos().sum().backward()
    assert y.grad is not None
    return x * y.grad


def mapped(x: Tensor) -> Tensor:
    found: Tensor = torch.func.vmap(lambda row: row.sin() * row.sum())(x)
    return found


def routed(x: Tensor) -> Tensor:
    """Rows of data-dependent numbers, as experts get them."""
    flat = x.flatten(0, 1)
    chosen = flat.detach().sum(-1) > 0
    out = torch.zeros_like(flat)
    for number, which in enumerate((chosen, ~chosen)):
        rows = which.nonzero().squeeze(-1)
        out = out.index_add(0, rows, (flat[rows] * (number + 1)).tanh())
    return out.view_as(x)


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(x, y)
        ctx.factor = 0.5
        return y * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * (1 - y * y) * ctx.factor + x * 0


class ChangesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


class KeepsOnItsContext(torch.autograd.Function):
    """Keeps a tensor as an attribute, where no hook sees it, and gives what has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mask = x > 0
        order = x.argsort(-1)
        ctx.mark_non_differentiable(order)
        return x * ctx.mask, order

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient * ctx.mask


class SavesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, None, x, x.transpose(0, 1), x[..., 1:3])
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _, again, turned, part = ctx.saved_tensors
        return gradient * (x + again) + 0 * turned.transpose(0, 1) + 0 * part.sum()


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "attention": lambda x: attention(x, fused=False),
    "fused attention": lambda x: attention(x, fused=True),
    "attention with dropout": lambda x: attention(x, fused=False, dropout=0.2),
    "fused attention with dropout": lambda x: attention(x, fused=True, dropout=0.2),
    "gated": lambda x: F.silu(x.chunk(2, -1)[0]).repeat(1, 1, 2) * x,
    "relu in place": lambda x: (x * 1).relu_() * x,
    "sets a part": set_a_part,
    "changes what was saved": what_was_saved_is_changed,
    "transposed": lambda x: (x.transpose(1, 2).sigmoid() @ x).transpose(1, 2).sum(1, keepdim=True) + x,
    "expanded": lambda x: x[:, :1].expand_as(x) * x.square(),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, training=True),
    "noise": lambda x: x + torch.rand_like(x) * x,
    "distances": lambda x: torch.cdist(x, x).sum(-1, keepdim=True) * x,
    "norm by hand": lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt(),
    "in another data type": lambda x: (x.double().exp() - 1).to(x) * x.bfloat16().to(x),
    "without gradient": without_gradient,
    "hooked": hooked,
    "gradient inside": grad_inside,
    "backward inside": backward_inside,
    "mapped by vmap": mapped,
    "routed": routed,
    "function: output": SavesItsOutput.apply,
    "function: in place": lambda x: ChangesItsInput.apply(x * 1),
    "function: on context": lambda x: KeepsOnItsContext.apply(x)[0],
    "function: none and twice": SavesNone.apply,
}
