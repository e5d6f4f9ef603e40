"""Updates in backward give the bits of a step, whatever comes between backward and that step."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from covering import combinations, in_turn, of_which, product_with
from live_bytes import LiveBytes
from models import same_bits
from optimizers import MAKERS, Training, assert_same, pair, policy
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import tba_offload as tba
from tba_offload.config import read_config
from tba_offload.errors import (
    ConfigError,
    SessionError,
    StatesAwayError,
    TransferError,
    UnsupportedError,
)
from tba_offload.states.home import Home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

UNSTEADY = {"sgd-fused"}
"""Gives other bits each time in 16 bits, by itself."""


def settings(directory: Path, *, gradients: str = "keep", **others: Any) -> dict[str, Any]:
    made = policy(directory, **others)
    made["states"] |= {"when": "backward", "gradients": gradients}
    return made


def offloaded(training: Training, directory: Path, **others: Any) -> tba.OptimizerStates:
    return tba.offload_optimizer(training.optimizer, settings(directory, **others), model=training.model)


def assert_same_parameters(found: Training, expected: Training) -> None:
    pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
    assert all(same_bits(a.detach(), b.detach()) for a, b in pairs)


WAYS = ([torch.float32, torch.bfloat16], ["keep", "free"], ["file", "host"])
SOME = [
    (name, *way)
    for name, way in zip(
        ("adam-foreach", "adamw", "adamw-fused", "sgd-momentum", "adagrad", "adafactor"),
        cycle(combinations(*WAYS, everything=False)),
        strict=False,
    )
]
"""What is run every time: all pairs of the ways. Updates in the step are tested with every optimizer."""


@pytest.mark.parametrize(("name", "dtype", "gradients", "kind"), product_with(SOME, list(MAKERS), *WAYS))
def test_training(name: str, dtype: torch.dtype, gradients: str, kind: str, tmp_path: Path) -> None:
    found, expected = pair(name, torch.float32 if name in UNSTEADY else dtype)
    store = {} if kind == "file" else {"kind": "host", "directories": []}
    with offloaded(found, tmp_path, gradients=gradients, store=store) as states:
        for seed in range(5):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)
        assert [record.in_backward > 0 for record in states.records] == [False, True, True, True, True]
        assert [record.taken_back for record in states.records] == [0] * 5
    assert_same(found, expected)
    found.step(9)
    expected.step(9)
    assert_same(found, expected)


def test_what_is_updated_in_backward_is_updated_before_the_step(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        found.step(0)
        before = found.model.head.weight.detach().clone()
        found.optimizer.zero_grad()
        found.backward(1)
        assert not torch.equal(before, found.model.head.weight)


@pytest.mark.parametrize("gradients", ["keep", "free"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_pytorch(reentrant: bool, gradients: str, tmp_path: Path) -> None:
    """A reentrant one is a backward pass of its own: what is not in the last of them waits for the step."""

    def trained(*, offloads: bool) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)
        )
        model = nn.ModuleList([nn.Linear(64, 64), *layers])
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        with ExitStack() as stack:
            made = settings(tmp_path, gradients=gradients)
            states = None
            if offloads:
                states = stack.enter_context(tba.offload_optimizer(optimizer, made, model=model))
            for seed in range(4):
                torch.manual_seed(seed)
                x = model[0](torch.randn(8, 64))
                for layer in layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                x.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            early = [] if states is None else [record.in_backward for record in states.records]
        return [each.detach() for each in model.parameters()], early

    (found, early), (expected, _) = trained(offloads=True), trained(offloads=False)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert early[0] == 0 < min(early[1:])


# ---- between backward and the step ---------------------------------------------------------------


@pytest.mark.parametrize(("most", "taken_back"), [(1e9, False), (1e-3, True)])
def test_clipping(most: float, taken_back: bool, tmp_path: Path) -> None:
    """A factor of one changes no bit; another has the update done again."""
    found, expected = pair("adamw")
    with offloaded(found, tmp_path) as states:
        for seed in range(4):
            for training in (found, expected):
                training.optimizer.zero_grad()
                training.backward(seed)
                nn.utils.clip_grad_norm_(training.model.parameters(), most)
                training.optimizer.step()
        assert_same(found, expected)
        assert [record.taken_back > 0 for record in states.records][1:] == [taken_back] * 3


def test_accumulation(tmp_path: Path) -> None:
    """The last of an epoch may have fewer micro-batches, and a later step more than any before."""
    found, expected = pair("adamw")
    with offloaded(found, tmp_path) as states:
        for step, count in enumerate([3, 3, 3, 1, 3, 4, 4, 3]):
            for training in (found, expected):
                training.optimizer.zero_grad()
                for seed in range(count):
                    training.backward(10 * step + seed)
                training.optimizer.step()
            assert_same(found, expected)
        assert [record.in_backward > 0 for record in states.records] == [
            *(False, True, True, False, True, False, True, False)
        ]
        assert [record.taken_back > 0 for record in states.records].count(True) == 1


def scaled(training: Training, scaler: torch.amp.GradScaler, seed: int, factor: float) -> None:
    training.optimizer.zero_grad()
    scaler.scale(training.loss(seed) * factor).backward()
    scaler.step(training.optimizer)
    scaler.update()


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_a_gradient_scaler_that_skips_a_step(name: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    with offloaded(found, tmp_path):
        for seed, factor in enumerate([1.0, 1.0, float("inf"), 1.0]):
            scaled(found, scalers[0], seed, factor)
            scaled(expected, scalers[1], seed, factor)
            found.optimizer.zero_grad()
            assert_same(found, expected)


def test_settings_that_change_before_the_step(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path):
        for seed in range(4):
            for training in (found, expected):
                training.optimizer.zero_grad()
                training.backward(seed)
                training.optimizer.param_groups[0]["lr"] = 0.1 / (seed + 1)
                training.optimizer.step()
        assert_same(found, expected)


def test_a_closure(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path) as states:
        for seed in range(4):
            for training in (found, expected):

                def closure(training: Training = training, seed: int = seed) -> Any:
                    training.optimizer.zero_grad()
                    return training.backward(seed)

                training.optimizer.step(closure)
        assert_same(found, expected)
        assert states.records[-1].in_backward > 0


def abandoned_by_zero_grad(training: Training) -> None:
    training.optimizer.zero_grad()


def abandoned_by_a_forward(training: Training) -> None:
    training.model.zero_grad()
    with torch.no_grad():
        training.loss(7)


def abandoned_by_a_checkpoint_of_the_model(training: Training) -> None:
    training.model.state_dict()
    training.model.zero_grad()


def abandoned_by_a_checkpoint_of_the_optimizer(training: Training) -> None:
    training.optimizer.state_dict()
    training.model.zero_grad()


def abandoned_by_an_older_checkpoint(training: Training) -> None:
    training.model.load_state_dict(training.model.state_dict())
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.model.zero_grad()


ABANDONED = [
    abandoned_by_zero_grad,
    abandoned_by_a_forward,
    abandoned_by_a_checkpoint_of_the_model,
    abandoned_by_a_checkpoint_of_the_optimizer,
    abandoned_by_an_older_checkpoint,
]


@pytest.mark.parametrize(
    ("name", "abandon"),
    product_with(
        combinations(["adamw", "sgd", "adagrad", "rprop"], ABANDONED, everything=False, together=1),
        MAKERS,
        ABANDONED,
    ),
)
def test_a_step_that_never_comes(name: str, abandon: Callable[[Training], None], tmp_path: Path) -> None:
    found, expected = pair(name)
    with offloaded(found, tmp_path) as states:
        for seed in range(6):
            for training in (found, expected):
                training.optimizer.zero_grad()
                training.backward(seed)
                if seed % 2:
                    abandon(training)
                else:
                    training.optimizer.step()
            assert_same(found, expected)
        assert states.records[-1].in_backward > 0


def test_a_checkpoint_between_backward_and_the_step(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path):
        for seed in range(4):
            for training in (found, expected):
                training.optimizer.zero_grad()
                training.backward(seed)
            found.optimizer.state_dict()
            assert_same(found, expected)
            found.optimizer.step()
            expected.optimizer.step()
        assert_same(found, expected)


def test_closing_takes_back_too(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    states = offloaded(found, tmp_path)
    for training in (found, expected):
        training.step(0)
        training.optimizer.zero_grad()
        training.backward(1)
    states.close()
    assert_same(found, expected)
    found.optimizer.step()
    expected.optimizer.step()
    assert_same(found, expected)


def test_a_backward_that_fails(tmp_path: Path) -> None:
    found, expected = pair("adamw")

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    with offloaded(found, tmp_path):
        for training in (found, expected):
            training.step(0)
            training.optimizer.zero_grad()
            handle = training.model.embed.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                training.backward(1)
            handle.remove()
            training.optimizer.zero_grad()
        assert_same(found, expected)
        for seed in (2, 3):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)


def test_a_parameter_that_is_changed_before_the_step_is_an_error(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path):
        found.step(0)
        expected.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        with torch.no_grad():
            found.model.head.weight.mul_(2)
        with pytest.raises(SessionError, match=r"parameter 17 was changed between backward and step\(\)"):
            found.optimizer.step()
        found.optimizer.zero_grad()
        assert_same(found, expected)


def test_a_state_that_is_set_before_the_step_is_an_error(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        found.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        weight = found.model.head.weight
        found.optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)
        with pytest.raises(SessionError, match=r"a state was changed between backward and step\(\)"):
            found.optimizer.step()


# ---- gradients that are freed --------------------------------------------------------------------


def test_gradients_do_not_grow_with_depth(tmp_path: Path) -> None:
    width, peaks = 64, {}
    for depth in (32, 96):
        with LiveBytes() as meter:
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
            optimizer = optim.AdamW(model.parameters(), fused=True)
            made = settings(tmp_path, gradients="free")
            made["states"]["sub_group_bytes"] = 8 * width * width * 4
            with tba.offload_optimizer(optimizer, made, model=model):
                for _ in range(3):
                    optimizer.zero_grad()
                    loss = model(torch.ones(2, width)).sum()
                    before = meter.peak = meter.live
                    loss.backward()
                    optimizer.step()
                    peaks[depth] = meter.peak - before
    assert peaks[96] < peaks[32] + 50_000  # counts of steps, and tensors that have no memory
    assert peaks[96] < 96 * width * width * 4 / 2


def test_clipping_of_freed_gradients_is_an_error(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, gradients="free"):
        found.step(0)
        expected.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        with pytest.raises(
            StatesAwayError, match=r"the gradient of parameter \d+ was used .*states.gradients: keep"
        ):
            nn.utils.clip_grad_norm_(found.model.parameters(), 1.0)
        found.optimizer.zero_grad()
        assert_same(found, expected)


@pytest.mark.parametrize("abandon", ABANDONED[1:4])
def test_nothing_else_may_come_after_gradients_are_freed(
    abandon: Callable[[Training], None], tmp_path: Path
) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, gradients="free"):
        found.step(0)
        expected.step(0)
        found.optimizer.zero_grad()
        found.backward(1)
        with pytest.raises(SessionError, match="came after gradients were used in backward and freed"):
            abandon(found)
        found.optimizer.zero_grad()
        assert_same(found, expected)
        found.step(2)
        expected.step(2)
        assert_same(found, expected)


def test_another_micro_batch_after_gradients_are_freed_is_an_error(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, gradients="free"):
        found.step(0)
        expected.step(0)
        losses = [found.loss(1), found.loss(2)]
        found.optimizer.zero_grad()
        losses[0].backward()
        with pytest.raises(RuntimeError):
            losses[1].backward()
        found.optimizer.zero_grad()
        assert_same(found, expected)


def test_zeros_in_place_of_gradients_are_an_error(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with (
        offloaded(found, tmp_path, gradients="free"),
        pytest.raises(SessionError, match=r"zero_grad\(set_to_none=False\)"),
    ):
        found.optimizer.zero_grad(set_to_none=False)


# ---- faults --------------------------------------------------------------------------------------


@contextmanager
def read_fails(after: int) -> Iterator[None]:
    """All tries to read one sub-group's states fail, after those of some others were read."""
    settle, calls = Home.settle_reads, []

    def failing(home: Home, reads: list[Any], memory: Any) -> None:
        settle(home, reads, memory)
        if reads:
            calls.append(home)
            if home in calls[after : after + 1]:
                raise TransferError("the drive cannot be read")

    with mock.patch.object(Home, "settle_reads", failing):
        yield
    assert len(calls) > after


