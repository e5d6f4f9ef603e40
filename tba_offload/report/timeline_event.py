"""The ``timeline`` event of a run log: one step over time. It is checked before anything is made of it."""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from tba_offload.report.damage import checked

if TYPE_CHECKING:
    from collections.abc import Mapping


def _in_nanoseconds(seconds: float) -> float:
    """No clock tells less, and what is divided by a part of less is beyond all bounds."""
    return round(seconds, 9)


_Bytes = Annotated[int, Field(strict=True, ge=0, le=2**50)]
_Seconds = Annotated[
    float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False), AfterValidator(_in_nanoseconds)
]
_Number = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
_Word = Annotated[str, Field(max_length=1000)]


class ScopeTimes(NamedTuple):
    """One run of a layer; times are seconds since the step began."""

    layer: _Number
    micro_batch: _Number
    forward_began: _Seconds
    forward_ended: _Seconds | None
    backward_began: _Seconds | None


class Moment(NamedTuple):
    """Memory and traffic at one moment: seconds since the step began, and bytes since then."""

    seconds: _Seconds
    live: _Bytes
    in_flight: _Bytes
    read_ahead: _Bytes
    written: _Bytes
    read: _Bytes


class TimelineEvent(BaseModel):
    """One step over time, by the host's clock.

    Attributes:
        step: Its number.
        source: How live bytes were measured.
        names: Module names of the layers.
        scopes: The runs of layers, in the order of their forward.
        backward_ends: When backward passes ended.
        stalls: When training waited for I/O: from, until.
        points: Memory and traffic, in the order of time.
    """

    step: _Number
    source: _Word
    names: Annotated[list[_Word], Field(max_length=10_000)]
    scopes: Annotated[list[ScopeTimes], Field(max_length=100_000)]
    backward_ends: Annotated[list[_Seconds], Field(max_length=100_000)]
    stalls: Annotated[list[tuple[_Seconds, _Seconds]], Field(max_length=100_000)]
    points: Annotated[list[Moment], Field(min_length=1, max_length=100_000)]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if any(scope.layer >= len(self.names) for scope in self.scopes):
            raise ValueError("a run is of no layer")
        return self

    @property
    def seconds(self) -> float:
        """When the last thing was that it tells of."""
        ends = [until for _, until in self.stalls] + self.backward_ends + [self.points[-1].seconds]
        return max([*ends, *(scope.forward_ended or scope.forward_began for scope in self.scopes)])

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
        edges = sorted([*begins, *self.backward_ends, *forwards, self.seconds])
        return [(scope, began, edges[min(bisect(edges, began), len(edges) - 1)]) for scope, began in reached]


def checked_timeline(event: Mapping[str, object]) -> TimelineEvent:
    """The event with its types.

    Raises:
        RunLogError: A part is missing, of another type or beyond all bounds; says which.
    """
    return checked(TimelineEvent, event)
