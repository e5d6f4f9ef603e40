"""Memory of the device for three sub-groups: one is updated, the next is read, the last is written.

A sub-group that stays has a slot of its own, which no other takes.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import torch

from tba_offload.device import READY
from tba_offload.errors import TransferError
from tba_offload.states.home import page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tba_offload.device import ByteRange
    from tba_offload.states.groups import Groups, SubGroup
    from tba_offload.states.home import Homes
    from tba_offload.store.base import IoFuture

SLOTS = 3
"""More would not shorten a step whose drive is busy all the time."""

_FAR = 2**62


class Slot:
    """Memory for one sub-group.

    Args:
        nbytes: Its size.
        homes: The store and the device.

    Attributes:
        holder: The sub-group whose bytes lie here, or are on their way.
    """

    def __init__(self, nbytes: int, homes: Homes) -> None:
        self._homes = homes
        self._allocate(nbytes)

    @torch.inference_mode(mode=False)  # or the memory could be changed in an evaluation only
    def _allocate(self, nbytes: int) -> None:
        self.memory: ByteRange = page_aligned(nbytes, self._homes.device, self._homes.store.alignment)
        self._bytes: torch.Tensor = self.memory.tensor()
        self._is_used = True  # by whatever had the memory before
        self.holder: SubGroup | None = None
        self._is_newer = False
        self._reads: list[IoFuture] = []
        self._writes: list[IoFuture] = []

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
        if self.holder is not None and self._is_newer:
            self.settle()
            self._writes = self.holder.home.write(self._part(self.holder))
            self._is_newer = self._is_used = False

    def settle(self) -> None:
        """Wait until no transfer is under way.

        Raises:
            TransferError: The bytes cannot be read, or not be written.
        """
        if self.holder is not None:
            self.wait_for_reads()
            try:
                self.holder.home.settle_writes(self._writes)
            except TransferError:  # so that these are the only bytes; a write that hangs may come yet
                self._is_newer = True
                self._writes = [each for each in self._writes if not each.is_done]
                raise
            self._writes = []

    def wait_for_reads(self) -> torch.Tensor:
        """Wait until the bytes are here, and return them with the rest of its memory.

        Raises:
            TransferError: They cannot be read.
        """
        if self.holder is not None:
            try:
                self.holder.home.settle_reads(self._reads, self._part(self.holder))
            except BaseException:
                self._allocate(self.memory.nbytes)  # a read that hangs may fill the old memory yet
                raise
            self._reads = []
        return self.lend()

    def emptied(self, nbytes: int) -> Slot:
        """Write what it holds, let go of that, and return itself with so many bytes at least.

        Raises:
            TransferError: It cannot be written.
        """
        self.write()
        if self._reads:
            with suppress(TransferError):  # what was read ahead and is not needed now may be read again
                self.settle()
        self.settle()
        self.holder = None
        if self.memory.nbytes < nbytes:
            del self.memory, self._bytes  # before there is more
            self._allocate(nbytes)
        return self

    def drop(self) -> None:
        """Give up what it holds, written or not."""
        self._is_newer = False
        try:
            self.emptied(0)
        except TransferError:
            self._allocate(self.memory.nbytes)  # a write that hangs may take from the old memory yet

    def _part(self, group: SubGroup) -> ByteRange:
        return self.memory.part(0, group.nbytes)


class Slots:
    """The slots of one optimizer.

    Args:
        groups: Its sub-groups: all slots together are no larger than their states.
        homes: The store and the device.
        next_use: When a sub-group is needed again; the greater, the later.
    """

    def __init__(self, groups: Groups, homes: Homes, next_use: Callable[[SubGroup], int]) -> None:
        self._groups = groups
        self._homes = homes
        self.next_use = next_use
        self._ring: list[Slot] = []
        self._own: dict[SubGroup, Slot] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, without those of sub-groups that stay."""
        return sum(slot.memory.nbytes for slot in self._ring)

    @property
    def all_bytes(self) -> int:
        """Bytes of all slots, with those of sub-groups that stay."""
        return self.nbytes + sum(slot.memory.nbytes for slot in self._own.values())

    def of(self, group: SubGroup) -> Slot | None:
        """Return the slot that holds a sub-group, or is about to."""
        slots = (slot for slot in self._ring if slot.holder is group)
        return self._own[group] if self.stays(group) else next(slots, None)

    def held(self) -> list[SubGroup]:
        """Return the sub-groups that slots hold, or are about to."""
        return [*self._own, *(slot.holder for slot in self._ring if slot.holder is not None)]

    def load(self, group: SubGroup) -> Slot:
        """Return the slot with the bytes of a sub-group, once they are there.

        Raises:
            TransferError: They cannot be read.
        """
        slot = self.of(group)
        if slot is None:
            slot = self.take(group.room, SLOTS - group.is_new)
            slot.read(group)
        slot.settle()
        return slot

    def take(self, nbytes: int, most: int = SLOTS) -> Slot:
        """Return a slot for other bytes; wait until there is one.

        Args:
            nbytes: How many.
            most: Slots that there may be.

        Raises:
            TransferError: What the slot held cannot be written.
        """
        slot = self._chosen(nbytes, most, self._ring) or max(self._ring, key=self._needed)
        return slot.emptied(nbytes)

    def read_ahead(self, group: SubGroup) -> bool:
        """Begin to read a sub-group if there is a slot for which nothing has to be waited; return whether."""
        most = SLOTS - group.is_new  # new states are in memory too, before they get their places
        before = self.next_use(group)
        free = [each for each in self._ring if each.is_free and self._needed(each) > before]
        slot = self._chosen(group.room, most, free)
        if slot is not None:
            slot.emptied(group.room).read(group)
        return slot is not None

    def _chosen(self, nbytes: int, most: int, among: Sequence[Slot]) -> Slot | None:
        """Return a new slot, or one of some that may have so many bytes, what is needed last first."""
        able = [slot for slot in among if slot.memory.nbytes >= nbytes or self._may_have(nbytes, slot)]
        has_room = len(self._ring) < most and all(slot.holder is not None for slot in able)
        if has_room and (not self._ring or self._may_have(nbytes)):
            able = [Slot(nbytes, self._homes)]
            self._ring += able
        return max(able, key=self._needed, default=None)

    def _may_have(self, nbytes: int, slot: Slot | None = None) -> bool:
        """Whether slots hold no more than the largest sub-groups do if this or a new one has so many bytes.

        Only those of usual size may all be as large as the largest of them, where there are enough.
        """
        rooms = sorted((group.room for group in self._groups), reverse=True)
        if nbytes <= self._groups.most and SLOTS * nbytes <= sum(rooms):
            return True
        others = (each.memory.nbytes for each in self._ring if each is not slot)
        sizes = sorted([nbytes, *others], reverse=True)
        return len(sizes) <= len(rooms) and all(map(int.__le__, sizes, rooms))

    def _needed(self, slot: Slot) -> int:
        return 4 * _FAR if slot.holder is None else self.next_use(slot.holder)

    def write(self, group: SubGroup) -> None:
        """Begin to write a sub-group that a slot holds, unless it stays."""
        slot = self.of(group)
        if slot is not None and not self.stays(group):
            slot.write()

    def drop(self, group: SubGroup) -> None:
        """Give up the bytes of a sub-group in a slot, written or not."""
        slot = self.of(group)
        if slot is not None:
            slot.drop()
            self._own.pop(group, None)

    def free(self) -> None:
        """Free the memory of slots that hold nothing."""
        self._ring = [slot for slot in self._ring if slot.holder is not None]

    # ---- sub-groups that stay --------------------------------------------------------------------

    def stays(self, group: SubGroup) -> bool:
        """Return True if a sub-group lies in a slot of its own."""
        return group in self._own and self._own[group].holder is group

    def own(self, group: SubGroup) -> Slot:
        """Return a new slot that only a sub-group has, whose bytes the caller puts there."""
        self._own[group] = slot = Slot(group.nbytes, self._homes)
        slot.hold(group)
        return slot

    def stay(self, group: SubGroup) -> Slot:
        """Bring a sub-group into a slot of its own, and return that.

        Raises:
            TransferError: It cannot be read.
        """
        slot, held = Slot(group.nbytes, self._homes), self.of(group)
        if held is None:
            slot.read(group)
            slot.settle()
        else:
            held.settle()
            slot.lend().copy_(held.lend()[: group.nbytes])
            held.drop()
        self._own[group] = slot
        slot.hold(group)
        group.home.release()
        return slot

    def leave(self, group: SubGroup) -> None:
        """Wait until a sub-group is written, and free the slot of its own.

        Raises:
            TransferError: It cannot be written.
        """
        self._own[group].emptied(0)
        del self._own[group]


