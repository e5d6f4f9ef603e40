"""Slots: device memory for the optimizer states of sub-groups.

Offloaded sub-groups share three slots. While one sub-group is updated, the next sub-group is read and the
previous sub-group is written. Each sub-group that stays in memory has its own slot.
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
"""Number of slots that offloaded sub-groups share. With three slots, the drive can be busy all the time, so
more slots would not shorten a step."""

_FAR = 2**62


class Slot:
    """Memory for the optimizer states of one sub-group.

    Args:
        nbytes: Size in bytes.
        homes: The store and the device.
        stays: Whether the slot belongs to one sub-group that stays in memory.

    Attributes:
        holder: The sub-group whose states are in the slot, or are being read into the slot.
    """

    holder: SubGroup

    def __init__(self, nbytes: int, homes: Homes, *, stays: bool = False) -> None:
        self.stays = stays
        self._homes = homes
        self._is_newer = False
        self._reads: list[Transfer] = []
        self._writes: list[Transfer] = []
        self._allocate(nbytes)

    @torch.inference_mode(mode=False)  # inference tensors cannot be changed outside inference mode
    def _allocate(self, nbytes: int) -> None:
        self.memory: ByteRange = page_aligned(nbytes, self._homes.device, self._homes.store.alignment)
        self._bytes: torch.Tensor = self.memory.tensor()
        self._is_used = True  # earlier work on the device may still use the memory

    def lend(self) -> torch.Tensor:
        """Return the whole memory as a 1-D uint8 tensor.

        The next read into the slot waits for all work that the device has queued before the read.
        """
        self._is_used = True
        return self._bytes

    @property
    def is_free(self) -> bool:
        """Whether no transfer uses the slot, and the store has a copy of the bytes."""
        return not self._is_newer and all(each.is_done for each in (*self._reads, *self._writes))

    def hold(self, group: SubGroup) -> None:
        """Set the sub-group whose states the caller changes in this slot.

        After this call, the copy of these states in the store is outdated.
        """
        self.holder, self._is_newer = group, True

    def read(self, group: SubGroup) -> None:
        """Start to read the states of a sub-group from the store."""
        # The host may be far ahead of the device, so an event that is recorded now would be reached late.
        after = self._homes.device.event() if self._is_used else READY
        self._reads = group.home.read(self._part(group), after)
        self.holder, self._is_newer, self._is_used = group, False, False

    def write(self) -> None:
        """Start to write the bytes, if they are newer than the bytes in the store."""
        if self._is_newer:
            self.settle()
            self._writes = self.holder.home.write(self._part(self.holder))
            self._is_newer = self._is_used = False

    def settle(self) -> None:
        """Wait for the transfers of this slot.

        Raises:
            TransferError: The bytes cannot be read or written.
        """
        self.wait_for_reads()
        try:
            self.holder.home.settle_writes(self._writes)
        except TransferError:  # the store has no valid copy, and a hanging write may still end later
            self._is_newer = True
            self._writes = [each for each in self._writes if not each.is_done]
            raise
        self._writes = []

    def wait_for_reads(self) -> None:
        """Wait for the reads of this slot.

        Raises:
            TransferError: The bytes cannot be read.
        """
        self.holder.home.settle_reads(self._reads)
        self._reads = []

    def give_up(self) -> None:
        """Wait for the transfers of this slot, and ignore errors. Stop waiting if a drive hangs."""
        for transfer in (*self._reads, *self._writes):
            try:
                self._homes.wait(transfer)
            except HangingError:
                return
            except StoreError:
                continue

    def empty(self) -> None:
        """Write the bytes to the store, so that another sub-group can use the slot.

        Raises:
            TransferError: The bytes cannot be written, or an earlier read into the slot failed.
        """
        self.write()
        self.settle()

    def grow(self, nbytes: int) -> None:
        """Make the memory at least ``nbytes`` large. If the memory grows, its contents are lost."""
        if self.memory.nbytes < nbytes:
            del self.memory, self._bytes  # free the old memory first
            self._allocate(nbytes)

    def _part(self, group: SubGroup) -> ByteRange:
        return self.memory.part(0, group.nbytes)


class Slots:
    """The slots of one optimizer.

    Args:
        groups: The sub-groups of the optimizer. The shared slots together are no larger than the states of
            these sub-groups.
        homes: The store and the device.
        next_use: Function that returns a number for a sub-group. A larger number means that the sub-group is
            needed later.
    """

    def __init__(self, groups: Groups, homes: Homes, next_use: Callable[[SubGroup], int]) -> None:
        self._groups = groups
        self._homes = homes
        self._next_use = next_use
        self._of: dict[SubGroup, Slot] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, including the slots of sub-groups that stay in memory."""
        return sum(slot.memory.nbytes for slot in self._of.values())

    def of(self, group: SubGroup) -> Slot | None:
        """Return the slot with the states of a sub-group; ``None`` if the sub-group has no slot."""
        return self._of.get(group)

    def load(self, group: SubGroup) -> Slot:
        """Return the slot with the states of a sub-group. If necessary, read the states from the store.

        Raises:
            TransferError: The states cannot be read.
        """
        if group not in self._of:
            self._read(group, self._shared())
        self._of[group].settle()
        return self._of[group]

    def read_ahead(self, group: SubGroup) -> bool:
        """Start to read a sub-group's states if a slot is free. Return True if the sub-group has a slot."""
        before = self._next_use(group)
        free = [slot for slot in self._shared() if slot.is_free and self._next_use(slot.holder) > before]
        if self._large_enough(group, free) or self._has_room(group):
            self._read(group, free)
        return group in self._of

    def take(self, group: SubGroup, *, stays: bool = False) -> Slot:
        """Return a slot into which the caller writes new states of a sub-group.

        After writing, the caller calls :meth:`hold`. During the write, memory has the new states twice, so
        this method uses at most two shared slots.

        Args:
            group: The sub-group.
            stays: Whether the sub-group stays in memory, in its own slot.

        Raises:
            TransferError: The old contents of the slot cannot be written.
        """
        if stays:
            return Slot(group.nbytes, self._homes, stays=True)
        return self._slot(group, self._shared(), SLOTS - 1)

    def hold(self, group: SubGroup, slot: Slot) -> None:
        """Assign a slot to a sub-group whose states the caller writes or changes in the slot."""
        self._of[group] = slot
        slot.hold(group)

    def _read(self, group: SubGroup, among: Sequence[Slot]) -> None:
        slot = self._slot(group, among)
        slot.read(group)
        self._of[group] = slot

    def _slot(self, group: SubGroup, among: Sequence[Slot], most: int = SLOTS) -> Slot:
        """Return a new slot if there is room. Otherwise, reuse the slot that is needed last.

        If all slots are too small, the largest slot grows.
        """
        if self._has_room(group, most):
            return Slot(group.nbytes, self._homes)
        fitting = self._large_enough(group, among) or [max(among, key=lambda slot: slot.memory.nbytes)]
        slot = max(fitting, key=lambda slot: self._next_use(slot.holder))
        slot.empty()
        del self._of[slot.holder]
        slot.grow(group.nbytes)
        return slot

    def _shared(self) -> list[Slot]:
        return [slot for slot in self._of.values() if not slot.stays]

    def _large_enough(self, group: SubGroup, among: Iterable[Slot]) -> list[Slot]:
        usual = self._usual
        return [slot for slot in among if group.nbytes <= max(slot.memory.nbytes, usual)]

    def _has_room(self, group: SubGroup, most: int = SLOTS) -> bool:
        shared = self._shared()
        return not shared or (len(shared) < most and group.nbytes <= self._usual)

    @property
    def _usual(self) -> int:
        """Bytes to which all shared slots may grow. At most one shared slot is larger.

        The value is the usual size of a sub-group or, if larger, the size of the third largest sub-group.
        """
        sizes = sorted(group.nbytes for group in self._groups)
        return max([min(self._groups.most, sum(sizes) // SLOTS), *sizes[-SLOTS:][:1]])

    def write(self, group: SubGroup) -> None:
        """Start to write the states of a sub-group to the store, unless the sub-group stays in memory."""
        if group in self._of and not self.stays(group):
            self._of[group].write()

    def drop(self, group: SubGroup) -> None:
        """Discard the slot of a sub-group, even if the states in the slot are not written yet."""
        slot = self._of.pop(group, None)
        if slot is not None:
            slot.give_up()

    # ---- sub-groups that stay --------------------------------------------------------------------

    def stays(self, group: SubGroup) -> bool:
        """Return True if a sub-group stays in memory, in its own slot."""
        return group in self._of and self._of[group].stays

    def stay(self, group: SubGroup) -> None:
        """Move a sub-group into its own slot, so that the sub-group stays in memory.

        Raises:
            TransferError: The sub-group cannot be read.
        """
        slot = Slot(group.nbytes, self._homes, stays=True)
        slot.lend().copy_(self.load(group).lend()[: group.nbytes])
        self.drop(group)
        self.hold(group, slot)
        group.home.release()

    def leave(self, group: SubGroup) -> None:
        """Write the states of a sub-group to the store, and free the slot.

        Raises:
            TransferError: The sub-group cannot be written.
        """
        self._of[group].empty()
        del self._of[group]


class Order:
    """The order in which sub-groups are updated, which determines when each sub-group is needed again.

    Args:
        turns: Whether each update has the reverse order of the last update. If True, the first sub-groups of
            an update are still in their slots.
    """

    def __init__(self, *, turns: bool) -> None:
        self._turns = turns
        self._is_reversed = False
        self._places: dict[SubGroup, int] = {}
        self._at = -1

    def begin(self, done: Sequence[SubGroup], groups: Sequence[SubGroup]) -> Sequence[SubGroup]:
        """Set the order of an update.

        Args:
            done: Sub-groups that are already updated.
            groups: Sub-groups to update.

        Returns:
            The sub-groups to update, in order.
        """
        line = [*done, *(reversed(groups) if self._is_reversed else groups)]
        self._places = {group: place for place, group in enumerate(line)}
        self._at = len(done) - 1
        return line[len(done) :]

    def reach(self, group: SubGroup) -> None:
        """Set the sub-group that is updated now. A new sub-group is appended to the order."""
        self._at = self._places.setdefault(group, len(self._places))

    def end(self) -> None:
        """End an update, and reverse the order for the next update if ``turns`` is set."""
        if self._turns:
            self._is_reversed = not self._is_reversed
        else:
            self._at = -1

    def upcoming(self) -> Sequence[SubGroup]:
        """Return the sub-groups that are still to be updated, in order."""
        # The result is no generator, because a Ctrl-C is lost while a generator is closed.
        return [*self._places][self._at + 1 :]

    def next_use(self, group: SubGroup) -> int:
        """Return a number for a sub-group. A larger number means that the sub-group is needed later.

        The numbers increase from the current sub-group to the sub-groups that are still to be updated, and
        then to the updated sub-groups in reverse order.
        """
        place = self._places.get(group, 2 * _FAR)
        if place <= self._at:
            return -1 if place == self._at else _FAR - place
        return place
