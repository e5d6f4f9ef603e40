"""The example policies take effect and change no bit; the scripts are bash and ask for extras that exist."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest
import torch
from models import same_bits
from places import EXAMPLES, ROOT, TESTS
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.config import OffloadConfig, load_config

if TYPE_CHECKING:
    from pathlib import Path

POLICIES = sorted((EXAMPLES / "policies").glob("*.yaml"))
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *TESTS.rglob("*.sh"), ROOT / ".ci" / "run"])
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """24 layers as Megatron's GPT has them, or two stacks of 12 that count on their own."""

    def __init__(self, *, has_encoder: bool) -> None:
        super().__init__()
        if has_encoder:
            self.encoder = Stack(12)
        self.decoder = Stack(12 if has_encoder else 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x) if hasattr(self, "encoder") else x)


def model_for(path: Path) -> Model:
    torch.manual_seed(1)
    return Model(has_encoder=path.stem == "encoder_decoder")


def local(config: OffloadConfig, directory: Path) -> OffloadConfig:
    """The same with its drives here."""
    drives = [directory / str(number) for number in range(len(config.store.directories))]
    for drive in drives:
        drive.mkdir()
    return dataclasses.replace(config, store=dataclasses.replace(config.store, directories=tuple(drives)))


def forward_and_backward(model: nn.Module, size: int) -> list[Tensor]:
    """Loss and gradients with activations of ``size`` bytes."""
    x = torch.randn(size // 4 // WIDTH, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in (x, *model.parameters())]
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_policy_takes_effect_and_changes_no_bit(path: Path, tmp_path: Path) -> None:
    config = local(load_config(path), tmp_path)
    size = config.min_tensor_bytes  # smaller activations stay in memory
    expected = forward_and_backward(model_for(path), size)
    model = model_for(path)
    with tba.attach(model, config) as session:
        placements = [placement.value for placement in session.plan.placements]
        for rule in config.layers:
            assert rule.placement.value in placements
        with session.step() as step:
            found = forward_and_backward(model, size)
    assert len(found) == len(expected) == 2 + 2 * 24
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))

    record = step.record
    assert record is not None
    assert record.scopes == 24
    inputs = placements.count("recompute-offload") + placements.count("recompute-except-attention")
    assert record.recomputed_scopes == placements.count("recompute") + inputs
    # What a layer saves: its input and what tanh returned, one activation each.
    # Half of one activation is rounded to all of it.
    words = ("offload", "offload-50%", "offload-remat", "auto")
    travelling = sum(placements.count(word) for word in words)
    assert (travelling + inputs) * size <= record.offloaded_bytes + record.forwarded_bytes
    assert record.offloaded_bytes <= (2 * travelling + inputs) * size
    assert record.fallback_kept_bytes == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_is_bash_and_asks_for_extras_that_exist(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = re.findall(r"^setup_venv ([\w,]+)", script.read_text(), re.MULTILINE)
    for extras in asked:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
