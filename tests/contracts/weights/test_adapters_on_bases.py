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
    frozen,
    frozen_parts,
    layers_of,
    live_bytes,
    make,
    nbytes_of,
    offloaded,
    parts_of,
    peft,
    policy,
    quiet,
    trained_of,
    values_of,
)
from covering import each_once, in_turn, of_which
from faults import inject
from harness import KIB
from later import Later
from models import assert_same_tensors

import tba_offload as tba
from tba_offload.errors import TransferError
from tba_offload.integrations.transformers import OffloadCallback

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

transformers, trl, datasets, tokenizers = map(Later, ("transformers", "trl", "datasets", "tokenizers"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*outside of its layer"),
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


# Faults, a second session, compiled layers and other settings


def in_micro_batches(training: Training) -> None:
    training.step(0, micro_batches=2)


def with_autocast(training: Training) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        training.step(0)


def compiled(training: Training) -> None:
    torch.compiler.reset()
    for layer in layers_of(training.model):
        layer.compile(backend="aot_eager")
    training.step(0)
    for layer in layers_of(training.model):
        layer._compiled_call_impl = None


def with_another_adapter(training: Training) -> None:
    torch.manual_seed(5)
    training.model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    training.model.set_adapter("other")
    training.optimizer = torch.optim.AdamW(trained_of(training.model), lr=1e-2)
    training.step(1)
    training.model.set_adapter("default")


def with_an_error(training: Training) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    up, q = layers_of(training.model)[2].mlp.up_proj, layers_of(training.model)[1].self_attn.q_proj
    lora = q.lora_B["default"].weight
    for call in (up.register_forward_pre_hook, up.register_forward_hook, lora.register_hook):
        handle = call(fail)
        with pytest.raises(KeyboardInterrupt):
            training.step(0)
        handle.remove()
    training.optimizer.zero_grad()


SECOND: dict[str, tuple[Callable[[Training], None], dict[str, Any]]] = {
    "in parts": (Training.evaluate, {"weights": {"frozen": "offload-40%"}}),
    "beside activations": (in_micro_batches, {"default": "offload", "min_tensor_bytes": "256B"}),
    "recomputed": (in_micro_batches, {"default": "recompute"}),
    "in host memory": (Training.evaluate, {"store": {"kind": "host"}}),
    "with autocast": (with_autocast, {}),
    "compiled": (compiled, {}),
    "with another adapter": (with_another_adapter, {}),
    "with an error": (with_an_error, {}),
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("base", "way"), in_turn(list(BASES), list(SECOND)))
def test_the_same_bits_in_a_second_session(base: str, way: str, tmp_path: Path) -> None:
    program, settings = SECOND[way]
    plain, found = (Training(make("Llama", base)) for _ in range(2))
    plain.step(0)
    with offloaded(found.model, tmp_path):
        found.step(0)
    with offloaded(found.model, tmp_path, **settings) as session:
        for training in (plain, found):
            program(training)
            training.finish()
        assert session.weights is not None
        assert session.weights.resident_bytes == 0
    assert_same_tensors(found.results(), plain.results())


@pytest.mark.parametrize("base", of_which(BASES, "fp32", "nf4, double", "torchao int4"))
def test_a_read_that_fails_is_named_and_nothing_is_lost(base: str, tmp_path: Path) -> None:
    plain, found = (Training(make("Llama", base)) for _ in range(2))
    with offloaded(found.model, tmp_path):
        with inject("flip-read"):
            for weight in frozen(found.model)[:3]:
                with pytest.raises(TransferError, match=r"frozen weights of .*proj[\w.]*weight"):
                    values_of(weight)
            with pytest.raises(TransferError, match=r"frozen weights of .*proj[\w.]*weight"):
                found.step(0)
        found.optimizer.zero_grad()
        for training in (plain, found):
            training.note([values_of(weight) for weight in frozen(training.model)])
            training.finish()
    assert_same_tensors(found.results(), plain.results())


def test_a_changed_weight_that_cannot_be_written_is_named_and_keeps_its_new_values(tmp_path: Path) -> None:
    plain, found = (Training(make("Llama")) for _ in range(2))
    for training in (plain, found):
        training.step(0)
    with offloaded(found.model, tmp_path):
        [first, second, *_] = frozen(found.model)
        with inject("fail-write"), pytest.raises(TransferError, match="q_proj"), torch.no_grad():
            first.mul_(1.25)
        second.data.mul_(1.25)
        found.finish()
    for weight in frozen(plain.model)[:2]:
        weight.data.mul_(1.25)
    plain.finish()
    assert_same_tensors(found.results(), plain.results())


@pytest.mark.parametrize("base", of_which(["fp32", "nf4, double", "torchao int8"], "nf4, double"))
@pytest.mark.parametrize("family", of_which(["Llama", "Mixtral"], "Mixtral"))
def test_as_many_stay_as_the_device_has_room_for(family: str, base: str, tmp_path: Path) -> None:
    plain, found = (Training(make(family, base)) for _ in range(2))
    chosen = policy(tmp_path, weights={"frozen": "auto"}, budget={"device_bytes": "64GiB"})
    with quiet(), tba.attach(found.model, chosen, measure_memory=True) as session:
        for number in range(6):
            plain.step(number)
            with session.step():
                found.step(number)
        assert session.records[0].weights_read_bytes
        assert not session.records[-1].weights_read_bytes
        found.evaluate()
    plain.evaluate()
    assert_same_tensors(found.results(), plain.results())


def test_a_tower_without_adapters(tmp_path: Path) -> None:
    """The first layers are frozen as a whole, and no gradient comes to them."""

    def made() -> Any:
        model = make("Llama", "nf4")
        for layer in layers_of(model)[:2]:
            layer.requires_grad_(requires_grad=False)
        return model

    compare(made, Training.finish, tmp_path)
