"""Updates in backward give the bits of a step; what would see a difference is an error that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import combinations
from faults import inject
from live_bytes import LiveBytes
from models import same_bits
from optimizers import Training, assert_same, pair, plain_copy, policy
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import tba_offload as tba
from tba_offload.errors import (
    RecomputationError,
    SessionError,
    StatesAwayError,
    TransferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Act = Callable[[Training], Any]


def settings(directory: Path, micro_batches: int = 1, **others: Any) -> dict[str, Any]:
    made = policy(directory, **others)
    made["states"] |= {"when": "backward", "micro_batches": micro_batches}
    return made


def offloaded(training: Training, directory: Path, **others: Any) -> tba.OptimizerStates:
    return tba.offload_optimizer(training.optimizer, settings(directory, **others), model=training.model)


def step(training: Training, *seeds: int) -> None:
    training.optimizer.zero_grad()
    for seed in seeds:
        training.backward(seed)
    training.optimizer.step()


def begun(training: Training) -> None:
    """Go to a step whose backward is done."""
    training.step(0)
    training.optimizer.zero_grad()
    training.backward(1)


def assert_same_parameters(found: Training, expected: Training) -> None:
    pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
    assert all(same_bits(a.detach(), b.detach()) for a, b in pairs)


OPTIMIZERS = ("adam-foreach", "adamw", "adamw-fused", "sgd-momentum", "adagrad", "adafactor")
"""Updates in the step are tested with every optimizer."""


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    combinations(OPTIMIZERS, [torch.float32, torch.bfloat16], ["file", "host"], together=1),
)
def test_training(name: str, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    found, expected = pair(name, dtype)
    store = {} if kind == "file" else {"kind": "host", "directories": []}
    with offloaded(found, tmp_path, store=store) as states:
        for seed in range(5):
            found.step(seed)
            expected.step(seed)
            assert_same(found, expected)
        for record in [*states.records][1:]:  # the first makes states
            assert record.in_backward >= record.sub_groups - 1  # that of a parameter without a gradient waits
    assert_same(found, expected)
    found.step(9)
    expected.step(9)
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
            assert_same_parameters(found, expected)
            weight = found.model.head.weight
            plain = expected.optimizer.state[expected.model.head.weight]
            assert same_bits(states.read(weight)["exp_avg"], plain["exp_avg"])
            found.optimizer.step()
            assert_same(found, expected)


def test_an_update_that_no_step_follows_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        begun(found)
    assert "no optimizer.step() has followed" in caplog.text


def test_micro_batches(tmp_path: Path) -> None:
    """The last step of an epoch may have fewer; it is made as a whole then, and may clip."""
    found, expected = pair("adamw")
    with offloaded(found, tmp_path, micro_batches=3) as states:
        for number, count in enumerate([3, 3, 1, 3]):
            for training in (found, expected):
                step(training, *range(10 * number, 10 * number + count))
            assert_same(found, expected)
        assert [record.in_backward > 0 for record in states.records] == [False, True, False, True]


def test_gradients_do_not_grow_with_depth(tmp_path: Path) -> None:
    width, peaks = 64, {}
    for depth in (32, 96):
        with LiveBytes() as meter:
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
            optimizer = optim.AdamW(model.parameters(), fused=True)
            made = settings(tmp_path)
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


# ---- weights of other layers, graphs that are used again -----------------------------------------


class Borrowing(nn.Module):
    """A layer that may use the weight of another one, which backward comes to before."""

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


def borrowed(
    directory: Path,
    use: str,
    run: Callable[..., Tensor],
    placement: str | None,
    when: str | None,
) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [Borrowing() for _ in range(3)]
    model = nn.ModuleList([Borrowing(USES[use], layers[2]), *layers])
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    def train(*seeds: int) -> list[Tensor]:
        for seed in seeds:
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
            for layer in model:
                x = run(layer, x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in model.parameters()]

    if when is None:
        return train(*range(4))
    chosen = settings(directory, default=placement, min_tensor_bytes=1)
    chosen["states"] |= {"sub_group_bytes": "8KiB"}
    with tba.attach(model, chosen, layers=list(model), optimizer=optimizer) as session:
        done = train(*range(4))
        assert session.states[0].records[-1].in_backward > 0
        return done


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("use", "placement"),
    [*combinations(list(USES), ["keep", "offload"], together=1), ("tied", "recompute")],
)
def test_a_layer_uses_the_weight_of_a_later_one(use: str, placement: str, tmp_path: Path) -> None:
    expected = borrowed(tmp_path, use, plain, None, None)
    found = borrowed(tmp_path, use, plain, placement, "backward")
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("use", ["detach", "norm"])
def test_a_recomputed_layer_that_reads_the_weight_of_a_later_one_is_an_error(
    use: str, tmp_path: Path
) -> None:
    with pytest.raises(RecomputationError, match=r"states\.when: step"):
        borrowed(tmp_path, use, plain, "recompute", "backward")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_pytorch(reentrant: bool, tmp_path: Path) -> None:
    """A reentrant one is a backward pass of its own."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x.requires_grad_(), use_reentrant=reentrant)  # type: ignore[no-any-return]

    expected = borrowed(tmp_path, "tied", run, None, None) if not reentrant else []
    if reentrant:
        with pytest.raises(SessionError, match="use_reentrant=False"):
            borrowed(tmp_path, "tied", run, "keep", "backward")
        return
    found = borrowed(tmp_path, "tied", run, "keep", "backward")
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adafactor"])
def test_a_graph_that_is_kept_can_be_used_again(name: str, tmp_path: Path) -> None:
    found, expected = pair(name)
    with offloaded(found, tmp_path, micro_batches=2):
        for seed in range(4):
            for training in (found, expected):
                training.optimizer.zero_grad()
                loss = training.loss(seed)
                loss.backward(retain_graph=True)
                (loss * loss).backward(retain_graph=seed > 1)
                training.optimizer.step()
            assert_same(found, expected)


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
        with pytest.raises(StatesAwayError, match=r"the gradient of \S+ is freed.* states.when to"):
            ask(found)


