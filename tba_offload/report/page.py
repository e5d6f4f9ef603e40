"""HTML report, with the pictures and tables of the other commands in one file.

The template escapes all text from run logs. The HTML page allows neither scripts nor network requests.
"""

from __future__ import annotations

import base64
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from tba_offload.errors import RunLogError, required
from tba_offload.formatting import BYTES, grouped, scale, visible
from tba_offload.report import rok
from tba_offload.report.log import MemoryEvent
from tba_offload.report.text import Table
from tba_offload.report.timeline import TimelineEvent, ends_of, timeline_figure
from tba_offload.report.why import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tba_offload.report.log import RunLog


def _picture(figure: Figure, says: str) -> dict[str, str]:
    content = base64.b64encode(rok.rendered(figure, "svg")).decode()
    return {"source": f"data:image/svg+xml;base64,{content}", "says": says}


def page(logs: Sequence[RunLog]) -> bytes:
    """Return the report page as the bytes of an HTML file.

    Args:
        logs: The run logs, at least one.

    Raises:
        RunLogError: A run log has no step.
        MissingDependencyError: Jinja2 or matplotlib is not installed.
    """
    from tba_offload import __version__

    with required("jinja2", "writing a report", extra="report"):
        from jinja2 import Environment, StrictUndefined
    source = resources.files("tba_offload.report").joinpath("templates", "page.html.j2").read_text("utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(source)
    names = _names(logs)
    with rok.drawing():
        timelines = [log.events(TimelineEvent)[-1:] for log in logs]
        ends = [max(each) for each in zip(*(ends_of(last[0]) for last in timelines if last), strict=True)]
        runs = [_run(*each, ends) for each in zip(logs, names, timelines, strict=True)]
        curve, summary = _comparison(logs)
        content = template.render(
            version=__version__,
            title=f"{len(logs)} runs compared" if len(logs) > 1 else f"Run: {names[0]}",
            curve=curve,
            summary=summary,
            steps=_picture(_steps_figure(logs, names), "Figures of every step of each run."),
            runs=runs,
        )
    return content.encode()


def _names(logs: Sequence[RunLog]) -> list[str]:
    names = [visible(log.header.strategy) for log in logs]
    if len(set(names)) == len(logs):
        return names
    return [f"{name}, {visible(log.path.stem[-24:])}" for name, log in zip(names, logs, strict=True)]


def _comparison(logs: Sequence[RunLog]) -> tuple[dict[str, str] | None, list[Table | str]]:
    try:
        points = rok.points_of(logs)
    except RunLogError as error:  # for example, a run without tokens
        return None, [f"No ROK curve can be drawn: {error}"]
    if len(points) == 1:
        return None, [rok.table(points)]
    return _picture(rok.rok_figure(points), "Left means less memory. Up means faster."), rok.summary(points)


def _run(log: RunLog, name: str, timeline: list[TimelineEvent], ends: Sequence[float]) -> dict[str, Any]:
    says = "Timeline of one step. All runs on this page have the same axes."
    return {
        "name": name,
        "about": visible(log.header.title),
        "why": Diagnosis.of(log).parts(),
        "timeline": _picture(timeline_figure(timeline[0], ends), says) if timeline else None,
        "layers": _layers(log),
        "settings": Table(("Setting", "Value"), list(_settings(log))),
        "policy": "\n".join(map(visible, (log.header.policy or "").splitlines())),
    }


def _layers(log: RunLog) -> Table | None:
    last = log.events(MemoryEvent)[-1:]
    now = dict(zip(last[0].names, last[0].placements, strict=True)) if last else {}
    placed: Any = log.header.plan
    looks = [(entry["placement"], now.get(name, ""), entry["why"]) for name, entry in placed.items()]
    rows = [(group.name, *looks[group.first]) for group in grouped(list(placed), looks)]
    return Table(("Layers", "Placement", "Last step", "Reason"), rows) if rows else None


def _settings(log: RunLog) -> Iterator[tuple[str, str]]:
    yield from (("log", str(log.path)), ("started", log.header.started))
    for name in ("model", "hardware", "versions", "store"):
        for key, value in getattr(log.header, name).items():
            yield f"{name}: {key}", value if isinstance(value, str) else json.dumps(value)


# Steps

_PANELS = (
    ("Activation peak (dashed: predicted)", "activation_peak_bytes", "predicted_peak_bytes"),
    ("Written (dashed: read)", "offloaded_bytes", "read_bytes"),
    ("Step time without update (dashed: stall)", "seconds", "stall_seconds"),
    ("Loss", "loss"),
)
"""Title of each panel, with the fields of the solid line and of the dashed line."""


def _steps_figure(logs: Sequence[RunLog], names: Sequence[str]) -> Figure:
    """Return a figure of memory, transfers, time and loss over the steps, with one line for each run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = [panel for panel in _PANELS if any(_values(log, panel[1]) for log in logs)]
    figure = Figure(figsize=(rok.WIDTH, 1.0 + 1.9 * len(shown)), layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(shown), 1, sharex=True, squeeze=False).flat)
    looks = rok.looks(log.header.strategy for log in logs)
    for axes, (title, *fields) in zip(panels, shown, strict=True):
        values = [each for log in logs for field in fields for each in _values(log, field).values()]
        unit, size = scale(max(values), BYTES) if "bytes" in fields[0] else ("s" * (title != "Loss"), 1.0)
        for number, (log, name) in enumerate(zip(logs, names, strict=True)):
            colour, *_ = looks[log.header.strategy]  # as in the ROK curve. Each run has its own marker.
            for field, line in zip(fields, ("-", "--"), strict=False):
                found = {step: value / size for step, value in _values(log, field).items()}
                marker: dict[str, Any] = {"marker": "osv^Dd<>"[number % 8], "markersize": 4}
                label = rok.short(name, 36) if line == "-" and axes is panels[0] else None
                axes.plot(list(found), list(found.values()), line, color=colour, label=label, **marker)
        rok.finish(axes, unit, title, from_zero=title != "Loss")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[-1].set(xlabel="step", xlim=(0, None))
    figure.legend(loc="outside upper left", ncols=2, fontsize="small")
    return figure


def _values(log: RunLog, field: str) -> dict[int, float]:
    """Return the known values of a record field by step number."""
    known = ((step.step, getattr(step, field)) for step in log.steps)
    return {number: value for number, value in known if value is not None}
