"""Host memory that holds the states of sub-groups while the processor updates them, or for good."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    import torch

    from tba_offload.states.groups import SubGroup
    from tba_offload.states.home import Homes
    from tba_offload.states.slots import Slots


class HostRing:
    """Host memory for the states of sub-groups that the processor updates; its methods may run on any thread.

    Args:
        homes: Where sub-groups live that the device updates.
        own_homes: The same for memory of the host.
        slots: The memory.

    Attributes:
        is_home: Whether sub-groups live in it.
    """

    def __init__(self, homes: Homes, own_homes: Homes, slots: Slots) -> None:
        self._homes = homes
        self._own_homes = own_homes
        self._slots = slots
        slots.next_use = self._next_use
        self.is_home = homes.store.kind == HostStore.kind  # no need to travel any further
        self._busy: set[SubGroup] = set()
        self._lock = threading.Lock()

    def enter(self, group: SubGroup) -> None:
        """Record that a sub-group is the processor's from now on."""
        group.home.serve(self._own_homes)

    def adopt(self, group: SubGroup, states: torch.Tensor) -> None:
        """Likewise, with bytes that nothing else has: it lives here.

        Args:
            group: The sub-group.
            states: Its bytes on the device, 1-D uint8.
        """
        self.enter(group)
        self._slots.own(group).lend()[: group.nbytes].copy_(states)

    def leave(self, group: SubGroup) -> None:
        """Record that a sub-group is the device's again.

        Raises:
            TransferError: Its states cannot be written.
        """
        if self._slots.stays(group):
            self._slots.leave(group)
        else:
            self._slots.write(group)
            self._slots.empty(group)
        group.home.serve(self._homes)

    def drop(self, group: SubGroup) -> None:
        """Likewise, when its states lie elsewhere."""
        self._slots.empty(group, drops=True)
        group.home.serve(self._homes)

    def load(self, group: SubGroup) -> torch.Tensor:
        """Return the bytes of a sub-group's states, once they are there, for an update.

        Raises:
            TransferError: They cannot be read.
        """
        with self._lock:
            self._busy.add(group)
            slot = self._slots.of(group)
            if slot is None and self.is_home:
                slot = self._slots.stay(group)
            elif slot is None:
                slot = self._slots.take(group.room)
                slot.read(group)
        try:
            slot.settle()
        except BaseException:
            self.store(group)
            raise
        slot.hold(group)
        return slot.lend()

    def store(self, group: SubGroup) -> None:
        """Begin to write them, unless they stay."""
        with self._lock:
            self._slots.write(group)
            self._busy.discard(group)

    def count(self) -> None:
        """Record that what was moved counts with what is moved for the device."""
        self._own_homes.hand_over(self._homes)

    def _next_use(self, group: SubGroup) -> int:
        return -1 if group in self._busy else 1
