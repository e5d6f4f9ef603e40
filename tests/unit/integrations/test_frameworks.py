"""Trainers and loops of other packages, and the examples that show them."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import of_which
from harness import KIB, config_for
from later import Later
from models import VOCAB, History, assert_same_history, loss_of, make_model, make_tokens
from optimizers import assert_same_state_dicts
from places import EXAMPLES
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from warm import Warm

    from tba_offload.config import OffloadConfig

accelerate, lightning, pytorch_lightning, transformers = (
    Later(name) for name in ("accelerate", "lightning.pytorch", "pytorch_lightning", "transformers")
)


def callback_of(integration: str, *arguments: Any, **settings: Any) -> Any:
    module = import_module(f"tba_offload.integrations.{integration}")
    return module.OffloadCallback(*arguments, **settings)


OffloadCallback = partial(callback_of, "transformers")

LENGTH, BATCH = 32, 2
FIGURES = {"tba-offload/activation_peak_gib", "tba-offload/stall_seconds"}

# None of these is about offloading.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*activation_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The packages keep settings in global places."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def config() -> OffloadConfig:
    return config_for(in_flight=64 * KIB)


def tiny_llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def texts() -> list[dict[str, Tensor]]:
    tokens = torch.randint(1, VOCAB, (24, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def is_given_back(model: nn.Module) -> bool:
    return not any(
        "forward" in vars(module) and hasattr(vars(module)["forward"], "_session")
        for module in model.modules()
    )


# The Trainer of transformers


def trainer_of(directory: Path, callbacks: list[Any], settings: dict[str, Any]) -> Any:
    fixed: dict[str, Any] = {"output_dir": str(directory), "use_cpu": True, "max_steps": 4}
    fixed |= {"per_device_train_batch_size": BATCH, "logging_steps": 2}
    fixed |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(**fixed | settings)
    data = {"train_dataset": texts(), "eval_dataset": texts()[:4]}
    return transformers.Trainer(model=tiny_llama(), args=arguments, callbacks=callbacks, **data)


def history_of(trainer: Any) -> History:
    logged = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    losses = [torch.tensor(loss, dtype=torch.float64) for loss in logged if loss is not None]
    return History(losses=losses, parameters=[p.detach().clone() for p in trainer.model.parameters()])


def recorder_into(found: list[dict[str, float]]) -> Any:
    """Stands for TensorBoard and its like, which are called before the callbacks of the user."""

    class Recorder(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            found.append(dict(logs))

    return Recorder()


ACCUMULATING = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "bf16": True}


def test_a_trainer(tmp_path: Path) -> None:
    """Gradients are accumulated and clipped, under autocast, and there are evaluations in between."""
    plain = trainer_of(tmp_path, [], ACCUMULATING)
    plain.train()
    logged: list[dict[str, float]] = []
    log = tmp_path / "run.jsonl"
    callback = OffloadCallback(config(), run_log=log)
    trainer = trainer_of(tmp_path, [recorder_into(logged), callback], ACCUMULATING)
    trainer.train()
    told = read_run_log(log).header.model
    assert (told["name"], told["batch_size"]) == (type(trainer.model).__name__, 2 * BATCH)
    assert told["parameters"] == sum(parameter.numel() for parameter in trainer.model.parameters())
    assert_same_history(history_of(trainer), history_of(plain))
    assert callback.session is not None
    report = callback.session.records
    assert [(record.step, record.scopes, record.tokens) for record in report] == [
        (number, 6, 2 * BATCH * LENGTH) for number in (1, 2, 3, 4)
    ]
    assert all(record.offloaded_bytes and not record.left_alone_scopes for record in report)
    assert is_given_back(trainer.model)
    expected = [report[step - 1].activation_peak_bytes / 2**30 for step in (2, 4)]
    for logs in (logged, trainer.state.log_history):
        found = [entry for entry in logs if "loss" in entry]
        assert all({name for name in entry if name.startswith("tba-offload/")} == FIGURES for entry in found)
        peaks = [entry["tba-offload/activation_peak_gib"] for entry in found]
        assert peaks == pytest.approx(expected, rel=0.005)  # three digits
        assert not any(entry.keys() & FIGURES for entry in logs if "loss" not in entry)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_trainer_that_checkpoints(
    use_reentrant: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointing = {"activation_checkpointing": True}
    checkpointing["activation_checkpointing_kwargs"] = {"use_reentrant": use_reentrant}  # type: ignore[assignment]
    callback = OffloadCallback(config())
    trainers = [trainer_of(tmp_path, callbacks, checkpointing) for callbacks in ([], [callback])]
    with caplog.at_level("INFO", "tba_offload"):
        for trainer in trainers:
            trainer.train()
    plain, trainer = trainers
    assert_same_history(history_of(trainer), history_of(plain))
    assert [(record.scopes, record.recomputed_scopes) for record in callback.session.records] == [(3, 3)] * 4
    assert sum("3 of 3 layers (gradient_checkpointing)" in line for line in caplog.messages) == 1
    assert trainer.model.is_activation_checkpointing
    assert all(layer.gradient_checkpointing is True for layer in trainer.model.model.layers)


def test_a_trainer_whose_optimizer_states_are_offloaded(tmp_path: Path) -> None:
    """It saves and resumes as plain training does, and each loads the other's checkpoints."""
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    policy = {"states": {"sub_group_bytes": "64KiB"}, "store": {"directories": [str(tmp_path)]}}
    trainers = []
    for name, callbacks in (("plain", []), ("offload", [OffloadCallback(policy)])):
        trainer = trainer_of(tmp_path / name, callbacks, saving)
        trainer.train()
        trainers.append(trainer)
    plain, trainer = trainers
    assert_same_history(history_of(trainer), history_of(plain))
    files = [torch.load(tmp_path / name / "checkpoint-4" / "optimizer.pt") for name in ("plain", "offload")]
    assert_same_state_dicts(files[1], files[0])
    for name, callbacks in (("plain", [OffloadCallback(policy)]), ("offload", [])):
        again = trainer_of(tmp_path / name, callbacks, saving)
        again.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2"))
        assert_same_history(history_of(again), history_of(plain))
        if callbacks:
            [states] = callbacks[0].session.states
            assert len(states.records) == 2
            assert states.records[-1].written_bytes > 0


