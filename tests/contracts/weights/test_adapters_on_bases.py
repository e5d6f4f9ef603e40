"""Adapters on frozen bases of all kinds are trained to the same bits, on the memory of two layers."""

from __future__ import annotations

import functools
import gc
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import (
    BASES,
    FAMILIES,
    LAYERS,
    WIDE,
    Observer,
    Training,
    batch,
    compare,
    frozen_parts,
    live_bytes,
    make,
    nbytes_of,
    offloaded,
    parts_of,
    policy,
    quiet,
)
from covering import each_once, of_which
from harness import KIB
from later import Later
from models import assert_same_tensors

from tba_offload.integrations.transformers import OffloadCallback

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

transformers, trl, datasets, tokenizers = map(Later, ("transformers", "trl", "datasets", "tokenizers"))

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


def saving(training: Training, folder: Path) -> None:
    training.step(0)
    state = training.model.state_dict()
    training.note([[part for _, part in parts_of(each)] for each in state.values()])
    with quiet():
        training.model.save_pretrained(folder / "saved")
    training.note((folder / "saved" / "adapter_model.safetensors").read_bytes())
    torch.save(state, folder / "all.pt")
    loaded = torch.load(folder / "all.pt", weights_only=False)
    # bitsandbytes loads these entries before the first step only, and does not know others of its own.
    if not any(name.endswith("SCB") for name in loaded):
        training.model.load_state_dict(loaded, strict=False)
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
    (tmp_path / "drive").mkdir()
    compare(lambda: make(family, base), lambda training: WAYS[way](training, tmp_path), tmp_path / "drive")


@pytest.mark.parametrize("base", of_which(BASES, "bf16", "nf4, double", "int8", "torchao int8"))
def test_adapters_are_merged_after_the_session_is_closed(base: str, tmp_path: Path) -> None:
    logits = []
    for attach in (nullcontext, functools.partial(offloaded, directory=tmp_path)):
        training = Training(make("Llama", base))
        with attach(training.model):
            plainly(training, tmp_path)
        with torch.no_grad():
            logits.append(training.model.merge_and_unload().eval()(**batch(7)).logits)
    assert_same_tensors(logits[1:], logits[:1])


# Memory


MEASURED = [
    *[("Llama", base) for base in BASES],
    *[(family, "nf4, double") for family in FAMILIES if family != "Llama"],
    ("Mixtral", "bf16"),
]
ALWAYS = (("Llama", "bf16"), ("Llama", "nf4, double"), ("Llama", "int8"), ("Llama", "torchao int4"))


@pytest.mark.parametrize("kind", of_which(MEASURED, *ALWAYS), ids=", ".join)
def test_frozen_bytes_in_memory_are_those_of_two_layers_as_malloc_counts(
    kind: tuple[str, str], tmp_path: Path
) -> None:
    """The live bytes at each module of a step, beside those of the same step that keeps its weights."""
    family, base = kind
    (plain, kept_at_start, kept), _ = measured(family, base, None)
    (found, at_start, seen), stay = measured(family, base, tmp_path)
    assert_same_tensors(found, plain)
    total = nbytes_of(frozen_parts(make(family, base, **WIDE)))
    slack = total / LAYERS / 10 + 32 * KIB  # of the session, and of tables of quantized weights
    assert abs(stay) <= slack
    resident = [now - then for now, then in zip(seen, kept, strict=True)]
    resident = [each - (at_start - kept_at_start) + stay for each in resident]
    assert total / LAYERS / 4 <= max(resident) <= 2 * total / LAYERS + slack


def measured(
    family: str, base: str, directory: Path | None
) -> tuple[tuple[list[Tensor], int, list[int]], float]:
    """Live bytes before and in the third step; and the frozen bytes that attaching has left in memory."""
    with offloaded(make("Llama"), directory) if directory else nullcontext():
        pass  # what the first session of a process loads does not count
    model = make(family, base, **WIDE)
    total = nbytes_of(frozen_parts(model))
    observer, training = Observer(model), Training(model)

    def steps() -> tuple[list[Tensor], int, list[int]]:
        for number in range(3):
            at_start = live_bytes()
            observer.seen = []
            training.step(number, rows=1, length=4)
        return training.trained(), at_start, observer.seen

    if directory is None:
        return steps(), total
    gc.collect()
    before = live_bytes()
    with offloaded(model, directory):
        gc.collect()
        stay = total - (before - live_bytes())
        return steps(), stay


# Trainers


def trainer(kind: str, base: str, directory: Path, callbacks: list[Any]) -> Any:
    settings: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    rows = [batch(number, rows=1)["input_ids"][0].tolist() for number in range(8)]
    model, data = make("Llama", base), {"callbacks": callbacks}
    if kind == "Trainer":
        labelled = [{"input_ids": row, "labels": row} for row in rows]
        chosen = transformers.TrainingArguments(str(directory), **settings)
        return transformers.Trainer(model, chosen, train_dataset=labelled, eval_dataset=labelled[:2], **data)
    chosen = trl.SFTConfig(str(directory), bf16=False, max_length=16, **settings)
    made = datasets.Dataset.from_list([{"input_ids": row} for row in rows])
    words = tokenizers.models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>")
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    of_words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **named)
    return trl.SFTTrainer(
        model, chosen, train_dataset=made, eval_dataset=made, processing_class=of_words, **data
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
        logged = [each.get(name) for each in run.state.log_history for name in ("loss", "eval_loss")]
        losses = [torch.tensor(each) for each in logged if each is not None]
        assert len(losses) == 4
        results.append([*losses, *(each for each in run.model.parameters() if each.requires_grad)])
    assert callbacks[0].session.records[-1].weights_read_bytes
    assert_same_tensors(*results)
