"""Updates in host memory: the processor updates some sub-groups while the device updates the others.

The states of those do not cross the link between device and host; gradients come and parameters go instead.
It is what Deep Optimizer States does (arXiv 2410.21316), but which lane a sub-group goes to follows from what
the lanes take, and states may lie on drives as well. The optimizer's own code updates both, by its kernels
for a CPU here, which may round differently.
"""

from __future__ import annotations

from concurrent.futures import wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.errors import UnsupportedError
from tba_offload.states.host_ring import HostRing
from tba_offload.states.host_share import LaneTime
from tba_offload.states.host_update import can_be_copied
from tba_offload.states.host_workers import HostWorkers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import torch

    from tba_offload.states.entries import Entries
    from tba_offload.states.groups import Entry, Groups, SubGroup
    from tba_offload.states.home import Homes
    from tba_offload.states.host_share import HostShare
    from tba_offload.states.host_update import HostUpdate
    from tba_offload.states.host_workers import Done
    from tba_offload.states.masters import Masters
    from tba_offload.states.pieces import Piece


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

    def welcome(self, group: SubGroup) -> None:
        """Record that a sub-group has got its states, which lie in a slot of the device."""

    def give_up(self, groups: Iterable[SubGroup]) -> None:
        """Leave sub-groups to the device.

        Raises:
            TransferError: Their states cannot be written.
        """

    def forget(self, groups: Iterable[SubGroup]) -> None:
        """Record that these sub-groups are no more."""

    def check_may_stay(self) -> None:
        """Check that sub-groups may stay on the device.

        Raises:
            UnsupportedError: They may not.
        """

    def close(self) -> None:
        """Nothing is updated any more."""


class _Split(NamedTuple):
    """How an update was split, and when each lane had ended."""

    on_device: int
    on_host: int
    began: Future[float]
    device_ended: Future[float]
    host_ended: float

    def lanes(self) -> tuple[LaneTime, LaneTime]:
        """Return what the device did, and the processor."""
        began = self.began.result()
        device, host = self.device_ended.result() - began, self.host_ended - began
        return LaneTime(self.on_device, device), LaneTime(self.on_host, host)


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
        exchange: Entries,
        roster: Groups,
        masters: Masters,
        share: HostShare,
    ) -> None:
        self._device = homes.device
        self._exchange = exchange
        self._roster = roster
        self._share = share
        self._groups: set[SubGroup] = set()
        self._ring = HostRing(homes, exchange.host_homes, exchange.host_slots)
        self._workers = HostWorkers(optimizer, kind, homes.device, masters, self._ring)
        self._last: _Split | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it has, for states and for copies."""
        return self._exchange.host_slots.all_bytes + self._workers.nbytes

    @contextmanager
    def updating(
        self, groups: Sequence[SubGroup], options: Mapping[str, Any]
    ) -> Iterator[Sequence[SubGroup]]:
        """See :meth:`NoHostLane.updating`."""
        if self._last is not None:  # by now the device is done with that
            self._share.learn(*self._last.lanes())
            self._last = None
        mine = self._chosen(groups)
        rest = [group for group in groups if group not in self._groups]
        on_device, on_host = _bytes_of(rest), _bytes_of(mine)
        self.updated, self.predicted_seconds = len(mine), self._share.expected(on_device, on_host)
        resident = {group: self._resident(group) for group in mine}
        after = self._device.event()  # copies among them are made before
        began = self._workers.reached(after)
        jobs: dict[SubGroup, Future[Done]] = {}
        try:
            for group in mine:
                jobs[group] = self._workers.update(group, resident[group], options, after)
            yield rest
            device_ended = self._workers.reached(self._device.event())
            host_ended = max((job.result().at for job in jobs.values()), default=0.0)
        finally:
            self._end(jobs)
        self._last = _Split(on_device, on_host, began, device_ended, host_ended)

    def welcome(self, group: SubGroup) -> None:
        """See :meth:`NoHostLane.welcome`.

        Where states live in host memory those of the processor come to their own slots at once, so that the
        store takes no memory for them.
        """
        if self._ring.is_home and can_be_copied(group):
            sizes = [each.nbytes for each in self._roster if can_be_copied(each)]
            if self._share.count(sizes, len(self._groups)) > len(self._groups):
                slots = self._exchange.slots
                if (slot := slots.of(group)) is not None:
                    self._ring.adopt(group, slot.lend()[: group.nbytes])
                    self._groups.add(group)
                    slots.empty(group)

    def give_up(self, groups: Iterable[SubGroup]) -> None:
        """See :meth:`NoHostLane.give_up`."""
        for group in self._groups.intersection(groups):
            if self._exchange.shows_any(group):
                self._ring.leave(group)
            else:  # others are there in place of its states, as of a checkpoint
                self._ring.drop(group)
            self._groups.remove(group)

    def forget(self, groups: Iterable[SubGroup]) -> None:
        """See :meth:`NoHostLane.forget`."""
        self._groups.difference_update(groups)

    def check_may_stay(self) -> None:
        """See :meth:`NoHostLane.check_may_stay`."""
        raise UnsupportedError(
            "no sub-group stays on the device where the processor updates some; set states.update to device"
        )

    def close(self) -> None:
        """See :meth:`NoHostLane.close`."""
        self._workers.close()

    def _chosen(self, groups: Sequence[SubGroup]) -> list[SubGroup]:
        """Take over the sub-groups that it updates now, and give up the others."""
        updated = set(groups)
        able = [group for group in self._roster.spread if group in updated and can_be_copied(group)]
        able.sort(key=lambda group: group not in self._groups)  # those that it has stay as far as they may
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
        return {piece: self._exchange.resident(piece) for piece in group.pieces}

    def _end(self, jobs: Mapping[SubGroup, Future[Done]]) -> None:
        """Let no job begin any more, wait for those that run, and take what was done."""
        for job in jobs.values():
            job.cancel()
        wait(jobs.values())
        for group, job in jobs.items():
            if not job.cancelled() and job.exception() is None:
                self._take(group, job.result().update)
        self._ring.count()

    def _take(self, group: SubGroup, update: HostUpdate) -> None:
        """Show the states that an update has left; where they are others than before, they arrive anew."""
        if update.is_as_before:
            self._exchange.take(group, update.bound, update.entries)
            return
        entries = update.entries_on(self._device.torch_device)
        self._ring.drop(group)
        self._groups.remove(group)
        self._exchange.take(group, {}, entries)


def _bytes_of(groups: Iterable[SubGroup]) -> int:
    return sum(group.nbytes for group in groups)
