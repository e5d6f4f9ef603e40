"""Updates in host memory: the processor updates some sub-groups while the device updates the others.

The states of those do not cross the link between device and host; gradients come and parameters go instead.
It is what Deep Optimizer States does (arXiv 2410.21316), but which lane a sub-group goes to follows from what
the lanes take, and states may lie on drives as well. The optimizer's own code updates both, by its kernels
for a CPU here, which may round differently.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.states.host_share import LaneTime
from tba_offload.states.host_update import Desk, HostStep, HostUpdate, can_be_copied
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from tba_offload.device import Event
    from tba_offload.states.exchange import Exchange
    from tba_offload.states.home import Homes
    from tba_offload.states.host_share import HostShare
    from tba_offload.states.masters import Masters
    from tba_offload.states.own_step import Entry
    from tba_offload.states.pieces import Piece
    from tba_offload.states.roster import Roster
    from tba_offload.states.slots import Slots
    from tba_offload.states.subgroup import SubGroup

_THREADS = 2
"""While one updates, on all cores, the other copies what it has updated and what it is going to."""


class NoHostLane:
    """The device updates all sub-groups.

    Attributes:
        updated: How many sub-groups the processor has updated in the last update.
        predicted_seconds: What that was expected to take; ``None`` if nothing was expected.
    """

    updated = 0
    predicted_seconds: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it has, for states and for copies."""
        return 0

    @contextmanager
    def updating(
        self,
        groups: Sequence[SubGroup],
        options: Mapping[str, Any],  # noqa: ARG002 - the processor's updates need them
    ) -> Iterator[Sequence[SubGroup]]:
        """Around an update by the device, beside which the processor updates some sub-groups.

        Args:
            groups: All that are updated.
            options: Further arguments of the optimizer's ``step``.

        Yields:
            Those that are left to the device.

        Raises:
            TransferError: States cannot be read or written.
        """
        yield groups

    def give_up(self, groups: Iterable[SubGroup]) -> None:
        """Leaves sub-groups to the device.

        Raises:
            TransferError: Their states cannot be written.
        """


class _Done(NamedTuple):
    """An update that was made, and when it had ended."""

    update: HostUpdate
    at: float


