"""Experts that are not read one after the other, forward and backward: the same bits all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import (
    EXPERTS,
    LAYERS,
    SIZES,
    Training,
    compare,
    frozen_parts,
    layers_of,
    nbytes_of,
    offloaded,
    peft,
    quiet,
    transformers,
)
from covering import in_turn
from models import assert_same_tensors
from test_experts import BYTES, IMPLEMENTATIONS, Model, fused, words
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def loss_of(model: nn.Module, number: int, count: int = 2) -> Tensor:
    return model(words(number, count)).pow(2).mean()


def plainly(model: Model) -> None:
    for number in range(3):
        loss_of(model, number).backward()


def with_passes_in_flight(model: Model) -> None:
    """Each has picked other experts; backward comes in another order."""
    losses = [loss_of(model, number) for number in range(4)]
    for number in (2, 0, 3, 1):
        losses[number].backward()


def with_an_evaluation_between(model: Model) -> None:
    loss = loss_of(model, 0)
    with torch.no_grad():
        for number in range(1, 4):
            model(words(number))
    loss.backward()


def with_a_backward_that_is_repeated(model: Model) -> None:
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    loss_of(model, 1).backward()
    loss.backward()


def with_few_and_all(model: Model) -> None:
    for number, count in enumerate((1, 64, 2, 64, 1, 1)):
        loss_of(model, number, count).backward()


def with_an_error(model: Model) -> None:
    def fail(*_: object) -> None:
        raise InterruptedError

    for module in (model.layers[2].norm, model.layers[1].mixture.experts[0]):
        handles = [module.register_forward_hook(fail)]
        for number in range(8):
            try:
                loss_of(model, number, 8)
            except InterruptedError:
                break
        handles.pop().remove()
    plainly(model)


def in_pieces(model: Model) -> None:
    x = torch.linspace(-1, 1, 2 * 48).reshape(2, 48).requires_grad_()
    model.layers[1](x).sum().backward()
    model.layers[2].mixture(x).sum().backward()
    model.layers[3].mixture.experts[5](x).sum().backward()
    assert x.grad is not None
    model.embedding.weight.grad = torch.zeros_like(model.embedding.weight)
    model.embedding.weight.grad[:2] = x.grad


def without_being_called(model: Model) -> None:
    """As implementations do that stack the weights of experts."""

    def stacked(mixture: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        down = (
            torch.stack([expert.down.weight for expert in mixture.experts]).float().reshape(EXPERTS, 48, -1)
        )
        return output + 0.1 * (arguments[0] @ down.sum(0) @ down[3].T).mean(1, keepdim=True)

    handles = [layer.mixture.register_forward_hook(stacked) for layer in model.layers]
    plainly(model)
    for handle in handles:
        handle.remove()


def with_autocast(model: Model) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, 0, 4)
    loss.float().backward()


def with_an_expert_called_twice(model: Model) -> None:
    def again(expert: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        return output + expert.forward(2 * arguments[0])

    handles = [
        layer.mixture.experts[n].register_forward_hook(again) for layer in model.layers for n in range(8)
    ]
    plainly(model)
    for handle in handles:
        handle.remove()


WAYS = (
    *(plainly, with_passes_in_flight, with_an_evaluation_between, with_a_backward_that_is_repeated),
    *(with_few_and_all, with_an_error, in_pieces, without_being_called, with_autocast),
    *(with_an_expert_called_twice,),
)


def four_bits(model: Model) -> Model:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for layer in model.layers:
        for expert in layer.mixture.experts:
            for name, linear in list(expert.named_children()):
                sizes = linear.in_features, linear.out_features
                packed = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32)
                packed.load_state_dict(linear.state_dict())
                packed.requires_grad_(requires_grad=False)
                setattr(expert, name, packed.to("cpu"))
    return model


KINDS: dict[str, tuple[Callable[[], Model], dict[str, Any]]] = {
    "fp32": (Model, {}),
    "checkpointed": (lambda: Model(is_checkpointed=True), {}),
    "nf4": (lambda: four_bits(Model()), {"min_tensor_bytes": "1KiB"}),
    "recompute": (Model, {"default": "recompute"}),
    "offload": (Model, {"default": "offload"}),
    "a half": (Model, {"weights": {"frozen": "offload-50%"}}),
}


@pytest.mark.filterwarnings("ignore:.*outside of its layer")
@pytest.mark.parametrize(("kind", "way"), in_turn(list(KINDS), WAYS))
def test_experts_in_a_list(kind: str, way: Callable[[Model], None], tmp_path: Path) -> None:
    make, settings = KINDS[kind]
    plain, found = make(), make()
    way(plain)
    optimizer = torch.optim.SGD([each for each in found.parameters() if each.requires_grad], lr=0.1)
    with offloaded(found, tmp_path, **{"min_tensor_bytes": "4KiB", **settings}) as session:
        assert session.weights is not None
        way(found)
        optimizer.step()  # a session wants one
        assert session.weights.resident_bytes <= 2 * EXPERTS * BYTES
    assert_same_tensors(
        *([each.grad for each in model.parameters() if each.grad is not None] for model in (found, plain))
    )


def loss_of_words(training: Training, number: int) -> Tensor:
    ids = words(number, 3)[None]
    loss: Tensor = training.model(input_ids=ids, labels=ids).loss
    return loss


def fused_with_passes_in_flight(training: Training) -> None:
    torch.manual_seed(0)
    losses = [loss_of_words(training, number) for number in range(3)]
    for number in (1, 0, 2):
        losses[number].backward()
    training.note(losses)
    training.step(0)


def fused_with_an_evaluation_between(training: Training) -> None:
    torch.manual_seed(0)
    loss = loss_of_words(training, 0)
    training.evaluate()
    training.generate()
    loss.backward()
    training.step(0)


def fused_with_checkpoints(training: Training) -> None:
    with quiet():
        training.model.gradient_checkpointing_enable({"use_reentrant": False})
    training.model.enable_input_require_grads()
    for number in range(2):
        training.step(number, rows=1, length=3)


def fused_with_all_experts(training: Training) -> None:
    for length in (48, 2, 48, 1):
        training.step(length, rows=1, length=length)


def fused_with_autocast(training: Training) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        training.step(0, rows=1, length=3)
        training.step(1, rows=1, length=3)


def fused_alone(training: Training) -> None:
    experts = layers_of(training.model)[1].mlp.experts
    x = torch.linspace(-1, 1, 3 * 64).reshape(3, 64).requires_grad_()
    picked = torch.tensor([[0, 3], [3, 5], [0, 5]])
    y = experts(x, picked, torch.full((3, 2), 0.5))
    y.pow(2).sum().backward()
    assert x.grad is not None
    training.note([y, x.grad])
    training.step(0)


def fused_with_a_loss_of_the_router(training: Training) -> None:
    """Gradients come to a layer's router from the loss as well as from the layer above."""
    training.model.config.output_router_logits = True
    training.model.config.router_aux_loss_coef = 0.5
    for number in range(2):
        training.step(number, rows=1, length=3)