class Order:
    """The order in which sub-groups are updated, and so the order in which they are needed again.

    Args:
        turns: Whether the next update goes in the reverse order. What was updated last is still in its slot
            then, and needs neither be written nor read.

    Attributes:
        turns: As given.
    """

    def __init__(self, *, turns: bool) -> None:
        self.turns = turns
        self._is_reversed = False
        self._places: dict[SubGroup, int] = {}
        self._at = -1

    def __len__(self) -> int:
        return len(self._places)

    def begin(self, done: Sequence[SubGroup], groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Line sub-groups up after those that are updated already, and return them in their order."""
        self._line_up([*done, *(reversed(groups) if self._is_reversed else groups)])
        self._at = len(done) - 1
        return list(self._places)[len(done) :]

    def reach(self, group: SubGroup) -> None:
        """Note that a sub-group is updated now; a new one is the last in line."""
        self._at = self._places.setdefault(group, len(self._places))

    def end(self) -> None:
        """Have the next update turn round, or begin in the same order at any time."""
        if self.turns:
            self._is_reversed = not self._is_reversed
        else:
            self._at = -1

    def remove(self, groups: Iterable[SubGroup]) -> None:
        """Forget sub-groups."""
        gone = set(groups)
        self._line_up([group for group in self._places if group not in gone])

    def next(self, count: int, stays: Callable[[SubGroup], bool]) -> Sequence[SubGroup]:
        """Return what is updated next and does not stay, ``count`` at most."""
        # A generator that is left half-way would swallow an interrupt that comes while it is closed.
        return [group for group in islice(self._places, self._at + 1, None) if not stays(group)][:count]

    def needs_more_than(self, held: Iterable[SubGroup]) -> bool:
        """Return True if some that are still to be updated are not among these."""
        upcoming = len(self._places) - self._at - 1
        return upcoming > sum(self._places.get(group, -1) > self._at for group in held)

    def next_use(self, group: SubGroup) -> int:
        """Return when a sub-group is needed again: in this update, or later, the last updated the soonest.

        That is so where the order turns. Where it does not, a slot whose write is over is the first to make
        room all the same.
        """
        place = self._places.get(group, 2 * _FAR)
        if place <= self._at:
            return -1 if place == self._at else _FAR - place
        return place

    def _line_up(self, groups: Iterable[SubGroup]) -> None:
        self._places = {group: place for place, group in enumerate(groups)}
