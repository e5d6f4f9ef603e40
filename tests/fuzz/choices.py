"""What a program may consist of. A line is a choice: first its simplest value, then the others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from .modules import MODULES
from .network import STYLES
from .updates import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def among(simplest: Any, *others: Any, often: float = 0.15) -> Any:
    """A choice: with the chance ``often`` one of the others, each of them as often."""
    return field(default=simplest, metadata={"values": (simplest, *others), "often": often})


PLACEMENTS = (
    *("keep", "offload", "offload-50%", "offload-remat", "recompute", "recompute-offload"),
    *("recompute-except-attention", "auto"),
)


@dataclass(frozen=True)
class Layer:
    kind: str = among("linear", *(name for name in MODULES if name != "linear"), often=0.98)
    style: str = among(*STYLES, often=0.3)
    inside: str = among("nothing", "checkpoint", "reentrant checkpoint", "body twice", "own hooks")
    residual: bool = among(False, True, often=0.6)
    frozen: bool = among(False, True, often=0.08)
    placement: str = among(*PLACEMENTS, "offload-10%", often=0.95)

    def __str__(self) -> str:
        return ", ".join(told(self))


@dataclass(frozen=True)
class Program:
    """One training. What is drawn for one choice depends on the seed and its name, not on the others."""

    seed: int = 0
    layers: tuple[Layer, ...] = (Layer(),)
    # The model.
    width: int = among(8, 16, 32, 64, often=0.9)
    length: int = among(4, 8, 16, often=0.7)
    batch: int = among(2, 4)
    dtype: str = among("float32", "float64", "bfloat16")
    embedding: str = among("linear", "embedding", "sparse embedding", often=0.5)
    tied: bool = among(False, True)
    around: str = among("nothing", "checkpoint", "reentrant checkpoint")
    again: str = among("nothing", "first layer", "all layers")
    skip: bool = among(False, True)
    # The loop.
    steps: int = among(1, 2, 3, 4, 5, often=0.99)
    micro_batches: tuple[int, ...] = among((1,), (2,), (3,), (1, 2), (2, 1), (1, 3, 2), often=0.5)
    order: str = among("one by one", "forwards first", "sum of losses", often=0.3)
    opened: str = among("by itself", "block", "block with update", often=0.5)
    backward: str = among(
        "once", "twice", "in a thread", "autograd.grad", "to inputs", "two losses", often=0.3
    )
    penalty: str = among("none", "input", "parameters", "weights", often=0.1)
    evaluation: str = among("none", "no_grad", "inference", "between micro-batches", "forgotten", often=0.2)
    mishap: str = among("none", "forward", "between", "backward", "update", often=0.2)
    skipped: bool = among(False, True)
    clip: str = among("none", "norm", "large norm", "value")
    zero: str = among("to none", "to zero", "by model", "never")
    scaler: str = among("none", "steady", "overflows", often=0.1)
    autocast: bool = among(False, True, often=0.1)
    scheduler: str = among("none", "step", "one cycle")
    ema: str = among("none", "averaged", "deep copy", often=0.1)
    model_round_trip: str = among("none", "same", "to the first", often=0.1)
    optimizer_round_trip: bool = among(False, True, often=0.1)
    reattach: str = among("no", "once", often=0.1)
    other_lengths: bool = among(False, True)
    closure: bool = among(False, True, often=0.08)
    freezes: bool = among(False, True, often=0.08)
    group_comes_late: bool = among(False, True, often=0.08)
    gradient_hook: bool = among(False, True, often=0.08)
    accumulate_hook: bool = among(False, True, often=0.05)
    noise_in_weights: bool = among(False, True, often=0.08)
    # The optimizer.
    optimizer: str = among(*OPTIMIZERS, often=0.95)
    implementation: str = among("default", "foreach", "fused", "loop", often=0.6)
    groups: str = among("one", "two", "two optimizers", often=0.3)
    # The policy.
    attached: str = among("session", "optimizer alone", often=0.08)
    found: bool = among(False, True, often=0.1)
    min_tensor_bytes: int = among(0, 512, 4096, often=0.4)
    window: int = among(0, 4096, 16384, 65536, 2**20, often=0.7)
    budget: str | None = among(
        None, "activation 16KiB", "activation 256KiB", "device 1MiB", "device 64MiB", often=0.4
    )
    store: str = among("host", "file", "tiered", "striped", "small file", "small host", often=0.7)
    checksum: bool = among(True, False)
    drive: str = among("healthy", "slow", "slow writes", "fails to write", "cuts short", often=0.2)
    readers: int = among(1, 2)
    writers: int = among(1, 2)
    on_slow: str | None = among(None, "wait", "keep", often=0.2)
    states: str | None = among(None, "step", "backward", "auto", often=0.5)
    sub_group: str = among("4KiB", "16KiB", "64MiB", often=0.3)
    frozen_weights: str = among("keep", "offload", "offload-50%", often=0.4)
    measures_memory: bool = among(False, True, often=0.3)
    run_log: bool = among(False, True, often=0.1)

    @property
    def frees_gradients(self) -> bool:
        return self.states == "backward"

    @property
    def has_frozen(self) -> bool:
        return any(layer.frozen or layer.kind == "adapter" for layer in self.layers)

    @property
    def placements(self) -> set[str]:
        return {layer.placement for layer in self.layers}

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {', '.join(told(self))}"]
        return "\n  ".join([*lines, *(f"layer {n}: {layer}" for n, layer in enumerate(self.layers))])


DENIED: dict[str, Callable[[Program], bool]] = {
    # Known, and told in the documentation or the same in plain PyTorch.
    "gradients that are freed in backward cannot be clipped, scaled or asked for": lambda p: (
        p.frees_gradients
        and (
            p.clip != "none"
            or p.scaler != "none"
            or p.backward in {"twice", "autograd.grad", "to inputs", "two losses"}
            or p.zero in {"never", "to zero"}
            or p.accumulate_hook
        )
    ),
    "the guide: what is read between backward and the step is the updated value": lambda p: (
        p.frees_gradients and p.evaluation == "between micro-batches"
    ),
    "a step that does not follow updates in backward is an error": lambda p: (
        p.frees_gradients
        and (p.skipped or p.mishap == "update" or (p.mishap != "none" and max(p.micro_batches) > 1))
    ),
    "PyTorch: a graph of gradients stays where its backward fails": lambda p: (
        p.penalty in {"input", "parameters"} and any(layer.kind == "distances" for layer in p.layers)
    ),
    "PyTorch: a checkpoint stops before the noise of rrelu is filled in": lambda p: any(
        layer.kind.startswith("rrelu") and (layer.inside == "checkpoint" or p.around == "checkpoint")
        for layer in p.layers
    ),
    "what a second run makes anew was not changed": lambda p: any(
        layer.kind == "changes what was saved"
        and ("recompute" in layer.placement or layer.placement == "auto")
        for layer in p.layers
    ),
    "graphs that never go backward stay with recomputed layers": lambda p: (
        p.evaluation == "forgotten" and any("recompute" in each or each == "auto" for each in p.placements)
    ),
    "the guide: gradients of gradients, copies and late changes of frozen weights that are away": lambda p: (
        p.frozen_weights != "keep"
        and (
            not p.has_frozen
            or p.penalty in {"input", "parameters"}
            or p.ema != "none"
            or p.freezes
            or p.noise_in_weights
            or p.penalty == "weights"
        )
    ),
    "limits: states and frozen weights that cannot be written end training": lambda p: (
        (p.store in {"small file", "small host"} or p.drive == "fails to write")
        and (p.states is not None or p.frozen_weights != "keep")
    ),
    "states need an optimizer": lambda p: p.attached == "optimizer alone" and p.states in {None, "auto"},
    "auto needs a budget": lambda p: p.states == "auto" and not (p.budget or "").startswith("device"),
    "a scaler, a closure and gradients by hand do not go together": lambda p: (
        (p.closure and (p.scaler != "none" or p.accumulate_hook))
        or (p.accumulate_hook and p.scaler != "none")
    ),
    "PyTorch: sparse gradients are for few optimizers and functions": lambda p: (
        p.embedding == "sparse embedding"
        and (p.clip != "none" or p.scaler != "none" or p.penalty != "none" or p.tied)
    ),
    "reentrant checkpoints have no gradient of their own": lambda p: (
        ("reentrant checkpoint" in {p.around, *(each.inside for each in p.layers)})
        and (p.backward in {"autograd.grad", "to inputs"} or p.penalty != "none")
    ),
}
"""Combinations that are not drawn, and why."""


def draw(seed: int) -> Program:
    for attempt in range(1000):
        count = random.Random(f"{seed} {attempt} layers").choice((1, 2, 2, 3, 3, 4))
        layers = tuple(_drawn(Layer(), f"{seed} {attempt} layer {number}") for number in range(count))
        program = _drawn(Program(seed, layers), f"{seed} {attempt}")
        if not any(denies(program) for denies in DENIED.values()):
            return program
    raise AssertionError("no program is allowed any more")


def _drawn(plain: Any, salt: str) -> Any:
    chosen = {}
    for each in choices_of(plain):
        chance = random.Random(f"{salt} {each.name}")
        if chance.random() < each.metadata["often"]:
            chosen[each.name] = chance.choice(each.metadata["values"][1:])
    return replace(plain, **chosen)


def choices_of(thing: Program | Layer) -> Iterator[Any]:
    return (each for each in fields(thing) if "values" in each.metadata)


def told(thing: Program | Layer) -> Iterator[str]:
    for each in choices_of(thing):
        value = getattr(thing, each.name)
        if value != each.default:
            yield f"{each.name}={value}"
