"""Selection of frozen weights to offload, and transfers of a single tensor between memory and store."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tba_offload.config import format_size
from tba_offload.device import ByteRange, new_storage
from tba_offload.device.digest import sums
from tba_offload.device.meters import plain_storage
from tba_offload.errors import SessionError, TransferError
from tba_offload.torch_private import users_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tba_offload.states.home import Home
    from tba_offload.store.pool import Transfer

    Modules = Sequence[nn.Module]
    Count = Callable[[int], object]


# ---- which weights -------------------------------------------------------------------------------


def own_weights(
    chunks: Modules, layers: Modules, at_least: int, device: torch.device
) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield each frozen weight whose memory has no other user, with the number of its layer and its name.

    Args:
        chunks: The model or its chunks.
        layers: Its layers.
        at_least: Smallest size of a storage to offload, in bytes.
        device: Device of the weights to offload. Transfers are ordered with the work of this device only.
    """
    owner = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    named = chain.from_iterable(chunk.named_parameters() for chunk in chunks)
    names = {id(parameter): name for name, parameter in named}
    users: defaultdict[int, dict[tuple[int | None, int], Any]] = defaultdict(dict)
    for module in chain.from_iterable(chunk.modules() for chunk in chunks):
        # Call the methods of nn.Module: Megatron's data-parallel wrapper has its own attribute `buffers`.
        own = nn.Module.parameters(module, recurse=False), nn.Module.buffers(module, recurse=False)
        for tensor in chain(*own):
            if (storage := plain_storage(tensor)) is not None:
                users[storage._cdata][owner.get(module), id(tensor)] = tensor
    for found in users.values():
        ((number, _), weight), *others = found.items()
        if others or number is None or weight.device != device or type(weight) is not nn.Parameter:
            continue
        # A bool has no value that could mark missing data.
        is_frozen = not weight.requires_grad and weight.dtype is not torch.bool
        if is_frozen and weight.untyped_storage().nbytes() >= max(at_least, 1):
            yield number, names[id(weight)], weight


def left_out(layers: Modules, at_least: int, device: torch.device) -> str:
    """Return a text that names the frozen weights that stay in memory because of their class or device.

    The text is empty if there are no such weights.

    Args:
        layers: The layers.
        at_least: Smallest size of a weight to offload, in bytes.
        device: Device of the weights to offload.
    """
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for parameter in {id(each): each for layer in layers for each in layer.parameters()}.values():
        nbytes, kind = parameter.numel() * parameter.itemsize, type(parameter)
        if parameter.requires_grad or parameter.is_meta or nbytes < at_least:
            continue
        if kind is not nn.Parameter:
            groups[f"of the class {kind.__module__}.{kind.__qualname__}"].append(nbytes)
        elif parameter.device != device:
            groups[f"on {parameter.device}"].append(nbytes)
    return ", ".join(f"{len(sizes)} {what} ({format_size(sum(sizes))})" for what, sizes in groups.items())


# ---- one tensor ----------------------------------------------------------------------------------


