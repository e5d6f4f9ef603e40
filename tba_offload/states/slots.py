"""Memory of the device for three sub-groups: one is updated, the next is read, the last is written.

A sub-group that stays has a slot of its own, which no other takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tba_offload.device import READY
from tba_offload.errors import HangingError, StoreError, TransferError
from tba_offload.states.home import page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tba_offload.device import ByteRange
    from tba_offload.states.groups import Groups, SubGroup
    from tba_offload.states.home import Homes
    from tba_offload.store.pool import Transfer

SLOTS = 3
"""More would not shorten a step whose drive is busy all the time."""

_FAR = 2**62


class Slot:
    """Memory for one sub-group.

    Args:
        nbytes: Its size.
        homes: The store and the device.
        stays: Whether no other sub-group takes it.

    Attributes:
        stays: As given.
        holder: The sub-group whose bytes lie here, or are on their way; set by :meth:`read` and :meth:`hold`.
    """

    holder: SubGroup

    def __init__(self, nbytes: int, homes: Homes, *, stays: bool = False) -> None:
        self.stays = stays
        self._homes = homes
        self._is_newer = False
        self._reads: list[Transfer] = []
        self._writes: list[Transfer] = []
        self._allocate(nbytes)

    @torch.inference_mode(mode=False)  # or the memory could be changed in an evaluation only
    def _allocate(self, nbytes: int) -> None:
        self.memory: ByteRange = page_aligned(nbytes, self._homes.device, self._homes.store.alignment)
        self._bytes: torch.Tensor = self.memory.tensor()
        self._is_used = True  # by whatever had the memory before

    def lend(self) -> torch.Tensor:
        """Return all its memory, 1-D uint8, for work of the device, which the next read waits for."""
        self._is_used = True
        return self._bytes

    @property
    def is_free(self) -> bool:
        """Whether no transfer is under way, and its bytes need not be written."""
        return not self._is_newer and all(each.is_done for each in (*self._reads, *self._writes))

    def hold(self, group: SubGroup) -> None:
        """Note that the caller changes the bytes of a sub-group here, so that they are newer than at home."""
        self.holder, self._is_newer = group, True

    def read(self, group: SubGroup) -> None:
        """Begin to read a sub-group from where it lives."""
        # The host may be far ahead: what it records now is reached long after this slot's own work is done.
        after = self._homes.device.event() if self._is_used else READY
        self._reads = group.home.read(self._part(group), after)
        self.holder, self._is_newer, self._is_used = group, False, False

    def write(self) -> None:
        """Begin to write what it holds, if that is newer than what lies at home."""
        if self._is_newer:
            self.settle()
            self._writes = self.holder.home.write(self._part(self.holder))
            self._is_newer = self._is_used = False

    def settle(self) -> None:
        """Wait until no transfer is under way.

        Raises:
            TransferError: The bytes cannot be read, or not be written.
        """
        self.wait_for_reads()
        try:
            self.holder.home.settle_writes(self._writes)
        except TransferError:  # so that these are the only bytes; a write that hangs may come yet
            self._is_newer = True
            self._writes = [each for each in self._writes if not each.is_done]
            raise
        self._writes = []

    def wait_for_reads(self) -> None:
        """Wait until the bytes are here.

        Raises:
            TransferError: They cannot be read.
        """
        self.holder.home.settle_reads(self._reads)
        self._reads = []

    def give_up(self) -> None:
        """Wait until no transfer is under way, whatever comes of them; a drive that hangs keeps its own."""
        for transfer in (*self._reads, *self._writes):
            try:
                self._homes.wait(transfer)
            except HangingError:
                return
            except StoreError:
                continue

    def empty(self) -> None:
        """Write what it holds, so that others may have its memory.

        Raises:
            TransferError: It cannot be written, or what was read ahead cannot be read.
        """
        self.write()
        self.settle()

    def grow(self, nbytes: int) -> None:
        """Have so many bytes at least; what it held is lost if it had less."""
        if self.memory.nbytes < nbytes:
            del self.memory, self._bytes  # before there is more
            self._allocate(nbytes)

    def _part(self, group: SubGroup) -> ByteRange:
        return self.memory.part(0, group.nbytes)


class Slots:
    """The slots of one optimizer: which sub-group lies where.

    Args:
        groups: Its sub-groups: all slots together are no larger than their states.
        homes: The store and the device.
        next_use: When a sub-group is needed again; the greater, the later.
    """

    def __init__(self, groups: Groups, homes: Homes, next_use: Callable[[SubGroup], int]) -> None:
        self._groups = groups
        self._homes = homes
        self._next_use = next_use
        self._of: dict[SubGroup, Slot] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, with those of sub-groups that stay."""
        return sum(slot.memory.nbytes for slot in self._of.values())

    def of(self, group: SubGroup) -> Slot | None:
        """Return the slot that holds a sub-group, or is about to."""
        return self._of.get(group)

    def load(self, group: SubGroup) -> Slot:
        """Return the slot with the bytes of a sub-group, once they are there.

        Raises:
            TransferError: They cannot be read.
        """
        if group not in self._of:
            self._read(group, self._ring())
        self._of[group].settle()
        return self._of[group]

    def read_ahead(self, group: SubGroup) -> bool:
        """Begin to read a sub-group if there is a slot for which nothing has to be waited; return whether."""
        before = self._next_use(group)
        free = [slot for slot in self._ring() if slot.is_free and self._next_use(slot.holder) > before]
        if self._able(group, free) or self._has_room(group):
            self._read(group, free)
        return group in self._of

    def take(self, group: SubGroup, *, stays: bool = False) -> Slot:
        """Return a slot for new bytes of a sub-group, which :meth:`hold` gives it; wait until there is one.

        These bytes are somewhere in memory as well, so that there are two slots at most.

        Raises:
            TransferError: What the slot held cannot be written.
        """
        if stays:
            return Slot(group.nbytes, self._homes, stays=True)
        return self._slot(group, self._ring(), SLOTS - 1)

    def hold(self, group: SubGroup, slot: Slot) -> None:
        """Give a slot to a sub-group, whose bytes the caller has put there, or changes there."""
        self._of[group] = slot
        slot.hold(group)

    def _read(self, group: SubGroup, among: Sequence[Slot]) -> None:
        slot = self._slot(group, among)
        slot.read(group)
        self._of[group] = slot

    def _slot(self, group: SubGroup, among: Sequence[Slot], most: int = SLOTS) -> Slot:
        """Return a new slot, or that of some which is needed last, once what it holds is written."""
        if self._has_room(group, most):
            return Slot(group.nbytes, self._homes)
        slot = max(self._able(group, among) or among, key=lambda slot: self._next_use(slot.holder))
        slot.empty()
        del self._of[slot.holder]
        slot.grow(group.nbytes)
        return slot

    def _ring(self) -> list[Slot]:
        return [slot for slot in self._of.values() if not slot.stays]

    def _able(self, group: SubGroup, among: Iterable[Slot]) -> list[Slot]:
        """Return the slots that are large enough for a sub-group, or may be."""
        return [
            slot for slot in among if slot.memory.nbytes >= group.nbytes or self._may_have(group.nbytes, slot)
        ]

    def _has_room(self, group: SubGroup, most: int = SLOTS) -> bool:
        ring = self._ring()
        return not ring or (len(ring) < most and self._may_have(group.nbytes))

    def _may_have(self, nbytes: int, slot: Slot | None = None) -> bool:
        """Whether slots hold no more than the largest sub-groups do if this or a new one has so many bytes.

        Each sub-group counts as one of usual size at least, if there are enough of them.
        """
        sizes = [group.nbytes for group in self._groups]
        usual = min(self._groups.most, sum(sizes) // SLOTS)
        largest = sorted((max(size, usual) for size in sizes), reverse=True)
        others = (each.memory.nbytes for each in self._ring() if each is not slot)
        slots = sorted([nbytes, *others], reverse=True)
        return len(slots) <= len(largest) and all(map(int.__le__, slots, largest))

    def write(self, group: SubGroup) -> None:
        """Begin to write a sub-group that a slot holds, unless it stays."""
        if group in self._of and not self.stays(group):
            self._of[group].write()

    def drop(self, group: SubGroup) -> None:
        """Give up the bytes of a sub-group in a slot, written or not."""
        slot = self._of.pop(group, None)
        if slot is not None:
            slot.give_up()

    # ---- sub-groups that stay --------------------------------------------------------------------

    def stays(self, group: SubGroup) -> bool:
        """Return True if a sub-group stays in memory, in a slot that no other takes."""
        return group in self._of and self._of[group].stays

    def stay(self, group: SubGroup) -> None:
        """Bring a sub-group into a slot that no other takes.

        Raises:
            TransferError: It cannot be read.
        """
        slot = Slot(group.nbytes, self._homes, stays=True)
        slot.lend().copy_(self.load(group).lend()[: group.nbytes])
        self.drop(group)
        self.hold(group, slot)
        group.home.release()

    def leave(self, group: SubGroup) -> None:
        """Write a sub-group, and free its slot.

        Raises:
            TransferError: It cannot be written.
        """
        self._of[group].empty()
        del self._of[group]


class Order:
    """The order in which sub-groups are updated, and so the order in which they are needed again.

    Args:
        turns: Whether the next update goes in the reverse order. What was updated last is still in its slot
            then, and needs neither be written nor read.
    """

    def __init__(self, *, turns: bool) -> None:
        self._turns = turns
        self._is_reversed = False
        self._places: dict[SubGroup, int] = {}
        self._at = -1

    def begin(self, done: Sequence[SubGroup], groups: Sequence[SubGroup]) -> Sequence[SubGroup]:
        """Line sub-groups up after those that are updated already, and return them in their order."""
        line = [*done, *(reversed(groups) if self._is_reversed else groups)]
        self._places = {group: place for place, group in enumerate(line)}
        self._at = len(done) - 1
        return line[len(done) :]

    def reach(self, group: SubGroup) -> None:
        """Note that a sub-group is updated now; a new one is the last in line."""
        self._at = self._places.setdefault(group, len(self._places))

    def end(self) -> None:
        """Have the next update turn round, or begin in the same order at any time."""
        if self._turns:
            self._is_reversed = not self._is_reversed
        else:
            self._at = -1

    def upcoming(self) -> Sequence[SubGroup]:
        """Return what is updated next."""
        # A generator that is left half-way would swallow an interrupt that comes while it is closed.
        return [*self._places][self._at + 1 :]

    def next_use(self, group: SubGroup) -> int:
        """Return when a sub-group is needed again: in this update, or later, the last updated the soonest.

        That is so where the order turns. Where it does not, a slot whose write is over is the first to make
        room all the same.
        """
        place = self._places.get(group, 2 * _FAR)
        if place <= self._at:
            return -1 if place == self._at else _FAR - place
        return place
