"""Random programs: whatever a layer computes, it computes the same with a session, or fails the same way.

Each program is a list of operations on a pool of tensors: arithmetic, views of all kinds, changes in place,
copies, dropout. Where PyTorch finds a saved tensor changed in place, so do we.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from harness import KIB, Drive, assert_all_given_back, session_for
from models import same_bits
from torch import Tensor, nn

if TYPE_CHECKING:
    from tba_offload.session import Session

ROWS, WIDTH = 24, 40

# Some programs get a store that is too small for them.
pytestmark = pytest.mark.filterwarnings("ignore:the store is full:UserWarning")

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


def session_over(layers: nn.ModuleList, seed: int, default: str = "offload") -> Session:
    """Thresholds, ceilings and speeds vary with the seed."""
    chance = random.Random(seed)
    drive = Drive()
    drive.writes.seconds = chance.choice([0, 0, 0.0003])
    drive.reads.seconds = chance.choice([0, 0, 0.0003])
    return session_for(
        layers,
        layers=list(layers),
        drive=drive,
        default=default,
        min_tensor_bytes=chance.choice([0, 64, 512, 2 * KIB]),
        in_flight=chance.choice([None, 4 * KIB, 20 * KIB]),
        capacity=chance.choice([None, None, 60 * KIB]),
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_program_gives_the_same_bits(seed: int) -> None:
    expected = run(make_layers(seed, SAFE), None, 3)
    layers = make_layers(seed, SAFE)
    with session_over(layers, seed) as session:
        found = run(layers, session, 3)
        assert_all_given_back(session)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("seed", range(15))
def test_a_program_that_is_recomputed_gives_the_same_bits(seed: int) -> None:
    expected = run(make_layers(seed, SAFE), None, 3)
    layers = make_layers(seed, SAFE)
    with session_over(layers, seed, "recompute-offload") as session:
        found = run(layers, session, 3)
        assert {record.recomputed_scopes for record in session.report()} == {3}
        assert_all_given_back(session)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_program_that_changes_saved_tensors_fails_the_same_way(seed: int) -> None:
    operations = [*SAFE, *[change_what_may_be_saved] * 2]
    layers = make_layers(seed, operations)
    expected = run_or_error(make_layers(seed, operations))
    with session_over(layers, seed) as session:
        if isinstance(expected, RuntimeError):
            with pytest.raises(RuntimeError, match="in place"):
                run(layers, session, 2)
            return
        found = run(layers, session, 2)
        assert_all_given_back(session)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def run_or_error(layers: nn.ModuleList) -> list[Tensor] | RuntimeError:
    """What two steps give without a session, or that PyTorch found a saved tensor changed."""
    try:
        return run(layers, None, 2)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return error
