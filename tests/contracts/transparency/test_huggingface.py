"""Models of Hugging Face's at their defaults, but small: the bits of plain runs, caches, checkpointing.

Every two of family, way of training and placement in the full run of the tests; otherwise each family once,
with ways and placements in turn.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from covering import EVERYTHING, combinations, of_which
from harness import KIB, PLACEMENTS, Drive, config_for, session_for
from later import Later
from models import History, assert_same_history, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tba_offload import Placement
from tba_offload.config.policy import Rule
from tba_offload.errors import UnsupportedError
from tba_offload.layers.find import find_layers
from tba_offload.session import Session, World

if TYPE_CHECKING:
    from collections.abc import Iterator

transformers = Later("transformers")

CACHE = "the model fills a key-value cache"
STEPS = 2
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LANGUAGE = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = SIZES | {"intermediate_size": 128}
TEXT = WIDE | LANGUAGE | {"max_position_embeddings": 64}
DECODER = TEXT | {"num_key_value_heads": 2}
GPT2 = LANGUAGE | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5 = LANGUAGE | {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "decoder_start_token_id": 0}
CAPPED = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
OPT = {"ffn_dim": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 64}
MAMBA = LANGUAGE | {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", DECODER),
    "qwen2": ("Qwen2", "ForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "mistral": ("Mistral", "ForCausalLM", DECODER | {"sliding_window": 8}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "bert": ("Bert", "ForMaskedLM", TEXT),
    "t5": ("T5", "ForConditionalGeneration", T5 | {"num_layers": 2, "num_decoder_layers": 2}),
    "vit": ("ViT", "ForImageClassification", WIDE | {"image_size": 32, "patch_size": 8, "num_labels": 10}),
    # Attention and logits are capped; every other layer looks at a window only.
    "gemma2": ("Gemma2", "ForCausalLM", DECODER | CAPPED),
    "gemma3": ("Gemma3", "ForCausalLM", DECODER | CAPPED),
    "qwen3": ("Qwen3", "ForCausalLM", DECODER | {"head_dim": 16}),
    # Queries, keys and values come from one projection, gate and up from another.
    "phi3": ("Phi3", "ForCausalLM", DECODER),
    "opt": ("OPT", "ForCausalLM", SIZES | LANGUAGE | OPT),
    # Attention and MLP run side by side.
    "gpt_neox": ("GPTNeoX", "ForCausalLM", TEXT),
    "mixtral": ("Mixtral", "ForCausalLM", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # With a shared expert beside those that tokens are routed to.
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", DECODER | EXPERTS | {"shared_expert_intermediate_size": 64}),
    # No attention: a scan over states.
    "mamba": ("Mamba", "ForCausalLM", MAMBA),
}
"""Family, task and sizes of each kind of model."""

CONFIGS = {"Gemma3": "Gemma3TextConfig"}
"""Configurations whose names do not follow from the family."""

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


CACHING = ("llama", "qwen2", "mistral", "gpt2", "t5")
"""They fill a cache in training too, unless they are told not to."""

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


def make(family: str, way: str = "defaults", **settings: object) -> Any:
    torch.manual_seed(0)
    name, task, sizes = FAMILIES[family]
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**sizes)
    model: Any = getattr(transformers, name + task)(config).train()
    for part in model.modules():  # T5's decoder has a configuration of its own
        for name, value in settings.items() if hasattr(part, "config") else ():
            setattr(part.config, name, value)
    if way == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**LORA, **ADAPTED.get(family, EVERYWHERE)))
    return model


def batch_of(kind: str, number: int) -> dict[str, Tensor]:
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


def train(family: str, model: Any, way: str = "defaults", *, steps: int = STEPS) -> History:
    history = History()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for number in range(steps):
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
    batch = {name: tensor[:1] for name, tensor in batch_of(family, number).items() if name != "labels"}
    model.eval()
    with torch.no_grad():
        if family in {"bert", "vit"}:
            model(**batch)
        else:
            model.generate(**batch, max_new_tokens=3, do_sample=False)
    model.train()


@functools.cache
def plain(family: str, way: str = "defaults", *, steps: int = STEPS) -> History:
    return train(family, make(family, way), way, steps=steps)


@pytest.mark.filterwarnings(f"ignore:{CACHE}", "ignore:the budget of .* cannot be met")
@pytest.mark.filterwarnings("ignore:`is_gradient_check:FutureWarning")
@pytest.mark.parametrize(("family", "way", "placement"), cases())
def test_the_bits_are_those_of_the_plain_run(family: str, way: str, placement: str) -> None:
    model = make(family, way)
    budget = {"activation": 600 * KIB} if placement == "auto" else {}
    with session_for(model, in_flight=128 * KIB, default=Placement(placement), **budget) as session:
        assert_same_history(train(family, model, way), plain(family, way))
        report = session.records
    assert len(report) == STEPS
    assert all(record.scopes > 0 for record in report)
    if placement.startswith("recompute"):
        assert all(record.recomputed_scopes == record.scopes for record in report)
    elif placement != "keep":
        assert report[0].offloaded_bytes > 0


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
        assert {record.recomputed_scopes for record in session.records} == {4 if kind == "t5" else 3}


@pytest.mark.filterwarnings(f"ignore:{CACHE}")
@pytest.mark.parametrize("use_cache", [False, True])
def test_the_planner_recomputes_layers_also_if_they_fill_a_cache(use_cache: bool) -> None:
    """On a drive that takes many times as long as computing a layer anew."""
    drive = Drive()
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = 2e6
    model = make("llama", use_cache=use_cache)
    with session_for(model, drive=drive, activation=1000 * KIB, default=Placement.AUTO) as session:
        assert_same_history(train("llama", model, steps=5), plain("llama", steps=5))
        assert any(record.recomputed_scopes for record in session.records)


def shared_keys() -> Any:
    """Gemma 4, whose last layers read the keys and values that earlier ones hand on in a dict."""
    torch.manual_seed(0)
    sizes = {"head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 1, "sliding_window": 8}
    sizes |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": LANGUAGE["vocab_size"]}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    settings: dict[str, Any] = {**DECODER, **LANGUAGE, **sizes, "layer_types": kinds, "use_cache": False}
    config = transformers.Gemma4TextConfig(**settings)
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


CHECKPOINTED = ("llama", "qwen3", "gemma3", "gpt2", "t5", "mixtral")


@functools.cache
def checkpointed(family: str, *, use_reentrant: bool) -> History:
    """Return the result of training with the checkpointing of the framework.

    T5's layers share the bias of positions, whose gradients a reentrant checkpoint sums in another order.
    """
    model = make(family)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant and family != "t5"})
    return train(family, model)


def flags(session: Session) -> list[bool]:
    return [vars(layer.module)["gradient_checkpointing"] for layer in session.layers]


def functions(session: Session) -> list[Any]:
    return [vars(layer.module).get("_gradient_checkpointing_func") for layer in session.layers]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", of_which(CHECKPOINTED, "llama", "t5", "mixtral"))
def test_a_session_takes_over_the_checkpointing(
    family: str, use_reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(family)
    with caplog.at_level("INFO", "tba_offload"), session_for(model, in_flight=16 * KIB) as session:
        # After the model was attached, as a trainer does it.
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        before = functions(session)
        assert_same_history(train(family, model), checkpointed(family, use_reentrant=use_reentrant))
        count, report = len(session.layers), session.records
        assert not any(map(operator.is_, functions(session), before))
    assert all(map(operator.is_, functions(session), before))
    assert all(flag is True for flag in flags(session))
    assert [(record.scopes, record.recomputed_scopes) for record in report] == [(count, count)] * STEPS
    assert all(0 < record.offloaded_bytes < 2 * count * 4 * 24 * 64 * 4 for record in report)
    assert sum(f"{count} of {count} layers ({SWITCH})" in line for line in caplog.messages) == 1


SWITCH = "gradient_checkpointing"
TAKEN = {
    "keep": "recompute",
    "offload": "recompute-offload",
    "offload-50%": "recompute-offload",
    "offload-remat": "recompute-offload",
    "recompute": "recompute",
    "recompute-except-attention": "recompute-except-attention",
    "auto": "auto",
}


@pytest.mark.parametrize("placement", TAKEN)
def test_the_placements_of_checkpointed_layers(placement: str) -> None:
    """Every second layer is checkpointed; the others have the placement of the policy."""
    model = make("llama")
    model.activation_checkpointing_enable(every_n_layers=2)
    # TRL's DPOTrainer sets the switch between forward and backward.
    model.register_forward_hook(lambda *_: model.activation_checkpointing_enable(every_n_layers=2))
    with session_for(model, default=Placement(placement)) as session:
        assert list(session.plan.placements) == [TAKEN[placement], placement, TAKEN[placement]]
        assert_same_history(train("llama", model), plain("llama"))
        model.activation_checkpointing_disable()
    assert flags(session) == [False] * 3  # what the program has set stays


def test_the_program_switches_checkpointing_off_and_on_while_a_session_is_open() -> None:
    """The layers then have the placement of the policy again; the bits are those without a session."""

    def trained(session: Session | None) -> list[History]:
        history = []
        for use in (model.activation_checkpointing_enable, model.activation_checkpointing_disable):
            for _ in range(2):
                use()
                history.append(train("llama", model, steps=1))
                if session is not None:
                    is_on = use == model.activation_checkpointing_enable
                    assert set(session.plan.placements) == {"recompute-offload" if is_on else "offload"}
                    assert session.records[-1].recomputed_scopes == (3 if is_on else 0)
        return history

    model = make("llama", use_cache=False)
    expected = trained(None)
    model = make("llama", use_cache=False)
    with session_for(model) as session:
        for found, plain_one in zip(trained(session), expected, strict=True):
            assert_same_history(found, plain_one)


@pytest.mark.parametrize("default", ["auto", "offload"])
def test_a_late_switch_where_several_ranks_plan_together(default: str) -> None:
    """Plans go on if placements do not change; else the switch is refused by name."""
    model, calls = make("llama", use_cache=False), []

    def agree(proposed: dict[str, Placement], need: tuple[float, float]) -> dict[str, Placement]:
        calls.append(need)
        return proposed

    stack = find_layers(model)
    world = World(tuple(layer.id for layer in stack.layers), rank=0, ranks=2, run="run", agree=agree)
    rules = (Rule("0", Placement(default)),)
    config = config_for(default=Placement.AUTO, rules=rules)
    with Session(stack, [model], config, world=world, measure_memory=False) as session:
        train("llama", model, steps=1)
        model.activation_checkpointing_enable()
        with (
            nullcontext()
            if default == "auto"
            else pytest.raises(UnsupportedError, match="several ranks cannot switch checkpointing")
        ):
            train("llama", model, steps=3)
        assert len(session.records) == (4 if default == "auto" else 1)
    assert calls or default != "auto"


def test_a_copy_of_an_attached_model_is_checkpointed() -> None:
    model = make("llama")
    model.activation_checkpointing_enable()
    with session_for(model):
        copied = copy.deepcopy(model)
    assert [layer._gradient_checkpointing_func.keywords for layer in copied.model.layers] == [
        {"use_reentrant": False}
    ] * 3


def test_selective_checkpointing_is_not_taken_over() -> None:
    model = make("llama")
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    with session_for(model, in_flight=16 * KIB) as session:
        assert all(flags(session))
        assert set(session.plan.placements) == {"offload"}
        assert_same_history(train("llama", model), plain("llama"))


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
        with pytest.warns(UserWarning, match="inside a backward pass") as told:
            found = gradients_of(model)
        assert session.records == []
    assert len(told) == 1
    assert all(map(torch.equal, found, expected))
    assert len(found) == 6
