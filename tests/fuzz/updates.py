"""The optimizers: all of ``torch.optim`` that run on a CPU, in all their implementations."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn, optim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .choices import Program

OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 1e-2}),
    "sgd with momentum": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {"lr": 1e-2}),
    "amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "adamw": (optim.AdamW, {"lr": 1e-2}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}),
    "adagrad": (optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (optim.Adadelta, {"lr": 1e-1}),
    "adamax": (optim.Adamax, {"lr": 1e-2}),
    "nadam": (optim.NAdam, {"lr": 1e-2}),
    "radam": (optim.RAdam, {"lr": 1e-2}),
    "asgd": (optim.ASGD, {"lr": 1e-3}),
    "rprop": (optim.Rprop, {"lr": 1e-3}),
    "adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "muon": (optim.Muon, {"lr": 1e-2}),
}


def make(name: str, parameters: Iterable[Any], program: Program) -> optim.Optimizer:
    kind, settings = OPTIMIZERS[name]
    settings = dict(settings)
    known = inspect.signature(kind).parameters
    if program.implementation != "default":
        flag = program.implementation.replace("loop", "foreach")
        if flag in known:
            settings[flag] = program.implementation != "loop"
    return kind(parameters, **settings)


def make_all(model: nn.Module, late: list[nn.Parameter], program: Program) -> list[optim.Optimizer]:
    """One for all parameters but late ones, or one for each half; the rest gets an optimizer of its own."""
    parameters = [each for each in model.parameters() if not any(each is other for other in late)]
    sparse = [each for each in parameters if is_sparse(each, model, program)]
    dense = [each for each in parameters if not is_sparse(each, model, program)]
    made = [optim.SparseAdam(sparse)] if sparse else []
    if program.optimizer == "muon":
        made.append(make("adamw", [each for each in dense if each.dim() != 2], program))
        dense = [each for each in dense if each.dim() == 2]
    half = max(len(dense) // 2, 1)
    parts = [dense[:half], dense[half:]]
    if program.groups == "one" or not parts[1]:
        return [make(program.optimizer, dense, program), *made]
    if program.groups == "two":
        groups = [{"params": parts[0]}, {"params": parts[1], "lr": 1e-3, "weight_decay": 0.2}]
        return [make(program.optimizer, groups, program), *made]
    return [*(make(program.optimizer, part, program) for part in parts), *made]


def is_sparse(parameter: Tensor, model: nn.Module, program: Program) -> bool:
    return program.embedding == "sparse embedding" and parameter is model.embed.weight
