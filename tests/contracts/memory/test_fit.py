"""Six families of transformers, in a loop and in a ``Trainer``, with less memory than a plain run takes.

From the first plan on each step fits, and the bits are those of the plain run.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from covering import in_turn
from exact_memory import exact_memory
from harness import KIB
from later import Later
from models import same_bits

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from tba_offload.report.log import StepRecord

transformers = Later("transformers")
integration = Later("tba_offload.integrations.transformers")

STEPS, LEARNING, BATCH, LENGTH, LAYERS, VOCAB = 8, 3, 16, 48, 6, 96
SIZES = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 128}
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = SIZES | TOKENS | {"max_position_embeddings": LENGTH}
DECODER = TEXT | {"num_key_value_heads": 2, "use_cache": False}
GPT2 = TOKENS | {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": LENGTH, "use_cache": False}
T5 = TOKENS | {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": LAYERS // 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", DECODER),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "bert": ("Bert", "ForMaskedLM", TEXT),
    "t5": ("T5", "ForConditionalGeneration", T5 | {"decoder_start_token_id": 0, "use_cache": False}),
    "vit": ("ViT", "ForImageClassification", SIZES | {"image_size": 56, "patch_size": 8, "num_labels": 10}),
    "mixtral": ("Mixtral", "ForCausalLM", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*activation_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def quiet_and_exact() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with exact_memory():
        yield
    transformers.logging.set_verbosity(before)


class Run(NamedTuple):
    losses: list[Tensor]
    weights: list[Tensor]
    records: list[StepRecord]

    @property
    def peaks(self) -> list[int]:
        return [record.device_peak_bytes or 0 for record in self.records]


def make(family: str) -> Any:
    name, task, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model: Any = getattr(transformers, name + task)(getattr(transformers, f"{name}Config")(**sizes))
    return model.train()


def examples(family: str) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    count = STEPS * BATCH
    if family == "vit":
        pictures, labels = torch.randn(count, 3, 56, 56, generator=source), torch.arange(count) % 10
        return [{"pixel_values": each, "labels": label} for each, label in zip(pictures, labels, strict=True)]
    return [
        {"input_ids": row, "labels": row}
        for row in torch.randint(3, VOCAB, (count, LENGTH), generator=source)
    ]


def in_a_loop(family: str, policy: object, _: Path) -> Run:
    model, data, losses = make(family), examples(family), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tba.attach(model, policy) as session:  # type: ignore[arg-type]
        for number in range(STEPS):
            torch.manual_seed(number)
            rows = data[number * BATCH : (number + 1) * BATCH]
            loss = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return Run(losses, [each.detach().clone() for each in model.parameters()], session.records)


def in_a_trainer(family: str, policy: object, directory: Path) -> Run:
    callback = integration.OffloadCallback(policy)
    settings: dict[str, Any] = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "logging_steps": 1}
    settings |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(output_dir=str(directory), **settings)
    data = examples(family)
    trainer = transformers.Trainer(make(family), arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    losses = [torch.tensor(each["loss"]) for each in trainer.state.log_history if "loss" in each]
    weights = [each.detach().clone() for each in trainer.model.parameters()]
    return Run(losses, weights, callback.session.records)


WAYS = {"loop": in_a_loop, "trainer": in_a_trainer}


@pytest.mark.parametrize(("family", "way", "share"), in_turn([*FAMILIES], [*WAYS], [0.6, 0.4]))
def test_each_step_fits_and_the_bits_are_the_same(
    family: str, way: str, share: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = {"min_tensor_bytes": KIB, "store": {"kind": "file", "directories": str(tmp_path)}}
    kept = WAYS[way](family, policy | {"default": "keep"}, tmp_path)
    base = kept.records[-1].base_bytes or 0
    limit = base + int(share * (max(kept.peaks[1:]) - base))
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger="tba_offload.session"):
        warnings.simplefilter("error", RuntimeWarning)  # as where a budget cannot be met
        fitted = policy | {"default": "auto", "budget": {"device_bytes": limit}}
        found = WAYS[way](family, fitted, tmp_path)
    assert max(found.peaks[LEARNING:]) <= limit, (limit, found.peaks, kept.peaks)
    assert all(map(same_bits, found.losses + found.weights, kept.losses + kept.weights))
    told = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"plan after step {LEARNING}: ") for line in told)
    assert any(line.startswith("activation peak ") and "x the prediction for 'keep'" in line for line in told)