class Part:
    """A tensor that owns its storage, in memory or in the store.

    Autograd saves weights and their views by storage. The storage therefore stays the same object. It is
    empty while the bytes are in the store. During this time, the data of the tensor is a single NaN, expanded
    to the shape of the tensor.

    Uses outside of the layer get a copy of the bytes in memory of their own. Views that the program holds do
    not lose their memory when the layer ends. All methods run with torch functions of subclasses disabled.

    Args:
        name: Name of the weight, for messages.
        tensor: The tensor.
        home: The extents of the bytes in the store.
        count: Called with each change of memory in bytes.

    Attributes:
        nbytes: Size of the storage in bytes.
        here: The tensor with its values while it is in memory. It has the layout of the tensor at any time.
        is_back: Whether offloading has ended and the bytes are in memory.
    """

    def __init__(self, name: str, tensor: torch.Tensor, home: Home, count: Count) -> None:
        self.tensor = tensor
        self.nbytes = tensor.untyped_storage().nbytes()
        self.is_back = self._is_here = True
        self._name, self._home, self._count = name, home, count
        # Memory from a file or from another library may not be resizable, so allocate new memory.
        self._storage = new_storage(self.nbytes, tensor.device)
        self.here, self._away = _over(self._storage, tensor), _nan_like(tensor)
        self._stream: Any = None  # the stream on which the memory was allocated
        self._reads: list[Transfer] | None = None
        self._version = self._lent_version = -1
        self._lent: torch.UntypedStorage | None = None
        self._digest: bytes | None = None

    @property
    def _bytes(self) -> ByteRange:
        return ByteRange(self._storage, 0, self.nbytes)

    def write(self) -> None:
        """Write the bytes for the first time and free their memory.

        Raises:
            TransferError: The bytes cannot be written. They stay in memory.
        """
        self._bytes.tensor().copy_(ByteRange(self.tensor.untyped_storage(), 0, self.nbytes).tensor())
        self._write()
        self.is_back = False
        self._count(self.nbytes)
        self.tensor.data = self.here
        self._free()

    # ---- for the layer ---------------------------------------------------------------------------

    def begin_read(self) -> None:
        """Start to read the bytes, unless they are in memory or are being read."""
        if not self._is_here and self._reads is None:
            self._resize(self.nbytes)
            self._reads = self._home.read(self._bytes)

    def read(self) -> None:
        """Bring the bytes into memory, for use on the stream of the calling thread.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if not self._is_here:
            self._read()
            self._version = self.tensor._version
        stream = self._home.homes.device.stream()
        if stream != self._stream:  # the bytes were read ahead on the stream of the previous layer
            self._home.homes.device.use(self._bytes.tensor(), stream)

    def leave(self) -> None:
        """Free the memory. If the layer changed the values, write them first.

        Raises:
            TransferError: The values cannot be written.
        """
        if self._reads is not None:
            try:
                self._settle_reads()
            except TransferError:  # the layer raises the error when it runs
                return
        elif self._is_here and not self.is_lent and self.tensor._version != self._version:
            self._write()
        self._free()

    def come_back(self) -> None:
        """Bring the bytes back at the end of offloading.

        If the program has set other values, keep the new values.

        The extents are not released, because an interrupted transfer may still use them. The caller closes
        the store next.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if not (self.is_back or self._is_here or self.is_lent):
            self._read()
        self.is_back = True

    # ---- for others ------------------------------------------------------------------------------

    @property
    def is_lent(self) -> bool:
        """Whether the data of the tensor is in memory of its own now."""
        return self._lent is not None

    @property
    def is_used(self) -> bool:
        """Return True if other tensors use the memory that is lent."""
        return self.is_lent and users_of(self.tensor.untyped_storage()) > _OWN_USERS

    def lend(self) -> None:
        """Copy the bytes into memory of their own, unless they are lent.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if self.is_lent:
            return
        memory = ByteRange(new_storage(self.nbytes, self.here.device), 0, self.nbytes)
        if self._is_here:
            memory.tensor().copy_(self._bytes.tensor())
        else:
            self._home.settle_reads(self._home.read(memory))
        self.tensor.data = _over(memory.storage, self.here)
        self._take_note(memory.storage)

    def adopt(self) -> bool:
        """Regard the memory as lent if the layer set ``tensor.data``; return True in this case."""
        found = self.tensor.untyped_storage()
        if self.is_lent or found._cdata in {self._storage._cdata, self._away.untyped_storage()._cdata}:
            return False
        self._take_note(found)
        self._lent_version = -1
        return True

    def watch(self) -> None:
        """Note the values while others hold aliases. An alias may have a version counter of its own."""
        if self.is_lent and not self._is_changed():
            self._digest = self._digest or sums(_bytes_of(self.tensor))

    def reclaim(self) -> None:
        """Take back the memory that is lent. If the values were changed, write them first.

        Raises:
            SessionError: The program replaced the data by a tensor of another shape, data type or device.
            TransferError: The values cannot be written. They stay in memory.
        """
        if not self.is_lent:
            return
        if self._is_changed():
            self.check(self.tensor)
            self._rewrite()
        self.tensor.data = self.here if self._is_here else self._away
        self._lent = self._digest = None
        self._count(-self.nbytes)

    def check(self, data: torch.Tensor) -> None:
        """Check that ``data`` can replace the data of the tensor.

        Raises:
            SessionError: It has another shape, data type or device.
        """
        if _kind_of(data) != _kind_of(self.here):
            raise SessionError(
                f"the frozen weight {self._name} is offloaded as {_kind_of(self.here)}, but was set to "
                f"{_kind_of(data)}. Close the session first, convert the model, and attach again"
            )

    def _take_note(self, storage: torch.UntypedStorage) -> None:
        self._lent, self._digest, self._lent_version = storage, None, self.tensor._version
        self._count(self.nbytes)

    def _is_changed(self) -> bool:
        if self._lent_version != self.tensor._version or self._lent is not self.tensor.untyped_storage():
            return True
        return self._digest is not None and self._digest != sums(_bytes_of(self.tensor))

    def _rewrite(self) -> None:
        if self._reads is not None:
            self._read()
        was_here = self._is_here
        self._resize(self.nbytes)
        self.here.copy_(self.tensor)
        self._write()
        self._version = self.tensor._version
        if not was_here:
            self._resize(0)

    # ---- memory ----------------------------------------------------------------------------------

    def _write(self) -> None:
        self._home.settle_writes(self._home.write(self._bytes))

    def _read(self) -> None:
        self.begin_read()
        self._settle_reads()
        if not self.is_lent:
            self.tensor.data = self.here
        self._is_here = True

    def _settle_reads(self) -> None:
        self._home.settle_reads(self._reads or [])
        self._reads = None

    def _free(self) -> None:
        # Set this before the memory is freed. After an interrupt, the bytes are then read again.
        self._is_here = False
        if not self.is_lent:
            self.tensor.data = self._away
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        grown = nbytes - self._storage.nbytes()
        if grown:
            self._storage.resize_(nbytes)
            self._stream = self._home.homes.device.stream()
            self._count(grown)


_OWN_USERS = 2
"""Users of lent memory without other tensors: the tensor itself and the Python object of the storage."""


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of {tuple(tensor.shape)} on {tensor.device}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return ByteRange(storage, 0, storage.nbytes()).tensor()


@torch.inference_mode(mode=False)  # in inference mode the new tensor could not be trained later
def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


@torch.inference_mode(mode=False)
def _nan_like(weight: torch.Tensor) -> torch.Tensor:
    is_integer = not (weight.is_floating_point() or weight.is_complex())
    value = torch.iinfo(weight.dtype).max if is_integer else float("nan")
    return torch.full((1,), value, dtype=weight.dtype, device=weight.device).squeeze(0).expand(weight.shape)
