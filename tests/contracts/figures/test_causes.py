"""``why`` names the true cause, and its advice lowers the measured peak."""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from exact_memory import exact_memory
from faults import inject
from harness import MIB, made
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
    def __init__(
        self, width: int = WIDTH, vocabulary: int = 8, layers: int = LAYERS, chunks: int = 1
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        if self.chunks == 1:
            return self.head(x).logsumexp(-1).mean()
        parts = [checkpoint(lambda part: self.head(part).logsumexp(-1).sum(), part, use_reentrant=False)
                 for part in x.chunk(self.chunks)]  # fmt: skip
        return torch.stack(parts).sum() / len(x)


class Noting(Block):
    """Returns notes beside its output, as attention weights are."""

    def forward(self, x: Tensor) -> Any:
        wide = self.up(self.norm(x))
        probabilities = wide.softmax(-1)
        return x + self.down(probabilities), {"scores": wide, "probabilities": probabilities}


class Collecting(Model):
    def __init__(self, *, collects: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noting(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.collects = collects

    def forward(self, x: Tensor) -> Any:
        collected = []
        for layer in self.layers:
            x, notes = layer(x)
            collected += [x, notes] if self.collects else []
            del notes
        return self.loss(x)


class Extra(Model):
    def forward(self, x: Tensor) -> Any:
        return {"loss": super().forward(x), "hidden": torch.zeros(16, MIB)}


class Towers(nn.Module):
    """Two stacks; the gradient of the second one's table is made between their backward passes."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.images, self.texts = Model(), Model(layers=2)
        self.images.loss = self.texts.loss = nn.Identity()  # type: ignore[assignment, method-assign]
        self.table = nn.Embedding(100_000, WIDTH, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        images = self.images(x)
        return (images * self.texts(self.table(torch.arange(len(x))))).mean()


def frozen() -> Model:
    model = Model(width=512, layers=12)
    model.layers.requires_grad_(requires_grad=False)
    return model


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    tokens: int = TOKENS,
    micro_batches: int = 1,
    holds: bool = False,
) -> None:
    width, outputs = next(model.parameters()).shape[-1], None
    for number in range(3):
        for _ in range(micro_batches):
            x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(number))
            outputs = model(x.requires_grad_())
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            outputs = outputs if holds else None
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def every_byte() -> Iterator[None]:
    """On a busy machine samples would miss most moments of so small a step."""
    with exact_memory(slots_too=True):
        yield


def trained(
    tmp_path: Path,
    model: Callable[[], nn.Module] = Model,
    *,
    train: Callable[[nn.Module, torch.optim.Optimizer], object] = loop,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    directory: str | None = None,
    layers: int | None = None,
    **policy: Any,
) -> Diagnosis:
    settings = {
        "default": "offload",
        "budget": {"in_flight_bytes": "2MiB"},
        "store": {"kind": "file"},
    } | policy
    log, module = tmp_path / "run.jsonl", model()
    updater = optimizer(module.parameters(), lr=1e-3)
    some = None if layers is None else list(module.layers)[:layers]  # type: ignore[arg-type]
    where: Any = {"run_log": log, "directories": directory or str(tmp_path), "layers": some}
    where |= {"optimizer": updater} if "states" in policy else {}
    with warnings.catch_warnings(), tba.attach(module, settings, **where) as session:
        warnings.simplefilter("ignore")
        train(module, updater)
        told = session.why()
        records = session.records
    found = why(log)
    assert (told.as_json(), str(told)) == (found.as_json(), str(found))
    assert found.log.steps[-1].held_bytes == records[-1].held_bytes
    return found


few_tokens, many_tokens = partial(loop, tokens=16), partial(loop, tokens=4096)
wide, deep = partial(Model, width=384), partial(Model, width=32, layers=24)
ADAMW: dict[str, Any] = {"model": wide, "train": few_tokens, "optimizer": torch.optim.AdamW}
AWAY = {"sub_group_bytes": "1MiB"}

SITUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "held elsewhere: collected": (
        {"model": partial(Collecting, collects=True)},
        {"model": partial(Collecting, collects=False)},
    ),
    "outputs": ({"model": Extra, "train": partial(loop, holds=True)}, {"model": Extra}),
    "placements": ({"default": "keep"}, {}),
    "placements: recompute": (
        {"model": deep, "default": "recompute", "train": many_tokens},
        {"model": deep, "default": "recompute-offload", "train": many_tokens},
    ),
    "window": ({"budget": {"in_flight_bytes": "1GiB"}}, {"budget": {"in_flight_bytes": "3MiB"}}),
    "store": ({"store": {"kind": "file", "capacity": "2MiB"}}, {}),
    "small tensors": ({"min_tensor_bytes": "64MiB"}, {}),
    "logits and loss": (
        {"model": partial(Model, vocabulary=10_000)},
        {"model": partial(Model, vocabulary=10_000, chunks=8)},
    ),
    "outside the layers": ({"layers": 2}, {}),
    "one large gradient": (
        {"model": partial(Towers, sparse=False), "train": few_tokens},
        {"model": partial(Towers, sparse=True), "train": few_tokens},
    ),
    "gradients": (ADAMW | {"states": AWAY}, ADAMW | {"states": AWAY | {"when": "backward"}}),
    "optimizer states": (ADAMW, ADAMW | {"states": AWAY}),
    "frozen weights": (
        {"model": frozen, "train": few_tokens},
        {"model": frozen, "train": few_tokens, "weights": {"frozen": "offload"}},
    ),
    "one layer": (
        {"train": partial(loop, tokens=4096)},
        {"train": partial(loop, tokens=2048, micro_batches=2)},
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_cause_is_named_and_its_advice_lowers_the_peak(situation: str, tmp_path: Path) -> None:
    before, after = SITUATIONS[situation]
    found = trained(made(tmp_path / "before"), **before)
    assert found.cause == situation.partition(":")[0], str(found)
    first, peak = found.findings[0], found.peak.nbytes
    assert 0 < first.nbytes <= peak
    then = trained(made(tmp_path / "after"), **after).peak.nbytes
    assert 0.6 * first.saves < peak - then < 1.5 * first.saves, (str(found), then / MIB)


def test_a_file_system_in_memory(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        found = trained(tmp_path, directory=directory)
    assert found.cause == "store"
    assert found.peak.of("store") > (LAYERS - 1) * LAYER_BYTES


def test_a_full_drive(tmp_path: Path) -> None:
    with inject("fail-write:errno=ENOSPC,after=5"):
        found = trained(tmp_path)
    assert found.cause == "store"
    assert "the store is full or too slow" in found.findings[0].what


def test_a_run_as_it_should_be_has_its_working_set_left(tmp_path: Path) -> None:
    found = trained(tmp_path)
    assert found.cause == "one layer"
    assert found.peak.of("in_flight") <= 2 * MIB
