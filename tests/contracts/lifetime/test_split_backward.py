"""Backward in two passes, as zero-bubble pipelines have it: gradients of inputs, and later those of weights.

Between the two a graph lives on, and so does what its layers keep. The passes are those of PyTorch's own
pipelines, in one process and in an order that a test gives: ``F0 I0 F1 W0`` is the forward of micro-batch 0,
its gradients of inputs, another forward, and the gradients of weights. ``B`` is backward in one go, ``R`` the
same with ``retain_graph``, and ``D`` drops a loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_all_given_back, session_for
from models import same_bits
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from tba_offload.config.policy import Placement

if TYPE_CHECKING:
    from collections.abc import Callable


LAYERS, WIDTH = 3, 32
KEEP, OFFLOAD = Placement.KEEP, Placement.OFFLOAD


class Block(nn.Module):
    """Ends with a sum, to which the gradients of weights need not come."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """Backward comes to it in both passes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def make_stage(layer: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(LAYERS)))


def play(stage: nn.Module, order: str) -> list[Tensor]:
    inputs: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    split: dict[str, Any] = {}
    for letter, number in order.split():
        if letter == "F":
            generator = torch.Generator().manual_seed(int(number))
            inputs[number] = torch.randn(8, WIDTH, generator=generator).requires_grad_()
            losses[number] = stage(inputs[number]).pow(2).mean()
        elif letter == "I":
            _, split[number] = stage_backward_input(
                [losses[number]], None, [inputs[number]], stage.parameters()
            )
        elif letter == "W":
            del losses[number]
            stage_backward_weight(stage.parameters(), split.pop(number))
        elif letter == "D":
            del losses[number]
        else:
            losses[number].backward(retain_graph=letter == "R")
    return [x.grad for x in inputs.values() if x.grad is not None]


ORDERS = [
    "F0 F1 I0 F2 I1 W0 F3 W1 I2 I3 W2 W3",
    "F0 I0 F1 W0 I1 W1",
    "F0 R0 B0 F1 R1 R1 B1",
    "F0 R0 F1 D0 B1",
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("default", [OFFLOAD, KEEP, Placement.OFFLOAD_REMAT])
def test_all_is_given_back_when_the_last_pass_has_used_it(order: str, default: Placement) -> None:
    stage = make_stage()
    with session_for(stage, layers=list(stage), default=default, min_tensor_bytes=64) as session:
        with session.step():
            play(stage, order)
            assert_all_given_back(session)


def test_a_second_derivative_leaves_nothing_alive() -> None:
    """Gradients with a graph of their own retain the first one; their backward frees both."""
    stage = make_stage()
    with session_for(stage, layers=list(stage), default=OFFLOAD, min_tensor_bytes=64) as session:
        with session.step():
            x = torch.randn(8, WIDTH).requires_grad_()
            (gradient,) = torch.autograd.grad(stage(x).pow(2).mean(), x, create_graph=True)
            gradient.pow(2).sum().backward()
            del gradient
            assert_all_given_back(session)


@pytest.mark.parametrize("default", [OFFLOAD, KEEP, Placement.OFFLOAD_REMAT, Placement.RECOMPUTE])
@pytest.mark.parametrize("layer", [Block, Linear])
def test_the_bits_are_those_of_a_plain_run(default: Placement, layer: Callable[[], nn.Module]) -> None:
    plain, attached = make_stage(layer), make_stage(layer)
    expected = play(plain, "F0 F1 I0 F2 I1 W0 W1 I2 W2")
    with session_for(attached, layers=list(attached), default=default, min_tensor_bytes=64) as session:
        with session.step():
            found = play(attached, "F0 F1 I0 F2 I1 W0 W1 I2 W2")
    pairs = zip(plain.parameters(), attached.parameters(), strict=True)
    expected += [one.grad for one, _ in pairs if one.grad is not None]
    found += [other.grad for other in attached.parameters() if other.grad is not None]
    assert len(found) == len(expected) == 3 + len([*plain.parameters()])
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
