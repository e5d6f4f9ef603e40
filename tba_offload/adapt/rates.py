"""The rates of the tiers: how fast each takes bytes and gives them back, as the loads of steps tell."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from tba_offload.formatting import readable_rate, readable_size
from tba_offload.plan.bandwidth import Bandwidth, DriveRates, MeasuredRate
from tba_offload.store.base import DRIVE_TIER, HOST_TIER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.adapt.task import Task
    from tba_offload.plan.tuning import Tuning
    from tba_offload.store.base import DriveLoad

_ANY_RATE = 1e9
"""Bytes a second of drives that take nothing: no time depends on it."""


class Rates:
    """The rates of the drives, and of host memory beside them.

    Args:
        task: Names the drives, and says how much host memory there is.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._drives: list[DriveRates] = []
        self._host = MeasuredRate(), MeasuredRate()
        self._resting: frozenset[int] = frozenset()  # numbers of drives out of service
        self._room: int | None = None
        self._fell_back = False  # whether activations stayed because no drive took them

    @property
    def room(self) -> int | None:
        """Bytes that the drives hold at most, as far as that is known."""
        return self._room

    def forget(self) -> None:
        """Forget what was measured: memory and files grew, caches were cold."""
        self._drives = []
        self._host = MeasuredRate(), MeasuredRate()

    def note(self, loads: Sequence[DriveLoad], *, fell_back: bool) -> bool:
        """Note what a step has moved, and whether activations stayed because no drive took them.

        Returns:
            Whether the drives hold more than before, or less.
        """
        drives = [load for load in loads if load.tier == DRIVE_TIER]
        self._resting = frozenset(number for number, load in enumerate(drives) if not load.in_service)
        self._fell_back |= fell_back
        names = self._task.drives
        for number in range(len(self._drives), len(drives)):
            self._drives.append(DriveRates.of(names[number] if number < len(names) else None))
        rates = iter((drive.write, drive.read) for drive in self._drives)
        for load in loads:
            write, read = next(rates) if load.tier == DRIVE_TIER else self._host
            write.add(*load.write)
            read.add(*load.read)
        return self._note_room([load.room for load in drives])

    def _note_room(self, rooms: Sequence[int | None]) -> bool:
        room = None if None in rooms else sum(each or 0 for each in rooms)
        has_changed = differ_in_room(room, self._room, self._task.tuning.drift)
        self._room = room
        return has_changed

    def bandwidth(self) -> Bandwidth | None:
        """All drives in service together, and host memory beside them; ``None`` if nothing moved."""
        return self._together(attrgetter("rate"))

    def usual(self) -> Bandwidth | None:
        """Return the same by the median of the last three steps, so that one odd step is none."""
        return self._together(attrgetter("usual"))

    def _together(self, of: Callable[[MeasuredRate], float | None]) -> Bandwidth | None:
        write = sum(of(drive.write) or 0.0 for drive in self._in_service)
        read = sum(of(drive.read) or 0.0 for drive in self._in_service)
        if write:
            read = read or write  # all may have been forwarded so far
            drives = Bandwidth(write, read, capacity=self._room)
        elif self._fell_back:
            drives = Bandwidth(_ANY_RATE, _ANY_RATE, capacity=0)
        else:
            return None
        to_host, from_host = self._host
        return drives.with_host(self._task.host_capacity, write=of(to_host), read=of(from_host))

    @property
    def _in_service(self) -> list[DriveRates]:
        return [drive for number, drive in enumerate(self._drives) if number not in self._resting]

    def deviation(self) -> float:
        """By which share the rates of drives in service differ from step to step, that of the worst."""
        rates = (rate for drive in self._in_service for rate in (drive.write, drive.read))
        return max((rate.deviation for rate in rates), default=0.0)

    def as_json(self) -> list[dict[str, object]]:
        """Return the rates of each drive, and of host memory beside them, for a run log."""
        tiers = [(DRIVE_TIER, drive.write, drive.read) for drive in self._drives]
        if self._task.host_capacity is not None:
            tiers.append((HOST_TIER, *self._host))
        return [
            {"tier": tier, "write": write.as_json(), "read": read.as_json()} for tier, write, read in tiers
        ]


def drifted(now: Bandwidth, then: Bandwidth, share: float, tuning: Tuning) -> bool:
    """Whether a tier is no longer what it was, or was taken to be.

    Args:
        now: The tiers now.
        then: The tiers then.
        share: Share by which another rate, or another room, is another drive.
        tuning: Has the share for host memory.
    """
    if differ(now.write, then.write, share) or differ(now.read, then.read, share):
        return True
    if differ_in_room(now.capacity, then.capacity, share):
        return True
    if now.host is None or then.host is None:
        return False
    # A processor with much else to do copies at a rate that varies, and little may depend on it.
    share = max(share, tuning.big_drift)
    return differ(now.host.write, then.host.write, share) or differ(now.host.read, then.host.read, share)


def differ(found: float, expected: float, share: float) -> bool:
    """Whether a figure is by more than a share of what was expected above or below it."""
    return abs(found - expected) > share * expected


def differ_in_room(found: int | None, expected: int | None, share: float) -> bool:
    """Whether drives hold another number of bytes than expected; ``None`` is no limit."""
    if found is None or expected is None:
        return found is not expected
    return differ(found, expected, share)


def in_words(bandwidth: Bandwidth) -> str:
    """Rates of writing and reading, tier by tier, and the room of the drives."""
    rates = [
        (bandwidth.write, bandwidth.read),
        *([(bandwidth.host.write, bandwidth.host.read)] if bandwidth.host else []),
    ]
    room = "" if bandwidth.capacity is None else f", room for {readable_size(bandwidth.capacity)}"
    return " and ".join(f"{readable_rate(write)} / {readable_rate(read)}" for write, read in rates) + room
