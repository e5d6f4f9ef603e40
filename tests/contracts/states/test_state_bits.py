"""Offloaded states give the bits of the optimizer that has them in memory, whatever a training does to it."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import each_once, of_which
from models import same_bits
from optimizers import MAKERS, Training, assert_same, assert_same_state_dicts, pair, policy
from torch import nn, optim

import tba_offload as tba
from tba_offload.errors import StatesAwayError
from tba_offload.states.pieces import SLICE

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]

UNSTEADY = {"sgd-fused"}
"""Optimizers that give other bits each time in 16 bits: PyTorch's fused SGD reads memory that is not set."""


@pytest.mark.parametrize(
    ("name", "dtype", "threads", "kind"), each_once(list(MAKERS), DTYPES, [1, 2], ["file", "host"])
)
def test_training(name: str, dtype: torch.dtype, threads: int, kind: str, tmp_path: Path) -> None:
    found, expected = pair(name, torch.float32 if name in UNSTEADY else dtype)
    store = {} if kind == "file" else {"kind": "host", "directories": []}
    torch.set_num_threads(threads)
    try:
        with tba.offload_optimizer(found.optimizer, policy(tmp_path, store=store)) as states:
            for seed in range(4):
                found.step(seed)
                expected.step(seed)
            assert_same(found, expected)
            record = states.records[-1]
            assert record.states_bytes <= record.slot_bytes or record.read_bytes > 0 < record.written_bytes
    finally:
        torch.set_num_threads(1)
    assert_same(found, expected)  # states came back into memory
    found.step(9)
    expected.step(9)
    assert_same(found, expected)
    assert type(found.optimizer) is type(expected.optimizer)


@pytest.mark.parametrize("name", of_which(MAKERS, "adamw", "adagrad", "sgd-momentum"))
def test_an_optimizer_that_has_trained_before(name: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    for seed in range(2):
        found.step(seed)
        expected.step(seed)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(2, 5):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)


@pytest.mark.parametrize("before", [False, True])
def test_schedulers(before: bool, tmp_path: Path) -> None:
    """One that is made before has replaced the optimizer's step on the instance."""

    def schedule(training: Training) -> Any:
        return optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=9)

    found, expected = pair("adamw")
    schedulers = [schedule(expected)]
    if before:
        schedulers.append(schedule(found))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns where it is called before a step
        with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
            if not before:
                schedulers.append(schedule(found))
            for seed in range(5):
                found.step(seed)
                expected.step(seed)
                for scheduler in schedulers:
                    scheduler.step()
            assert_same(found, expected)
        found.step(7)
        expected.step(7)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(found, expected)


def test_accumulation_clipping_and_gradients_that_stay(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(4):
            for training in (found, expected):
                training.backward(2 * seed)
                training.backward(2 * seed + 1)
                nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=seed % 2 == 0)
        assert_same(found, expected)


