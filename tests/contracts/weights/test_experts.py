"""Of the experts of a layer, those that the router picks are read, and the others stay where they are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import (
    EXPERTS,
    LAYERS,
    SIZES,
    VOCABULARY,
    Training,
    compare,
    frozen_parts,
    layers_of,
    make,
    nbytes_of,
    offloaded,
    peft,
    quiet,
    transformers,
)
from covering import in_turn, of_which
from models import assert_same_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOST = 1.3
"""Bytes read over the bytes of the experts that ran."""

WIDTH, INNER, TOP = 48, 96, 2

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """As Mixtral was before transformers 5: a list of experts, of which those run that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shares, picked = self.gate(x).softmax(-1).topk(TOP)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(picked == number)
            if len(token):
                ran = expert(x[token]) * shares[token, place, None]
                out = out.index_add(0, token, ran.to(out.dtype))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture()
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.mixture.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.mixture(y) + self.up(self.down(y))


class Model(nn.Module):
    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        self.is_checkpointed = is_checkpointed

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            is_again = self.is_checkpointed and self.training
            x = checkpoint(layer, x, use_reentrant=False) if is_again else layer(x)
        return self.head(x)


BYTES = 3 * WIDTH * INNER * 4
"""Of one expert."""


class Router:
    """What the routers of a model have picked, in forward and in backward passes, as hooks on them see it."""

    def __init__(self, routers: list[nn.Module], picked_of: Callable[[Any], Tensor]) -> None:
        self.ran: Counter[str] = Counter()
        self.most = 0
        self._picked_of = picked_of
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, _module: nn.Module, _arguments: object, output: Any) -> None:
        picked = len(self._picked_of(output).unique())
        self.ran["forward"] += picked
        self.most = max(self.most, picked)

    def begin(self) -> None:
        self.ran.clear()


def top_of_logits(logits: Tensor) -> Tensor:
    return logits.detach().topk(TOP).indices


def words(number: int, count: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(number))


def steps_of(model: nn.Module, number: int, count: int) -> list[Tensor]:
    loss = model(words(number, count)).pow(2).mean()
    loss.backward()
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each -= 0.05 * each.grad
    model.zero_grad()
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_experts_in_a_list_are_read_when_they_run(is_checkpointed: bool, count: int, tmp_path: Path) -> None:
    plain, found = (Model(is_checkpointed=is_checkpointed) for _ in range(2))
    router = Router([layer.mixture.gate for layer in found.layers], top_of_logits)
    read = ran = 0
    with offloaded(found, tmp_path, min_tensor_bytes="4KiB") as session:
        assert session.weights is not None
        assert session.weights.nbytes == LAYERS * EXPERTS * BYTES
        for number in range(12):
            router.begin()
            with session.step():
                results = steps_of(found, number, count)
            assert_same_tensors(results, steps_of(plain, number, count))
            if number >= 2:
                # Checkpointing runs routers in backward too; without it backward needs the experts once more.
                ran += router.ran["forward"] * (1 if is_checkpointed else 2)
                read += session.records[-1].weights_read_bytes or 0
    assert ran * BYTES < 0.8 * 10 * 2 * LAYERS * EXPERTS * BYTES  # else this would test nothing
    assert 0 < read <= MOST * ran * BYTES
    assert_same_tensors(found.parameters(), plain.parameters())


def test_experts_in_a_list_that_are_evaluated(tmp_path: Path) -> None:
    plain, found = Model().eval(), Model().eval()
    router = Router([layer.mixture.gate for layer in found.layers], top_of_logits)
    with offloaded(found, tmp_path, min_tensor_bytes="4KiB") as session:
        assert session.weights is not None
        with torch.no_grad():
            session.weights.take()
            for number in range(20):
                assert_same_tensors([found(words(number))], [plain(words(number))])
        read = session.weights.take().read_bytes
        assert read <= MOST * router.ran["forward"] * BYTES
        assert session.weights.resident_bytes <= 2 * router.most * BYTES


# Experts that are slices of one parameter


IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


def fused(family: str, implementation: str) -> Any:
    model = make(family)
    model.base_model.model.set_experts_implementation(implementation)
    return model


def indices(output: tuple[Tensor, ...]) -> Tensor:
    return next(each for each in output if not each.is_floating_point())


