"""The ``timeline`` event of a run log: one step over time. It is checked before anything is made of it."""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from tba_offload.report.damage import Bytes, Flag, Number, Seconds, Word, checked

if TYPE_CHECKING:
    from collections.abc import Mapping


def _in_nanoseconds(seconds: float) -> float:
    """No clock tells less, and what is divided by a part of less is beyond all bounds."""
    return round(seconds, 9)


_Seconds = Annotated[Seconds, AfterValidator(_in_nanoseconds)]
_Nanoseconds = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class ScopeTimes(NamedTuple):
    """One run of a layer; times are seconds since the step began."""

    layer: Number
    micro_batch: Number
    forward_began: _Seconds
    forward_ended: _Seconds | None
    backward_began: _Seconds | None


class Moment(NamedTuple):
    """Memory and traffic at one moment, as of :data:`tba_offload.session.step_curve.Point`.

    Times are seconds since the step began. The last two are not in logs of earlier versions.
    """

    seconds: _Seconds
    live: Bytes
    in_flight: Bytes
    read_ahead: Bytes
    written: Bytes
    read: Bytes
    settled: Bytes = 0
    left: Bytes = 0


class Move(NamedTuple):
    """One call that moved bytes; times are seconds since the step began.

    Attributes:
        drive: Its place in the list of drives.
        writes: Whether it wrote.
        began: When it began.
        ended: When it ended.
        nbytes: Bytes that it moved.
        thread: Number of the I/O thread.
    """

    drive: Number
    writes: Flag
    began: _Seconds
    ended: _Seconds
    nbytes: Bytes
    thread: Number


class Phase(NamedTuple):
    """What a step is at from one moment to another: ``forward``, ``backward`` or ``update``."""

    name: str
    began: float
    ended: float


HOST = "host memory"
"""Name of the place that is no drive."""

STATES = "optimizer states in "
"""Beginning of the name of a drive where what it moves are states of optimizers."""

WEIGHTS = "frozen weights in "
"""Beginning of the name of a drive where what it moves are frozen weights."""

_LABELS = {STATES: ", optimizer states", WEIGHTS: ", frozen weights"}


def prefix_of(name: str) -> str:
    """Return what the name of a drive begins with: empty where it moves activations."""
    return next(filter(name.startswith, _LABELS), "")


