"""At most three sub-groups of states are in memory: in the first update, at a save and at a load too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from live_bytes import LiveBytes
from optimizers import Training, policy
from torch import nn, optim

import tba_offload as tba
from tba_offload.errors import StatesAwayError

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 64
SUB_GROUP = 2 * 4 * WIDTH * WIDTH * 4
"""Bytes of the states of four layers."""

SMALL = 20_000
"""Bytes that counts of steps and stand-ins may take."""


def chain(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def settings(directory: Path) -> dict[str, Any]:
    return policy(directory) | {"states": {"sub_group_bytes": SUB_GROUP}}


def updated(model: nn.Module, optimizer: optim.Optimizer, meter: LiveBytes) -> int:
    """Bytes that one update adds at most to those that were there before."""
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    before = meter.peak = meter.live
    optimizer.step()
    return meter.peak - before


@pytest.mark.parametrize("depth", [32, 96])
def test_updates_stay_below_three_sub_groups(depth: int, tmp_path: Path) -> None:
    """Fused Adam has no temporary tensors, so that nothing else is counted."""
    with LiveBytes() as meter:
        model = chain(depth)
        optimizer = optim.AdamW(model.parameters(), fused=True)
        with tba.offload_optimizer(optimizer, settings(tmp_path)) as states:
            first = updated(model, optimizer, meter)
            assert first <= 3 * SUB_GROUP + SMALL
            assert states.records[0].states_bytes == 2 * 4 * WIDTH * WIDTH * depth
            for _ in range(4):
                assert (
                    updated(model, optimizer, meter) <= 3 * SUB_GROUP + SMALL - states.records[0].slot_bytes
                )
            assert states.records[-1].slot_bytes <= 3 * SUB_GROUP


def test_a_first_parameter_of_one_number_says_nothing_of_the_others(tmp_path: Path) -> None:
    """As the temperature of CLIP, whose states stay."""
    scale, others = nn.Parameter(torch.ones(())), chain(32)
    optimizer = optim.AdamW([scale, *others.parameters()], fused=True)
    with tba.offload_optimizer(optimizer, settings(tmp_path)) as states:
        for each in (scale, *others.parameters()):
            each.grad = torch.ones_like(each)
        optimizer.step()
        assert max(states.sizes) <= SUB_GROUP
        assert states.records[-1].slot_bytes <= 3 * SUB_GROUP


def test_states_leave_when_they_are_there_already(tmp_path: Path) -> None:
    with LiveBytes() as meter:
        model = chain(32)
        optimizer = optim.AdamW(model.parameters(), fused=True)
        updated(model, optimizer, meter)
        before = meter.live
        with tba.offload_optimizer(optimizer, settings(tmp_path)):
            assert meter.peak <= before + 3 * SUB_GROUP + SMALL
            assert meter.live <= before - 2 * 4 * WIDTH * WIDTH * 32 + 3 * SUB_GROUP + SMALL


def test_a_checkpoint_is_loaded_without_all_of_it_beside_it(tmp_path: Path) -> None:
    """In another data type, so that what PyTorch itself would load at once would be copies."""
    model = chain(32)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    with LiveBytes() as meter, tba.offload_optimizer(optimizer, settings(tmp_path)):
        updated(model, optimizer, meter)
        saved = optimizer.state_dict()
        for entry in saved["state"].values():
            entry["exp_avg"] = entry["exp_avg"].double()
        before = meter.peak = meter.live
        optimizer.load_state_dict(saved)
        assert meter.peak - before <= SUB_GROUP + 2 * 4 * WIDTH * WIDTH + SMALL
        updated(model, optimizer, meter)


def test_what_a_state_stands_for_has_no_memory(tmp_path: Path) -> None:
    training = Training(optim.AdamW)
    with tba.offload_optimizer(training.optimizer, policy(tmp_path)):
        training.step(0)
        shown = training.optimizer.state[training.model.embed.weight]["exp_avg"]
        assert shown.shape == (301, 48)
        with pytest.raises(StatesAwayError):
            shown.data_ptr()
