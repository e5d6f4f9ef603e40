"""How fast tiers take bytes and give them back, as measured while they are driven."""

from __future__ import annotations

import math
import statistics
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


def median_deviation(values: Sequence[float]) -> float:
    """Return the median of the absolute deviations from the median; 0 if there is no value.

    Where less than half of the values are others than before, it is what it was: a change does not hide
    itself.
    """
    if not values:
        return 0.0
    usual = statistics.median(values)
    return statistics.median(abs(value - usual) for value in values)


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory beside drives, for what they have no time for.

    Attributes:
        write: Bytes a second to it.
        read: Bytes a second from it.
        capacity: Bytes that it holds at most.
    """

    write: float
    read: float
    capacity: int

    def __post_init__(self) -> None:
        if not (self.write > 0 and self.read > 0 and self.capacity >= 0):
            raise ValueError(f"rates must be positive, and the capacity not negative: {self}")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Rates of one tier, of one drive or of several that are striped; and the tier beside it.

    Attributes:
        write: Bytes a second to it.
        read: Bytes a second from it.
        latency: Seconds that a transfer takes beside its bytes.
        host: Host memory for what the drives have no time for; ``None`` if there is none.
        capacity: Bytes that it holds at most, what it has no room for stays in memory; ``None`` for no limit.
    """

    write: float
    read: float
    latency: float = 0.0
    host: HostTier | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not (self.write > 0 and self.read > 0 and self.latency >= 0 and (self.capacity or 0) >= 0):
            raise ValueError(f"rates must be positive, latency and capacity not negative: {self}")

    def scaled(self, factor: float) -> Bandwidth:
        """Return the same with drives that are so many times as fast."""
        return replace(self, write=self.write * factor, read=self.read * factor)

    def with_host(
        self, capacity: int | None, *, write: float | None = None, read: float | None = None
    ) -> Bandwidth:
        """Return the same drives with other host memory beside them.

        Args:
            capacity: Bytes of it; ``None`` for none.
            write: Bytes a second to it; ``None`` where that was not measured.
            read: Bytes a second from it, likewise.
        """
        if capacity is None:
            return replace(self, host=None)
        speed = TUNING.host_speed
        host = HostTier(write or speed * self.write, read or speed * self.read, capacity)
        return replace(self, host=host)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Bandwidth:
        """Return what :func:`dataclasses.asdict` made a document of."""
        host = document.get("host")
        return cls(**{**document, "host": None if host is None else HostTier(**host)})


class MeasuredRate:
    """The rate of one direction of one tier, from the transfers of the last steps.

    A step counts by the bytes that it moved. What was measured fades with a half-life, so that a drive that
    has become slower is noticed within a few steps and one odd step does no harm.
    """

    def __init__(self) -> None:
        self._fade = 0.5 ** (1 / TUNING.half_life)
        self._nbytes = 0.0
        self._seconds = 0.0
        self._rates: list[float] = []

    def add(self, nbytes: int, seconds: float) -> None:
        """Take note of one step: bytes that moved, and for how long the direction was busy with them."""
        if nbytes <= 0 or seconds <= 0:
            return
        self._nbytes = self._nbytes * self._fade + nbytes
        self._seconds = self._seconds * self._fade + seconds
        self._rates = [*self._rates[-9:], nbytes / seconds]

    @property
    def rate(self) -> float | None:
        """Bytes a second; ``None`` before anything moved."""
        return self._nbytes / self._seconds if self._seconds else None

    @property
    def usual(self) -> float | None:
        """Bytes a second in the median of the last three steps; ``None`` before anything moved."""
        return statistics.median(self._rates[-3:]) if self._rates else None

    @property
    def deviation(self) -> float:
        """Median deviation of the last ten steps from their median, as a share of that."""
        return median_deviation(self._rates) / statistics.median(self._rates) if self._rates else 0.0

    def as_json(self) -> dict[str, float | None]:
        """For the run log: rate in bytes a second, and its spread."""
        return {"bytes_per_second": self.rate, "spread": self.spread}

    @property
    def spread(self) -> float | None:
        """Relative standard deviation of the last ten steps; ``None`` for less than two."""
        if len(self._rates) < 2:
            return None
        mean = sum(self._rates) / len(self._rates)
        return math.sqrt(sum((rate - mean) ** 2 for rate in self._rates) / (len(self._rates) - 1)) / mean


@dataclass(eq=False)
class DriveRates:
    """What one drive was found to do, in both directions.

    Planners of one process that use the same drive share it: two models that train there in turn, or at once,
    each know what the other has found.
    """

    write: MeasuredRate = field(default_factory=MeasuredRate)
    read: MeasuredRate = field(default_factory=MeasuredRate)

    _of_drives: ClassVar[weakref.WeakValueDictionary[Hashable, DriveRates]] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, drive: Hashable) -> DriveRates:
        """Return the rates of a drive, new ones if no planner has any.

        Args:
            drive: Tells drives apart; ``None`` for one that is not shared.
        """
        found = None if drive is None else cls._of_drives.get(drive)
        if found is None:
            found = cls()
            if drive is not None:
                cls._of_drives[drive] = found
        return found
