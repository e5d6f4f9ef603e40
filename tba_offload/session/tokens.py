"""The tokens of a micro-batch: a number, or told from what the model's forward is given."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tba_offload.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Tokens = int | Callable[..., int | None]
"""Tokens of one micro-batch, or a function that tells them from the arguments of the model's forward."""

TokenCounter = Callable[..., int | None]
"""Tells the tokens of a micro-batch from the model, and the tuple and the dict of its forward's arguments."""


def token_counter(tokens: Tokens | None) -> TokenCounter:
    """Tell the tokens of a micro-batch from the model and the arguments of its forward.

    Raises:
        ConfigError: It is neither a positive number nor a function.
    """
    if tokens is None:
        return _InputIds()
    if callable(tokens):
        return lambda _module, args, kwargs: tokens(*args, **kwargs)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"tokens is {tokens!r}: give the tokens of one micro-batch, or a function that tells them"
        )
    return lambda *_: tokens


class _InputIds:
    """Counts the elements of ``input_ids``, by whichever way they are given.

    It asks each module once where its forward takes them: the signature takes longer than a small layer.
    """

    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> int | None:
        """Return the elements; ``None`` if there are no such arguments."""
        found = kwargs.get("input_ids")
        if found is None and args:
            place = self._places.get(module, -1)
            if place == -1:
                place = self._places[module] = _place_of("input_ids", module.forward)
            found = args[place] if place is not None and place < len(args) else None
        return found.numel() if isinstance(found, torch.Tensor) else None


def _place_of(name: str, function: Callable[..., object]) -> int | None:
    """Where a function takes the argument of a name by position; ``None`` if nowhere."""
    names = list(inspect.signature(function).parameters)
    return names.index(name) if name in names else None
