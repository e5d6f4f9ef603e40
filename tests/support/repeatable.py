"""A stack of layers that can be repeated, for tests to change one thing of; and loops that train it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import KIB, Drive, session_for
from torch import Tensor, nn

from tba_offload.config.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.session import Session

WIDTH, ROWS, LAYERS = 64, 32, 4
RECOMPUTED = [placement for placement in Placement if placement.recomputes]
SLOW = 6e6
"""Bytes a second: recomputing a layer takes a small part of what reading it back would."""


class Plain(nn.Module):
    """A layer that can be repeated; the others change one thing of it."""

    make_inner: Callable[[], nn.Module] = nn.Identity

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = type(self).make_inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.noise(F.gelu(self.inner(self.first(x)))))

    def noise(self, x: Tensor) -> Tensor:
        return x


def layer_of(noise: Any = Plain.noise, *, inner: Callable[[], nn.Module] = nn.Identity) -> type[Plain]:
    """Return a class of layers that do something else in their middle."""
    return type("Layer", (Plain,), {"noise": noise, "make_inner": staticmethod(inner)})


class Net(nn.Module):
    """Calls its layers one after the other; those that remember are given a memory."""

    def __init__(self, kind: type[Plain]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        kind = getattr(self.layers[0], "remembers", None)
        more = {"memory": kind({"seen": []})} if kind is not None else {}
        for layer in self.layers:
            x = layer(x, **more)
        return x


def make(kind: type[Plain], net: Callable[[type[Plain]], Net] = Net) -> Net:
    torch.manual_seed(0)
    return net(kind)


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def seed() -> None:
    """All generators that layers share."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002


def train(
    net: Net,
    session: Session | None = None,
    *,
    steps: int = 6,
    parts: int = 1,
    between: Callable[[Net], object] = id,
) -> list[Tensor]:
    """All losses, gradients and buffers of some steps.

    Args:
        net: The model.
        session: The session that is attached to it.
        steps: How many steps.
        parts: Micro-batches of a step, which all go forward before one goes back.
        between: What happens between forward and backward.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    seed()
    found: list[Tensor] = []
    for number in range(steps):
        net.train()
        with session.step() if session is not None else nullcontext():
            losses = [net(batch(number + part)).pow(2).mean() for part in range(parts)]
            between(net)
            for loss in losses:
                loss.backward()
        found += [*(loss.detach() for loss in losses), *(buffer.clone() for buffer in net.buffers())]
        found += [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found


def auto_session(net: Net, **options: Any) -> Session:
    """On a drive that takes many times as long as computing a layer anew."""
    drive = Drive()
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = SLOW
    options.setdefault("activation", 400 * KIB)
    return session_for(
        net, drive=drive, default=Placement.AUTO, in_flight=64 * KIB, on_slow="wait", **options
    )


def session_of(net: Net, placement: Placement) -> Session:
    """As :func:`auto_session` where the planner decides."""
    return auto_session(net) if placement is Placement.AUTO else session_for(net, default=placement)


def warm_up() -> None:
    """What a process allocates once, in its first step, is more than the budgets here."""
    net = make(Plain)
    with auto_session(net) as session:
        train(net, session, steps=1)


def failure(kind: type[Exception], function: Callable[[], object]) -> str:
    """What an error says; the error itself would keep the graph of its step."""
    try:
        function()
    except kind as error:
        return str(error)
    pytest.fail(f"{kind.__name__} was not raised")
