"""Adapters on frozen bases of all kinds are trained to the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import (
    BASES,
    FAMILIES,
    Later,
    Training,
    batch,
    copied,
    frozen_parts,
    make,
    offloaded,
    parts_of,
    policy,
    quiet,
)
from covering import each_once, of_which
from models import assert_same_tensors

from tba_offload.integrations.transformers import OffloadCallback

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


transformers, trl, datasets = Later("transformers"), Later("trl"), Later("datasets")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # peft rounds the merged weight of a quantized base, and says so.
    pytest.mark.filterwarnings("ignore:Merge lora module to:UserWarning"),
]


def plainly(training: Training, _: Path) -> None:
    for number in range(3):
        training.step(number)


def accumulating(training: Training, _: Path) -> None:
    for number in range(2):
        training.step(number, micro_batches=3)


def evaluating(training: Training, _: Path) -> None:
    for number in range(2):
        training.step(number)
        training.evaluate()


def generating(training: Training, _: Path) -> None:
    for number in range(2):
        training.step(number)
        training.generate()


def saving(training: Training, directory: Path) -> None:
    """Save and load between steps: what is written, and what the model computes then."""
    training.step(0)
    state = training.model.state_dict()
    for each in state.values():
        training.seen += [part.clone() for _, part in parts_of(each)]
    folder = directory / "saved"
    with quiet():
        training.model.save_pretrained(folder)
    training.seen.append(torch.tensor(list((folder / "adapter_model.safetensors").read_bytes())))
    torch.save(state, folder / "all.pt")
    loaded = torch.load(folder / "all.pt", weights_only=False)
    if not any(
        name.endswith("SCB") for name in loaded
    ):  # which bitsandbytes loads before the first step only
        training.model.load_state_dict(loaded, strict=False)  # as its other entries are not known to it
    training.step(1)


def checkpointing(training: Training, _: Path) -> None:
    with quiet():
        training.model.gradient_checkpointing_enable({"use_reentrant": False})
    training.model.enable_input_require_grads()
    training.step(0)
    training.step(1, micro_batches=2)


WAYS: dict[str, Callable[[Training, Path], None]] = {
    way.__name__: way for way in (plainly, accumulating, evaluating, generating, saving, checkpointing)
}


@pytest.mark.parametrize(("base", "family", "way"), each_once(list(BASES), list(FAMILIES), list(WAYS)))
def test_adapters_are_trained_to_the_same_bits(base: str, family: str, way: str, tmp_path: Path) -> None:
    plain, found = (Training(make(family, base)) for _ in range(2))
    before = copied(frozen_parts(plain.model))
    folders = [tmp_path / name for name in ("plain", "found", "drive")]
    for folder in folders:
        folder.mkdir()
    WAYS[way](plain, folders[0])
    with offloaded(found.model, folders[2]):
        WAYS[way](found, folders[1])
    assert_same_tensors(found.results(), plain.results())
    after = dict(frozen_parts(found.model))
    assert_same_tensors([after[name] for name, _ in before], [tensor for _, tensor in before])


@pytest.mark.parametrize("base", of_which(BASES, "bf16", "nf4, double", "int8", "torchao int8"))
def test_adapters_are_merged_after_the_session_is_closed(base: str, tmp_path: Path) -> None:
    logits = []
    for directory in (None, tmp_path):
        training = Training(make("Llama", base))
        if directory is None:
            plainly(training, tmp_path)
        else:
            with offloaded(training.model, directory):
                plainly(training, tmp_path)
        merged = training.model.merge_and_unload()
        with torch.no_grad():
            logits.append(merged.eval()(**batch(7)).logits)
    assert_same_tensors(logits[1:], logits[:1])


# Trainers


def trainer(kind: str, base: str, directory: Path, callbacks: list[Any]) -> Any:
    """A trainer with accumulation and an evaluation between its steps."""
    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    rows = [batch(number, rows=1)["input_ids"][0] for number in range(8)]
    model = make("Llama", base)
    data = {"callbacks": callbacks}
    if kind == "Trainer":
        rows = [{"input_ids": row, "labels": row} for row in rows]
        chosen = transformers.TrainingArguments(str(directory), **settings)
        return transformers.Trainer(model, chosen, train_dataset=rows, eval_dataset=rows[:2], **data)
    rows = [{"input_ids": row.tolist()} for row in rows]
    chosen = trl.SFTConfig(str(directory), bf16=False, max_length=16, **settings)
    made = datasets.Dataset.from_list(rows)
    return trl.SFTTrainer(
        model, chosen, train_dataset=made, eval_dataset=made, processing_class=tokenizer(), **data
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize(("kind", "base"), [("Trainer", "nf4"), ("SFTTrainer", "nf4, double")])
def test_trainers_give_the_same_bits(kind: str, base: str, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    results = []
    for callbacks in ([], [OffloadCallback(policy(drive))]):
        transformers.set_seed(0)
        with quiet():
            run = trainer(kind, base, tmp_path / f"run {len(results)}", callbacks)
            run.train()
        losses = [
            torch.tensor(logged[name])
            for logged in run.state.log_history
            for name in ("loss", "eval_loss")
            if name in logged
        ]
        assert len(losses) == 4
        results.append([*losses, *(each for each in run.model.parameters() if each.requires_grad)])
    assert callbacks[0].session.records[-1].weights_read_bytes
    assert_same_tensors(*results)
