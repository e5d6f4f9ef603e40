"""How fast a tier takes bytes and gives them back, as measured while it is driven."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Rates of one tier: of one drive, or of several that are striped.

    Attributes:
        write: Bytes a second to it.
        read: Bytes a second from it.
        latency: Seconds that a transfer takes beside its bytes.
    """

    write: float
    read: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.write > 0 and self.read > 0 and self.latency >= 0):
            raise ValueError(f"rates must be positive, and latency not negative: {self}")

    def scaled(self, factor: float) -> Bandwidth:
        """The same tier, so many times as fast."""
        return Bandwidth(self.write * factor, self.read * factor, self.latency)


class MeasuredRate:
    """The rate of one direction of one tier, from the transfers of the last steps.

    A step counts by the bytes that it moved. What was measured fades with a half-life, so that a drive that
    has become slower is noticed within a few steps and one odd step does no harm.

    Args:
        half_life: After so many steps a measurement counts half.
    """

    def __init__(self, half_life: float = 1.0) -> None:
        self._fade = 0.5 ** (1 / half_life)
        self._nbytes = 0.0
        self._seconds = 0.0
        self._rates: list[float] = []

    def add(self, nbytes: int, seconds: float) -> None:
        """Takes note of one step: bytes that moved, and for how long the direction was busy with them."""
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
    def spread(self) -> float:
        """Relative standard deviation of the last ten steps; 0 for less than two."""
        if len(self._rates) < 2:
            return 0.0
        mean = sum(self._rates) / len(self._rates)
        return math.sqrt(sum((rate - mean) ** 2 for rate in self._rates) / (len(self._rates) - 1)) / mean
