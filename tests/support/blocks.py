"""Small residual blocks, schedules of them, and their training with and without a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from harness import assert_all_given_back, quiesce, session_for
from models import same_bits
from torch import Tensor, nn

if TYPE_CHECKING:
    from tba_offload.report.log import StepRecord
    from tba_offload.session import Session

WIDTH, INNER, ROWS, LENGTH = 64, 256, 4, 16
ONE = ROWS * LENGTH * INNER * 4
"""Bytes of the large activation of a block."""
Mix = Callable[[Tensor], Tensor]
Work = Callable[["Net", int], object]


class Block(nn.Module):
    """A residual block with one large activation ``h`` of shape (rows, length, inner), given to ``mix``."""

    def __init__(self, mix: Mix = torch.tanh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mix(self.up(x)))


class Net(nn.Module):
    """A few equal blocks.

    Attributes:
        settle: Waits until what was saved so far is in the store; without a session does nothing.
    """

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.settle: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_net(block: Callable[[], nn.Module] = Block, layers: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(block, layers)


def make_input(number: int = 0, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, length, WIDTH, generator=generator).requires_grad_()


def forward_backward(net: Net, number: int) -> list[Tensor]:
    x = make_input(number)
    loss = net(x).pow(2).mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


def backward_twice(net: Net, number: int) -> list[Tensor]:
    x = make_input(number)
    loss = net(x).pow(2).mean()
    loss.backward(retain_graph=True)
    once = [x.grad.clone(), *(p.grad.clone() for p in net.parameters())]  # type: ignore[union-attr]
    loss.backward()
    return [*once, x.grad]  # type: ignore[list-item]


def double_backward(net: Net, number: int) -> list[Tensor]:
    x = make_input(number)
    (grad,) = torch.autograd.grad(net(x).pow(2).mean(), x, create_graph=True)
    grad.pow(2).sum().backward()
    return [grad.detach(), x.grad]  # type: ignore[list-item]


def gradients(net: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad(set_to_none=True)
    return found


def run(net: Net, work: Work, session: Session | None, steps: int) -> list[list[Tensor]]:
    history = []
    for number in range(steps):
        torch.manual_seed(number)
        with session.step() if session is not None else nullcontext():
            results = work(net, number)
        history.append([*(results if isinstance(results, list) else []), *gradients(net)])
    return history


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for step, (some, others) in enumerate(zip(found, expected, strict=True)):
        assert some
        for index, (a, b) in enumerate(zip(some, others, strict=True)):
            assert same_bits(a, b), f"step {step}, tensor {index}"


def assert_transparent(
    work: Work = forward_backward,
    block: Callable[[], nn.Module] = Block,
    *,
    steps: int = 3,
    depth: int = 3,
    settled: bool = True,
    **settings: Any,
) -> list[StepRecord]:
    """Train with and without a session; return the records of the steps.

    Where it is settled, everything is in the store when the last layer has run, before backward begins.
    """
    expected = run(make_net(block, depth), work, None, steps)
    with attached(block, depth, **settings) as (net, session):
        if settled:
            net.layers[-1].register_forward_hook(lambda *_: net.settle())
        assert_same(run(net, work, session, steps), expected)
        assert_all_given_back(session)
        return session.records


def plain(
    work: Work = forward_backward, block: Callable[[], nn.Module] = Block, steps: int = 1
) -> list[list[Tensor]]:
    return run(make_net(block), work, None, steps)


@contextmanager
def attached(
    block: Callable[[], nn.Module] = Block, depth: int = 3, **settings: Any
) -> Iterator[tuple[Net, Session]]:
    net = make_net(block, depth)
    with session_for(net, layers=list(net.layers), **settings) as session:
        net.settle = partial(quiesce, session.offloader)
        yield net, session


def schedule(order: str) -> Work:
    """``F2 B0``: the forward of micro-batch 2, then the backward of micro-batch 0."""

    def work(net: Net, number: int) -> list[Tensor]:
        losses: dict[int, Tensor] = {}
        for word in order.split():
            index = int(word[1:])
            if word[0] == "F":
                losses[index] = net(make_input(10 * number + index)).pow(2).mean()
            else:
                losses[index].backward()
                del losses[index]
        assert not losses
        return []

    return work


SCHEDULES = {
    "accumulation": "F0 B0 F1 B1 F2 B2",
    "all forward, all backward": "F0 F1 F2 F3 B0 B1 B2 B3",
    "last in, first out": "F0 F1 F2 B2 B1 B0",
    "1F1B": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
}
