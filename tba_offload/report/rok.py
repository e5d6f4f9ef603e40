"""ROK curves: what a strategy of recompute, offload and keep costs in memory and in speed.

One run is one point: x is its activation peak, y its model throughput. One strategy is one line, through its
batch sizes. The runs that no other run beats in both are the Pareto set.

Run logs go in; points, a table, CSV, JSON, a few sentences and a picture come out.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tba_offload.errors import ConfigError, MissingDependencyError, RunLogError
from tba_offload.formatting import byte_scale, readable_size, scale, significant, visible
from tba_offload.report import tables
from tba_offload.report.ranks import read_runs
from tba_offload.report.tables import Column, FittedTable
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tba_offload.report.run_log import RunLog, StepRecord

Unit = Literal["FLOP/s", "tokens/s"]

_FEW_STEPS = 3

_LEAST_SECONDS, _MOST, _MOST_WORK = 1e-9, 1e18, 1e30
"""No step takes less time, needs more bytes or does more work; quotients of such figures would overflow."""

_FORMULA = frozenset("=+-@")
"""What a spreadsheet takes for the start of a formula."""

_STRATEGY_WIDTH = len("recompute-offload")
"""Characters of a label that a table always shows: those of the longest placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RokPoint:
    """One run on a ROK curve.

    Attributes:
        strategy: The run's label; points with equal labels form a line.
        batch_size: Sequences a step; None where the log's model does not say.
        activation_peak_bytes: The largest activation peak that a counted step measured, bytes.
        throughput: Work of a step (median) divided by the median step time, in ``unit``.
        unit: ``"FLOP/s"``: algorithmic operations, recomputation not counted; or ``"tokens/s"``.
        step_seconds: Median time of the counted steps, see :func:`point`.
        step_seconds_quartiles: Lower and upper quartile of those times.
        steps: How many times were counted.
        source: The run log.
        peak_source: How the activation peak was measured; None where the log does not say.
        gradients_allocated: Whether, in every counted step, gradients existed before the base was read, or
            their memory was counted apart. If not, it is part of the peak.
        model: The model, its batch size left out, as JSON: equal where runs can be compared.
        hardware: The machine as JSON, likewise.
    """

    strategy: str
    batch_size: int | None
    activation_peak_bytes: int
    throughput: float
    unit: Unit
    step_seconds: float
    step_seconds_quartiles: tuple[float, float]
    steps: int
    source: str
    peak_source: str | None = None
    gradients_allocated: bool = True
    model: str = "{}"
    hardware: str = "{}"

    @property
    def name(self) -> str:
        """The point in words, such as ``"offload at batch size 8"``."""
        if self.batch_size is None:
            return f"{self.strategy} ({self.source})"
        return f"{self.strategy} at batch size {self.batch_size}"


# From run logs to points


def points(
    paths: Iterable[str | os.PathLike[str]],
    *,
    warmup: int | None = None,
    left_out: Callable[[str], object] | None = None,
) -> list[RokPoint]:
    """Read run logs, one point a run, all with the same unit of throughput.

    The unit is FLOP/s where every log has FLOPs, else tokens/s.

    Args:
        paths: The run logs; those of the ranks of one run give one point, see
            :func:`tba_offload.report.ranks.merged`.
        warmup: Steps to skip at the start of each, see :func:`point`.
        left_out: Called with a sentence for each damaged line, and for each run without a step, as one that
            failed at once, if others have some; without it these are errors.

    Raises:
        RunLogError: A log cannot be read or lacks what a point needs.
        ConfigError: ``warmup`` is negative.
    """
    logs = read_runs(paths)
    for complaint in (complaint for log in logs for complaint in log.complaints):
        if left_out is None:
            raise RunLogError(complaint)
        left_out(complaint)
    if left_out is not None and any(log.steps for log in logs):
        for log in logs:
            if not log.steps:
                left_out(f"{log.path}: has no steps, so it is left out")
        logs = [log for log in logs if log.steps]
    units = [_units(log.path, _counted(log, warmup)) for log in logs]
    common = [unit for unit in get_args(Unit) if all(unit in known for known in units)]
    if not common:
        each = "; ".join(
            f"{log.path}: {unit}" for log, known in zip(logs, units, strict=True) for unit in known
        )
        raise RunLogError(f"the runs share no unit of throughput ({each}); compare them apart")
    return [point(log, warmup=warmup, unit=common[0]) for log in logs]


