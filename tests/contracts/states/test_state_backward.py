"""Updates in backward give the bits of a step; what would see a difference is an error that says so."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import combinations
from faults import inject
from models import assert_same_tensors, same_bits
from optimizers import Training, assert_same, copied, pair, policy, train
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import tba_offload as tba
from tba_offload.errors import RecomputationError, SessionError, StatesAwayError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Act = Callable[[Training], Any]


BACKWARD = {"when": "backward"}


def offloaded(
    training: Training, directory: Path, kind: str = "file", micro_batches: int = 1
) -> tba.OptimizerStates:
    chosen = policy(directory, kind, states=BACKWARD | {"micro_batches": micro_batches})
    return tba.offload_optimizer(training.optimizer, chosen, model=training.model)


def begun(training: Training) -> None:
    training.step(0)
    training.optimizer.zero_grad()
    training.backward(1)


OPTIMIZERS = ("adam-foreach", "adamw", "adamw-fused", "sgd-momentum", "adagrad", "adafactor")
"""Updates in the step are tested with every optimizer."""


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    combinations(OPTIMIZERS, [torch.float32, torch.bfloat16], ["file", "host"], together=1),
)
def test_training(name: str, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    found, expected = pair(name, dtype)
    with offloaded(found, tmp_path, kind) as states:
        for seed in range(5):
            train(found, expected, seed)
            assert_same(found, expected)
        for record in [*states.records][1:]:  # the first makes states
            assert record.in_backward >= record.sub_groups - 1  # that of a parameter without a gradient waits
    assert_same(found, expected)
    train(found, expected, 9)
    assert_same(found, expected)


def test_parameters_are_updated_when_backward_returns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path) as states:
        assert "parameters have their new values when backward() returns" in caplog.text
        for seed in range(3):
            expected.step(seed)
            found.optimizer.zero_grad()
            found.backward(seed)
            assert_same_tensors(found.model.parameters(), expected.model.parameters())
            weight = found.model.head.weight
            plain = expected.optimizer.state[expected.model.head.weight]
            assert same_bits(states.read(weight)["exp_avg"], plain["exp_avg"])
            found.optimizer.step()
            assert_same(found, expected)


def test_an_update_that_no_step_follows_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        begun(found)
    assert "no optimizer.step() followed" in caplog.text


def test_micro_batches(tmp_path: Path) -> None:
    """The last step of an epoch may have fewer; it is made as a whole then, and may clip."""
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, micro_batches=3) as states:
        for number, count in enumerate([3, 3, 1, 3]):
            for training in (found, expected):
                training.optimizer.zero_grad()
                for seed in range(10 * number, 10 * number + count):
                    training.backward(seed)
                training.optimizer.step()
            assert_same(found, expected)
        assert [record.in_backward > 0 for record in states.records] == [False, True, False, True]


# ---- weights of other layers, graphs that are used again -----------------------------------------


class Borrowing(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor] | None = None, of: Any = None) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
        self.use, self.others = use, [of]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        if self.use is not None:
            y = y + self.use(torch.tanh(y), self.others[0].linear.weight)
        return x + torch.tanh(y)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tied": lambda y, weight: y @ weight.T,
    "detach": lambda y, weight: y @ weight.detach().T,
    "data": lambda y, weight: y @ weight.data,
    "clone": lambda y, weight: y @ weight.detach().clone(),
    "norm": lambda y, weight: y / weight.detach().norm(),
}


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def borrowed(
    directory: Path, use: str, placement: str | None = None, run: Callable[..., Tensor] = plain
) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [Borrowing() for _ in range(3)]
    model = nn.ModuleList([Borrowing(USES[use], layers[2]), *layers])
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    def trained() -> list[Tensor]:
        for seed in range(4):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
            for layer in model:
                x = run(layer, x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in model.parameters()]

    if placement is None:
        return trained()
    states = BACKWARD | {"sub_group_bytes": "8KiB"}
    chosen = policy(directory, states=states, default=placement, min_tensor_bytes=1)
    with tba.attach(model, chosen, layers=list(model), optimizer=optimizer) as session:
        done = trained()
        assert session.states[0].records[-1].in_backward > 0
        return done


@pytest.mark.parametrize(
    ("use", "placement"), [*combinations(list(USES), ["keep", "offload"], together=1), ("tied", "recompute")]
)
def test_a_layer_uses_the_weight_of_a_later_one(use: str, placement: str, tmp_path: Path) -> None:
    assert_same_tensors(borrowed(tmp_path, use, placement), borrowed(tmp_path, use))


@pytest.mark.parametrize("use", ["detach", "norm"])
def test_a_recomputed_layer_that_reads_the_weight_of_a_later_one_is_an_error(
    use: str, tmp_path: Path
) -> None:
    with pytest.raises(RecomputationError, match=r"set states\.when to 'step'"):
        borrowed(tmp_path, use, "recompute")


def test_checkpoints_of_pytorch(tmp_path: Path) -> None:
    """A reentrant one is a backward pass of its own."""

    def run(layer: nn.Module, x: Tensor, *, use_reentrant: bool = False) -> Tensor:
        return checkpoint(layer, x.requires_grad_(), use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    assert_same_tensors(borrowed(tmp_path, "tied", "keep", run), borrowed(tmp_path, "tied", run=run))
    with pytest.raises(SessionError, match="use_reentrant=False"):
        borrowed(tmp_path, "tied", "keep", partial(run, use_reentrant=True))


# ---- what asks for gradients ---------------------------------------------------------------------


def penalize_by_hand(training: Training) -> None:
    for each in training.model.parameters():
        if each.grad is not None:
            each.grad.add_(each.detach(), alpha=0.1)


def scale(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(training.optimizer)


ASKS: list[Act] = [
    lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 1.0),
    lambda training: nn.utils.clip_grad_value_(training.model.parameters(), 1.0),
    penalize_by_hand,
    scale,
    lambda training: training.model.head.weight.grad.norm(),
    lambda training: training.model.head.weight.grad.data,
    lambda training: training.optimizer.zero_grad(set_to_none=False),
    lambda training: [training.optimizer.step(), training.backward(2)],  # without zero_grad()
]


@pytest.mark.parametrize("ask", ASKS)
def test_what_asks_for_a_gradient_is_an_error(ask: Act, tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        begun(found)
        with pytest.raises(StatesAwayError, match=r"the gradient of \S+ was freed.* states.when to"):
            ask(found)


# ---- what comes between backward and the step ----------------------------------------------------


BETWEEN: dict[str, Act] = {
    "rate": lambda training: training.optimizer.param_groups[0].update(lr=0.5),
    "number in a list": lambda training: training.optimizer.param_groups[0]["betas"].reverse(),
    "value": lambda training: training.model.head.weight.detach().mul_(2),
    "element": lambda training: training.model.layers[0].weight.data[3, 5].zero_(),
    "no gradient": lambda training: setattr(training.model.head.weight, "grad", None),
    "gradient": lambda training: setattr(training.model.unused, "grad", torch.ones(40, 40)),
    "state": lambda training: training.optimizer.state[training.model.head.weight].update(
        exp_avg=torch.zeros(5, 48)
    ),
    "no states": lambda training: training.optimizer.state.clear(),
}


@pytest.mark.parametrize("changed", BETWEEN)
def test_what_a_plain_step_would_have_used_is_an_error(changed: str, tmp_path: Path) -> None:
    found, _ = pair("adamw")
    found.optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    with offloaded(found, tmp_path):
        begun(found)
        BETWEEN[changed](found)
        with pytest.raises(SessionError, match=r"changed after backward\(\).*states.when to 'step'"):
            found.optimizer.step()


def test_a_pass_or_a_step_without_the_other_is_an_error(tmp_path: Path) -> None:
    one, other = pair("adamw")
    with offloaded(one, tmp_path), offloaded(other, tmp_path):
        begun(one)
        one.optimizer.zero_grad()
        with pytest.raises(SessionError, match=r"another backward pass ran .*states.micro_batches is 1"):
            one.backward(2)
        other.step(0)
        with pytest.raises(SessionError, match="without a backward pass between"):
            other.optimizer.step()


# ---- faults --------------------------------------------------------------------------------------


def fail(_: Tensor) -> None:
    raise ZeroDivisionError


def failing_in_backward(training: Training) -> None:
    handle = training.model.embed.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        training.backward(7)
    handle.remove()


def failing_to_read(training: Training) -> None:
    with inject("fail-read:after=4"), pytest.raises(TransferError):
        training.backward(7)


@pytest.mark.parametrize("failing", [failing_in_backward, failing_to_read])
@pytest.mark.parametrize("go_on", [lambda each: each.optimizer.step(), lambda each: each.step(8)])
def test_a_backward_that_fails_halfway_is_an_error_until_a_checkpoint_is_loaded(
    failing: Act, go_on: Act, tmp_path: Path
) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path):
        train(found, expected, 0, 1)
        found.optimizer.zero_grad()
        failing(found)
        with pytest.raises(SessionError, match="halfway"):
            go_on(found)
        found.model.load_state_dict(expected.model.state_dict())
        found.optimizer.load_state_dict(copied(expected.optimizer.state_dict()))
        train(found, expected, 2, 3)
        assert_same(found, expected)
