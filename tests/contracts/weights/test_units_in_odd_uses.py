"""Quantized frozen weights beside faults, a second session, compiled layers and other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import (
    BASES,
    Training,
    compare,
    frozen,
    layers_of,
    make,
    offloaded,
    peft,
    policy,
    quiet,
    trained_of,
    values_of,
)
from covering import in_turn, of_which
from faults import inject
from models import assert_same_tensors

import tba_offload as tba
from tba_offload.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*outside of its layer"),
]


def in_micro_batches(training: Training) -> None:
    training.step(0, micro_batches=2)


def with_autocast(training: Training) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        training.step(0)


def compiled(training: Training) -> None:
    for layer in layers_of(training.model):
        layer.compile(backend="eager")
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


WAYS: dict[str, tuple[Callable[[Training], None], dict[str, Any]]] = {
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
@pytest.mark.parametrize(("base", "way"), in_turn(list(BASES), list(WAYS)))
def test_the_same_bits_in_a_second_session(base: str, way: str, tmp_path: Path) -> None:
    program, settings = WAYS[way]
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