def point(run_log: RunLog, *, warmup: int | None = None, unit: Unit | None = None) -> RokPoint:
    """Make one point of a run.

    The first steps are skipped: caches, the allocator and the plan are still warming up. Of the others, the
    activation peak is the *largest* (that is what has to fit in memory), and the throughput comes from the
    *median* step time (one hiccup of the machine must not count). If memory was measured in some of them
    only, the times come from the others: measuring may cost time. Steps whose gradients were dropped without
    an update, as by a gradient scaler, count in neither.

    Args:
        run_log: The run.
        warmup: How many steps to skip. Default: 2 of more than 4 steps, 1 of two to four, 0 of one.
        unit: The unit of throughput. Default: FLOP/s where every counted step has FLOPs, else tokens/s.

    Raises:
        RunLogError: No step is left, no activation peak was measured, or neither FLOPs nor tokens are known.
        ConfigError: ``warmup`` is negative.
    """
    steps = _counted(run_log, warmup)
    known = _units(run_log.path, steps)
    unit = unit or known[0]
    if unit not in known:
        raise RunLogError(f"{run_log.path}: {unit} cannot be told; only {' and '.join(known)} can")
    peak, peak_source = _peak(run_log.path, steps)
    timed = _timed(steps)
    seconds = [step.seconds for step in timed]
    median = statistics.median(seconds)
    header = run_log.header
    return RokPoint(
        strategy=header.strategy,
        batch_size=_batch_size(header.model.get("batch_size")),
        activation_peak_bytes=peak,
        throughput=statistics.median(_work(timed, unit)) / median,
        unit=unit,
        step_seconds=median,
        step_seconds_quartiles=_quartiles(seconds),
        steps=len(timed),
        source=str(run_log.path),
        peak_source=peak_source,
        gradients_allocated=all(
            step.gradients_allocated or step.gradient_bytes is not None for step in steps
        ),
        model=_canonical({key: value for key, value in header.model.items() if key != "batch_size"}),
        hardware=_canonical(header.hardware),
    )


def peak_and_seconds(run_log: RunLog) -> tuple[int, float] | None:
    """Activation peak in bytes and median seconds of a step, as of a point; ``None`` if not known."""
    try:
        steps = _counted(run_log, None)
        peak, _ = _peak(run_log.path, steps)
    except RunLogError:
        return None
    return peak, statistics.median(step.seconds for step in _timed(steps))


def _counted(run_log: RunLog, warmup: int | None) -> Sequence[StepRecord]:
    if warmup is not None and warmup < 0:
        raise ConfigError(f"warmup must be 0 or more steps, and is {warmup}")
    total = len(run_log.steps)
    warmup = warmup if warmup is not None else _default_warmup(total)
    late = run_log.steps[warmup:]
    steps = [step for step in late if not step.skipped]
    if not steps:
        why = f"after {warmup} of warm-up" + (f" and {len(late)} without an update" if late else "")
        raise RunLogError(f"{run_log.path}: {total} steps, and none is left {why}")
    for step in steps:
        if not _LEAST_SECONDS < step.seconds < _MOST:
            raise RunLogError(
                f"{run_log.path}: step {step.step} took {step.seconds} seconds; is the log damaged?"
            )
    return steps


