"""Frozen weights are there by whatever way backward comes to a layer, and however its last run ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import assert_same_tensors, same_bits
from test_frozen_weights import WEIGHTS, WIDTH, Model, offloaded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from tba_offload.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def without_its_layer(model: Model, x: Tensor) -> Tensor:
    """A part of each layer runs, as where a model generates by ``layer.step()``."""
    for layer in model.layers:
        x = layer.two(torch.nn.functional.gelu(layer.one(x)))
    return x.sum()


def test_a_part_that_runs_without_its_layer_has_its_weights(tmp_path: Path) -> None:
    model, plain = Model().eval(), Model().eval()
    expected = without_its_layer(plain, rows())
    expected.backward()
    with offloaded(model, tmp_path) as weights:
        with torch.no_grad():
            assert same_bits(without_its_layer(model, rows()), expected.detach())
        weights.peak_bytes = 0
        found = without_its_layer(model, rows())
        found.backward()
        assert WEIGHTS <= weights.peak_bytes <= 2 * WEIGHTS
    assert same_bits(found.detach(), expected.detach())
    assert_same_tensors(*(gradients_of(each) for each in (model, plain)))


def gradients_of(model: Model) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def rows() -> Tensor:
    return torch.arange(8 * WIDTH).reshape(8, WIDTH).div(400).sin().requires_grad_()


def of_inner_module(model: Model, x: Tensor) -> None:
    seen: list[Tensor] = []
    handle = model.layers[1].one.register_forward_hook(lambda _layer, _args, output: seen.append(output))
    model(x)
    handle.remove()
    seen[0].pow(2).sum().backward()


def of_checkpointed_pairs(model: Model, x: Tensor) -> None:
    def run(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x)["hidden"]

    checkpoint_sequential([run(layer) for layer in model.layers], 2, x, use_reentrant=True).sum().backward()


def with_a_gradient_inside(model: Model, x: Tensor) -> None:
    def inside(layer: nn.Module, arguments: tuple[Tensor]) -> None:
        value = arguments[0].detach().requires_grad_()
        torch.autograd.grad(layer.one(value).sum(), value)

    handle = model.layers[2].register_forward_pre_hook(inside)
    model(x).sum().backward()
    handle.remove()


def with_an_evaluation_inside(model: Model, x: Tensor) -> None:
    def evaluate(_: Tensor) -> None:
        with torch.no_grad():
            model(rows())

    loss = model(x).sum()
    handle = model.layers[2].two.up.weight.register_hook(evaluate)
    loss.backward()
    handle.remove()


WAYS = (of_inner_module, of_checkpointed_pairs, with_a_gradient_inside, with_an_evaluation_inside)


@pytest.mark.parametrize("backward", WAYS)
def test_backward_comes_to_a_layer_in_another_way(
    backward: Callable[[Model, Tensor], None], tmp_path: Path
) -> None:
    gradients = []
    for model in (Model(), Model()):
        x = rows()
        torch.manual_seed(1)
        if not gradients:
            backward(model, x)
        else:
            with offloaded(model, tmp_path) as weights:
                backward(model, x)
                assert weights.resident_bytes == 0
        assert x.grad is not None
        gradients.append([*gradients_of(model), x.grad])
    assert_same_tensors(*gradients)


@pytest.mark.parametrize(
    ("said", "use"),
    [
        ("create_graph=True", lambda net, x: torch.autograd.grad(net(x).sum(), x, create_graph=True)),
        (r"transforms of torch\.func", lambda net, x: torch.func.grad(lambda y: net(y).sum())(x.detach())),
    ],
)
def test_what_cannot_have_its_weights_is_named(
    said: str, use: Callable[[Model, Tensor], object], tmp_path: Path
) -> None:
    model = Model().eval()
    with offloaded(model, tmp_path), pytest.raises(SessionError, match=said):
        use(model, rows())


@pytest.mark.parametrize("at_backward", [False, True])
def test_after_an_interrupt_training_goes_on(at_backward: bool, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model, other = Model().eval(), Model().eval()
    inner = model.layers[2].two
    with offloaded(model, tmp_path) as weights:
        hook = inner.up.weight.register_hook if at_backward else inner.register_forward_pre_hook
        handle = hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(rows()).sum().backward()
        handle.remove()
        model.zero_grad()
        with torch.no_grad():
            model(rows())
        assert weights.resident_bytes == 0
        for each in (model, other):
            each(rows()).sum().backward()
        assert weights.resident_bytes == 0
    assert_same_tensors(*(gradients_of(each) for each in (model, other)))