def experts_of(model: Any) -> list[nn.Module]:
    return [layer.mlp.experts for layer in layers_of(model)]


def sizes_of(model: Any, least: int) -> tuple[int, int]:
    module = experts_of(model)[0]
    expert = sum(each.nbytes for each in module.parameters()) // EXPERTS
    others = [
        each.nbytes
        for name, each in layers_of(model).named_parameters()
        if not each.requires_grad and ".experts." not in name and each.nbytes >= least
    ]
    return expert, sum(others)


@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", of_which(["Mixtral", "Qwen2Moe"], "Mixtral"))
def test_experts_in_one_parameter_are_read_by_slices(
    family: str, implementation: str, length: int, tmp_path: Path
) -> None:
    plain, found = (Training(fused(family, implementation)) for _ in range(2))
    least = 2048
    expert, others = sizes_of(found.model, least)
    router = Router([layer.mlp.gate for layer in layers_of(found.model)], indices)
    read = ran = 0
    with offloaded(found.model, tmp_path, min_tensor_bytes=f"{least}B") as session:
        assert session.weights is not None
        assert session.weights.nbytes == LAYERS * EXPERTS * expert + others
        for number in range(6):
            router.begin()
            with session.step():
                found.step(number, rows=1, length=length)
            plain.step(number, rows=1, length=length)
            if number:
                ran += 2 * router.ran["forward"]
                read += (session.records[-1].weights_read_bytes or 0) - 2 * others
        for training in (plain, found):
            training.evaluate()
            training.generate()
        assert session.weights.resident_bytes <= 2 * session.weights.nbytes // LAYERS
    assert ran < 0.8 * 5 * 2 * LAYERS * EXPERTS
    assert read <= MOST * ran * expert
    assert_same_tensors(found.results(), plain.results())


@pytest.mark.parametrize("implementation", of_which(IMPLEMENTATIONS, "grouped_mm"))
def test_experts_in_one_parameter_are_read_by_slices_where_words_are_generated(
    implementation: str, tmp_path: Path
) -> None:
    plain, found = (Training(fused("Mixtral", implementation)) for _ in range(2))
    expert, others = sizes_of(found.model, 2048)
    router = Router([layer.mlp.gate for layer in layers_of(found.model)], indices)
    with offloaded(found.model, tmp_path, min_tensor_bytes="2KiB") as session:
        assert session.weights is not None
        for _ in range(2):
            router.begin()
            session.weights.take()
            found.generate()
            plain.generate()
        passes = 3  # the prompt of four words, and two words that are fed back
        assert session.weights.take().read_bytes <= MOST * router.ran["forward"] * expert + passes * others
    assert_same_tensors(found.results(), plain.results())


@pytest.mark.parametrize("implementation", of_which(IMPLEMENTATIONS, "eager"))
def test_experts_in_one_parameter_are_used_from_outside(implementation: str, tmp_path: Path) -> None:
    """As a whole, by slices, and to be written."""

    def program(training: Training) -> None:
        whole = [parameter for experts in experts_of(training.model) for parameter in experts.parameters()]
        training.step(0, rows=1, length=2)
        for parameter in whole:
            training.note([parameter.norm(), parameter[3], parameter[:, 1].sum()])
            training.note([parameter[torch.tensor([1, 5])], parameter.transpose(-2, -1).contiguous()])
        for parameter in whole:
            parameter.data[2].mul_(1.5)
            parameter.data[6] = 0.01
            with torch.no_grad():
                parameter[4] += 0.01
        training.step(1)
        training.note([value for name, value in training.model.state_dict().items() if ".experts." in name])
        training.step(2, rows=1, length=2)

    compare(lambda: fused("Mixtral", implementation), program, tmp_path)


def test_adapters_on_experts_in_one_parameter(tmp_path: Path) -> None:
    """peft adds the product of the adapters to the parameter as a whole."""

    def made() -> Any:
        model = fused("Mixtral", "grouped_mm").unload()
        torch.manual_seed(1)
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
        with quiet():
            return peft.get_peft_model(model, lora)

    def program(training: Training) -> None:
        for number in range(2):
            training.step(number)
        training.evaluate()
        training.note(training.model.state_dict())

    compare(made, program, tmp_path)


# Not one pass after the other, and other families


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
