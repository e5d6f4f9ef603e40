"""Optimizers, a model for them, and two trainings that must give the same bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from models import same_bits
from torch import Tensor, nn, optim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Make = Callable[[Iterable[Any]], optim.Optimizer]

SUB_GROUP = "16KiB"
"""So small that the model has ten sub-groups, and a parameter that is cut."""

MAKERS: dict[str, Make] = {
    "adam": lambda parameters: optim.Adam(parameters, lr=1e-2, weight_decay=0.1, foreach=False),
    "adam-foreach": lambda parameters: optim.Adam(parameters, lr=1e-2, amsgrad=True, foreach=True),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adamw-foreach": lambda parameters: optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw-fused": lambda parameters: optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: optim.SGD(parameters, lr=1e-3),
    "sgd-momentum": lambda parameters: optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True),
    "sgd-fused": lambda parameters: optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
    "rmsprop": lambda parameters: optim.RMSprop(parameters, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=1e-2),
    "adagrad-fused": lambda parameters: optim.Adagrad(parameters, lr=1e-2, fused=True),
    "adadelta": lambda parameters: optim.Adadelta(parameters, lr=1e-1),
    "adamax": lambda parameters: optim.Adamax(parameters, lr=1e-2),
    "nadam": lambda parameters: optim.NAdam(parameters, lr=1e-2),
    "radam": lambda parameters: optim.RAdam(parameters, lr=1e-2),
    "asgd": lambda parameters: optim.ASGD(parameters, lr=1e-3),
    "rprop": lambda parameters: optim.Rprop(parameters, lr=1e-3),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=1e-2),
}


class Network(nn.Module):
    """Parameters of many kinds: an embedding larger than a sub-group, vectors, a scalar, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(40, 40))
        self.head = nn.Linear(48, 5)

    def forward(self, numbers: Tensor, image: Tensor) -> Tensor:
        x = self.embed(numbers)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return F.cross_entropy(self.head(x).float().flatten(0, -2), numbers.flatten() % 5) + (
            self.convolution(image).float().square().mean()
        )


@dataclass
class Training:
    make: Make
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    model: Network = field(init=False)
    optimizer: optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(7)
            self.model = Network().to(self.device, self.dtype)
        self.optimizer = self.make(self.model.parameters())

    def loss(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(301, (3, 7), generator=generator)
        image = torch.randn(2, 3, 6, 6, generator=generator).to(self.dtype)
        loss: Tensor = self.model(numbers.to(self.device), image.to(self.device))
        return loss

    def backward(self, seed: int) -> Tensor:
        loss = self.loss(seed)
        loss.backward()
        return loss.detach()

    def step(self, seed: int) -> None:
        self.optimizer.zero_grad()
        self.backward(seed)
        self.optimizer.step()


class Given(Training):
    """A training whose gradients are random numbers, the same on every device."""

    def step(self, seed: int) -> None:
        self.gradients(seed)
        self.optimizer.step()

    def gradients(self, seed: int) -> None:
        torch.manual_seed(seed)
        for each in self.model.parameters():
            gradient = torch.empty_like(each.detach())  # in memory like the parameter, as autograd has it
            gradient.copy_(torch.randn(each.shape))
            each.grad = gradient if each.requires_grad and each is not self.model.unused else None

    def parameter(self, name: str) -> Tensor:
        return dict(self.model.named_parameters())[name].detach().cpu()


class Mixed(Given):
    """A model in bf16, and an optimizer over copies of its parameters in fp32, its masters."""

    def __init__(self, make: Make | str, device: str = "cpu", model: nn.Module | None = None) -> None:
        make = MAKERS[make] if isinstance(make, str) else make
        super().__init__(make, torch.bfloat16, device)
        self.model = self.model if model is None else model  # type: ignore[assignment]
        self.masters = {each.detach().clone().float(): each for each in self.model.parameters()}
        self.optimizer = make(self.masters)

    def gradients(self, seed: int) -> None:
        super().gradients(seed)
        for master, parameter in self.masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()

    def step(self, seed: int, *, copies: bool = True) -> None:
        """One update, which copies the masters that are offloaded; here the others are."""
        self.gradients(seed)
        nn.utils.clip_grad_norm_(self.masters, 0.5)
        self.optimizer.step()
        for master, parameter in self.masters.items():
            if copies or master.numel() == 1:
                parameter.data.copy_(master)


def pair(
    make: Make | str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Training, Training]:
    made = MAKERS[make] if isinstance(make, str) else make
    return Training(made, dtype, device), Training(made, dtype, device)


def train(
    found: Training, expected: Training, *seeds: int, before: Callable[[Training, int], object] | None = None
) -> None:
    for seed in seeds:
        for training in (found, expected):
            if before is not None:
                before(training, seed)
            training.step(seed)


def policy(
    directory: Path,
    kind: str = "file",
    *,
    states: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    place = {"kind": kind, "directories": [str(directory)] if kind == "file" else []}
    settings["states"] = {"sub_group_bytes": SUB_GROUP} | (states or {})
    return {"store": place | (store or {}), **settings}


def assert_same(found: Training, expected: Training) -> None:
    pairs = zip(found.model.named_parameters(), expected.model.parameters(), strict=True)
    assert [name for (name, a), b in pairs if not same_bits(a.detach(), b.detach())] == []
    assert_same_state_dicts(found.optimizer.state_dict(), expected.optimizer.state_dict())


def assert_same_state_dicts(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        assert list(found["state"][number]) == list(entry)
        for key, value in entry.items():
            other = found["state"][number][key]
            if isinstance(value, Tensor):
                assert type(other) is Tensor
                assert same_bits(other.cpu(), value.cpu()), (number, key)  # what is away is read to the host
            else:
                assert other == value, (number, key)


def copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as it comes from a file: it shares no tensor with an optimizer."""
    states = {
        number: {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
        for number, entry in state_dict["state"].items()
    }
    return state_dict | {"state": states}


def go_on_from(found: Given, expected: Given) -> None:
    for name, each in expected.model.named_parameters():
        each.data.copy_(found.parameter(name))
    states = copied(found.optimizer.state_dict())["state"]
    groups = expected.optimizer.state_dict()["param_groups"]
    expected.optimizer.load_state_dict({"state": states, "param_groups": groups})
