"""Layers that save what Transformer Engine documents its own to save."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SIZE = 64


class Quantized:
    """A tensor in eight bits; like ``QuantizedTensorStorage`` it is no ``torch.Tensor``."""

    def __init__(self, tensor: Tensor) -> None:
        self.scale: Tensor | None = tensor.detach().abs().amax() / 127
        self.data: Tensor | None = (tensor.detach() / self.scale).round().to(torch.int8).view(torch.uint8)

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Quantized]:
        """Its raw parts; the object keeps neither of them."""
        parts = [self.data, self.scale]
        shell = object.__new__(Quantized)
        shell.data = shell.scale = None
        return parts, shell

    def restore_from_saved(self, parts: list[Tensor]) -> list[Tensor]:
        """Takes its parts back, returns those that are left."""
        self.data, self.scale, *left = parts
        return left

    def dequantize(self) -> Tensor:
        assert self.data is not None
        assert self.scale is not None
        return self.data.view(torch.int8) * self.scale


class FusedLinear(torch.autograd.Function):
    """One function for everything, which frees the parts that it owns as soon as backward has used them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, quantized_weight: Quantized) -> Tensor:
        quantized = Quantized(hidden)
        parts, ctx.shells = [], []
        for each in (quantized, quantized_weight):
            saved, shell = each.prepare_for_saving()
            parts += saved
            ctx.shells.append(shell)
        ctx.save_for_backward(*parts, weight)
        return quantized.dequantize() @ quantized_weight.dequantize().T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left = list(ctx.saved_tensors)
        for shell in ctx.shells:
            left = shell.restore_from_saved(left)
        hidden, weight = (shell.dequantize() for shell in ctx.shells)
        gradients = gradient @ weight, gradient.flatten(0, -2).T @ hidden.flatten(0, -2)
        for part in (ctx.shells[0].data, ctx.shells[0].scale):
            part.data = torch.empty(0, dtype=part.dtype)
        return *gradients, None


class FusedLayer(nn.Module):
    """A layer with a quantized copy of its weight, made by the first micro-batch and used by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / SIZE**0.5)
        self.workspace: Quantized | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.workspace is None:
            self.workspace = Quantized(self.weight)
        return FusedLinear.apply(hidden, self.weight, self.workspace)
