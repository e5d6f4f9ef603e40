"""Runs the loop of the README on a Hugging Face model under the observer of ``observer.c``.

    LD_PRELOAD=observer.so python observed_loop.py llama|gpt2 POLICY STEPS

What the observer saw is told beside what the session reported, step by step, as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import sys
from typing import Any

import torch
from places import ROOT
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BATCH, SEQUENCE, VOCABULARY = 8, 256, 2000
"""So large that a peak inside one operation lasts longer than the time between two samples of the meter."""


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=6,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                use_cache=False,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=256, n_layer=6, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE, use_cache=False
        )
    )


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    seeded = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (steps, BATCH, SEQUENCE), generator=seeded)
    return [{"input_ids": each, "labels": each} for each in tokens]


class Observer:
    """The preloaded library, told of gradients by hooks of its own."""

    def __init__(self, model: nn.Module) -> None:
        library = ctypes.CDLL(None)
        self._reset, self._peak, self._leave_out = (
            getattr(library, f"observer_{name}") for name in ("reset", "peak", "leave_out")
        )
        self._reset.restype = self._peak.restype = ctypes.c_long
        self._leave_out.argtypes = [ctypes.c_long]
        self._gradients: dict[nn.Parameter, int] = {}
        self._base = 0
        self.peaks: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        model.register_forward_pre_hook(self._begin)

    def _begin(self, model: nn.Module, _: object) -> None:
        if not self._gradients:
            self._base = self._reset()

    def _accumulated(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._gradients[parameter] = parameter.grad.untyped_storage().nbytes()
        self._leave_out(sum(self._gradients.values()))

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: self.peaks.append(self._peak() - self._base))
        zero_grad = optimizer.zero_grad

        def forget() -> None:
            zero_grad()
            self._gradients.clear()
            self._leave_out(0)

        optimizer.zero_grad = forget  # type: ignore[method-assign, assignment]


def loop_of_readme(policy: str) -> str:
    """The first block of Python of the README's section on how to use it."""
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("\n## Use it\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    assert '"policy.yaml"' in found[1]
    assert '"run.jsonl"' in found[1]
    log = f"{policy}.{os.getpid()}.jsonl"
    return found[1].replace('"policy.yaml"', repr(policy)).replace('"run.jsonl"', repr(log))


def main(kind: str, policy: str, steps: str) -> None:
    torch.set_num_threads(1)
    model = make_model(kind)
    observer = Observer(model)
    optimizer = torch.optim.AdamW(model.parameters())
    observer.watch(optimizer)
    names: dict[str, Any] = {"model": model, "data": batches(int(steps)), "optimizer": optimizer}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(loop_of_readme(policy), names)
    records = names["session"].report()
    sys.stdout.write(
        json.dumps(
            {
                "printed": printed.getvalue().splitlines(),
                "reported": [record.activation_peak_bytes for record in records],
                "observed": observer.peaks,
                "gradients": [record.gradient_bytes for record in records],
                "parameters": sum(p.numel() * p.itemsize for p in model.parameters()),
                "source": records[-1].peak_source,
                "tokens": [record.tokens for record in records],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
