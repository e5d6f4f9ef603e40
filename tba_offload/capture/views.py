"""Saved tensors as views of storages.

An activation is identified by a weak reference to its storage object, because addresses and the results of
``id()`` are reused. PyTorch returns the same Python object for a storage as long as the storage exists, even
if only C++ code holds the storage.

A distributed tensor (``DTensor``) is identified by the storage of its local tensor, which contains the bytes
of this rank. The version is read from the ``DTensor``, because operations on a ``DTensor`` do not change the
version of its local tensor.
"""

from __future__ import annotations

import sys
import weakref
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy

from tba_offload.device import ByteRange, aligned_range, blank
from tba_offload.layers.nested import modules_in
from tba_offload.torch_private import is_transform_wrapper, without_subclasses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.device import Device

View = tuple[torch.dtype, "Sequence[int]", "Sequence[int]", int]
"""The dtype, shape, strides and storage offset of a tensor. Strides and offset count elements."""


def view_of(tensor: Tensor) -> View:
    """Return the view of a tensor on its storage."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def viewed(storage: UntypedStorage, view: View, start: int = 0) -> Tensor:
    """Return the tensor that ``view`` describes, with its own version counter.

    Args:
        storage: The storage with the bytes of the tensor.
        view: The dtype, shape, strides and storage offset of the tensor.
        start: Number of bytes to add to the storage offset of the view.
    """
    dtype, shape, stride, offset = view
    return blank(dtype, storage.device).data.set_(storage, offset + start // dtype.itemsize, shape, stride)


# Sparse views


def dense_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor's elements. Elements that ``expand`` repeats are copied once."""
    dtype, _, stride, offset = view_of(tensor)
    few = viewed(tensor.untyped_storage(), (dtype, _distinct(tensor.shape, stride), stride, offset))
    return few.clone(memory_format=torch.contiguous_format)


def spread_out(dense: UntypedStorage, start: int, view: View, address: int, device: Device) -> ByteRange:
    """Write the elements of a dense copy into new memory, with the strides of the original view.

    Strides and cache-line alignment are the same as in the original tensor, because kernels may choose their
    code path by both. Bytes between the elements are undefined.

    Args:
        dense: Storage of a copy by :func:`dense_copy`.
        start: First byte of the elements in ``dense``.
        view: The original view of the saved tensor.
        address: The original address of the first element.
        device: The device to allocate memory on.

    Returns:
        New memory that begins with the first element.
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


def version_probe(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the version counter of ``tensor`` but not its memory.

    Saved-tensor hooks switch off autograd's check for changes in place, so ``unpack`` compares versions.
    """
    probe, empty = tensor.detach(), blank(tensor.dtype, tensor.device)
    if type(probe) is Tensor:
        probe.data = empty
    else:
        _put(probe, empty)
    return probe


def restore(storage: UntypedStorage, view: View, probe: Tensor, start: int = 0) -> Tensor:
    """Return the tensor that ``view`` describes, with the version counter of ``probe``.

    If the returned tensor is changed in place, the next ``unpack`` of the same saved tensor raises an error,
    as autograd's own check does.
    """
    tensor = probe.detach()
    if type(tensor) is not Tensor:
        _put(tensor, viewed(storage, view, start))
        return tensor
    dtype, shape, stride, offset = view
    tensor.data = probe.data.set_(storage, offset + start // dtype.itemsize, shape, stride)
    return tensor


def _put(tensor: Tensor, data: Tensor) -> None:
    if _is_distributed(tensor):
        tensor._local_tensor = data  # type: ignore[attr-defined]
    else:
        tensor.data = data


# types of tensors that can be rebuilt from their bytes


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def _is_distributed(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # if the module is not imported, no DTensor exists
    return module is not None and type(tensor) is module.DTensor


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a distributed tensor; return any other tensor unchanged.

    If a collective operation still writes to the local tensor, wait for the end of this operation.
    """
    if type(tensor) in _PLAIN or not _is_distributed(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local  # type: ignore[no-any-return]


def is_understood(tensor: Tensor, device: torch.device) -> bool:
    """Return True if ``tensor`` is a plain strided tensor on ``device`` that can be rebuilt from its bytes.

    Return False for tensor subclasses, sparse and quantized tensors, and wrappers of ``torch.func``. Also
    return False for lazy conjugates, implicit zeros, and elements at unaligned addresses.
    """
    if type(tensor) not in _PLAIN or tensor.device != device:
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # functorch wrappers have no storage
        return False
    # The address is 0 for a tensor without elements, and for a tensor of implicit zeros.
    return not tensor.numel() if address == 0 else address % tensor.itemsize == 0


# Storages of the model


class StaticStorages:
    """The storages of the model's parameters, gradients and buffers.

    Megatron's flat buffers of parameters and gradients (``main_grad``) are included.

    Attributes:
        addresses: Weak references to the storages, by the address of the storage object.
    """

    def __init__(self) -> None:
        self.addresses: dict[int, weakref.ref[UntypedStorage]] = {}

    def refresh(self, modules: Iterable[torch.nn.Module]) -> None:
        """Collect the storages again between steps, because optimizers may replace storages."""
        with without_subclasses():  # otherwise an offloaded frozen weight would be read from the store
            tensors = filter(_has_storage, chain.from_iterable(map(_static_tensors, modules)))
            storages = (local_of(tensor).untyped_storage() for tensor in tensors)
            self.addresses = {storage._cdata: weakref.ref(storage) for storage in storages}

    def __contains__(self, storage: UntypedStorage) -> bool:
        found = self.addresses.get(storage._cdata)
        # A gradient may be freed during the step, and an activation may reuse the address of its storage.
        return found is not None and found() is storage


def _static_tensors(module: torch.nn.Module) -> list[Any]:
    found: list[Any] = []
    for inner in modules_in(module):
        found += inner._buffers.values()
        for parameter in inner._parameters.values():
            found.append(parameter)
            # A parameter that ``functional_call`` computed is not a leaf, so it has no gradient of its own.
            if parameter is not None and parameter.is_leaf and parameter.grad is not None:
                found.append(parameter.grad)
            found.append(getattr(parameter, "main_grad", None))
    return found


def _has_storage(tensor: object) -> bool:
    """Return True if a tensor has a storage. Wrappers inside transforms of ``torch.func`` have no storage."""
    if not isinstance(tensor, Tensor) or is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and not is_transform_wrapper(tensor)