class TimelineEvent(BaseModel):
    """One step over time, by the host's clock.

    Attributes:
        step: Its number.
        source: How live bytes were measured.
        names: Module names of the layers.
        scopes: The runs of layers, in the order of their forward.
        backward_ends: When backward passes ended.
        stalls: When training waited for I/O: from, until.
        points: Memory and traffic, in the order of time; none where memory was not measured.
        began_unix_ns: When the step began, in nanoseconds since the epoch; ``None`` in logs of earlier
            versions, which lack all that follows too.
        updates: When optimizers worked: from, until.
        layers_left: When backward passes came out of the first layer, to embeddings; none in logs of earlier
            versions.
        budget: Most bytes of activations that the policy allows; ``None`` for no limit.
        window: Most bytes in flight that it allows; ``None`` for no limit.
        drives: The drives that moved bytes, each with its number among the directories, and its name; one
            that moved states of optimizers, or frozen weights, is there once more for these, its name after
            :data:`STATES` or :data:`WEIGHTS`.
        moves: The calls that moved bytes, by when they began.
    """

    step: Number
    source: Word
    names: Annotated[list[Word], Field(max_length=10_000)]
    scopes: Annotated[list[ScopeTimes], Field(max_length=100_000)]
    backward_ends: Annotated[list[_Seconds], Field(max_length=100_000)]
    stalls: Annotated[list[tuple[_Seconds, _Seconds]], Field(max_length=100_000)]
    points: Annotated[list[Moment], Field(max_length=100_000)]
    began_unix_ns: _Nanoseconds | None = None
    updates: Annotated[list[tuple[_Seconds, _Seconds]], Field(max_length=100_000)] = []
    layers_left: Annotated[list[_Seconds], Field(max_length=100_000)] = []
    budget: Bytes | None = None
    window: Bytes | None = None
    drives: Annotated[list[tuple[Number, Word]], Field(max_length=1000)] = []
    moves: Annotated[list[Move], Field(max_length=100_000)] = []

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if any(scope.layer >= len(self.names) for scope in self.scopes):
            raise ValueError("a run is of no layer")
        if any(move.drive >= len(self.drives) for move in self.moves):
            raise ValueError("bytes were moved by no drive")
        return self

    @property
    def seconds(self) -> float:
        """When the last thing was that it tells of."""
        ends = [until for _, until in (*self.stalls, *self.updates)] + self.backward_ends
        ends += [point.seconds for point in self.points[-1:]] + [move.ended for move in self.moves]
        ends += [scope.forward_ended or scope.forward_began for scope in self.scopes]
        return max(ends, default=0.0)

    def forwards(self) -> list[tuple[ScopeTimes, float, float]]:
        """Each run of a layer with the begin and the end of its forward."""
        return [
            (scope, scope.forward_began, max(scope.forward_ended, scope.forward_began))
            for scope in self.scopes
            if scope.forward_ended is not None
        ]

    def backwards(self) -> list[tuple[ScopeTimes, float, float]]:
        """Each run with the begin and the end of its backward, which is where the next thing begins."""
        reached = [(scope, scope.backward_began) for scope in self.scopes if scope.backward_began is not None]
        begins = sorted(began for _, began in reached)
        forwards = [scope.forward_began for scope in self.scopes]
        edges = sorted([*begins, *self.layers_left, *self.backward_ends, *forwards, self.seconds])
        return [(scope, began, edges[min(bisect(edges, began), len(edges) - 1)]) for scope, began in reached]

    def phases(self) -> list[Phase]:
        """Return what the step is at, in the order of time; in between it computes losses, or it waits."""
        forwards = sorted((began, ended) for _, began, ended in self.forwards())
        begins = sorted(began for _, began, _ in self.backwards())
        phases = [Phase("update", since, max(until, since)) for since, until in self.updates]
        since = 0.0
        for end in [*sorted(self.backward_ends), math.inf]:
            began = next((began for began in begins if since <= began < end), math.inf)
            runs = [run for run in forwards if since <= run[0] < min(began, end)]
            if runs:
                phases.append(Phase("forward", runs[0][0], max(ended for _, ended in runs)))
            if began < end < math.inf:
                phases.append(Phase("backward", began, end))
            since = end
        return sorted(phases, key=_began)

    def label_of(self, drive: int) -> str:
        """Return what pictures call a drive.

        By its number among the directories, so that they show no name.
        """
        number, name = self.drives[drive]
        label = HOST if self.place_of(drive) == HOST else f"drive {number}"
        return label + _LABELS.get(prefix_of(name), "")

    def place_of(self, drive: int) -> str:
        """Return the name of a drive, whatever it moves."""
        name = self.drives[drive][1]
        return name.removeprefix(prefix_of(name))

    def rates_of(self, drive: int, *, writes: bool) -> list[tuple[float, float]]:
        """Bytes a second that a drive moves: from when, and how many, until the next.

        What a call has moved is spread evenly over its time.

        Args:
            drive: Its place in the list of drives.
            writes: Whether it is about what it writes.
        """
        changes: dict[float, float] = defaultdict(float)
        for move in self.moves:
            if (move.drive, move.writes) == (drive, writes):
                ended = max(move.ended, move.began + _SHORTEST)
                rate = move.nbytes / (ended - move.began)
                changes[move.began] += rate
                changes[ended] -= rate
        times = sorted(changes)
        rates = accumulate(changes[at] for at in times)
        return [(at, max(rate, 0.0)) for at, rate in zip(times, rates, strict=True)]


_SHORTEST = 1e-6
"""Seconds that a call takes at least: times of logs are whole microseconds."""


def _began(phase: Phase) -> float:
    return phase.began


def checked_timeline(event: Mapping[str, object]) -> TimelineEvent:
    """Return the event with its types.

    Raises:
        RunLogError: A part is missing, of another type or beyond all bounds; says which.
    """
    return checked(TimelineEvent, event)
