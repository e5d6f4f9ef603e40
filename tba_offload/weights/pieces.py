"""Selection of frozen weights to offload, and transfers of a single weight between memory and store."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tba_offload.config import format_size
from tba_offload.device import ByteRange, new_storage
from tba_offload.device.meters import plain_storage
from tba_offload.errors import SessionError, TransferError

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
            name = next(name for name, each in layers[number].named_parameters() if each is weight)
            yield number, name, weight


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


# ---- one weight ----------------------------------------------------------------------------------


class FrozenWeight:
    """A frozen weight, in memory or in the store.

    Autograd saves weights and their views by storage. The storage therefore stays the same object. It is
    empty while the bytes are in the store. During this time, the parameter is a single NaN, expanded to the
    shape of the parameter. Reading the parameter gives NaN, and writing to it raises an error.

    Args:
        name: Name of the weight in its layer.
        parameter: The parameter.
        home: The extents of the bytes in the store.
        count: Called with each change of memory in bytes.

    Attributes:
        nbytes: Size of the storage in bytes.
        is_back: Whether offloading has ended and the bytes are in memory.
    """

    def __init__(self, name: str, parameter: nn.Parameter, home: Home, count: Count) -> None:
        self.parameter = parameter
        self.nbytes = parameter.untyped_storage().nbytes()
        self.is_back = self._is_here = True
        self._name, self._home, self._count = name, home, count
        # Memory from a file or from another library may not be resizable, so allocate new memory.
        self._storage = new_storage(self.nbytes, parameter.device)
        self._here, self._away = _over(self._storage, parameter), _nan_like(parameter)
        self._stream: Any = None  # the stream on which the memory was allocated
        self._reads: list[Transfer] | None = None
        self._version = -1

    @property
    def _bytes(self) -> ByteRange:
        return ByteRange(self._storage, 0, self.nbytes)

    def write(self) -> None:
        """Write the bytes for the first time and free their memory.

        Raises:
            TransferError: The bytes cannot be written. They stay in memory.
        """
        self._bytes.tensor().copy_(ByteRange(self.parameter.untyped_storage(), 0, self.nbytes).tensor())
        self._home.settle_writes(self._home.write(self._bytes))
        self.is_back = False
        self._count(self.nbytes)
        self.parameter.data = self._here
        self._free()

    def begin_read(self) -> None:
        """Start to read the bytes, unless they are in memory or are being read."""
        if not self._is_here and self._reads is None:
            self._resize(self.nbytes)
            self._reads = self._home.read(self._bytes)

    def read(self) -> None:
        """Bring the bytes into memory, for use on the stream of the calling thread.

        Raises:
            TransferError: The bytes cannot be read.
            SessionError: The parameter was changed while its bytes were in the store.
        """
        if not self._is_here:
            if self.parameter.requires_grad or not self._is_ours():
                what = "is trained now" if self.parameter.requires_grad else "was replaced"
                raise SessionError(
                    f"the frozen weight {self._name} {what} while its values are in the store. Close the "
                    "frozen weights first, and offload them again afterwards"
                )
            self._read()
            self._version = self.parameter._version
        stream = self._home.homes.device.stream()
        if stream != self._stream:  # the bytes were read ahead on the stream of the previous layer
            self._home.homes.device.use(self._bytes.tensor(), stream)

    def leave(self) -> None:
        """Free the memory. If the values were changed, write them first.

        Raises:
            TransferError: The values cannot be written.
        """
        if self._reads is not None:
            try:
                self._settle_reads()
            except TransferError:  # the layer raises the error when it runs
                return
        elif self._is_here and self.parameter._version != self._version:
            self._home.settle_writes(self._home.write(self._bytes))
        self._free()

    def come_back(self) -> None:
        """Bring the bytes back at the end of offloading.

        If the program has set other values, keep the new values.

        The extents are not released, because an interrupted transfer may still use them. The caller closes
        the store next.

        Raises:
            TransferError: The bytes cannot be read.
            SessionError: The program computed with the parameter while it was NaN. The parameter has its
                values again.
        """
        if self.is_back:
            return
        if not self._is_here:
            self._read()
        self.is_back = True
        if not self._is_ours() and self.parameter.isnan().all():
            self.parameter.data = self._here
            raise SessionError(
                f"a computation changed the frozen weight {self._name} while its values were in the store. "
                "The weight has its old values again. Close the frozen weights first, then compute with them"
            )

    def copy(self) -> torch.Tensor:
        """Return the values in new host memory.

        Raises:
            TransferError: The values cannot be read.
        """
        here = self._bytes.tensor().to("cpu", copy=True) if self._is_here else self._home.on_host(self.nbytes)
        return _over(here.clone().untyped_storage(), self._here)  # with a new storage and no offset

    def _read(self) -> None:
        self.begin_read()
        self._settle_reads()
        if self._is_ours():
            self.parameter.data = self._here
        self._is_here = True

    def _settle_reads(self) -> None:
        self._home.settle_reads(self._reads or [])
        self._reads = None

    def _free(self) -> None:
        # Set this before the memory is freed. After an interrupt, the bytes are then read again.
        self._is_here = False
        if self._is_ours():
            self.parameter.data = self._away
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        grown = nbytes - self._storage.nbytes()
        if grown:
            self._storage.resize_(nbytes)
            self._stream = self._home.homes.device.stream()
            self._count(grown)

    def _is_ours(self) -> bool:
        """Return True if the parameter still has a storage that this object set: the values, or NaN."""
        found = self.parameter.untyped_storage()._cdata
        return found in {self._storage._cdata, self._away.untyped_storage()._cdata}


@torch.inference_mode(mode=False)  # in inference mode the new tensor could not be trained later
def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


@torch.inference_mode(mode=False)
def _nan_like(weight: torch.Tensor) -> torch.Tensor:
    is_integer = not (weight.is_floating_point() or weight.is_complex())
    value = torch.iinfo(weight.dtype).max if is_integer else float("nan")
    return torch.full((1,), value, dtype=weight.dtype, device=weight.device).squeeze(0).expand(weight.shape)