# ---- what comes between backward and the step ----------------------------------------------------


def another_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.5


def another_number_in_a_list(training: Training) -> None:
    training.optimizer.param_groups[0]["betas"][0] *= 0.9


def another_value(training: Training) -> None:
    with torch.no_grad():
        training.model.head.weight.mul_(2)


def another_element(training: Training) -> None:
    training.model.layers[0].weight.data[3, 5] = 0


def no_gradient(training: Training) -> None:
    training.model.head.weight.grad = None


def another_gradient(training: Training) -> None:
    training.model.unused.grad = torch.ones(40, 40)


def another_state(training: Training) -> None:
    weight = training.model.head.weight
    training.optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)


def no_states(training: Training) -> None:
    training.optimizer.state.clear()


BETWEEN: list[Act] = [
    *(another_rate, another_number_in_a_list, another_value, another_element),
    *(no_gradient, another_gradient, another_state, no_states),
]


@pytest.mark.parametrize("act", BETWEEN)
def test_what_a_plain_step_would_have_used_is_an_error(act: Act, tmp_path: Path) -> None:
    found, _ = pair("adamw")
    found.optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    with offloaded(found, tmp_path):
        begun(found)
        act(found)
        with pytest.raises(SessionError, match=r"another .* came after backward\(\).*states.when to step"):
            found.optimizer.step()


def test_another_pass_before_the_step_is_an_error(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        begun(found)
        found.optimizer.zero_grad()
        with pytest.raises(SessionError, match=r"another backward pass came .*states.micro_batches is 1"):
            found.backward(2)


def test_another_step_is_an_error(tmp_path: Path) -> None:
    found, _ = pair("adamw")
    with offloaded(found, tmp_path):
        found.step(0)
        with pytest.raises(SessionError, match="without a backward pass since the last one"):
            found.optimizer.step()


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
        for training in (found, expected):
            training.step(0)
            training.step(1)
        found.optimizer.zero_grad()
        failing(found)
        with pytest.raises(SessionError, match="halfway"):
            go_on(found)
        found.model.load_state_dict(expected.model.state_dict())
        found.optimizer.load_state_dict(plain_copy(expected.optimizer.state_dict()))
        for training in (found, expected):
            training.step(2)
            training.step(3)
        assert_same(found, expected)


def test_a_backward_that_fails_before_any_update_can_be_repeated(tmp_path: Path) -> None:
    found, expected = pair("adamw")
    with offloaded(found, tmp_path):
        for training in (found, expected):
            training.step(0)
            training.optimizer.zero_grad()
            handle = training.model.head.bias.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                training.backward(1)
            handle.remove()
            training.step(2)
        assert_same(found, expected)
