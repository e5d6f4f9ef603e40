"""Ranges of bytes in storages: what travels between device memory and a store.

A transfer needs an address and a length, not a tensor. Making a tensor costs the training thread two calls
into PyTorch, so it is left to the threads that need one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tba_offload.device.streams import Device

CACHE_LINE = 64
"""PyTorch aligns CPU allocations to this many bytes; kernels may choose their path by it."""


@functools.cache
def blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor of that type; shared, never to be written."""
    return torch.empty(0, dtype=dtype, device=device)


class ByteRange:
    """Bytes of a storage, which it keeps alive.

    Attributes:
        storage: The storage.
        start: Offset of the first byte in the storage.
        nbytes: Length in bytes.
        address: Where the first byte lies.
    """

    __slots__ = ("address", "nbytes", "start", "storage")

    def __init__(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        self.storage = storage
        self.start = start
        self.nbytes = nbytes
        self.address = storage.data_ptr() + start

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ByteRange:
        """Return the bytes of a tensor.

        Raises:
            ValueError: The tensor is not contiguous, so its bytes are no range.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor with strides {tensor.stride()} is not one range of bytes")
        start = int(tensor.storage_offset()) * tensor.itemsize
        return cls(tensor.untyped_storage(), start, tensor.nbytes)

    def part(self, start: int, nbytes: int) -> ByteRange:
        """``nbytes`` of this range from its byte ``start`` on.

        Raises:
            ValueError: It does not have so many.
        """
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} are not within {self.nbytes}")
        return ByteRange(self.storage, self.start + start, nbytes)

    def tensor(self) -> torch.Tensor:
        """Return a uint8 tensor of shape (nbytes,) that shares the bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.nbytes,), (1,))


def new_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Allocate bytes, with fewer calls than a tensor of them takes."""
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def aligned_range(nbytes: int, address: int, alignment: int, device: Device) -> ByteRange:
    """Allocate bytes that lie at the same place as ``address`` modulo the alignment.

    The same alignment serves two ends. Direct I/O can fill the buffer without a copy, because the store
    kept the bytes at that lead. And a kernel that picks its code path by the alignment of its operands
    picks the same one for restored data, so that results stay equal to the last bit.

    Args:
        nbytes: Payload in bytes.
        address: Where the bytes lay originally.
        alignment: What the store asks for, a power of two.
        device: Where to allocate.

    Returns:
        Uninitialized bytes. Their storage extends to the alignment boundary on both sides.
    """
    alignment = max(alignment, CACHE_LINE)
    lead = address % alignment
    padded = -(-(lead + nbytes) // alignment) * alignment
    size = padded + alignment - CACHE_LINE
    room = new_storage(size, device.torch_device)
    return ByteRange(room, -room.data_ptr() % alignment + lead, nbytes)
