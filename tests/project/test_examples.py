"""The examples and the README say nothing that does not work."""

from __future__ import annotations

import dataclasses
import gc
import re
import subprocess
import tomllib
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from documents import HOME, README, ROOT, code_blocks, commands_in, known_options
from models import loss_of, make_model, make_tokens, same_bits
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.config import OffloadConfig, StoreConfig, load_config
from tba_offload.layers.stack import LayerStack, find_layers
from tba_offload.session import Session

if TYPE_CHECKING:
    from pathlib import Path

TEXT = README.read_text(encoding="utf-8")
POLICIES = sorted((ROOT / "examples" / "policies").glob("*.yaml"))
SCRIPTS = sorted([*(ROOT / "examples").rglob("*.sh"), *(ROOT / "tests").rglob("*.sh")])
WIDTH = 64

every_policy = pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)


# A model that the example policies speak of


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


class DecoderOnly(nn.Module):
    """Its 24 layers are called as those of Megatron's GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Stack(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)

    def stack(self) -> LayerStack:
        return find_layers(self)


class EncoderDecoder(nn.Module):
    """Two stacks of 12 layers, which count on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(12), Stack(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def stack(self) -> LayerStack:
        return find_layers(self)


def model_for(path: Path) -> DecoderOnly | EncoderDecoder:
    torch.manual_seed(1)
    return EncoderDecoder() if path.stem == "encoder_decoder" else DecoderOnly()


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
    assert x.grad is not None
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), x.grad, *(gradient for gradient in gradients if gradient is not None)]


# Policies


@every_policy
def test_a_policy_takes_effect_and_changes_no_bit(path: Path, tmp_path: Path) -> None:
    config = local(load_config(path), tmp_path)
    size = config.min_tensor_bytes  # smaller activations stay in memory
    expected = forward_and_backward(model_for(path), size)
    model = model_for(path)
    with Session(model.stack(), [model], config, measure_memory=False) as session:
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


def test_policies_of_every_placement_are_among_the_examples() -> None:
    used = {load_config(path).default for path in POLICIES}
    used |= {rule.placement for path in POLICIES for rule in load_config(path).layers}
    assert used == {*tba.Placement, tba.Placement("offload-50%")}


@every_policy
def test_a_policy_explains_itself(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


# Scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_is_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_script_is_overlooked() -> None:
    assert {"quickstart.sh", "setup.sh", "run.sh"} <= {script.name for script in SCRIPTS}


@pytest.mark.parametrize(
    "script", ["examples/quickstart.sh", "tests/run.sh", "tests/run_megatron_training.sh"]
)
def test_scripts_ask_for_extras_that_exist(script: str) -> None:
    (extras,) = re.findall(r"^setup_venv (\S+)", (ROOT / script).read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= known_extras()


def test_the_quickstart_names_only_what_the_program_has() -> None:
    text = (ROOT / "examples" / "quickstart.sh").read_text()
    commands = re.findall(r"tba-offload (.*)", text)
    named = {command.split()[0].strip("`,.") for command in commands}
    assert named == {"demo"}
    options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) - {"-euo"}
    assert "--output" in options
    assert options <= known_options("demo")


# README


def known_extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def test_every_yaml_in_the_readme_is_a_policy_that_takes_effect() -> None:
    blocks = code_blocks(TEXT, "yaml")
    assert blocks
    for text in blocks:
        config = OffloadConfig.from_yaml(text, file="README.md")
        layers = [layer.id for layer in DecoderOnly().stack().layers]
        placements = config.policy.resolve(layers)
        assert {rule.placement for rule in config.layers} <= set(placements.values())
        assert OffloadConfig.from_yaml(config.to_yaml()) == config


def test_the_readme_names_the_commands_of_the_first_five_minutes() -> None:
    assert {words[0] for words in commands_in(TEXT)} >= {
        "demo",
        "check",
        "doctor",
        "plan",
        "rok",
        "launch",
        "patch",
    }
    assert len(TEXT.splitlines()) <= 150


def test_the_python_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [compile(text, "README.md", "exec") for text in code_blocks(TEXT, "python")]
    assert len(blocks) == 1
    config = OffloadConfig(store=StoreConfig(kind="host"), min_tensor_bytes=1024)
    (tmp_path / "policy.yaml").write_text(config.to_yaml())
    monkeypatch.chdir(tmp_path)

    class Trained(nn.Module):
        """Takes a mapping and returns an output with its loss, as the models of Hugging Face do."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model(layers=2)

        def forward(self, input_ids: Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=loss_of(self.inner, input_ids))

    model = Trained()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    printed: list[tuple[object, ...]] = []
    data = [{"input_ids": make_tokens(seed)} for seed in (1, 2)]
    names = {"model": model, "optimizer": optimizer, "data": data}
    gc.collect()  # what other tests left is not freed in a step: more than these activations take
    exec(blocks[0], {**names, "print": lambda *values: printed.append(values)})
    assert len(printed) == 2
    assert all(peak > 0 and stall >= 0 for peak, stall in printed)  # type: ignore[operator]
    assert not all(
        same_bits(one, parameter.detach()) for one, parameter in zip(before, model.parameters(), strict=True)
    )


def test_links_of_the_readme_work_where_there_is_no_checkout() -> None:
    """As on the page of the package index."""
    assert re.findall(r"\]\((?!https?:|#)([^)]+)\)", TEXT) == []
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert urls["Homepage"] == HOME
    assert f"git clone {HOME} " in TEXT


def test_what_the_readme_points_at_exists() -> None:
    raw = HOME.replace("github.com", "raw.githubusercontent.com")
    linked = re.findall(rf"\]\((?:{HOME}/(?:tree|blob)|{raw})/main/([^)#]+)\)", TEXT)
    scripts = re.findall(r"^bash (\S+)", "\n".join(code_blocks(TEXT, "bash")), re.MULTILINE)
    assert linked
    assert scripts
    for path in (*linked, *scripts):
        assert (ROOT / path).exists(), path


def test_a_source_archive_can_be_tested_and_tried() -> None:
    grafted = re.findall(r"^graft (\S+)$", (ROOT / "MANIFEST.in").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(grafted) == {".ci", ".github", "benchmarks", "docs", "examples", "patches", "tests"}
    assert all((ROOT / name).is_dir() for name in grafted)


def test_extras_in_the_readme_exist() -> None:
    (line,) = re.findall(r"^pip install tba-offload +# add (.*)$", TEXT, re.MULTILINE)
    assert set(re.findall(r"\[([\w-]+)\]", line)) <= known_extras()
