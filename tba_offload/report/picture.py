"""The ROK curve as a picture. Imports matplotlib, so import this module only to draw.

Figures are made without pyplot: no window, no global figure, and the user's own style stays out of it.
"""

from __future__ import annotations

import io
import textwrap
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from tba_offload.formatting import byte_scale, readable_size, visible
from tba_offload.report.points import lines, pareto, peak_sources, rate_scale

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox
    from numpy.typing import NDArray

    from tba_offload.report.plans import PlanReport
    from tba_offload.report.points import RokPoint

# Okabe and Ito's colours, which colour-blind readers can tell apart; marker and dashes differ as well.
# The plain strategies look the same in every picture.
_Look = tuple[str, str, Literal["-", "--", "-.", ":"]]
_LOOKS: dict[str, _Look] = {
    "keep": ("#0072B2", "o", "-"),
    "offload": ("#D55E00", "s", "-"),
    "recompute": ("#009E73", "^", "-"),
    "recompute-offload": ("#E69F00", "h", "-"),
    "recompute-except-attention": ("#CC79A7", "v", "-"),
    "offload-remat": ("#56B4E9", "d", "-"),
}
_MORE_LOOKS: list[_Look] = [
    ("#CC79A7", "D", "--"),
    ("#56B4E9", "v", "--"),
    ("#000000", "X", "-."),
    ("#0072B2", "<", "-."),
    ("#D55E00", ">", "-."),
    ("#009E73", "p", ":"),
    ("#E69F00", "P", ":"),
]
_INK = "#222222"
_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 13,
    "markerfacecolor": "none",
    "markeredgecolor": _INK,
    "markeredgewidth": 1.1,
}
_Place = Literal["outside upper center", "outside upper left", "outside lower left"]
_BUDGET: dict[str, Any] = {"color": "#CC79A7", "linestyle": "--", "linewidth": 1.4, "zorder": 2}
_TITLE: dict[str, Any] = {
    "title": "The best plan for each budget, as predicted",
    "title_fontsize": 12,
    "alignment": "left",
}
_DIGIT: dict[str, Any] = {"color": _INK, "markersize": 7, "markeredgewidth": 0}
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "tba-offload",
    "text.parse_math": False,  # a strategy may be called "$5/h"
}
_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Creator": "tba-offload", "Date": None, "Title": "ROK curve"},
    "png": {"Software": "tba-offload", "Title": "ROK curve"},
}


def rok_curve(points: Sequence[RokPoint], kind: Literal["svg", "png"], *, title: str = "") -> bytes:
    """Return the picture as the bytes of a file.

    Args:
        points: At least one point; all with the same unit of throughput.
        kind: The format.
        title: A line above the curve.
    """
    file = io.BytesIO()
    with matplotlib.style.context("default"), mpl.rc_context(_STYLE):
        rok_figure(points, title=title).savefig(file, format=kind, dpi=160, metadata=_METADATA[kind])
    return file.getvalue()


def rok_figure(points: Sequence[RokPoint], *, title: str = "") -> Figure:
    """Return the figure itself, see :func:`rok_curve`."""
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize="small")
    curve = _Curve(axes, points)
    curve.describe_axes()
    curve.draw_lines()
    curve.mark_pareto_set()
    curve.add_legend(figure)
    figure.draw_without_rendering()  # settles the layout: from here on labels can be placed by the pixel
    curve.label_batch_sizes()
    return figure


def frontier_curve(report: PlanReport, kind: Literal["svg", "png"]) -> bytes:
    """Return the best plan for each budget as the bytes of a file, see :func:`plans.draw_frontier`."""
    file = io.BytesIO()
    with matplotlib.style.context("default"), mpl.rc_context(_STYLE):
        metadata = _METADATA[kind] | {"Title": "Frontier of plans"}
        frontier_figure(report).savefig(file, format=kind, dpi=160, metadata=metadata)
    return file.getvalue()


