"""Report and picture of ``tba-offload plan``, and the table of ``tba-offload estimate``."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.formatting import (
    BYTES,
    grouped,
    layers_by_placement,
    readable_rate,
    readable_size,
    scale,
    significant,
)
from tba_offload.report.log import counted_steps, timed_steps
from tba_offload.report.rok import COLOURS, RING, WIDTH, finish, short
from tba_offload.report.text import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.figure import Figure

    from tba_offload.planner.model import PlannedStep
    from tba_offload.report.log import RunLog


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Result of planning from a run log.

    Attributes:
        names: Module name of each layer.
        plan: The plan, in the form of a plan event in run logs.
        step: Predicted step under the plan.
        frontier: Predicted steps of the best plans for several budgets, ordered by budget.
        keep_peak_bytes: Predicted activation peak if all layers are kept.
        keep_seconds: Predicted step time if all layers are kept; None if the run kept no layer.
        notes: Sentences about drives, the device and optimizer states.
        beside_bytes: Bytes of the device that activations cannot use, if ``budget.device_bytes`` is given.
    """

    names: tuple[str, ...]
    plan: Mapping[str, Any]
    step: PlannedStep
    frontier: tuple[PlannedStep, ...]
    keep_peak_bytes: int
    keep_seconds: float | None = None
    notes: tuple[str, ...] = ()
    beside_bytes: int | None = None

    def parts(self, policy_file: str | None = None) -> list[Table | str]:
        """Return the tables and sentences of the report. The advice is last.

        Args:
            policy_file: Path of the policy file with the plan, if a file was written.
        """
        step = self.step
        window = "without a limit" if step.window_bytes is None else readable_size(step.window_bytes)
        predicted = (
            f"Predicted: activation peak {readable_size(step.activation_peak)}, step "
            f"{significant(step.seconds)} s (stall {step.stall_seconds:.3f} s), "
            f"{readable_size(step.written_bytes)} written, in-flight window {window}."
        )
        placed = self.plan["placements"]
        rows = [(group.name, placed[group.first]) for group in grouped(self.names, placed)]
        plan = Table(("Layers", "Placement"), rows, title="The plan")
        return [*self.notes, self._frontier(), plan, predicted, self.advice(policy_file)]

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return dataclasses.asdict(self) | {"advice": self.advice()}

    def _frontier(self) -> Table:
        unit, size = scale(max(each.activation_peak for each in self.frontier), BYTES)
        columns: dict[str, Callable[[PlannedStep], str]] = {
            f"Budget {unit}": lambda each: significant((each.budget_bytes or 0) / size),
            f"Peak {unit}": lambda row: significant(row.activation_peak / size) if row.fits else "too high",
            "Step s": lambda each: significant(each.seconds),
        }
        if keep := self.keep_seconds:
            columns["x keep"] = lambda each: f"{each.seconds / keep:.2f}"
        rows = [(*(cell(each) for cell in columns.values()), each.layers) for each in self.frontier]
        return Table((*columns, "Layers"), rows, right=columns, title="Best plan for each budget")

    def advice(self, policy_file: str | None = None) -> str:
        """Return the advice for this plan as text.

        Args:
            policy_file: Path of the policy file with the plan, if a file was written.
        """
        step, placements = self.step, self.plan["placements"]
        what = layers_by_placement(self.names, placements)
        peak, keep = readable_size(step.activation_peak), readable_size(self.keep_peak_bytes)
        if not step.fits:
            limit = "budget" if self.beside_bytes is None else "device"
            more = readable_size(step.peak_bytes + (self.beside_bytes or 0))
            return f"The {limit} must be larger than {more}: the lowest peak found is {peak} ({what})."
        if all(placement == "keep" for placement in placements):
            if step.budget_bytes is not None:
                budget = readable_size(step.budget_bytes)
                return f"Keep all layers: the peak of {peak} fits the budget of {budget}."
            return (
                f"Keep all layers (peak {peak}): no plan frees much memory without a longer step. "
                "For the fastest plan with less memory, pass --budget SIZE."
            )
        speed = f"a step takes {significant(step.seconds)} s ('keep': unknown, because the run kept no layer)"
        if self.keep_seconds:
            speed = f"a step takes {step.seconds / self.keep_seconds:.2f} times as long as with 'keep'"
        use = f"Use {policy_file}" if policy_file else "Write this plan with -o policy.yaml"
        return f"{use}: {what}. The predicted peak is {peak} ('keep': {keep}), and {speed}."


_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Placement": ("placement", str),
    "Activation peak": ("activation_peak_bytes", readable_size),
    "Step s": ("seconds", significant),
    "x keep": ("times_keep", "{:.2f}".format),
    "Drives need": ("drives_need", readable_rate),
    "Written": ("written_bytes", readable_size),
    "TB a day": ("written_bytes_per_day", lambda nbytes: significant(nbytes / 1e12)),
    "Years": ("years", significant),
    "Fits": ("fits", lambda fits: "yes" if fits else "no"),
}
"""Key and format of each column in :func:`placements_table`."""


def placements_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with the figures of each placement. Columns without figures are omitted."""
    shown = {name: each for name, each in _FIGURES.items() if any(row[each[0]] is not None for row in rows)}
    cells = [["-" if row[key] is None else words(row[key]) for key, words in shown.values()] for row in rows]
    return Table(list(shown), cells, right=shown.keys() - {"Placement"})


def plans_figure(report: PlanReport, log: RunLog) -> Figure:
    """Return a figure of step time over activation peak: best plans, the chosen plan, ``keep`` and the run.

    Call this function inside :func:`tba_offload.report.rok.drawing`.

    Args:
        report: Result of planning.
        log: The run log from which the plans were made.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.add_subplot()
    step, keep, budget = report.step, report.keep_peak_bytes, report.step.budget_bytes
    unit, size = scale(max(keep, budget or 0), BYTES)
    steps = counted_steps(log)
    measured = max((each.activation_peak_bytes or 0 for each in steps), default=0)
    seconds = statistics.median(each.seconds for each in timed_steps(steps)) if measured else None
    best = [(each.activation_peak / size, each.seconds) for each in report.frontier if each.fits]
    axes.plot(*zip(*best, strict=True), "s-", color=COLOURS[1], label="best plan for each budget, predicted")
    marks: list[tuple[str, int, float | None, dict[str, Any]]] = [
        (f"chosen plan: {step.layers}", step.activation_peak, step.seconds, RING),
        ("keep, predicted", keep, report.keep_seconds, {"marker": "o", "color": COLOURS[0]}),
        ("the run, measured", measured, seconds, {"marker": "X", "color": COLOURS[2]}),
    ]
    for label, peak, time, look in marks:
        if time is not None:
            axes.plot(peak / size, time, label=short(label, 60), **{"ls": "none"} | look)
    if budget is not None:
        axes.axvline(budget / size, color=COLOURS[4], ls="--", label=f"budget {readable_size(budget)}")
    finish(axes, "Step time (s)", f"{log.header.title}. Planned: {report.notes[0]}")
    axes.set(xlabel=f"Activation peak ({unit})", xlim=(0, None))
    figure.legend(loc="outside upper left")
    return figure
