"""The promise for layers that are recomputed, as PyTorch's allocator sees it from outside.

Resident activations ≤ kept + ceiling + 1.5 times what a layer saves: its backward works with the rest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import in_turn
from exact_memory import exact_memory
from harness import KIB, session_for
from later import Later

from tba_offload.config.policy import Placement

transformers = Later("transformers")
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
TEXT = SIZES | {"vocab_size": 64}
GPT2 = {"n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 64}
T5 = {"d_model": 128, "d_ff": 512, "num_heads": 4, "d_kv": 32, "vocab_size": 64}
KINDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": ("Llama", "Model", "num_hidden_layers", TEXT | {"use_cache": False}),
    "bert": ("Bert", "Model", "num_hidden_layers", TEXT),
    "gpt2": ("GPT2", "Model", "n_layer", GPT2 | {"use_cache": False}),
    "t5": ("T5", "EncoderModel", "num_layers", T5 | {"use_cache": False}),
    "vit": ("ViT", "Model", "num_hidden_layers", SIZES | {"image_size": 176, "patch_size": 16}),
}
"""Family and task of each kind of model, the setting that is its number of layers, and the others."""

POOLING = {"bert", "vit"}
RECOMPUTED = [placement for placement in Placement if placement.recomputes]
CEILING, LAYERS = 512 * KIB, 6
TOKENS = torch.arange(4 * 128).view(4, 128) % 64
IMAGES = torch.ones(4, 3, 176, 176)
"""Made once: what a model's first part saves is no matter of its layers."""


def make(kind: str, layers: int) -> Any:
    """A model whose gradients are there: they do not count as activations."""
    torch.manual_seed(0)
    family, task, depth, sizes = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**sizes, **{depth: layers})
    more = {"add_pooling_layer": False} if kind in POOLING else {}
    model = getattr(transformers, family + task)(config, **more).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def forward(model: Any) -> torch.Tensor:
    if model.config.model_type == "vit":
        return model(pixel_values=IMAGES)[0]  # type: ignore[no-any-return]
    return model(input_ids=TOKENS)[0]  # type: ignore[no-any-return]


def live_after_forward(model: Any) -> int:
    before = torch.cpu.memory_allocated(None)  # type: ignore[attr-defined]
    output = forward(model)
    assert output.requires_grad
    return torch.cpu.memory_allocated(None) - before  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(("kind", "placement"), in_turn(list(KINDS), RECOMPUTED))
def test_a_model_whose_layers_are_recomputed_keeps_to_the_promise(kind: str, placement: Placement) -> None:
    with exact_memory():
        scope = (live_after_forward(make(kind, 4)) - live_after_forward(make(kind, 2))) // 2
        model = make(kind, LAYERS)
        plain = live_after_forward(model)
        with session_for(model, default=placement, in_flight=CEILING, measure_memory=True) as session:
            for _ in range(3):
                with session.step() as step:
                    output = forward(model)
                    output.sum().backward()
                del output
                record = step.record
                assert record is not None
                assert record.activation_peak_bytes is not None
                assert record.recomputed_scopes == LAYERS
    inputs = 0 if placement.offloads else LAYERS * TOKENS.numel() * 128 * 4
    bound = inputs + record.kept_bytes + CEILING + 1.5 * scope
    assert bound < plain
    assert record.activation_peak_bytes <= bound


# Checkpointing by the framework

DEEP = 12
INPUT = TOKENS.numel() * 128 * 4
"""Bytes of the input of one layer."""


def peak_of_step(model: Any) -> int:
    before = torch.cpu.memory_allocated(None)  # type: ignore[attr-defined]
    torch.cpu.reset_peak_memory_stats(None)  # type: ignore[attr-defined]
    forward(model).sum().backward()
    return torch.cpu.max_memory_allocated(None) - before  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_peak_without_the_inputs_that_checkpoints_of_a_framework_hold(*, use_reentrant: bool) -> None:
    """Backward of a reentrant checkpoint also holds an output. The peak no longer grows with depth."""
    peaks = {}
    with exact_memory():
        for layers in (DEEP // 2, DEEP):
            model = make("llama", layers)
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            peaks["alone", layers] = max(peak_of_step(model) for _ in range(3))
            with session_for(model, in_flight=CEILING) as session:
                for _ in range(3):
                    with session.step():
                        peaks["taken over", layers] = peak_of_step(model)
                assert session.records[-1].recomputed_scopes == layers
    for layers in (DEEP // 2, DEEP):
        saved = peaks["alone", layers] - peaks["taken over", layers]
        assert (layers - 2) * INPUT <= saved <= (layers + 2) * INPUT
    assert peaks["taken over", DEEP] <= 1.03 * peaks["taken over", DEEP // 2]
