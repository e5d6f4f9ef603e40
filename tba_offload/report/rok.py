"""ROK curves (recompute, offload, keep), which show model throughput over peak memory.

Each run is one point. A line connects the points of one strategy in the order of batch size. A run is in the
Pareto set if every faster run needs more memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import statistics
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tba_offload.errors import ConfigError, MissingDependencyError, RunLogError, log_warning
from tba_offload.formatting import BYTES, readable_size, scale, significant, visible
from tba_offload.report.log import counted_steps, timed_steps
from tba_offload.report.ranks import read_runs
from tba_offload.report.text import Table

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tba_offload.report.log import RunHeader, RunLog, StepRecord

Unit = Literal["FLOP/s", "tokens/s"]

Memory = Literal["activations", "device"]
"""Memory by which runs are compared: activations, or all memory of the device."""

_PEAKS: dict[Memory, str] = {"activations": "activation_peak_bytes", "device": "device_peak_bytes"}
_WORK: dict[Unit, str] = {"FLOP/s": "model_flops", "tokens/s": "tokens"}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RokPoint:
    """Point of a ROK curve: the figures of one run.

    Attributes:
        strategy: Label of the run. Points of runs with equal labels form a line.
        batch_size: Number of sequences in a step; None if the log does not have this number.
        activation_peak_bytes: Largest activation peak of the counted steps in bytes; None if not measured.
        device_peak_bytes: Peak live bytes of the device during forward and backward, including weights and
            gradients; None if not measured. On a CPU, ``device_peak_bytes`` counts live bytes of the process.
        throughput: Work of a step divided by the median step time, in ``unit``.
        unit: Unit of the throughput, ``"FLOP/s"`` or ``"tokens/s"``. FLOPs of recomputation do not count.
        step_seconds: Median time of the counted steps in seconds, including the optimizer's update.
        lower_quartile_seconds: Lower quartile of the step times in seconds.
        upper_quartile_seconds: Upper quartile of the step times in seconds.
        steps: Number of counted steps with a time.
        source: The run log.
        memory: Kind of memory peak by which points are compared.
        peak_source: Method that measured the peak; None if the log does not name the method.
        title: Text with the model and the machine, without the numbers that label points.
        sequence: Sequence length in tokens; None if unknown, or if all points have the same sequence length.
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
    title: str = ""
    sequence: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The compared memory peak in bytes."""
        return getattr(self, _PEAKS[self.memory]) or 0

    @property
    def peak_name(self) -> str:
        """Name of the compared peak."""
        return _PEAKS[self.memory].removesuffix("_bytes").replace("_", " ")

    @property
    def name(self) -> str:
        """Name of the point in sentences, for example ``"offload at batch size 8"``."""
        return f"{self.strategy} at {self.size}" if self.size else f"{self.strategy} ({self.source})"

    @property
    def size(self) -> str:
        """Batch size and sequence length as text, which is empty if both are None."""
        known = {"batch size {}": self.batch_size, "{} tokens": self.sequence}
        return " and ".join(text.format(number) for text, number in known.items() if number is not None)


def points(
    paths: Iterable[str | os.PathLike[str]],
    *,
    memory: Memory = "activations",
) -> list[RokPoint]:
    """Read run logs and return one point for each run. All points have the same unit of throughput.

    Args:
        paths: Paths of run logs. The logs of all ranks of a run give one point. A log without counted steps
            gives no point, and a warning is logged.
        memory: Kind of memory peak by which points are compared.

    Raises:
        RunLogError: A log cannot be read. A log has no measured peak. The logs have no common unit of
            throughput. No log has a counted step.
    """
    return points_of(read_runs(paths), memory=memory)


def points_of(logs: Sequence[RunLog], *, memory: Memory = "activations") -> list[RokPoint]:
    """Return one point for each run log, as :func:`points` does."""
    counted = [counted_steps(log) for log in logs]
    if empty := [log for log, steps in zip(logs, counted, strict=True) if not steps]:
        what = f"{', '.join(str(log.path) for log in empty)}: no steps after the warm-up"
        if len(empty) == len(logs):
            raise RunLogError(f"{what}. Train more steps")
        log_warning(__name__, "%s, so the curve has no point for this run. Train more steps", what)
        return points_of([log for log in logs if log not in empty], memory=memory)
    for unit, work in _WORK.items():
        if all(getattr(step, work) for steps in counted for step in steps):
            varies = len({_sequence(log.header) for log in logs}) > 1
            pairs = zip(logs, counted, strict=True)
            return [_point(*each, memory, unit, sequence_varies=varies) for each in pairs]
    raise RunLogError(
        f"{', '.join(str(log.path) for log in logs)}: these logs have no common unit of throughput. Pass "
        "tokens= or model_flops= to session.step() in each run, or compare these runs separately."
    )


def _sequence(header: RunHeader) -> int | None:
    found = header.model.get("sequence", header.model.get("seq_length"))
    return found if type(found) is int else None


def _point(
    log: RunLog, steps: Sequence[StepRecord], memory: Memory, unit: Unit, *, sequence_varies: bool
) -> RokPoint:
    peaks = {name: max(getattr(step, name) or 0 for step in steps) or None for name in _PEAKS.values()}
    if peaks[_PEAKS[memory]] is None:
        raise RunLogError(
            f"{log.path}: {_PEAKS[memory]} is missing in all {len(steps)} steps after the warm-up"
        )
    timed = timed_steps(steps)
    seconds = [step.seconds_with_update for step in timed]
    spread = seconds if len(seconds) > 1 else seconds * 2  # a single time is also both quartiles
    low, median, high = statistics.quantiles(spread, n=4, method="inclusive")
    batch_size: Any = log.header.model.get("batch_size")
    hidden = ("sequence", "seq_length") if sequence_varies else ()
    return RokPoint(
        strategy=log.header.strategy,
        batch_size=batch_size if type(batch_size) is int else None,
        sequence=_sequence(log.header) if sequence_varies else None,
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
        title=log.header.title_without(*hidden),
    )


def lines(points: Sequence[RokPoint]) -> dict[str, list[RokPoint]]:
    """Return the points of each strategy, in the order of batch size and sequence length."""
    grouped: dict[str, list[RokPoint]] = {each.strategy: [] for each in points}
    for each in sorted(points, key=lambda each: (each.batch_size or 0, each.sequence or 0, each.peak_bytes)):
        grouped[each.strategy].append(each)
    return grouped


def pareto(points: Iterable[RokPoint]) -> list[RokPoint]:
    """Return the Pareto set: each point for which every faster point needs more memory."""
    candidates = sorted(points, key=lambda each: each.peak_bytes)
    return [each for each in candidates if not any(_beats(other, each) for other in candidates)]


def _beats(one: RokPoint, other: RokPoint) -> bool:
    no_worse = one.peak_bytes <= other.peak_bytes and one.throughput >= other.throughput
    return no_worse and (one.peak_bytes < other.peak_bytes or one.throughput > other.throughput)


# Words


def table(points: Sequence[RokPoint]) -> Table:
    """Return the points as a table, ordered by strategy. A star marks points in the Pareto set.

    Args:
        points: Points of the curve, at least one.
    """
    winners = pareto(points)
    (peak_unit, size), (speed_unit, speed_size) = _scales(points)
    columns: dict[str, Callable[[RokPoint], str]] = {
        "Strategy": lambda each: each.strategy,
        "Batch": lambda each: "?" if each.batch_size is None else str(each.batch_size),
        f"{points[0].peak_name.capitalize()} {peak_unit}": lambda each: significant(each.peak_bytes / size),
        speed_unit: lambda each: significant(each.throughput / speed_size),
        "Step s": lambda each: significant(each.step_seconds),
        "Pareto": lambda each: "*" if each in winners else "",
        "Steps": lambda each: str(each.steps),
        "Run": lambda each: each.source,
    }
    if any(each.sequence for each in points):
        columns["Tokens"] = lambda each: "?" if each.sequence is None else str(each.sequence)
    rows = [[cell(each) for cell in columns.values()] for line in lines(points).values() for each in line]
    sources = " / ".join(dict.fromkeys(each.peak_source or "not stated" for each in points))
    caption = (
        f"Peak: largest peak of the counted steps, measured by {sources}. Step: median time with update. "
        "Throughput: FLOPs (without recomputation) or tokens of a step, divided by the median step time."
    )
    return Table(list(columns), rows, right=columns.keys() - {"Strategy", "Run"}, caption=caption)


def _scales(points: Sequence[RokPoint]) -> tuple[tuple[str, float], tuple[str, float]]:
    prefix, size = scale(max(each.throughput for each in points), _PREFIXES)
    return scale(max(each.peak_bytes for each in points), BYTES), (prefix + points[0].unit, size)


def summary(points: Sequence[RokPoint]) -> list[Table | str]:
    """Return the table of points, the Pareto set, and comparisons of the runs."""
    winners = "; ".join(point.name for point in pareto(points))
    return [table(points), f"Pareto set: {winners}.", *(f"- {sentence}" for sentence in advice(points))]


def rows(points: Sequence[RokPoint]) -> list[dict[str, object]]:
    """Return the points as dicts for JSON, in the order of ``points``."""
    winners = pareto(points)
    return [dataclasses.asdict(each) | {"pareto": each in winners} for each in points]


def advice(points: Sequence[RokPoint]) -> list[str]:
    """Return sentences that compare the runs."""
    few = ", ".join(each.name for each in points if each.steps < 3)
    doubts = [f"{few}: fewer than 3 counted steps. Train more steps to get reliable times."] if few else []
    return [*_at_equal_size(points), *doubts]


def _at_equal_size(points: Sequence[RokPoint]) -> Iterator[str]:
    ordered = sorted(points, key=lambda each: (each.batch_size or 0, each.sequence or 0))
    for size in dict.fromkeys(each.size for each in ordered if each.size):
        group = [each for each in points if each.size == size]
        fastest, *slower = sorted(group, key=lambda each: (-each.throughput, each.peak_bytes))
        savings = "; ".join(
            f"{each.strategy} needs {1 - each.peak_bytes / fastest.peak_bytes:.0%} less memory at "
            f"{each.throughput / fastest.throughput:.0%} of the throughput{_noise(each, fastest)}"
            for each in slower
            if each.peak_bytes < fastest.peak_bytes
        )
        if len(lines(group)) > 1:
            yield (
                f"At {size}, {fastest.strategy} is the fastest ({fastest.peak_name} "
                f"{readable_size(fastest.peak_bytes)}): {savings or 'no other run needs less memory'}."
            )


def _noise(one: RokPoint, fastest: RokPoint) -> str:
    overlaps = one.lower_quartile_seconds <= fastest.upper_quartile_seconds
    return " (within noise)" if overlaps else ""


# Pictures. The code avoids pyplot, which opens windows, has global figures, and applies the user's style.

WIDTH = 5.6
"""Width of every picture in inches. The text stays readable if the picture is shown 390 pixels wide."""


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
"""The colours of Okabe and Ito, which colour-blind readers can distinguish."""

INK, GREY = "#222222", "#c4c4c4"

RING: dict[str, Any] = {"marker": "o", "markersize": 13, "mfc": "none", "color": INK, "ls": "none"}
"""Look of a highlighted point."""

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
    "text.parse_math": False,  # the name of a strategy may be "$5/h"
}


def looks(names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Return a colour, a marker and a line style for each name. Placements look the same in every picture."""
    known = [*_KNOWN, *(name for name in dict.fromkeys(names) if name not in _KNOWN)]
    return {
        name: (COLOURS[place % 7], "os^hvdX<>pPD*"[place % 13], ("-", "--", "-.", ":")[place // 7 % 4])
        for place, name in enumerate(known)
    }


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Set the style of pictures in a ``with`` block, independent of the user's matplotlib style.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl
    import matplotlib.style

    with matplotlib.style.context("default"), mpl.rc_context(_STYLE):
        yield


def require_matplotlib() -> None:
    """Check that matplotlib is installed. Call this function before a long computation.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("matplotlib", "drawing pictures", extra="plots")


def picture_kind(path: str | os.PathLike[str], *more: str) -> str:
    """Return the file kind that the suffix of ``path`` selects.

    Args:
        path: Path of the picture to write.
        more: Allowed kinds besides ``"svg"`` and ``"png"``.

    Raises:
        ConfigError: The suffix of ``path`` is not allowed.
    """
    kind, kinds = Path(path).suffix.lower().removeprefix("."), ("svg", "png", *more)
    if kind not in kinds:
        others = "".join(f", and the name of a trace must end in .{each}" for each in more)
        raise ConfigError(f"{path}: the name of a picture must end in .svg or .png{others}")
    return kind


def rendered(figure: Figure, kind: str) -> bytes:
    """Return a figure as the bytes of a picture file. Figures with equal content give equal bytes."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=220, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def write_picture(path: str | os.PathLike[str], figure_of: Callable[[], Figure]) -> None:
    """Draw a figure and write a picture. The suffix of ``path`` selects SVG or PNG.

    Args:
        path: Path of the picture to write.
        figure_of: Function that returns the figure.

    Raises:
        ConfigError: The suffix of ``path`` is neither ``.svg`` nor ``.png``.
        MissingDependencyError: matplotlib is not installed.
        OSError: The picture cannot be written.
    """
    kind = picture_kind(path)
    with drawing():
        content = rendered(figure_of(), kind)
    Path(path).write_bytes(content)


def draw(points: Sequence[RokPoint], path: str | os.PathLike[str]) -> None:
    """Draw the ROK curve, with one line for each strategy and rings around the Pareto set.

    Args:
        points: Points of the curve, at least one. All points have the same unit.
        path: The picture to write, SVG or PNG.

    Raises:
        ConfigError: The suffix of ``path`` is neither ``.svg`` nor ``.png``.
    """
    write_picture(path, lambda: rok_figure(points))


def rok_figure(points: Sequence[RokPoint]) -> Figure:
    """Return the ROK curve as a figure. Call this function inside :func:`drawing`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.add_subplot()
    (x_unit, x_size), (y_unit, y_size) = _scales(points)
    grouped = lines(points)
    for strategy, line in grouped.items():
        colour, marker, dashes = looks(grouped)[strategy]
        places = [(each.peak_bytes / x_size, each.throughput / y_size) for each in line]
        axes.plot(*zip(*places, strict=True), dashes, marker=marker, color=colour, label=short(strategy))
    best = [(each.peak_bytes / x_size, each.throughput / y_size) for each in pareto(points)]
    axes.step(*zip(*best, strict=True), where="post", color="#b8b8b8", linestyle="--", zorder=1)
    axes.plot(*zip(*best, strict=True), zorder=4, label="Pareto set", **RING)
    finish(axes, f"Model throughput ({y_unit})", " / ".join(dict.fromkeys(each.title for each in points)))
    axes.set(xlabel=f"{points[0].peak_name.capitalize()} ({x_unit})", xlim=(0, None))
    varied, what = "batch_size", "batch sizes"
    if any(each.sequence for each in points):
        varied, what = "sequence", "tokens of a sequence"
    labels = [getattr(each, varied) for line in grouped.values() for each in line]
    _write_numbers(axes, labels)
    numbers = f"Numbers are {what}" if any(labels) else None
    figure.legend(loc="outside upper left", ncols=2, title=numbers, alignment="left", title_fontsize="small")
    return figure


def _write_numbers(axes: Axes, numbers: Sequence[int | None]) -> None:
    """Write a number beside each point, far from lines and other numbers."""
    import numpy as np

    drawn = axes.lines[:-2]  # without the Pareto set
    curves = [axes.transData.transform(line.get_xydata()) for line in drawn]
    taken = np.vstack([np.vstack([curve[:1], *np.linspace(curve[:-1], curve[1:], 30)]) for curve in curves])
    colours = [line.get_color() for line, curve in zip(drawn, curves, strict=True) for _ in curve]
    angles = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    around = axes.figure.dpi / 6 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for point, number, colour in zip(np.vstack(curves), numbers, colours, strict=True):
        spots = point + around
        distances = np.linalg.norm(spots[:, None] - taken, axis=-1).min(axis=1)
        best = spots[np.argmax(distances * (spots[:, 0] > axes.bbox.x0))]
        taken = np.vstack([taken, best])
        if number is not None:
            x, y = axes.transData.inverted().transform(best)
            axes.text(x, y, str(number), ha="center", va="center", color=colour, fontsize="small")


def finish(axes: Axes, y_label: str, title: str = "", *, from_zero: bool = True) -> None:
    """Label the y-axis and set the title. By default, start the y-axis at zero."""
    axes.set_ylabel(y_label)
    axes.set_title(textwrap.fill(visible(title), 72), loc="left", fontsize="small")
    if from_zero:
        axes.update_datalim([(0, 0)])
        axes.margins(0.1)
        axes.set_ylim(0)


def short(text: str, most: int = 30) -> str:
    """Return a shortened label for a legend. Matplotlib would hide labels that start with an underscore."""
    found = visible(text)
    found = found if len(found) <= most else f"{found[: most - 1]}…"
    return f" {found}" if found.startswith("_") else found
