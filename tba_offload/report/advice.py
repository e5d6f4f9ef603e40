"""Advice: what several runs say about each other, and what about them deserves doubt, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.formatting import readable_size, significant
from tba_offload.report.points import lines, pareto, peak_sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.report.points import RokPoint

_FEW_STEPS = 3


def advice(points: Sequence[RokPoint]) -> list[str]:
    """Return what the runs say, and what about them deserves doubt.

    Sentences computed from the points alone.
    """
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
    lowest = min(group, key=lambda each: (each.peak_bytes, -each.throughput))
    fastest = max(group, key=lambda each: (each.throughput, -each.peak_bytes))
    peak = readable_size(lowest.peak_bytes)
    if lowest is fastest:
        second = max((each for each in group if each is not lowest), key=lambda each: each.throughput)
        return (
            f"At batch size {batch_size}, {lowest.strategy} has both the lowest {lowest.peak_name} ({peak}) "
            f"and the highest throughput{_noise(lowest, second)}."
        )
    savers = [each for each in group if each.peak_bytes < fastest.peak_bytes]
    savings = "; ".join(_saving(each, fastest) for each in sorted(savers, key=lambda each: -each.throughput))
    most = readable_size(fastest.peak_bytes)
    return (
        f"At batch size {batch_size}, {lowest.strategy} has the lowest {lowest.peak_name} ({peak}). "
        f"Against {fastest.strategy}, the fastest ({most}): {savings}."
    )


def _saving(saver: RokPoint, fastest: RokPoint) -> str:
    saved = 1 - saver.peak_bytes / fastest.peak_bytes
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
            peaks = [readable_size(each.peak_bytes) for each in (largest, best)]
            yield (
                f"Within the {largest.peak_name} of {largest.name} ({peaks[0]}), "
                f"{best.strategy} fits batch size {best.batch_size} ({peaks[1]}), "
                f"at {_percent(best.throughput / largest.throughput)} of its throughput."
            )


def _is_larger_and_fits(each: RokPoint, largest: RokPoint) -> bool:
    return (
        each.strategy != largest.strategy
        and (each.batch_size or 0) > (largest.batch_size or 0)
        and each.peak_bytes <= largest.peak_bytes
    )


def _never_best(points: Sequence[RokPoint]) -> Iterator[str]:
    winners = {each.strategy for each in pareto(points)}
    for strategy in lines(points):
        if strategy not in winners:
            yield (
                f"No run of {strategy} is in the Pareto set: for each, another run has no higher "
                f"{points[0].peak_name} and is no slower."
            )


def _doubts(points: Sequence[RokPoint]) -> Iterator[str]:
    if len(lines(points)) == 1:
        yield "Only one strategy was measured: add runs with other placements to compare."
    few = [each.name for each in points if each.steps < _FEW_STEPS]
    if few:
        yield f"Fewer than {_FEW_STEPS} steps counted for {', '.join(few)}: run longer to trust the times."
    of_activations = [each for each in points if each.memory == "activations"]
    late = [each.name for each in of_activations if not each.gradients_allocated]
    if late:
        yield (
            f"Gradients did not exist yet when the base was read for {', '.join(late)}: "
            "their memory counts as activations there."
        )
    states = [each.name for each in of_activations if each.offloads_states]
    if states and all(each.device_peak_bytes is not None for each in points):
        yield (
            f"Optimizer states were offloaded in {', '.join(states)}, and the activation peak does not count "
            "them: --memory device compares all that lies on the device."
        )
    others_count = any(each.counts_update for each in points)
    silent = [each for each in points if not each.counts_update and (others_count or each.offloads_states)]
    if silent:
        yield f"The update is not in the time of a step of {', '.join(each.name for each in silent)}."
    if len(peak_sources(points)) > 1:
        ways = " / ".join(peak_sources(points))
        yield f"The {points[0].peak_name}s were measured in different ways ({ways}): compare them with care."
    for what in ("model", "hardware"):
        if len({getattr(each, what) for each in points}) > 1:
            yield f"The runs are not all of one {what}: compare only those that are."


def _percent(share: float) -> str:
    return f"{significant(100 * share)}%"
