"""One step of a run over time: as a picture, and as a trace that Perfetto and Chrome open."""

from __future__ import annotations

import json
import math
from bisect import bisect
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.errors import RunLogError
from tba_offload.files import write_regular
from tba_offload.formatting import BYTES, RATES, readable_size, scale
from tba_offload.report.log import TIMELINE, Bytes, Event, Seconds
from tba_offload.report.rok import COLOURS, GREY, INK, finish, picture_kind, write_picture

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from tba_offload.report.log import RunLog

TRACE = "json"
"""The suffix of a trace; pictures have their own."""


class ScopeTimes(NamedTuple):
    """One run of a layer; times are seconds since the step began."""

    layer: int
    micro_batch: int
    forward_began: Seconds
    forward_ended: Seconds | None
    backward_began: Seconds | None


class Moment(NamedTuple):
    """Memory at one moment, live bytes without gradients.

    Times are seconds since the step began.
    """

    seconds: Seconds
    live: Bytes
    in_flight: Bytes
    read_ahead: Bytes
    settled: Bytes
    left: Bytes


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

    drive: int
    writes: bool
    began: Seconds
    ended: Seconds
    nbytes: Bytes
    thread: int


class Drive(NamedTuple):
    """One place that bytes were moved to and from.

    Attributes:
        number: Its number among the directories.
        place: Its name.
        moves: What it moved: ``optimizer states``, ``frozen weights``, or empty for activations.
    """

    number: int
    place: str
    moves: str = ""

    @property
    def label(self) -> str:
        """The drive in pictures, which show no directory."""
        label = self.place if self.place == "host memory" else f"drive {self.number}"
        return f"{label}, {self.moves}" if self.moves else label


