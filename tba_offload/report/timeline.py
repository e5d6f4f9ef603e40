"""Timeline of a step, as a picture or as a trace for Perfetto and Chrome."""

from __future__ import annotations

import json
import math
import textwrap
from bisect import bisect
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.errors import RunLogError
from tba_offload.formatting import BYTES, RATES, readable_size, scale, visible
from tba_offload.report.log import TIMELINE, Bytes, Event, Seconds
from tba_offload.report.rok import COLOURS, GREY, INK, WIDTH, finish, picture_kind, write_picture

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from tba_offload.report.log import RunLog

TRACE = "json"
"""File suffix of a trace."""


class ScopeTimes(NamedTuple):
    """Times of one run of a layer, in seconds since the start of the step."""

    layer: int
    micro_batch: int
    forward_began: Seconds
    forward_ended: Seconds | None
    backward_began: Seconds | None


class Moment(NamedTuple):
    """Memory at one time of a step, in bytes without gradients.

    Attributes:
        seconds: Seconds since the start of the step.
        live: All live bytes, without gradients.
        in_flight: Activations in flight, including prefetched activations.
        read_ahead: Prefetched activations.
        settled: Activations that backward is using, and activations whose write failed.
        left: Activations that layers keep in memory.
    """

    seconds: Seconds
    live: Bytes
    in_flight: Bytes
    read_ahead: Bytes
    settled: Bytes
    left: Bytes


class Move(NamedTuple):
    """One read or write of an I/O thread. Times are in seconds since the start of the step.

    Attributes:
        drive: Index of the drive in ``TimelineEvent.drives``.
        writes: True for a write, False for a read.
        began: Start time of the read or write.
        ended: End time of the read or write.
        nbytes: Number of bytes that were written or read.
        thread: Number of the I/O thread.
    """

    drive: int
    writes: bool
    began: Seconds
    ended: Seconds
    nbytes: Bytes
    thread: int


class Drive(NamedTuple):
    """A drive or host memory, with one kind of data.

    Attributes:
        number: Number of the directory in the policy.
        place: Path of the directory, or ``host memory``.
        moves: Kind of data: ``optimizer states``, ``frozen weights``, or empty for activations.
    """

    number: int
    place: str
    moves: str = ""

    @property
    def label(self) -> str:
        """Name of the drive in pictures, without the directory."""
        label = self.place if self.place == "host memory" else f"drive {self.number}"
        return f"{label}, {self.moves}" if self.moves else label


class TimelineEvent(Event):
    """Timeline of a step, by the host's clock. Times are in seconds since the start of the step.

    Attributes:
        step: Number of the step.
        source: Method that measured live bytes.
        names: Module names of the attached layers.
        scopes: Runs of layers, in the order of their forward.
        backward_ends: End times of backward passes.
        stalls: Start and end of each wait of the training thread for I/O.
        points: Memory at several times. The tuple is empty if memory was not measured.
        updates: Start and end of each optimizer step.
        budget: Activation budget in bytes; None for no limit.
        drives: Drives and host memory, with a separate entry for each kind of data.
        moves: All reads and writes, ordered by start time.
        title: Text with the model and the machine, from the header of the log.
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
    title: str = ""

    @property
    def seconds(self) -> float:
        """Time of the last event of the step."""
        ends = [until for _, until in (*self.stalls, *self.updates)] + self.backward_ends
        ends += [point.seconds for point in self.points[-1:]] + [move.ended for move in self.moves]
        ends += [scope.forward_ended or scope.forward_began for scope in self.scopes]
        return max(ends, default=0.0)

    def forwards(self) -> list[tuple[ScopeTimes, float, float]]:
        """Return each run of a layer, with the start and end of its forward."""
        ends = [(scope, scope.forward_ended) for scope in self.scopes]
        return [(scope, scope.forward_began, end) for scope, end in ends if end is not None]

    def backwards(self) -> list[tuple[ScopeTimes, float, float]]:
        """Return each run of a layer, with the start and end of its backward.

        A backward ends when the next layer run starts, or at the end of the backward pass.
        """
        reached = [(scope, scope.backward_began) for scope in self.scopes if scope.backward_began is not None]
        begins = sorted(began for _, began in reached)
        forwards = [scope.forward_began for scope in self.scopes]
        edges = sorted([*begins, *self.backward_ends, *forwards, self.seconds])
        return [(scope, began, edges[min(bisect(edges, began), len(edges) - 1)]) for scope, began in reached]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a picture (``.svg``, ``.png``) or a trace (``.json``).

        Args:
            path: Path of the file to write. The suffix of ``path`` selects picture or trace.

        Raises:
            ConfigError: The suffix of ``path`` is not ``.svg``, ``.png`` or ``.json``.
            MissingDependencyError: ``path`` names a picture, and matplotlib is not installed.
            OSError: The file cannot be written.
        """
        if picture_kind(path, TRACE) == TRACE:
            Path(path).write_text(json.dumps(trace_of(self)))
        else:
            write_picture(path, lambda: timeline_figure(self))


