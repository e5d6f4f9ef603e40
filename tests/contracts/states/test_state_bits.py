"""Offloaded states give the bits of the optimizer that has them in memory, whatever a training does to it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import each_once, of_which
from optimizers import MAKERS, Training, assert_same, assert_same_state_dicts, copied, pair, policy, train
from torch import nn, optim

import tba_offload as tba
from tba_offload.errors import StatesAwayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

UNSTEADY = {"sgd-fused"}
"""Optimizers that give other bits each time in 16 bits: PyTorch's fused SGD reads memory that is not set."""


@contextmanager
def offloaded(make: Any, place: Path, **settings: Any) -> Iterator[tuple[Training, Training, Any]]:
    """Two trainings that are alike at the end, within and when all is closed, one of which is offloaded."""
    found, expected = pair(make)
    with tba.offload_optimizer(found.optimizer, policy(place, states=settings)) as states:
        yield found, expected, states
        assert_same(found, expected)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("name", "dtype", "threads", "kind"),
    each_once(list(MAKERS), [torch.float32, torch.bfloat16], [1, 2], ["file", "host"]),
)
def test_training(name: str, dtype: torch.dtype, threads: int, kind: str, tmp_path: Path) -> None:
    found, expected = pair(name, torch.float32 if name in UNSTEADY else dtype)
    torch.set_num_threads(threads)
    try:
        with tba.offload_optimizer(found.optimizer, policy(tmp_path, kind)) as states:
            train(found, expected, 0, 1, 2, 3)
            assert_same(found, expected)
            record = states.records[-1]
            assert record.states_bytes <= record.slot_bytes or record.read_bytes > 0 < record.written_bytes
    finally:
        torch.set_num_threads(1)
    assert_same(found, expected)  # states came back into memory
    train(found, expected, 9)
    assert_same(found, expected)
    assert type(found.optimizer) is type(expected.optimizer)


@pytest.mark.parametrize("before", [False, True])
def test_schedulers(before: bool, tmp_path: Path) -> None:
    """One that is made before has replaced the optimizer's step on the instance."""

    def schedule(training: Training) -> Any:
        return optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=9)

    found, expected = pair("adamw")
    schedulers = [schedule(each) for each in (expected, found)[: 1 + before]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns where it is called before a step
        with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
            schedulers += [schedule(found)] * (not before)
            for seed in range(5):
                train(found, expected, seed)
                for scheduler in schedulers:
                    scheduler.step()
            assert_same(found, expected)
        train(found, expected, 7)
    assert_same(found, expected)


def test_accumulation_clipping_and_gradients_that_stay(tmp_path: Path) -> None:
    with offloaded("adamw", tmp_path) as (found, expected, _):
        for seed in range(4):
            for training in (found, expected):
                training.backward(2 * seed)
                training.backward(2 * seed + 1)
                nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=seed % 2 == 0)


def test_closures_and_hooks(tmp_path: Path) -> None:
    calls: list[str] = []
    losses: list[Any] = []

    def halve(optimizer: optim.Optimizer, *_: object) -> None:
        calls.append("before")
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad /= 2

    with offloaded("adamw", tmp_path) as (found, expected, _):
        for training in (found, expected):
            training.optimizer.register_step_pre_hook(halve)
        found.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for seed in range(3):
            for training in (found, expected):

                def closure(training: Training = training, seed: int = seed) -> Any:
                    assert torch.is_grad_enabled()
                    training.optimizer.zero_grad()
                    return training.backward(seed)

                losses.append(training.optimizer.step(closure))
            assert losses.pop() == losses.pop()
            train(found, expected, 10 + seed)
    assert calls == ["before", "after", "before"] * 6


def test_a_gradient_scaler_that_skips(tmp_path: Path) -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    with offloaded("adamw", tmp_path) as (found, expected, states):
        for seed in range(5):
            for training, scaler in zip((found, expected), scalers, strict=True):
                training.optimizer.zero_grad()
                loss = training.loss(seed)
                scaler.scale(loss * (torch.inf if seed == 2 else 1)).backward()
                scaler.step(training.optimizer)
                scaler.update()
        assert len(states.records) == 4  # one step had infinite gradients
    assert scalers[0].state_dict() == scalers[1].state_dict()


# ---- parameters and states that change ---------------------------------------------------------------


def test_parameter_groups(tmp_path: Path) -> None:
    """Each with settings of its own; one comes later, one is frozen for a while, and settings change."""

    def in_groups(parameters: Any) -> optim.Optimizer:
        parameters = list(parameters)
        return optim.AdamW([{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:9]}], lr=1e-2)

    def change(training: Training, seed: int) -> None:
        if seed == 2:
            late = {"params": list(training.model.parameters())[9:], "weight_decay": 0.3}
            training.optimizer.add_param_group(late)
        if seed == 4:
            training.optimizer.param_groups[0]["lr"] /= 3
        training.model.layers[1].requires_grad_(seed != 3)

    with offloaded(in_groups, tmp_path) as (found, expected, _):
        train(found, expected, *range(6), before=change)


