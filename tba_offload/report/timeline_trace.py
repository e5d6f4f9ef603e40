"""Steps over time in the trace event format, which Perfetto, Chrome and ``torch.profiler`` share.

One process has a row for the phases of steps, one for the runs of layers, one for waits, one for each I/O
thread of each drive, and counters of memory and of each drive.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tba_offload.report.log import TimelineEvent

Event = dict[str, Any]

_PHASES, _LAYERS, _WAITS, _FIRST_DRIVE = 1, 2, 3, 4
"""Rows of the trace."""


@dataclass
class Trace:
    """A trace that is being made.

    Attributes:
        process: Number of its process.
        events: Its events.
    """

    process: int
    events: list[Event] = field(default_factory=list)
    _rows: dict[str, int] = field(default_factory=dict)

    def name(self, title: str) -> None:
        """Give the process its name, and the first rows theirs."""
        self._describe("process", 0, title)
        self.events.append(self._event("M", "process_sort_index", 0, 0, args={"sort_index": -1}))
        for row, name in ((_PHASES, "phases"), (_LAYERS, "layers"), (_WAITS, "waits for I/O")):
            self._describe("thread", row, name)

    def add(self, step: TimelineEvent, began: float = 0.0) -> None:
        """Add a step.

        Args:
            step: The step.
            began: When it began on the axis of the trace, in microseconds.
        """
        for event in (*self._phases(step), *self._runs(step), *self._waits(step), *self._moves(step)):
            self.events.append(_at(event, began))
        for count in (*_memory(step), *_limits(step), *_traffic(step)):
            self.events.append(_at(self._event("C", count.name, 0, count.seconds, args=count.values), began))

    # ---- rows ------------------------------------------------------------------------------------

    def _phases(self, step: TimelineEvent) -> Iterator[Event]:
        yield self._slice(f"step {step.step}", _PHASES, 0.0, step.seconds, cat="step")
        for phase in step.phases():
            yield self._slice(phase.name, _PHASES, phase.began, phase.ended, cat="phase")

    def _runs(self, step: TimelineEvent) -> Iterator[Event]:
        for what, runs in (("forward", step.forwards()), ("backward", step.backwards())):
            for scope, began, ended in runs:
                name = f"{what} {step.names[scope.layer]}"
                told = {"layer": scope.layer, "micro_batch": scope.micro_batch}
                yield self._slice(name, _LAYERS, began, ended, cat=what, args=told)

    def _waits(self, step: TimelineEvent) -> Iterator[Event]:
        for since, until in step.stalls:
            yield self._slice("wait", _WAITS, since, until, cat="wait")

    def _moves(self, step: TimelineEvent) -> Iterator[Event]:
        threads: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for move in step.moves:
            verb, known = "write" if move.writes else "read", threads[move.drive, move.writes]
            if move.thread not in known:
                known.append(move.thread)
            label, place = step.label_of(move.drive), step.place_of(move.drive)
            where = label if label == place else f"{label} ({place})"
            row = self._row_of(f"{where}: {verb} {known.index(move.thread)}")
            told = {"bytes": move.nbytes, "drive": place}
            yield self._slice(verb, row, move.began, move.ended, cat="transfer", args=told)

    def _row_of(self, name: str) -> int:
        if name not in self._rows:
            self._rows[name] = _FIRST_DRIVE + len(self._rows)
            self._describe("thread", self._rows[name], name)
        return self._rows[name]

    # ---- events ----------------------------------------------------------------------------------

    def _describe(self, what: str, row: int, name: str) -> None:
        self.events.append(self._event("M", f"{what}_name", row, 0, args={"name": name}))
        if what == "thread":
            self.events.append(self._event("M", "thread_sort_index", row, 0, args={"sort_index": row}))

    def _slice(self, name: str, row: int, began: float, ended: float, **more: Any) -> Event:
        return self._event("X", name, row, began, dur=round(max(ended - began, 0.0) * 1e6, 3), **more)

    def _event(self, kind: str, name: str, row: int, seconds: float, **more: Any) -> Event:
        return {"ph": kind, "name": name, "pid": self.process, "tid": row, "ts": seconds * 1e6, **more}


@dataclass(frozen=True, slots=True)
class _Count:
    """Values of a counter from a moment on."""

    name: str
    seconds: float
    values: Mapping[str, float]


def _memory(step: TimelineEvent) -> Iterator[_Count]:
    for point in step.points:
        held = {
            "live": point.live,
            "in flight": point.in_flight,
            "read ahead": point.read_ahead,
            "in use or refused": point.settled,
            "left by layers": point.left,
        }
        yield _Count("memory (bytes)", point.seconds, held)


def _limits(step: TimelineEvent) -> Iterator[_Count]:
    limits = {"activations": step.budget, "in flight": step.window}
    known = {name: float(nbytes) for name, nbytes in limits.items() if nbytes is not None}
    if known:
        yield _Count("budget (bytes)", 0.0, known)
        yield _Count("budget (bytes)", step.seconds, known)


def _traffic(step: TimelineEvent) -> Iterator[_Count]:
    if not step.moves:
        yield from _all_traffic(step)
    for drive in range(len(step.drives)):
        for word, writes in (("written", True), ("read", False)):
            for seconds, rate in step.rates_of(drive, writes=writes):
                yield _Count(f"{step.label_of(drive)}: {word} (bytes/s)", seconds, {word: rate})


def _all_traffic(step: TimelineEvent) -> Iterator[_Count]:
    """Yield the traffic of all drives, where it is not known which of them moved what."""
    for before, after in pairwise(step.points):
        span = after.seconds - before.seconds
        if span > 0:
            rates = {
                "written": (after.written - before.written) / span,
                "read": (after.read - before.read) / span,
            }
            yield _Count("traffic (bytes/s)", before.seconds, rates)


def _at(event: Event, began: float) -> Event:
    return event | {"ts": round(began + event["ts"], 3)}  # nanoseconds
