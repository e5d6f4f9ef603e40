"""Between updates a state that is away is an error to use, never a number."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import same_bits
from optimizers import Training, pair, policy
from torch import nn, optim

import tba_offload as tba
from tba_offload.errors import ConfigError, NoEffectWarning, StatesAwayError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

USES: dict[str, Callable[[Any], object]] = {
    "sum": lambda state: state.sum(),
    "add in place": lambda state: state.add_(1),
    "in a list": lambda state: torch.stack([torch.zeros(301, 48), state]),
    "item": lambda state: state[0, 0].item(),
    "to another type": lambda state: state.to(torch.float64),
    "copy to another": lambda state: torch.empty(301, 48).copy_(state),
    "clone": lambda state: state.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda state: torch.save(state, io.BytesIO()),
    "numpy": lambda state: state.numpy(),
    "list": lambda state: state.tolist(),
    "share": lambda state: state.share_memory_(),
    "apply": lambda state: state.apply_(abs),
    "data": lambda state: state.data,
    "other data": lambda state: setattr(state, "data", torch.zeros(301, 48)),
    "compare": lambda state: torch.equal(state, torch.zeros(301, 48)),
}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(optim.AdamW)
    with tba.offload_optimizer(made.optimizer, policy(tmp_path)):
        made.step(0)
        made.step(1)
        yield made


@pytest.mark.parametrize("use", USES)
def test_uses_are_errors(use: str, training: Training) -> None:
    state = training.optimizer.state[training.model.embed.weight]["exp_avg"]
    with pytest.raises(StatesAwayError, match=r"'exp_avg' of parameter \d+ is not in memory.*state_dict\(\)"):
        USES[use](state)


def test_it_tells_what_it_is_like(training: Training) -> None:
    parameter = training.model.convolution.weight
    state = training.optimizer.state[parameter]["exp_avg_sq"]
    assert (state.shape, state.dtype, state.device) == (parameter.shape, parameter.dtype, parameter.device)
    assert state.stride() == parameter.stride()
    assert isinstance(state, torch.Tensor)
    assert "'exp_avg_sq' of parameter" in repr(state)
    assert repr(training.optimizer).startswith("AdamW (")


def test_states_are_read_by_name(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        found.step(0)
        expected.step(0)
        for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True):
            entry = states.read(a)
            assert entry.keys() == expected.optimizer.state[b].keys()
            for key, value in expected.optimizer.state[b].items():
                assert same_bits(entry[key], value)


def test_slices_are_read_with_all_others_of_their_parameter(tmp_path: Path) -> None:
    """Some come with the states of other parameters, and are in the same sub-group as those."""
    found, expected = pair("adam-foreach")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        for seed in range(2):
            found.step(seed)
            expected.step(seed)
        both = zip(found.model.parameters(), expected.model.parameters(), strict=True)
        for mine, its in [*both][::-1]:
            entry = states.read(mine)
            assert all(same_bits(entry[key], value) for key, value in expected.optimizer.state[its].items())


def test_what_a_program_has_set_is_read(tmp_path: Path) -> None:
    """Beside what is away of the same parameter, and after others that travel together with it were read."""
    made = Training(optim.AdamW)
    weight, bias = made.model.layers[1].weight, made.model.layers[1].bias
    with tba.offload_optimizer(made.optimizer, policy(tmp_path)) as states:
        made.step(0)
        away = states.read(weight)["exp_avg_sq"]
        for parameter in (weight, bias):
            new = torch.full_like(parameter, 0.25, requires_grad=False)
            made.optimizer.state[parameter]["exp_avg"] = new
            assert states.read(parameter)["exp_avg"] is new
        del made.optimizer.state[weight]["exp_avg"]
        assert states.read(weight).keys() == {"step", "exp_avg_sq"}
        assert same_bits(states.read(weight)["exp_avg_sq"], away)


WAYS_TO_COPY: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_the_whole_optimizer_is_not_copied(way: str, training: Training) -> None:
    with pytest.raises(StatesAwayError, match=r"state_dict\(\)"):
        WAYS_TO_COPY[way](training.optimizer)


class Labelled(optim.SGD):
    """Says itself how it is copied."""

    label = ""

    def __reduce__(self) -> Any:
        return _labelled, (self.param_groups[0]["params"], self.label)


def _labelled(parameters: list[torch.Tensor], label: str) -> Labelled:
    made = Labelled(parameters, lr=0.1)
    made.label = label
    return made


class Telling(optim.SGD):
    """Its copies have all that it has but hooks."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if "hooks" not in name}


