"""Memory that lasts from step to step: parameters, gradients, states, and what attributes of modules hold."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from tba_offload.device.live_bytes import plain_storage
from tba_offload.states.pieces import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from tba_offload.capture.registry import Registry
    from tba_offload.states import OptimizerStates

_MOST_ITEMS = 1024
"""Entries of a list or a mapping that are looked at: a table of a model has a few, a data set millions."""


def static_bytes(
    modules: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    offloaded: Iterable[OptimizerStates],
    device: torch.device,
) -> dict[str, int]:
    """Bytes of a device by what holds them, each storage once.

    Args:
        modules: The model or its chunks.
        optimizers: Those that update it, or masters of it.
        offloaded: Offloaded states of some of these, of which slots hold what is in memory.
        device: The device.
    """
    modules, optimizers = list(modules), list(optimizers)
    groups: dict[str, Iterable[object]] = {
        "parameters": chain.from_iterable(map(torch.nn.Module.parameters, modules)),
        "gradients": chain.from_iterable(map(_gradients, modules)),
        "buffers": chain.from_iterable(map(torch.nn.Module.buffers, modules)),
        "optimizer_states": chain.from_iterable(map(_states, optimizers)),
        "masters": chain.from_iterable(map(parameters_of, optimizers)),  # what is not the model's own
    }
    seen: set[int] = set()
    nbytes = {name: sum(_new_bytes(found, device, seen)) for name, found in groups.items()}
    nbytes["optimizer_states"] += sum(states.device_bytes for states in offloaded)
    return nbytes


def largest_trained(
    modules: Sequence[nn.Module], layers: Sequence[nn.Module]
) -> tuple[list[tuple[str, int]], int]:
    """Return the largest trained parameters beside the layers, by name, and the bytes of the largest in them.

    Args:
        modules: The model or its chunks.
        layers: Its layers.
    """
    of_layers = {parameter for layer in layers for parameter in torch.nn.Module.parameters(layer)}
    found = chain.from_iterable(map(torch.nn.Module.named_parameters, modules))
    trained = [(name, each) for name, each in found if each.requires_grad and not is_lazy(each)]
    sizes = [(name, each.numel() * each.element_size(), each in of_layers) for name, each in trained]
    beside = [(name, nbytes) for name, nbytes, is_inside in sizes if not is_inside]
    inside = max((nbytes for _, nbytes, is_inside in sizes if is_inside), default=0)
    return sorted(beside, key=itemgetter(1), reverse=True)[:3], inside


def frozen_bytes(layers: Sequence[nn.Module], device: torch.device) -> int:
    """Return the bytes of frozen weights of layers that are in memory."""
    found = chain.from_iterable(map(torch.nn.Module.parameters, layers))
    return sum(_new_bytes((each for each in found if not each.requires_grad), device, set()))


def _new_bytes(found: Iterable[object], device: torch.device, seen: set[int]) -> Iterator[int]:
    for tensor in found:
        storage = plain_storage(tensor)
        if storage is not None and storage.device == device and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage.nbytes()


def _gradients(module: nn.Module) -> Iterator[object]:
    for parameter in torch.nn.Module.parameters(module):
        yield from (parameter.grad, getattr(parameter, "main_grad", None))


def _states(optimizer: Optimizer) -> Iterator[object]:
    for state in optimizer.state.values():
        for each in state.values() if isinstance(state, dict) else ():
            yield from each if isinstance(each, (list, tuple)) else (each,)  # LBFGS: a history


def attributes_saved(modules: Iterable[nn.Module], registry: Registry) -> list[tuple[str, int, bool]]:
    """Return what attributes of modules hold and layers have saved, beside parameters and buffers.

    Args:
        modules: The model or its chunks.
        registry: What was saved in the step.

    Returns:
        For each tensor its name, its bytes, and whether it outlives the step, as a table does.
    """
    found: dict[int, tuple[str, int, bool]] = {}
    for name, inner in chain.from_iterable(map(torch.nn.Module.named_modules, modules)):
        for attribute, tensor in _attributes(inner):
            storage = plain_storage(tensor)
            if storage is not None and (registry.is_kept(storage) or registry.record_of(storage) is not None):
                lasts = isinstance(tensor, torch.Tensor) and tensor.grad_fn is None
                known = f"{name}.{attribute}".lstrip("."), storage.nbytes(), lasts
                found.setdefault(storage._cdata, known)
    return list(found.values())


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a module beside parameters, buffers and modules, and the items of its lists."""
    for name, value in list(vars(module).items()):
        if name not in _OF_TORCH:
            items = list(value.values()) if isinstance(value, dict) else value
            is_short = isinstance(items, list | tuple) and len(items) <= _MOST_ITEMS
            yield from ((name, item) for item in (items if is_short else (value,)))


_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""
