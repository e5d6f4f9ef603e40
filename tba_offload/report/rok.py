"""ROK curves: what recompute, offload and keep cost in memory and in speed.

One run is one point: its peak of memory and its model throughput. One strategy is one line, through its batch
sizes. The runs that no other run beats in both are the Pareto set.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import io
import statistics
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tba_offload.errors import ConfigError, MissingDependencyError, RunLogError
from tba_offload.files import write_regular
from tba_offload.formatting import BYTES, readable_size, scale, significant, visible
from tba_offload.report.log import counted_steps, timed_steps
from tba_offload.report.ranks import read_runs
from tba_offload.report.text import Table

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tba_offload.report.log import RunLog, StepRecord

Unit = Literal["FLOP/s", "tokens/s"]

Memory = Literal["activations", "device"]
"""Bytes that runs are compared by: of activations, or all on the device, optimizer states among them."""

_PEAKS: dict[Memory, str] = {"activations": "activation_peak_bytes", "device": "device_peak_bytes"}
_WORK: dict[Unit, str] = {"FLOP/s": "model_flops", "tokens/s": "tokens"}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RokPoint:
    """One run on a ROK curve.

    Attributes:
        strategy: The run's label; points with equal labels form a line.
        batch_size: Sequences a step; None where the log does not say.
        activation_peak_bytes: The largest activation peak of the counted steps; None if not measured.
        device_peak_bytes: The most live bytes of the device in forward and backward, weights and gradients
            included; on a CPU those of the process. None if not measured.
        throughput: Work of a step divided by the median step time, in ``unit``.
        unit: ``"FLOP/s"``, recomputation not counted, or ``"tokens/s"``.
        step_seconds: Median time of the counted steps, updates included.
        lower_quartile_seconds: Lower quartile of these times.
        upper_quartile_seconds: Upper quartile of these times.
        steps: The number of counted times.
        source: The run log.
        memory: The peak that points are compared by.
        peak_source: How the peak was measured; None where the log does not say.
    """

    strategy: str
    batch_size: int | None
    activation_peak_bytes: int | None
    throughput: float
    unit: Unit
    step_seconds: float
    lower_quartile_seconds: float
    upper_quartile_seconds: float
    steps: int
    source: str
    memory: Memory = "activations"
    device_peak_bytes: int | None = None
    peak_source: str | None = None

    @property
    def peak_bytes(self) -> int:
        """The peak that the point is compared by."""
        return getattr(self, _PEAKS[self.memory]) or 0

    @property
    def peak_name(self) -> str:
        """The name of this peak."""
        return _PEAKS[self.memory].removesuffix("_bytes").replace("_", " ")

    @property
    def name(self) -> str:
        """A name for sentences, such as ``"offload at batch size 8"``."""
        if self.batch_size is None:
            return f"{self.strategy} ({self.source})"
        return f"{self.strategy} at batch size {self.batch_size}"


def points(
    paths: Iterable[str | os.PathLike[str]],
    *,
    memory: Memory = "activations",
    warmup: int | None = None,
    left_out: Callable[[str], object] | None = None,
) -> list[RokPoint]:
    """Read run logs and return one point a run, all with the same unit of throughput.

    Args:
        paths: The run logs; those of the ranks of one run give one point.
        memory: The peak that points are compared by.
        warmup: Steps to skip at the start of each run. Default: the rule of all commands.
        left_out: Called with a sentence for each run without a step. Without it these are errors.

    Raises:
        RunLogError: A log cannot be read or lacks what a point needs.
    """
    logs = read_runs(paths)
    if left_out is not None and any(log.steps for log in logs):
        for log in logs:
            if not log.steps:
                left_out(f"{log.path}: has no steps, so it is left out")
        logs = [log for log in logs if log.steps]
    return points_of(logs, memory=memory, warmup=warmup)


def points_of(
    logs: Sequence[RunLog], *, memory: Memory = "activations", warmup: int | None = None
) -> list[RokPoint]:
    """Return the points of runs that were read; see :func:`points`."""
    counted = [counted_steps(log, warmup) for log in logs]
    for log, steps in zip(logs, counted, strict=True):
        if not steps:
            raise RunLogError(f"{log.path}: {len(log.steps)} steps, and none counts after the warm-up")
    for unit, work in _WORK.items():
        if all(getattr(step, work) for steps in counted for step in steps):
            return [_point(*each, memory, unit) for each in zip(logs, counted, strict=True)]
    raise RunLogError(
        f"{', '.join(str(log.path) for log in logs)}: no unit of throughput is known in every step. Pass "
        "tokens= or model_flops= to session.step() in each run, or compare these runs apart."
    )


def _point(log: RunLog, steps: Sequence[StepRecord], memory: Memory, unit: Unit) -> RokPoint:
    """Return the point: the largest peak, which has to fit, and the median time, without hiccups."""
    peaks = {name: max(getattr(step, name) or 0 for step in steps) or None for name in _PEAKS.values()}
    if peaks[_PEAKS[memory]] is None:
        raise RunLogError(f"{log.path}: no {_PEAKS[memory]} was measured in the {len(steps)} counted steps")
    timed = timed_steps(steps)
    seconds = [step.seconds_with_update for step in timed]
    spread = seconds if len(seconds) > 1 else seconds * 2  # one time is its own quartiles
    low, median, high = statistics.quantiles(spread, n=4, method="inclusive")
    batch_size: Any = log.header.model.get("batch_size")
    return RokPoint(
        strategy=log.header.strategy,
        batch_size=batch_size if type(batch_size) is int else None,
        **peaks,
        memory=memory,
        throughput=statistics.median(getattr(step, _WORK[unit]) for step in timed) / median,
        unit=unit,
        step_seconds=median,
        lower_quartile_seconds=low,
        upper_quartile_seconds=high,
        steps=len(timed),
        source=str(log.path),
        peak_source=next((step.peak_source for step in steps if step.peak_source), None),
    )


def lines(points: Sequence[RokPoint]) -> dict[str, list[RokPoint]]:
    """Return the points of each strategy by batch size, strategies in the order of their first run."""
    grouped: dict[str, list[RokPoint]] = {each.strategy: [] for each in points}
    for each in sorted(points, key=lambda each: (each.batch_size or 0, each.peak_bytes)):
        grouped[each.strategy].append(each)
    return grouped


def pareto(points: Iterable[RokPoint]) -> list[RokPoint]:
    """Return the points that no other beats: with no higher peak, no slower, and better in one of the two."""
    candidates = sorted(points, key=lambda each: each.peak_bytes)
    return [each for each in candidates if not any(_beats(other, each) for other in candidates)]


def _beats(one: RokPoint, other: RokPoint) -> bool:
    no_worse = one.peak_bytes <= other.peak_bytes and one.throughput >= other.throughput
    return no_worse and (one.peak_bytes < other.peak_bytes or one.throughput > other.throughput)


# Words


def table(points: Sequence[RokPoint]) -> Table:
    """Return the points (at least one) as a table, by strategy; the Pareto set is starred."""
    winners = pareto(points)
    (peak_unit, peak_size), (speed_unit, speed_size) = _scales(points)
    columns: dict[str, Callable[[RokPoint], str]] = {
        "Strategy": lambda each: each.strategy,
        "Batch": lambda each: "?" if each.batch_size is None else str(each.batch_size),
        f"Peak {peak_unit}": lambda each: significant(each.peak_bytes / peak_size),
        speed_unit: lambda each: significant(each.throughput / speed_size),
        "Step s": lambda each: significant(each.step_seconds),
        "Pareto": lambda each: "*" if each in winners else "",
        "Steps": lambda each: str(each.steps),
        "Run": lambda each: each.source,
    }
    rows = [[cell(each) for cell in columns.values()] for line in lines(points).values() for each in line]
    sources = " / ".join(dict.fromkeys(each.peak_source or "not stated" for each in points))
    caption = (
        f"Peak: largest {points[0].peak_name} of the counted steps, by {sources}. Step: their median "
        "time, with updates. Throughput: FLOPs or tokens / this time, recomputation not counted."
    )
    return Table(list(columns), rows, right=columns.keys() - {"Strategy", "Run"}, caption=caption)


def _scales(points: Sequence[RokPoint]) -> tuple[tuple[str, float], tuple[str, float]]:
    prefix, size = scale(max(each.throughput for each in points), _PREFIXES)
    return scale(max(each.peak_bytes for each in points), BYTES), (prefix + points[0].unit, size)


def summary(points: Sequence[RokPoint]) -> list[Table | str]:
    """Return the table, the Pareto set and the advice."""
    winners = "; ".join(point.name for point in pareto(points))
    return [table(points), f"Pareto set: {winners}.", *(f"- {sentence}" for sentence in advice(points))]


def rows(points: Sequence[RokPoint]) -> list[dict[str, object]]:
    """Return the points for programs, in plain units and in the order given."""
    winners = pareto(points)
    return [dataclasses.asdict(each) | {"pareto": each in winners} for each in points]


def csv_text(points: Sequence[RokPoint]) -> str:
    """Return the points as CSV: a header line, then one line each; unknown values are empty."""
    file = io.StringIO()
    content = rows(points)
    writer = csv.DictWriter(file, fieldnames=list(content[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(content)
    return file.getvalue()


def advice(points: Sequence[RokPoint]) -> list[str]:
    """Return what the runs say about each other, in sentences."""
    few = ", ".join(each.name for each in points if each.steps < 3)
    doubts = [f"Fewer than 3 steps counted for {few}: run longer to trust the times."] if few else []
    return [*_at_equal_batch_size(points), *doubts]


def _at_equal_batch_size(points: Sequence[RokPoint]) -> Iterator[str]:
    for batch_size in sorted({each.batch_size for each in points if each.batch_size is not None}):
        group = [each for each in points if each.batch_size == batch_size]
        fastest, *slower = sorted(group, key=lambda each: (-each.throughput, each.peak_bytes))
        savings = "; ".join(
            f"{each.strategy} needs {1 - each.peak_bytes / fastest.peak_bytes:.0%} less at "
            f"{each.throughput / fastest.throughput:.0%} of the throughput{_noise(each, fastest)}"
            for each in slower
            if each.peak_bytes < fastest.peak_bytes
        )
        if len(lines(group)) > 1:
            yield (
                f"At batch size {batch_size}, {fastest.strategy} is the fastest ({fastest.peak_name} "
                f"{readable_size(fastest.peak_bytes)}): {savings or 'no other run needs less'}."
            )


def _noise(one: RokPoint, fastest: RokPoint) -> str:
    overlaps = one.lower_quartile_seconds <= fastest.upper_quartile_seconds
    return ", which may be noise" if overlaps else ""


# Pictures, without pyplot: no window, no global figure, and the user's own style stays out

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; markers and dashes differ as well."""

