"""Layers that are more than a function: modules with parameters, buffers and habits of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .operations import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable


class Mapped(nn.Module):
    def __init__(self, width: int, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.linear(x))


class Turned(nn.Module):
    """A module that wants (batch, width, length)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.transpose(1, 2)).transpose(1, 2)


class First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


class Attends(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=mask)[0]


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            which = (chosen == number).nonzero().flatten()
            if len(which):
                out = out.index_copy(0, which, (expert(rows[which]) * weights[which, None]).to(out.dtype))
        if self.training:
            self.counts += chosen.bincount(minlength=3)
        return out.view_as(x)


class Counts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return self.linear(x).tanh() * (1 + self.calls % 3)


class Remembers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        out = y if self.last is None else y * self.last.mean()
        self.last = y.detach()
        return out


class HoldsWhatItSaves(nn.Module):
    """Keeps a tensor that is saved alive, as a model that gives all hidden states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        self.held = y.detach()
        return y * y


class RunningMean(nn.Module):
    """A buffer is saved by the graph and replaced."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.mean = self.mean * 0.9 + 0.1 * y.detach().mean((0, 1)).to(self.mean)
        return y * self.mean


class Adapter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x)) + self.up(self.down(x))


class Casts(nn.Module):
    """Parameters of several kinds: a scalar, an unused one, one with a view, one of another data type."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(7, 3))
        self.rows = nn.Parameter(torch.randn(2 * width, width) * 0.1)
        self.low = nn.Parameter(torch.randn(width).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows[::2].to(x.dtype)
        return (x @ rows * self.scale.to(x.dtype)).tanh() * self.low.to(x.dtype)


MODULES: dict[str, Callable[[int], nn.Module]] = {
    **{name: lambda width, f=function: Mapped(width, f) for name, function in OPERATIONS.items()},
    "mlp": lambda width: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
    "convolution": lambda width: Turned(nn.Conv1d(width, width, 3, padding=1)),
    "layer norm": nn.LayerNorm,
    "rms norm": nn.RMSNorm,
    "group norm": lambda width: Turned(nn.GroupNorm(2, width)),
    "batch norm": lambda width: Turned(nn.BatchNorm1d(width)),
    "instance norm": lambda width: Turned(nn.InstanceNorm1d(width, affine=True, track_running_stats=True)),
    "lstm": lambda width: First(nn.LSTM(width, width, batch_first=True)),
    "gru": lambda width: First(nn.GRU(width, width // 2, bidirectional=True, batch_first=True)),
    "encoder layer": lambda width: nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True),
    "multihead attention": Attends,
    "experts": Experts,
    "counts": Counts,
    "remembers": Remembers,
    "holds what it saves": HoldsWhatItSaves,
    "running mean": RunningMean,
    "adapter": Adapter,
    "odd parameters": Casts,
    "weight norm": lambda width: parametrizations.weight_norm(nn.Linear(width, width)),
    "spectral norm": lambda width: parametrizations.spectral_norm(nn.Linear(width, width)),
    "orthogonal": lambda width: parametrizations.orthogonal(nn.Linear(width, width)),
    "alpha dropout": lambda width: nn.Sequential(nn.Linear(width, width), nn.SELU(), nn.AlphaDropout(0.2)),
    "rrelu module": lambda width: nn.Sequential(nn.Linear(width, width), nn.RReLU(inplace=True)),
}
"""Makes a layer of a width."""
