"""The example of torchtitan on ranks of a CPU: a program with ``--steps`` and the options of the example.

torchtitan asks PyTorch for an accelerator. It is told that the CPU is one, and ``torch.cpu`` gets what it
calls of an accelerator's module. It has FSDP2 divide gradients by a factor of its own, which Gloo cannot do
while it sums: here gradients are summed, and then divided.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from places import EXAMPLES, ROOT
from tokenizers.pre_tokenizers import ByteLevel
from torch.distributed.fsdp import FSDPModule


def options_with_text(directory: Path) -> list[str]:
    """Write a data set of these docs and a tokenizer of bytes; return the options that name them."""
    text, tokenizer = directory / "text", directory / "tokenizer"
    text.mkdir()
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
    lines = "".join(json.dumps({"text": page}) + "\n" for page in pages)
    (text / "data.json").write_text(lines, encoding="utf-8")
    tokenizer.mkdir()
    vocabulary = {token: number for number, token in enumerate(sorted(ByteLevel.alphabet()))}
    (tokenizer / "vocab.json").write_text(json.dumps(vocabulary))
    (tokenizer / "merges.txt").write_text("")
    return [f"--model.hf_assets_path={tokenizer}", f"--training.dataset_path={text}"]


MEMORY = 2**33
"""Bytes that torchtitan takes the device to have; it prints shares of them."""

ANSWERS = {
    "current_device": 0,
    "get_device_name": "CPU",
    "get_device_properties": SimpleNamespace(total_memory=MEMORY),
    "memory_stats": defaultdict(int),
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}

torch._utils._get_available_device_type = lambda: "cpu"
for name, answer in ANSWERS.items():
    setattr(torch.cpu, name, lambda *_, answer=answer: answer)


def set_divisor(self: FSDPModule, factor: float) -> None:
    divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


divide = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = set_divisor

parser = argparse.ArgumentParser()
parser.add_argument("--steps", required=True)
arguments, others = parser.parse_known_args()
size = [f"--training.steps={arguments.steps}", "--training.seq_len=512", "--training.local_batch_size=2"]
size.append("--training.mixed_precision_param=float32")  # some processors are slow in bfloat16
with tempfile.TemporaryDirectory() as directory:
    sys.argv[1:] = [*others, *size, *options_with_text(Path(directory))]
    names = runpy.run_path(str(EXAMPLES / "train_torchtitan.py"), run_name="__main__")
(model,), session = names["trainer"].model_parts, names["session"]
