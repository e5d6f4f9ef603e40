"""The run log: its records, reading, writing, and the one rule of which steps count for figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.report.curves import CURVES, FIGURES, MAIN_CURVES, PREFIX, curves_of
from tba_offload.report.damage import Bytes, Flag, Number, Seconds, Word
from tba_offload.report.damage import checked as read_event
from tba_offload.report.log_reader import read_run_log
from tba_offload.report.log_writer import RunLogWriter
from tba_offload.report.memory_event import HeldBytes, MemoryEvent, PhasePeak, StaticBytes
from tba_offload.report.plan_event import _Plan as PlanEvent
from tba_offload.report.run_log import MEMORY, PLAN, SCHEMA, TIMELINE, Json, RunHeader, RunLog, StepRecord
from tba_offload.report.step_line import describe_step
from tba_offload.report.timeline_event import (
    HOST,
    STATES,
    WEIGHTS,
    Moment,
    Move,
    Phase,
    ScopeTimes,
    TimelineEvent,
    prefix_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CURVES",
    "FIGURES",
    "HOST",
    "MAIN_CURVES",
    "MEMORY",
    "PLAN",
    "PREFIX",
    "SCHEMA",
    "STATES",
    "TIMELINE",
    "WEIGHTS",
    "Bytes",
    "Flag",
    "HeldBytes",
    "Json",
    "MemoryEvent",
    "Moment",
    "Move",
    "Number",
    "Phase",
    "PhasePeak",
    "PlanEvent",
    "RunHeader",
    "RunLog",
    "RunLogWriter",
    "ScopeTimes",
    "Seconds",
    "StaticBytes",
    "StepRecord",
    "TimelineEvent",
    "Word",
    "counted_steps",
    "curves_of",
    "describe_step",
    "measured_steps",
    "prefix_of",
    "read_event",
    "read_run_log",
    "timed_steps",
    "warm_up_steps",
]


# Which steps count for figures. A peak is the largest of `measured_steps(counted_steps(log))`, and a time the
# median of `timed_steps(counted_steps(log))`, in every command and picture.


def warm_up_steps(total: int) -> int:
    """Return how many steps at the start of a run of ``total`` steps count for no figure.

    Three of more than six, one of two to six, none of one: the first step allocates, the next settle.
    """
    if total > 6:
        return 3
    return 1 if total > 1 else 0


def counted_steps(log: RunLog, warm_up: int | None = None) -> list[StepRecord]:
    """Return the steps of a run that count for figures: after warm-up, and with an update.

    Args:
        log: The run.
        warm_up: Steps to leave out at the start. Default: :func:`warm_up_steps`.
    """
    late = log.steps[warm_up_steps(len(log.steps)) if warm_up is None else warm_up :]
    return [step for step in late if not step.skipped]


def timed_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps whose times count: without those that measured memory, if others are left."""
    return [step for step in steps if step.activation_peak_bytes is None] or list(steps)


def measured_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps that measured the peak of activations."""
    return [step for step in steps if step.activation_peak_bytes is not None]
