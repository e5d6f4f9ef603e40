"""Charts of a run for its page, as SVG that takes colours from the page's style. Imports matplotlib.

No name of a log is drawn: labels are words of this file and numbers. Text stays text, so that it can be read
aloud and searched for. Sizes are those of a phone; a wide screen shows charts side by side.
"""

from __future__ import annotations

import contextlib
import html
import io
import math
import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.style
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tba_offload.formatting import byte_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from matplotlib.axes import Axes

INK, GRID, PAPER = "#0a0b01", "#0a0b02", "#0a0b03"
COLOURS = tuple(f"#0a0b1{number:x}" for number in range(8))
"""Colours that nothing else has: in the picture each becomes a variable of the page's style."""

_PLAIN = {INK: "#1c1e21", GRID: "#d9dce0", PAPER: "#ffffff"} | dict(
    zip(
        COLOURS,
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#3b9fd6", "#7a5195", "#6b7178"),
        strict=True,
    )
)
"""Colours in their place in a picture without a page."""

_VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)", PAPER: "var(--paper)"} | {
    colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)
}

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 11,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}

_SIZE = (4.9, 3.1)
"""Inches of a chart; on a phone some 0.7 of it, where text of 11 points can still be read."""

MOST_POINTS = 400
"""Points of a line: more than that many steps are drawn in bins."""

_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


@dataclass(frozen=True, slots=True)
class Series:
    """A line over steps.

    Attributes:
        name: What the legend calls it.
        values: One for each step; ``None`` where it is not known.
        colour: Number of its colour.
        line: Number of its way of being drawn, so that colours need not be told apart.
    """

    name: str
    values: Sequence[float | None]
    colour: int
    line: int = 0

    @property
    def is_drawn(self) -> bool:
        """Whether any value is known and not zero."""
        return any(self.values)


def over_steps(
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    salt: str,
    label: str,
    unit: str | None = None,
    of_bin: Callable[[list[float]], float] = max,
    from_zero: bool = True,
) -> str:
    """Lines over steps, as SVG; steps that are missing leave a gap.

    Args:
        steps: Number of each step.
        series: The lines.
        salt: Makes names in the picture unique on the page.
        label: What the picture shows, for those who cannot see it.
        unit: Unit of the values; ``None`` for bytes, in whatever multiple of them fits.
        of_bin: What a bin of several steps shows.
        from_zero: Whether the axis of values begins at zero.
    """
    known = [each for each in series if each.is_drawn]
    largest = max((value for each in known for value in each.values if value is not None), default=0)
    name, size = byte_scale(largest) if unit is None else (unit, 1.0)
    with chart_style(salt):
        figure, axes = _figure()
        for each in known:
            x, y = _points(steps, [None if v is None else v / size for v in each.values], of_bin)
            has_marks = len(x) < 3 * len(_LINES) or _stands_alone(y)
            alone: dict[str, Any] = {"marker": "o", "markersize": 4} if has_marks else {}
            line: dict[str, Any] = {
                "color": COLOURS[each.colour],
                "linestyle": _LINES[each.line],
                "linewidth": 1.8,
            }
            axes.plot(x, y, label=each.name, **line, **alone)
        _finish(axes, steps, name)
        if from_zero:
            axes.set_ylim(0, 1.08 * largest / size or 1.0)
        if known:
            figure.legend(loc="outside upper left", ncols=2, handlelength=2.2, columnspacing=1.2)
        return page_svg(figure, label)


def _stands_alone(values: Sequence[float]) -> bool:
    """Whether a value has none beside it, as where every fourth step is measured: no line would show it."""
    known = [False, *(not math.isnan(value) for value in values), False]
    return any(
        here and not (before or after)
        for before, here, after in zip(known, known[1:], known[2:], strict=False)
    )


def _finish(axes: Axes, steps: Sequence[int], unit: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    first, last = (min(steps), max(steps)) if steps else (0, 1)
    margin = 0.02 * (last - first) or 0.5  # marks are wider than a point
    axes.set_xlim(first - margin, last + margin)
    axes.grid(visible=False, axis="x")


def _points(
    steps: Sequence[int], values: Sequence[float | None], of_bin: Callable[[list[float]], float]
) -> tuple[list[float], list[float]]:
    """Positions of a line; NaN breaks it."""
    width = math.ceil(len(steps) / MOST_POINTS) or 1
    x: list[float] = []
    y: list[float] = []
    for first in range(0, len(steps), width):
        if x and steps[first] - steps[first - 1] > 1:
            x.append(x[-1])
            y.append(math.nan)
        known = [value for value in values[first : first + width] if value is not None]
        x.append(statistics.fmean(steps[first : first + width]))
        y.append(of_bin(known) if known else math.nan)
    return x, y


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar that is made of parts.

    Attributes:
        name: What it is of.
        parts: Size of each part, as many as there are names of parts.
    """

    name: str
    parts: Sequence[float]


def stacked(stacks: Sequence[Stack], parts: Mapping[str, int], *, salt: str, label: str) -> str:
    """Bars of bytes, one below the other, each of parts, as SVG.

    Args:
        stacks: The bars.
        parts: Names of the parts, and the number of the look of each, so that it is the same in all charts.
        salt: Makes names in the picture unique on the page.
        label: What the picture shows, for those who cannot see it.
    """
    name, size = byte_scale(max((sum(stack.parts) for stack in stacks), default=0))
    with chart_style(salt):
        figure, axes = _figure()
        left = [0.0] * len(stacks)
        for place, (part, number) in enumerate(parts.items()):
            widths = [stack.parts[place] / size for stack in stacks]
            look: dict[str, Any] = {
                "color": COLOURS[number % len(COLOURS)],
                "hatch": "//" if (number + number // len(COLOURS)) % 2 else None,
            }
            axes.barh(range(len(stacks)), widths, left=left, height=0.6, label=part, edgecolor=PAPER, **look)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(stacks)), [stack.name for stack in stacks])
        axes.invert_yaxis()
        axes.set_xlabel(name)
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.4, columnspacing=1.2)
        return page_svg(figure, label)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


@contextlib.contextmanager
def chart_style(salt: str) -> Iterator[None]:
    """Return the style of charts, and no other, whatever a user has set."""
    settings = _STYLE | {"svg.hashsalt": f"tba-offload {salt}"}
    with matplotlib.style.context("default"), mpl.rc_context(settings):
        yield


def page_svg(figure: Figure, label: str) -> str:
    """Return the picture, to be put into a page."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would hold for the whole page
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # other pictures have the same ids, and nothing uses them
    text = re.sub(r"#0a0b[0-9a-f]{2}", lambda found: _VARIABLES[found[0]], text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def plain_svg(svg: str) -> bytes:
    """Return a picture of a page as a file of its own, on white."""
    text = svg
    for colour, variable in _VARIABLES.items():
        text = text.replace(variable, _PLAIN[colour])
    ground = f'<rect width="100%" height="100%" fill="{_PLAIN[PAPER]}"/>'
    head = text.index(">") + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text[:head]}{ground}{text[head:]}'.encode()
