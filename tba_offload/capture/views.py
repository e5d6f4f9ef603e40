"""Saved tensors as views of storages.

An activation is identified by its storage object, never by an address or an ``id()``, because addresses are
reused. PyTorch hands out the same Python object for a storage as long as the storage lives, and a weak
reference to it stays alive while only C++ holds the storage.

A distributed tensor (``DTensor``) is identified by the storage of its local tensor, which has its bytes on
this rank, and by its own version, because its operations do not count at the local tensor.
"""

from __future__ import annotations

import sys
import weakref
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from tba_offload.device import ByteRange, aligned_range, blank
from tba_offload.layers.nested import modules_in
from tba_offload.torch_private import is_transform_wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.device import Device

View = tuple[torch.dtype, "Sequence[int]", "Sequence[int]", int]
"""How a tensor looks at its storage: dtype, shape, strides and offset, the latter two in elements."""


def view_of(tensor: torch.Tensor) -> View:
    """Return how a tensor looks at its storage."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def viewed(storage: torch.UntypedStorage, view: View, start: int = 0) -> torch.Tensor:
    """Return the tensor that ``view`` makes of a storage, with a version counter of its own.

    Args:
        storage: The bytes.
        view: How to look at them.
        start: The payload begins at this byte.
    """
    dtype, shape, stride, offset = view
    return blank(dtype, storage.device).data.set_(storage, offset + start // dtype.itemsize, shape, stride)


# Sparse views


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of the elements of a tensor; those that ``expand`` repeats come once."""
    dtype, _, stride, offset = view_of(tensor)
    few = viewed(tensor.untyped_storage(), (dtype, _distinct(tensor.shape, stride), stride, offset))
    return few.clone(memory_format=torch.contiguous_format)


def spread_out(
    dense: torch.UntypedStorage, start: int, view: View, address: int, device: Device
) -> ByteRange:
    """Put copied elements back to the strides of their view; what lies between them is undefined.

    Kernels choose their way by strides, and by the address of the first element modulo a cache line.

    Args:
        dense: The elements, as :func:`dense_copy` returned them.
        start: The elements begin at this byte.
        view: How the saved tensor looked at its storage.
        address: Where its first element lay.
        device: Of the memory.

    Returns:
        New memory, which begins with the first element.
    """
    dtype, shape, stride, _ = view
    sizes = _distinct(shape, stride)
    reach = 0 if 0 in sizes else 1 + sum((n - 1) * step for n, step in zip(sizes, stride, strict=True))
    room = aligned_range(reach * dtype.itemsize, address, 1, device)
    elements = viewed(dense, (dtype, (prod(sizes),), (1,), 0), start)
    viewed(room.storage, (dtype, sizes, stride, 0), room.start).copy_(elements.view(sizes))
    return room


def _distinct(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [size if step else min(size, 1) for size, step in zip(shape, stride, strict=True)]


# Versions


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of ``tensor`` but not its memory.

    Saved-tensor hooks switch off autograd's own check for changes in place, so we compare versions
    ourselves at unpack. The counter must be kept until then, the memory must not.
    """
    probe, empty = tensor.detach(), blank(tensor.dtype, tensor.device)
    if type(probe) is torch.Tensor:
        probe.data = empty
    else:
        _put(probe, empty)
    return probe


def restore(storage: torch.UntypedStorage, view: View, probe: torch.Tensor, start: int = 0) -> torch.Tensor:
    """As :func:`viewed`, for backward: a change of the tensor in place counts at ``probe`` too.

    So the next one that is given the same saved tensor is told, as with autograd's own check.
    """
    tensor = probe.detach()
    if type(tensor) is not torch.Tensor:
        _put(tensor, viewed(storage, view, start))
        return tensor
    dtype, shape, stride, offset = view
    tensor.data = probe.data.set_(storage, offset + start // dtype.itemsize, shape, stride)
    return tensor


def _put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give a detached tensor other bytes; its version counter, and how it is distributed, stay."""
    if _is_distributed(tensor):
        tensor._local_tensor = data  # type: ignore[attr-defined]
    else:
        tensor.data = data


# What can be rebuilt from its bytes


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _is_distributed(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # no object is of a class that is not imported
    return module is not None and type(tensor) is module.DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the bytes: of a distributed one the local one, else itself.

    A collective that is still to deliver them is waited for, as the operation that saves them does next.
    """
    if type(tensor) in _PLAIN or not _is_distributed(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local  # type: ignore[no-any-return]


def is_understood(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return True if a saved tensor is a plain strided one on ``device`` that its bytes can rebuild.

    Subclasses, sparse, quantized and functorch tensors, lazy conjugates, implicit zeros and elements that
    straddle their alignment are not.
    """
    if type(tensor) not in _PLAIN or tensor.device != device:
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # functorch's wrappers have no storage
        return False
    # Where restored bytes can be: tensors of implicit zeros are nowhere, as are those without elements.
    return not tensor.numel() if address == 0 else address % tensor.itemsize == 0


# Storages of the model


class StaticStorages:
    """The storages that live as long as the model: parameters, gradients, buffers.

    Membership is by storage, so views and transposes of a parameter and the flat buffers that Megatron
    keeps parameters and gradients (``main_grad``) in are members too.

    Attributes:
        addresses: Of the storage objects: what is not among them is no member.
    """

    def __init__(self) -> None:
        self.addresses: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def refresh(self, modules: Iterable[torch.nn.Module]) -> None:
        """Read the storages anew; between steps, because optimizers may replace them."""
        tensors = filter(_has_storage, chain.from_iterable(map(_static_tensors, modules)))
        storages = (local_of(tensor).untyped_storage() for tensor in tensors)
        self.addresses = {storage._cdata: weakref.ref(storage) for storage in storages}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        found = self.addresses.get(storage._cdata)
        # A gradient may be freed during the step, and its address belong to an activation.
        return found is not None and found() is storage


def _static_tensors(module: torch.nn.Module) -> list[Any]:
    """Parameters, their gradients, and buffers; ``None`` in place of some that are not there."""
    found: list[Any] = []
    for inner in modules_in(module):
        found += inner._buffers.values()
        for parameter in inner._parameters.values():
            found.append(parameter)
            # One that was computed, as ``functional_call`` may give the model, has no gradient to ask for.
            if parameter is not None and parameter.is_leaf and parameter.grad is not None:
                found.append(parameter.grad)
            found.append(getattr(parameter, "main_grad", None))
    return found


def _has_storage(tensor: object) -> bool:
    """Return True for tensors with bytes of their own; a transform of the model gives it wrappers."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and not is_transform_wrapper(tensor)