# Loops of accelerate


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loop_of_accelerate(when: str, precision: str) -> None:
    """Attached before or after ``prepare``, the step takes in all that is accumulated."""

    def trained(*, attached: bool) -> tuple[History, list[tba.StepRecord]]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        model: nn.Module = tiny_llama()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches: Any = torch.utils.data.DataLoader(texts()[:12], batch_size=BATCH)
        history = History()
        with contextlib.ExitStack() as stack:
            if attached and when == "before":
                session = stack.enter_context(tba.attach(model, config()))
            model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
            if attached and when == "after":
                session = stack.enter_context(tba.attach(model, config()))
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch, use_cache=False).loss
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                history.losses.append(loss.detach())
            report = session.records if attached else []
        assert is_given_back(model)
        history.parameters = [parameter.detach().clone() for parameter in model.parameters()]
        return history, report

    (found, report), (expected, _) = trained(attached=True), trained(attached=False)
    assert_same_history(found, expected)
    assert [(record.scopes, record.tokens) for record in report] == [(6, 2 * BATCH * LENGTH)] * 3
    assert all(record.offloaded_bytes for record in report)


# Lightning, by both of its names

LIGHTNINGS = {
    name: (package, partial(callback_of, name))
    for name, package in (("lightning", lightning), ("pytorch_lightning", pytorch_lightning))
}
each_lightning = pytest.mark.parametrize(("package", "callback"), LIGHTNINGS.values(), ids=LIGHTNINGS)


def module_of(package: types.ModuleType, **methods: Callable[..., object]) -> Any:
    def __init__(self: Any) -> None:  # noqa: N807
        package.LightningModule.__init__(self)
        self.model = make_model(layers=3)
        self.losses = []

    def training_step(self: Any, batch: Tensor, _: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self: Any, batch: Tensor, _: int) -> None:
        self.losses.append(loss_of(self.model, batch))

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    given = {
        "__init__": __init__,
        "training_step": training_step,
        "validation_step": validation_step,
        "configure_optimizers": configure_optimizers,
        **methods,
    }
    return type("Gpt", (package.LightningModule,), given)()


