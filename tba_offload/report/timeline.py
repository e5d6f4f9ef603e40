"""One step of a run over time: as a picture, and as a trace that Perfetto and Chrome open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_offload.errors import ConfigError, RunLogError
from tba_offload.report.log import TimelineEvent
from tba_offload.report.rok import require_matplotlib
from tba_offload.report.timeline_trace import Trace
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    import os

    from tba_offload.report.log import RunLog


def timelines(log: RunLog) -> list[TimelineEvent]:
    """Return the steps that a log tells over time, in their order."""
    return log.events(TimelineEvent)


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
            "memory is measured, and each of session.step(trace=True)"
        )
    chosen = found[-1:] if step is None else [each for each in found if each.step == step]
    if not chosen:
        known = ", ".join(str(each.step) for each in found)
        raise RunLogError(f"{log.path}: step {step} is not told over time; those that are: {known}")
    return chosen[0]


def kind_of_timeline(path: str | os.PathLike[str]) -> str:
    """Return what is to be written, by its suffix.

    Raises:
        ConfigError: It is neither .svg nor .json.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in {".svg", ".json"}:
        raise ConfigError(f"{path}: a timeline's name must end in .svg, for a picture, or .json, for a trace")
    return suffix[1:]


def write_timeline(timeline: TimelineEvent, path: str | os.PathLike[str]) -> None:
    """Write a picture or a trace.

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
    """Return the step in the trace event format, which begins at zero."""
    trace = Trace(1)
    trace.name(f"tba-offload, step {timeline.step}")
    trace.add(timeline)
    return {"traceEvents": trace.events, "displayTimeUnit": "ms"}
