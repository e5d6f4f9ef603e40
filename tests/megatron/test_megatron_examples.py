"""The scripts and policies of ``examples/megatron``, each at a size that a CPU can train.

The training script is ours, see ``pretrain_tiny.py``; every script is run with the flags and without.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from covering import of_which
from harness import made
from places import EXAMPLES
from pretrain_runs import SCRIPT, Figures, figures, finish, free_port, needs_training

from tba_offload.config import load_config
from tba_offload.report.ranks import read_runs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.megatron

MEGATRON = EXAMPLES / "megatron"
SCRIPTS = sorted(path for path in MEGATRON.glob("*.sh") if path.name != "common.sh")
POLICIES = sorted((MEGATRON / "policies").glob("*.yaml"))

SMALL = (
    *("--num-layers", "4", "--hidden-size", "64", "--ffn-hidden-size", "128", "--num-attention-heads", "4"),
    *("--vocab-size", "511", "--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "2"),
    *("--lr-warmup-iters", "0", "--eval-interval", "2", "--eval-iters", "1", "--log-interval", "1"),
)
SHORT = ("--seq-length", "128", "--max-position-embeddings", "128")
LONG = ("--seq-length", "512", "--max-position-embeddings", "512")
"""So that the matrices of attention are larger than the smallest tensors that the policy offloads."""

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single_gpu": (1, SHORT),
    "tensor_sequence_parallel": (2, ("--tensor-model-parallel-size", "2", *LONG)),
    "pipeline_interleaved": (2, ("--pipeline-model-parallel-size", "2", *SHORT)),
    "distributed_optimizer": (2, LONG),
    "mixture_of_experts": (2, ("--expert-model-parallel-size", "2", *LONG)),
}
"""Processes, and what is smaller beside the model."""


def train(name: str, figures_directory: Path, **variables: str) -> list[Figures]:
    ranks, smaller = LAYOUTS[name]
    command = ["bash", str(MEGATRON / f"{name}.sh"), str(SCRIPT), *SMALL, *smaller]
    here = {"CPU": "1", "GPUS_PER_NODE": str(ranks), "MASTER_PORT": str(free_port())}
    here["PYTHON"] = sys.executable
    status, output = finish([*command, "--figures", str(figures_directory)], here | variables)
    assert status == 0, output[-5000:]
    return figures(figures_directory)


def policy_of(name: str) -> Path:
    text = (MEGATRON / f"{name}.sh").read_text()
    (policy,) = re.findall(r"^POLICY=\$\{POLICY:-\$POLICIES/(\S+)\}$", text, re.MULTILINE)
    return MEGATRON / "policies" / policy


@needs_training
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", of_which(LAYOUTS, "pipeline_interleaved"))
def test_a_script_trains_as_it_does_without_offloading(name: str, tmp_path: Path) -> None:
    drives = [made(tmp_path / "drive0"), made(tmp_path / "drive1")]
    expected = train(name, tmp_path / "expected", PLAIN="1")
    found = train(
        name,
        tmp_path / "found",
        DIRECTORIES=" ".join(str(drive) for drive in drives),
        RUN_LOG=str(tmp_path / "run.jsonl"),
    )
    assert found == expected
    assert len(found) == LAYOUTS[name][0]
    assert any(rank.losses for rank in found)
    assert [list(drive.iterdir()) for drive in drives] == [[], []]
    (log,) = read_runs([tmp_path / "run.jsonl"])
    assert [step.offloaded_bytes + step.forwarded_bytes > 0 for step in log.steps] == [True, True]
    default = load_config(policy_of(name)).default.value
    assert [layer["placement"] for layer in log.header.plan.values()] == [default] * 4


def test_every_script_and_every_policy_is_run() -> None:
    assert {path.stem for path in SCRIPTS} == set(LAYOUTS)
    assert {policy_of(name) for name in LAYOUTS} == set(POLICIES)


def test_a_script_without_a_checkout_says_what_is_missing() -> None:
    script = str(MEGATRON / "single_gpu.sh")
    done = subprocess.run(["bash", script, "--bf16"], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 1
    assert f"the checkout of Megatron-LM is missing. Run {script} /path/to/Megatron-LM" in done.stderr