FUSED = (
    *(fused_with_passes_in_flight, fused_with_an_evaluation_between, fused_with_checkpoints),
    *(fused_with_all_experts, fused_with_autocast, fused_alone),
    *(fused_with_a_loss_of_the_router,),
)


@pytest.mark.filterwarnings("ignore:.*outside of its layer")
@pytest.mark.parametrize(("implementation", "way"), in_turn(IMPLEMENTATIONS, FUSED))
def test_experts_in_one_parameter(
    implementation: str, way: Callable[[Training], None], tmp_path: Path
) -> None:
    compare(lambda: fused("Mixtral", implementation), way, tmp_path)


MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
# With a shared expert, a dense first layer, and groups of experts
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
ALL_TOKENS = {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "head_dim": 16}
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 16},
    # With biases, and the other way round
    "GptOss": {"num_local_experts": 8, "head_dim": 16, "layer_types": ["full_attention"] * LAYERS},
    "DeepseekV3": GROUPS | MLA | {"moe_intermediate_size": 64, "num_key_value_heads": 4},
    "Olmoe": {"num_experts": 8},
    "FlexOlmo": {"num_experts": 8},
    "Phimoe": {"num_local_experts": 8},
    "Llama4": ALL_TOKENS,
}


@pytest.mark.parametrize(("family", "implementation"), in_turn(list(OTHERS), IMPLEMENTATIONS[:2]))
def test_other_families(family: str, implementation: str, tmp_path: Path) -> None:
    """Adapters on attention, on a base whose experts are slices of one parameter."""

    def program(training: Training) -> None:
        for number in range(2):
            training.step(number, rows=1, length=3)
        training.evaluate()

    records = compare(lambda: made(family, implementation), program, tmp_path)
    frozen_bytes = nbytes_of(frozen_parts(made(family, implementation)))
    assert family == "Llama4" or 0 < (records[-1].weights_read_bytes or 0) < 1.5 * frozen_bytes


def made(family: str, implementation: str) -> Any:
    torch.manual_seed(0)
    name = f"{family}TextConfig" if family == "Llama4" else f"{family}Config"
    config = getattr(transformers, name)(**{**SIZES, "num_experts_per_tok": 2, **OTHERS[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.set_experts_implementation(implementation)
    with quiet():
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj"])).train()
