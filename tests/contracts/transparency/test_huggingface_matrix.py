"""Families of Hugging Face's, at their defaults but small, as people train them: the bits of plain runs.

Every two of family, way of training and placement in the full run of the tests; otherwise each family once,
with ways and placements in turn.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import test_huggingface as sizes
import torch
from covering import EVERYTHING, combinations
from harness import KIB, PLACEMENTS, session_for
from models import History, assert_same_history
from test_huggingface import DECODER, LANGUAGE, batch_of, quiet, transformers
from torch import nn

from tba_offload import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["quiet"]

STEPS = 2
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def gemma2() -> nn.Module:
    """Its attention and its logits are capped; every other layer looks at a window only."""
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**DECODER, head_dim=16, query_pre_attn_scalar=16, sliding_window=8)
    )


def phi3() -> nn.Module:
    """Queries, keys and values come from one projection, gate and up from another."""
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**DECODER))


def opt() -> nn.Module:
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 128}
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(**small, **LANGUAGE, max_position_embeddings=64, word_embed_proj_dim=64)
    )


def gpt_neox() -> nn.Module:
    """Attention and MLP run side by side."""
    small = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**small))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, **MOE))


def qwen2_moe() -> nn.Module:
    """With a shared expert beside those that tokens are routed to."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(**DECODER, **experts, shared_expert_intermediate_size=64)
    )


def mamba() -> nn.Module:
    """No attention: a scan over states."""
    small = {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 8}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**small, **LANGUAGE))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **sizes.MODELS,
    **{make.__name__: make for make in (gemma2, phi3, opt, gpt_neox, mixtral, qwen2_moe, mamba)},
}
LORA = {"r": 4, "lora_dropout": 0.1}
EVERYWHERE: dict[str, Any] = {"target_modules": "all-linear"}
ADAPTED: dict[str, dict[str, Any]] = {
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "mixtral": {"target_modules": ["q_proj", "v_proj"]},
    "mamba": {"target_modules": ["in_proj", "x_proj"]},  # peft refuses the others
}
WAYS = ("defaults", "lora", "autocast", "accumulation", "generation")


def cases() -> list[tuple[str, str, str]]:
    if EVERYTHING:
        return combinations(list(FAMILIES), WAYS, PLACEMENTS)
    turns = zip(FAMILIES, itertools.cycle(WAYS), itertools.cycle(PLACEMENTS), strict=False)
    return list(turns)


def make(family: str, way: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = FAMILIES[family]().train()
    if way == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**LORA, **ADAPTED.get(family, EVERYWHERE)))
    return model


def train(family: str, way: str, model: Any) -> History:
    """A few steps of AdamW, in a loop that knows of no session."""
    history = History()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for number in range(STEPS):
        torch.manual_seed(number)
        for micro_batch in range(3 if way == "accumulation" else 1):
            with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext():
                loss = model(**batch_of(family, 10 * number + micro_batch)).loss
            loss.backward()
            history.losses.append(loss.detach())
        history.gradients += [each.grad.clone() for each in trained if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if way == "generation":
            use(family, model, number)
    history.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    history.random_states = [torch.get_rng_state()]
    return history


def use(family: str, model: Any, number: int) -> None:
    """What happens between steps: some words are generated, or a model that has none is evaluated."""
    batch = {name: tensor[:1] for name, tensor in batch_of(family, number).items() if name != "labels"}
    model.eval()
    with torch.no_grad():
        if family in {"bert", "vit"}:
            model(**batch)
        else:
            model.generate(**batch, max_new_tokens=3, do_sample=False)
    model.train()


@functools.cache
def plain(family: str, way: str) -> History:
    return train(family, way, make(family, way))


@pytest.mark.filterwarnings(f"ignore:{sizes.CACHE}", "ignore:the budget of .* cannot be met")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`is_gradient_check:FutureWarning")
@pytest.mark.parametrize(("family", "way", "placement"), cases())
def test_the_bits_are_those_of_the_plain_run(family: str, way: str, placement: str) -> None:
    assert_same_history(offloaded(family, way, placement), plain(family, way))


def offloaded(family: str, way: str, placement: str) -> History:
    model = make(family, way)
    budget = {"activation": 600 * KIB} if placement == "auto" else {}
    with session_for(model, in_flight=128 * KIB, default=Placement(placement), **budget) as session:
        found = train(family, way, model)
        report = session.report()
    assert len(report) == STEPS
    assert all(record.scopes > 0 for record in report)
    if placement.startswith("recompute"):
        assert all(record.recomputed_scopes == record.scopes for record in report)
    elif placement != "keep":
        assert report[0].offloaded_bytes > 0
    return found
