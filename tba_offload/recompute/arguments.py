"""Arguments of a layer for its second run, in the state before the first run.

``torch.utils.checkpoint`` saves all tensors among the arguments, also tensors in lists, dicts and tuples.
Lists and dicts are copied, because other layers may change them. A key-value cache of transformers is
replaced by an empty cache, because the layer must not append to the cache twice.
"""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class _Place(NamedTuple):
    number: int


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` with an index in place of each tensor, and append each tensor to ``tensors``."""
    # Autograd cannot save tensors that were created in inference mode.
    if isinstance(value, torch.Tensor) and not value.is_inference():
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return _rebuilt(value, lambda part: take_apart(part, tensors))


def put_together(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Undo :func:`take_apart`. The lists, dicts and key-value caches in the result are new objects."""
    if type(value) is _Place:
        return tensors[value.number]
    return _rebuilt(value, lambda part: put_together(part, tensors))


def _rebuilt(value: Any, change: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple):
        return kind(change(part) for part in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(change(part) for part in value))
    if kind is dict:
        return {key: change(part) for key, part in value.items()}
    if isinstance(value, UserDict):  # Gemma's layers share keys and values in a dict
        rebuilt = copy.copy(value)
        rebuilt.data = change(dict(value.data))
        return rebuilt
    return _emptied(value) if is_cache(value) else value


def is_cache(value: object) -> bool:
    """Return True for a key-value cache of transformers."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def _emptied(cache: Any) -> Any:
    new = _copied(cache)  # some models keep other states in the cache
    if hasattr(cache, "self_attention_cache"):  # a cache for an encoder and a decoder
        new.self_attention_cache = _emptied(cache.self_attention_cache)
        new.cross_attention_cache = _emptied(cache.cross_attention_cache)
    else:
        new.layers = [_Gone() if _is_filled(layer) else _copied(layer) for layer in cache.layers]
    return new


def _is_filled(layer: Any) -> bool:
    flags = (flag for name, flag in vars(layer).items() if name.endswith("initialized"))
    return isinstance(layer, _Gone) or any(any(f.values()) if type(f) is dict else f for f in flags)


def _copied(cache: Any) -> Any:
    new = copy.copy(cache)
    for name, value in vars(cache).items():
        if type(value) in (list, dict):
            setattr(new, name, copy.copy(value))
    return new


class _Gone:
    """Placeholder for the keys and values of a cache that another layer, or another forward, has filled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            "a recomputed layer reads a key-value cache that another layer or another forward has filled. "
            "Set use_cache=False, or set the placement of the layer to 'keep' or 'offload'."
        )
