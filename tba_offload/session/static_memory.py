"""Memory that lasts from step to step: parameters, gradients, states, and what attributes of modules hold."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from tba_offload.device.live_bytes import plain_storage
from tba_offload.states.pieces import parameters_of
from tba_offload.weights.pieces import own_weights

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


def head_bytes(modules: Sequence[nn.Module], layers: Sequence[nn.Module]) -> int:
    """Bytes of the largest trained parameter that is in no layer.

    Args:
        modules: The model or its chunks.
        layers: Its layers.
    """
    of_layers = {parameter for layer in layers for parameter in torch.nn.Module.parameters(layer)}
    all_of_them = chain.from_iterable(map(torch.nn.Module.parameters, modules))
    trained = (each for each in all_of_them if each.requires_grad and each not in of_layers)
    return max((each.numel() * each.element_size() for each in trained if not is_lazy(each)), default=0)


def frozen_bytes(
    modules: Sequence[nn.Module], layers: Sequence[nn.Module], at_least: int, device: torch.device
) -> dict[str, int]:
    """Bytes of frozen weights that could be offloaded and are in memory, and those of the two largest layers.

    Args:
        modules: The model or its chunks.
        layers: Its layers.
        at_least: Bytes of a weight that travels.
        device: The device that such a weight lies on.
    """
    of_layers = dict.fromkeys(range(len(layers)), 0)
    for number, _, weight in own_weights(modules, layers, max(at_least, 1), device):  # away, it is empty
        of_layers[number] += weight.untyped_storage().nbytes()
    sizes = sorted(of_layers.values(), reverse=True)
    return {"frozen_weights": sum(sizes), "frozen_at_once": sum(sizes[:2])}


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


_MOST_NAMED = 100
"""Tensors that are told: those after the first hundred hold little."""


class ModuleTensors:
    """Tensors that attributes of modules hold, beside parameters and buffers: tables, caches, outputs.

    Args:
        modules: The model or its chunks.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self._before: set[int] = set()

    def begin_step(self) -> None:
        """Note what is there before a step."""
        self._before = {storage._cdata for _, storage in self._all()}

    def lasting(self, registry: Registry, device: torch.device) -> list[tuple[str, int]]:
        """Return the largest of a device that were there before the step and no layer has saved.

        Name and bytes.

        Args:
            registry: What was saved in this step.
            device: The device.
        """
        seen = {
            storage._cdata
            for storage in map(plain_storage, chain.from_iterable(map(_own, self._modules)))
            if storage
        }
        found: list[tuple[str, int]] = []
        for name, storage in self._all():
            key = storage._cdata
            if key in self._before and key not in seen and storage.device == device:
                seen.add(key)
                if not _is_saved(registry, storage):
                    found.append((name, storage.nbytes()))
        return sorted(found, key=itemgetter(1), reverse=True)[:_MOST_NAMED]

    def saved(self, registry: Registry) -> list[tuple[str, int, bool]]:
        """Those that layers have saved in this step: name, bytes, and whether it was there before the step.

        Args:
            registry: What was saved.
        """
        found: dict[int, tuple[str, int, bool]] = {}
        for name, storage in self._all():
            if _is_saved(registry, storage):
                key = storage._cdata
                found.setdefault(key, (name, storage.nbytes(), key in self._before))
        return list(found.values())

    def _all(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        for module in self._modules:
            for name, inner in module.named_modules():
                for attribute, tensor in _attributes(inner):
                    storage = plain_storage(tensor)
                    if storage is not None:
                        yield f"{name}.{attribute}".lstrip("."), storage


def _own(module: nn.Module) -> Iterator[object]:
    """Yield what a module is known to hold."""
    yield from chain(torch.nn.Module.parameters(module), torch.nn.Module.buffers(module), _gradients(module))


def _is_saved(registry: Registry, storage: torch.UntypedStorage) -> bool:
    return registry.is_kept(storage) or registry.record_of(storage) is not None


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a module beside parameters, buffers and modules, and the items of its lists."""
    for name, value in list(vars(module).items()):
        if name.startswith("_") and isinstance(value, dict) and name in _OF_TORCH:
            continue
        if isinstance(value, dict):
            items: Iterable[object] = value.values() if len(value) <= _MOST_ITEMS else ()
        else:
            items = value if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS else (value,)
        yield from ((name, item) for item in items)


_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""
