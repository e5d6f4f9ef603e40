"""One step of a run over time: as a picture, and as a trace that Perfetto and Chrome open."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_offload.errors import ConfigError, RunLogError
from tba_offload.report.rok import require_matplotlib
from tba_offload.report.run_log import TIMELINE
from tba_offload.report.timeline_event import checked_timeline
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from tba_offload.report.run_log import RunLog
    from tba_offload.report.timeline_event import TimelineEvent

_PROCESS = 1
_LAYERS, _WAITS = 1, 2
"""Rows of the trace."""


def timelines(log: RunLog) -> list[TimelineEvent]:
    """The steps that a log tells over time, in their order."""
    return [checked_timeline(event) for event in log.others if event["event"] == TIMELINE]


def timeline_of(log: RunLog, step: int | None = None) -> TimelineEvent:
    """One of them.

    Args:
        log: The run.
        step: Its number; ``None`` for the last one.

    Raises:
        RunLogError: It is not among them.
    """
    found = timelines(log)
    if not found:
        raise RunLogError(
            f"{log.path}: no step is told over time; the third is, and the 16th, the 64th and so on, where "
            "memory is measured"
        )
    chosen = found[-1:] if step is None else [each for each in found if each.step == step]
    if not chosen:
        known = ", ".join(str(each.step) for each in found)
        raise RunLogError(f"{log.path}: step {step} is not told over time; those that are: {known}")
    return chosen[0]


def kind_of_timeline(path: str | os.PathLike[str]) -> str:
    """What is to be written, by its suffix.

    Raises:
        ConfigError: It is neither .svg nor .json.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in {".svg", ".json"}:
        raise ConfigError(f"{path}: a timeline's name must end in .svg, for a picture, or .json, for a trace")
    return suffix[1:]


def write_timeline(timeline: TimelineEvent, path: str | os.PathLike[str]) -> None:
    """Writes a picture or a trace.

    Args:
        timeline: The step.
        path: The file, by whose suffix it is chosen.

    Raises:
        ConfigError: Another suffix.
        MissingDependencyError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    if kind_of_timeline(path) == "json":
        write_regular(path, json.dumps(trace_of(timeline)).encode())
        return
    require_matplotlib("drawing a timeline")
    from tba_offload.report.charts import plain_svg
    from tba_offload.report.timeline_chart import timeline_svg

    write_regular(path, plain_svg(timeline_svg(timeline, salt="timeline")))


def trace_of(timeline: TimelineEvent) -> dict[str, Any]:
    """The step in the trace format of Chrome: rows of layers and waits, counters of memory and traffic."""
    events = [*_names(timeline), *_runs(timeline), *_waits(timeline), *_counters(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(kind: str, name: str, row: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": _PROCESS, "tid": row, "ts": seconds * 1e6, **more}


def _names(timeline: TimelineEvent) -> Iterator[dict[str, Any]]:
    named = {"name": f"tba-offload, step {timeline.step}"}
    yield _event("M", "process_name", 0, 0, args=named)
    for row, name in ((_LAYERS, "layers"), (_WAITS, "waits for I/O")):
        yield _event("M", "thread_name", row, 0, args={"name": name})


def _runs(timeline: TimelineEvent) -> Iterator[dict[str, Any]]:
    for what, runs in (("forward", timeline.forwards()), ("backward", timeline.backwards())):
        for scope, began, ended in runs:
            name = f"{what} {timeline.names[scope.layer]}"
            told = {"layer": scope.layer, "micro_batch": scope.micro_batch}
            yield _event("X", name, _LAYERS, began, dur=(ended - began) * 1e6, cat=what, args=told)


def _waits(timeline: TimelineEvent) -> Iterator[dict[str, Any]]:
    for since, until in timeline.stalls:
        yield _event("X", "wait", _WAITS, since, dur=max(until - since, 0) * 1e6, cat="wait")


def _counters(timeline: TimelineEvent) -> Iterator[dict[str, Any]]:
    for point in timeline.points:
        held = {"live": point.live, "in flight": point.in_flight, "read ahead": point.read_ahead}
        yield _event("C", "memory (bytes)", 0, point.seconds, args=held)
    for before, after in pairwise(timeline.points):
        span = after.seconds - before.seconds
        if span > 0:
            rates = {
                "written": (after.written - before.written) / span,
                "read": (after.read - before.read) / span,
            }
            yield _event("C", "traffic (bytes/s)", 0, before.seconds, args=rates)
