"""The modules in a layer, and the tensors at any depth in its arguments and outputs."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST = 1_000
"""Maximum number of objects that are searched in one value, so that a huge structure does not delay a
step."""

DEPTH = 6
"""Number of levels of nested objects that are searched. A key-value cache has four levels: the cache, its
list of layers, the lists of each layer, and the tensors."""

LEAVES = (
    *(str, bytes, int, float, complex, bool, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(types.BuiltinFunctionType, torch.nn.Module, torch.dtype, torch.device, torch.Size),
)
"""Types of objects that are not searched."""


class TooManyError(Exception):
    """A value contains more than :data:`MOST` objects."""


def modules_in(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all its submodules, without duplicates and in a reproducible order.

    Each run of a layer calls this function, which takes less than half the time of ``module.modules()``.
    """
    found = {layer: None}
    waiting = [layer]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def parameters_in(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the parameters of modules and of all their submodules, without duplicates.

    This function is much faster than ``module.parameters()``, and ignores overrides of ``named_parameters``.
    A step needs the list of parameters several times, and adapters add thousands of small modules to a model.
    """
    inner = (each for module in modules for each in modules_in(module))
    held = (parameter for each in inner for parameter in each._parameters.values() if parameter is not None)
    return list({id(parameter): parameter for parameter in held}.values())  # tensors are hashed in Python


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and in attributes of objects, in order.

    Raises:
        TooManyError: The value contains more than :data:`MOST` objects.
    """
    waiting: list[tuple[object, int]] = [(value, 0)]
    seen: set[int] = set()
    while waiting:
        found, depth = waiting.pop()
        kind = type(found)  # unlike isinstance(), type() runs no code of the object
        if issubclass(kind, torch.Tensor):
            yield found  # type: ignore[misc]
        elif found is not None and depth < DEPTH and not issubclass(kind, LEAVES) and id(found) not in seen:
            seen.add(id(found))
            if len(seen) > MOST:
                raise TooManyError
            with contextlib.suppress(Exception):  # attributes of a proxy object may fail
                waiting += [(part, depth + 1) for part in _parts_of(found)][::-1]


def _parts_of(value: object) -> Iterable[object]:
    if isinstance(value, (tuple, list, set, frozenset, deque)):
        return value
    if isinstance(value, dict):
        return list(value.values())
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    held = (getattr(value, name, None) for name in names if name != "__weakref__")
    return [*getattr(value, "__dict__", {}).values(), *held]
