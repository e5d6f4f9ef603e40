"""Which frozen weights travel, and which cannot."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from tba_offload.config import format_size
from tba_offload.device.live_bytes import plain_storage
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def own_storages(
    chunks: Sequence[nn.Module], layers: Sequence[nn.Module], at_least: int, device: torch.device
) -> Iterator[tuple[int, list[tuple[str, nn.Parameter]]]]:
    """Storages of frozen weights that belong to one layer alone: its number, and what looks at them.

    Args:
        chunks: The model or its chunks.
        layers: Its layers.
        at_least: Bytes of a storage that travels.
        device: The device that it lies on: transfers know the order of work on this device only.
    """
    owner = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    users: defaultdict[int, list[tuple[int | None, str, torch.Tensor]]] = defaultdict(list)
    names = [{id(each): name for name, each in layer.named_parameters()} for layer in layers]
    for chunk in chunks:
        for module in chunk.modules():
            number = owner.get(module)
            # By the class's methods: Megatron's data-parallel wrapper has an attribute `buffers` of its own.
            own = nn.Module.parameters(module, recurse=False), nn.Module.buffers(module, recurse=False)
            for tensor in chain(*own):
                storage = plain_storage(tensor)
                if storage is not None:
                    name = "" if number is None else names[number].get(id(tensor), "")
                    users[storage._cdata].append((number, name, tensor))
    for found in users.values():
        numbers = {number for number, _, _ in found}
        (number, _, first), *_ = found
        if len(numbers) > 1 or number is None or first.device != device:
            continue
        if first.untyped_storage().nbytes() < at_least:
            continue
        parameters = {name: tensor for _, name, tensor in found if name}
        if len(parameters) == len(found) and all(map(_travels, parameters.values())):
            yield number, list(parameters.items())  # type: ignore[arg-type]


def _travels(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is nn.Parameter
        and tensor.is_leaf
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_complex()
        and tensor.dtype is not torch.bool  # of which each value is one that a weight may have
        and tensor.numel() > 0
    )


def name_on_other_devices(
    layers: Sequence[nn.Module], at_least: int, device: torch.device, tell: Callable[[str], object]
) -> bool:
    """Says how many bytes of frozen weights lie on other devices, and so stay.

    Args:
        layers: The layers.
        at_least: Bytes below which a weight would stay in any case.
        device: The device of the weights that travel.
        tell: Called with a line.

    Returns:
        Whether there are any.
    """
    found: defaultdict[torch.device, int] = defaultdict(int)
    for parameter in {id(each): each for layer in layers for each in layer.parameters()}.values():
        nbytes = parameter.numel() * parameter.itemsize
        if parameter.requires_grad or parameter.is_meta or nbytes < at_least:
            continue
        if parameter.device != device:
            found[parameter.device] += nbytes
    if found:
        others = ", ".join(f"{format_size(nbytes)} on {where}" for where, nbytes in found.items())
        tell(f"frozen weights on other devices than {device}, that of the first parameter, stay: {others}")
    return bool(found)


def name_others(
    layers: Sequence[nn.Module], at_least: int, *, travels: bool, tell: Callable[[str], object]
) -> None:
    """Says which frozen weights of layers cannot travel for their class.

    What dequantizes a weight reads its bytes by their address, so it would not notice that they are away.

    Args:
        layers: The layers.
        at_least: Bytes below which a weight would stay in any case.
        travels: Whether others do.
        tell: Called with a line.

    Raises:
        UnsupportedError: There are such weights, and no others.
    """
    found: defaultdict[str, list[int]] = defaultdict(list)
    parameters = {id(each): each for layer in layers for each in layer.parameters()}
    for parameter in parameters.values():
        kind = type(parameter)
        nbytes = parameter.numel() * parameter.itemsize
        if kind is not nn.Parameter and not parameter.requires_grad and nbytes >= at_least:
            found[f"{kind.__module__}.{kind.__qualname__}"].append(nbytes)
    if not found:
        return
    named = (f"{len(sizes)} of the class {name} ({format_size(sum(sizes))})" for name, sizes in found.items())
    others = ", ".join(named)
    if not travels:
        raise UnsupportedError(
            f"no frozen weight can be offloaded: {others}. only torch.nn.Parameter itself travels; quantized "
            "and sharded weights stay in memory. take frozen: offload out of the policy"
        )
    tell(f"some frozen weights stay in memory, since only torch.nn.Parameter itself travels: {others}")
