"""``tba-offload estimate``: what it computes before any run is what runs measure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from commands import call

import tba_offload as tba

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

BATCH, SEQUENCE = 4, 128
MODELS: dict[str, Any] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=3, vocab_size=512
    ),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_embd=192, n_layer=6, n_head=3, vocab_size=512),
    "BertForMaskedLM": lambda: transformers.BertConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=3, vocab_size=512
    ),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        d_model=192, d_kv=64, d_ff=768, num_layers=4, num_heads=3, vocab_size=512
    ),
    "ViTForImageClassification": lambda: transformers.ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=3
    ),
}


def estimate(folder: Path, *arguments: object) -> Any:
    drives = "--flops", "20G", "--write", "1GB/s", "--read", "1GB/s"
    result = call("estimate", "--config", folder, *drives, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def measured(
    name: str, config: Any, dtype: torch.dtype, way: str, window: int, drive: Path
) -> tuple[int, int]:
    """Return the activation peak of steps of a real run, and the bytes that a step writes."""
    torch.manual_seed(1)
    model = getattr(transformers, name)._from_config(config, dtype=dtype).train()
    if name.startswith("ViT"):
        images = torch.randn(BATCH, 3, 224, 224, dtype=dtype)
        given = {"pixel_values": images, "labels": torch.zeros(BATCH, dtype=torch.long)}
    else:
        ids = torch.randint(0, 512, (BATCH, SEQUENCE))
        given = {"input_ids": ids, "labels": ids}
    policy = {
        "default": way,
        "budget": {"in_flight_bytes": window},
        "store": {"directories": [str(drive)]},
    }
    records = []
    with tba.attach(model, policy) as session:
        for _ in range(3):
            with session.step() as step:
                model(**given).loss.backward()
            model.zero_grad()
            records.append(step.record)
    peaks = [
        each.activation_peak_bytes or each.sampled_peak_bytes or 0 for each in records if each is not None
    ]
    return max(peaks[1:]), max(each.offloaded_bytes for each in records[1:] if each is not None)
