"""One storage of a frozen weight, and its transfers between memory and store."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.device import ByteRange, new_storage
from tba_offload.device.digest import sums
from tba_offload.errors import TransferError
from tba_offload.states.home import Home
from tba_offload.torch_private import resize, unreadable, users_of, without_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tba_offload.layers.frozen import Found
    from tba_offload.states.home import Homes
    from tba_offload.store.pool import Transfer

_FREED = "was freed at the end of its layer. To use a view of the weight later, clone the view in the layer"
_SHIFT = 8  # no multiple of CACHE_LINE, which all memory of PyTorch is aligned to


class Part:
    """A storage of a frozen weight, in memory or in the store.

    Tensors that autograd saves in the layer share the storage of the weight. The layer therefore uses the
    same storage object in all its runs. While the bytes are in the store, this storage has 0 bytes, and the
    weight is an :func:`unreadable` tensor.

    Uses outside of the layer get a copy of the bytes in a second storage. Views of this storage keep their
    memory when the layer ends. Call all methods inside ``torch_private.without_subclasses()``.

    Args:
        tensors: All tensors on the storage.
        found: The weight that the tensors belong to. Each slice of the weight gets its own extents.
        homes: The store.
        count: Function that is called with each change of the memory, in bytes.

    Attributes:
        nbytes: Size of the storage in bytes.
        slices: Indices of the slices. All slices have the same size, and each slice can be read alone.
        is_back: Whether offloading has ended and the bytes are in memory.
        lent: The second storage, for uses outside of the layer; ``None`` if there is no such use.
    """

    def __init__(
        self, tensors: list[torch.Tensor], found: Found, homes: Homes, count: Callable[[int], object]
    ) -> None:
        self.tensors, self.slices, self.is_back = tensors, range(found.slices), True
        self.nbytes = tensors[0].untyped_storage().nbytes()
        self.lent: torch.UntypedStorage | None = None
        self._homes = [Home(homes, found.name, "frozen weights") for _ in self.slices]
        self._device, self._count, self._name = homes.device, count, found.name
        self._stream: Any = None  # the stream on which the memory was allocated
        self._resident = set(self.slices)
        self._reads: dict[int, list[Transfer]] = {}
        self._version = self._lent_version = -1
        self._digest: bytes | None = None

    def write(self) -> None:
        """Write the bytes for the first time and free their memory.

        Raises:
            TransferError: The bytes cannot be written, and stay in memory.
        """
        # Memory from a file or from another library may not be resizable, so allocate new memory.
        self._storage = new_storage(self.nbytes, self.tensors[0].device)
        _bytes_of(self._storage).copy_(_bytes_of(self.tensors[0].untyped_storage()))
        # The program may have set data of another layout while the weight was in memory.
        self._in_layer = [_over(self._storage, each) for each in self.tensors]
        self._in_store = list(map(unreadable, self.tensors))
        self._write()
        self.is_back = False
        self._count(self.nbytes)
        self._free()

    # ---- for the layer ---------------------------------------------------------------------------

    def begin_read(self, wanted: Iterable[int]) -> None:
        """Start to read the slices ``wanted``, except slices that are in memory or are being read."""
        if missing := [each for each in wanted if each not in self._resident and each not in self._reads]:
            self._resize(self.nbytes)
            for each in missing:
                self._reads[each] = self._homes[each].read(self._range(each))

    def read(self, wanted: Iterable[int]) -> None:
        """Bring the slices ``wanted`` into memory, for use on the stream of the calling thread.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if not self._resident:
            self._version = self._versions()
            self._resize(self.nbytes)
        self.begin_read(wanted)
        self._settle_reads(wanted)
        if self.lent is None:
            self._point_to(self._in_layer)
        # The bytes may have been read ahead on the stream of the previous layer.
        if (stream := self._device.stream()) != self._stream:
            self._device.use(_bytes_of(self._storage), stream)

    def leave(self) -> None:
        """Write the values if the layer changed the values, then free the memory of the layer.

        Raises:
            TransferError: The values cannot be written.
        """
        if self._resident and self.lent is None and self._versions() != self._version:
            self.read(self.slices)
            self._write()
        with suppress(TransferError):  # the layer raises the error when it runs
            self._settle_reads(self.slices)
            self._free()

    def come_back(self) -> None:
        """Bring the bytes back at the end of offloading.

        If the program has set other values, keep the new values.

        From now on, the bytes are not counted. The extents are not released, because an interrupted transfer
        may still use them.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if not self.is_back:
            if self.lent is None:
                self.read(self.slices)
            self.is_back = True
            self._count(-self._storage.nbytes() - (self.nbytes if self.lent is not None else 0))

    # ---- for others ------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Whether tensors other than the weight use the second storage."""
        # The storage is also used by the tensors themselves, and by its Python object.
        return self.lent is not None and users_of(self.tensors[0].untyped_storage()) > 1 + len(self.tensors)

    def lend(self) -> None:
        """Copy the bytes into a second storage for uses outside of the layer, unless this storage exists.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if self.lent is not None:
            return
        is_in_layer = self._storage.nbytes() > 0
        self.read(self.slices)
        self.lent, self._lent_version = new_storage(self.nbytes, self._storage.device), self._version
        self._count(self.nbytes)
        _bytes_of(self.lent).copy_(_bytes_of(self._storage))
        self._point_to([_over(self.lent, each) for each in self._in_layer])
        if not is_in_layer:
            self._free()

    def adopt(self) -> None:
        """If the layer has set ``tensor.data``, treat the new storage as the second storage."""
        found = self.tensors[0].untyped_storage()
        if self._resident and self.lent is None and found._cdata != self._storage._cdata:
            self.lent, self._lent_version = found, -1
            self._count(self.nbytes)

    def watch(self) -> None:
        """Compute a checksum of the second storage, because its views may have their own version counters."""
        if self.lent is not None and not self._is_changed():
            self._digest = self._digest or sums(_bytes_of(self.lent))

    def reclaim(self) -> None:
        """Write changed values of the second storage to the store, then free the second storage.

        Raises:
            TransferError: The values cannot be written, and stay in memory.
        """
        if self.lent is None:
            return
        if self._is_changed():
            self._settle_reads(self.slices)
            self._resize(self.nbytes)
            self._in_layer[0].copy_(self.tensors[0])
            self._write()
        self.lent = self._digest = None
        self._count(-self.nbytes)
        self._point_to(self._in_layer if self._resident else self._in_store)
        if not (self._resident or self._reads):
            self._resize(0)

    @property
    def stays(self) -> str:
        """The reason why the bytes cannot be freed or written; '' if there is no reason."""
        said = self.unlike(self.tensors[0]) if self.lent is not None else ""
        # An array of NumPy forbids a resize.
        return said if self._storage.resizable() else "shares memory with other code"

    def unlike(self, data: torch.Tensor) -> str:
        """Return an error text if shape, data type or device of ``data`` differ from the weight, else ''."""
        kind, found = map(_kind_of, (self._in_layer[0], data))
        return "" if found == kind else f"is offloaded as {kind}, but was set to {found}"

    def _is_changed(self) -> bool:
        found = self.tensors[0].untyped_storage()
        if self._lent_version != self._versions() or self.lent is not found:
            return True
        return self._digest is not None and self._digest != sums(_bytes_of(found))

    # ---- memory ----------------------------------------------------------------------------------

    def _range(self, number: int) -> ByteRange:
        size = self.nbytes // len(self.slices)
        return ByteRange(self._storage, number * size, size)

    def _point_to(self, others: list[torch.Tensor]) -> None:
        """Give the tensors the memory of other tensors."""
        # The assignment needs autograd's dispatch keys, which inference mode removes.
        with torch.inference_mode(mode=False), without_dispatch():
            for tensor, other in zip(self.tensors, others, strict=True):
                tensor.data = other

    def _versions(self) -> int:
        return sum(each._version for each in self.tensors)

    def _write(self) -> None:
        for number, home in enumerate(self._homes):
            source = self._range(number)
            if len(self.slices) > 1:
                # A read to an address with the alignment of the write may overwrite the bytes beside it.
                memory = new_storage(source.nbytes + _SHIFT, self._storage.device)
                copy = ByteRange(memory, _SHIFT, source.nbytes)
                copy.tensor().copy_(source.tensor())
                source = copy
            home.settle_writes(home.write(source))
        self._version = self._versions()

    def _settle_reads(self, wanted: Iterable[int]) -> None:
        for each in self._reads.keys() & wanted:
            self._homes[each].settle_reads(self._reads[each])
            del self._reads[each]
            self._resident.add(each)

    def _free(self) -> None:
        # Set this before the memory is freed. After an interrupt, the bytes are then read again.
        self._resident = set()
        if self.lent is None:
            self._point_to(self._in_store)
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        if grown := nbytes - self._storage.nbytes():
            resize(self._storage, nbytes, f"the memory of the frozen weight {self._name} {_FREED}")
            self._stream = self._device.stream()
            self._count(grown)


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of {tuple(tensor.shape)} on {tensor.device}"


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return ByteRange(storage, 0, storage.nbytes()).tensor()


@torch.inference_mode(mode=False)  # in inference mode the new tensor could not be trained later
def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a storage, with the data type and the layout of another tensor."""
    made = torch.empty(0, dtype=like.dtype, device=storage.device)
    return made.set_(storage, like.storage_offset(), like.shape, like.stride())
