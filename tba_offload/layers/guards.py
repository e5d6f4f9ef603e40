"""Finds what a model's own framework does to its layers that offloading cannot do its work with."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import TYPE_CHECKING

import torch

from tba_offload.layers.nested import modules_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

_CACHES = (("transformers.cache_utils", "Cache"),)
"""Modules and classes of objects to which a layer's forward appends keys and values."""

_CHECKPOINTS = (("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"),)
"""Modules and classes of wrappers that recompute the layer in them."""

_SCALING = (
    ("transformer_engine.pytorch.quantization", "FP8GlobalStateManager"),
    ("transformer_engine.pytorch.fp8", "FP8GlobalStateManager"),
)
"""Modules, newer and older, and the class that tells of FP8."""

_FRAMEWORKS = frozenset({"torch", "megatron", "transformer_engine", "tba_offload", "tba_lab"})
"""Packages whose hooks may run twice."""


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether the layer's own framework has its forward run again in backward.

    Layers of Hugging Face models say so in an attribute.
    """
    return bool(getattr(layer, "gradient_checkpointing", False)) or isinstance(layer, loaded(_CHECKPOINTS))


def checkpointing_warning(count: int, layers: int) -> str:
    """Return the warning of a session in which ``count`` of all layers are checkpointed."""
    return (
        f"gradient checkpointing is switched on in {count} of the {layers} layers of the model: backward "
        "computes them again whatever their placement, and at most their inputs are offloaded. switch it off "
        "to have all their activations offloaded instead: gradient_checkpointing=False among the arguments "
        "of a Hugging Face trainer (newer: activation_checkpointing=False; TRL's default is True). "
        "to recompute layers and offload their inputs, place them recompute-offload"
    )


def holds_cache(arguments: Iterable[object]) -> bool:
    """Whether a cache of keys and values is among the arguments of a layer.

    Forward appends to it, so that a second forward finds other keys and values in it than the first.
    """
    caches: tuple[type, ...] | None = None
    for argument in arguments:
        if argument is None or type(argument) is torch.Tensor:
            continue
        if caches is None:  # mostly all are tensors, and no module is looked up
            caches = loaded(_CACHES)
        if isinstance(argument, caches):
            return True
    return False


def cache_warning() -> str:
    """Return what to say of a model that fills a cache while it trains."""
    return (
        "the model fills a cache of keys and values while it trains, so that those of all layers stay in "
        "memory until its output is dropped: switch it off (use_cache=False, to the model or in its config)"
    )


def is_scaled() -> bool:
    """Whether Transformer Engine computes in FP8: each run of a layer then changes its scaling factors."""
    return any(manager.is_fp8_enabled() for manager in loaded(_SCALING))  # type: ignore[attr-defined]


def has_hooks(layer: nn.Module) -> bool:
    """Whether a program has hooked into the forward of the layer or a part of it.

    Hooks of frameworks that shard or offload models, and the library's own, are part of the layer.
    """
    found = itertools.chain.from_iterable(
        (*module._forward_hooks.values(), *module._forward_pre_hooks.values()) for module in modules_in(layer)
    )
    return any(_package_of(hook) not in _FRAMEWORKS for hook in found)


def _package_of(hook: object) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0]


def is_scripted(layer: nn.Module) -> bool:
    """Whether a part of the layer is TorchScript, whose first runs are not compiled as later ones are."""
    return any(issubclass(type(module), torch.jit.ScriptModule) for module in modules_in(layer))


def loaded(names: Sequence[tuple[str, str]]) -> tuple[type, ...]:
    """Those of the classes whose modules are imported: no object is of one that is not.

    Args:
        names: Of each, its module and its name there.
    """
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)