class HostLane(NoHostLane):
    """The processor updates some sub-groups.

    Where states live in host memory, those of its sub-groups lie in slots of their own there and are updated
    in place. From drives they travel through a ring of slots, as those of the device do.

    Args:
        optimizer: The optimizer.
        kind: Its class.
        homes: Where sub-groups live.
        exchange: Shows states in ``optimizer.state``.
        roster: Which sub-groups there are.
        masters: The master copies among the parameters.
        share: Says how many the processor updates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        homes: Homes,
        exchange: Exchange,
        roster: Roster,
        masters: Masters,
        share: HostShare,
    ) -> None:
        self._own = HostStep(optimizer, kind)
        self._computing = threading.Lock()  # one update at a time has all cores
        self._homes = homes
        self._exchange = exchange
        self._roster = roster
        self._masters = masters
        self._share = share
        self._groups: set[SubGroup] = set()
        self._ring = _Ring(homes, exchange.host_slots)
        self._desks = [Desk(homes.device) for _ in range(_THREADS)]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it has, for states and for copies."""
        return self._exchange.host_slots.all_bytes + sum(desk.nbytes for desk in self._desks)

    @contextmanager
    def updating(
        self, groups: Sequence[SubGroup], options: Mapping[str, Any]
    ) -> Iterator[Sequence[SubGroup]]:
        """See :meth:`NoHostLane.updating`."""
        mine = self._chosen(groups)
        rest = [group for group in groups if group not in self._groups]
        on_device, on_host = _bytes_of(rest), _bytes_of(mine)
        self.updated, self.predicted_seconds = len(mine), self._share.expected(on_device, on_host)
        resident = {group: self._resident(group) for group in mine}
        after, began = self._homes.device.event(), time.perf_counter()  # which copies among them are before
        with ThreadPoolExecutor(_THREADS, "tba-update", self._homes.device.bind_thread) as pool:
            try:
                jobs = [pool.submit(self._update, group, resident[group], options, after) for group in mine]
                yield rest
                device_seconds = time.perf_counter() - began
                done = [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(cancel_futures=True)  # and waits for those that run
                raise
        for group, (update, _) in zip(mine, done, strict=True):
            self._take(group, update)
        self._ring.count()
        host_seconds = max((at for _, at in done), default=began) - began
        self._share.learn(LaneTime(on_device, device_seconds), LaneTime(on_host, host_seconds))

    def give_up(self, groups: Iterable[SubGroup]) -> None:
        """See :meth:`NoHostLane.give_up`."""
        for group in self._groups.intersection(groups):
            self._ring.leave(group)
            self._groups.remove(group)

    def _chosen(self, groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Takes over the sub-groups that it updates now, and gives up the others."""
        updated = set(groups)
        able = [group for group in self._roster.spread if group in updated and can_be_copied(group)]
        count = self._share.count([group.nbytes for group in able], len(self._groups))
        chosen = set(able[:count])
        self.give_up(updated - chosen)
        for group in chosen - self._groups:
            self._exchange.slots.write(group)
            self._exchange.slots.empty(group)
            self._ring.enter(group)
            self._groups.add(group)
        return [group for group in groups if group in chosen]

    def _resident(self, group: SubGroup) -> dict[Piece, Entry]:
        return {piece: self._exchange.entry(piece) for piece in group.pieces}

    def _update(
        self, group: SubGroup, resident: Mapping[Piece, Entry], options: Mapping[str, Any], after: Event
    ) -> _Done:
        """Updates a sub-group, on a thread of the pool."""
        states = self._ring.load(group)
        after.synchronize()
        device, desk = self._homes.device, self._desks.pop()
        try:
            with device.on_side_stream():  # another one would wait for all that the device has to do
                update = HostUpdate(group, states, resident, self._masters, desk)
                update.fetch()
            with self._computing:
                update.run(self._own, options)
            with device.on_side_stream():
                update.give_back()
        finally:
            self._desks.append(desk)
            self._ring.store(group)
        return _Done(update, time.perf_counter())

    def _take(self, group: SubGroup, update: HostUpdate) -> None:
        """Shows the states that an update has left.

        Where they are others than before, as when amsgrad is switched on, the device goes on with them.
        """
        if update.is_as_before:
            self._exchange.take(group, update.bound, update.entries)
            return
        entries = update.entries_on(self._homes.device.torch_device)
        self._ring.drop(group)
        self._groups.remove(group)
        self._exchange.take(group, {}, entries)


class _Ring:
    """Host memory for the states of sub-groups that the processor updates; its methods may run on any thread.

    Args:
        homes: Where sub-groups live that the device updates.
        slots: The memory.
    """

    def __init__(self, homes: Homes, slots: Slots[SubGroup]) -> None:
        self._homes = homes
        self._slots = slots
        self._own_homes = homes.on_host()
        self._is_home = homes.store.kind == HostStore.kind  # no need to travel any further
        self._busy: set[SubGroup] = set()
        self._lock = threading.Lock()

    def enter(self, group: SubGroup) -> None:
        """A sub-group is the processor's from now on."""
        group.home.serve(self._own_homes)

    def leave(self, group: SubGroup) -> None:
        """A sub-group is the device's again.

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
        self._slots.empty(group)
        group.home.serve(self._homes)

    def load(self, group: SubGroup) -> torch.Tensor:
        """The bytes of a sub-group's states, once they are there, for an update.

        Raises:
            TransferError: They cannot be read.
        """
        with self._lock:
            self._busy.add(group)
            slot = self._slots.of(group)
            if slot is None and self._is_home:
                slot = self._slots.stay(group)
                self._slots.came(group)
            elif slot is None:
                slot = self._slots.take(group.room, self._next_use)
                slot.read(group)
        slot.settle()
        slot.touch()
        return slot.lend()

    def store(self, group: SubGroup) -> None:
        """Begins to write them, unless they stay."""
        with self._lock:
            self._slots.write(group)
            self._busy.discard(group)

    def count(self) -> None:
        """What was moved counts with what is moved for the device."""
        self._own_homes.hand_over(self._homes)

    def _next_use(self, group: SubGroup) -> int:
        return -1 if group in self._busy else 1


def _bytes_of(groups: Iterable[SubGroup]) -> int:
    return sum(group.nbytes for group in groups)
