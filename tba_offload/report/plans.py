"""The words and the picture of ``tba-offload plan``; the planner hands them numbers."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba_offload.errors import ConfigError
from tba_offload.formatting import (
    byte_scale,
    grouped,
    layers_by_placement,
    readable_size,
    significant,
    visible,
)
from tba_offload.report.rok import COLOURS, INK, drawing, looks, picture_kind, rendered, short
from tba_offload.report.text import Table
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """What a plan is predicted to do.

    Attributes:
        budget_bytes: The activation peak that the plan was made for; ``None`` for none.
        fits: Whether the plan keeps to the budget.
        layers: The number of layers of each placement, such as ``"4 keep, 8 offload"``.
        window_bytes: Most bytes in flight; ``None`` for no limit.
        seconds: Duration of the step.
        stall_seconds: The part of it in which compute waits for I/O.
        peak_bytes: The activation peak.
        written_bytes: Bytes that go to the drives.
    """

    budget_bytes: int | None
    fits: bool
    layers: str
    window_bytes: int | None
    seconds: float
    stall_seconds: float
    peak_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan in numbers.

    Attributes:
        names: Module name of each layer.
        placements: The placement of each layer.
        whys: The reason of each placement, in a line.
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
    placements: tuple[str, ...]
    whys: tuple[str, ...]
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
        return [*self.notes, self._frontier(), self._plan(), self._prediction(), self.advice(policy_file)]

    def _frontier(self) -> Table:
        unit, size = byte_scale(max(max(each.budget_bytes or 0, each.peak_bytes) for each in self.frontier))
        numbers = (f"Budget {unit}", f"Peak {unit}", "Step s", *(["x keep"] if self.keep_seconds else []))
        rows = [
            (
                significant((each.budget_bytes or 0) / size),
                significant(each.peak_bytes / size) if each.fits else "too high",
                significant(each.seconds),
                *([f"{each.seconds / self.keep_seconds:.2f}"] if self.keep_seconds else []),
                each.layers,
            )
            for each in self.frontier
        ]
        return Table((*numbers, "Layers"), rows, numbers, title="The best plan for each budget")

    def _plan(self) -> Table:
        rows = [
            (group.name, self.placements[group.first], self.whys[group.first])
            for group in grouped(self.names, list(zip(self.placements, self.whys, strict=True)))
        ]
        return Table(("Layers", "Placement", "Why"), rows, title="The plan")

    def _prediction(self) -> str:
        step = self.step
        window = "no limit" if step.window_bytes is None else readable_size(step.window_bytes)
        return (
            f"Predicted: peak {readable_size(step.peak_bytes)}, step {significant(step.seconds)} s with "
            f"{step.stall_seconds:.3f} s of waits, {readable_size(step.written_bytes)} written, window "
            f"{window}."
        )

    def advice(self, policy_file: str | None = None) -> str:
        """Return what to do, in one sentence.

        Args:
            policy_file: The policy file that the plan was written to.
        """
        step, what = self.step, layers_by_placement(self.names, self.placements)
        peak, keep = readable_size(step.peak_bytes), readable_size(self.keep_peak_bytes)
        if not step.fits:
            more = peak if self.beside_bytes is None else readable_size(step.peak_bytes + self.beside_bytes)
            give = "Give a budget" if self.beside_bytes is None else "Use a device"
            written = "" if policy_file is None else f" {policy_file} holds that plan."
            return f"{give} of more than {more}: the lowest peak found is {peak} ({what}).{written}"
        if set(self.placements) == {"keep"}:
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
        use = "-o policy.yaml" if policy_file is None else policy_file
        return f"Use {use}: {what}; peak {peak} of keep's {keep} at {speed}."


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
    kind = picture_kind(path)
    if not any(step.fits for step in report.frontier):
        raise ConfigError("no plan fits its budget, so there is no frontier to draw")
    with drawing("drawing the frontier of plans"):
        content = rendered(_frontier_figure(report), kind)
    write_regular(path, content)


def _frontier_figure(report: PlanReport) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.2), layout="constrained")
    axes = figure.add_subplot()
    best = {(step.peak_bytes, step.seconds): step.layers for step in report.frontier if step.fits}
    marks: list[tuple[str, tuple[int, float] | None, dict[str, Any]]] = [
        (f"the plan: {report.step.layers}", (report.step.peak_bytes, report.step.seconds), _RING),
        ("this run, measured", report.run, {"marker": "X", "markersize": 9, "color": INK}),
    ]
    if report.keep_seconds is not None:
        keep = {"marker": "o", "markersize": 8, "color": looks(["keep"])["keep"][0]}
        marks.append(("keep everything, predicted", (report.keep_peak_bytes, report.keep_seconds), keep))
    places = [*best, *(place for _, place, _ in marks if place is not None)]
    budget = report.step.budget_bytes
    unit, size = byte_scale(max([peak for peak, _ in places] + [budget or 0]))
    line = [(peak / size, seconds) for peak, seconds in sorted(best)]
    shown: dict[str, Any] = {"color": COLOURS[1], "markersize": 5, "label": "best plan for each budget"}
    axes.plot(*zip(*line, strict=True), "s-", **shown)
    for number, place in enumerate(line, 1):
        axes.annotate(str(number), place, (5, 5), textcoords="offset points", color=COLOURS[1])
    for label, at, look in marks:
        if at is not None:
            axes.plot(at[0] / size, at[1], linestyle="none", label=short(label, 60), zorder=4, **look)
    if budget is not None:
        label = f"budget {readable_size(budget)}"
        axes.axvline(budget / size, color=COLOURS[4], linestyle="--", label=label, zorder=1)
    axes.set_title(textwrap.fill(visible(report.title), 100), loc="left", fontsize="small")
    axes.set_xlabel(f"Predicted activation peak ({unit})")
    axes.set_ylabel("Predicted step time (s)")
    axes.set_xlim(0, 1.1 * max([peak for peak, _ in places] + [budget or 0]) / size or 1)
    axes.set_ylim(0, 1.15 * max(seconds for _, seconds in places) or 1)
    figure.legend(loc="outside upper left", ncols=2)
    said = "\n".join(f"{number}: {best[place]}" for number, place in enumerate(sorted(best), 1))
    figure.supxlabel(said, x=0.01, ha="left", fontsize="small")
    return figure


_RING: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "color": INK}


def title_of(model: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    """Return the model and the machine of a run in words, as far as its log tells."""
    model = {"layers": model.get("num_layers"), "hidden": model.get("hidden_size")} | dict(model)
    model.setdefault("sequence", model.get("seq_length"))
    sizes = {"name": "", "layers": " layers", "hidden": " wide", "sequence": " tokens a sequence"}
    words = [f"{model[key]}{unit}" for key, unit in sizes.items() if model.get(key)]
    words += [f"batch size {model['batch_size']}"] if model.get("batch_size") else []
    words += [str(model["dtype"])] if model.get("dtype") else []
    machine = [str(hardware["device"])] if hardware.get("device") else []
    machine += [f"{hardware['cpus']} CPUs"] if hardware.get("cpus") else []
    return "; ".join(filter(None, (", ".join(words), ", ".join(machine))))