@pytest.mark.parametrize("way", ["copy", *WAYS_TO_COPY])
def test_an_optimizer_that_says_how_it_is_copied_is_copied_so(way: str, tmp_path: Path) -> None:
    ways = WAYS_TO_COPY | {"copy": copy.copy}
    told, telling = Training(partial(Labelled, lr=0.1)), Training(partial(Telling, lr=0.1))
    told.optimizer.label = "mine"  # type: ignore[attr-defined]
    trusting = policy(tmp_path)
    trusting["states"]["trust"] = True
    with tba.offload_optimizer(told.optimizer, trusting), tba.offload_optimizer(telling.optimizer, trusting):
        copied, other = ways[way](told.optimizer), ways[way](telling.optimizer)
    assert (type(copied), copied.label) == (Labelled, "mine")
    assert type(other) is Telling
    assert not [name for name in vars(other) if "tba" in name]


@pytest.mark.parametrize("way", ["copy", *WAYS_TO_COPY])
def test_copies_of_an_optimizer_whose_states_are_not_away_are_plain_ones(way: str, tmp_path: Path) -> None:
    made = Training(partial(optim.SGD, lr=0.1))
    with tba.offload_optimizer(made.optimizer, policy(tmp_path)):
        made.step(0)
        copied = (WAYS_TO_COPY | {"copy": copy.copy})[way](made.optimizer)
        assert type(copied) is optim.SGD
        (parameter, *_) = copied.param_groups[0]["params"]
        before = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
        copied.step()
        assert same_bits(parameter, before - 0.1)


def test_what_goes_around_the_update_is_an_error(tmp_path: Path) -> None:
    """A step that was taken from the optimizer before."""
    made = Training(optim.AdamW)
    taken = made.optimizer.step
    with tba.offload_optimizer(made.optimizer, policy(tmp_path)):
        made.step(0)
        made.backward(1)
        with pytest.raises(StatesAwayError):
            taken()


def test_what_cannot_be_updated_in_parts_is_refused(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(8))]
    for optimizer, why in (
        (optim.LBFGS(parameters), "as one vector"),
        (optim.AdamW(parameters, differentiable=True), "differentiable=True"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            tba.offload_optimizer(optimizer, policy(tmp_path))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_stands_twice_in_a_group_is_refused(tmp_path: Path) -> None:
    """As tied weights do that a program has collected by their names: each step updates them twice."""
    weight = nn.Parameter(torch.ones(8))
    with pytest.raises(UnsupportedError, match="stands twice in one group of this AdamW"):
        tba.offload_optimizer(optim.AdamW([weight, weight]), policy(tmp_path))


def test_an_adafactor_whose_parts_would_differ_is_refused(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(8, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    with pytest.raises(UnsupportedError, match="several data types in one group"):
        tba.offload_optimizer(optim.Adafactor(parameters), policy(tmp_path))
    for optimizer in (
        optim.Adafactor(parameters, eps=(1e-8, 1e-3)),
        optim.Adafactor([{"params": [each]} for each in parameters]),
    ):
        tba.offload_optimizer(optimizer, policy(tmp_path)).close()


def test_an_optimizer_is_offloaded_once(training: Training, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="offloaded already"):
        tba.offload_optimizer(training.optimizer, policy(tmp_path))


def test_a_step_that_is_replaced_is_told(tmp_path: Path) -> None:
    made = Training(optim.AdamW)
    made.optimizer.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="was replaced by"):
        tba.offload_optimizer(made.optimizer, policy(tmp_path))


def test_settings(tmp_path: Path) -> None:
    made = Training(optim.AdamW)
    with pytest.raises(ConfigError, match="must be 4096 or more"):
        tba.offload_optimizer(made.optimizer, {"states": {"sub_group_bytes": "4000B"}})
    with pytest.raises(ConfigError, match=r"unknown key.*sub_group_bytes"):
        tba.offload_optimizer(made.optimizer, {"states": {"sub_group": "1MiB"}})
    settings = policy(tmp_path)
    with (
        pytest.warns(NoEffectWarning, match="was given no optimizer"),
        tba.attach(made.model, settings, layers=list(made.model.layers)),
    ):
        pass
    again = tba.OffloadConfig.from_yaml(tba.OffloadConfig.from_dict(settings).to_yaml())
    assert again == tba.OffloadConfig.from_dict(settings)
