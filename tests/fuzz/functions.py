"""Functions of PyTorch's own kind and of the user's: what saves tensors in ways of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SavesItsOutput(torch.autograd.Function):
    """Saves input and output, and a number on its context."""

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
    """Works in place, and says so."""

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
    """Saves None, the same tensor twice, a view and a part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, None, x, x.transpose(0, 1), x[..., 1:3])
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _, again, turned, part = ctx.saved_tensors
        return gradient * (x + again) + 0 * turned.transpose(0, 1) + 0 * part.sum()
