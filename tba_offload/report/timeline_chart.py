"""One step as a picture: memory, traffic of each drive, and what ran.

Imports matplotlib: import it only to draw.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tba_offload.formatting import byte_scale, rate_scale, readable_size
from tba_offload.report.charts import COLOURS, GRID, INK, PAPER, chart_style, page_svg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.axes import Axes

    from tba_offload.report.log import Moment, ScopeTimes, TimelineEvent

_WIDTH, _MEMORY, _DRIVE, _LANE, _REST = 7.6, 2.2, 0.8, 0.3, 1.1
"""Inches: width of the picture; heights of the panel of memory, of a drive, of a lane, and of all else."""

_MOST_DRIVES = 8
"""Drives that have a panel each; those after them share the last one."""

_MOST_POINTS = 400
"""Points of a curve: it is some 600 pixels wide, and each takes a few hundred bytes of the picture."""

_BINS = 120
"""Bins of traffic: each as wide as some layers of a deep model take."""

_LEAST_LABEL = 0.03
"""Share of the step that a run of a layer takes at least to have its number written on it."""

_LEAST_PART = 0.01
"""Share of the peak that a part of live bytes takes at least to be named: smaller ones cannot be seen."""

_FAR = 3.0
"""Budget, in peaks, from which on it is named in words: an axis up to there would hide the step."""

_LANES = ("forward", "backward", "update", "waits")

_PARTS: tuple[tuple[str, int, Callable[[Moment], int]], ...] = (
    ("in flight", 1, lambda point: max(point.in_flight - point.read_ahead, 0)),
    ("read ahead", 2, lambda point: point.read_ahead),
    ("in use, or refused by drives", 4, lambda point: point.settled),
    ("left by layers", 6, lambda point: point.left),
)
"""Parts of live bytes that are known, from below: name, colour and size."""


def timeline_svg(timeline: TimelineEvent, *, salt: str) -> str:
    """Return the picture, to be put into a page.

    Args:
        timeline: The step.
        salt: Makes names in the picture unique on the page.
    """
    panels = _traffic_of(timeline)
    if not any(rate for _, *both in panels for rates in both for rate in rates):
        panels = []  # as of a step that keeps everything
    heights = [_MEMORY, *[_DRIVE if len(panels) > 1 else 1.5 * _DRIVE] * len(panels), _LANE * len(_LANES)]
    with chart_style(salt):
        figure = Figure(figsize=(_WIDTH, sum(heights) + _REST), layout="constrained")
        FigureCanvasSVG(figure)
        memory, *drives, lanes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        unit, length = (1e-3, "milliseconds") if timeline.seconds < 1 else (1.0, "seconds")
        for axes in (memory, *drives):
            _shade_backward(axes, timeline, is_named=axes is memory)
        _draw_memory(memory, timeline)
        _draw_traffic(drives, panels, timeline.seconds or 1.0)
        _draw_lanes(lanes, timeline)
        lanes.set_xlim(0, timeline.seconds or 1.0)
        lanes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / unit:g}"))
        lanes.set_xlabel(f"{length} since the step began")
        return page_svg(figure, f"Memory, traffic and layers over step {timeline.step}")


def _shade_backward(axes: Axes, timeline: TimelineEvent, *, is_named: bool) -> None:
    axes.grid(visible=False, axis="x")
    label = "backward" if is_named else None
    for phase in timeline.phases():
        if phase.name == "backward":
            look: dict[str, Any] = {"color": GRID, "alpha": 0.35, "linewidth": 0, "zorder": 0}
            axes.axvspan(phase.began, phase.ended, label=label, **look)
            label = None


# Memory


def _draw_memory(axes: Axes, timeline: TimelineEvent) -> None:
    if not timeline.points:
        axes.text(0.5, 0.5, "memory was not measured", ha="center", transform=axes.transAxes)
        axes.set_yticks([])
        axes.grid(visible=False)
        return
    points = _with_gaps(timeline)
    top = max(timeline.points, key=lambda point: point.live)
    has_line = timeline.budget is not None and timeline.budget <= _FAR * top.live
    highest = max(top.live, timeline.budget or 0) if has_line else top.live
    unit, size = byte_scale(highest)
    _draw_parts(axes, points, size)
    live = [math.nan if point is None else point.live / size for _, point in points]
    axes.plot([at for at, _ in points], live, color=INK, linewidth=1.1, label=_how(timeline))
    axes.set_ylim(0, 1.22 * highest / size or 1.0)
    axes.set_ylabel(unit)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    _name_peak(axes, top, timeline.seconds, size)
    if timeline.budget is not None:
        _draw_budget(
            axes, timeline.budget, size, is_left=2 * top.seconds > timeline.seconds, has_line=has_line
        )
    axes.legend(**_legend(), ncols=3)


def _how(timeline: TimelineEvent) -> str:
    """How live bytes were found: between two samples a short peak may be missed."""
    return "live, sampled" if "sampled" in timeline.source else "live, measured"


def _draw_parts(axes: Axes, points: Sequence[tuple[float, Moment | None]], size: float) -> None:
    """Stacks what is known of live bytes, and the rest of them on top."""
    seconds = [at for at, _ in points]
    live = [0.0 if point is None else point.live / size for _, point in points]
    below, least = [0.0] * len(points), _LEAST_PART * max(live)
    for name, colour, part in _PARTS:
        parts = [0.0 if point is None else part(point) / size for _, point in points]
        # What a layer has left is given back bit by bit, and counts until backward is done with the layer.
        above = [min(b + p, most) for b, p, most in zip(below, parts, live, strict=True)]
        label = name if max(a - b for a, b in zip(above, below, strict=True)) > least else None
        _fill(axes, seconds, points, below, above, color=COLOURS[colour], alpha=0.75, label=label)
        below = above
    _fill(axes, seconds, points, below, live, color=COLOURS[7], alpha=0.3, label="all else")


def _fill(
    axes: Axes,
    seconds: Sequence[float],
    points: Sequence[tuple[float, Moment | None]],
    below: Sequence[float],
    above: Sequence[float],
    **look: Any,
) -> None:
    is_known = [point is not None for _, point in points]
    axes.fill_between(seconds, below, above, where=is_known, linewidth=0, **look)


def _with_gaps(timeline: TimelineEvent) -> list[tuple[float, Moment | None]]:
    """Return the moments, and between them ``None`` where optimizers worked and memory was not measured."""
    shown = _thinned(timeline.points)
    found: list[tuple[float, Moment | None]] = [(point.seconds, point) for point in shown]
    first, last = timeline.points[0].seconds, timeline.points[-1].seconds
    for since, until in timeline.updates:
        if first < since < last and not any(since < point.seconds <= until for point in timeline.points):
            found.append((since, None))
    return sorted(found, key=lambda each: each[0])


def _thinned(points: Sequence[Moment]) -> list[Moment]:
    """Return the points; where they are too many, of each few the one with the most live bytes."""
    each = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[first : first + each] for first in range(0, len(points), each)]
    return [max(group, key=lambda point: point.live) for group in groups]


def _name_peak(axes: Axes, top: Moment, seconds: float, size: float) -> None:
    place = top.seconds / (seconds or 1.0)
    side = "left" if place < 0.15 else "right" if place > 0.85 else "center"
    look: dict[str, Any] = {"ha": side, "fontsize": "small", "zorder": 4}
    ground = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.7, "pad": 0.5}  # the budget may lie there
    where: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "bbox": ground}
    axes.annotate(f"peak {readable_size(top.live)}", (top.seconds, top.live / size), **look, **where)


def _draw_budget(axes: Axes, budget: int, size: float, *, is_left: bool, has_line: bool) -> None:
    """Record that the budget as a line, named at the side where the peak is not."""
    at, side = (0.01, "left") if is_left else (0.99, "right")
    text: dict[str, Any] = {"ha": side, "fontsize": "small", "color": COLOURS[3]}
    if not has_line:
        axes.text(at, 0.9, f"budget {readable_size(budget)}, above", transform=axes.transAxes, **text)
        return
    axes.axhline(budget / size, color=COLOURS[3], linestyle="--", linewidth=1.3)
    place = axes.get_yaxis_transform()
    axes.text(at, budget / size, f"budget {readable_size(budget)}", va="bottom", transform=place, **text)


# Traffic

_Panel = tuple[str, list[float], list[float]]
"""Name of a drive, and the bytes a second that it writes and reads in each bin."""


def _traffic_of(timeline: TimelineEvent) -> list[_Panel]:
    width = (timeline.seconds or 1.0) / _BINS
    if not timeline.moves:
        points = timeline.points
        written = _spread(_steps(points, [point.written for point in points]), width)
        return [("all drives", written, _spread(_steps(points, [point.read for point in points]), width))]
    panels: list[_Panel] = []
    for drive in range(len(timeline.drives)):
        moves: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
        for move in timeline.moves:
            if move.drive == drive:
                moves[move.writes].append((move.began, move.ended, move.nbytes))
        label = timeline.label_of(drive)
        panels.append((label, _spread(moves[True], width), _spread(moves[False], width)))
    if len(panels) > _MOST_DRIVES:
        rest = panels[_MOST_DRIVES - 1 :]
        written = [sum(of) for of in zip(*(panel[1] for panel in rest), strict=True)]
        read = [sum(of) for of in zip(*(panel[2] for panel in rest), strict=True)]
        panels[_MOST_DRIVES - 1 :] = [(f"{len(rest)} others", written, read)]
    return panels


def _draw_traffic(drives: Sequence[Axes], panels: Sequence[_Panel], seconds: float) -> None:
    """Record that what each drive writes above its line and reads below it, all to one scale."""
    width = seconds / _BINS
    edges = [width * number for number in range(_BINS + 1)]
    largest = max((rate for _, *both in panels for rates in both for rate in rates), default=0.0)
    unit, size = rate_scale(largest)
    for axes, (label, written, read) in zip(drives, panels, strict=True):
        up: dict[str, Any] = {"color": COLOURS[1], "alpha": 0.85, "fill": True, "label": "written"}
        down: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.85, "fill": True, "label": "read"}
        axes.stairs([rate / size for rate in written], edges, **up)
        axes.stairs([-rate / size for rate in read], edges, **down)
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_ylim(-1.15 * largest / size or -1.0, 1.15 * largest / size or 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(2 if len(panels) > 1 else 4, symmetric=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{abs(rate):g}"))
        axes.set_ylabel(unit)
        axes.text(1.0, 1.02, label, ha="right", va="bottom", fontsize="small", transform=axes.transAxes)
    if panels:
        drives[0].legend(**_legend(), ncols=2)


def _spread(moves: Iterable[tuple[float, float, int]], width: float) -> list[float]:
    """Bytes a second in each bin: what was moved from one moment to another is spread evenly between them."""
    rates = [0.0] * _BINS
    for since, until, nbytes in moves:
        first, last = (min(int(at / width), _BINS - 1) for at in (since, until))
        for number in range(first, last + 1):
            overlap = min(until, (number + 1) * width) - max(since, number * width)
            share = overlap / (until - since) if until > since else 1.0 / (last - first + 1)
            rates[number] += nbytes * max(share, 0.0) / width
    return rates


def _steps(points: Sequence[Moment], sums: Sequence[int]) -> list[tuple[float, float, int]]:
    both = zip(pairwise(points), pairwise(sums), strict=True)
    return [(a.seconds, b.seconds, after - before) for (a, b), (before, after) in both if after > before]


# What ran


def _draw_lanes(axes: Axes, timeline: TimelineEvent) -> None:
    """One row for each phase, one for waits; neighbours differ, wide ones have numbers."""
    _draw_runs(axes, 0, timeline.forwards(), timeline.seconds)
    _draw_runs(axes, 1, timeline.backwards(), timeline.seconds)
    for row, spans, colour in ((2, timeline.updates, 2), (3, timeline.stalls, 3)):
        wide = [(since, max(until - since, 0.0)) for since, until in spans]
        axes.broken_barh(wide, (row - 0.4, 0.8), color=COLOURS[colour], linewidth=0.5)
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


def _legend() -> dict[str, Any]:
    return {"loc": "lower left", "bbox_to_anchor": (0, 1), "fontsize": "small", "borderaxespad": 0.2}