def test_a_closure(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    losses: list[list[Any]] = [[], []]
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(3):
            for training, told in ((found, losses[0]), (expected, losses[1])):

                def closure(training: Training = training, seed: int = seed) -> Any:
                    assert torch.is_grad_enabled()
                    training.optimizer.zero_grad()
                    return training.backward(seed)

                told.append(training.optimizer.step(closure))
        assert_same(found, expected)
    assert losses[0] == losses[1]


def test_hooks_are_called_once_a_step(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    calls: list[str] = []

    def halve(optimizer: optim.Optimizer, *_: object) -> None:
        calls.append("before")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= 2

    found.optimizer.register_step_pre_hook(halve)
    expected.optimizer.register_step_pre_hook(halve)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        found.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for seed in range(3):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)
    assert calls == ["before", "after", "before"] * 3


def test_a_gradient_scaler_that_skips(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        for seed in range(5):
            for training, scaler in zip((found, expected), scalers, strict=True):
                training.optimizer.zero_grad()
                loss = training.loss(seed)
                scaler.scale(loss * (torch.inf if seed == 2 else 1)).backward()
                scaler.step(training.optimizer)
                scaler.update()
        assert len(states.records) == 4  # one step had infinite gradients
        assert_same(found, expected)
    assert scalers[0].state_dict() == scalers[1].state_dict()


def test_parameter_groups(tmp_path: Path) -> None:
    """Each with settings of its own; one comes later, one is frozen for a while, and settings change."""

    def in_groups(parameters: Any) -> optim.Optimizer:
        parameters = list(parameters)
        return optim.AdamW([{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:9]}], lr=1e-2)

    found, expected = pair(in_groups)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(6):
            for training in (found, expected):
                if seed == 2:
                    late = {"params": list(training.model.parameters())[9:], "weight_decay": 0.3}
                    training.optimizer.add_param_group(late)
                if seed == 4:
                    training.optimizer.param_groups[0]["lr"] /= 3
                training.model.layers[1].requires_grad_(seed != 3)
                training.step(seed)
        assert_same(found, expected)


def test_a_parameter_that_leaves_its_group(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(5):
            for training in (found, expected):
                if seed == 2:
                    group = training.optimizer.param_groups[0]
                    group["params"] = [each for each in group["params"] if each.shape != (301, 48)]
                training.step(seed)
        assert {
            key: value.sum().item()
            for key, value in found.optimizer.state[found.model.embed.weight].items()
            if key != "step"
        } == {
            key: value.sum().item()
            for key, value in expected.optimizer.state[expected.model.embed.weight].items()
            if key != "step"
        }
        for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True):
            assert same_bits(a.detach(), b.detach())


@pytest.mark.parametrize("reset", ["clear", "assign", "anew"])
def test_states_that_a_training_sets_itself(reset: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(5):
            for training in (found, expected):
                if seed == 2:
                    _set_states(training, reset)
                training.step(seed)
        assert_same(found, expected)


def _set_states(training: Training, how: str) -> None:
    state, embedding = training.optimizer.state, training.model.embed.weight
    if how == "clear":
        state.clear()
    elif how == "assign":
        for parameter in (embedding, training.model.layers[0].weight):
            state[parameter]["exp_avg"] = torch.full_like(parameter, 0.25, requires_grad=False)
    else:
        state[embedding] = {}


class Counting(optim.SGD):
    """An optimizer of a user: it counts steps in itself and in its groups, and draws random numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        self.steps = 0
        self.generator = torch.Generator().manual_seed(3)
        for group in self.param_groups:
            group["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.steps += 1
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["steps"])

    def _update(self, parameter: torch.Tensor, steps: int) -> None:
        state = self.state[parameter]
        noise = torch.rand(parameter.shape, generator=self.generator)
        # Replaced, not changed in place, and of another shape from the third step on.
        state["mean"] = parameter.grad / steps + 0.9 * state.get("mean", torch.zeros_like(parameter))
        if steps > 2:
            state["row"] = state["mean"].reshape(-1)[:: 1 + steps % 2].clone()
        parameter -= 1e-2 * state["mean"] + 1e-3 * noise


def test_an_optimizer_of_a_user(tmp_path: Path) -> None:
    found, expected = pair(Counting)
    settings = policy(tmp_path)
    with pytest.raises(tba.UnsupportedError, match="whether Counting updates each parameter by itself"):
        tba.offload_optimizer(found.optimizer, settings)
    settings["states"]["trust"] = True
    with tba.offload_optimizer(found.optimizer, settings) as states:
        for seed in range(6):
            found.step(seed)
            expected.step(seed)
        assert states.records[-1].states_bytes > 0
        assert_same(found, expected)
    assert found.optimizer.steps == expected.optimizer.steps == 6
    assert found.optimizer.param_groups[0]["steps"] == 6


class CountingInPlace(optim.Optimizer):
    """It counts steps in tensors: in itself, in its groups, and, as MADGRAD, in its state by a name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(1e-2)})
        self.steps = torch.zeros(())
        for group in self.param_groups:
            group["steps"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        state: Any = self.state  # as of names too
        if "k" not in state:
            state["k"] = torch.tensor([0])
        state["all"]["steps"] = state["all"].get("steps", 0) + 1
        self.steps += 1
        for group in self.param_groups:
            group["steps"] += 1
            rate = group["lr"] * (state["k"].item() + group["steps"] + self.steps + state["all"]["steps"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    parameter -= rate * mean.mul_(0.9).add_(parameter.grad)
        state["k"] += 1


def test_counts_in_tensors_go_up_once_a_step(tmp_path: Path) -> None:
    found, expected = pair(CountingInPlace)
    settings = policy(tmp_path)
    settings["states"]["trust"] = True
    rate, steps = found.optimizer.param_groups[0]["lr"], found.optimizer.steps
    with tba.offload_optimizer(found.optimizer, settings) as states:
        for seed in range(4):
            for training in (found, expected):
                training.step(seed)
                training.optimizer.param_groups[0]["lr"].mul_(0.9)
        assert states.records[-1].sub_groups > 3
        for training in (found, expected):
            named: Any = training.optimizer.state
            assert (named.pop("k").item(), named.pop("all")) == (4, {"steps": 4})
        assert_same(found, expected)
    assert found.optimizer.param_groups[0]["lr"] is rate
    assert found.optimizer.steps is steps
    assert steps.item() == 4


class Forgetful(optim.SGD):
    """In every third step it has no state any more."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["mean"] = parameter.grad + 0.9 * state.get("mean", torch.zeros_like(parameter))
                parameter -= 1e-2 * state["mean"]
                if self.steps % 3 == 0:
                    state.clear()


def test_an_update_that_leaves_no_state(tmp_path: Path) -> None:
    found, expected = pair(Forgetful)
    settings = policy(tmp_path)
    settings["states"]["trust"] = True
    with tba.offload_optimizer(found.optimizer, settings):
        for seed in range(7):
            found.step(seed)
            expected.step(seed)
            assert_same(found, expected)


def test_a_trusted_optimizer_is_not_updated_in_backward_and_told_what_to_set(tmp_path: Path) -> None:
    found, _ = pair(Counting)
    settings = policy(tmp_path)
    settings["states"] |= {"trust": True, "when": "backward"}
    with pytest.raises(tba.UnsupportedError, match=r"Counting can be updated .* set states.when to step"):
        tba.offload_optimizer(found.optimizer, settings, model=found.model)


class CountingInTensors(Counting):
    """Counts the steps of a group in a tensor that it changes in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            group["steps"] = torch.zeros((), dtype=torch.int64)


def test_a_count_in_a_tensor_of_a_group_goes_up_once_a_step(tmp_path: Path) -> None:
    found, expected = pair(CountingInTensors)
    settings = policy(tmp_path)
    settings["states"]["trust"] = True
    count = found.optimizer.param_groups[0]["steps"]
    with tba.offload_optimizer(found.optimizer, settings) as states:
        for seed in range(4):
            found.step(seed)
            expected.step(seed)
        assert states.records[-1].sub_groups > 1
        assert_same(found, expected)
    assert found.optimizer.param_groups[0]["steps"] is count
    assert count == expected.optimizer.param_groups[0]["steps"] == 4


class Estimating(optim.SGD):
    """Estimates something over all parameters, as D-Adaptation, Prodigy and AvaGrad do."""

    def __init__(self, parameters: Any, where: str) -> None:
        super().__init__(parameters, lr=1e-2, momentum=0.9)
        self.where = where
        for group in self.param_groups:
            group["d"] = torch.zeros(()) if where == "a tensor of the group" else 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum(each.grad.pow(2).sum() for each in group["params"] if each.grad is not None)
            if self.where == "a number of the group":
                group["d"] = float(norm)
            elif self.where == "a tensor of the group":
                group["d"] += norm
            else:
                self.state["estimate"]["d"] = float(norm)  # type: ignore[index]
        super().step(closure)


@pytest.mark.parametrize("where", ["a number of the group", "a tensor of the group", "the state"])
def test_an_optimizer_that_estimates_over_all_parameters_is_found_out(where: str, tmp_path: Path) -> None:
    found, _ = pair(lambda parameters: Estimating(parameters, where))
    settings = policy(tmp_path)
    settings["states"]["trust"] = True
    with tba.offload_optimizer(found.optimizer, settings):
        what = r"state\['estimate'\]" if where == "the state" else "d in its parameter group"
        with pytest.raises(
            tba.UnsupportedError, match=f"Estimating does not update .* makes {what} of several"
        ):
            found.step(0)


class Around(optim.Optimizer):
    """Has another optimizer make its updates, of all parameters at once, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})
        self.optim = optim.AdamW([each for group in self.param_groups for each in group["params"]])

    def step(self, closure: object = None) -> None:
        assert closure is None
        self.optim.step()


def test_an_optimizer_around_another_is_refused_whatever_is_trusted(tmp_path: Path) -> None:
    found, expected = pair(Around)
    settings = policy(tmp_path)
    settings["states"]["trust"] = True
    with pytest.raises(tba.UnsupportedError, match="give what is in its attribute optim instead"):
        tba.offload_optimizer(found.optimizer, settings)
    with tba.offload_optimizer(found.optimizer.optim, settings) as states:
        for seed in range(3):
            found.step(seed)
            expected.step(seed)
        assert states.records[-1].states_bytes > 0
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert same_bits(one, other)


class Stranger(optim.AdamW):
    """As one of another package."""


class Switching(Stranger):
    """As schedule-free optimizers, whose parameters are others in an evaluation."""

    def train(self) -> None:
        """Makes parameters those of training."""

    def eval(self) -> None:
        """Makes parameters those of an evaluation."""


class Overriding(Stranger):
    """As optimizers of bitsandbytes: settings of embeddings are known by numbers of groups and parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.mng = SimpleNamespace(index2config={(0, 0): {"optim_bits": 32}}, module_weight_config_triple=[])


class Clipping(Stranger):
    """As LAMB."""

    def __init__(self, parameters: Iterable[Tensor], max_grad_norm: float | None = 1.0) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            group["max_grad_norm"] = max_grad_norm


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Switching, "changes parameters between training and evaluation"),
        (Overriding, "has settings for some parameters by their position"),
        (Clipping, "with max_grad_norm divides by the norm of all gradients"),
    ],
)
def test_what_shows_that_it_should_not_be_trusted_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    found = Training(make)
    settings = policy(tmp_path)
    settings["states"]["trust"] = True
    with pytest.raises(tba.UnsupportedError, match=message):
        tba.offload_optimizer(found.optimizer, settings)
    for allowed in (Stranger, partial(Clipping, max_grad_norm=None)):
        with tba.offload_optimizer(Training(allowed).optimizer, settings):
            pass


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    wrapper: Any = SimpleNamespace(optim_map={"weight": optim.SGD([torch.ones(1, requires_grad=True)])})
    with pytest.raises(tba.UnsupportedError, match=r"is no torch\.optim\.Optimizer; give"):
        tba.offload_optimizer(wrapper, policy(tmp_path))


