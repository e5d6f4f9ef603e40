"""Run the Python and check the YAML of every page, and build the site."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from models import loss_of, make_model, make_tokens
from places import ROOT
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.config import OffloadConfig, StoreConfig
from tba_offload.report.log import RunHeader, RunLogWriter
from tba_offload.store import unregister_kind

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def pages_with(language: str) -> pytest.MarkDecorator:
    found = [page for page in PAGES if blocks_of(page, language)]
    assert found
    return pytest.mark.parametrize("page", found, ids=lambda path: str(path.relative_to(ROOT)))


class Trained(nn.Module):
    """A model that returns an output with a loss, like models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(layers=2)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=loss_of(self.inner, input_ids))


@pages_with("python")
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all blocks in order; they may use ``model``, ``data``, ``optimizer`` and ``tba``."""
    config = OffloadConfig(store=StoreConfig(kind="host"), min_tensor_bytes=1024)
    (tmp_path / "policy.yaml").write_text(config.to_yaml())
    blocks = blocks_of(page, "python")
    if not any('run_log="run.jsonl"' in block for block in blocks):  # a page that reads one
        with RunLogWriter(tmp_path / "run.jsonl", RunHeader(strategy="offload")):
            pass
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if "class MemoryFileStore" in blocks[0]:  # a module, which the other blocks import
        (tmp_path / "memory_file_store.py").write_text(blocks.pop(0))
    model = Trained()
    names: dict[str, object] = {
        "__name__": "page",
        "tba": tba,
        "model": model,
        "data": [{"input_ids": make_tokens(seed)} for seed in (1, 2)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    unregister_kind("memory-file")


@pages_with("yaml")
def test_the_yaml_of_a_page_is_a_policy(page: Path) -> None:
    for text in blocks_of(page, "yaml"):
        config = OffloadConfig.from_yaml(text, file=page.name)
        assert OffloadConfig.from_yaml(config.to_yaml()) == config


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path, python_with_torch: Warm) -> None:
    warnings = tmp_path / "warnings.txt"  # stderr also has lines of the libraries that autodoc imports
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    done = python_with_torch.run(
        *command, "-w", str(warnings), str(DOCS), str(tmp_path / "html"), timeout=250
    )
    assert (done.returncode, warnings.read_text()) == (0, ""), done.stderr
