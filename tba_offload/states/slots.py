"""Memory of the device for a few sub-groups at a time: what is updated, what is read, what is written.

A sub-group that stays has a slot of its own, which no other takes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from tba_offload.device import READY
from tba_offload.errors import TransferError
from tba_offload.states.home import page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import ByteRange
    from tba_offload.states.home import Home, Homes
    from tba_offload.store.base import IoFuture

SLOTS = 3
"""Slots: one for the sub-group that is updated, one for the next, which is read, one for the last, which is
written. More would not shorten a step whose drive is busy all the time."""


class Traveller(Protocol):
    """What a slot can hold: a sub-group."""

    home: Home
    """Home of its bytes."""

    @property
    def nbytes(self) -> int:
        """How many there are."""


T = TypeVar("T", bound=Traveller)


class Slot(Generic[T]):
    """Memory for one sub-group.

    Args:
        nbytes: Its size.
        homes: The store and the device.
    """

    def __init__(self, nbytes: int, homes: Homes) -> None:
        self._homes = homes
        self._allocate(nbytes)
        self.holder: T | None = None
        self._is_newer = False
        self._reads: list[IoFuture] = []
        self._writes: list[IoFuture] = []

    def lend(self) -> torch.Tensor:
        """All its memory, 1-D uint8, for work of the device, after which the next read of others comes."""
        self._is_used = True
        return self._bytes

    @property
    def is_free(self) -> bool:
        """Whether no transfer is under way, and its bytes need not be written."""
        return not self._is_newer and all(each.is_done for each in (*self._reads, *self._writes))

    def give_to(self, group: T) -> None:
        """Let it hold a sub-group, whose bytes the caller puts there."""
        self.holder, self._is_newer = group, True

    def read(self, group: T) -> None:
        """Begin to read a sub-group from where it lives."""
        # The host may be far ahead: what it records now is reached long after this slot's own work is done.
        after = self._homes.device.event() if self._is_used else READY
        self._reads = group.home.read(self._part(group), after)
        self._is_used = not self._reads  # the device copies what was kept in host memory
        self.holder, self._is_newer = group, False

    def write(self) -> None:
        """Begin to write what it holds, if that is newer than what lies at home."""
        if self.holder is not None and self._is_newer:
            self.settle()
            self._writes = self.holder.home.write(self._part(self.holder))
            self._is_newer = self._is_used = False

    def settle(self) -> None:
        """Wait until no transfer is under way.

        Raises:
            TransferError: The bytes cannot be read, or not be written where the policy forbids to keep them.
        """
        self._settle_reads()
        if self.holder is not None:
            self.holder.home.settle_writes(self._writes, self._part(self.holder))
            self._writes = []

    def _settle_reads(self) -> None:
        group = self.holder
        if group is None:
            return
        try:
            group.home.settle_reads(self._reads, self._part(group))
        except BaseException:
            self._allocate(self.memory.nbytes)  # a read that hangs may fill the old memory yet
            self.holder, self._reads = None, []
            raise
        self._reads = []

    def touch(self) -> None:
        """Say that an update is about to change what it holds."""
        self._is_newer = True

    def clear(self) -> None:
        """Let go of what it holds, once no transfer is under way.

        Raises:
            TransferError: It could not be written, and the policy forbids to keep it.
        """
        with suppress(TransferError):  # what was read ahead and is not needed now may be read again
            self._settle_reads()
        self.settle()
        self.holder, self._is_newer = None, False

    def drop(self) -> None:
        """Give up what it holds, written or not."""
        try:
            self.clear()
        except TransferError:
            self.holder, self._is_newer, self._writes = None, False, []
            self._allocate(self.memory.nbytes)  # a write that hangs may take from the old memory yet

    def grow(self, nbytes: int) -> None:
        """Get larger memory, if it is smaller; it holds nothing."""
        if self.memory.nbytes < nbytes:
            del self.memory, self._bytes  # before there is more
            self._allocate(nbytes)

    @torch.inference_mode(mode=False)  # or the memory could be changed in an evaluation only
    def _allocate(self, nbytes: int) -> None:
        self.memory: ByteRange = page_aligned(nbytes, self._homes.device, self._homes.store.alignment)
        self._bytes: torch.Tensor = self.memory.tensor()
        self._is_used = True  # by whatever had the memory before

    def _part(self, group: T) -> ByteRange:
        return self.memory.part(0, group.nbytes)


class Slots(Generic[T]):
    """The slots of one optimizer.

    Args:
        homes: The store and the device.
    """

    def __init__(self, homes: Homes) -> None:
        self._homes = homes
        self._slots: list[Slot[T]] = []
        self._own: dict[T, Slot[T]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, without those of sub-groups that stay."""
        return sum(slot.memory.nbytes for slot in self._slots)

    @property
    def all_bytes(self) -> int:
        """Bytes of all slots, with those of sub-groups that stay."""
        return self.nbytes + sum(slot.memory.nbytes for slot in self._own.values())

    def of(self, group: T) -> Slot[T] | None:
        """Return the slot that holds a sub-group, or is about to."""
        if self.stays(group):
            return self._own[group]
        return next((slot for slot in self._slots if slot.holder is group), None)

    def held(self) -> list[T]:
        """Return the sub-groups that slots hold, or are about to."""
        return [*self._own, *(slot.holder for slot in self._slots if slot.holder is not None)]

    # ---- sub-groups that stay --------------------------------------------------------------------

    def stays(self, group: T) -> bool:
        """Whether a sub-group lies in a slot of its own."""
        own = self._own.get(group)
        return own is not None and own.holder is group

    def stay(self, group: T) -> Slot[T]:
        """Give a sub-group a slot of its own; its bytes are on the way, or the caller puts them there."""
        slot: Slot[T] = Slot(group.nbytes, self._homes)
        held = self.of(group)
        if held is not None:
            held.settle()
            slot.lend().copy_(held.lend()[: group.nbytes])
            held.clear()
            slot.give_to(group)
        elif not group.home.is_empty:
            slot.read(group)
        self._own[group] = slot
        return slot

    def came(self, group: T) -> None:
        """Wait until the bytes of a sub-group are in its own slot.

        Raises:
            TransferError: They cannot be read; it has none.
        """
        slot = self._own[group]
        try:
            slot.settle()
        except BaseException:
            del self._own[group]
            raise
        group.home.release()
        slot.give_to(group)

    def leave(self, group: T) -> None:
        """Wait until a sub-group is written, and free the slot of its own.

        Raises:
            TransferError: It cannot be written, where the policy forbids to keep it in host memory.
        """
        slot = self._own[group]
        try:
            slot.write()
            slot.settle()
        except BaseException:
            slot.touch()
            raise
        del self._own[group]

    # ---- for all ---------------------------------------------------------------------------------

    def write(self, group: T) -> None:
        """Begin to write a sub-group that a slot holds, unless it stays."""
        slot = self.of(group)
        if slot is not None and not self.stays(group):
            slot.write()

    def empty(self, group: T) -> None:
        """Let go of a sub-group, if a slot holds it."""
        slot = self.of(group)
        if slot is not None:
            slot.clear()
            self._own.pop(group, None)

    def drop(self, group: T) -> None:
        """Give up what a slot holds of a sub-group, written or not, if one does."""
        slot = self.of(group)
        if slot is not None:
            slot.drop()
            self._own.pop(group, None)

    def take(self, nbytes: int, next_use: Callable[[T], int], most: int = SLOTS) -> Slot[T]:
        """Return a slot for other bytes; wait until there is one.

        Args:
            nbytes: How many.
            next_use: When a sub-group is needed again; the greater, the later.
            most: Slots that there may be.

        Raises:
            TransferError: What the slot held cannot be written where the policy forbids to keep it.
        """
        slot = self._unheld() or self._new(nbytes, most) or _latest(self._slots, next_use)
        slot.write()
        slot.clear()
        slot.grow(nbytes)
        return slot

    def take_now(
        self, group: T, nbytes: int, next_use: Callable[[T], int], most: int = SLOTS
    ) -> Slot[T] | None:
        """Return a slot for a sub-group, if there is one for which nothing has to be waited.

        Args:
            group: The sub-group.
            nbytes: How many bytes it needs.
            next_use: When a sub-group is needed again; the greater, the later.
            most: Slots that there may be.
        """
        slot = self._unheld() or self._new(nbytes, most)
        if slot is None:
            this = next_use(group)
            later = [each for each in self._slots if each.is_free and _next_use(each, next_use) > this]
            if not later:
                return None
            slot = _latest(later, next_use)
        slot.clear()
        slot.grow(nbytes)
        return slot

    def clear(self) -> None:
        """Let go of all that does not stay, and free the memory."""
        for slot in self._slots:
            slot.clear()
        self._slots.clear()

    def _unheld(self) -> Slot[T] | None:
        return next((slot for slot in self._slots if slot.holder is None), None)

    def _new(self, nbytes: int, most: int) -> Slot[T] | None:
        if len(self._slots) >= most:
            return None
        slot: Slot[T] = Slot(nbytes, self._homes)
        self._slots.append(slot)
        return slot


def _next_use(slot: Slot[T], next_use: Callable[[T], int]) -> int:
    return -1 if slot.holder is None else next_use(slot.holder)


def _latest(slots: Sequence[Slot[T]], next_use: Callable[[T], int]) -> Slot[T]:
    """Return the slot whose sub-group is needed last."""
    return max(slots, key=lambda slot: _next_use(slot, next_use))
