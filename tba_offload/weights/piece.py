"""The bytes of frozen weights that share a storage: here, or in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tba_offload.device.ranges import ByteRange
from tba_offload.errors import SessionError

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
    """

    name: str
    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, name: str, parameter: torch.nn.Parameter) -> Look:
        """How it looks now."""
        return cls(
            name, parameter, tuple(parameter.shape), parameter.stride(), int(parameter.storage_offset())
        )

    def at(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor that looks like it at a storage."""
        empty = torch.empty(0, dtype=self.parameter.dtype, device=storage.device)
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
        # What a file or another library has allocated can perhaps not be resized.
        self._storage = torch.UntypedStorage(self.nbytes, device=first.device)  # type: ignore[no-untyped-call]
        self._nothing = _nothing_of(first)
        self._reads: list[IoFuture] | None = None
        self._versions: list[int] = []
        self.is_here = False

    def send(self) -> None:
        """Writes the bytes for the first time; they are away then.

        Raises:
            TransferError: They cannot be written; they stay here.
        """
        source = self._looks[0].parameter.untyped_storage()
        own = ByteRange(self._storage, 0, self.nbytes)
        own.tensor().copy_(ByteRange(source, 0, self.nbytes).tensor())
        self._count(self.nbytes)
        try:
            self._home.settle_writes(self._home.write(own), own)
        except BaseException:
            self._shrink()
            raise
        self._leave()

    def begin(self) -> None:
        """Begins to read the bytes."""
        if self.is_here or self._reads is not None:
            return
        self._storage.resize_(self.nbytes)
        self._count(self.nbytes)
        try:
            self._reads = self._home.read(ByteRange(self._storage, 0, self.nbytes))
        except BaseException:
            self._shrink()
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

    def leave(self) -> None:
        """Frees the memory; what was changed here is written before."""
        if not self.is_here:
            return
        if [look.parameter._version for look in self._looks] != self._versions:
            memory = ByteRange(self._storage, 0, self.nbytes)
            self._home.settle_writes(self._home.write(memory), memory)
        self._leave()

    def come_back(self) -> None:
        """Has the bytes here for good; a parameter that has others by now keeps those.

        Raises:
            TransferError: They cannot be read.
        """
        if not self.is_here:
            self._read()
        self._home.release()

    def copies(self) -> dict[str, torch.Tensor]:
        """The weights in new host memory, by name.

        Raises:
            TransferError: They cannot be read.
        """
        if self.is_here:
            found = ByteRange(self._storage, 0, self.nbytes).tensor().to("cpu", copy=True)
        else:
            found = self._home.on_host(self.nbytes)
        data = found.clone().untyped_storage()  # from byte 0 of a storage of its own
        return {look.name: look.at(data) for look in self._looks}

    def _read(self) -> None:
        self.begin()
        if self._reads is None:
            raise RuntimeError("no read has begun")
        self._home.settle_reads(self._reads, ByteRange(self._storage, 0, self.nbytes))
        self._reads = None
        for look in self._looks:
            if self._is_away(look):
                look.parameter.data = look.at(self._storage)

    def _leave(self) -> None:
        for look in self._looks:
            look.parameter.data = self._nothing.expand(look.shape)
        self.is_here = False
        self._shrink()

    def _shrink(self) -> None:
        self._storage.resize_(0)
        self._count(-self.nbytes)

    def _is_away(self, look: Look) -> bool:
        return look.parameter.data_ptr() == self._nothing.data_ptr()

    def _check(self, look: Look) -> None:
        if look.parameter.requires_grad or not self._is_away(look):
            what = "is trained now" if look.parameter.requires_grad else "was replaced"
            raise SessionError(
                f"the frozen weight {look.name} {what} while its values are in the store; close the frozen "
                "weights first, and offload them again afterwards"
            )


def _nothing_of(parameter: torch.Tensor) -> torch.Tensor:
    """One element that no weight has."""
    value = float("nan") if parameter.is_floating_point() else torch.iinfo(parameter.dtype).max
    return torch.full((1,), value, dtype=parameter.dtype, device=parameter.device).squeeze(0)
