"""torchtitan's own trainer, attached to: the same bits, by FSDP2 and without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import titan_run
import torch
from models import same_bits
from places import ROOT, SUPPORT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]

NAMES = ("plain", "again", "found")
STEPS, LAYERS = 4, 6
MIB = 2**20
WINDOW = 64 * MIB
SAVED = 300 * MIB  # less than the layers save in a step, of which the window may stay
SIZE = [f"--training.steps={STEPS}", "--training.seq_len=2048", "--training.local_batch_size=4"]
ONE_RANK = ["--experimental.custom_import=titan_one_rank", "--model.name=llama3_one_rank"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [pytest.param([], "Tensor", id="alone"), pytest.param(ONE_RANK, "DTensor", id="fsdp")],
)
def test_its_trainer_trains_to_the_same_bits(options: list[str], kind: str, tmp_path: Path) -> None:
    plain, again, found = trained(tmp_path, *SIZE, *options)
    (tmp_path / "figures.json").write_text(json.dumps(figures(plain, found), indent=1))
    assert plain["kinds"] == found["kinds"] == [kind]
    for other in (again, found):
        assert losses_of(other) == losses_of(plain)
        assert other["parameters"].keys() == plain["parameters"].keys()
        different = [
            name
            for name, parameter in other["parameters"].items()
            if not same_bits(parameter, plain["parameters"][name])
        ]
        assert different == [], "with the package" if other is found else "twice without the package"
    assert len(losses_of(plain)) == len(found["steps"]) == STEPS
    for step in found["steps"]:
        assert (step["scopes"], step["left_alone_scopes"]) == (LAYERS, 0)
        assert step["offloaded_bytes"] > SAVED - WINDOW
    assert found["peak"] < plain["peak"] - SAVED // 2


def trained(directory: Path, *options: str) -> list[dict[str, Any]]:
    """What came out of the example without the package, once more without it, and with it, all at once."""
    write_text_and_tokenizer(directory)
    common = [
        f"--model.hf_assets_path={directory / 'tokenizer'}",
        f"--training.dataset_path={directory / 'text'}",
        *options,
    ]
    policy = directory / "policy.yaml"
    policy.write_text(
        "default: offload\n"
        f"budget: {{in_flight_bytes: {WINDOW}B}}\n"
        f"store: {{kind: file, directories: ['{directory}']}}\n"
    )
    runs = [start(directory / name, "--placement", str(policy), *common) for name in NAMES]
    try:
        codes = [run.wait(timeout=200) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    for name, code in zip(NAMES, codes, strict=True):
        assert code == 0, (directory / name / "log.txt").read_text()[-6000:]
    return [torch.load(directory / name / "out.pt") for name in NAMES]


def start(directory: Path, *options: str) -> subprocess.Popen[bytes]:
    """A run in a folder of its own, where torchtitan writes what it dumps."""
    directory.mkdir()
    found_here = [str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(found_here),
        "HF_HOME": str(directory),
        "HF_HUB_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    kind = "with" if directory.name == "found" else "without"
    with (directory / "log.txt").open("w") as log:
        return subprocess.Popen(
            [sys.executable, titan_run.__file__, kind, str(directory / "out.pt"), *options],
            stdout=log,
            stderr=log,
            cwd=directory,
            env=os.environ | own,
        )


def write_text_and_tokenizer(directory: Path) -> None:
    """A data set like torchtitan's for tests, of these docs, and a tokenizer whose tokens are bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    (directory / "text").mkdir()
    texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "text" / "data.json").write_text(lines, encoding="utf-8")
    (directory / "tokenizer").mkdir()
    vocabulary = {token: number for number, token in enumerate(sorted(ByteLevel.alphabet()))}
    (directory / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "tokenizer" / "merges.txt").write_text("")


def losses_of(run: dict[str, Any]) -> list[str]:
    return re.findall(r"loss (\S+)", run["printed"])


def figures(plain: dict[str, Any], found: dict[str, Any]) -> dict[str, object]:
    """What a reader may want to know."""
    return {
        "losses": losses_of(found),
        "parameters": sum(parameter.numel() for parameter in found["parameters"].values()),
        "peak_bytes_without": plain["peak"],
        "peak_bytes_with": found["peak"],
        "steps": found["steps"],
        "printed": found["printed"].splitlines(),
    }
