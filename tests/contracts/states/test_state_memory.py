"""Memory holds at most three sub-groups beside the states that stay, from the first update on.

Fused Adam has no temporary tensors, so that nothing else is counted.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from live_bytes import LiveBytes, ResizedBytes, nbytes_of
from models import assert_same_tensors
from optimizers import Mixed, assert_same, assert_same_state_dicts, copied, pair, policy, train
from torch import Tensor, nn, optim

import tba_offload as tba
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WIDTH = 64
SUB_GROUP = 2 * 4 * WIDTH * WIDTH * 4
"""Bytes of the states of four layers."""

SMALL = 20_000
"""Bytes that counts of steps and stand-ins may take."""


def chain(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def settings(directory: Path, **states: Any) -> dict[str, Any]:
    return policy(directory, states={"sub_group_bytes": SUB_GROUP, **states})


def updated(model: nn.Module, optimizer: optim.Optimizer, meter: LiveBytes) -> int:
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    before = meter.peak = meter.live
    optimizer.step()
    return meter.peak - before


@pytest.mark.parametrize("depth", [32, 96])
def test_updates_stay_below_three_sub_groups(depth: int, tmp_path: Path) -> None:
    with LiveBytes() as meter:
        model = chain(depth)
        optimizer = optim.AdamW(model.parameters(), fused=True)
        with tba.offload_optimizer(optimizer, settings(tmp_path)) as states:
            assert updated(model, optimizer, meter) <= 3 * SUB_GROUP + SMALL
            assert states.records[0].states_bytes == 2 * 4 * WIDTH * WIDTH * depth
            for _ in range(4):
                most = 3 * SUB_GROUP + SMALL - states.records[0].slot_bytes
                assert updated(model, optimizer, meter) <= most
            assert states.records[-1].slot_bytes <= 3 * SUB_GROUP


def test_gradients_do_not_grow_with_depth_where_backward_updates(tmp_path: Path) -> None:
    peaks = {}
    for depth in (32, 96):
        with LiveBytes() as meter:
            model = chain(depth)
            optimizer = optim.AdamW(model.parameters(), fused=True)
            with tba.offload_optimizer(optimizer, settings(tmp_path, when="backward"), model=model):
                for _ in range(3):
                    optimizer.zero_grad()
                    loss = model(torch.ones(2, WIDTH)).sum()
                    before = meter.peak = meter.live
                    loss.backward()
                    optimizer.step()
                    peaks[depth] = meter.peak - before
    assert peaks[96] < peaks[32] + 50_000  # counts of steps, and tensors that have no memory
    assert peaks[96] < 96 * WIDTH * WIDTH * 4 / 2


def test_a_large_embedding_is_updated_in_slices(tmp_path: Path) -> None:
    """The states of the embedding are as large as eight sub-groups, and checkpoints have them whole."""
    plain = nn.Sequential(nn.Embedding(16 * SUB_GROUP // (16 * WIDTH), WIDTH), chain(8))
    ours = copy.deepcopy(plain)
    expected, found = (optim.AdamW(model.parameters(), fused=True) for model in (plain, ours))

    def backward(model: nn.Module, optimizer: optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        model(torch.randint(len(plain[0].weight), (64,), generator=generator)).square().sum().backward()

    def assert_same_bits() -> None:
        assert_same_tensors(ours.parameters(), plain.parameters())
        assert_same_state_dicts(found.state_dict(), expected.state_dict())
        assert list(found.state_dict()["state"]) == list(expected.state_dict()["state"])

    with LiveBytes() as meter, tba.offload_optimizer(found, settings(tmp_path), model=ours) as states:
        for seed in range(5):
            backward(plain, expected, seed)
            expected.step()
            backward(ours, found, seed)
            before, meter.peak = meter.live - states.device_bytes, meter.live
            found.step()
            assert meter.peak - before <= 3 * SUB_GROUP + SMALL
            assert states.device_bytes <= 3 * SUB_GROUP
            assert max(states.sizes) <= SUB_GROUP
            assert_same_bits()
            if seed == 2:
                found.load_state_dict(copied(expected.state_dict()))
    assert_same_bits()


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


# ---- sub-groups that stay ------------------------------------------------------------------------------


def test_what_stays_neither_travels_nor_is_forgotten(tmp_path: Path) -> None:
    found, expected = pair("adamw-fused")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:

        def travel(*counts: int) -> None:
            for seed, count in enumerate(counts):
                train(found, expected, seed)
                states.arrange(min(count, len(states.sizes)))

        travel(99, 99)
        sizes, (_, all_away) = states.sizes, states.records
        assert len(sizes) > 6
        travel(5, 5)
        some = states.records[-1]
        assert some.staying == len(sizes) - 5
        assert some.states_bytes == sum(sizes[:5])
        assert 0 < some.read_bytes <= some.states_bytes < all_away.states_bytes
        saved = copied(found.optimizer.state_dict())
        for training in (found, expected):
            training.optimizer.load_state_dict(copied(saved))
        travel(5, 5)
        assert states.records[-1].staying == len(sizes) - 5
        for training in (found, expected):
            first = training.optimizer.param_groups[0]
            gone = [first["params"].pop(3) for _ in range(2)]
            training.optimizer.add_param_group({"params": gone, "lr": 1e-3})
        travel(4, 4, 2, 0, 0)
        none = states.records[-1]
        assert (none.read_bytes, none.written_bytes, none.slot_bytes) == (0, 0, 0)
        assert_same(found, expected)


# Master copies in fp32, whose parameters in 16 bits get the same bits


MASTERS_SUB_GROUP = 3 * 4 * WIDTH * WIDTH * 4
"""Bytes of the states and masters of four layers."""


def embedding_of(training: Mixed) -> Tensor:
    weight = training.model.embed.weight
    return next(master for master, parameter in training.masters.items() if parameter is weight)


def assert_same_mixed(found: Mixed, expected: Mixed) -> None:
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
            assert_same_mixed(found, expected)
        assert all(nbytes_of(master) == 4 * (master.numel() == 1) for master in found.masters)
        assert states.records[-1].read_bytes > 0
    assert_same_tensors(found.masters, expected.masters)
    assert all(type(master) is Tensor for master in found.masters)
    found.step(6)
    expected.step(6)
    assert_same_mixed(found, expected)


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
    settings = policy(tmp_path, states={"sub_group_bytes": MASTERS_SUB_GROUP})
    with ResizedBytes() as meter:
        training = Chain(depth)
        training.gradients(1)
        torch.stack([each.detach() for each in training.model.parameters()])  # which shows them to the meter
        before = meter.now()
        assert before == depth * WIDTH * WIDTH * (2 + 4 + 4)
        limit = before - 4 * depth * WIDTH * WIDTH + 3 * MASTERS_SUB_GROUP + SMALL
        offloaded = partial(tba.offload_optimizer, training.optimizer, settings, masters=training.masters)
        with meter.watching(), offloaded() as states:
            assert meter.most <= before + 3 * MASTERS_SUB_GROUP  # all masters were there
            assert meter.now() <= limit
            for seed in range(4):
                meter.most = 0
                training.optimizer.step()
                assert meter.most <= limit, seed
            assert states.records[-1].states_bytes == depth * 12 * WIDTH * WIDTH
            assert states.records[-1].slot_bytes <= 3 * MASTERS_SUB_GROUP


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
