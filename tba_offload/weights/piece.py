"""The bytes of frozen weights that share a storage: here, or in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tba_offload.device.ranges import ByteRange
from tba_offload.errors import SessionError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.states.home import Home
    from tba_offload.store.base import IoFuture


class Look(NamedTuple):
    """How a parameter looks at its storage.

    Attributes:
        name: Of the parameter, within the model.
        parameter: The parameter.
        shape: Its sizes.
        stride: Its strides.
        offset: Of its first element.
        dtype: Of its elements, whatever it has been converted to since.
    """

    name: str
    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter) -> Look:
        """How it looks now."""
        return cls(
            name,
            parameter,
            tuple(parameter.shape),
            parameter.stride(),
            int(parameter.storage_offset()),
            parameter.dtype,
        )

    @torch.inference_mode(mode=False)
    def at(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor that looks like it at a storage.

        An inference tensor could not be trained with later.
        """
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Piece:
    """Frozen weights that share a storage.

    Autograd saves weights, and views of them, by their storage. So that stays the same object, empty while
    its bytes are away. A parameter looks at one NaN then, spread over its shape: what reads it computes NaN,
    never with the memory of others, and what writes it raises.

    Args:
        parameters: All that look at the storage, with their names.
        home: Where the bytes live.
        count: Told by how many bytes memory grows.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        home: Home,
        count: Callable[[int], object],
    ) -> None:
        first = parameters[0][1]
        self._looks = [Look.of(name, parameter) for name, parameter in parameters]
        self.nbytes = first.untyped_storage().nbytes()
        self._home = home
        self._count = count
        self._counted = 0
        # What a file or another library has allocated can perhaps not be resized.
        self._storage = torch.UntypedStorage(self.nbytes, device=first.device)  # type: ignore[no-untyped-call]
        self._stream: Any = None  # that its memory was allocated on
        self._nothing = _nothing_of(first)
        self._reads: list[IoFuture] | None = None
        self._versions: list[int] = []
        self._is_sent = False
        self.is_here = False

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All that look at the storage."""
        return [look.parameter for look in self._looks]

    def send(self) -> None:
        """Write the bytes for the first time; they are away then.

        Raises:
            TransferError: They cannot be written; they stay here.
        """
        source = self._looks[0].parameter.untyped_storage()
        own = ByteRange(self._storage, 0, self.nbytes)
        own.tensor().copy_(ByteRange(source, 0, self.nbytes).tensor())
        self._resize(self.nbytes)
        try:
            self._home.settle_writes(self._home.write(own), own)
        except BaseException:  # not resized: a write that was interrupted, or hangs, reads from the memory
            self._count(-self._counted)
            self._counted = 0
            raise
        self._is_sent = True
        for look in self._looks:
            look.parameter.data = look.at(self._storage)
        self._leave()

    def begin(self) -> None:
        """Begins to read the bytes."""
        if self.is_here or self._reads is not None:
            return
        self._resize(self.nbytes)
        try:
            self._reads = self._home.read(ByteRange(self._storage, 0, self.nbytes))
        except Exception:  # no interrupt: reads may have begun, which need the memory
            self._resize(0)
            raise

    def arrive(self) -> None:
        """Has the bytes here when it returns.

        Raises:
            TransferError: They cannot be read.
            SessionError: A parameter was changed while its bytes were away.
        """
        if self.is_here:
            return
        for look in self._looks:
            self._check(look)
        self._read()
        self._versions = [look.parameter._version for look in self._looks]
        self.is_here = True

    def use(self) -> None:
        """Record that the calling thread's stream is about to compute with the bytes.

        A piece is read ahead, into memory of the stream of the layer before. If it was freed there while
        another stream computes with it, the allocator would give it to the next tensor.
        """
        stream = self._home.device.stream()
        if stream != self._stream:
            self._home.device.use(ByteRange(self._storage, 0, self.nbytes).tensor(), stream)

    def leave(self) -> None:
        """Frees the memory; what was changed here is written before.

        Raises:
            TransferError: That cannot be written.
        """
        if not self.is_here:
            self._leave_unread()
            return
        if [look.parameter._version for look in self._looks] != self._versions:
            memory = ByteRange(self._storage, 0, self.nbytes)
            self._home.settle_writes(self._home.write(memory), memory)
        self._leave()

    def _leave_unread(self) -> None:
        if self._reads is not None:
            try:
                self._home.settle_reads(self._reads, ByteRange(self._storage, 0, self.nbytes))
            except TransferError:  # others may be on their way; the layer says it, if it runs
                return
            self._reads = None
        self._leave()

    def come_back(self) -> str:
        """Has the bytes here for good; a parameter that has others by now keeps those.

        The extents are not given back, since an interrupted transfer may use them: the store is closed next.

        Returns:
            Name of a parameter that something was computed with while it was away: it has its values again.

        Raises:
            TransferError: They cannot be read.
        """
        if not self._is_sent:
            return ""
        if not self.is_here:
            self._read()
            self.is_here = True
        spoilt = ""
        for look in self._looks:
            found = look.parameter
            if self._is_ours(look) or found.shape != look.shape or not _is_nothing(found):
                continue
            value = look.at(self._storage)
            if (found.dtype, found.device) == (value.dtype, value.device):
                spoilt = look.name
            look.parameter.data = value.to(found.device, found.dtype)  # as of model.half()
        return spoilt

    def copies(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return the weights, each with its values in new host memory.

        Raises:
            TransferError: They cannot be read.
        """
        if self.is_here:
            found = ByteRange(self._storage, 0, self.nbytes).tensor().to("cpu", copy=True)
        else:
            found = self._home.on_host(self.nbytes)
        data = found.clone().untyped_storage()  # from byte 0 of a storage of its own
        return [(look.parameter, look.at(data)) for look in self._looks]

    def _read(self) -> None:
        self.begin()
        if self._reads is None:
            raise RuntimeError("no read has begun")
        self._home.settle_reads(self._reads, ByteRange(self._storage, 0, self.nbytes))
        self._reads = None
        for look in self._looks:
            if self._is_ours(look):
                look.parameter.data = look.at(self._storage)

    def _leave(self) -> None:
        self.is_here = False  # first, so that after an interrupt the bytes are read again
        for look in self._looks:
            if self._is_ours(look):
                look.parameter.data = self._nothing.expand(look.shape)
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        if self._storage.nbytes() != nbytes:
            self._storage.resize_(nbytes)
            self._stream = self._home.device.stream()
        # An interrupt can have come between the two the last time.
        grown, self._counted = nbytes - self._counted, nbytes
        self._count(grown)

    def _is_ours(self, look: Look) -> bool:
        """Whether a parameter has what it was given here: the bytes, or nothing."""
        return (
            look.parameter.untyped_storage()._cdata == self._storage._cdata
            or look.parameter.data_ptr() == self._nothing.data_ptr()
        )

    def _check(self, look: Look) -> None:
        if look.parameter.requires_grad or not self._is_ours(look):
            what = "is trained now" if look.parameter.requires_grad else "was replaced"
            raise SessionError(
                f"the frozen weight {look.name} {what} while its values are in the store; close the frozen "
                "weights first, and offload them again afterwards"
            )


@torch.inference_mode(mode=False)
def _nothing_of(parameter: torch.Tensor) -> torch.Tensor:
    """One element that no weight has."""
    value = float("nan") if parameter.is_floating_point() else torch.iinfo(parameter.dtype).max
    return torch.full((1,), value, dtype=parameter.dtype, device=parameter.device).squeeze(0)


def _is_nothing(tensor: torch.Tensor) -> bool:
    """Whether no element is a number, as of what was computed with nothing."""
    return tensor.is_floating_point() and bool(tensor.isnan().all())
