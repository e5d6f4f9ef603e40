"""Values without the graphs that they hold: what is taken down of a step must not keep the step before alive.

A layer may leave a tensor of its graph where others look at it. When it runs again, that tensor is part of
what it finds; taken down as it is, it would hold the graph of the run before, which holds what that run
found, and so on. A second run saves the same bits if it finds the same tensor without its graph.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from typing import Any

import torch

from tba_offload.layers.nested import DEPTH, LEAVES, slots_of

_FIXED = (*LEAVES, types.FunctionType, type(None))


class StandIns:
    """Makes stand-ins, one for each object however often it is found."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[int, tuple[object, object]] = {}  # with the object, so that its id stays taken

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return the value itself if it holds no graph.

        Otherwise a copy of it with tensors apart from theirs.

        Args:
            value: A tensor, or a container or object that may hold some.
            depth: How many containers or objects it lies in; what lies deeper than usual is not looked at.

        Raises:
            Exception: An object that holds a graph cannot be copied.
        """
        if isinstance(value, torch.Tensor):
            return self._once(value, _apart) if has_graph(value) else value
        if depth >= DEPTH or issubclass(type(value), _FIXED):
            return value
        return self._once(value, lambda value: self._copied(value, depth + 1))

    def known(self, value: Any) -> Any:
        """Return what stands for a value that was looked at before: itself, if nothing had to."""
        return self._made.get(id(value), (value, value))[1]

    def clear(self) -> None:
        """Let go of the objects."""
        self._made.clear()

    def _once(self, value: Any, make: Any) -> Any:
        known = self._made.get(id(value))
        if known is None:
            self._made[id(value)] = value, value  # until it is made: it may lie in itself
            known = self._made[id(value)] = value, make(value)
        return known[1]

    def _copied(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if issubclass(kind, tuple):
            return self._tuple(value, depth)
        parts = _parts_of(value)
        changed = [
            (owner, key, twin) for owner, key, part in parts if (twin := self.of(part, depth)) is not part
        ]
        if not changed:
            return value
        made = copy.copy(value)
        for owner, key, twin in changed:
            owner(made, key, twin)
        return made

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        parts = [self.of(part, depth) for part in value]
        if all(part is own for part, own in zip(parts, value, strict=True)):
            return value
        kind: Any = type(value)
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def has_graph(tensor: torch.Tensor) -> bool:
    """Whether a tensor is part of a graph; a view of a gathered parameter may not even be asked for it."""
    return tensor.requires_grad and (tensor._is_view() or tensor.grad_fn is not None)


def without_graph(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor, apart from its graph if it is part of one."""
    return _apart(tensor) if tensor is not None and has_graph(tensor) else tensor


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory and counter of changes, without the graph.

    Operations on it are recorded as before.
    """
    return tensor.detach().requires_grad_()


def _parts_of(value: Any) -> list[tuple[Any, Any, Any]]:
    """Return what a container or object holds.

    How to put something in its place, where, and what is there.
    """
    kind = type(value)
    parts: list[tuple[Any, Any, Any]] = []
    if issubclass(kind, dict):
        parts += [(dict.__setitem__, key, part) for key, part in dict.items(value)]
    elif issubclass(kind, (list, deque)):
        base: Any = list if issubclass(kind, list) else deque
        parts += [(base.__setitem__, place, part) for place, part in enumerate(base.__iter__(value))]
    own = getattr(value, "__dict__", None)
    if type(own) is dict:
        parts += [(_set_attribute, name, part) for name, part in own.items()]
    slots = [name for base in kind.__mro__ for name in slots_of(base) if hasattr(value, name)]
    return parts + [(object.__setattr__, name, getattr(value, name)) for name in slots]


def _set_attribute(owner: Any, name: str, value: object) -> None:
    owner.__dict__[name] = value
