"""Models of Hugging Face's at their defaults: caches, padding, dropout, tied weights, two stacks."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import of_which
from harness import KIB, Drive, session_for
from later import Later
from models import History, assert_same_history, same_bits
from torch import Tensor, nn

from tba_offload import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

transformers = Later("transformers")

CACHE = "the model fills a cache of keys and values"
CHECKPOINTING = "gradient checkpointing is switched on in"
STEPS = 3
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
LANGUAGE = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SIZES, **LANGUAGE, "num_key_value_heads": 2, "max_position_embeddings": 64}

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def qwen2() -> nn.Module:
    """Its weights are tied."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER, tie_word_embeddings=True))


def mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=8))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **LANGUAGE))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, **LANGUAGE, max_position_embeddings=64)
    )


def t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, **LANGUAGE, decoder_start_token_id=0)
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=10)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make for make in (llama, qwen2, mistral, gpt2, bert, t5, vit)
}
CACHING = ("llama", "qwen2", "mistral", "gpt2", "t5")
"""They fill a cache in training too, unless they are told not to."""


def make(kind: str, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    for part in model.modules():  # T5's decoder has a configuration of its own
        for name, value in settings.items() if hasattr(part, "config") else ():
            setattr(part.config, name, value)
    return model


def layers_of(kind: str) -> int:
    return 4 if kind == "t5" else 3


def batch_of(kind: str, number: int) -> dict[str, Tensor]:
    """Four sequences, two of them padded; or four pictures."""
    source = torch.Generator().manual_seed(number)
    if kind == "vit":
        labels = torch.randint(10, (4,), generator=source)
        return {"pixel_values": torch.randn(4, 3, 32, 32, generator=source), "labels": labels}
    tokens = torch.randint(3, 96, (4, 24), generator=source)
    mask = torch.ones_like(tokens)
    mask[1, 16:] = 0
    mask[2, 8:] = 0
    tokens = tokens * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def train(kind: str, model: nn.Module, *, steps: int = STEPS) -> History:
    """A few steps of AdamW, in a loop that knows of no session."""
    history = History()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(steps):
        torch.manual_seed(number)
        result = model(**batch_of(kind, number)).loss
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.losses.append(result.detach())
    history.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    history.random_states = [torch.get_rng_state()]
    return history


@functools.cache
def plain(kind: str, *, steps: int = STEPS) -> History:
    return train(kind, make(kind), steps=steps)


# Caches of keys and values


@pytest.mark.parametrize("kind", of_which(CACHING, "t5"))
def test_a_cache_that_is_filled_while_training_is_told(kind: str) -> None:
    model = make(kind)
    with session_for(model), pytest.warns(UserWarning, match=CACHE) as told:
        train(kind, model)
    assert len(told) == 1


@pytest.mark.filterwarnings(f"ignore:{CACHE}")
@pytest.mark.parametrize("kind", of_which(CACHING, "llama", "t5"))
def test_layers_that_fill_a_cache_are_recomputed(kind: str) -> None:
    """The second run finds the cache as empty as it was."""
    model = make(kind)
    with session_for(model, in_flight=128 * KIB, default=Placement.RECOMPUTE_OFFLOAD) as session:
        assert_same_history(train(kind, model), plain(kind))
        assert {record.recomputed_scopes for record in session.report()} == {layers_of(kind)}


@pytest.mark.filterwarnings(f"ignore:{CACHE}")
@pytest.mark.parametrize("use_cache", [False, True])
def test_the_planner_recomputes_layers_also_if_they_fill_a_cache(use_cache: bool) -> None:
    """On a drive that takes many times as long as computing a layer anew."""
    drive = Drive()
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = 5e6
    model = make("llama", use_cache=use_cache)
    with session_for(model, drive=drive, activation=1000 * KIB, default=Placement.AUTO) as session:
        assert_same_history(train("llama", model, steps=5), plain("llama", steps=5))
        assert any(record.recomputed_scopes for record in session.report())


def shared_keys() -> Any:
    """Gemma 4, whose last layers read the keys and values that earlier ones hand on in a dict."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **{**DECODER, **LANGUAGE},
        head_dim=16,
        global_head_dim=16,
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=LANGUAGE["vocab_size"],
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        use_cache=False,
    )
    return transformers.Gemma4ForCausalLM(config).train()


@pytest.mark.parametrize("placement", [Placement.RECOMPUTE, Placement.RECOMPUTE_OFFLOAD])
def test_layers_that_share_keys_and_values_are_recomputed(placement: Placement) -> None:
    if not hasattr(transformers, "Gemma4ForCausalLM"):
        pytest.skip("needs a newer transformers")

    def gradients(*, session: bool) -> list[Any]:
        model = shared_keys()
        tokens = torch.arange(32).view(2, 16) + 1
        with session_for(model, default=placement) if session else nullcontext():
            model(input_ids=tokens, labels=tokens).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    pairs = zip(gradients(session=True), gradients(session=False), strict=True)
    assert all(same_bits(one, other) for one, other in pairs)


# Checkpointing by the framework


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("placement", ["offload", "offload-remat", "auto", "recompute"])
def test_checkpointed_layers_are_told_and_their_inputs_travel(placement: str, use_reentrant: bool) -> None:
    model = make("llama")
    with session_for(model, in_flight=16 * KIB, default=Placement(placement)) as session:
        # After the model was attached, as a trainer does it.
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        with pytest.warns(UserWarning, match=f"{CHECKPOINTING} 3 of the 3 layers") as told:
            assert_same_history(train("llama", model), plain("llama"))
        report = session.report()
    assert len(told) == 1
    inputs = 4 * 24 * 64 * 4
    assert len(report) == STEPS
    assert {record.scopes for record in report} == {3}
    if placement == "offload":
        assert all(0 < record.offloaded_bytes <= 3 * inputs for record in report)


@pytest.mark.parametrize("default", [Placement.OFFLOAD, Placement.RECOMPUTE])
def test_a_loss_that_caches_gradients_is_told(default: Placement) -> None:
    """It runs a batch without a graph, and in the backward pass of its loss once more, in mini-batches."""

    def gradients_of(model: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
        with torch.no_grad():
            cache = model(x)
        cache.requires_grad_()
        loss = cache.pow(2).sum()
        (cached,) = torch.autograd.grad(loss, cache)

        def run_again(_: Tensor) -> None:
            with torch.enable_grad():
                for part, gradient in zip(x.chunk(2), cached.chunk(2), strict=True):
                    (model(part) * gradient).sum().backward()

        again = loss.detach().requires_grad_()
        again.register_hook(run_again)
        again.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    expected = [gradient.clone() for gradient in gradients_of(model)]
    model.zero_grad()
    with session_for(model, default=default) as session:
        with pytest.warns(UserWarning, match="only within a backward pass") as told:
            found = gradients_of(model)
        assert session.report() == []
    assert len(told) == 1
    assert all(map(torch.equal, found, expected))
    assert len(found) == 6
