"""The frozen weights of layers that can be offloaded, and the experts of a layer."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tba_offload.config import format_size
from tba_offload.device import CACHE_LINE
from tba_offload.torch_private import is_transform_wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    Modules = Sequence[nn.Module]
    Tensors = list[torch.Tensor]


class Found(NamedTuple):
    """A frozen weight to offload.

    Attributes:
        layer: Index of the layer with the weight.
        name: Name of the parameter in the model.
        tensors: The parameter, and the tensors with packed bytes and scales if the weight is quantized.
        groups: The tensors to offload. Each group contains the tensors of one storage.
        slices: Number of experts that are slices of the parameter; 1 without such experts.
        expert: The expert that has the weight, or the module whose parameter has experts as slices. ``None``
            if the weight belongs to no expert.
    """

    layer: int
    name: str
    tensors: Tensors
    groups: list[Tensors]
    slices: int
    expert: nn.Module | None


def select(chunks: Modules, layers: Modules, at_least: int, device: torch.device) -> tuple[list[Found], str]:
    """Select the frozen weights whose memory no other tensor or layer uses.

    Args:
        chunks: The model or its chunks.
        layers: The layers of the model.
        at_least: Smallest size of a storage to offload, in bytes.
        device: Device of the weights to offload. Weights on other devices are not selected.

    Returns:
        The selected weights, and a text about frozen weights that stay in memory because of their class or
            device. The text may be empty.
    """
    owner = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    experts = {module: expert for layer in layers for module, expert in experts_in(layer).items()}
    users: defaultdict[int, set[tuple[int | None, int]]] = defaultdict(set)
    tensors, found, others = {}, [], defaultdict(list)
    for prefix, module in chain.from_iterable(chunk.named_modules() for chunk in chunks):
        # Call the methods of nn.Module: Megatron's data-parallel wrapper has its own attribute `buffers`.
        parameters = nn.Module.named_parameters(module, prefix, recurse=False)
        for name, tensor in chain(parameters, nn.Module.named_buffers(module, prefix, recurse=False)):
            groups: defaultdict[int, Tensors] = defaultdict(list)
            for part in (parts := parts_of(tensor, module)):
                if not hasattr(part, "__tensor_flatten__"):
                    groups[part.untyped_storage()._cdata].append(part)
            for storage in groups:
                users[storage].add((owner.get(module), id(tensor)))
            tensors[owner.get(module), id(tensor)] = name, module, tensor, parts, groups
    for (number, _), (name, module, tensor, parts, groups) in tensors.items():
        if number is None or not isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.is_meta:
            continue
        own = [part for storage, part in groups.items() if len(users[storage]) == 1]
        own = [each for each in own if each[0].untyped_storage().nbytes() >= max(at_least, 1)]
        kind, nbytes = type(tensor), tensor.numel() * tensor.itemsize
        reason = "" if groups else f"of the class {kind.__module__}.{kind.__qualname__}"
        reason = f"on {tensor.device}" if groups and tensor.device != device else reason
        if reason and nbytes >= at_least:
            others[reason].append(nbytes)
        elif own and not reason:
            slices = slices_of(tensor, module)
            expert = experts.get(module) if slices == 1 else module
            found.append(Found(number, name, parts, own, slices, expert))
    texts = (f"{len(sizes)} {what} ({format_size(sum(sizes))})" for what, sizes in others.items())
    return found, ", ".join(texts)


def parts_of(tensor: Any, module: nn.Module | None = None) -> Tensors:
    """Return a tensor, and the tensors with its packed bytes and scales if the tensor is quantized.

    The list is empty if the class of the tensor is unknown.

    Args:
        tensor: A parameter, a buffer, or an inner tensor of a quantized tensor.
        module: The module that has the parameter or buffer.
    """
    if hasattr(tensor, "device_mesh"):  # FSDP holds aliases of distributed tensors
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (parts_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return [tensor, *chain.from_iterable(inner)]
    # The quantization states of bitsandbytes, of weights with 4 and with 8 bits
    state = getattr(tensor, "quant_state", None)
    holders = [state, getattr(state, "state2", None)]
    if hasattr(tensor, "SCB"):
        holders += [tensor, getattr(module, "state", None)]
    is_known = type(tensor) in {torch.Tensor, nn.Parameter} or any(each is not None for each in holders)
    if not is_known or tensor.layout is not torch.strided or is_transform_wrapper(tensor):
        return []
    states = (getattr(holder, name, None) for holder in holders for name in ("absmax", "CB", "SCB"))
    return [tensor, *dict.fromkeys(each for each in states if isinstance(each, torch.Tensor))]


def experts_in(layer: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return a dictionary from each module inside an expert to the expert.

    The modules of a ``ModuleList`` count as experts if the list has two or more modules, all of the same
    class. If these modules are not experts, the results are still right, because the weights of each module
    are read when the module runs.
    """
    found: dict[nn.Module, nn.Module] = {}
    for each in layer.modules():
        if isinstance(each, nn.ModuleList) and len(each) > 1 and len(set(map(type, each))) == 1:
            for expert in each:
                found = dict.fromkeys(expert.modules(), expert) | found
    return found


def slices_of(weight: torch.Tensor, module: nn.Module) -> int:
    """Return the number of experts whose weights are slices of one parameter; 1 without such experts."""
    if type(weight) is not nn.Parameter or weight.ndim != 3 or not weight.is_contiguous():
        return 1
    is_whole = weight.untyped_storage().nbytes() == weight.nbytes and not weight[0].nbytes % CACHE_LINE
    is_named = type(module).__name__.endswith("Experts") or getattr(module, "num_experts", 0) == len(weight)
    return len(weight) if is_whole and is_named else 1
