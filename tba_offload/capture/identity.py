"""What a saved tensor is: a storage, and a view of it.

An activation is identified by its storage object, never by an address or an ``id()``, because addresses
are reused. PyTorch hands out the same Python object for a storage as long as the storage lives, and a weak
reference to it stays alive while only C++ holds the storage.

A distributed tensor (``DTensor``) is identified by the storage of its local tensor, which has its bytes on
this rank, and by its own version, because its operations do not count at the local tensor.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from tba_offload.device.ranges import blank
from tba_offload.layers.nested import modules_in

if TYPE_CHECKING:
    from collections.abc import Iterable


class View(NamedTuple):
    """How a tensor looks at its storage; ``offset`` and ``stride`` count elements, as in PyTorch."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Return the view that ``tensor`` is."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())  # type: ignore[arg-type]

    def footprint(self) -> tuple[int, int, int]:
        """Return the bytes of the storage that the view needs.

        Returns:
            Offset of its first element, end of its last one, and bytes of its elements, those that ``expand``
            repeats counted once.
        """
        dtype, shape, stride, offset = self
        reach, count, itemsize = 0, 1, dtype.itemsize
        for size, step in zip(shape, stride, strict=True):
            if not size:
                return offset * itemsize, offset * itemsize, 0
            if step:
                reach += (size - 1) * step
                count *= size
        return offset * itemsize, (offset + reach + 1) * itemsize, count * itemsize

    def distinct(self) -> View:
        """Return the same view without the repetitions of ``expand``."""
        if 0 not in self.stride:
            return self
        sizes = zip(self.shape, self.stride, strict=True)
        return self._replace(shape=tuple(size if stride else 1 for size, stride in sizes))

    def moved(self, nbytes: int) -> View:
        """Return the same view of a storage in which everything lies ``nbytes`` further on."""
        return View(self.dtype, self.shape, self.stride, self.offset + nbytes // self.dtype.itemsize)


def viewed(storage: torch.UntypedStorage, view: View, shift: int = 0) -> torch.Tensor:
    """Return the tensor that ``view`` makes of ``storage``, sharing its memory.

    Args:
        storage: The bytes.
        view: How to look at them.
        shift: Everything lies this many bytes further on than the view says.
    """
    # A new tensor with a version counter of its own, made without a way through the dispatcher.
    tensor = blank(view.dtype, storage.device).data
    offset = view.offset + shift // view.dtype.itemsize if shift else view.offset
    return tensor.set_(storage, offset, view.shape, view.stride)


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of ``tensor`` but not its memory.

    Saved-tensor hooks switch off autograd's own check for changes in place, so we compare versions
    ourselves at unpack. The counter must be kept until then, the memory must not.
    """
    witness = tensor.detach()
    empty = blank(tensor.dtype, tensor.device)
    if type(witness) is torch.Tensor:
        witness.data = empty
    else:
        _put(witness, empty)
    return witness


def restore(storage: torch.UntypedStorage, view: View, witness: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """As :func:`viewed`, for backward: a change of the tensor in place counts at ``witness`` too.

    So the next one that is given the same saved tensor is told, as with autograd's own check.
    """
    tensor = witness.detach()
    if type(tensor) is not torch.Tensor:
        _put(tensor, viewed(storage, view, shift))
        return tensor
    dtype, shape, stride, offset = view
    if shift:
        offset += shift // dtype.itemsize
    tensor.data = witness.data.set_(storage, offset, shape, stride)
    return tensor


def _put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give a detached tensor other bytes; its version counter, and how it is distributed, stay."""
    if type(tensor) is torch.Tensor or not _is_distributed(tensor):
        tensor.data = data
    else:
        tensor._local_tensor = data  # type: ignore[attr-defined]


def shares_version(witness: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two tensors have one version counter, so that a change of one is seen at the other.

    Tensors that share a storage need not share the counter: ``.data`` and ``from_numpy`` give a new one.
    PyTorch offers no question for that, so the counter is moved and moved back. No line of Python is run in
    between, where another thread might take the tensor for one that was changed.
    """
    version = witness._version
    if tensor._version != version:
        return False
    move = torch._C._autograd._unsafe_set_version_counter
    _, found, _ = map(_call, (
        partial(move, (witness,), (version + 1,)),
        partial(_version_of, tensor),
        partial(move, (witness,), (version,)),
    ))  # fmt: skip
    return bool(found != version)


_call = methodcaller("__call__")

_version_of = attrgetter("_version")


def _is_distributed(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # no object is of a class that is not imported
    return module is not None and type(tensor) is module.DTensor


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the bytes: of a distributed one the local one, else itself.

    A collective that is still to deliver them is waited for, as the operation that saves them does next.
    """
    if type(tensor) in _PLAIN or not _is_distributed(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local  # type: ignore[no-any-return]


def is_understood(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a saved tensor is a plain strided one on ``device`` that can be rebuilt from its bytes.

    Subclasses, sparse, quantized and functorch tensors, lazy conjugates, empty tensors, implicit zeros and
    elements that straddle their alignment are not.
    """
    kind = type(tensor)
    if (
        (kind is not torch.Tensor and kind is not torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.device != device
        or tensor.numel() == 0
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # functorch's wrappers have no storage
        return False
    # Where restored bytes can be: tensors of implicit zeros are nowhere.
    return address != 0 and address % tensor.itemsize == 0


def is_nothing(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a plain one without elements; it may be a view of a large storage."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() == 0
    )


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

    def __len__(self) -> int:
        return len(self.addresses)


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
    """Whether it is a tensor with bytes of its own; a transform of the whole model gives it wrappers."""
    return (
        isinstance(tensor, torch.Tensor)
        and not is_lazy(tensor)
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
