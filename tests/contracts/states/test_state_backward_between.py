"""What programs do between backward and the step, after updates in backward: no number differs silently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import of_which
from models import same_bits
from optimizers import MAKERS, Training, assert_same, pair, policy

import tba_offload as tba
from tba_offload.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Act = Callable[[Training], Any]


def offloaded(training: Training, directory: Path, gradients: str = "keep") -> tba.OptimizerStates:
    made = policy(directory)
    made["states"] |= {"when": "backward", "gradients": gradients}
    return tba.offload_optimizer(training.optimizer, made, model=training.model)


def both(found: Training, expected: Training, seed: int, act: Act) -> list[Any]:
    """A step of each with something between backward and the step; what that gives."""
    results = []
    for training in (found, expected):
        training.optimizer.zero_grad()
        training.backward(seed)
        results.append(act(training))
        training.optimizer.step()
    return results


# ---- gradients and settings that are changed -----------------------------------------------------


def with_other_signs(training: Training) -> None:
    training.model.layers[0].weight.grad[:, 1::2].neg_()  # type: ignore[union-attr, index]


def with_other_rows(training: Training) -> None:
    gradient: Any = training.model.layers[0].weight.grad
    gradient[[5, 6]] = gradient[[6, 5]]


def with_another_number_in_a_list(training: Training) -> None:
    training.optimizer.param_groups[0]["betas"][0] *= 0.9


@pytest.mark.parametrize("act", [with_other_signs, with_other_rows, with_another_number_in_a_list])
def test_what_is_changed_in_place_is_seen(act: Act, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    for training in (found, expected):
        training.optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    with offloaded(found, tmp_path) as states:
        for seed in range(3):
            both(found, expected, seed, act)
            assert_same(found, expected)
        assert states.records[-1].taken_back > 0


def test_any_element_of_a_parameter_that_data_changes_is_an_error(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        found.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        found.model.layers[0].weight.data[3, 5] = 0
        with pytest.raises(
            SessionError, match=r"^(parameter \d+|one of .*) was changed between backward and step"
        ):
            found.optimizer.step()


# ---- an optimizer that changes gradients ---------------------------------------------------------


@pytest.mark.parametrize("of", ["all", "one"])
def test_freed_gradients_that_are_cleared_are_an_error(of: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, "free"):
        found.step(0)
        expected.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        if of == "all":
            found.model.zero_grad()
        found.model.head.weight.grad = None
        with pytest.raises(SessionError, match="other gradients came after gradients were used"):
            found.optimizer.step()
        found.optimizer.zero_grad()
        assert_same(found, expected)


# ---- what reads parameters and states ------------------------------------------------------------


def forward_of_a_part(training: Training) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = training.model.layers[3](torch.ones(2, 48))
    return found


def checkpoint_of_a_part(training: Training) -> torch.Tensor:
    return training.model.layers[3].state_dict()["weight"].clone()


@pytest.mark.parametrize("act", [forward_of_a_part, checkpoint_of_a_part])
def test_a_part_of_the_model_is_as_before_the_step(act: Act, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path):
        for seed in range(3):
            assert same_bits(*both(found, expected, seed, act))
            assert_same(found, expected)


def test_states_that_are_read_are_those_before_the_step(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path) as states:
        found.step(0)
        expected.step(0)
        for training in (found, expected):
            training.optimizer.zero_grad()
            training.backward(1)
        plain = expected.optimizer.state[expected.model.head.weight]
        assert same_bits(states.read(found.model.head.weight)["exp_avg"], plain["exp_avg"])
        found.optimizer.step()
        expected.optimizer.step()
        assert_same(found, expected)


@pytest.mark.parametrize("gradients", ["keep", "free"])
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_wait_for_the_step(
    factor: float, gradients: str, tmp_path: Path
) -> None:
    """So that what reads parameters after a step that a scaler leaves out does not see them updated.

    Gradients that are freed cannot wait: there it is ``zero_grad`` that takes the update back.
    """
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, gradients=gradients):
        found.step(0)
        expected.step(0)
        found.optimizer.zero_grad()
        weight = found.model.layers[0].weight  # of which the gradient comes late
        handle = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([7]), factor))
        found.backward(1)
        handle.remove()
        if gradients == "free":
            found.optimizer.zero_grad()
        pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
        assert all(same_bits(a.detach(), b.detach()) for a, b in pairs)


@pytest.mark.parametrize(
    "name", of_which(MAKERS, "adamw", "adamw-fused", "sgd-momentum", "adagrad", "adafactor")
)
def test_a_graph_that_is_kept_can_be_used_again(name: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    with offloaded(found, tmp_path):
        for seed in range(4):
            for training in (found, expected):
                training.optimizer.zero_grad()
                loss = training.loss(seed)
                loss.backward(retain_graph=seed > 1)
                if seed > 1:
                    (loss * loss).backward()
                training.optimizer.step()
            assert_same(found, expected)


# ---- what is left --------------------------------------------------------------------------------


# ---- interrupts ----------------------------------------------------------------------------------
