"""Selection of frozen weights to offload, and transfers of a single tensor between memory and store."""

from __future__ import annotations

import functools
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tba_offload.config import format_size
from tba_offload.device import CACHE_LINE, ByteRange, new_storage
from tba_offload.device.digest import sums
from tba_offload.errors import TransferError
from tba_offload.torch_private import is_transform_wrapper, users_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tba_offload.states.home import Home
    from tba_offload.store.pool import Transfer

    Modules = Sequence[nn.Module]
    Tensors = list[torch.Tensor]
    Count = Callable[[int], object]


# ---- which weights -------------------------------------------------------------------------------


def own_weights(
    chunks: Modules, layers: Modules, at_least: int, device: torch.device
) -> Iterator[tuple[int, nn.Module, torch.Tensor, list[Tensors]]]:
    """Yield each frozen weight with memory that has no other user.

    Args:
        chunks: The model or its chunks.
        layers: Its layers.
        at_least: Smallest size of a storage to offload, in bytes.
        device: Device of the weights to offload. Transfers are ordered with the work of this device only.

    Yields:
        The number of the layer, the module of the weight, the weight, and its tensors by their storage.
    """
    owner = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    users: defaultdict[int, set[tuple[int | None, int]]] = defaultdict(set)
    found = {}
    for module in chain.from_iterable(chunk.modules() for chunk in chunks):
        # Call the methods of nn.Module: Megatron's data-parallel wrapper has its own attribute `buffers`.
        own = nn.Module.parameters(module, recurse=False), nn.Module.buffers(module, recurse=False)
        for tensor in chain(*own):
            parts: defaultdict[int, Tensors] = defaultdict(list)
            for part in parts_of(tensor, module):
                if not hasattr(part, "__tensor_flatten__"):
                    parts[part.untyped_storage()._cdata].append(part)
            for storage in parts:
                users[storage].add((owner.get(module), id(tensor)))
            found[owner.get(module), id(tensor)] = module, tensor, parts
    for (number, _), (module, weight, parts) in found.items():
        is_frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
        if number is None or not is_frozen or weight.device != device:
            continue
        groups = [part for storage, part in parts.items() if len(users[storage]) == 1]
        groups = [each for each in groups if each[0].untyped_storage().nbytes() >= max(at_least, 1)]
        if groups:
            yield number, module, weight, groups


