"""Random programs: lists of operations on a pool of tensors, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from tba_offload.session import Session

ROWS, WIDTH = 24, 40
Operation = Callable[[list[Tensor], random.Random], Tensor]


def whole(x: Tensor) -> Tensor:
    """Any tensor as one of the usual shape."""
    flat = x.reshape(-1)
    return flat.repeat(-(-ROWS * WIDTH // flat.numel()))[: ROWS * WIDTH].view(ROWS, WIDTH)


def pick(pool: list[Tensor], chance: random.Random) -> Tensor:
    return chance.choice(pool)


def times(pool: list[Tensor], chance: random.Random) -> Tensor:
    return whole(pick(pool, chance)) * whole(pick(pool, chance))


def product(pool: list[Tensor], chance: random.Random) -> Tensor:
    a, b = whole(pick(pool, chance)), whole(pick(pool, chance))
    return (a @ b.t() @ b) * 1e-2


def curve(pool: list[Tensor], chance: random.Random) -> Tensor:
    return chance.choice([torch.tanh, torch.sigmoid, torch.sin, torch.relu, F.gelu])(pick(pool, chance))


def square(pool: list[Tensor], chance: random.Random) -> Tensor:
    return pick(pool, chance).clamp(-2, 2).pow(2)


def normal(pool: list[Tensor], chance: random.Random) -> Tensor:
    return F.layer_norm(whole(pick(pool, chance)), (WIDTH,))


def drop(pool: list[Tensor], chance: random.Random) -> Tensor:
    return F.dropout(pick(pool, chance), 0.2)


def copy(pool: list[Tensor], chance: random.Random) -> Tensor:
    return pick(pool, chance).clone()


def part(pool: list[Tensor], chance: random.Random) -> Tensor:
    x = pick(pool, chance)
    dim = chance.randrange(x.dim())
    start = chance.randrange(x.shape[dim])
    return x.narrow(dim, start, chance.randint(1, x.shape[dim] - start))


def every_other(pool: list[Tensor], chance: random.Random) -> Tensor:
    x = pick(pool, chance)
    return x[..., chance.randrange(min(2, x.shape[-1])) :: chance.randint(1, 4)]


def turned(pool: list[Tensor], chance: random.Random) -> Tensor:
    return pick(pool, chance).transpose(0, -1)


def spread(pool: list[Tensor], chance: random.Random) -> Tensor:
    x = pick(pool, chance)
    return x[:1].expand(chance.randint(1, ROWS), *x.shape[1:])


def windows(pool: list[Tensor], chance: random.Random) -> Tensor:
    x = whole(pick(pool, chance))
    return x.unfold(-1, chance.randint(1, 8), chance.randint(1, 9)).flatten(1)


def mask(pool: list[Tensor], chance: random.Random) -> Tensor:
    x = whole(pick(pool, chance))
    return torch.where(x > 0, x, whole(pick(pool, chance)))


def sorted_rows(pool: list[Tensor], chance: random.Random) -> Tensor:
    return whole(pick(pool, chance)).sort(-1).values


def half(pool: list[Tensor], chance: random.Random) -> Tensor:
    return (pick(pool, chance).bfloat16() * 1.5).float()


def add_in_place(pool: list[Tensor], chance: random.Random) -> Tensor:
    return pick(pool, chance).clone().add_(0.5)


def curve_in_place(pool: list[Tensor], chance: random.Random) -> Tensor:
    x = pick(pool, chance).clone()
    return chance.choice([torch.tanh_, torch.sigmoid_, torch.relu_])(x)


def change_a_part(pool: list[Tensor], chance: random.Random) -> Tensor:
    x = whole(pick(pool, chance)).clone()
    x[chance.randrange(ROWS) :].mul_(0.5)
    return x


def change_what_may_be_saved(pool: list[Tensor], chance: random.Random) -> Tensor:
    """Legal if nobody needs the old values; otherwise backward must fail."""
    x = pool[-1]
    overlaps = 0 in x.stride() or x._base is not None or x.is_leaf
    return x * 1 if overlaps else x.mul_(0.9)


SAFE: list[Operation] = [
    *(times, times, product, curve, curve, square, normal, drop, copy, mask, sorted_rows, half),
    *(part, every_other, turned, spread, windows),
    *(add_in_place, curve_in_place, change_a_part),
]


class Program(nn.Module):
    """A layer that runs a program, always the same one."""

    def __init__(self, seed: int, operations: list[Operation]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seed = seed
        self.operations = operations

    def forward(self, x: Tensor) -> Tensor:
        chance = random.Random(self.seed)
        pool = [x, self.linear(x)]
        for _ in range(14):
            pool.append(chance.choice(self.operations)(pool, chance))
        return torch.tanh(torch.stack([whole(tensor) for tensor in pool[-5:]]).sum(0)) + x


def make_layers(seed: int, operations: list[Operation]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Program(100 * seed + index, operations) for index in range(3))


def run(layers: nn.ModuleList, session: Session | None, steps: int) -> list[Tensor]:
    results: list[Tensor] = []
    for number in range(steps):
        torch.manual_seed(number)
        x = torch.randn(ROWS, WIDTH).requires_grad_()
        with session.step() if session is not None else nullcontext():
            y = x * 1
            for layer in layers:
                y = layer(y)
            if session is not None and number % 2:
                session.offloader.quiesce()
            y.pow(2).mean().backward()
        assert x.grad is not None
        results += [y.detach(), x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]
        layers.zero_grad(set_to_none=True)
    return results
