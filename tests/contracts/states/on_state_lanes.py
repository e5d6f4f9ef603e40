"""Sub-groups that the processor updates while a device updates others; see ``order/test_lagging_device.py``.

There the kernels of device and processor are the same, so that bits may be compared. The device computes
late, gives freed memory away at once and overwrites it: what nothing orders gives other bits.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import lagging
import pytest
import torch
from covering import each_once
from models import assert_same_tensors, same_bits
from optimizers import (
    MAKERS,
    Given,
    Mixed,
    assert_same,
    assert_same_state_dicts,
    copied,
    go_on_from,
    policy,
    train,
)
from torch import optim

import tba_offload as tba
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

UPDATES = ("host", "auto")
SAME_KERNELS = [name for name in MAKERS if "fused" not in name and name != "adam-foreach"]


def lanes(tmp_path: Path, update: str = "auto", **states: Any) -> dict[str, Any]:
    return policy(tmp_path, "host", states={"update": update, **states})


def looped(make: Callable[..., optim.Optimizer] | str) -> Callable[[Any], optim.Optimizer]:
    """An optimizer that goes from parameter to parameter: that gives the same bits on both sides."""
    made = MAKERS[make] if isinstance(make, str) else make

    def built(parameters: Any) -> optim.Optimizer:
        optimizer = made(parameters)
        for group in optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = False
        return optimizer

    return built


def pair(make: Callable[..., optim.Optimizer] | str = "adamw") -> tuple[Given, Given]:
    return Given(looped(make), device=lagging.LAG), Given(looped(make), device=lagging.LAG)


@pytest.fixture(autouse=True)
def it_lags() -> Iterator[None]:
    with lagging.late(operations=0.0002):
        yield
    lagging.heal()


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if "tba-update" in thread.name]


@pytest.mark.parametrize(("name", "update"), each_once(SAME_KERNELS, UPDATES))
def test_both_lanes_give_the_bits_of_the_optimizer(name: str, update: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    with tba.offload_optimizer(found.optimizer, lanes(tmp_path, update)) as states:
        train(found, expected, *range(5))
        assert_same(found, expected)
        second = states.records[1]  # of which auto splits in halves
        if name != "sgd":  # which has no states
            assert 0 < second.on_host <= second.sub_groups
    assert_same(found, expected)


def test_the_processor_takes_the_fused_kernel_where_the_choice_is_left_to_pytorch(tmp_path: Path) -> None:
    found = Given(lambda parameters: optim.AdamW(parameters, lr=1e-2), device=lagging.LAG)
    expected = Given(lambda parameters: optim.AdamW(parameters, lr=1e-2, fused=True))
    with tba.offload_optimizer(found.optimizer, lanes(tmp_path, "host")) as states:
        for seed in range(3):
            found.step(seed)
            expected.step(seed)
            if seed == 0:  # its states came into being on the device, by kernels of that
                go_on_from(found, expected)
        assert states.records[-1].on_host == states.records[-1].sub_groups - 1  # that of one number stays
        whole = [name for name, each in found.model.named_parameters() if each.numel() > 1]
        assert all(same_bits(found.parameter(name), expected.parameter(name)) for name in whole)
    assert found.optimizer.param_groups[0]["fused"] is None


def test_a_slow_device_leaves_more_to_the_processor_and_the_time_is_foretold(tmp_path: Path) -> None:
    found = Given(looped("adamw"), device=lagging.LAG)
    with lagging.late(operations=0.003), tba.offload_optimizer(found.optimizer, lanes(tmp_path)) as states:
        for seed in range(4):
            found.step(seed)
            torch.accelerator.synchronize()
        halves, last = states.records[1], states.records[-1]
        assert 0 < halves.on_host < last.on_host
        assert (halves.predicted_seconds, last.predicted_seconds is not None) == (None, True)


# What is done to an optimizer between updates


def test_checkpoints_and_settings_hold_for_both_lanes(tmp_path: Path) -> None:
    found, expected = pair()
    with tba.offload_optimizer(found.optimizer, lanes(tmp_path)):
        schedulers = [optim.lr_scheduler.StepLR(each.optimizer, 1, 0.5) for each in (found, expected)]
        for seed in range(3):
            train(found, expected, seed)
            for scheduler in schedulers:
                scheduler.step()
        saved = copied(found.optimizer.state_dict())
        assert_same_state_dicts(saved, expected.optimizer.state_dict())
        train(found, expected, 3)
        for training in (found, expected):
            training.optimizer.load_state_dict(copied(saved))
        train(found, expected, 4, 5)
        assert_same(found, expected)


def test_gradients_that_do_not_lie_in_memory_like_parameters_are_left_to_the_device(tmp_path: Path) -> None:
    """The processor's fused kernel would pair elements by their places in memory."""
    found, expected = (Given(lambda each: optim.AdamW(each, lr=1e-2), device=lagging.LAG) for _ in range(2))
    with (
        lagging.late(operations=0.002),
        tba.offload_optimizer(found.optimizer, lanes(tmp_path, "host")) as states,
    ):
        for seed in range(3):
            for training in (found, expected):
                training.gradients(seed)
                odd = training.model.embed.weight, training.model.convolution.weight  # the former is cut
                odd[0].grad = odd[0].grad.t().contiguous().t()
                odd[1].grad = odd[1].grad.contiguous()
                training.optimizer.step()
        for name in ("embed.weight", "convolution.weight"):
            assert same_bits(found.parameter(name), expected.parameter(name))
        assert states.records[-1].on_host


def test_on_a_stream_of_the_program(tmp_path: Path) -> None:
    """ASGD keeps numbers on the device, which slices get copies of."""
    found, expected = pair("asgd")
    with lagging.late(operations=0.001, copies=0.001):
        torch.accelerator.synchronize()
        with torch.get_device_module(lagging.LAG).stream(torch.Stream(lagging.LAG)):
            with tba.offload_optimizer(found.optimizer, lanes(tmp_path, "host")):
                train(found, expected, *range(4))
                torch.accelerator.synchronize()
                assert_same(found, expected)


@pytest.mark.parametrize("update", UPDATES)
def test_masters_are_updated_in_host_memory(update: str, tmp_path: Path) -> None:
    found, expected = (Mixed(looped("adamw"), lagging.LAG) for _ in range(2))
    with tba.offload_optimizer(found.optimizer, lanes(tmp_path, update), masters=found.masters) as states:
        for seed in range(4):
            found.step(seed, copies=False)
            expected.step(seed)
        assert states.records[1].on_host
        assert_same_state_dicts(found.optimizer.state_dict(), expected.optimizer.state_dict())
    assert_same_tensors(found.model.parameters(), expected.model.parameters())
    assert_same_tensors(found.masters, expected.masters)


# What goes wrong, and what it goes with


def test_states_on_drives_are_refused(tmp_path: Path) -> None:
    found, _ = pair()
    chosen = lanes(tmp_path, "host")
    chosen["store"] |= {"kind": "file", "directories": [str(tmp_path)]}
    with pytest.raises(UnsupportedError, match=r"needs store\.kind 'host', not"):
        tba.offload_optimizer(found.optimizer, chosen)


def test_an_optimizer_of_others_is_refused(tmp_path: Path) -> None:
    class Own(optim.SGD):
        pass

    found, _ = pair(lambda parameters: Own(parameters, lr=1e-3))
    with pytest.raises(UnsupportedError, match=r"only optimizers of torch.optim can run on the CPU"):
        tba.offload_optimizer(found.optimizer, lanes(tmp_path, trust=True))
