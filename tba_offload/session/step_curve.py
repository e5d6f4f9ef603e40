"""One step over time, for a timeline: memory and traffic as they were, and when layers ran.

A few steps are recorded without being asked for: there are as many points as the meter takes samples anyway.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.capture.trace import ScopeTrace, StepTrace
    from tba_offload.device.memory import MemoryMeter
    from tba_offload.transfer.ledger import TransferStats
    from tba_offload.transfer.offloader import Offloader

_FIRST = 3
"""Number of the first step that is recorded: states exist, and drives are warm."""

_MOST_POINTS = 2000
"""Points of a curve: twice as many as a picture has columns."""

_MOST_SCOPES = 20_000
"""Runs of layers of a step that is told: a line of some MiB."""


class Point(NamedTuple):
    """Memory and traffic at one moment.

    Attributes:
        seconds: When, by :func:`time.perf_counter`.
        live: Live bytes, without gradients.
        in_flight: Bytes in flight.
        read_ahead: Those of them that were read ahead.
        written: Bytes written since the step began.
        read: Bytes read since then.
    """

    seconds: float
    live: int
    in_flight: int
    read_ahead: int
    written: int
    read: int


class StepCurve:
    """Records memory and traffic of some steps.

    Args:
        offloader: Knows what travels.
    """

    def __init__(self, offloader: Offloader) -> None:
        self._ledger = offloader.ledger
        self._is_on = False
        self._points: list[Point] = []
        self._highest: Point | None = None  # of those that become the next point
        self._waiting = 0
        self._each = 1
        self._source = ""

    def begin_step(self, meter: MemoryMeter | None, number: int) -> None:
        """A step begins.

        Args:
            meter: Its meter; without one there is nothing to record.
            number: How many ended before it.
        """
        self._points, self._highest, self._waiting, self._each = [], None, 0, 1
        self._is_on = meter is not None and _is_due(number + 1)
        self._source = meter.source if meter is not None else ""

    def seen(self, live: int) -> None:
        """The meter has seen ``live`` bytes in use. Of several moments the one with most of them stays."""
        if not self._is_on:
            return
        ledger, highest = self._ledger, self._highest
        if highest is None or live > highest.live:
            stats = ledger.stats
            moment = time.perf_counter(), live, ledger.in_flight, ledger.read_ahead
            self._highest = Point(*moment, stats.offloaded, stats.read)
        self._waiting += 1
        if self._waiting >= self._each:
            self._keep()

    def _keep(self) -> None:
        if self._highest is not None:
            self._points.append(self._highest)
        self._highest, self._waiting = None, 0
        if len(self._points) >= 2 * _MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [max(pair, key=_live) for pair in pairs]
            self._each *= 2

    def stop(self) -> None:
        """Nothing is recorded any more."""
        self._is_on = False

    def figures(
        self, trace: StepTrace, stats: TransferStats, names: Sequence[str], *, began: float, base: int
    ) -> dict[str, object] | None:
        """All of it, for the run log; ``None`` of a step that was not recorded.

        Args:
            trace: What ran.
            stats: When training waited.
            names: Module names of the layers.
            began: When the step began.
            base: Live bytes at that time.
        """
        if not self._points or len(trace.scopes) > _MOST_SCOPES:
            return None
        index = {name: number for number, name in enumerate(names)}

        def at(seconds: float | None) -> float | None:
            return None if seconds is None else round(max(seconds - began, 0.0), 6)

        return {
            "source": self._source,
            "names": list(names),
            "scopes": [
                [index[scope.key.name], scope.key.micro_batch, *map(at, _times(scope))]
                for scope in trace.scopes
                if scope.key.name in index
            ],
            "backward_ends": [at(seconds) for seconds in trace.backward_ends],
            "stalls": [[at(since), at(until)] for since, until in stats.stalls[:_MOST_SCOPES]],
            "points": [
                [at(point.seconds), max(point.live - base, 0), *point[2:]] for point in list(self._points)
            ],
        }


def _times(scope: ScopeTrace) -> tuple[float | None, ...]:
    return scope.forward_began, scope.forward_ended, scope.backward_began


def _is_due(number: int) -> bool:
    """The third step, and from the 16th on each whose number is a power of four."""
    return number == _FIRST or (number >= 16 and number.bit_count() == 1 and number.bit_length() % 2 == 1)


def _live(point: Point) -> int:
    return point.live
