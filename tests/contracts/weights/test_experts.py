"""Of the experts of a layer, those that the router picks are read, and the others stay where they are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import EXPERTS, LAYERS, VOCABULARY, Training, compare, layers_of, make, offloaded, peft, quiet
from covering import of_which
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