def set_states(training: Training, name: str, value: Callable[[Tensor], Tensor]) -> None:
    """Set a state of a parameter that is cut, and of one that is not."""
    for parameter in (training.model.embed.weight, training.model.layers[0].weight):
        training.optimizer.state[parameter][name] = value(parameter.detach())


RESETS: dict[str, Callable[[Training], object]] = {
    "clear": lambda training: training.optimizer.state.clear(),
    "another dictionary": lambda training: setattr(training.optimizer, "state", defaultdict(dict)),
    "assign": lambda training: set_states(training, "exp_avg", lambda each: torch.full_like(each, 0.25)),
    "further states": lambda training: set_states(training, "mine", lambda _: torch.arange(100.0)),
    "anew": lambda training: training.optimizer.state.update({training.model.embed.weight: {}}),
}


@pytest.mark.parametrize("reset", RESETS)
def test_states_that_a_training_sets_itself(reset: str, tmp_path: Path) -> None:
    def change(training: Training, seed: int) -> None:
        if seed == 2:
            RESETS[reset](training)

    with offloaded("adamw", tmp_path) as (found, expected, _):
        train(found, expected, *range(5), before=change)


def test_states_that_are_moved_to_another_parameter_are_not_lost_by_close(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    states = tba.offload_optimizer(found.optimizer, policy(tmp_path))
    train(found, expected, 0, 1)
    state, old, new = found.optimizer.state, found.model.layers[0].weight, found.model.unused
    state[new] = state.pop(old)
    for use in (states.close, found.optimizer.state_dict, lambda: states.read(new), lambda: found.step(2)):
        with pytest.raises(
            StatesAwayError, match=r"state 'exp_avg' of .* Assign the values, not the placeholder"
        ):
            use()
    state[old] = state.pop(new)
    states.close()
    assert_same(found, expected)


# ---- optimizers of other packages ----------------------------------------------------------------------


class Clipped(optim.AdamW):
    """Of a trainer that clips by a setting of the group before the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)
        self.param_groups[0]["max_grad_norm"] = 1.0


def test_an_optimizer_of_a_user_needs_trust_which_is_taken_at_its_word(tmp_path: Path) -> None:
    with pytest.raises(tba.UnsupportedError, match="whether Clipped updates each parameter independently"):
        tba.offload_optimizer(Training(Clipped).optimizer, policy(tmp_path))
    with offloaded(Clipped, tmp_path, trust=True) as (found, expected, _):
        train(found, expected, 0, 1, 2)


class ByAName(optim.SGD):
    """Counts steps in its state by a name, as MADGRAD does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        state["all"]["k"] = state["all"].get("k", 0) + 1
        super().step(closure)


@pytest.mark.parametrize("when", [0, 1])
def test_a_state_of_no_parameter_is_refused(when: int, tmp_path: Path) -> None:
    """In the first step, or at once where there is one already."""
    found, _ = pair(lambda parameters: ByAName(parameters, 1e-2, momentum=0.9))
    settings = policy(tmp_path, states={"trust": True})
    for seed in range(when):
        found.step(seed)
    with pytest.raises(tba.UnsupportedError, match=r"ByAName has .* all parameters"):
        with tba.offload_optimizer(found.optimizer, settings):
            found.step(1)


class Around(optim.Optimizer):
    """Has another optimizer make its updates, of all parameters at once, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})
        self.optim = optim.AdamW([each for group in self.param_groups for each in group["params"]])


class Overriding(optim.AdamW):
    """As optimizers of bitsandbytes: settings of embeddings are known by numbers of groups and parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.mng = SimpleNamespace(index2config={(0, 0): {"optim_bits": 32}}, module_weight_config_triple=[])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Around, "the optimizers in its attribute 'optim' make the updates"),
        (Overriding, "GlobalOptimManager has overrides for some parameters"),
        (lambda each: SimpleNamespace(optim_map={"weight": optim.SGD(each)}), "not a torch.optim.Optimizer"),
    ],
)
def test_what_no_trust_makes_right_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    settings = policy(tmp_path, states={"trust": True})
    with pytest.raises(tba.UnsupportedError, match=message):
        tba.offload_optimizer(make([nn.Parameter(torch.ones(3))]), settings)


# ---- checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of_which(MAKERS, "adamw-foreach", "adafactor", "sgd-momentum"))
def test_checkpoints_go_both_ways(name: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    with tba.offload_optimizer(found.optimizer, policy(tmp_path)):
        train(found, expected, 0, 1, 2)
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


@pytest.mark.parametrize("of", ["itself", "an optimizer with states"])
def test_a_checkpoint_that_is_loaded_in_the_middle(of: str, tmp_path: Path) -> None:
    with offloaded("adamw" if of == "itself" else "sgd", tmp_path) as (found, expected, _):
        train(found, expected, 0)
        source = expected if of == "itself" else pair("sgd-momentum")[0]
        source.step(1)
        saved = copied(source.optimizer.state_dict())
        if source is expected:
            found.step(1)
        train(found, expected, 2, 3)
        for training in (found, expected):
            training.optimizer.load_state_dict(copied(saved))
        train(found, expected, 4, 5)
