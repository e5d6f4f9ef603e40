"""Frozen weights are in memory only while their layer computes, and nothing that is trained changes a bit."""

from __future__ import annotations

import copy
import pickle
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import of_which
from faults import inject
from harness import PLACEMENTS
from models import assert_same_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    """A frozen linear layer and what is trained beside it, as LoRA does."""

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
    """Losses, and what the model has in the end; two micro-batches a step, and an evaluation between."""
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


def policy(directory: Path, **settings: Any) -> dict[str, Any]:
    store = {"kind": "file", "directories": [str(directory)]}
    made = {"default": "keep", "min_tensor_bytes": "2KiB", "weights": {"frozen": "offload"}, "store": store}
    return made | settings


@contextmanager
def offloaded(model: Model, directory: Path, **settings: Any) -> Iterator[tba.FrozenWeights]:
    with tba.attach(model, policy(directory, **settings), measure_memory=False) as session:
        assert session.weights is not None
        yield session.weights


def is_away(weight: Tensor) -> bool:
    """Whether code in C++ that asks no class finds the placeholder."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(weight.isnan().all())


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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_model_of_transformers_with_lora(tmp_path: Path) -> None:
    import peft
    import transformers

    def made() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 100}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], lora_dropout=0.1)
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)

    def run(model: Any) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        losses = []
        for _ in range(2):
            ids = torch.randint(0, 100, (2, 16))
            losses.append(model(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        words = torch.ones(1, 4, dtype=torch.long)
        losses.append(model.generate(input_ids=words, max_new_tokens=4, do_sample=False))
        return [*losses, *(p.detach().clone() for p in model.parameters() if p.requires_grad)]

    expected, model = run(made()), made()
    with offloaded(model, tmp_path, min_tensor_bytes="1KiB") as weights:
        assert weights.nbytes == 3 * 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
        assert_same_tensors(run(model), expected)


def test_a_backward_pass_that_fails_leaves_no_weights(tmp_path: Path) -> None:
    def fail(gradient: Tensor) -> None:
        raise InterruptedError

    model, plain = Model(), Model()
    with offloaded(model, tmp_path) as weights:
        handles = [model.layers[2].one.up.weight.register_hook(fail)]
        with pytest.raises(InterruptedError):
            model(torch.ones(8, WIDTH)).sum().backward()
        handles.pop().remove()
        model.zero_grad()
        assert_same_tensors(trained(model, steps=1), trained(plain, steps=1))
        assert weights.resident_bytes == 0


# Outside of their layers


def test_who_reads_a_weight_that_is_away_gets_its_values_and_who_writes_it_changes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, expected = Model(), Model()
    with offloaded(model, tmp_path) as weights:
        weight, plain = (each.layers[0].one.base.weight for each in (model, expected))
        assert isinstance(weight, nn.Parameter)
        assert type(weight).__name__ == "Parameter"
        assert (weight.shape, weight.dtype, len(weight)) == ((WIDTH, WIDTH), torch.float32, WIDTH)
        assert not caplog.records
        assert (weight.stride(), weight.is_contiguous()) == ((WIDTH, 1), True)
        assert_same_tensors(
            [weight.sum(), weight.view(-1), weight[3]], [plain.sum(), plain.view(-1), plain[3]]
        )
        weight.norm()
        assert weights.resident_bytes == 0
        [told] = [each.getMessage() for each in caplog.records]
        assert "the frozen weight layers.0.one.base.weight was used outside of its layer" in told
        for each in (weight, plain):
            each.data += 1
            alias = each.data
            alias[0] = 7
            del alias
            with torch.no_grad():
                each.mul_(2)
        assert_same_tensors(trained(model, steps=1), trained(expected, steps=1))
        assert weights.resident_bytes == 0
    assert_same_tensors(model.parameters(), expected.parameters())


def test_an_alias_keeps_its_memory_and_what_is_written_by_it_arrives(tmp_path: Path) -> None:
    model, expected = Model(), Model()
    with offloaded(model, tmp_path) as weights:
        pairs = ((each.layers[1].one.base, each.layers[2].two.base) for each in (model, expected))
        held = [(one.weight.data, two.weight) for one, two in pairs]
        scale = torch.ones((), requires_grad=True)
        penalties = [(weight * scale).pow(2).sum() for _, weight in held]
        for each, (alias, _) in zip((model, expected), held, strict=True):
            trained(each, steps=1)
            alias.add_(1)
            trained(each, steps=1)
        gradients = [torch.autograd.grad(each, scale)[0] for each in penalties]
        assert_same_tensors(gradients[:1], gradients[1:])
        assert_same_tensors(*([each[0]] for each in held))
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
            assert weights.resident_bytes == WEIGHTS // 2
            del alias, each
            held.clear()
            model(torch.ones(1, WIDTH))
        assert weights.resident_bytes == 0
    assert_same_tensors(model.parameters(), expected.parameters())


def test_a_checkpoint_has_the_weights_and_can_be_loaded(tmp_path: Path) -> None:
    model, other = Model(), Model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    with offloaded(model, tmp_path):
        saved = model.state_dict()
        assert set(saved) == set(Model().state_dict())
        assert_same_tensors(saved.values(), Model().state_dict().values())
        model.load_state_dict(other.state_dict())
        assert_same_tensors(model.state_dict().values(), other.state_dict().values())
    assert_same_tensors(model.parameters(), other.parameters())


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "cannot be trained": lambda layer: layer.requires_grad_(),
    "was set to torch.float64 of": lambda layer: layer.double(),
    "was set to torch.float32 of (1,)": lambda layer: setattr(layer.one.base.weight, "data", torch.zeros(1)),
    "cannot be copied": lambda layer: copy.deepcopy(layer.one.base.weight),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_change_that_a_weight_in_the_store_cannot_follow_is_named(said: str, tmp_path: Path) -> None:
    model = Model()
    with offloaded(model, tmp_path):
        with pytest.raises(SessionError, match=rf"layers\.1\.one\.base\.weight .*{re.escape(said)}"):
            CHANGES[said](model.layers[1])
        model(torch.ones(1, WIDTH))
    assert_same_tensors(frozen(model), frozen(Model()))


def test_new_data_of_the_same_kind_are_the_weight(tmp_path: Path) -> None:
    model, expected = Model(), Model()
    with offloaded(model, tmp_path):
        for each in (model, expected):
            each.layers[1].one.base.weight.data = torch.ones(WIDTH, WIDTH)
        assert_same_tensors(trained(model), trained(expected))
    assert_same_tensors(model.parameters(), expected.parameters())


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_model_is_refused(way: Callable[[object], object], tmp_path: Path) -> None:
    model = Model()
    with offloaded(model, tmp_path), pytest.raises(SessionError, match="Close the session first"):
        way(model)
    way(model)


def test_what_others_use_too_stays_in_memory(tmp_path: Path) -> None:
    model = Model()
    model.layers[1].one.base.weight = model.layers[0].one.base.weight
    model.head.weight = nn.Parameter(model.layers[2].two.base.weight.detach()[:1], requires_grad=False)
    model.layers[3].one.base.weight.requires_grad_()
    with offloaded(model, tmp_path) as weights:
        assert weights.nbytes == (LAYERS * 2 - 4) * WIDTH * WIDTH * 4
        assert not any(is_away(model.layers[number].one.base.weight) for number in (0, 1, 3))


# Drives


def test_weights_that_a_drive_does_not_give_back_are_named(tmp_path: Path) -> None:
    model = Model()
    with offloaded(model, tmp_path):
        with (
            inject("flip-read"),
            pytest.raises(TransferError, match=r"frozen weights of .*one\.base\.weight"),
        ):
            model(torch.ones(1, WIDTH))
        assert not model(torch.ones(1, WIDTH)).isnan().any()


def test_a_drive_that_is_full(tmp_path: Path) -> None:
    store = {"kind": "file", "directories": [str(tmp_path)], "capacity": "32KiB"}
    model = Model()
    with pytest.raises(TransferError, match=r"frozen weights of .* cannot be written.* Free some space"):
        tba.attach(model, policy(tmp_path, store=store))
    assert_same_tensors(model.parameters(), Model().parameters())


# What cannot travel is named


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
