"""Frozen weights are in memory only while their layer computes, and what is trained has the same bits."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import bases
import pytest
import torch
from covering import of_which
from exact_memory import counted_bytes, exact_memory
from faults import inject
from harness import KIB, PLACEMENTS
from models import assert_same_tensors, same_bits
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tba_offload as tba
from tba_offload.errors import SessionError, TransferError
from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LAYERS, WIDTH = 5, 48
WEIGHTS = 2 * WIDTH * WIDTH * 4
"""Bytes of the frozen weights of one layer."""


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = Adapted(), Adapted(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x + self.two(torch.nn.functional.gelu(self.one(self.norm(x))))}


class Model(nn.Module):
    """Layers and a head; ``reentrant`` as PyTorch's own checkpointing has it, ``None`` without."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:

            def run(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return layer(x)["hidden"]

            is_checkpointed = self.training and self.reentrant is not None
            x = checkpoint(run, x, use_reentrant=self.reentrant) if is_checkpointed else run(x)
        return self.head(x)


def trained(model: Model, *, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(2):
            loss = model(torch.randn(8, WIDTH).requires_grad_()).pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model.eval()(torch.randn(2, WIDTH)).sum())
        model.train()
    return losses + [p.detach().clone() for p in model.parameters() if p.requires_grad]


policy = partial(bases.policy, min_tensor_bytes="2KiB")


@contextmanager
def offloaded(model: Model, directory: Path, **settings: Any) -> Iterator[tba.FrozenWeights]:
    with tba.attach(model, policy(directory, **settings), measure_memory=False) as session:
        assert session.weights is not None
        yield session.weights


def is_away(weight: Tensor) -> bool:
    """Return True if the weight has no memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.untyped_storage().nbytes() == 0


def frozen(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters() if not parameter.requires_grad]


# The same bits, and memory that does not grow with depth


# A reentrant checkpoint runs the layers without a graph, so the session sees no backward pass of them.
@pytest.mark.filterwarnings("ignore:the model was trained, but no activation is offloaded")
@pytest.mark.parametrize("reentrant", of_which((None, False, True), None, False))
def test_training_has_the_same_bits_on_the_memory_of_two_layers(
    reentrant: bool | None, tmp_path: Path
) -> None:
    expected = trained(Model(reentrant=reentrant))
    model = Model(reentrant=reentrant)
    before = frozen(model)
    with offloaded(model, tmp_path) as weights:
        assert weights.nbytes == LAYERS * WEIGHTS
        assert weights.resident_bytes == 0
        weights.peak_bytes = 0
        found = trained(model)
        assert WEIGHTS <= weights.peak_bytes <= 2 * WEIGHTS
        assert weights.resident_bytes == 0
    assert_same_tensors(found, expected)
    assert_same_tensors(frozen(model), before)


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_a_share_of_the_bytes_travels_evenly_over_the_layers(percent: int, tmp_path: Path) -> None:
    expected = trained(Model())
    model = Model()
    each = WEIGHTS // 2  # of one weight
    with offloaded(model, tmp_path, weights={"frozen": f"offload-{percent}%"}) as weights:
        assert abs(weights.nbytes - percent / 100 * LAYERS * WEIGHTS) <= each / 2
        parts = [part for layer in model.layers for part in (layer.one, layer.two)]
        away = [is_away(part.base.weight) for part in parts]
        assert sum(away) == weights.nbytes // each
        assert all(abs(sum(away[:n]) - percent / 100 * n) <= 1 / 2 for n in range(2 * LAYERS + 1))
        weights.peak_bytes = 0
        found = trained(model)
        assert each <= weights.peak_bytes <= min(2 * WEIGHTS, weights.nbytes)
    assert_same_tensors(found, expected)
    assert not any(parameter.isnan().any() for parameter in model.parameters())


@pytest.mark.parametrize("placement", of_which(PLACEMENTS, "offload", "recompute", "auto"))
def test_the_same_bits_beside_activations_that_travel(placement: str, tmp_path: Path) -> None:
    expected = trained(Model())
    model = Model()
    budget = {"activation_bytes": "1MiB"} if placement == "auto" else {}
    chosen = policy(tmp_path, default=placement, min_tensor_bytes="1KiB", budget=budget)
    with tba.attach(model, chosen) as session:
        assert session.weights is not None
        assert session.weights.nbytes == LAYERS * WEIGHTS
        assert_same_tensors(trained(model), expected)
        assert session.records[-1].weights_read_bytes
        session.weights.close()
        trained(model, steps=1)
        assert not session.records[-1].weights_read_bytes


def test_the_run_log_tells_what_weights_move_and_how_long_layers_wait_for_them(tmp_path: Path) -> None:
    model, delay, log = Model(), 0.005, tmp_path / "run.jsonl"
    with inject(f"delay-read:seconds={delay}"), tba.attach(model, policy(tmp_path), run_log=log) as session:
        for number in range(3):
            with session.step(trace=number == 2) as step:
                model(torch.ones(8, WIDTH)).sum().backward()
        told = step.timeline
    for record in read_run_log(log).steps[1:]:
        # Of the last layer the weights stay from its forward to its backward.
        assert record.weights_read_bytes == (2 * LAYERS - 1) * WEIGHTS
        assert delay < (record.weights_waited_seconds or 0.0) < record.seconds
    [drive] = [number for number, drive in enumerate(told.drives) if drive.moves == "frozen weights"]
    moves = [move for move in told.moves if move.drive == drive]
    assert sum(move.nbytes for move in moves) == (2 * LAYERS - 1) * WEIGHTS
    assert not any(move.writes for move in moves)
    assert told.drives[drive].place == told.drives[0].place
    waited = sum(until - since for since, until in told.stalls)
    assert waited >= 0.9 * ((step.record.weights_waited_seconds or 0.0) + (step.record.stall_seconds or 0.0))


# Outside of their layers, and in other ways


def test_an_alias_keeps_its_memory(tmp_path: Path) -> None:
    model = Model()
    with offloaded(model, tmp_path) as weights:
        alias = model.layers[1].one.base.weight.data
        trained(model, steps=1)
        assert weights.resident_bytes == WEIGHTS // 2
        del alias
        trained(model, steps=1)
        assert weights.resident_bytes == 0


def test_what_others_use_too_stays_in_memory(tmp_path: Path) -> None:
    model = Model()
    model.layers[1].one.base.weight = model.layers[0].one.base.weight
    model.head.weight = nn.Parameter(model.layers[2].two.base.weight.detach()[:1], requires_grad=False)
    model.layers[3].one.base.weight.requires_grad_()
    with offloaded(model, tmp_path) as weights:
        assert weights.nbytes == (LAYERS * 2 - 4) * WIDTH * WIDTH * 4
        assert not any(is_away(model.layers[number].one.base.weight) for number in (0, 1, 3))


def rows() -> Tensor:
    return torch.arange(8 * WIDTH).reshape(8, WIDTH).div(400).sin().requires_grad_()


def without_its_layer(model: Model, x: Tensor) -> None:
    """A part of each layer runs, as where a model generates by ``layer.step()``."""
    for layer in model.layers:
        x = layer.two(torch.nn.functional.gelu(layer.one(x)))
    x.sum().backward()


def of_inner_module(model: Model, x: Tensor) -> None:
    seen: list[Tensor] = []
    handle = model.layers[1].one.register_forward_hook(lambda _layer, _args, output: seen.append(output))
    model(x)
    handle.remove()
    seen[0].pow(2).sum().backward()


def of_checkpointed_pairs(model: Model, x: Tensor) -> None:
    def run(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x)["hidden"]

    checkpoint_sequential([run(layer) for layer in model.layers], 2, x, use_reentrant=True).sum().backward()


def with_a_gradient_inside(model: Model, x: Tensor) -> None:
    def inside(layer: nn.Module, arguments: tuple[Tensor]) -> None:
        value = arguments[0].detach().requires_grad_()
        torch.autograd.grad(layer.one(value).sum(), value)

    handle = model.layers[2].register_forward_pre_hook(inside)
    model(x).sum().backward()
    handle.remove()


def with_an_evaluation_inside(model: Model, x: Tensor) -> None:
    def evaluate(_: Tensor) -> None:
        with torch.no_grad():
            model(rows())

    loss = model(x).sum()
    handle = model.layers[2].two.up.weight.register_hook(evaluate)
    loss.backward()
    handle.remove()


WAYS = (
    *(without_its_layer, of_inner_module, of_checkpointed_pairs, with_a_gradient_inside),
    *(with_an_evaluation_inside,),
)


@pytest.mark.parametrize("backward", WAYS)
def test_backward_comes_to_a_layer_in_another_way(
    backward: Callable[[Model, Tensor], None], tmp_path: Path
) -> None:
    gradients = []
    for is_attached in (False, True):
        model, x = Model(), rows()
        torch.manual_seed(1)
        with offloaded(model, tmp_path) if is_attached else nullcontext() as weights:
            if weights is not None:
                weights.peak_bytes = 0
            backward(model, x)
            if weights is not None:
                assert weights.resident_bytes == 0
                assert WEIGHTS <= weights.peak_bytes <= 2 * WEIGHTS or backward is not without_its_layer
        assert x.grad is not None
        gradients.append([each.grad for each in (x, *model.parameters()) if each.grad is not None])
    assert_same_tensors(*gradients)


@pytest.mark.parametrize(
    ("said", "use"),
    [
        ("create_graph=True", lambda net, x: torch.autograd.grad(net(x).sum(), x, create_graph=True)),
        (r"transforms of torch\.func", lambda net, x: torch.func.grad(lambda y: net(y).sum())(x.detach())),
    ],
)
def test_what_cannot_have_its_weights_is_named(
    said: str, use: Callable[[Model, Tensor], object], tmp_path: Path
) -> None:
    model = Model().eval()
    with offloaded(model, tmp_path), pytest.raises(SessionError, match=said):
        use(model, rows())


# What has no room, and what cannot be offloaded, is named


def test_a_drive_that_is_full(tmp_path: Path) -> None:
    store = {"kind": "file", "directories": [str(tmp_path)], "capacity": "32KiB"}
    model = Model()
    with pytest.raises(TransferError, match=r"frozen weights of .* cannot be written.* Free some space"):
        tba.attach(model, policy(tmp_path, store=store))
    assert_same_tensors(model.parameters(), Model().parameters())


def test_weights_that_are_offloaded_again_have_the_values_of_memory(tmp_path: Path) -> None:
    """Also values of another layout, which the program has set meanwhile, and after a write that failed."""
    model, x = Model().eval(), rows().detach()
    own = [layer.one.base.weight for layer in model.layers]
    with offloaded(model, tmp_path) as weights:
        weights.arrange(0)
        own[1].data = torch.randn(WIDTH, WIDTH).t()
        values, expected = [weight.detach().clone() for weight in own], model(x)
        with inject("fail-write:errno=EIO"), pytest.raises(TransferError):
            weights.arrange(2 * LAYERS)
        with torch.inference_mode():
            assert same_bits(model(x), expected)
        assert same_bits(model(x), expected)
        weights.arrange(2 * LAYERS)
        with torch.inference_mode():
            assert same_bits(model(x), expected)
        weights.begin_step()
        assert all(map(is_away, own))
        assert_same_tensors([weight.detach() for weight in own], values)
        assert same_bits(model(x), expected)
    assert_same_tensors(own, values)


class Quantized(nn.Parameter):
    """Stands for weights whose bytes are read by their address."""


def test_weights_of_other_classes_stay_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(Model())
    model = Model()
    for layer in model.layers:
        layer.one.base.weight = Quantized(layer.one.base.weight.data, requires_grad=False)
    with offloaded(model, tmp_path) as weights:
        assert weights.nbytes == LAYERS * WEIGHTS // 2
        assert_same_tensors(trained(model), expected)
    assert f"stay in memory: {LAYERS} of the class test_frozen_weights.Quantized (45KiB)" in caplog.text


def test_weights_that_fsdp2_shards_are_named(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = fully_shard(Model(), mesh=distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(tba.UnsupportedError, match=r"DTensor .* with FSDP2, pass them .* ignored_params"):
        tba.attach(model, policy(tmp_path))
    distributed.destroy_process_group()


# ``frozen: auto``: weights stay in memory where the limit of the device leaves room


WIDER, DEEPER = 128, 8
FROZEN = DEEPER * 4 * (WIDER * WIDER + WIDER)  # bytes


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDER, WIDER), nn.Linear(WIDER, WIDER, bias=False)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + 0.1 * self.adapter(x)


def train(directory: Path, rows: list[int], **policy: Any) -> tuple[list[int], list[Tensor], list[int]]:
    """Train one step for each number of rows. Return peaks, trained weights, and bytes read in each step."""
    gc.collect()
    torch.manual_seed(0)
    model = nn.Sequential(*(Wider() for _ in range(DEEPER)))
    store = {"directories": str(directory)}
    with tba.attach(
        model, {"min_tensor_bytes": KIB, "store": store, **policy}, layers=list(model), measure_memory=True
    ) as session:
        for number, count in enumerate(rows):
            torch.manual_seed(number)
            with session.step():
                model(torch.randn(count, WIDER)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        records = session.records
    weights = [torch.from_numpy(each.detach().numpy().copy()) for each in model.parameters()]
    return (
        [each.device_peak_bytes or 0 for each in records],
        weights,
        [each.weights_read_bytes or 0 for each in records],
    )


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_weights_fill_what_activations_leave(share: float, tmp_path: Path) -> None:
    rows = [64] * 10
    with exact_memory(slots_too=True):
        others = counted_bytes()
        kept, expected, _ = train(tmp_path, rows, default="keep")
        least, _, all_read = train(tmp_path, rows, default="keep", weights={"frozen": "offload"})
        budget = max(least) + int(share * (max(kept) - max(least))) + (max(kept) - others) // 25
        peaks, found, read = train(
            tmp_path, rows, default="keep", weights={"frozen": "auto"}, budget={"device_bytes": budget}
        )
    assert all(map(same_bits, found, expected))
    assert max(peaks[2:]) <= budget
    assert read[0] >= FROZEN  # all are offloaded until the memory of a step is known
    if share == 0:
        assert read[-1] > 0.7 * all_read[-1]
    elif share == 0.5:
        assert 0.2 * all_read[-1] < read[-1] < 0.8 * all_read[-1]
    else:
        assert read[-1] == 0


def test_weights_leave_when_activations_need_more(tmp_path: Path) -> None:
    rows = [16] * 6 + [160] * 6 + [16] * 2
    with exact_memory(slots_too=True):
        kept, expected, _ = train(tmp_path, rows, default="keep")
        budget = max(kept) - FROZEN // 2
        peaks, found, read = train(
            tmp_path, rows, default="keep", weights={"frozen": "auto"}, budget={"device_bytes": budget}
        )
    assert all(map(same_bits, found, expected))
    assert read[5] < 0.5 * read[11]
    assert max(peaks[7:]) <= budget  # the first large step shows how much it needs


def test_without_a_limit_it_is_refused() -> None:
    with pytest.raises(tba.ConfigError, match=r"'frozen: auto' needs a limit. Set budget\.device_bytes"):
        tba.OffloadConfig.from_dict({"default": "offload", "weights": {"frozen": "auto"}})
    assert (
        tba.OffloadConfig.from_dict({"default": "auto", "weights": {"frozen": "auto"}}).frozen_percent == 100
    )