@pytest.mark.parametrize("gradients", ["keep", "free"])
@pytest.mark.parametrize("after", of_which(list(range(9)), 0, 4, 8))
def test_a_drive_that_cannot_be_read_leaves_what_there_was(
    after: int, gradients: str, tmp_path: Path
) -> None:
    """At whatever sub-group: version n is there, and the next step is that of training without it."""
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, gradients=gradients) as states:
        for seed in range(2):
            found.step(seed)
            expected.step(seed)
        for _ in range(2):
            with read_fails(after), pytest.raises(TransferError):
                found.optimizer.zero_grad()
                found.backward(2)
                found.optimizer.step()
        found.optimizer.zero_grad()
        assert_same_parameters(found, expected)
        assert_same(found, expected)
        for seed in range(3, 6):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)
        assert states.records[-1].in_backward > 0


def test_an_interrupt_in_an_update_leaves_what_there_was(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path):
        found.step(0)
        expected.step(0)
        found.optimizer.zero_grad()
        module = sys.modules[optim.Adam.__module__]
        update, calls = module.adam, []

        def interrupted(*arguments: Any, **settings: Any) -> None:
            update(*arguments, **settings)
            calls.append(arguments)
            if len(calls) == 4:
                raise KeyboardInterrupt

        with mock.patch.object(module, "adam", interrupted), pytest.raises(KeyboardInterrupt):
            found.backward(1)
            pytest.fail("no update was made in backward")
        found.optimizer.zero_grad()
        assert_same(found, expected)


