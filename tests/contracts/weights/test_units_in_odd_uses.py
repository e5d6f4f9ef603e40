"""Quantized frozen weights beside faults, a second session, compiled layers and other settings."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import BASES, Training, layers_of, make, offloaded, policy, trained_of
from covering import in_turn, of_which
from faults import inject
from models import assert_same_tensors
from test_reads_from_outside import everything, finish, frozen, values_of

import tba_offload as tba
from tba_offload.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*outside of its layer"),
]


def again(training: Training) -> Iterator[dict[str, Any]]:
    yield {}
    training.step(0)
    yield {}
    training.step(1)


def in_parts(training: Training) -> Iterator[dict[str, Any]]:
    yield {"weights": {"frozen": "offload-40%"}}
    training.step(0)


def beside_activations(training: Training) -> Iterator[dict[str, Any]]:
    yield {"default": "offload", "min_tensor_bytes": "256B"}
    training.step(0, micro_batches=2)


def recomputed(training: Training) -> Iterator[dict[str, Any]]:
    training.step(9)  # the first forward of bitsandbytes' layers of 8 bits sets attributes
    yield {"default": "recompute"}
    training.step(0, micro_batches=2)


def in_host_memory(training: Training) -> Iterator[dict[str, Any]]:
    yield {"store": {"kind": "host"}}
    training.step(0)


def with_autocast(training: Training) -> Iterator[dict[str, Any]]:
    yield {}
    with torch.autocast("cpu", torch.bfloat16):
        training.step(0)


def compiled(training: Training) -> Iterator[dict[str, Any]]:
    yield {}
    for layer in layers_of(training.model):
        layer.compile(backend="eager")
    training.step(0)
    for layer in layers_of(training.model):
        layer._compiled_call_impl = None


def with_another_adapter(training: Training) -> Iterator[dict[str, Any]]:
    import peft

    yield {}
    training.step(0)
    torch.manual_seed(5)
    training.model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    training.model.set_adapter("other")
    training.optimizer = torch.optim.AdamW(trained_of(training.model), lr=1e-2)
    training.step(1)
    training.model.set_adapter("default")


def with_an_error(training: Training) -> Iterator[dict[str, Any]]:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    yield {}
    for call in ("register_forward_pre_hook", "register_forward_hook"):
        handle = getattr(layers_of(training.model)[2].mlp.up_proj, call)(fail)
        with pytest.raises(KeyboardInterrupt):
            training.step(0)
        handle.remove()
    handle = layers_of(training.model)[1].self_attn.q_proj.lora_B["default"].weight.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        training.step(0)
    handle.remove()
    training.optimizer.zero_grad()


WAYS = (
    *(again, in_parts, beside_activations, recomputed, in_host_memory, with_autocast, compiled),
    *(with_another_adapter, with_an_error),
)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("base", "way"), in_turn(list(BASES), WAYS))
def test_the_same_bits(base: str, way: Callable[[Training], Any], tmp_path: Path) -> None:
    plain, found = (Training(make("Llama", base)) for _ in range(2))
    for _ in way(plain):
        pass
    finish(plain)
    program = way(found)
    settings = next(program)
    while settings is not None:
        with offloaded(found.model, tmp_path, **settings):
            settings = next(program, None)
            if settings is None:
                finish(found)
    assert_same_tensors(everything(found), everything(plain))


@pytest.mark.parametrize("base", of_which(BASES, "fp32", "nf4, double", "torchao int4"))
def test_a_read_that_fails_is_named_and_nothing_is_lost(base: str, tmp_path: Path) -> None:
    plain, found = (Training(make("Llama", base)) for _ in range(2))
    with offloaded(found.model, tmp_path):
        with inject("flip-read"):
            for weight in frozen(found.model)[:3]:
                with pytest.raises(TransferError, match=r"frozen weights of .*proj"):
                    values_of(weight)
            with pytest.raises(TransferError, match=r"frozen weights of .*proj"):
                found.step(0)
        found.optimizer.zero_grad()
        found.seen += [value for weight in frozen(found.model) for value in values_of(weight)]
        finish(found)
    plain.seen += [value for weight in frozen(plain.model) for value in values_of(weight)]
    finish(plain)
    assert_same_tensors(everything(found), everything(plain))


def test_a_changed_weight_that_cannot_be_written_is_named_and_keeps_its_new_values(tmp_path: Path) -> None:
    plain, found = (Training(make("Llama")) for _ in range(2))
    for training in (plain, found):
        training.step(0)
    with offloaded(found.model, tmp_path):
        [first, second, *_] = frozen(found.model)
        with inject("fail-write"), pytest.raises(TransferError, match="q_proj"), torch.no_grad():
            first.mul_(1.25)
        second.data.mul_(1.25)
        finish(found)
    for weight in frozen(plain.model)[:2]:
        weight.data.mul_(1.25)
    finish(plain)
    assert_same_tensors(everything(found), everything(plain))


@pytest.mark.parametrize("base", of_which(["fp32", "nf4, double", "torchao int8"], "nf4, double"))
@pytest.mark.parametrize("family", of_which(["Llama", "Mixtral"], "Mixtral"))
def test_as_many_stay_as_the_device_has_room_for(family: str, base: str, tmp_path: Path) -> None:
    plain, found = (Training(make(family, base)) for _ in range(2))
    budget = {"device_bytes": "64GiB"}
    chosen = policy(tmp_path, weights={"frozen": "auto"}, budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tba.attach(found.model, chosen, measure_memory=True) as session:
            for number in range(6):
                with session.step():
                    found.step(number)
            assert session.records[0].weights_read_bytes
            assert not session.records[-1].weights_read_bytes
            found.evaluate()
    for number in range(6):
        plain.step(number)
    plain.evaluate()
    assert_same_tensors(everything(found), everything(plain))


def test_a_tower_without_adapters(tmp_path: Path) -> None:
    """The first layers are frozen as a whole, and no gradient comes to them."""
    results = []
    for directory in (None, tmp_path):
        model = make("Llama", "nf4")
        for layer in layers_of(model)[:2]:
            layer.requires_grad_(requires_grad=False)
        training = Training(model)
        if directory is None:
            finish(training)
        else:
            with offloaded(model, directory) as session:
                finish(training)
                assert session.weights is not None
                assert session.weights.resident_bytes == 0
        results.append(everything(training))
    assert_same_tensors(*results)