def timeline_of(log: RunLog, step: int | None = None) -> TimelineEvent:
    """Return the timeline of a step.

    Args:
        log: The run log.
        step: Number of the step. By default, the last step with a timeline.

    Raises:
        RunLogError: The run log has no timeline of the step.
    """
    found = log.events(TimelineEvent)
    chosen = [each for each in found if step in (None, each.step)]
    if not chosen:
        known = ", ".join(str(each.step) for each in found) or "none"
        raise RunLogError(
            f"{log.path}: the run log has no timeline of this step. Steps with a timeline: {known}. Choose "
            "one of these steps, or record a step with session.step(trace=True)"
        )
    return chosen[-1].model_copy(update={"title": log.header.title})


# The picture

_CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "x-small"}
_BINS, _MOST_POINTS = 120, 400
"""Number of time bins for traffic, and largest number of points in a curve."""

_PARTS: dict[str, tuple[str, Callable[[Moment], int]]] = {
    "being written": (COLOURS[1], lambda point: max(point.in_flight - point.read_ahead, 0)),
    "prefetched": (COLOURS[2], lambda point: point.read_ahead),
    "in use by backward, or not written": (COLOURS[4], lambda point: point.settled),
    "kept by layers": (COLOURS[3], lambda point: point.left),
}
"""Parts of live bytes that the timeline draws, with their colours, from bottom to top of the stack."""


def ends_of(timeline: TimelineEvent) -> tuple[float, ...]:
    """Return the upper limits of the axes of a timeline: seconds, bytes of memory, and bytes per second."""
    peak, budget = max((point.live for point in timeline.points), default=1), timeline.budget or 0
    rates = [float(rate.max()) for both in _rates(timeline) for rate in both]
    memory = budget if peak < budget <= 3 * peak else peak
    return timeline.seconds or 1.0, memory, max(rates, default=0.0) or 1.0


