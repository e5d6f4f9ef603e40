"""Points of ROK curves: what one run costs in memory and in speed, read from its log.

One run is one point: its peak of memory and its model throughput. One strategy is one line, through its
batch sizes. The runs that no other run beats in both are the Pareto set.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from tba_offload.errors import ConfigError, RunLogError
from tba_offload.formatting import scale
from tba_offload.report.ranks import read_runs

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from tba_offload.report.log import RunLog, StepRecord

Unit = Literal["FLOP/s", "tokens/s"]

Memory = Literal["activations", "device"]
"""Bytes that runs are compared by: of activations, or all on the device, optimizer states among them."""

_FIELDS: dict[Memory, str] = {"activations": "activation_peak_bytes", "device": "device_peak_bytes"}
_PEAKS: dict[Memory, str] = {"activations": "activation peak", "device": "device peak"}

_LEAST_SECONDS, _MOST, _MOST_WORK = 1e-9, 1e18, 1e30
"""No step takes less time, needs more bytes or does more work; quotients of such figures would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RokPoint:
    """One run on a ROK curve.

    Attributes:
        strategy: The run's label; points with equal labels form a line.
        batch_size: Sequences a step; None where the log's model does not say.
        memory: What the point is compared by.
        activation_peak_bytes: The largest activation peak that a counted step measured, bytes; None where the
            log tells none and the point is not compared by it.
        device_peak_bytes: The most live bytes of the device, weights and gradients included, while forward
            and backward ran; on a CPU those of the process. None likewise.
        throughput: Work of a step (median) divided by the median step time, in ``unit``.
        unit: ``"FLOP/s"``: algorithmic operations, recomputation not counted; or ``"tokens/s"``.
        step_seconds: Median time of the counted steps, updates included, see :func:`point`.
        step_seconds_quartiles: Lower and upper quartile of those times.
        steps: How many times were counted.
        source: The run log.
        peak_source: How the peak that it is compared by was measured; None where the log does not say.
        gradients_allocated: Whether, in every counted step, gradients existed before the base was read, or
            their memory was counted apart. If not, it is part of the peak.
        offloads_states: Whether optimizer states were offloaded.
        counts_update: Whether the time of a step has the update in it: not where none was seen, nor in logs
            of earlier versions whose updates came after the step.
        model: The model, its batch size left out, as JSON: equal where runs can be compared.
        hardware: The machine as JSON, likewise.
    """

    strategy: str
    batch_size: int | None
    activation_peak_bytes: int | None
    throughput: float
    unit: Unit
    step_seconds: float
    step_seconds_quartiles: tuple[float, float]
    steps: int
    source: str
    memory: Memory = "activations"
    device_peak_bytes: int | None = None
    peak_source: str | None = None
    gradients_allocated: bool = True
    offloads_states: bool = False
    counts_update: bool = True
    model: str = "{}"
    hardware: str = "{}"

    @property
    def peak_bytes(self) -> int:
        """The peak that the point is compared by."""
        peaks = {"activations": self.activation_peak_bytes, "device": self.device_peak_bytes}
        return peaks[self.memory] or 0

    @property
    def peak_name(self) -> str:
        """It in words."""
        return _PEAKS[self.memory]

    @property
    def name(self) -> str:
        """The point in words, such as ``"offload at batch size 8"``."""
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
    """Read run logs, one point a run, all with the same unit of throughput.

    The unit is FLOP/s where every log has FLOPs, else tokens/s.

    Args:
        paths: The run logs; those of the ranks of one run give one point, see
            :func:`tba_offload.report.ranks.merged`.
        memory: What they are compared by.
        warmup: Steps to skip at the start of each, see :func:`point`.
        left_out: Called with a sentence for each run without a step, as one that failed at once, if others
            have some; without it these are errors.

    Raises:
        RunLogError: A log cannot be read or lacks what a point needs.
        ConfigError: ``warmup`` is negative.
    """
    logs = read_runs(paths)
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
    return [point(log, memory=memory, warmup=warmup, unit=common[0]) for log in logs]


def point(
    run_log: RunLog,
    *,
    memory: Memory = "activations",
    warmup: int | None = None,
    unit: Unit | None = None,
) -> RokPoint:
    """Make one point of a run.

    The first steps are skipped: caches, the allocator and the plan are still warming up. Of the others, the
    peak is the *largest* (that is what has to fit in memory), and the throughput comes from the
    *median* step time (one hiccup of the machine must not count). If memory was measured in some of them
    only, the times come from the others: measuring may cost time. A step takes as long as its forward,
    backward and update; the last is not known of programs that update weights without an optimizer. Steps
    whose gradients were dropped without an update, as by a gradient scaler, count in neither.

    Args:
        run_log: The run.
        memory: What it is compared by.
        warmup: How many steps to skip. Default: 2 of more than 4 steps, 1 of two to four, 0 of one.
        unit: The unit of throughput. Default: FLOP/s where every counted step has FLOPs, else tokens/s.

    Raises:
        RunLogError: No step is left, no such peak was measured, or neither FLOPs nor tokens are known.
        ConfigError: ``warmup`` is negative.
    """
    steps = _counted(run_log, warmup)
    known = _units(run_log.path, steps)
    unit = unit or known[0]
    if unit not in known:
        raise RunLogError(f"{run_log.path}: {unit} cannot be told; only {' and '.join(known)} can")
    peak, peak_source = _peak(run_log.path, steps, memory)
    peaks = {each: _largest(steps, each) for each in get_args(Memory)} | {memory: peak}
    timed = _timed(steps)
    seconds = [step.seconds_with_update for step in timed]
    median = statistics.median(seconds)
    header = run_log.header
    return RokPoint(
        strategy=header.strategy,
        batch_size=_batch_size(header.model.get("batch_size")),
        memory=memory,
        activation_peak_bytes=peaks["activations"],
        device_peak_bytes=peaks["device"],
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
        offloads_states=any(event.get("event") == "states" for event in run_log.others),
        counts_update=any(step.optimizer_seconds is not None for step in timed),
        model=_canonical({key: value for key, value in header.model.items() if key != "batch_size"}),
        hardware=_canonical(header.hardware),
    )


