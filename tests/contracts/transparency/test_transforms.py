"""Transforms of ``torch.func`` around a model: they forbid hooks, so its layers run in them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from covering import of_which
from harness import session_for
from repeatable import Net, Plain, assert_same, batch, make
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from tba_offload import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 3
PLACEMENTS = [Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.AUTO]


def gradients(net: Net, number: int) -> list[Tensor]:
    """Of the parameters, as a function of them."""
    found: dict[str, Tensor] = grad(lambda given: loss_of(net, given, batch(number)))(parameters_of(net))
    return list(found.values())


def gradients_of_samples(net: Net, number: int) -> list[Tensor]:
    one = grad(lambda given, sample: loss_of(net, given, sample[None]))
    found: dict[str, Tensor] = vmap(one, (None, 0))(parameters_of(net), batch(number))
    return list(found.values())


def directions(net: Net, number: int) -> list[Tensor]:
    """Forward mode."""
    given = parameters_of(net)
    return list(jvp(lambda given: loss_of(net, given, batch(number)), (given,), (given,)))


def parameters_of(net: Net) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def loss_of(net: Net, given: dict[str, Tensor], x: Tensor) -> Tensor:
    loss: Tensor = functional_call(net, given, (x,)).pow(2).mean()
    return loss


def train(net: Net, transform: Callable[[Net, int], list[Tensor]]) -> list[Tensor]:
    """Transforms before, within and after steps of ordinary training, by an update that hooks do not see."""
    found = []
    for number in range(STEPS):
        found += transform(net, number)
        loss = net(batch(number)).pow(2).mean()
        found += transform(net, number + 1)
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
        net.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:layer 0 .* runs inside saved-tensor hooks or a transform")
@pytest.mark.parametrize("placement", of_which(PLACEMENTS, Placement.OFFLOAD, Placement.RECOMPUTE))
@pytest.mark.parametrize("transform", [gradients, gradients_of_samples, directions])
@pytest.mark.parametrize("measure_memory", [False, True])
def test_transforms_of_the_model_give_the_same_bits(
    transform: Callable[[Net, int], list[Tensor]], placement: Placement, *, measure_memory: bool
) -> None:
    expected = train(make(Plain), transform)
    net, options = make(Plain), {"measure_memory": measure_memory}
    with session_for(net, layers=list(net.layers), default=placement, **options) as session:
        assert_same(train(net, transform), expected)
        report = session.report()
    assert len(report) == STEPS
    went = [each.offloaded_bytes + each.forwarded_bytes + each.recomputed_scopes for each in report]
    if placement in {Placement.OFFLOAD, Placement.RECOMPUTE}:  # the ordinary steps go their ways
        assert all(went)
