"""One step as a picture: memory, traffic, and what ran. Imports matplotlib: import it only to draw."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tba_offload.formatting import byte_scale
from tba_offload.report.charts import COLOURS, PAPER, chart_style, page_svg

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes

    from tba_offload.report.timeline_event import Moment, ScopeTimes, TimelineEvent

_SIZE = (7.6, 5.2)
"""Inches of the picture."""

_BINS = 80
"""Bins of traffic: each as wide as some layers of a deep model take."""

_LEAST_LABEL = 0.03
"""Share of the step that a run of a layer takes at least to have its number written on it."""

_LANES = ("forward", "backward", "waits")


def timeline_svg(timeline: TimelineEvent, *, salt: str) -> str:
    """The picture, to be put into a page.

    Args:
        timeline: The step.
        salt: Makes names in the picture unique on the page.
    """
    with chart_style(salt):
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        memory, traffic, lanes = figure.subplots(3, 1, sharex=True, height_ratios=(5, 3, 2.4))
        _draw_memory(memory, timeline)
        _draw_traffic(traffic, timeline)
        _draw_lanes(lanes, timeline)
        lanes.set_xlim(0, timeline.seconds or 1.0)
        lanes.set_xlabel("seconds since the step began")
        for axes in (memory, traffic):
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small", borderaxespad=0.2)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.grid(visible=False, axis="x")
        return page_svg(figure, f"Memory, traffic and layers over step {timeline.step}")


def _draw_memory(axes: Axes, timeline: TimelineEvent) -> None:
    points = timeline.points
    largest = max(max(point.live, point.in_flight) for point in points)
    unit, size = byte_scale(largest)
    seconds = [point.seconds for point in points]
    axes.fill_between(seconds, [p.live / size for p in points], color=COLOURS[0], alpha=0.25, linewidth=0)
    axes.plot(seconds, [p.live / size for p in points], color=COLOURS[0], label="live, measured")
    axes.plot(seconds, [p.in_flight / size for p in points], "--", color=COLOURS[1], label="in flight")
    axes.plot(seconds, [p.read_ahead / size for p in points], ":", color=COLOURS[2], label="read ahead")
    axes.set_ylim(0, 1.08 * largest / size or 1.0)
    axes.set_ylabel(unit)


def _draw_traffic(axes: Axes, timeline: TimelineEvent) -> None:
    width = (timeline.seconds or 1.0) / _BINS
    written = _rates(timeline.points, [point.written for point in timeline.points], width)
    read = _rates(timeline.points, [point.read for point in timeline.points], width)
    edges = [width * number for number in range(_BINS + 1)]
    for values, colour, line, label in ((written, 1, "-", "written"), (read, 0, "--", "read")):
        axes.stairs([v / 1e6 for v in values], edges, color=COLOURS[colour], linestyle=line, label=label)
    axes.set_ylim(0, 1.08 * max(*written, *read) / 1e6 or 1.0)
    axes.set_ylabel("MB/s")


def _rates(points: Sequence[Moment], sums: Sequence[int], width: float) -> list[float]:
    """Bytes a second in each bin: what was moved between two moments is spread evenly between them."""
    rates = [0.0] * _BINS
    moved = [((a.seconds, b.seconds), after - before) for (a, b), (before, after) in _steps(points, sums)]
    for (since, until), nbytes in moved:
        first, last = (min(int(at / width), _BINS - 1) for at in (since, until))
        for number in range(first, last + 1):
            overlap = min(until, (number + 1) * width) - max(since, number * width)
            share = overlap / (until - since) if until > since else 1.0 / (last - first + 1)
            rates[number] += nbytes * max(share, 0.0) / width
    return rates


def _steps(
    points: Sequence[Moment], sums: Sequence[int]
) -> Iterable[tuple[tuple[Moment, Moment], tuple[int, int]]]:
    both = zip(pairwise(points), pairwise(sums), strict=True)
    return ((ab, pair) for ab, pair in both if pair[1] > pair[0])


def _draw_lanes(axes: Axes, timeline: TimelineEvent) -> None:
    """One row for forward, one for backward, one for waits; neighbours differ, wide ones have numbers."""
    _draw_runs(axes, 0, timeline.forwards(), timeline.seconds)
    _draw_runs(axes, 1, timeline.backwards(), timeline.seconds)
    waits = [(since, max(until - since, 0.0)) for since, until in timeline.stalls]
    axes.broken_barh(waits, (1.6, 0.8), facecolor=COLOURS[3])
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_ylim(len(_LANES) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)


def _draw_runs(axes: Axes, row: int, runs: Sequence[tuple[ScopeTimes, float, float]], seconds: float) -> None:
    for scope, began, ended in runs:
        look: dict[str, Any] = {"facecolor": COLOURS[0 if scope.layer % 2 else 5], "edgecolor": PAPER}
        axes.broken_barh([(began, ended - began)], (row - 0.4, 0.8), linewidth=0.4, **look)
        if ended - began > _LEAST_LABEL * seconds:
            text = {"ha": "center", "va": "center", "fontsize": 8, "color": PAPER}
            axes.text((began + ended) / 2, row, str(scope.layer), **text)  # type: ignore[arg-type]