INK, GREY = "#222222", "#c4c4c4"

_KNOWN = ("keep", "offload", "recompute", "recompute-offload", "recompute-except-attention", "offload-remat")
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "svg.hashsalt": "tba-offload",
    "text.color": INK,
    "text.parse_math": False,  # a strategy may be called "$5/h"
}


def looks(names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Return a colour, a marker and dashes for each name; placements look the same in every picture."""
    known = [*_KNOWN, *(name for name in dict.fromkeys(names) if name not in _KNOWN)]
    return {
        name: (COLOURS[place % 7], "os^hvdX<>pPD*"[place % 13], ("-", "--", "-.", ":")[place // 7 % 4])
        for place, name in enumerate(known)
    }


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw in the style of all pictures, whatever style the user has set.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl
    import matplotlib.style

    with matplotlib.style.context("default"), mpl.rc_context(_STYLE):
        yield


def require_matplotlib() -> None:
    """Check that pictures can be drawn, for commands that tell before they work for hours.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("matplotlib", "drawing pictures", extra="plots")


def picture_kind(path: str | os.PathLike[str], *more: str) -> str:
    """Return what the suffix of ``path`` asks for: ``"svg"``, ``"png"``, or one of the others.

    Raises:
        ConfigError: Another suffix.
    """
    kind, kinds = Path(path).suffix.lower().removeprefix("."), ("svg", "png", *more)
    if kind not in kinds:
        others = "".join(f", a trace's in .{each}" for each in more)
        raise ConfigError(f"{path}: a picture's name must end in .svg or .png{others}")
    return kind


def rendered(figure: Figure, kind: str) -> bytes:
    """Return a figure as the bytes of a file; equal figures give equal bytes."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def write_picture(path: str | os.PathLike[str], figure_of: Callable[[], Figure]) -> None:
    """Draw a figure in the style of all pictures, and write it as SVG or PNG by the suffix of ``path``.

    Raises:
        ConfigError: Another suffix.
        MissingDependencyError: matplotlib is not installed.
        OSError: The picture cannot be written.
    """
    kind = picture_kind(path)
    with drawing():
        content = rendered(figure_of(), kind)
    write_regular(path, content)


def draw(points: Sequence[RokPoint], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the curve: a line for each strategy through its batch sizes, with the Pareto set ringed.

    Args:
        points: At least one point; all with the same unit.
        path: The picture to write; see :func:`write_picture`.
        title: A line above the curve.

    Raises:
        ConfigError: No points, mixed units, or another suffix.
    """
    if len({each.unit for each in points}) != 1:
        raise ConfigError("a ROK curve needs points, all with the same unit of throughput")
    write_picture(path, lambda: rok_figure(points, title=title))


def rok_figure(points: Sequence[RokPoint], *, title: str = "") -> Figure:
    """Return the curve as a figure, within :func:`drawing`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    (x_unit, x_size), (y_unit, y_size) = _scales(points)
    grouped = lines(points)
    for strategy, line in grouped.items():
        colour, marker, dashes = looks(grouped)[strategy]
        places = [(each.peak_bytes / x_size, each.throughput / y_size) for each in line]
        axes.plot(*zip(*places, strict=True), dashes, marker=marker, color=colour, label=short(strategy))
        for each, place in zip(line, places, strict=True):
            if each.batch_size is not None:
                axes.annotate(str(each.batch_size), place, (8, -9), textcoords="offset points", color=colour)
    best = [(each.peak_bytes / x_size, each.throughput / y_size) for each in pareto(points)]
    axes.step(*zip(*best, strict=True), where="post", color="#b8b8b8", linestyle="--", zorder=1)
    axes.plot(*zip(*best, strict=True), zorder=4, label="Pareto set", **RING)
    finish(axes, f"Model throughput ({y_unit})", title)
    axes.set(xlabel=f"{points[0].peak_name.capitalize()} ({x_unit})", xlim=(0, None))
    numbers = "Numbers are batch sizes" if any(each.batch_size for each in points) else None
    figure.legend(loc="outside upper left", ncols=3, title=numbers, alignment="left", title_fontsize="small")
    return figure


RING: dict[str, Any] = {"marker": "o", "markersize": 13, "mfc": "none", "color": INK, "linestyle": "none"}
"""The look of points that stand out."""


def finish(axes: Axes, y_label: str, title: str = "", *, from_zero: bool = True) -> None:
    """Label axes, and let them begin at zero; along x the caller does, since panels may share that."""
    axes.set_ylabel(y_label)
    axes.set_title(textwrap.fill(visible(title), 100), loc="left", fontsize="small")
    if from_zero:
        axes.update_datalim([(0, 0)])
        axes.margins(0.1)
        axes.set_ylim(0)


def short(text: str, most: int = 30) -> str:
    """Return a label for a legend; one that begins with an underscore would not be shown."""
    found = visible(text)
    found = found if len(found) <= most else f"{found[: most - 1]}…"
    return f" {found}" if found.startswith("_") else found