def frontier_figure(report: PlanReport) -> Figure:
    """Return the figure itself, see :func:`frontier_curve`."""
    figure = Figure(figsize=(7.5, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    frontier = _Frontier(figure.add_subplot(), report)
    frontier.describe()
    frontier.draw()
    frontier.add_legends(figure)
    figure.draw_without_rendering()  # settles the layout: from here on labels can be placed by the pixel
    frontier.number_points()
    return figure


class _Frontier:
    """Predicted step time over predicted peak, in the units of the axes."""

    def __init__(self, axes: Axes, report: PlanReport) -> None:
        self._axes = axes
        self._report = report
        fitting = {(step.peak_bytes, step.seconds): step for step in report.frontier if step.fits}
        self._steps = [fitting[place] for place in sorted(fitting)]
        self._marks = list(self._marked())
        places = [*fitting, *(place for place, _, _ in self._marks)]
        budget = report.step.budget_bytes
        self._unit, self._size = byte_scale(max([*(peak for peak, _ in places), budget or 0]))
        self._peaks, self._seconds = self._positions(places).T
        if budget is not None:
            self._peaks = np.append(self._peaks, budget / self._size)

    def _marked(self) -> Iterator[tuple[tuple[int, float], str, dict[str, Any]]]:
        """Yield what is marked beside the plans for budgets: peak and seconds, what it is, how it looks."""
        report = self._report
        if report.keep_seconds is not None:
            look = {"marker": "o", "markersize": 8, "color": _LOOKS["keep"][0]}
            yield (report.keep_peak_bytes, report.keep_seconds), "keep everything, predicted", look
        if report.run is not None:
            yield report.run, "this run, measured", {"marker": "X", "markersize": 9, "color": _INK}
        plan = report.step.peak_bytes, report.step.seconds
        yield plan, f"the plan: {report.step.layers}", _RING

    def _positions(self, places: Iterable[tuple[int, float]]) -> NDArray[np.float64]:
        """Position of each pair of bytes and seconds, shape [places, 2]."""
        return np.array([(nbytes / self._size, seconds) for nbytes, seconds in places], dtype=float)

    @property
    def _line(self) -> NDArray[np.float64]:
        return self._positions((step.peak_bytes, step.seconds) for step in self._steps)

    def describe(self) -> None:
        """Say of which model and machine this is, and what the axes show; both begin at zero."""
        if self._report.title:
            lines = textwrap.fill(textwrap.shorten(visible(self._report.title), 300), 100)
            self._axes.set_title(lines, loc="left", fontsize=9, color="#555555")
        self._axes.set_xlim(0, 1.1 * (self._peaks.max() or 1.0))
        self._axes.set_ylim(0, 1.15 * (self._seconds.max() or 1.0))
        self._axes.set_xlabel(f"Activation peak ({self._unit})")
        self._axes.set_ylabel("Step time (s)")

    def draw(self) -> None:
        """Draw the frontier, the budget and the marks."""
        colour, marker, dashes = _LOOKS["offload"]
        x, y = self._line.T
        self._axes.plot(x, y, dashes, color=colour, marker=marker, markersize=5, linewidth=1.8, zorder=3)
        for place, _, look in self._marks:
            x, y = self._positions([place]).T
            self._axes.plot(x, y, linestyle="none", zorder=4, **look)
        if self._report.step.budget_bytes is not None:
            self._axes.axvline(self._report.step.budget_bytes / self._size, **_BUDGET)

    def add_legends(self, figure: Figure) -> None:
        """Say above the axes what the marks are, and below them what the numbers are."""
        entries = [
            Line2D([], [], linestyle="none", label=_visible(label, 60), **look)
            for _, label, look in self._marks
        ]
        if self._report.step.budget_bytes is not None:
            label = f"budget {readable_size(self._report.step.budget_bytes)}"
            entries.append(Line2D([], [], label=label, **_BUDGET))
        _add_fitting_legend(figure, entries, "outside upper left", fontsize=9, **_TITLE)
        numbers = [
            Line2D([], [], linestyle="none", label=f"{number}: {step.layers}")
            for number, step in enumerate(self._steps, 1)
        ]
        _add_fitting_legend(
            figure,
            numbers,
            "outside lower left",
            fontsize=8,
            handlelength=0,
            handletextpad=0,
            columnspacing=1.5,
        )

    def number_points(self) -> None:
        """Write beside each plan its number in the legend."""
        to_pixels = self._axes.transData.transform
        line = to_pixels(self._line)
        markers = np.concatenate(
            [line, *(to_pixels(self._positions([place])) for place, _, _ in self._marks)]
        )
        strokes = [line]
        if self._report.step.budget_bytes is not None:
            budget = self._report.step.budget_bytes / self._size
            strokes.append(to_pixels([(budget, end) for end in self._axes.get_ylim()]))
        labels = _Labels(self._axes, markers, strokes)
        for number, position in enumerate(self._line, 1):
            labels.add(str(number), position, _LOOKS["offload"][0])


def _add_fitting_legend(figure: Figure, entries: Sequence[Line2D], place: _Place, **look: Any) -> None:
    """Add a legend outside of the axes with as many columns as there is room for."""
    for columns in range(len(entries), 0, -1):
        legend = figure.legend(handles=entries, loc=place, ncols=columns, **look)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


class _Curve:
    """Points on axes, in the units of the axes."""

    def __init__(self, axes: Axes, points: Sequence[RokPoint]) -> None:
        self._axes = axes
        self._points = points
        self._lines = lines(points)
        self._looks = _looks(self._lines)
        self._x_name, self._x_size = byte_scale(max(each.peak_bytes for each in points))
        self._y_name, self._y_size = rate_scale(max(each.throughput for each in points), points[0].unit)

    def _positions(self, points: Iterable[RokPoint]) -> NDArray[np.float64]:
        """Position of each point: x and y, shape [points, 2]."""
        return np.array([(each.peak_bytes / self._x_size, each.throughput / self._y_size) for each in points])

    def describe_axes(self) -> None:
        """Say what the axes show, in which unit and measured how."""
        sources = textwrap.shorten(visible(" / ".join(peak_sources(self._points))), 60, placeholder=" …")
        counted = ", recomputation not counted" if self._points[0].unit == "FLOP/s" else ""
        peak = self._points[0].peak_name.capitalize()
        self._axes.set_xlabel(f"{peak} ({self._x_name}), measured by: {sources}")
        self._axes.set_ylabel(f"Model throughput ({self._y_name}{counted})")
        x, y = self._positions(self._points).T
        self._axes.set_xlim(_limits(x))
        self._axes.set_ylim(_limits(y))

    def draw_lines(self) -> None:
        """Draw each strategy through its batch sizes."""
        for strategy, line in self._lines.items():
            colour, marker, dashes = self._looks[strategy]
            x, y = self._positions(line).T
            self._axes.plot(
                x, y, dashes, color=colour, marker=marker, markersize=6.5, linewidth=1.8, zorder=3
            )

    def mark_pareto_set(self) -> None:
        """Ring the Pareto set, and draw the edge of what it reaches."""
        self._axes.plot(*self._edge().T, color="#b8b8b8", linestyle=(0, (2, 2)), linewidth=1.2, zorder=1)
        self._axes.plot(*self._positions(pareto(self._points)).T, linestyle="none", zorder=4, **_RING)

    def _edge(self) -> NDArray[np.float64]:
        """Return the staircase through the Pareto set: the best throughput for each amount of memory."""
        best = self._positions(pareto(self._points))
        corners = np.column_stack([best[1:, 0], best[:-1, 1]])
        return np.concatenate([best[:1], np.stack([corners, best[1:]], axis=1).reshape(-1, 2)])

    def add_legend(self, figure: Figure) -> None:
        """Put the legend above the axes, where it hides nothing."""
        entries = [
            Line2D([], [], linestyle=dashes, color=colour, marker=marker, label=_visible(strategy))
            for strategy, (colour, marker, dashes) in self._looks.items()
        ]
        entries.append(Line2D([], [], linestyle="none", label="Pareto set", **_RING))
        if any(each.batch_size is not None for each in self._points):
            entries.append(Line2D([], [], linestyle="none", marker=_digit(), **_DIGIT, label="batch size"))
        _add_fitting_legend(figure, entries, "outside upper center")

    def label_batch_sizes(self) -> None:
        """Write the batch size beside each point."""
        to_pixels = self._axes.transData.transform
        curves = [to_pixels(self._positions(line)) for line in self._lines.values()]
        labels = _Labels(self._axes, np.concatenate(curves), [*curves, to_pixels(self._edge())])
        for strategy, line in self._lines.items():
            for each, position in zip(line, self._positions(line), strict=True):
                if each.batch_size is not None:
                    labels.add(str(each.batch_size), position, self._looks[strategy][0])


class _Labels:
    """Places labels beside points, each where it covers least of what is there already.

    Args:
        axes: Where the points are; its layout must be settled.
        markers: Where points are drawn, in pixels, shape [points, 2].
        strokes: The corners of each drawn line, in pixels, shape [corners, 2].
    """

    # Direction from the point, and distance in points (1/72 inch) between it and the edge of the label.
    _PLACES = tuple(
        (dx, dy, gap)
        for gap in (8.0, 16.0)
        for dx, dy in ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
    )

    def __init__(
        self, axes: Axes, markers: NDArray[np.float64], strokes: Sequence[NDArray[np.float64]]
    ) -> None:
        self._axes = axes
        self._per_point = axes.figure.dpi / 72
        self._markers = markers
        self._strokes = np.concatenate([_sampled(stroke) for stroke in strokes])
        self._placed: list[Bbox] = []

    def add(self, text: str, position: NDArray[np.float64], colour: str) -> None:
        """Label the point at ``position`` (data coordinates)."""
        x, y = position
        label = self._axes.annotate(
            text,
            (x, y),
            (0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            color=colour,
        )
        label.set_in_layout(False)
        centred = label.get_window_extent()
        offset = min(self._offsets(centred), key=lambda pixels: self._cost(centred.translated(*pixels)))
        label.set_position((offset[0] / self._per_point, offset[1] / self._per_point))
        self._placed.append(centred.translated(*offset))

    def _offsets(self, box: Bbox) -> list[tuple[float, float]]:
        """Where the label could go, in pixels from its point, the best liked first."""
        return [
            (dx * (gap * self._per_point + box.width / 2), dy * (gap * self._per_point + box.height / 2))
            for dx, dy, gap in self._PLACES
        ]

    def _cost(self, box: Bbox) -> float:
        frame = self._axes.bbox
        outside = not (frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1))
        over_labels = sum(box.padded(2).overlaps(other) for other in self._placed)
        over_markers = _inside(box.padded(5 * self._per_point), self._markers)
        over_strokes = _inside(box.padded(2), self._strokes)
        return 1000 * over_labels + 100 * (over_markers + outside) + over_strokes


def _digit() -> Path:
    """Return a digit as a marker, centred on its point."""
    digit = TextPath((0, 0), "8")
    box = digit.get_extents()
    return Path(np.asarray(digit.vertices) - [(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2], digit.codes)


def _inside(box: Bbox, positions: NDArray[np.float64]) -> int:
    x, y = positions.T
    return int(np.count_nonzero((x > box.x0) & (x < box.x1) & (y > box.y0) & (y < box.y1)))


def _sampled(line: NDArray[np.float64]) -> NDArray[np.float64]:
    """Positions every few pixels along a line, shape [samples, 2]."""
    pieces = [line]
    for start, end in pairwise(line):
        count = max(2, int(np.hypot(*(end - start)) / 3))
        pieces.append(np.linspace(start, end, count))
    return np.concatenate(pieces)


_LEAST_SPAN = 1 / 8
"""Length of an axis in its largest value: on a shorter one, points that differ by noise lie far apart."""


def _limits(values: NDArray[np.float64]) -> tuple[float, float]:
    """Limits of an axis: from zero, unless that would squeeze the points together."""
    low, high = float(values.min()), float(values.max()) or 1.0
    if low < high / 2 or low == high:
        return 0.0, high * 1.1
    span = high - low
    margin = max(0.12 * span, (_LEAST_SPAN * high - span) / 2)
    return low - margin, high + margin


def _looks(strategies: Iterable[str]) -> dict[str, _Look]:
    """Return a look for each strategy."""
    more = _more_looks()
    return {strategy: _LOOKS.get(strategy) or next(more) for strategy in strategies}


def _more_looks() -> Iterator[_Look]:
    """Look of other strategies; when no colour is left, each has the marker of the next one, and so on."""
    colours, markers, dashes = zip(*_MORE_LOOKS, strict=True)
    for turn in count():
        turned = markers[turn % len(markers) :] + markers[: turn % len(markers)]
        yield from zip(colours, turned, dashes, strict=True)


def _visible(strategy: str, most: int = 30) -> str:
    """Return the label for the legend.

    Older versions of matplotlib leave out one that starts with an underscore.
    """
    short = textwrap.shorten(visible(strategy), most, placeholder=" …") or "…"
    return f" {short}" if short.startswith("_") else short