def peak_and_seconds(run_log: RunLog) -> tuple[int, float] | None:
    """Activation peak in bytes and median seconds of a step without its update; ``None`` if not known."""
    try:
        steps = _counted(run_log, None)
        peak, _ = _peak(run_log.path, steps, "activations")
    except RunLogError:
        return None
    return peak, statistics.median(step.seconds for step in _timed(steps))


def _counted(run_log: RunLog, warmup: int | None) -> Sequence[StepRecord]:
    if warmup is not None and warmup < 0:
        raise ConfigError(f"warmup must be 0 or more steps, and is {warmup}")
    total = len(run_log.steps)
    warmup = warmup if warmup is not None else warmup_of(total)
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
    """Return the steps whose time counts."""
    return [step for step in steps if step.activation_peak_bytes is None] or steps


def warmup_of(steps: int) -> int:
    """How many of the steps of a run are warm-up, unless the user says so."""
    if steps > 4:
        return 2
    return 1 if steps > 1 else 0


def _work(steps: Sequence[StepRecord], unit: Unit) -> list[float]:
    """Return the work of each step that tells it, in the unit's numerator."""
    work = [step.model_flops if unit == "FLOP/s" else step.tokens for step in steps]
    return [amount for amount in work if amount is not None and 0 < amount < _MOST_WORK]


def _units(path: Path, steps: Sequence[StepRecord]) -> list[Unit]:
    """Return the units in which every one of the steps tells its work, the better one first."""
    units = [unit for unit in get_args(Unit) if len(_work(steps, unit)) == len(steps)]
    if not units:
        raise RunLogError(f"{path}: no throughput, because some steps tell neither model_flops nor tokens")
    return units


def _largest(steps: Sequence[StepRecord], memory: Memory) -> int | None:
    """Return the largest peak in bytes; ``None`` if none was measured."""
    return max((peak for step in steps if (peak := getattr(step, _FIELDS[memory])) is not None), default=None)


def _peak(path: Path, steps: Sequence[StepRecord], memory: Memory) -> tuple[int, str | None]:
    """Return the largest peak, in bytes, and how it was measured."""
    peak = _largest(steps, memory)
    if peak is None:
        raise RunLogError(f"{path}: no {_PEAKS[memory]} was measured in the {len(steps)} counted steps")
    source = next(step.peak_source for step in steps if getattr(step, _FIELDS[memory]) == peak)
    if not 0 <= peak < _MOST:
        raise RunLogError(f"{path}: the {_PEAKS[memory]} is {peak} bytes; is the log damaged?")
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


def lines(points: Iterable[RokPoint]) -> dict[str, list[RokPoint]]:
    """Return the points of each strategy by batch size; strategies in the order in which they first come."""
    grouped: dict[str, list[RokPoint]] = defaultdict(list)
    for each in points:
        grouped[each.strategy].append(each)
    return {strategy: sorted(group, key=_along_the_line) for strategy, group in grouped.items()}


def _along_the_line(point: RokPoint) -> tuple[bool, int, int]:
    return point.batch_size is None, point.batch_size or 0, point.peak_bytes


def pareto(points: Iterable[RokPoint]) -> list[RokPoint]:
    """Return the points that no other beats, by their peaks.

    A point beats another if it needs no more memory and is no slower, and is better in one of the two.
    """
    candidates = sorted(points, key=lambda each: each.peak_bytes)
    return [each for each in candidates if not any(_beats(other, each) for other in candidates)]


def _beats(one: RokPoint, other: RokPoint) -> bool:
    no_worse = one.peak_bytes <= other.peak_bytes and one.throughput >= other.throughput
    better = one.peak_bytes < other.peak_bytes or one.throughput > other.throughput
    return no_worse and better


def peak_sources(points: Iterable[RokPoint]) -> list[str]:
    """How the peaks were measured, each way once."""
    return list(dict.fromkeys(each.peak_source or "not stated" for each in points))


_RATES: dict[Unit, dict[str, float]] = {
    "FLOP/s": {"FLOP/s": 1, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "tokens/s": {"tokens/s": 1, "ktokens/s": 1e3, "Mtokens/s": 1e6},
}


def rate_scale(largest: float, unit: Unit) -> tuple[str, float]:
    """Return the multiple of ``unit`` in which to show throughputs up to ``largest``, and its size."""
    return scale(largest, _RATES[unit])
