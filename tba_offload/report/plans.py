"""The words and the picture of ``tba-offload plan``; the planner hands them numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.errors import ConfigError
from tba_offload.formatting import BYTES, grouped, layers_by_placement, readable_size, scale, significant
from tba_offload.report.rok import COLOURS, INK, RING, finish, short, write_picture
from tba_offload.report.text import Table

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure

    from tba_offload.planner.model import PlannedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan in numbers.

    Attributes:
        names: Module name of each layer.
        plan: The plan as run logs hold it.
        step: What the plan is predicted to do.
        frontier: The best plan for each of some budgets, the smallest first.
        keep_peak_bytes: The activation peak if every layer were kept.
        keep_seconds: The step time then; ``None`` where no layer of the run was kept.
        run: Measured activation peak and seconds of a step of the run; ``None`` if not measured.
        title: The model and the machine.
        notes: Sentences on drives, device and optimizer states.
        beside_bytes: Bytes of the device that are not for activations, if ``budget.device_bytes`` is given.
    """

    names: tuple[str, ...]
    plan: Mapping[str, Any]
    step: PlannedStep
    frontier: tuple[PlannedStep, ...]
    keep_peak_bytes: int
    keep_seconds: float | None = None
    run: tuple[int, float] | None = None
    title: str = ""
    notes: tuple[str, ...] = ()
    beside_bytes: int | None = None

    def parts(self, policy_file: str | None = None) -> list[Table | str]:
        """Return what there is to say, the advice last."""
        step = self.step
        window = "no limit" if step.window_bytes is None else readable_size(step.window_bytes)
        predicted = (
            f"Predicted: peak {readable_size(step.activation_peak)}, step {significant(step.seconds)} s with "
            f"{step.stall_seconds:.3f} s of waits, {readable_size(step.written_bytes)} written, window "
            f"{window}."
        )
        placed = self.plan["placements"]
        rows = [(group.name, placed[group.first]) for group in grouped(self.names, placed)]
        plan = Table(("Layers", "Placement"), rows, title="The plan")
        return [*self.notes, self._frontier(), plan, predicted, self.advice(policy_file)]

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
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
        return Table((*columns, "Layers"), rows, right=columns, title="The best plan for each budget")

    def advice(self, policy_file: str | None = None) -> str:
        """Return what to do, in one sentence.

        Args:
            policy_file: The policy file that the plan was written to.
        """
        step, placements = self.step, self.plan["placements"]
        what = layers_by_placement(self.names, placements)
        peak, keep = readable_size(step.activation_peak), readable_size(self.keep_peak_bytes)
        if not step.fits:
            give = "Give a budget" if self.beside_bytes is None else "Use a device"
            more = readable_size(step.peak_bytes + (self.beside_bytes or 0))
            return f"{give} of more than {more}: the lowest peak found is {peak} ({what})."
        if all(placement == "keep" for placement in placements):
            if step.budget_bytes is not None:
                budget = readable_size(step.budget_bytes)
                return f"Keep every layer: the peak of {peak} fits the budget of {budget}."
            return (
                f"Keep every layer (peak {peak}): nothing frees much without waits or a longer step; "
                "--budget SIZE gives the fastest plan for less memory."
            )
        speed = f"a step of {significant(step.seconds)} s (no layer was kept, so keep's time is not known)"
        if self.keep_seconds:
            speed = f"{step.seconds / self.keep_seconds:.2f} x its step"
        return f"Use {policy_file or '-o policy.yaml'}: {what}; peak {peak} of keep's {keep} at {speed}."


def draw_frontier(report: PlanReport, path: str | os.PathLike[str]) -> None:
    """Draw predicted step time over predicted peak: the best plan of each budget, the plan, the run itself.

    Args:
        report: The plan.
        path: The picture to write, SVG or PNG by its suffix.

    Raises:
        ConfigError: No plan fits its budget, or another suffix.
        MissingDependencyError: matplotlib is not installed.
        OSError: The picture cannot be written.
    """
    if not any(step.fits for step in report.frontier):
        raise ConfigError("no plan fits its budget, so there is no frontier to draw")
    write_picture(path, lambda: _frontier_figure(report))


def _frontier_figure(report: PlanReport) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    step, budget = report.step, report.step.budget_bytes
    unit, size = scale(max(report.keep_peak_bytes, budget or 0), BYTES)
    best = sorted((each.activation_peak / size, each.seconds) for each in report.frontier if each.fits)
    axes.plot(*zip(*best, strict=True), "s-", color=COLOURS[1], label="best plan for each budget")
    marks: list[tuple[str, int, float | None, dict[str, Any]]] = [
        (f"the plan: {step.layers}", step.activation_peak, step.seconds, RING),
        ("this run, measured", *(report.run or (0, None)), {"marker": "X", "color": INK, "ls": "none"}),
        ("keep, predicted", report.keep_peak_bytes, report.keep_seconds, {"marker": "o", "ls": "none"}),
    ]
    for label, peak_bytes, time, look in marks:
        if time is not None:
            axes.plot(peak_bytes / size, time, label=short(label, 60), zorder=4, **look)
    if budget is not None:
        label = f"budget {readable_size(budget)}"
        axes.axvline(budget / size, color=COLOURS[4], linestyle="--", label=label)
    finish(axes, "Predicted step time (s)", report.title)
    axes.set(xlabel=f"Predicted activation peak ({unit})", xlim=(0, None))
    figure.legend(loc="outside upper left", ncols=2)
    return figure


_TOLD = ("name", "layers", "num_layers", "hidden", "hidden_size", "sequence", "seq_length", "batch_size")


def title_of(model: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    """Return the model and the machine of a run in a line, as far as its log tells."""
    told = {**model, **hardware}
    names = [name for name in (*_TOLD, "dtype", "device", "cpus") if told.get(name)]
    return ", ".join(f"{name.replace('_', ' ')} {told[name]}" for name in names)
