"""A model whose layers take the time that they are told to: they sleep, and save what a GPT's layer saves.

What a plan makes of a slow drive can be measured with it on a busy machine too, and is the same on each.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from tba_lab.gpt import GptShape

UNITS = (1, 1, 1, 1, 1, 1, 1, 1, 4, 4)
"""Sizes of what a layer saves, in those of its input: two norms, attention, and an MLP four times as wide."""

FORWARD = 0.06
"""Seconds of a layer's forward; its backward takes twice as long."""


class _Operation(torch.autograd.Function):
    """Saves copies of its input, as many as ``units`` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: int) -> Tensor:
        time.sleep(FORWARD * units / sum(UNITS))
        ctx.save_for_backward(torch.cat([x + 1.0] * units))
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        units = len(saved) // len(gradient)
        time.sleep(2 * FORWARD * units / sum(UNITS))
        return gradient * saved[: len(gradient)].clamp(-1, 1), None


class Layer(nn.Module):
    """One layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Run its operations, one after the other."""
        x = self.scale(x)
        for units in UNITS:
            x = _Operation.apply(x, units)
        return x


class Paced(nn.Module):
    """Layers, and a head."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape.hidden) for _ in range(shape.layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:  # noqa: ARG002 - as others
        """Return the loss."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=x.square().mean())