def _timed(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps whose time counts."""
    return [step for step in steps if step.activation_peak_bytes is None] or steps


def _default_warmup(steps: int) -> int:
    if steps > 4:
        return 2
    return 1 if steps > 1 else 0


def _work(steps: Sequence[StepRecord], unit: Unit) -> list[float]:
    """The work of each step that tells it, in the unit's numerator."""
    work = [step.model_flops if unit == "FLOP/s" else step.tokens for step in steps]
    return [amount for amount in work if amount is not None and 0 < amount < _MOST_WORK]


def _units(path: Path, steps: Sequence[StepRecord]) -> list[Unit]:
    """The units in which every one of the steps tells its work, the better one first."""
    units = [unit for unit in get_args(Unit) if len(_work(steps, unit)) == len(steps)]
    if not units:
        raise RunLogError(f"{path}: no throughput, because some steps tell neither model_flops nor tokens")
    return units


def _peak(path: Path, steps: Sequence[StepRecord]) -> tuple[int, str | None]:
    measured = [
        (step.activation_peak_bytes, step.peak_source)
        for step in steps
        if step.activation_peak_bytes is not None
    ]
    if not measured:
        raise RunLogError(f"{path}: no activation peak was measured in the {len(steps)} counted steps")
    peak, source = max(measured, key=lambda pair: pair[0])
    if not 0 <= peak < _MOST:
        raise RunLogError(f"{path}: the activation peak is {peak} bytes; is the log damaged?")
    return peak, source


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return lower, upper


def _batch_size(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value < _MOST else None


def _canonical(value: Mapping[str, object]) -> str:
    return json.dumps(value, sort_keys=True)


# Orders and sets of points


def lines(points: Iterable[RokPoint]) -> dict[str, list[RokPoint]]:
    """The points of each strategy by batch size; strategies in the order in which they first come."""
    grouped: dict[str, list[RokPoint]] = defaultdict(list)
    for each in points:
        grouped[each.strategy].append(each)
    return {strategy: sorted(group, key=_along_the_line) for strategy, group in grouped.items()}


def _along_the_line(point: RokPoint) -> tuple[bool, int, int]:
    return point.batch_size is None, point.batch_size or 0, point.activation_peak_bytes


def pareto(points: Iterable[RokPoint]) -> list[RokPoint]:
    """The points that no other beats, by activation peak.

    A point beats another if it needs no more memory and is no slower, and is better in one of the two.
    """
    candidates = sorted(points, key=lambda each: each.activation_peak_bytes)
    return [each for each in candidates if not any(_beats(other, each) for other in candidates)]


def _beats(one: RokPoint, other: RokPoint) -> bool:
    no_worse = one.activation_peak_bytes <= other.activation_peak_bytes and one.throughput >= other.throughput
    better = one.activation_peak_bytes < other.activation_peak_bytes or one.throughput > other.throughput
    return no_worse and better


# Numbers in words

_RATES: dict[Unit, dict[str, float]] = {
    "FLOP/s": {"FLOP/s": 1, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "tokens/s": {"tokens/s": 1, "ktokens/s": 1e3, "Mtokens/s": 1e6},
}


def rate_scale(largest: float, unit: Unit) -> tuple[str, float]:
    """The multiple of ``unit`` in which to show throughputs up to ``largest``, and its size."""
    return scale(largest, _RATES[unit])


def _percent(share: float) -> str:
    return f"{significant(100 * share)}%"


# Table, CSV, JSON


def table(points: Sequence[RokPoint]) -> FittedTable:
    """The points (at least one) as a table, by strategy; the Pareto set is starred."""
    winners = pareto(points)
    (peak_unit, peak_size), (speed_unit, speed_size) = _scales(points)
    ordered = [each for line in lines(points).values() for each in line]

    def column(heading: str, cell: Callable[[RokPoint], str], rank: int = 0) -> Column:
        return Column(heading, tuple(map(cell, ordered)), rank=rank)

    strategies, sources = [each.strategy for each in ordered], [each.source for each in ordered]
    columns = (
        Column("Strategy", tuple(strategies), "left", gives_way="shortened", least=_STRATEGY_WIDTH),
        column("Batch", lambda each: "?" if each.batch_size is None else str(each.batch_size), 1),
        column(f"Peak {peak_unit}", lambda each: significant(each.activation_peak_bytes / peak_size)),
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
    """The same table as Markdown, for files and pipes: nothing shortened, no colours."""
    return table(points).markdown()


def show(points: Sequence[RokPoint]) -> None:
    """Prints the table, the Pareto set and the advice."""
    winners = "; ".join(point.name for point in pareto(points))
    tables.show(table(points), f"Pareto set: {winners}.", *(f"- {sentence}" for sentence in advice(points)))


def _scales(points: Sequence[RokPoint]) -> tuple[tuple[str, float], tuple[str, float]]:
    largest = max(each.activation_peak_bytes for each in points)
    return byte_scale(largest), rate_scale(max(each.throughput for each in points), points[0].unit)


def _caption(points: Sequence[RokPoint]) -> str:
    work = "FLOPs, recomputation not counted," if points[0].unit == "FLOP/s" else "tokens"
    sources = " / ".join(peak_sources(points))
    return (
        f"Peak: largest activation peak of the counted steps, measured by: {sources}. "
        f"Step: median wall-clock time. Throughput: {work} of a step / median step time."
    )


def peak_sources(points: Iterable[RokPoint]) -> list[str]:
    """How the activation peaks were measured, each way once."""
    return list(dict.fromkeys(each.peak_source or "not stated" for each in points))


def rows(points: Sequence[RokPoint]) -> list[dict[str, object]]:
    """The points for programs, in plain units and in the order given."""
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
        }
        for each in points
    ]


def csv_text(points: Sequence[RokPoint]) -> str:
    """The points as CSV: a header line, then one line each; unknown values are empty.

    Text that a spreadsheet would take for a formula gets an apostrophe before it.
    """
    content = rows(points)
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(content[0]) if content else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in content)
    return file.getvalue()


def _cell(value: object) -> object:
    """A value as spreadsheets show it: text that begins like a formula stays text."""
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


# Advice


def advice(points: Sequence[RokPoint]) -> list[str]:
    """What the runs say, and what about them deserves doubt: sentences computed from the points alone."""
    return [
        *_at_equal_batch_size(points),
        *_more_in_the_same_memory(points),
        *_never_best(points),
        *_doubts(points),
    ]


def _at_equal_batch_size(points: Sequence[RokPoint]) -> Iterator[str]:
    for batch_size in sorted({each.batch_size for each in points if each.batch_size is not None}):
        group = [each for each in points if each.batch_size == batch_size]
        if len(lines(group)) > 1:
            yield _compared(batch_size, group)


def _compared(batch_size: int, group: Sequence[RokPoint]) -> str:
    lowest = min(group, key=lambda each: (each.activation_peak_bytes, -each.throughput))
    fastest = max(group, key=lambda each: (each.throughput, -each.activation_peak_bytes))
    peak = readable_size(lowest.activation_peak_bytes)
    if lowest is fastest:
        second = max((each for each in group if each is not lowest), key=lambda each: each.throughput)
        return (
            f"At batch size {batch_size}, {lowest.strategy} has both the lowest activation peak ({peak}) and "
            f"the highest throughput{_noise(lowest, second)}."
        )
    savers = [each for each in group if each.activation_peak_bytes < fastest.activation_peak_bytes]
    savings = "; ".join(_saving(each, fastest) for each in sorted(savers, key=lambda each: -each.throughput))
    most = readable_size(fastest.activation_peak_bytes)
    return (
        f"At batch size {batch_size}, {lowest.strategy} has the lowest activation peak ({peak}). "
        f"Against {fastest.strategy}, the fastest ({most}): {savings}."
    )


def _saving(saver: RokPoint, fastest: RokPoint) -> str:
    saved = 1 - saver.activation_peak_bytes / fastest.activation_peak_bytes
    share = saver.throughput / fastest.throughput
    noise = _noise(saver, fastest)
    return f"{saver.strategy} needs {_percent(saved)} less at {_percent(share)} of the throughput{noise}"


def _noise(one: RokPoint, other: RokPoint) -> str:
    (low, high), (other_low, other_high) = one.step_seconds_quartiles, other.step_seconds_quartiles
    if low <= other_high and other_low <= high:
        return f" (the step times overlap those of {other.strategy}: the difference may be noise)"
    return ""


def _more_in_the_same_memory(points: Sequence[RokPoint]) -> Iterator[str]:
    sized = [each for each in points if each.batch_size is not None]
    for line in lines(sized).values():
        largest = line[-1]
        fitting = [each for each in sized if _is_larger_and_fits(each, largest)]
        if fitting:
            best = max(fitting, key=lambda each: each.throughput)
            peaks = [readable_size(each.activation_peak_bytes) for each in (largest, best)]
            yield (
                f"Within the activation peak of {largest.name} ({peaks[0]}), "
                f"{best.strategy} fits batch size {best.batch_size} ({peaks[1]}), "
                f"at {_percent(best.throughput / largest.throughput)} of its throughput."
            )


def _is_larger_and_fits(each: RokPoint, largest: RokPoint) -> bool:
    return (
        each.strategy != largest.strategy
        and (each.batch_size or 0) > (largest.batch_size or 0)
        and each.activation_peak_bytes <= largest.activation_peak_bytes
    )


def _never_best(points: Sequence[RokPoint]) -> Iterator[str]:
    winners = {each.strategy for each in pareto(points)}
    for strategy in lines(points):
        if strategy not in winners:
            yield (
                f"No run of {strategy} is in the Pareto set: for each, another run needs no more memory and "
                "is no slower."
            )


def _doubts(points: Sequence[RokPoint]) -> Iterator[str]:
    if len(lines(points)) == 1:
        yield "Only one strategy was measured: add runs with other placements to compare."
    few = [each.name for each in points if each.steps < _FEW_STEPS]
    if few:
        yield f"Fewer than {_FEW_STEPS} steps counted for {', '.join(few)}: run longer to trust the times."
    late = [each.name for each in points if not each.gradients_allocated]
    if late:
        yield (
            f"Gradients did not exist yet when the base was read for {', '.join(late)}: "
            "their memory counts as activations there."
        )
    if len(peak_sources(points)) > 1:
        ways = " / ".join(peak_sources(points))
        yield f"The activation peaks were measured in different ways ({ways}): compare them with care."
    for what in ("model", "hardware"):
        if len({getattr(each, what) for each in points}) > 1:
            yield f"The runs are not all of one {what}: compare only those that are."


# Picture


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
    """The kind of picture that the suffix of ``path`` asks for.

    Raises:
        ConfigError: It is neither .svg nor .png.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        return "svg"
    if suffix == ".png":
        return "png"
    raise ConfigError(f"{path}: a picture's name must end in .svg or .png")


def require_matplotlib() -> None:
    """Checks that pictures can be drawn, for those who want to know before they work for hours.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: F401 - whether it can be imported is the question
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise MissingDependencyError("matplotlib", "drawing a ROK curve", extra="plots") from error
