"""ROK curves: what a strategy of recompute, offload and keep costs in memory and in speed.

One run is one point, see :mod:`tba_offload.report.points`: x is its peak of memory, y its model throughput.
Points go in; a table, CSV, JSON and a picture come out.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tba_offload.errors import ConfigError, MissingDependencyError
from tba_offload.formatting import byte_scale, significant, visible
from tba_offload.report import tables
from tba_offload.report.advice import advice
from tba_offload.report.points import lines, pareto, peak_sources, rate_scale
from tba_offload.report.tables import Column, FittedTable
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tba_offload.report.points import RokPoint

_FORMULA = frozenset("=+-@")
"""Characters that a spreadsheet takes for the start of a formula."""

_STRATEGY_WIDTH = len("recompute-offload")
"""Characters of a label that a table always shows: those of all placements but the longest."""


def table(points: Sequence[RokPoint]) -> FittedTable:
    """Return the points (at least one) as a table, by strategy; the Pareto set is starred."""
    winners = pareto(points)
    (peak_unit, peak_size), (speed_unit, speed_size) = _scales(points)
    ordered = [each for line in lines(points).values() for each in line]

    def column(heading: str, cell: Callable[[RokPoint], str], rank: int = 0) -> Column:
        return Column(heading, tuple(map(cell, ordered)), rank=rank)

    strategies, sources = [each.strategy for each in ordered], [each.source for each in ordered]
    columns = (
        Column("Strategy", tuple(strategies), "left", gives_way="shortened", least=_STRATEGY_WIDTH),
        column("Batch", lambda each: "?" if each.batch_size is None else str(each.batch_size), 1),
        column(f"Peak {peak_unit}", lambda each: significant(each.peak_bytes / peak_size)),
        column(speed_unit, lambda each: significant(each.throughput / speed_size)),
        column("Step s", lambda each: significant(each.step_seconds), 2),
        column("Quartiles", lambda each: "-".join(map(significant, each.step_seconds_quartiles)), 5),
        column("Steps", lambda each: str(each.steps), 6),
        column("Pareto", lambda each: "*" if each in winners else "", 3),
        Column(
            "Run",
            tuple(sources),
            "left",
            rank=4,
            gives_way="shortened",
            brief=tuple(Path(source).name for source in sources),
        ),
    )
    return FittedTable(columns, caption=_caption(points), elsewhere="--csv or --json")


def text(points: Sequence[RokPoint]) -> str:
    """Return the same table as Markdown, for files and pipes: nothing shortened, no colours."""
    return table(points).markdown()


def show(points: Sequence[RokPoint]) -> None:
    """Print the table, the Pareto set and the advice."""
    winners = "; ".join(point.name for point in pareto(points))
    tables.show(table(points), f"Pareto set: {winners}.", *(f"- {sentence}" for sentence in advice(points)))


def _scales(points: Sequence[RokPoint]) -> tuple[tuple[str, float], tuple[str, float]]:
    largest = max(each.peak_bytes for each in points)
    return byte_scale(largest), rate_scale(max(each.throughput for each in points), points[0].unit)


def _caption(points: Sequence[RokPoint]) -> str:
    work = "FLOPs, recomputation not counted," if points[0].unit == "FLOP/s" else "tokens"
    sources = " / ".join(peak_sources(points))
    return (
        f"Peak: largest {points[0].peak_name} of the counted steps, measured by: {sources}. "
        f"Step: median wall-clock time, update included. Throughput: {work} of a step / median step time."
    )


def rows(points: Sequence[RokPoint]) -> list[dict[str, object]]:
    """Return the points for programs, in plain units and in the order given."""
    winners = pareto(points)
    return [
        {
            "strategy": each.strategy,
            "batch_size": each.batch_size,
            "activation_peak_bytes": each.activation_peak_bytes,
            "peak_source": each.peak_source,
            "gradients_allocated": each.gradients_allocated,
            "throughput": each.throughput,
            "throughput_unit": each.unit,
            "step_seconds": each.step_seconds,
            "step_seconds_lower_quartile": each.step_seconds_quartiles[0],
            "step_seconds_upper_quartile": each.step_seconds_quartiles[1],
            "steps": each.steps,
            "pareto": each in winners,
            "source": each.source,
            "device_peak_bytes": each.device_peak_bytes,
            "memory": each.memory,
        }
        for each in points
    ]


def csv_text(points: Sequence[RokPoint]) -> str:
    """Return the points as CSV: a header line, then one line each; unknown values are empty.

    Text that a spreadsheet would take for a formula gets an apostrophe before it.
    """
    content = rows(points)
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(content[0]) if content else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in content)
    return file.getvalue()


def _cell(value: object) -> object:
    """Return a value as spreadsheets show it: text that begins like a formula stays text."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    first = unicodedata.normalize("NFKC", text[:1])  # a wide equals sign is one too
    return f"'{text}" if first in _FORMULA and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def draw(points: Sequence[RokPoint], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the curve: one line for each strategy through its batch sizes, the Pareto set ringed.

    The same points give the same file, byte for byte, with the same version of matplotlib.

    Args:
        points: At least one point; all with the same unit.
        path: The picture to write, SVG or PNG by its suffix.
        title: A line above the curve.

    Raises:
        ConfigError: No points, mixed units, or another suffix.
        MissingDependencyError: matplotlib is not installed.
        OSError: The picture cannot be written.
    """
    path = Path(path)
    kind = picture_kind(path)
    if len({each.unit for each in points}) != 1:
        raise ConfigError("a ROK curve needs points, all with the same unit of throughput")
    require_matplotlib()
    from tba_offload.report import picture

    write_regular(path, picture.rok_curve(points, kind, title=title))


def picture_kind(path: str | os.PathLike[str]) -> Literal["svg", "png"]:
    """Return the kind of picture that the suffix of ``path`` asks for.

    Raises:
        ConfigError: It is neither .svg nor .png.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        return "svg"
    if suffix == ".png":
        return "png"
    raise ConfigError(f"{path}: a picture's name must end in .svg or .png")


def require_matplotlib(purpose: str = "drawing a ROK curve", extra: str = "plots") -> None:
    """Check that pictures can be drawn, for commands that tell before they work for hours.

    Args:
        purpose: What needs it.
        extra: The extra of tba-offload that installs it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: F401 - whether it can be imported is the question
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise MissingDependencyError("matplotlib", purpose, extra=extra) from error