@pytest.mark.parametrize("name", of_which(MAKERS, "adamw-foreach", "adafactor", "sgd-momentum"))
def test_checkpoints_go_both_ways(name: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(3):
            found.step(seed)
            expected.step(seed)
        path = tmp_path / "checkpoint.pt"
        torch.save(found.optimizer.state_dict(), path)
        saved = torch.load(path)
        assert_same_state_dicts(saved, expected.optimizer.state_dict())
        plain, resumed = pair(name)
        for training in (plain, resumed):
            training.model.load_state_dict(expected.model.state_dict())
        plain.optimizer.load_state_dict(torch.load(path))
        with tba.offload_optimizer(resumed.optimizer, policy(tmp_path)):
            resumed.optimizer.load_state_dict(saved)
            for training in (found, expected, plain, resumed):
                training.step(5)
            for training in (found, plain, resumed):
                assert_same(training, expected)


def test_a_checkpoint_that_is_loaded_in_the_middle(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(6):
            for training in (found, expected):
                training.step(seed)
                if seed == 1:
                    saved = training.optimizer.state_dict()
                    training.kept = torch.save(saved, tmp_path / f"{training is found}")  # type: ignore[attr-defined]
                if seed == 3:
                    training.optimizer.load_state_dict(torch.load(tmp_path / f"{training is found}"))
        assert_same(found, expected)


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        found.step(0)
        expected.step(0)
        other = optim.AdamW([nn.Parameter(torch.ones(3))])
        with pytest.raises(ValueError, match="size of optimizer's group"):
            found.optimizer.load_state_dict(other.state_dict())
        found.step(1)
        expected.step(1)
        assert_same(found, expected)


@pytest.mark.parametrize("placement", ["offload", "recompute"])
def test_activations_and_states_together(placement: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    settings = policy(tmp_path, default=placement, min_tensor_bytes=0)
    layers = list(found.model.layers)
    with tba.attach(found.model, settings, layers=layers, optimizer=found.optimizer) as session:
        for seed in range(4):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)
        assert session.states[0].records[-1].written_bytes > 0
        assert len(session.report()) == 4
    found.step(5)
    expected.step(5)
    assert_same(found, expected)


def test_a_cut_parameter_whose_memory_gets_another_order(tmp_path: Path) -> None:
    """Its slices are views no more: an update of copies would be lost."""
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(5):
            for training in (found, expected):
                if seed == 2:
                    weight = training.model.embed.weight
                    weight.data = weight.data.t().contiguous().t()
                training.step(seed)
        assert_same(found, expected)


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_slice_of_one_element(more: int, tmp_path: Path) -> None:
    """What is left of a parameter after slices of as many elements as a sub-group has."""
    weights = [nn.Parameter(torch.ones(4 * SLICE + more)) for _ in range(2)]
    found, expected = [optim.Adadelta([weight]) for weight in weights]
    with tba.offload_optimizer(found, policy(tmp_path)):
        for seed in range(4):
            for weight, optimizer in zip(weights, (found, expected), strict=True):
                weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
                optimizer.step()
        assert same_bits(weights[0].detach(), weights[1].detach())
        assert_same_state_dicts(found.state_dict(), expected.state_dict())
    assert_same_state_dicts(found.state_dict(), expected.state_dict())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("sparse_from", [0, 2])
def test_sparse_gradients(sparse_from: int, tmp_path: Path) -> None:
    found, expected = pair("adagrad")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for seed in range(5):
            for training in (found, expected):
                training.model.embed.sparse = seed >= sparse_from
                training.step(seed)
        assert_same(found, expected)


def in_place_of(training: Training, weight: nn.Parameter) -> nn.Parameter:
    """A new parameter where another one was, with the states of that."""
    new, optimizer = nn.Parameter(weight.detach().clone()), training.optimizer
    for module in training.model.modules():
        if getattr(module, "weight", None) is weight:
            module.weight = new
    for group in optimizer.param_groups:
        group["params"] = [new if each is weight else each for each in group["params"]]
    optimizer.state[new] = optimizer.state.pop(weight)
    return new


def test_states_that_go_to_another_parameter(tmp_path: Path) -> None:
    """To one that is new and takes the place of another, and to one that had states of its own."""
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        for seed in range(6):
            for training in (found, expected):
                state, layers = training.optimizer.state, training.model.layers
                if seed == 2:
                    new = in_place_of(training, training.model.embed.weight)
                    in_place_of(training, layers[4].weight)
                    if training is found:
                        with pytest.raises(StatesAwayError, match="exp_avg"):
                            state[new]["exp_avg"].sum()
                if seed == 4:
                    first, second = layers[0].weight, layers[1].weight
                    state[first], state[second] = state[second], state[first]
                training.step(seed)
            assert_same(found, expected)
        assert states.records[-1].states_bytes == states.records[1].states_bytes


def test_states_of_another_shape_than_their_parameter(tmp_path: Path) -> None:
    """A program may keep what it likes there; a parameter that has such a state is not cut."""
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        for seed in range(5):
            for training in (found, expected):
                if seed in (1, 3):
                    for parameter in (training.model.embed.weight, training.model.layers[0].bias):
                        training.optimizer.state[parameter]["mine"] = torch.arange(100.0 * seed)
                training.step(seed)
            assert_same(found, expected)
        mine = states.read(found.model.embed.weight)["mine"]
        assert same_bits(mine, torch.arange(300.0))
    assert_same(found, expected)


def test_states_that_are_no_more_are_named_where_they_are_given(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    state, layers = found.optimizer.state, found.model.layers
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        found.step(0)
        gone = state.pop(layers[0].weight)
        found.step(1)
        state[layers[1].weight] = gone
        with pytest.raises(StatesAwayError, match=r"state 'exp_avg' of parameter \d+ .* given it"):
            found.step(2)
        del state[layers[1].weight]
        found.step(2)


@pytest.mark.parametrize("then", ["leaves", "moves"])
def test_states_that_were_cleared_do_not_come_back(then: str, tmp_path: Path) -> None:
    """Of a parameter that leaves its group, or moves to another."""
    found, expected = pair("adamw")
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)) as states:
        for seed in range(4):
            for training in (found, expected):
                if seed == 2:
                    embedding, optimizer = training.model.embed.weight, training.optimizer
                    group = optimizer.param_groups[0]
                    group["params"] = [each for each in group["params"] if each is not embedding]
                    del optimizer.state[embedding]
                    if then == "moves":
                        optimizer.add_param_group({"params": [embedding], "lr": 0.1})
                training.step(seed)
        assert_same(found, expected)
        assert (found.model.embed.weight in found.optimizer.state) is (then == "moves")
        assert states.records[-1].states_bytes > 0
    assert_same(found, expected)


def test_a_checkpoint_with_states_where_there_were_none(tmp_path: Path) -> None:
    found, expected = pair("sgd")
    other = pair("sgd-momentum")[0]
    other.step(0)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        for training in (found, expected):
            training.step(0)
            training.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
            training.step(1)
        assert_same(found, expected)