def _rates(timeline: TimelineEvent) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the written and the read bytes per second of each drive in each time bin."""
    import numpy as np

    edges = np.linspace(0, timeline.seconds or 1.0, _BINS + 1)
    moved = np.zeros((len(timeline.drives), 2, len(edges)))
    for move in timeline.moves:
        share = (edges - move.began) / max(move.ended - move.began, 1e-6)
        moved[move.drive, 0 if move.writes else 1] += move.nbytes * np.clip(share, 0, 1)
    return [(written, read) for written, read in np.diff(moved) / edges[1]]


def timeline_figure(timeline: TimelineEvent, ends: Sequence[float] = ()) -> Figure:
    """Return a figure of memory, traffic of each drive, layers and stalls in a step.

    Call this function inside :func:`tba_offload.report.rok.drawing`.

    Args:
        timeline: The step.
        ends: Upper limits of the axes from :func:`ends_of`. By default, the limits for ``timeline``.
    """
    from matplotlib.figure import Figure

    seconds, largest, rate = ends or ends_of(timeline)
    heights = [2.4, *[1.0] * len(timeline.drives), 1.3]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.2), layout="constrained")
    figure.suptitle(textwrap.fill(visible(timeline.title), 88), x=0.01, ha="left", fontsize="small")
    memory, *traffic, lanes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes in (memory, *traffic):
        for _, began, ended in timeline.backwards():
            axes.axvspan(began, ended, color="#f0f0f0", linewidth=0, zorder=0)
    memory.set_title("" if timeline.points else "memory was not measured")
    if timeline.points:
        _draw_memory(memory, timeline, largest)
    _draw_traffic(traffic, timeline, rate)
    _draw_lanes(lanes, timeline, seconds)
    lanes.set_xlim(0, seconds)
    lanes.set_xlabel(f"seconds since step {timeline.step} began (shaded: backward)")
    return figure


def _draw_memory(axes: Axes, timeline: TimelineEvent, largest: float) -> None:
    """Draw the known parts of live bytes as a stack, all other memory on top, and the budget."""
    each = math.ceil(len(timeline.points) / _MOST_POINTS)
    groups = [timeline.points[first : first + each] for first in range(0, len(timeline.points), each)]
    points = [max(group, key=lambda point: point.live) for group in groups]
    peak = max(point.live for point in points)
    unit, size = scale(largest, BYTES)
    seconds, live = [point.seconds for point in points], [point.live / size for point in points]
    parts = {name: [part(point) / size for point in points] for name, (_, part) in _PARTS.items()}
    known = [sum(column) for column in zip(*parts.values(), strict=True)]
    parts["working memory"] = [max(whole - part, 0) for whole, part in zip(live, known, strict=True)]
    colours = [*(colour for colour, _ in _PARTS.values()), GREY]
    axes.stackplot(seconds, *parts.values(), labels=list(parts), colors=colours, alpha=0.75, linewidth=0)
    axes.plot(seconds, live, color=INK, linewidth=1.1, label=f"activation peak {readable_size(peak)}")
    if timeline.budget is not None and timeline.budget <= largest:
        label = f"budget {readable_size(timeline.budget)}"
        axes.axhline(timeline.budget / size, color=INK, linestyle="--", label=label)
    finish(axes, f"activations ({unit})")
    axes.set_ylim(0, 1.1 * largest / size)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize="small", ncols=2)


def _draw_traffic(panels: list[Axes], timeline: TimelineEvent, largest: float) -> None:
    """Draw writes of each drive above zero and reads below zero, with one scale for all drives."""
    import numpy as np
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    edges = np.linspace(0, timeline.seconds or 1.0, _BINS + 1)
    unit, size = scale(largest, RATES)
    for axes, drive, (written, read) in zip(panels, timeline.drives, _rates(timeline), strict=True):
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
    """Draw a row for each phase and a row for stalls. Wide bars show the number of the layer."""
    for row, runs in enumerate((timeline.forwards(), timeline.backwards())):
        for scope, began, ended in runs:
            colour, ink = (COLOURS[0], "white") if scope.layer % 2 else (COLOURS[5], INK)
            axes.broken_barh([(began, ended - began)], (row - 0.4, 0.8), color=colour)
            if ended - began > 0.035 * end:
                axes.text((began + ended) / 2, row, str(scope.layer), color=ink, **_CENTRED)
    for row, spans, colour in ((2, timeline.updates, COLOURS[2]), (3, timeline.stalls, COLOURS[1])):
        widths = [(since, max(until - since, 0.0)) for since, until in spans]
        axes.broken_barh(widths, (row - 0.4, 0.8), color=colour)
    axes.set(yticks=range(4), yticklabels=("forward", "backward", "update", "stall"), ylim=(3.6, -0.6))
    axes.grid(visible=False)


# The trace, in the trace event format of Perfetto and Chrome


def trace_of(timeline: TimelineEvent) -> dict[str, Any]:
    """Return the timeline as a trace with rows of layers, updates, stalls and I/O, and memory counters."""
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for row, name, began, ended, told in _slices(timeline):
        place = {"pid": 1, "tid": rows.setdefault(row, len(rows) + 1), "name": name}
        events.append(place | {"ph": "X", "ts": _us(began), "dur": _us(ended - began), "args": told})
    for point in timeline.points:
        memory = {name: nbytes for name, nbytes in point._asdict().items() if name != "seconds"}
        place = {"ph": "C", "pid": 1, "tid": 0, "name": "memory (bytes)"}
        events.append(place | {"ts": _us(point.seconds), "args": memory})
    names = [("process_name", 0, f"tba-offload, step {timeline.step}")]
    names += [("thread_name", row, name) for name, row in rows.items()]
    described = [
        {"ph": "M", "pid": 1, "tid": row, "name": what, "args": {"name": name}} for what, row, name in names
    ]
    return {"traceEvents": [*described, *events], "displayTimeUnit": "ms"}


def _slices(timeline: TimelineEvent) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
    """Yield the row, name, start, end and arguments of each slice in the trace."""
    yield "step", f"step {timeline.step}", 0.0, timeline.seconds, {}
    for since, until in timeline.updates:
        yield "step", "update", since, until, {}
    for what, runs in (("forward", timeline.forwards()), ("backward", timeline.backwards())):
        for scope, began, ended in runs:
            told = {"layer": scope.layer, "micro_batch": scope.micro_batch}
            yield "layers", f"{what} {timeline.names[scope.layer]}", began, ended, told
    for since, until in timeline.stalls:
        yield "stalls", "stall", since, until, {}
    for move in timeline.moves:
        verb, drive = "write" if move.writes else "read", timeline.drives[move.drive]
        row = f"{drive.label} ({drive.place}): {verb}, thread {move.thread}"
        yield row, verb, move.began, move.ended, {"bytes": move.nbytes, "drive": drive.place}


def _us(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e6, 3)