# ---- with activations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "gradients"), in_turn(["offload", "recompute", "keep"], ["keep", "free"])
)
def test_beside_offloaded_activations(placement: str, gradients: str, tmp_path: Path) -> None:
    found, expected = pair("adamw")
    made = settings(tmp_path, gradients=gradients, default=placement, min_tensor_bytes=0)
    with tba.attach(found.model, made, layers=[*found.model.layers], optimizer=found.optimizer) as session:
        for seed in range(5):
            found.step(seed)
            expected.step(seed)
        assert_same(found, expected)
        assert session.states[0].records[-1].in_backward > 0


# ---- what is refused -----------------------------------------------------------------------------


def test_without_a_model_it_is_refused(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with pytest.raises(UnsupportedError, match="needs the model"):
        tba.offload_optimizer(found.optimizer, settings(tmp_path))


def test_without_some_of_the_modules_it_is_refused(tmp_path: Path) -> None:
    """A forward of theirs would not be seen, and compute with what the next step has updated."""
    found, _ = pair("adamw")
    with pytest.raises(UnsupportedError, match=r"7 parameters of this AdamW are not of the model"):
        tba.offload_optimizer(found.optimizer, settings(tmp_path), model=found.model.layers)


def test_with_several_processes_it_is_refused(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with (
        mock.patch("tba_offload.states.checks.has_peers", return_value=True),
        pytest.raises(UnsupportedError, match="with several processes"),
    ):
        offloaded(found, tmp_path)


def test_gradients_that_are_free_before_the_step_need_updates_in_backward() -> None:
    with pytest.raises(ConfigError, match="when: backward only"):
        read_config({"states": {"gradients": "free"}})