def fit(package: types.ModuleType, module: Any, *callbacks: Any, **settings: Any) -> Any:
    batches = torch.utils.data.DataLoader([make_tokens(n, batch=1)[0] for n in range(16)], batch_size=BATCH)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    fixed: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "callbacks": list(callbacks)}
    trainer = package.Trainer(**fixed, **dict.fromkeys(quiet, False), **settings)
    trainer.fit(module, batches, batches)
    return trainer


def lightning_history(module: Any) -> History:
    return History(losses=module.losses, parameters=[p.detach().clone() for p in module.parameters()])


@each_lightning
def test_lightning(package: types.ModuleType, callback: Any) -> None:
    """Gradients are accumulated and clipped; there are validations before, in between, and at the end."""
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 3, "gradient_clip_val": 1.0}
    plain, module = module_of(package), module_of(package)
    fit(package, plain, **settings)
    offload = callback(config(), tokens=lambda tokens: tokens.numel())
    trainer = fit(package, module, offload, **settings)
    assert_same_history(lightning_history(module), lightning_history(plain))
    report = offload.session.records
    tokens = 2 * BATCH * (make_tokens(0).shape[1] - 1)
    assert [(record.scopes, record.tokens) for record in report] == [(6, tokens)] * 4
    assert all(record.offloaded_bytes for record in report)
    assert trainer.callback_metrics.keys() >= FIGURES
    peak = trainer.callback_metrics["tba-offload/activation_peak_gib"]
    assert float(peak) == pytest.approx(report[-1].activation_peak_bytes / 2**30, rel=0.005)
    assert is_given_back(module)


# The examples


IN_TURN = """
import os, runpy, sys, warnings
folder, example, option, *values = sys.argv[1:]
warnings.simplefilter("ignore")
os.chdir(folder)
os.environ["HF_HUB_OFFLINE"] = "1"
for value in values:
    sys.argv = [example, *option.split(), value]
    print("run:", value, flush=True)
    runpy.run_path(example, run_name="__main__")
"""


def printed_by(python: Warm, name: str, directory: Path, option: str, *values: str) -> list[str]:
    """Return the output of an example for each value of an option, with the same losses in both steps."""
    example = str(EXAMPLES / f"train_{name}.py")
    done = python.run("-c", IN_TURN, str(directory), example, f"--steps 2 {option}", *values)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = done.stdout.split("run: ")[1:]
    losses = [re.findall(r"loss ([\d.]+),", run) for run in runs]
    assert len(losses[0]) == 2
    assert losses == losses[:1] * len(values)
    return runs


PROGRAMS = ["pytorch", "huggingface", "accelerate", "lightning", "long_context"]
OPTIONS = {"long_context": "--length 1024 --chunk 128"}


@pytest.mark.parametrize("name", of_which(PROGRAMS, "pytorch"))
def test_the_peak_of_an_example_is_a_fraction(name: str, tmp_path: Path, python_with_torch: Warm) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: offload\nbudget:\n  in_flight_bytes: 4MiB\n")
    option = f"{OPTIONS.get(name, '')} --placement"
    runs = printed_by(python_with_torch, name, tmp_path, option, "keep", "offload", str(policy))
    peaks = [[float(peak) for peak in re.findall(r"peak ([\d.]+) MiB", run)] for run in runs]
    assert all(0 < peak < 0.5 * keep for run in peaks[1:] for peak, keep in zip(run, peaks[0], strict=True))


@pytest.mark.parametrize(("name", "share"), [("qlora", 1.0), ("experts", 0.8)])
def test_an_example_reads_at_most_a_share_of_its_frozen_weights_twice(
    name: str, share: float, tmp_path: Path, python_with_torch: Warm
) -> None:
    """Once for the forward and once for the backward of a step."""
    runs = printed_by(python_with_torch, name, tmp_path, "--frozen", "keep", "offload")
    kept, read = (
        [float(each) for each in re.findall(r"([\d.]+) MiB of frozen weights read", run)] for run in runs
    )
    needed = [float(each) for each in re.findall(r"([\d.]+) MiB if", runs[1])]
    assert not any(kept)
    assert all(0 < each <= share * most for each, most in zip(read, needed, strict=True))