def parts_of(tensor: Any, module: nn.Module | None = None) -> Tensors:
    """Return a tensor, and the tensors that it consists of; nothing if its class is not known.

    Args:
        tensor: A parameter, or a tensor that is a part of it.
        module: The module of the parameter.
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
    """Return the expert of each module that is in an expert.

    Experts are the modules of a list, if it has several and they have one class. Their weights are read when
    an expert runs, so this is right for other lists too.
    """
    found: dict[nn.Module, nn.Module] = {}
    for each in layer.modules():
        if isinstance(each, nn.ModuleList) and len(each) > 1 and len(set(map(type, each))) == 1:
            for expert in each:
                found = dict.fromkeys(expert.modules(), expert) | found
    return found


def slices_of(weight: torch.Tensor, module: nn.Module) -> int:
    """Return the number of experts if they are slices of one parameter, else 1."""
    if type(weight) is not nn.Parameter or weight.ndim != 3 or not weight.is_contiguous():
        return 1
    is_whole = weight.untyped_storage().nbytes() == weight.nbytes and not weight[0].nbytes % CACHE_LINE
    is_named = type(module).__name__.endswith("Experts") or getattr(module, "num_experts", 0) == len(weight)
    return len(weight) if is_whole and is_named else 1


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
        if not parts_of(parameter):
            groups[f"of the class {kind.__module__}.{kind.__qualname__}"].append(nbytes)
        elif parameter.device != device:
            groups[f"on {parameter.device}"].append(nbytes)
    return ", ".join(f"{len(sizes)} {what} ({format_size(sum(sizes))})" for what, sizes in groups.items())


# ---- one storage ---------------------------------------------------------------------------------


class Part:
    """A storage of a frozen weight, in memory or in the store.

    Autograd saves weights and their views by storage. The storage therefore stays the same object. It is
    empty while the bytes are in the store. During this time, each tensor has a single element with all bits
    set, expanded to the shape of the tensor. For numbers with a fraction, this is NaN.

    Uses outside of the layer get a copy of the bytes in memory of their own. Views that the program holds do
    not lose their memory when the layer ends. Call all methods without torch functions of subclasses.

    Args:
        tensors: All tensors on the storage.
        homes: The extents of the bytes in the store. Each of them has the same share of the bytes.
        count: Called with each change of memory in bytes.

    Attributes:
        nbytes: Size of the storage in bytes.
        slices: Number of equal shares that are read alone.
        is_back: Whether offloading has ended and the bytes are in memory.
        lent: The memory for uses outside of the layer; ``None`` if there are none.
    """

    def __init__(self, tensors: Tensors, homes: Sequence[Home], count: Count) -> None:
        self.tensors = tensors
        self.nbytes = tensors[0].untyped_storage().nbytes()
        self.is_back = True
        self._homes, self._count, self.slices = homes, count, len(homes)
        self._device = homes[0].homes.device
        # Memory from a file or from another library may not be resizable, so allocate new memory.
        self._storage = new_storage(self.nbytes, tensors[0].device)
        self._kind = _kind_of(tensors[0])
        self._layouts = [(each.dtype, each.storage_offset(), each.shape, each.stride()) for each in tensors]
        self._stream: Any = None  # the stream on which the memory was allocated
        self._resident = set(range(len(homes)))
        self._reads: dict[int, list[Transfer]] = {}
        self._version = self._lent_version = -1
        self.lent: torch.UntypedStorage | None = None
        self._digest: bytes | None = None

    def write(self) -> None:
        """Write the bytes for the first time and free their memory.

        Raises:
            TransferError: The bytes cannot be written. They stay in memory.
        """
        _bytes_of(self._storage).copy_(_bytes_of(self.tensors[0].untyped_storage()))
        self._write()
        self.is_back = False
        self._count(self.nbytes)
        self._put(self._storage)
        self._free()

    # ---- for the layer ---------------------------------------------------------------------------

    def begin_read(self, wanted: Iterable[int] | None = None) -> None:
        """Start to read bytes, unless they are in memory or are being read.

        Args:
            wanted: Numbers of the extents. By default, all.
        """
        wanted = range(self.slices) if wanted is None else wanted
        if missing := [each for each in wanted if each not in self._resident and each not in self._reads]:
            self._resize(self.nbytes)
            for each in missing:
                self._reads[each] = self._homes[each].read(self._range(self._storage, each))

    def read(self, wanted: Iterable[int] | None = None) -> None:
        """Bring bytes into memory, for use on the stream of the calling thread.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if not self._resident:
            self._version = self._versions()
            self._resize(self.nbytes)
        self.begin_read(wanted)
        self._settle_reads(list(self._reads) if wanted is None else wanted)
        if self.lent is None:
            self._put(self._storage)
        stream = self._device.stream()
        if stream != self._stream:  # the bytes were read ahead on the stream of the previous layer
            self._device.use(_bytes_of(self._storage), stream)

    def leave(self) -> None:
        """Free the memory. If the layer changed the values, write them first.

        Raises:
            TransferError: The values cannot be written.
        """
        if self._resident and not self.lent is not None and self._versions() != self._version:
            self.read()
            self._write()
        try:
            self._settle_reads(list(self._reads))
        except TransferError:  # the layer raises the error when it runs
            return
        self._free()

    def come_back(self) -> None:
        """Bring the bytes back at the end of offloading.

        If the program has set other values, keep the new values.

        The extents are not released, because an interrupted transfer may still use them. The caller closes
        the store next.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if not self.is_back and self.lent is None:
            self.read()
        self.is_back = True

    # ---- for others ------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Whether other tensors use the memory that is lent."""
        # The storage is also used by the tensors themselves, and by its Python object.
        return self.lent is not None and users_of(self.tensors[0].untyped_storage()) > 1 + len(self.tensors)

    def lend(self) -> None:
        """Copy the bytes into memory of their own, unless they are lent.

        Raises:
            TransferError: The bytes cannot be read.
        """
        if self.lent is not None:
            return
        storage, reads = new_storage(self.nbytes, self._storage.device), []
        for number, home in enumerate(self._homes):
            target = self._range(storage, number)
            if number in self._resident:
                target.tensor().copy_(self._range(self._storage, number).tensor())
            else:
                reads.append((home, home.read(target)))
        for home, transfers in reads:
            home.settle_reads(transfers)
        self._put(storage)
        self._take_note(storage, self._versions())

    def adopt(self) -> bool:
        """Regard the memory as lent if the layer set ``tensor.data``; return True in this case."""
        found = self.tensors[0].untyped_storage()
        own = {self._storage._cdata, _placeholder(self._storage.device)._cdata}
        if self.lent is not None or found._cdata in own:
            return False
        self._take_note(found, version=-1)
        return True

    def watch(self) -> None:
        """Note the values while others hold aliases. An alias may have a version counter of its own."""
        if self.lent is not None and not self._is_changed():
            self._digest = self._digest or sums(_bytes_of(self.tensors[0].untyped_storage()))

    def reclaim(self) -> None:
        """Take back the memory that is lent. If the values were changed, write them first.

        Raises:
            TransferError: The values cannot be written. They stay in memory.
        """
        if self.lent is None:
            return
        if self._is_changed():
            self._settle_reads(list(self._reads))
            self._resize(self.nbytes)
            _over(self._storage, *self._layouts[0]).copy_(self.tensors[0])
            self._write()
            if not self._resident:
                self._resize(0)
        self._put(self._storage if self._resident else None)
        self.lent = self._digest = None
        self._count(-self.nbytes)

    def unlike(self, data: torch.Tensor) -> str:
        """Return a text if ``data`` has not the shape, data type and device of the first tensor, else ''."""
        found = _kind_of(data)
        return "" if found == self._kind else f"is offloaded as {self._kind}, but was set to {found}"

    def _take_note(self, storage: torch.UntypedStorage, version: int) -> None:
        self.lent, self._lent_version = storage, version
        self._count(self.nbytes)

    def _is_changed(self) -> bool:
        found = self.tensors[0].untyped_storage()
        if self._lent_version != self._versions() or self.lent is not found:
            return True
        return self._digest is not None and self._digest != sums(_bytes_of(found))

    # ---- memory ----------------------------------------------------------------------------------

    def _range(self, storage: torch.UntypedStorage, number: int) -> ByteRange:
        size = self.nbytes // self.slices
        return ByteRange(storage, number * size, size)

    def _put(self, storage: torch.UntypedStorage | None) -> None:
        """Set the memory of the tensors; ``None`` for the placeholder."""
        for tensor, (dtype, offset, shape, stride) in zip(self.tensors, self._layouts, strict=True):
            if storage is None:
                tensor.data = _over(_placeholder(self._storage.device), dtype, 0, shape, (0,) * len(shape))
            else:
                tensor.data = _over(storage, dtype, offset, shape, stride)

    def _versions(self) -> int:
        return sum(each._version for each in self.tensors)

    def _write(self) -> None:
        for number, home in enumerate(self._homes):
            source = self._range(self._storage, number)
            if self.slices > 1:
                # A read to an address with the alignment of the write may overwrite the bytes beside it.
                copy = ByteRange(
                    new_storage(source.nbytes + _SHIFT, self._storage.device), _SHIFT, source.nbytes
                )
                copy.tensor().copy_(source.tensor())
                source = copy
            home.settle_writes(home.write(source))
        self._version = self._versions()

    def _settle_reads(self, wanted: Iterable[int]) -> None:
        for each in wanted:
            if each in self._reads:
                self._homes[each].settle_reads(self._reads[each])
                del self._reads[each]
                self._resident.add(each)

    def _free(self) -> None:
        # Set this before the memory is freed. After an interrupt, the bytes are then read again.
        self._resident = set()
        if self.lent is None:
            self._put(None)
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        grown = nbytes - self._storage.nbytes()
        if grown:
            self._storage.resize_(nbytes)
            self._stream = self._device.stream()
            self._count(grown)


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of {tuple(tensor.shape)} on {tensor.device}"


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return ByteRange(storage, 0, storage.nbytes()).tensor()


@torch.inference_mode(mode=False)  # in inference mode the new tensor could not be trained later
def _over(storage: torch.UntypedStorage, dtype: torch.dtype, *layout: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *layout)


_SHIFT = 8  # no multiple of CACHE_LINE, which all memory of PyTorch is aligned to


@functools.cache
def _placeholder(device: torch.device) -> torch.UntypedStorage:
    storage = new_storage(16, device)  # of the largest data type
    _bytes_of(storage).fill_(255)
    return storage
