"""Some sub-groups travel and others stay: the bits are those of plain training, however that changes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import of_which
from live_bytes import LiveBytes
from optimizers import MAKERS, Training, assert_same, pair, plain_copy, policy
from torch import nn, optim

import tba_offload as tba
from tba_offload.states.slots import SLOTS
from tba_offload.states.spread import evenly

if TYPE_CHECKING:
    from pathlib import Path

    from tba_offload.states import OptimizerStates

CHANGES = (0, 99, 4, 4, 7, 2, 0, 5)
"""How many sub-groups travel in each step: none, all, and some."""


def train(found: Training, expected: Training, states: OptimizerStates, *counts: int) -> None:
    for seed, count in enumerate(counts):
        found.step(seed)
        expected.step(seed)
        states.arrange(min(count, len(states.sizes)))


@pytest.mark.parametrize("name", of_which(MAKERS, "adamw-fused", "adamw", "sgd-momentum", "adafactor"))
def test_whatever_stays_the_bits_are_the_same(name: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        train(found, expected, states, *CHANGES)
        assert_same(found, expected)
    assert_same(found, expected)


def test_sixteen_bits(tmp_path: Path) -> None:
    found, expected = pair("adamw-foreach", torch.bfloat16)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        train(found, expected, states, *CHANGES)
        assert_same(found, expected)


def test_what_stays_neither_travels_nor_is_forgotten(tmp_path: Path) -> None:
    found, expected = pair("adamw-fused")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        train(found, expected, states, 99, 99)
        sizes, (_, all_away) = states.sizes, states.records
        assert len(sizes) > 2 * SLOTS
        travelling = SLOTS + 2
        train(found, expected, states, travelling, travelling)
        some = states.records[-1]
        assert some.staying == len(sizes) - travelling
        assert some.staying_bytes == sum(sizes[travelling:])
        assert some.states_bytes == sum(sizes[:travelling])
        assert 0 < some.read_bytes <= some.states_bytes < all_away.states_bytes
        train(found, expected, states, 0, 0)
        none = states.records[-1]
        assert (none.read_bytes, none.written_bytes, none.slot_bytes) == (0, 0, 0)
        assert_same(found, expected)


def test_checkpoints_know_what_stays(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        train(found, expected, states, 5, 5)
        saved = plain_copy(found.optimizer.state_dict())
        train(found, expected, states, 5)
        for training in (found, expected):
            training.optimizer.load_state_dict(plain_copy(saved))
        staying = len(states.sizes) - 5
        for training in (found, expected):
            training.step(9)
        assert states.records[-1].staying == staying
        train(found, expected, states, 5, 5)
        assert_same(found, expected)
        assert states.records[-1].staying == staying
        read = states.read(found.model.embed.weight)
        assert torch.equal(read["exp_avg"], expected.optimizer.state[expected.model.embed.weight]["exp_avg"])


def test_parameters_that_go_and_come(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        train(found, expected, states, 4, 4)
        for training in (found, expected):
            first = training.optimizer.param_groups[0]
            gone = [first["params"].pop(3) for _ in range(2)]
            training.optimizer.add_param_group({"params": gone, "lr": 1e-3})
        train(found, expected, states, 4, 4, 2, 99)
        assert_same(found, expected)


@pytest.mark.parametrize("travelling", [0, 4, 6])
def test_memory_is_that_of_what_stays_and_of_three_slots(travelling: int, tmp_path: Path) -> None:
    width, depth = 64, 32
    sub_group = 2 * 4 * width * width * 4
    settings: dict[str, Any] = policy(tmp_path) | {"states": {"sub_group_bytes": sub_group}}
    with LiveBytes() as meter:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        optimizer = optim.AdamW(model.parameters(), fused=True)
        with tba.offload_optimizer(optimizer, settings) as states:

            def update() -> None:
                optimizer.zero_grad()
                model(torch.ones(2, width)).sum().backward()
                optimizer.step()

            update()
            before = meter.live - states.device_bytes
            assert len(states.sizes) > 2 * SLOTS
            states.arrange(travelling)
            for _ in range(3):
                update()
                staying = sum(states.sizes[travelling:])
                assert staying <= states.device_bytes <= staying + bool(travelling) * SLOTS * sub_group
                assert abs(meter.live - before - states.device_bytes) < 100_000


def test_those_that_leave_first_lie_evenly_among_all() -> None:
    for count in range(40):
        order = evenly(count)
        assert sorted(order) == list(range(count))
        for some in range(1, count):
            places = [-1, *sorted(order[:some]), count]
            gaps = [after - before for before, after in pairwise(places)]
            assert max(gaps) <= 2 * (count + 1) / some + 1, (count, some, places)
