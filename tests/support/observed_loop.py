"""Runs the loop of the README on a Hugging Face model under the observer of ``observer.c``.

    LD_PRELOAD=observer.so python observed_loop.py gpt2|llama|qwen3|bert|t5|vit POLICY STEPS

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
import transformers
from places import ROOT
from torch import nn

BATCH, SEQUENCE, VOCABULARY, IMAGE = 8, 128, 2000, 160

_SIZES: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 256}
_DECODER = _SIZES | {"intermediate_size": 688, "vocab_size": VOCABULARY, "use_cache": False}
_T5 = {"d_model": 256, "d_ff": 1024, "num_layers": 3, "num_heads": 4, "d_kv": 64, "decoder_start_token_id": 0}
_GPT2 = {"n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": SEQUENCE}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "LMHeadModel", _GPT2 | {"vocab_size": VOCABULARY, "use_cache": False}),
    "llama": ("Llama", "ForCausalLM", _DECODER),
    "qwen3": ("Qwen3", "ForCausalLM", _DECODER | {"num_key_value_heads": 2, "head_dim": 64}),
    "bert": ("Bert", "ForMaskedLM", _SIZES | {"intermediate_size": 1024, "vocab_size": VOCABULARY}),
    "t5": ("T5", "ForConditionalGeneration", _T5 | {"vocab_size": VOCABULARY, "use_cache": False}),
    "vit": ("ViT", "ForImageClassification", _SIZES | {"intermediate_size": 1024, "image_size": IMAGE}),
}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    family, task, sizes = MODELS[kind]
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, family + task)(config).train()


def batches(kind: str, steps: int) -> list[dict[str, torch.Tensor]]:
    seeded = torch.Generator().manual_seed(2)
    if kind == "vit":
        labels = torch.zeros(BATCH, dtype=torch.long)
        images = torch.randn(steps, BATCH, 3, IMAGE, IMAGE, generator=seeded)
        return [{"pixel_values": each, "labels": labels} for each in images]
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
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("\n## Use it\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    assert '"fit"' in found[1]
    assert '"run.jsonl"' in found[1]
    log = f"{policy}.{os.getpid()}.jsonl"
    return found[1].replace('"fit"', repr(policy)).replace('"run.jsonl"', repr(log))


def main(kind: str, policy: str, steps: str) -> None:
    torch.set_num_threads(1)
    model = make_model(kind)
    observer = Observer(model)
    optimizer = torch.optim.AdamW(model.parameters())
    observer.watch(optimizer)
    names: dict[str, Any] = {"model": model, "data": batches(kind, int(steps)), "optimizer": optimizer}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(loop_of_readme(policy), names)
    records = names["session"].records
    sys.stdout.write(
        json.dumps(
            {
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
