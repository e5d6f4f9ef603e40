"""Python, YAML and shell of every page run, and the site is built."""

from __future__ import annotations

import re
import shlex
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from models import loss_of, make_model, make_tokens
from places import ROOT
from torch import Tensor, nn

import tba_offload as tba
from tba_offload import cli
from tba_offload.config import OffloadConfig, StoreConfig
from tba_offload.report.log import RunHeader, RunLogWriter

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
    """A model that returns an output with its loss, as the models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(layers=2)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=loss_of(self.inner, input_ids))


@pages_with("python")
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its blocks, one after another; each may use a model that trains, its data, and ``tba``."""
    config = OffloadConfig(store=StoreConfig(kind="host"), min_tensor_bytes=1024)
    (tmp_path / "policy.yaml").write_text(config.to_yaml())
    blocks = blocks_of(page, "python")
    if not any('run_log="run.jsonl"' in block for block in blocks):  # a page that reads one
        with RunLogWriter(tmp_path / "run.jsonl", RunHeader(strategy="offload")):
            pass
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if "class MemoryFileStore" in blocks[0]:  # a module, which its tests import
        (tmp_path / "memory_file_store.py").write_text(blocks[0])
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


@pages_with("yaml")
def test_the_yaml_of_a_page_is_a_policy(page: Path) -> None:
    for text in blocks_of(page, "yaml"):
        config = OffloadConfig.from_yaml(text, file=page.name)
        assert OffloadConfig.from_yaml(config.to_yaml()) == config


@pages_with("bash")
def test_the_shell_of_a_page_names_files_and_commands_that_exist(page: Path) -> None:
    for block in blocks_of(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), block
        for path in re.findall(r"^(?:bash|python) ([\w./]+\.(?:sh|py))", block, re.MULTILINE):
            assert (ROOT / path).exists(), path
        for line in re.findall(r"^tba-offload (.*)", block, re.MULTILINE):
            name, *words = shlex.split(line, comments=True)
            known = {option for one in cli.main.commands[name].params for option in one.opts}
            known |= {option for one in cli.main.commands[name].params for option in one.secondary_opts}
            options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            if name != "launch":  # the options of launch are those of a script
                assert options <= known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_links_of_a_page_exist(page: Path) -> None:
    """Links to other pages, to files of the repository at its address, and files that are named in code."""
    text = page.read_text(encoding="utf-8")
    home = r"https://(?:raw\.githubusercontent|github)\.com/tba-offload/tba-offload/(?:(?:tree|blob)/)?main/"
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    inside = [path for path in targets if not re.match(r"[a-z]+:", path)]
    linked = [re.sub(home, "", path) for path in targets if re.match(home, path)]
    named = re.findall(
        r"`(?:python |bash )?((?:tests|benchmarks|examples|tba_offload|patches)/[\w./*-]+)", text
    )
    for path in inside:
        assert (page.parent / path).exists(), path
    for path in (*linked, *named):
        assert list(ROOT.glob(path.rstrip("/"))), path


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path, python_with_torch: Warm) -> None:
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    done = python_with_torch.run(*command, str(DOCS), str(tmp_path / "html"), timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
