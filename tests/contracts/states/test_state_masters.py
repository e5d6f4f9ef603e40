"""Master copies in fp32 travel with their states; the parameters in 16 bits get the same bits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from live_bytes import ResizedBytes, nbytes_of
from models import assert_same_tensors
from optimizers import Mixed, assert_same_state_dicts, policy
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WIDTH = 64
SUB_GROUP = 3 * 4 * WIDTH * WIDTH * 4
"""Bytes of the states and masters of four layers."""

SMALL = 20_000
"""Bytes that counts of steps and stand-ins may take."""


def embedding_of(training: Mixed) -> Tensor:
    weight = training.model.embed.weight
    return next(master for master, parameter in training.masters.items() if parameter is weight)


def assert_same(found: Mixed, expected: Mixed) -> None:
    """Parameters in 16 bits and states, and masters once they are back."""
    assert_same_tensors(found.model.parameters(), expected.model.parameters())
    assert_same_state_dicts(found.optimizer.state_dict(), expected.optimizer.state_dict())


@pytest.mark.parametrize("make", ["adam", "adamw-fused", "adam-foreach", "sgd", "sgd-momentum", "adafactor"])
def test_parameters_masters_and_states_have_the_bits_of_plain_training(make: str, tmp_path: Path) -> None:
    found, expected = Mixed(make), Mixed(make)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path), masters=found.masters) as states:
        for seed in range(5):
            expected.step(seed)
            found.step(seed, copies=False)
            assert_same(found, expected)
        assert all(nbytes_of(master) == 4 * (master.numel() == 1) for master in found.masters)
        assert states.records[-1].read_bytes > 0
    assert_same_tensors(found.masters, expected.masters)
    assert all(type(master) is Tensor for master in found.masters)
    found.step(6)
    expected.step(6)
    assert_same(found, expected)


# ---- memory ------------------------------------------------------------------------------------------


class Chain(Mixed):
    def __init__(self, depth: int) -> None:
        layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(depth))
        super().__init__("adamw-fused", model=nn.Sequential(*layers))

    def gradients(self, seed: int) -> None:
        for master in self.masters:
            master.grad = torch.ones(WIDTH, WIDTH) * seed


def test_masters_and_states_stay_below_three_sub_groups(tmp_path: Path) -> None:
    """In the first update too; fused Adam has no temporary tensors, so that nothing else is counted."""
    depth = 32
    settings = policy(tmp_path, states={"sub_group_bytes": SUB_GROUP})
    with ResizedBytes() as meter:
        training = Chain(depth)
        training.gradients(1)
        torch.stack([each.detach() for each in training.model.parameters()])  # which shows them to the meter
        before = meter.now()
        assert before == depth * WIDTH * WIDTH * (2 + 4 + 4)
        limit = before - 4 * depth * WIDTH * WIDTH + 3 * SUB_GROUP + SMALL
        offloaded = partial(tba.offload_optimizer, training.optimizer, settings, masters=training.masters)
        with meter.watching(), offloaded() as states:
            assert meter.most <= before + 3 * SUB_GROUP  # all masters were there
            assert meter.now() <= limit
            for seed in range(4):
                meter.most = 0
                training.optimizer.step()
                assert meter.most <= limit, seed
            assert states.records[-1].states_bytes == depth * 12 * WIDTH * WIDTH
            assert states.records[-1].slot_bytes <= 3 * SUB_GROUP


# ---- between updates ---------------------------------------------------------------------------------


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Mixed]:
    training = Mixed("adamw-fused")
    model, masters = training.model, training.masters
    with tba.offload_optimizer(training.optimizer, policy(tmp_path), model=model, masters=masters):
        training.step(0, copies=False)
        yield training


def test_a_master_that_is_away_is_the_same_object_and_takes_gradients(away: Mixed) -> None:
    master, parameter = embedding_of(away), away.model.embed.weight
    assert away.optimizer.param_groups[0]["params"][2] is master
    assert master in away.optimizer.state
    assert isinstance(master, Tensor)
    assert (master.shape, master.dtype, master.device) == (parameter.shape, torch.float32, parameter.device)
    assert master.numel() == parameter.numel()
    master.grad = torch.ones_like(master)
    assert master.grad.sum() == master.numel()
    assert repr(master) == "<master copy of embed.weight, offloaded: (301, 48), torch.float32>"
    with pytest.raises(RuntimeError, match="the same size"):
        master.grad = torch.ones(3)


# ---- settings ----------------------------------------------------------------------------------------


def test_what_masters_do_not_go_together_with_is_refused(tmp_path: Path) -> None:
    training = Mixed("adam")
    settings = policy(tmp_path, states={"when": "backward"})
    with pytest.raises(UnsupportedError, match="master copies, which get their gradients after backward"):
        tba.offload_optimizer(training.optimizer, settings, model=training.model, masters=training.masters)
    flat = {master: parameter.detach().flatten() for master, parameter in training.masters.items()}
    with pytest.raises(
        UnsupportedError, match=r"a master copy has shape .* but its model parameter has shape"
    ):
        tba.offload_optimizer(training.optimizer, policy(tmp_path), masters=flat)
