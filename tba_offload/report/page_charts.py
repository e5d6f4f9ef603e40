"""The charts of a run's page. Imports matplotlib, so import this module only to draw."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.report.charts import MOST_POINTS, Series, Stack, over_steps, stacked
from tba_offload.report.timeline import timelines
from tba_offload.report.timeline_chart import timeline_svg

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tba_offload.report.evidence import Evidence, Phase
    from tba_offload.report.log import RunLog


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of a page.

    Attributes:
        title: What it shows, in some words.
        caption: What is to be known of it.
        svg: The picture.
    """

    title: str
    caption: str
    svg: str


def charts(log: RunLog, salt: str) -> Iterator[Chart]:
    """Memory, traffic, time and loss over the steps of a run.

    Args:
        log: The run.
        salt: Makes names in the pictures unique on the page.
    """
    for name, draw in (("memory", _memory), ("traffic", _traffic), ("time", _time), ("loss", _loss)):
        chart = draw(log, f"{salt} {name}")
        if chart is not None:
            yield chart


def _lines(
    log: RunLog, title: str, caption: str, series: Sequence[Series], salt: str, **options: Any
) -> Chart | None:
    """Return a chart over steps.

    None where nothing would be in it, as the traffic of a run that keeps all.
    """
    if not any(each.is_drawn for each in series):
        return None
    return Chart(title, caption, over_steps(_numbers(log), series, salt=salt, label=title, **options))


def _values(log: RunLog, name: str) -> list[float | None]:
    return [getattr(step, name) for step in log.steps]


def _numbers(log: RunLog) -> list[int]:
    return [step.step for step in log.steps]


def _binned(log: RunLog, what: str) -> str:
    """Return what a point stands for, where there are fewer points than steps."""
    return f" A point is the {what} of several steps." if len(log.steps) > MOST_POINTS else ""


def _memory(log: RunLog, salt: str) -> Chart | None:
    series = [
        Series("measured peak", _values(log, "activation_peak_bytes"), 0),
        Series("predicted peak", _values(log, "predicted_peak_bytes"), 1, 1),
        Series("known to the offloader", _values(log, "own_peak_bytes"), 2, 2),
        Series("in flight at most", _values(log, "in_flight_peak_bytes"), 3, 3),
        Series("allowed", _values(log, "activation_budget_bytes"), 4, 1),
    ]
    title = "Activations in memory over steps"
    caption = (
        "Peaks in each step. Between the measured peak and what the offloader knows of lie layers that keep "
        "or recompute, logits and loss, and what one layer works with." + _binned(log, "largest")
    )
    return _lines(log, title, caption, series, salt)


def _traffic(log: RunLog, salt: str) -> Chart | None:
    series = [
        Series("written", _values(log, "offloaded_bytes"), 1),
        Series("read", _values(log, "read_bytes"), 0, 1),
        Series("used without a read", _values(log, "forwarded_bytes"), 2, 2),
        Series("kept, not as planned", _values(log, "fallback_kept_bytes"), 3, 3),
        Series("frozen weights read", _values(log, "weights_read_bytes"), 4, 4),
    ]
    title = "Traffic over steps"
    caption = (
        "Bytes of activations and frozen weights in each step. Lines that are zero throughout are left out."
        + _binned(log, "largest")
    )
    return _lines(log, title, caption, series, salt)


def _time(log: RunLog, salt: str) -> Chart | None:
    series = [
        Series("step", _values(log, "seconds"), 0),
        Series("predicted", _values(log, "predicted_seconds"), 1, 1),
        Series("of it waits for I/O", _values(log, "stall_seconds"), 3, 2),
        Series("of it waits for frozen weights", _values(log, "weights_waited_seconds"), 4, 4),
        Series("optimizer", _values(log, "optimizer_seconds"), 2, 3),
    ]
    title = "Time over steps"
    caption = "Seconds by the host's clock. The optimizer's time is not part of the step's." + _binned(
        log, "median"
    )
    return _lines(log, title, caption, series, salt, unit="s", of_bin=statistics.median)


def _loss(log: RunLog, salt: str) -> Chart | None:
    series = [Series("loss", _values(log, "loss"), 0)]
    caption = "As the program told it; the axis need not begin at zero." + _binned(log, "median")
    return _lines(
        log,
        "Loss over steps",
        caption,
        series,
        salt,
        unit="loss",
        of_bin=statistics.median,
        from_zero=False,
    )


def step_over_time(log: RunLog, salt: str) -> Chart | None:
    """Return the last step that the log tells over time; ``None`` if there is none."""
    told = timelines(log)[-1:]
    if not told:
        return None
    title = f"Step {told[0].step} over time"
    caption = (
        "Above, live bytes beyond those before the step, and those in flight; then what moved; then "
        "the runs of layers, with their numbers, and when training waited for I/O. By the host's clock: "
        "the device may do the same work later. tba-offload timeline writes the same as a trace."
    )
    return Chart(title, caption, timeline_svg(told[0], salt=salt))


# Memory by holder

PARTS: dict[str, tuple[str, ...]] = {
    "model": ("parameters", "frozen", "buffers", "tables"),
    "gradients": ("gradients",),
    "optimizer states": ("states", "masters"),
    "whatever else lasts": ("caches", "others"),
    "in flight": ("in_flight", "read_ahead"),
    "kept activations": ("settled", "small", "kept"),
    "inputs and outputs": ("inputs", "outputs", "put_out", "beside"),
    "working set, logits": ("running",),
    "store in memory": ("store",),
}
"""Parts of a bar, and the holders that each is made of."""


_LEAST_PART = 0.005
"""Share of the peak that a part takes at least to be drawn and named: smaller ones cannot be seen."""


def holders(evidence: Evidence, salt: str) -> Chart:
    """Return the peak of each phase by what holds it."""
    parts = {
        name: number
        for number, (name, of) in enumerate(PARTS.items())
        if any(phase.of(*of) > _LEAST_PART * evidence.peak.nbytes for phase in evidence.phases)
    }
    stacks = [Stack(phase.name, _sizes(phase, parts)) for phase in evidence.phases]
    title = f"Memory at the peak of each phase of step {evidence.step.step}"
    caption = (
        "Working set is what the layer that runs needs at once; after the last layer it is logits and loss, "
        "before the first one and after its backward embeddings, in the update what the optimizer works with."
    )
    return Chart(title, caption, stacked(stacks, parts, salt=salt, label=title))


def _sizes(phase: Phase, parts: Iterable[str]) -> list[float]:
    return [float(phase.of(*PARTS[name])) for name in parts]
