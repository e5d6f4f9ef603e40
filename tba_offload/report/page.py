"""One page for runs: everything that their logs tell, in one file that asks nothing of a network.

All that a log holds is text to the page: the template escapes it, pictures do not draw it, and the page
itself forbids scripts and requests.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from tba_offload.errors import MissingDependencyError
from tba_offload.formatting import readable_size, significant, visible
from tba_offload.report.digest import Digest, faults, settings
from tba_offload.report.endurance import endurance
from tba_offload.report.page_layers import layers_table
from tba_offload.report.plans import title_of
from tba_offload.report.rok import require_matplotlib
from tba_offload.report.tables import Column, FittedTable
from tba_offload.report.why import Diagnosis, holders_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.report.log import RunLog
    from tba_offload.report.page_charts import Chart

_UNKNOWN = "not known"

_TIMES = "predicted_seconds", "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnPage:
    """What a page says of one run; see the template."""

    name: str
    about: str
    cards: list[tuple[str, str, str]]
    advice: list[str]
    charts: list[Chart]
    memory: MemoryOnPage
    step: Chart | None
    layers: FittedTable | None
    prediction: FittedTable | None
    faults: FittedTable | None
    endurance: list[str]
    settings: FittedTable
    policy: str | None


@dataclass(frozen=True, slots=True)
class MemoryOnPage:
    """What a page says of what holds memory."""

    summary: str
    chart: Chart
    holders: FittedTable


def page(logs: Sequence[RunLog], *, rated: int | None = None) -> bytes:
    """Return the page, as the bytes of a file of HTML.

    Args:
        logs: The runs, at least one.
        rated: Bytes that the drives together may be written in their life; ``None`` if that is not known.

    Raises:
        RunLogError: A run has no step.
        MissingDependencyError: Jinja2 or matplotlib is not installed.
    """
    from tba_offload import __version__

    template = _template()
    require_matplotlib("drawing the charts of a report", "report")
    runs = [_run(log, number, rated) for number, log in enumerate(logs, start=1)]
    text = template.render(
        version=__version__,
        style=_resource("run.css"),
        title=_title(logs),
        runs=runs,
        comparison=_comparison(logs) if len(logs) > 1 else None,
    )
    return str(text).encode()


def _template() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise MissingDependencyError("Jinja2", "writing a report", extra="report") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["ours"] = Markup  # for what this package has made itself, of nothing from a log
    return environment.from_string(_resource("run.html.j2"))


def _resource(name: str) -> str:
    return resources.files("tba_offload.report").joinpath("templates", name).read_text(encoding="utf-8")


def _title(logs: Sequence[RunLog]) -> str:
    if len(logs) > 1:
        return f"{len(logs)} runs compared"
    return visible(f"A run of {logs[0].header.strategy}, {len(logs[0].steps)} steps")


def _run(log: RunLog, number: int, rated: int | None) -> RunOnPage:
    from tba_offload.report.page_charts import charts, holders, step_over_time

    diagnosis, digest, salt = Diagnosis.of(log), Digest.of(log), f"run {number}"
    evidence = diagnosis.evidence
    first, *_ = diagnosis.parts()
    return RunOnPage(
        name=visible(log.path.name),
        about=visible(title_of(log.header.model, log.header.hardware) or log.header.strategy),
        cards=list(_cards(digest)),
        advice=list(map(visible, diagnosis.advice())),
        charts=list(charts(log, salt)),
        memory=MemoryOnPage(
            visible(str(first)), holders(evidence, f"{salt} holders"), holders_table(evidence)
        ),
        step=step_over_time(log, f"{salt} step"),
        layers=layers_table(evidence),
        prediction=prediction_table(digest),
        faults=_table(("What", "How much", "When"), faults(log), right=(1,)),
        endurance=endurance(digest, rated),
        settings=_table(("Setting", "Value"), settings(log)) or FittedTable(()),
        policy=None if log.header.policy is None else _lines(log.header.policy),
    )


def _lines(text: str) -> str:
    return "\n".join(map(visible, text.splitlines()))


def _cards(digest: Digest) -> Iterator[tuple[str, str, str]]:
    peak, waits, tokens = digest.peak_bytes, digest.waits, digest.tokens_per_second
    yield "Activation peak", _UNKNOWN if peak is None else readable_size(peak), _of_peaks(digest)
    yield from _device_card(digest)
    optimizer = "optimizer included" if digest.counts_optimizer else "without the optimizer"
    yield "Step", f"{significant(digest.seconds)} s", f"the median, {optimizer}"
    yield "Waits for I/O", _UNKNOWN if waits is None else f"{waits:.1%}", "of a step, the median"
    yield "Written to drives", readable_size(digest.written_bytes), "in a step, the median"
    yield "Read back", readable_size(digest.read_bytes), "in a step, the median"
    if tokens is not None:
        yield "Throughput", f"{significant(tokens)} tokens/s", f"by the median step, {optimizer}"


def _of_peaks(digest: Digest) -> str:
    """Of which steps the largest activation peak is, and what measured it; not each step need be measured."""
    sources = [step.peak_source for step in digest.steps if step.activation_peak_bytes is not None]
    if not sources:
        return "not measured"
    steps = f"the largest of {len(sources)} steps" if len(sources) > 1 else "of one step"
    return f"{steps}; {visible(sources[-1] or _UNKNOWN)}"


def _device_card(digest: Digest) -> Iterator[tuple[str, str, str]]:
    """Yield what lay on the device, and what of it activations were allowed; of a run that had a budget."""
    step, peak = digest.steps[-1] if digest.steps else None, digest.device_peak_bytes
    if step is None or step.activation_budget_bytes is None or peak is None:
        return
    base, gradients = (readable_size(nbytes or 0) for nbytes in (step.base_bytes, step.gradient_peak_bytes))
    limit = "" if digest.device_bytes is None else f" of {digest.device_bytes}"
    allowed = f"activations may take {readable_size(step.activation_budget_bytes)}"
    beside = f"{base} were live before the last step, {gradients} are gradients"
    yield "All on the device", f"{readable_size(peak)}{limit}", f"the largest; {allowed}, {beside}"


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> FittedTable | None:
    if not rows:
        return None
    columns = zip(*rows, strict=True)
    return FittedTable(
        tuple(
            Column(heading, tuple(cells), "right" if place in right else "left")
            for place, (heading, cells) in enumerate(zip(headings, columns, strict=True))
        )
    )


# Tables


def prediction_table(digest: Digest) -> FittedTable | None:
    """Return what plans predicted beside what was measured."""
    peak = _predicted(digest, "Activation peak", "predicted_peak_bytes", "activation_peak_bytes")
    rows = [row for row in (peak, _predicted(digest, "Step without optimizers", *_TIMES)) if row is not None]
    headings = ("Median of", "Steps", "Predicted", "Measured", "Measured / predicted", "Farthest off")
    return _table(headings, rows, right=(1, 2, 3, 4, 5))


def _predicted(digest: Digest, what: str, predicted: str, measured: str) -> tuple[str, ...] | None:
    pairs = [(getattr(step, predicted), getattr(step, measured)) for step in digest.steps]
    known = [(planned, found) for planned, found in pairs if planned and found is not None]
    if not known:
        return None
    ratios = [found / planned for planned, found in known]
    planned, found = (statistics.median(values) for values in zip(*known, strict=True))
    show = readable_size if measured.endswith("bytes") else lambda seconds: f"{significant(seconds)} s"
    farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
    middle = f"{statistics.median(ratios):.2f}"
    return what, str(len(known)), show(planned), show(found), middle, f"{farthest:.2f}"


def _comparison(logs: Sequence[RunLog]) -> FittedTable | None:
    headings = ("Run", "Strategy", "Steps", "Activation peak", "Step", "Waits", "Written", "Cause")
    return _table(headings, [_compared(log) for log in logs], right=(2, 3, 4, 5, 6))


def _compared(log: RunLog) -> tuple[str, ...]:
    digest, diagnosis = Digest.of(log), Diagnosis.of(log)
    peak, waits = digest.peak_bytes, digest.waits
    return (
        log.path.name,
        log.header.strategy,
        str(len(log.steps)),
        _UNKNOWN if peak is None else readable_size(peak),
        f"{significant(digest.seconds)} s",
        _UNKNOWN if waits is None else f"{waits:.1%}",
        readable_size(digest.written_bytes),
        diagnosis.cause or "",
    )
