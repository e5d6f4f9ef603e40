"""Between updates a state or a master that is away is an error to use, never a number."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import same_bits
from optimizers import Mixed, Training, assert_same, pair, policy, train
from torch import nn, optim

import tba_offload as tba
from tba_offload.errors import StatesAwayError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

USES: dict[str, Callable[[Any], object]] = {
    "sum": lambda state: state.sum(),
    "changed through data": lambda state: state.data.copy_(torch.zeros(301, 48)),
    "in a list": lambda state: torch.stack([torch.zeros(301, 48), state]),
    "copy to another": lambda state: torch.empty(301, 48).copy_(state),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda state: torch.save(state, io.BytesIO()),
    "numpy": lambda state: state.numpy(),
    "pointer": lambda state: state.data_ptr(),
    "data": lambda state: state.data,
    "of another type": lambda state: state.to(torch.bfloat16),
    "other data": lambda state: setattr(state, "data", torch.zeros(301, 48)),
}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(optim.AdamW)
    with tba.offload_optimizer(made.optimizer, policy(tmp_path), model=made.model):
        made.step(0)
        made.step(1)
        yield made


@pytest.mark.parametrize("use", USES)
def test_uses_are_errors_that_name_the_parameter(use: str, training: Training) -> None:
    state = training.optimizer.state[training.model.embed.weight]["exp_avg"]
    with pytest.raises(StatesAwayError, match=r"'exp_avg' of embed.weight is not in memory.*state_dict\(\)"):
        USES[use](state)


@pytest.mark.parametrize("use", ["sum", "in a list", "deepcopy", "pickle", "changed through data"])
def test_uses_of_masters_are_errors_that_name_the_parameter(use: str, tmp_path: Path) -> None:
    found = Mixed("adamw-fused")
    model, masters = found.model, found.masters
    with tba.offload_optimizer(found.optimizer, policy(tmp_path), model=model, masters=masters):
        found.step(0, copies=False)
        with pytest.raises(StatesAwayError, match=r"the master copy of embed.weight is not in memory betw"):
            USES[use](next(each for each in masters if each.shape == (301, 48)))


def test_states_are_read_by_name(tmp_path: Path) -> None:
    """Slices too, and what a program has set, which is its own object."""
    found, expected = pair("adam-foreach")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        train(found, expected, 0, 1)
        pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
        for mine, its in [*pairs][::-1]:
            entry = states.read(mine)
            assert entry.keys() == expected.optimizer.state[its].keys()
            assert all(same_bits(entry[key], value) for key, value in expected.optimizer.state[its].items())
        bias = found.model.layers[1].bias
        new = torch.full_like(bias, 0.25, requires_grad=False)
        found.optimizer.state[bias]["exp_avg"] = new
        del found.optimizer.state[bias]["max_exp_avg_sq"]
        assert states.read(bias)["exp_avg"] is new
        assert states.read(bias).keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_whole_optimizer_is_not_copied(way: Callable[[object], object], training: Training) -> None:
    with pytest.raises(StatesAwayError, match=r"state_dict\(\)"):
        way(training.optimizer)


def test_what_goes_around_the_update_is_an_error(tmp_path: Path) -> None:
    """A step that was taken from the optimizer before."""
    made = Training(optim.AdamW)
    taken = made.optimizer.step
    with tba.offload_optimizer(made.optimizer, policy(tmp_path)):
        made.step(0)
        made.backward(1)
        with pytest.raises(StatesAwayError):
            taken()


WEIGHT = nn.Parameter(torch.ones(8))
MIXED = [nn.Parameter(torch.ones(8, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: optim.LBFGS([WEIGHT]), "as one vector"),
        (lambda: optim.AdamW([WEIGHT], differentiable=True), "differentiable=True"),
        # As tied weights do that a program has collected by their names: each step updates them twice.
        (lambda: optim.AdamW([WEIGHT, WEIGHT]), "a parameter group of this AdamW has a parameter twice"),
        (lambda: optim.Adafactor(MIXED), "has several data types"),
    ],
)
def test_what_cannot_be_updated_in_parts_is_refused(
    make: Callable[[], optim.Optimizer], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        tba.offload_optimizer(make(), policy(tmp_path))


def test_an_optimizer_is_offloaded_once(training: Training, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="already offloaded"):
        tba.offload_optimizer(training.optimizer, policy(tmp_path))


def test_a_step_that_is_replaced_is_told(tmp_path: Path) -> None:
    made = Training(optim.AdamW)
    made.optimizer.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="was replaced by"):
        tba.offload_optimizer(made.optimizer, policy(tmp_path))


def test_on_a_cpu_the_memory_of_the_device_is_that_of_the_host(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path, states={"update": "host"})) as states:
        train(found, expected, 0, 1, 2)
        assert_same(found, expected)
        assert [record.on_host for record in states.records] == [0, 0, 0]
