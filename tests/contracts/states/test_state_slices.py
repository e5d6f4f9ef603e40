"""A parameter whose states are larger than a sub-group is cut: no slice is forgotten, or read as another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import same_bits
from torch import nn, optim

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ELEMENTS = 4096


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    """Two, each of which takes four sub-groups of a kibibyte of states; with gradients."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(ELEMENTS, generator=generator)) for _ in range(2)]
    for number, each in enumerate(made):
        each.grad = torch.full((ELEMENTS,), number + 1.0)
    return made[0], made[1]


def momentum(parameters: Any, **settings: Any) -> optim.SGD:
    return optim.SGD(parameters, momentum=0.9, **{"lr": 0.1} | settings)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "store": {"directories": [str(tmp_path)], "kind": "file"},
        "states": {"sub_group_bytes": "4KiB"},
    }


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_modules_are_converted_by_swapping_tensors(config: dict[str, Any], swapping: None) -> None:
    (found, _), (expected, _) = parameters(), parameters()
    optimizer, plain = momentum([found]), momentum([expected])
    with tba.offload_optimizer(optimizer, config):
        for each, parameter in ((optimizer, found), (plain, expected)):
            each.step()
            parameter.grad = None
            module = nn.Module()
            module.register_parameter("weight", parameter)
            module.double()
            assert module.weight is parameter
            parameter.grad = torch.ones(ELEMENTS, dtype=torch.float64)
            each.step()
    assert found.dtype is torch.float64
    assert same_bits(found.detach(), expected.detach())


def test_an_update_in_inference_mode_with_a_rate_in_a_tensor(config: dict[str, Any]) -> None:
    rate = torch.tensor(0.1)
    (found, _), (expected, _) = parameters(), parameters()
    optimizer, plain = momentum([found], lr=rate), momentum([expected], lr=torch.tensor(0.1))
    with tba.offload_optimizer(optimizer, config):
        with torch.inference_mode():
            optimizer.step()
            plain.step()
        assert same_bits(found.detach(), expected.detach())
    assert optimizer.param_groups[0]["lr"] is rate


def test_states_that_were_swapped_are_read_where_they_are_now(config: dict[str, Any]) -> None:
    first, second = parameters()
    optimizer = momentum([first, second])
    with tba.offload_optimizer(optimizer, config) as states:
        optimizer.step()
        state = optimizer.state
        state[first], state[second] = state[second], state[first]
        assert states.read(first)["momentum_buffer"].eq(2.0).all()
        assert states.read(second)["momentum_buffer"].eq(1.0).all()


class Marked(torch.Tensor):
    """A tensor of a class that a program has made."""


@pytest.mark.parametrize("kind", ["shares memory", "of a class"])
def test_a_state_that_stays_keeps_its_parameter_whole(kind: str, config: dict[str, Any]) -> None:
    elements = 16 * ELEMENTS
    found, expected = (nn.Parameter(torch.zeros(elements)) for _ in range(2))
    optimizer, plain = momentum([found]), momentum([expected])
    given = torch.full((2 * elements,), 3.0)[:elements]
    optimizer.state[found] = {
        "momentum_buffer": given if kind == "shares memory" else given.clone().as_subclass(Marked)
    }
    plain.state[expected] = {"momentum_buffer": given.clone()}
    with tba.offload_optimizer(optimizer, config):
        for each, parameter in ((optimizer, found), (plain, expected)):
            parameter.grad = torch.ones(elements)
            each.step()
    state = optimizer.state[found]["momentum_buffer"]
    assert isinstance(state, Marked) == (kind == "of a class")
    assert same_bits(state.as_subclass(torch.Tensor), plain.state[expected]["momentum_buffer"])
    assert same_bits(found.detach(), expected.detach())