class TimelineEvent(Event):
    """One step over time, by the host's clock.

    Attributes:
        step: Its number.
        source: How live bytes were measured.
        names: Module names of the layers.
        scopes: The runs of layers, in the order of their forward.
        backward_ends: When backward passes ended.
        stalls: When training waited for I/O: from, until.
        points: Memory, in the order of time; none where that was not measured.
        updates: When optimizers worked: from, until.
        budget: Most bytes of activations that the policy allows; ``None`` for no limit.
        drives: The drives that moved bytes; one that moved states or weights too is there
            once more for these.
        moves: The calls that moved bytes, by when they began.
    """

    EVENT = TIMELINE

    step: int
    source: str
    names: list[str]
    scopes: list[ScopeTimes]
    backward_ends: list[Seconds]
    stalls: list[tuple[Seconds, Seconds]]
    points: list[Moment]
    updates: list[tuple[Seconds, Seconds]]
    budget: Bytes | None
    drives: list[Drive]
    moves: list[Move]

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
        edges = sorted([*begins, *self.backward_ends, *forwards, self.seconds])
        return [(scope, began, edges[min(bisect(edges, began), len(edges) - 1)]) for scope, began in reached]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a picture (``.svg``, ``.png``) or a trace (``.json``).

        Args:
            path: The file, whose suffix says which.

        Raises:
            ConfigError: Another suffix.
            MissingDependencyError: A picture needs matplotlib, which is not installed.
            OSError: The file cannot be written.
        """
        if picture_kind(path, TRACE) == TRACE:
            write_regular(path, json.dumps(trace_of(self)).encode())
        else:
            write_picture(path, lambda: timeline_figure(self))


def timeline_of(log: RunLog, step: int | None = None) -> TimelineEvent:
    """Return a step that a log tells over time.

    Args:
        log: The run.
        step: Its number; ``None`` for the last one.

    Raises:
        RunLogError: The log does not tell this step over time.
    """
    found = log.events(TimelineEvent)
    chosen = [each for each in found if step in (None, each.step)]
    if not chosen:
        known = ", ".join(str(each.step) for each in found) or "none"
        raise RunLogError(
            f"{log.path}: this step is not told over time; those that are: {known}. Name one of them, or log "
            "one of session.step(trace=True)"
        )
    return chosen[-1]


# The picture

_BINS, _MOST_POINTS = 120, 400
"""Bins of traffic, and points of a curve."""

_PARTS: dict[str, tuple[str, Callable[[Moment], int]]] = {
    "in flight": (COLOURS[1], lambda point: max(point.in_flight - point.read_ahead, 0)),
    "read ahead": (COLOURS[2], lambda point: point.read_ahead),
    "in use, or refused by drives": (COLOURS[4], lambda point: point.settled),
    "left by layers": (COLOURS[3], lambda point: point.left),
}
"""Parts of live bytes that are known, from below: colour and bytes."""


def timeline_figure(timeline: TimelineEvent, *, width: float = 7.6) -> Figure:
    """Return memory, the traffic of each drive, layers and waits over a step, within ``rok.drawing``."""
    from matplotlib.figure import Figure

    heights = [2.4, *[1.0] * len(timeline.drives), 1.3]
    figure = Figure(figsize=(width, sum(heights) + 1.0), layout="constrained")
    memory, *traffic, lanes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes in (memory, *traffic):
        for _, began, ended in timeline.backwards():
            axes.axvspan(began, ended, color="#f0f0f0", linewidth=0, zorder=0)
    end = timeline.seconds or 1.0
    memory.set_title("" if timeline.points else "memory was not measured")
    if timeline.points:
        _draw_memory(memory, timeline)
    _draw_traffic(traffic, timeline, end)
    _draw_lanes(lanes, timeline, end)
    lanes.set_xlim(0, end)
    lanes.set_xlabel(f"seconds since step {timeline.step} began (shaded: backward)")
    return figure


def _draw_memory(axes: Axes, timeline: TimelineEvent) -> None:
    """Stack what is known of live bytes, the rest on top, with the budget."""
    each = math.ceil(len(timeline.points) / _MOST_POINTS)
    groups = [timeline.points[first : first + each] for first in range(0, len(timeline.points), each)]
    points = [max(group, key=lambda point: point.live) for group in groups]
    peak = max(point.live for point in points)
    unit, size = scale(peak, BYTES)
    seconds, live = [point.seconds for point in points], [point.live / size for point in points]
    parts = {name: [part(point) / size for point in points] for name, (_, part) in _PARTS.items()}
    known = [sum(column) for column in zip(*parts.values(), strict=True)]
    parts["all else"] = [max(whole - told, 0) for whole, told in zip(live, known, strict=True)]
    colours = [*(colour for colour, _ in _PARTS.values()), GREY]
    axes.stackplot(seconds, *parts.values(), labels=list(parts), colors=colours, alpha=0.75, linewidth=0)
    how = "sampled" if "sampled" in timeline.source else "measured"
    axes.plot(seconds, live, color=INK, linewidth=1.1, label=f"live, {how}: peak {readable_size(peak)}")
    if timeline.budget is not None and timeline.budget <= 3 * peak:
        label = f"budget {readable_size(timeline.budget)}"
        axes.axhline(timeline.budget / size, color=INK, linestyle="--", label=label)
    finish(axes, unit)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize="small", ncols=3)


def _draw_traffic(panels: list[Axes], timeline: TimelineEvent, end: float) -> None:
    """Draw what each drive writes above its line and reads below it, all to one scale."""
    import numpy as np
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    edges = np.linspace(0, end, _BINS + 1)

    def rates(drive: int, *, writes: bool) -> NDArray[np.float64]:
        """Return bytes a second in each bin; the bytes of a call are spread evenly over its time."""
        moved = np.zeros(len(edges))
        for move in timeline.moves:
            if move.drive == drive and move.writes is writes:
                share = (edges - move.began) / max(move.ended - move.began, 1e-6)
                moved += move.nbytes * np.clip(share, 0, 1)
        return np.diff(moved) / (end / _BINS)

    found = [(rates(drive, writes=True), rates(drive, writes=False)) for drive in range(len(panels))]
    largest = max((float(np.max(each)) for both in found for each in both), default=0.0) or 1.0
    unit, size = scale(largest, RATES)
    for axes, drive, (written, read) in zip(panels, timeline.drives, found, strict=True):
        axes.stairs(written / size, edges, fill=True, color=COLOURS[1], label="written")
        axes.stairs(-read / size, edges, fill=True, color=COLOURS[0], label="read")
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set(ylabel=unit, ylim=(-1.15 * largest / size, 1.15 * largest / size))
        axes.yaxis.set_major_locator(MaxNLocator(4, symmetric=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{abs(rate):g}"))
        axes.set_title(drive.label, loc="right", fontsize="small")
    if panels:
        panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize="small", ncols=2)


def _draw_lanes(axes: Axes, timeline: TimelineEvent, end: float) -> None:
    """Draw a row for each phase and one for waits; neighbours differ, and wide runs have their number."""
    for row, runs in enumerate((timeline.forwards(), timeline.backwards())):
        for scope, began, ended in runs:
            colour, ink = (COLOURS[0], "white") if scope.layer % 2 else (COLOURS[5], INK)
            axes.broken_barh([(began, ended - began)], (row - 0.4, 0.8), color=colour)
            if ended - began > 0.03 * end:
                axes.text((began + ended) / 2, row, str(scope.layer), ha="center", va="center", color=ink)
    for row, spans, colour in ((2, timeline.updates, COLOURS[2]), (3, timeline.stalls, COLOURS[1])):
        widths = [(since, max(until - since, 0.0)) for since, until in spans]
        axes.broken_barh(widths, (row - 0.4, 0.8), color=colour)
    axes.set(yticks=range(4), yticklabels=("forward", "backward", "update", "waits"), ylim=(3.6, -0.6))
    axes.grid(visible=False)


# The trace, in the trace event format of Perfetto and Chrome


_COUNTED = ("live", "in_flight", "read_ahead", "settled", "left")


def trace_of(timeline: TimelineEvent) -> dict[str, Any]:
    """Return the step as a trace: rows of layers, updates, waits and I/O threads, and counters of memory."""
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for row, name, began, ended, told in _slices(timeline):
        place = {"pid": 1, "tid": rows.setdefault(row, len(rows) + 1), "name": name}
        events.append(place | {"ph": "X", "ts": _us(began), "dur": _us(ended - began), "args": told})
    for point in timeline.points:
        memory = {name: getattr(point, name) for name in _COUNTED}
        place = {"ph": "C", "pid": 1, "tid": 0, "name": "memory (bytes)"}
        events.append(place | {"ts": _us(point.seconds), "args": memory})
    names = [("process_name", 0, f"tba-offload, step {timeline.step}")]
    names += [("thread_name", row, name) for name, row in rows.items()]
    described = [
        {"ph": "M", "pid": 1, "tid": row, "name": what, "args": {"name": name}} for what, row, name in names
    ]
    return {"traceEvents": [*described, *events], "displayTimeUnit": "ms"}


def _slices(timeline: TimelineEvent) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
    """Yield row, name, begin, end and arguments of everything that took time."""
    yield "step", f"step {timeline.step}", 0.0, timeline.seconds, {}
    for since, until in timeline.updates:
        yield "step", "update", since, until, {}
    for what, runs in (("forward", timeline.forwards()), ("backward", timeline.backwards())):
        for scope, began, ended in runs:
            told = {"layer": scope.layer, "micro_batch": scope.micro_batch}
            yield "layers", f"{what} {timeline.names[scope.layer]}", began, ended, told
    for since, until in timeline.stalls:
        yield "waits for I/O", "wait", since, until, {}
    for move in timeline.moves:
        verb, drive = "write" if move.writes else "read", timeline.drives[move.drive]
        row = f"{drive.label} ({drive.place}): {verb}, thread {move.thread}"
        yield row, verb, move.began, move.ended, {"bytes": move.nbytes, "drive": drive.place}


def _us(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e6, 3)
