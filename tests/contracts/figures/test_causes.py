"""``why`` names the true cause, where what memory is for is known because the test has made it so."""

from __future__ import annotations

import json
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from faults import inject
from harness import MIB
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tba_offload as tba
from tba_offload.report.why import Diagnosis, why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WIDTH, TOKENS, LAYERS = 128, 1024, 6
LAYER_BYTES = 5 * MIB
"""What a layer of :class:`Model` saves."""


class Block(nn.Module):
    """Saves ten times its input: the input twice, and the wide part."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, width: int = WIDTH, vocabulary: int = 8, wide: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, each) for each in wide or LAYERS * (4 * width,))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Rotated(Block):
    """Makes a table once, and keeps it where it is no buffer; saves it if its input needs a gradient."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__(width, wide)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.rand(8 * x.shape[0], x.shape[1])
        return super().forward(x) + x * self.table[: x.shape[0]]


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int = TOKENS) -> Iterator[Tensor]:
    width = next(model.parameters()).shape[-1]
    for number in range(5):
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(number))
        yield model(x).logsumexp(-1).mean()
        optimizer.step()
        optimizer.zero_grad()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for loss in losses(model, optimizer):
        loss.backward()


def few_tokens(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for loss in losses(model, optimizer, tokens=16):
        loss.backward()


def keeping_graphs(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kept = []
    for loss in losses(model, optimizer):
        kept.append(loss)
        loss.backward(retain_graph=True)


@pytest.fixture(autouse=True)
def every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the meter would see few moments of so small a step."""
    monkeypatch.setattr("tba_offload.device.memory.REST", 0)


def trained(
    tmp_path: Path,
    model: nn.Module,
    *,
    loop: Callable[[nn.Module, torch.optim.Optimizer], object] = plain,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    directory: str | None = None,
    layers: list[nn.Module] | None = None,
    **policy: Any,
) -> Diagnosis:
    """Trains a model some steps; both by the log and by the session it is explained alike."""
    settings: dict[str, Any] = {
        "default": "offload",
        "budget": {"in_flight_bytes": "2MiB"},
        "store": {"kind": "file"},
    }
    log = tmp_path / "run.jsonl"
    with tba.attach(
        model, settings | policy, run_log=log, directories=directory or str(tmp_path), layers=layers
    ) as session:
        loop(model, optimizer(model.parameters(), lr=1e-3))
        told = session.why()
    found = why(log)
    assert told.as_json() == found.as_json()
    assert str(told) == str(found)
    return found


def test_gradients_that_are_born_inside(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(width=384), loop=few_tokens)
    assert found.cause == "gradients"
    assert "allocated in backward" in found.findings[0].what
    nbytes = sum(parameter.nbytes for parameter in Model(width=384).parameters())
    # Each was a temporary before it was in place, and slots for sub-groups of 1 MiB would come on top.
    assert 0.7 * nbytes < found.findings[0].saves < nbytes - 3 * MIB


def test_logits(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(vocabulary=10_000))
    assert found.cause == "logits and loss"
    assert found.evidence.peak.name == "loss"
    # Logits for sure; their gradient too, unless a busy machine took no sample in the moment of both.
    assert found.evidence.peak.of("running") > TOKENS * 10_000 * 4


def test_states_of_the_optimizer(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(width=384), loop=few_tokens, optimizer=torch.optim.AdamW)
    assert found.cause == "optimizer states"
    nbytes = 2 * sum(parameter.nbytes for parameter in Model(width=384).parameters())
    assert abs(found.evidence.peak.of("states") - nbytes) < nbytes / 100


def test_states_of_an_optimizer_that_updates_between_steps(tmp_path: Path) -> None:
    model = Model(width=384)
    optimizer = torch.optim.AdamW(model.parameters())
    with tba.attach(model, {"default": "offload"}, directories=str(tmp_path)) as session:
        for _ in range(5):
            with session.step():
                model(torch.ones(16, 384)).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = session.why()
    assert found.cause == "optimizer states"
    nbytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert abs(found.evidence.peak.of("states") - nbytes) < nbytes / 100


def test_states_that_travel_are_not_to_be_offloaded_again(tmp_path: Path) -> None:
    """The session says so as well as the log; three sub-groups stay, whatever their size."""
    model, log = Model(width=384), tmp_path / "run.jsonl"
    optimizer = torch.optim.AdamW(model.parameters())
    policy = {"default": "offload", "states": {"sub_group_bytes": "64MiB"}}
    with tba.attach(model, policy, optimizer=optimizer, run_log=log, directories=str(tmp_path)) as session:
        few_tokens(model, optimizer)
        told = session.why()
    assert told.as_json() == why(log).as_json()
    found = next(each for each in told.findings if each.cause == "optimizer states")
    assert "are offloaded" in found.what
    assert "states.sub_group_bytes: 2MiB" in found.change


class Copies(torch.optim.SGD):
    """Works with a copy of each parameter, for long enough to be seen."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        copies = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]
        time.sleep(0.03)
        assert copies
        return super().step(closure)


def test_an_optimizer_that_works_with_copies(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(width=384), loop=few_tokens, optimizer=Copies)
    nbytes = sum(parameter.nbytes for parameter in Model(width=384).parameters())
    update = next(phase for phase in found.evidence.phases if phase.name == "update")
    assert update is found.evidence.peak
    assert abs(update.of("running") - nbytes) < nbytes / 10
    assert abs(update.of("gradients") - nbytes) < nbytes / 10
    assert "working memory of the optimizer" in {each.cause for each in found.findings}


def test_outputs_that_live_on_in_the_update(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            output = model(torch.randn(TOKENS, WIDTH))
            output.logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del output  # what a step begins with is not of the step

    found = trained(tmp_path, Model(vocabulary=10_000), loop=loop)
    update = next(phase for phase in found.evidence.phases if phase.name == "update")
    assert abs(update.of("put_out") - TOKENS * 10_000 * 4) < 2 * MIB


def test_outputs_that_the_program_holds_while_the_next_step_runs(tmp_path: Path) -> None:
    class WithLoss(Model):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            logits = super().forward(x)
            return {"loss": logits.logsumexp(-1).mean(), "logits": logits}

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            outputs = model(torch.randn(TOKENS, WIDTH))  # those of the step before live until it returns
            outputs["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    found = trained(tmp_path, WithLoss(vocabulary=10_000), loop=loop)
    nbytes = TOKENS * 10_000 * 4
    assert found.evidence.step.earlier_outputs_bytes == nbytes + 4
    forward = next(phase for phase in found.evidence.phases if phase.name == "forward")
    assert forward.of("put_out") == nbytes + 4
    told = next(each for each in found.findings if each.cause == "outputs")
    assert "the program holds 39.1 MiB that the model put out" in told.what


def test_a_cache_that_no_layer_saves(tmp_path: Path) -> None:
    model = Model()
    model.layers[2].memo = {"keys": torch.zeros(16, MIB)}  # type: ignore[assignment]
    found = trained(tmp_path, model)
    assert found.cause == "held by modules"
    assert "layers.2.memo (64.0 MiB)" in found.findings[0].what


def test_embeddings_that_the_head_shares(tmp_path: Path) -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__(vocabulary=20_000)
            self.words = nn.Embedding(20_000, WIDTH)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.words(x.abs().mul(9_999).long().clamp(max=19_999)[:, 0]))

    found = trained(tmp_path, Tied(), loop=few_tokens)
    assert found.cause == "embeddings"
    assert found.evidence.peak.name == "embeddings"
    nbytes = 20_000 * WIDTH * 4
    assert found.evidence.peak.of("running", "beside") > 1.9 * nbytes  # two gradients at once
    layers = next(phase for phase in found.evidence.phases if phase.name == "backward")
    assert layers.nbytes < found.evidence.peak.nbytes - nbytes / 2


def test_layers_that_are_not_attached(tmp_path: Path) -> None:
    model = Model()
    found = trained(tmp_path, model, layers=list(model.layers)[:2])
    assert found.cause == "layers not attached"
    assert f"{LAYERS - 2} modules of the same class" in found.findings[0].what


class Narrower(Block):
    """Of another class than the layers."""


class TwoStreams(Model):
    """Blocks of two classes in two lists, as some diffusion transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.singles = nn.ModuleList(Narrower(WIDTH, 3 * WIDTH) for _ in range(2 * LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.singles:
            x = block(x)
        return super().forward(x)


@pytest.mark.parametrize("trains", [True, False])
def test_blocks_of_another_class_are_told_where_they_train(*, trains: bool, tmp_path: Path) -> None:
    model = TwoStreams()
    model.layers = nn.ModuleList(Block(WIDTH, 8 * WIDTH) for _ in range(LAYERS))
    model.singles.requires_grad_(trains)
    found = trained(tmp_path, model)
    told = [each.what for each in found.findings if each.cause == "layers not attached"]
    assert [f"singles ({2 * LAYERS} of Narrower) are not among the layers" in what for what in told] == (
        [True] * trains
    )


@pytest.mark.filterwarnings("ignore:gradient checkpointing is switched on")
def test_checkpointing_within_layers(tmp_path: Path) -> None:
    class Inside(Block):
        gradient_checkpointing = True

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Model()
    model.layers = nn.ModuleList(Inside(WIDTH, 16 * WIDTH) for _ in range(LAYERS))
    assert trained(tmp_path, model).cause == "framework checkpointing"


def test_a_table_that_modules_hold(tmp_path: Path) -> None:
    model = Model()
    model.layers = nn.ModuleList(Rotated(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
    found = trained(tmp_path, model)
    assert (
        found.cause == "held elsewhere"
    )  # the first layer is given what needs no gradient, and saves no table
    assert "layers.1.table (4.00 MiB)" in found.findings[0].what
    assert found.evidence.peak.of("tables") == (LAYERS - 1) * 8 * TOKENS * WIDTH * 4


@pytest.mark.filterwarnings("ignore:layer 0 .* runs inside saved-tensor hooks")
def test_checkpointing_of_the_framework(tmp_path: Path) -> None:
    found = trained(tmp_path, Checkpointed())
    assert found.cause == "framework checkpointing"
    assert found.findings[0].blocks


@pytest.mark.filterwarnings("ignore:.*lies in host memory")
def test_a_file_system_in_memory(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        found = trained(tmp_path, Model(), directory=directory)
    assert found.cause == "memory file system"
    assert found.evidence.peak.of("store") > (LAYERS - 1) * LAYER_BYTES


@pytest.mark.filterwarnings("ignore:the store is full", "ignore:.*left alone")
def test_a_full_drive(tmp_path: Path) -> None:
    with inject("fail-write:errno=ENOSPC,after=5"):
        found = trained(tmp_path, Model())
    assert found.cause == "full drive"
    assert found.findings[0].blocks
    assert "1 of the drives took no more" in found.findings[0].what


@pytest.mark.filterwarnings("ignore:the store is full")
def test_a_store_at_its_capacity(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(), store={"kind": "file", "capacity": "2MiB"})
    assert found.cause == "store did not take all"
    assert found.findings[0].blocks
    assert found.findings[0].saves > LAYERS * LAYER_BYTES / 2


def test_one_huge_layer(tmp_path: Path) -> None:
    model = Model(wide=(128, 128, 4096, 128, 128, 128))
    found = trained(tmp_path, model, layers=list(model.layers))
    assert found.cause == "one huge layer"
    assert "layer 2 (layers.2) alone takes" in found.findings[0].what


SMALL, KEPT, HUGE = (0.1, 1.1, 1.6), (5.0, 5.0, 2.1), (0.1, 3.0, 5.0)
"""What layers leave in memory, and take forward and backward, in MiB."""


@pytest.mark.parametrize(
    ("layers", "named"),
    [([SMALL] * 5 + [HUGE], True), ([SMALL] * 5 + [KEPT], False), ([KEPT] * 5 + [HUGE], False)],
)
def test_a_layer_is_not_huge_for_what_it_keeps_nor_for_what_others_keep(
    layers: list[tuple[float, ...]], tmp_path: Path, *, named: bool
) -> None:
    trained(tmp_path, Model())
    log = tmp_path / "run.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["event"] == "memory":
            event["layers"] = [[int(size * MIB) for size in layer] for layer in layers]
            for phase in ("forward", "backward"):  # the last one is where there is most
                event["phases"][phase]["layer"] = LAYERS - 1
    log.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert ("one huge layer" in {each.cause for each in why(log).findings}) is named


def test_graphs_that_the_program_keeps(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(), loop=keeping_graphs, default="keep")
    assert found.cause == "graphs of earlier steps"
    assert found.findings[0].saves > 2 * (LAYERS - 1) * LAYER_BYTES


def test_a_window_that_is_too_wide(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(), budget={"in_flight_bytes": "1GiB"})
    assert found.cause == "window"
    assert found.findings[0].blocks
    assert "budget.in_flight_bytes: 1.00 GiB" in found.findings[0].what
    assert found.evidence.peak.of("in_flight") > (LAYERS - 1) * LAYER_BYTES


# And some more


def test_layers_that_keep(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(), default="keep")
    assert found.cause == "layers that keep"
    assert abs(found.evidence.peak.of("kept") - LAYERS * LAYER_BYTES) < LAYERS * LAYER_BYTES / 20


@pytest.mark.full
def test_inputs_of_layers_that_are_recomputed(tmp_path: Path) -> None:
    model = Model(wide=24 * (WIDTH,))
    found = trained(tmp_path, model, default="recompute")
    assert found.cause == "inputs of recomputed layers"
    assert abs(found.evidence.peak.of("inputs") - 12 * MIB) < 2 * MIB


@pytest.mark.full
def test_tensors_that_are_too_small_to_travel(tmp_path: Path) -> None:
    found = trained(tmp_path, Model(), min_tensor_bytes="64MiB")
    assert found.cause == "small tensors"


def test_a_run_as_it_should_be_has_its_working_set_left(tmp_path: Path) -> None:
    found = trained(tmp_path, Model())
    assert found.cause == "working set of a layer"
    assert found.evidence.peak.of("in_flight", "read_ahead") <= 2 * MIB
