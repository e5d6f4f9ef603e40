"""What ``tba-offload plan`` says: the best plans for a sweep of budgets, and the plan for one.

The planner is not known here: what is said comes as numbers and words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_offload.errors import ConfigError
from tba_offload.formatting import (
    byte_scale,
    grouped,
    layers_by_placement,
    readable_rate,
    readable_size,
    significant,
)
from tba_offload.report import tables
from tba_offload.report.rok import picture_kind, require_matplotlib
from tba_offload.report.tables import Column, FittedTable
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """What a plan is expected to do.

    Attributes:
        budget_bytes: The activation peak that it was made for; ``None`` for none.
        fits: Whether it keeps to that.
        layers: How many layers have which placement, such as ``"4 keep, 8 offload"``.
        window_bytes: Most bytes in flight; ``None`` for no limit.
        seconds: Duration of the step.
        stall_seconds: How much of it compute waits for I/O.
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
class Tier:
    """What a drive, or host memory beside the drives, was found to do.

    Attributes:
        place: The directory, or what else it is called.
        write: ``bytes_per_second`` and ``spread`` of what was written to it; each may be ``None``.
        read: The same of what was read from it.
    """

    place: str
    write: Mapping[str, float | None]
    read: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """What host memory beside the drives does under a plan.

    Attributes:
        capacity: Its bytes.
        write: Bytes a second to it.
        read: Bytes a second from it.
        written_bytes: Bytes that a step writes to it.
        peak_bytes: Most bytes that it holds.
    """

    capacity: int
    write: float
    read: float
    written_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """All that is said of a plan.

    Attributes:
        names: Module name of each layer.
        placements: The placement of each.
        whys: Why each has it, in a line.
        step: What the plan is expected to do.
        peak_in: What runs when memory is at its peak; ``None`` if nothing is saved.
        keep_peak_bytes: The activation peak if every layer were kept.
        keep_seconds: The step time then; ``None`` where no layer of the run was kept, so that it is unknown.
        write: Bytes a second to all drives together.
        read: Bytes a second from them.
        tiers: What each drive was found to do.
        host: Host memory beside the drives; ``None`` if there is none.
        frontier: The best plan for each of some budgets, the smallest first.
        run: Activation peak in bytes and seconds of a step of the run itself; ``None`` where they were not
            measured, or the plan is for something else than what ran.
        title: The model and the machine.
        writes: What it writes to drives in a day, in words; ``None`` if nothing limits that.
        device: Of what device the budget is left, in words; ``None`` if it was given.
        beside_bytes: Bytes of that device that are not for activations when they are at their peak.
        coming_bytes: Bytes of gradients that come in backward, and have left their room to activations.
        states: How many sub-groups of optimizer states travel, in words; ``None`` if none are offloaded.
    """

    names: tuple[str, ...]
    placements: tuple[str, ...]
    whys: tuple[str, ...]
    step: PlannedStep
    peak_in: str | None
    keep_peak_bytes: int
    keep_seconds: float | None
    write: float
    read: float
    tiers: tuple[Tier, ...]
    host: HostUse | None
    frontier: tuple[PlannedStep, ...]
    run: tuple[int, float] | None
    title: str
    writes: str | None = None
    device: str | None = None
    beside_bytes: int = 0
    coming_bytes: int = 0
    states: str | None = None


def show(report: PlanReport, policy_file: str | None) -> None:
    """Print everything, what to do last.

    Args:
        report: The plan.
        policy_file: Where it was written as a policy file; ``None`` if it was not.
    """
    tables.show(
        *_situation(report),
        frontier_table(report),
        plan_table(report),
        *_prediction(report),
        advice(report, policy_file),
    )


def _situation(report: PlanReport) -> Iterator[str]:
    keep = readable_size(report.keep_peak_bytes)
    in_time = "" if report.keep_seconds is None else f" in a step of {significant(report.keep_seconds)} s"
    yield (
        f"{len(report.names)} layers; the drives write {readable_rate(report.write)} and read "
        f"{readable_rate(report.read)}; keeping everything peaks at {keep}{in_time}"
    )
    for tier in report.tiers:
        yield f"measured: {tier.place} wrote {_measured(tier.write)} and read {_measured(tier.read)}"
    host = report.host
    if host is not None:
        yield (
            f"{readable_size(host.capacity)} of host memory, written at {readable_rate(host.write)} and "
            f"read at {readable_rate(host.read)}, take what the drives have no time for"
        )
    if report.device is not None:
        left, until_then = ((report.step.budget_bytes or 0) - less for less in (report.coming_bytes, 0))
        more = f"; until gradients come {readable_size(until_then)} are" if report.coming_bytes else ""
        yield f"{readable_size(left)} are left for activations {report.device}{more}"
    if report.states is not None:
        yield report.states


def _measured(rate: Mapping[str, float | None]) -> str:
    """Return a measured rate and how much it differs from step to step."""
    found, spread = rate["bytes_per_second"], rate["spread"]
    if found is None:
        return "nothing"
    return readable_rate(found) + ("" if spread is None else f" (± {spread:.0%})")


def frontier_table(report: PlanReport) -> FittedTable:
    """Return the best plan for each budget."""
    steps = report.frontier
    unit, size = byte_scale(max(max(each.budget_bytes or 0, each.peak_bytes) for each in steps))

    def column(heading: str, cell: Callable[[PlannedStep], str], rank: int = 0) -> Column:
        return Column(heading, tuple(map(cell, steps)), rank=rank)

    columns = [
        column(f"Budget {unit}", lambda each: significant((each.budget_bytes or 0) / size)),
        column(f"Peak {unit}", lambda each: significant(each.peak_bytes / size) if each.fits else "too high"),
        column("Step s", lambda each: significant(each.seconds)),
        column("Waits s", lambda each: f"{each.stall_seconds:.3f}", 3),
        Column("Layers", tuple(each.layers for each in steps), "left", rank=1, gives_way="wrapped"),
    ]
    keep = report.keep_seconds
    if keep:
        columns.insert(3, column("x keep", lambda each: f"{each.seconds / keep:.2f}", 2))
    return FittedTable(tuple(columns), title="The best plan for each budget")


def plan_table(report: PlanReport) -> FittedTable:
    """Return what is done with each layer, and why.

    Layers that follow one another and are equal are one row.
    """
    alike = list(zip(report.placements, report.whys, strict=True))
    groups = grouped(report.names, alike)
    firsts = [group.first for group in groups]
    columns = [
        Column("Layers", tuple(group.numbers for group in groups), "left"),
        Column("Name", tuple(group.name for group in groups), "left", rank=2),
        Column("Placement", tuple(report.placements[first] for first in firsts), "left"),
        Column("Why", tuple(report.whys[first] for first in firsts), "left", rank=1, gives_way="wrapped"),
    ]
    if columns[0].cells == columns[1].cells:
        del columns[1]
    return FittedTable(tuple(columns), title="The plan")


def _prediction(report: PlanReport) -> Iterator[str]:
    step = report.step
    window = "no limit" if step.window_bytes is None else readable_size(step.window_bytes)
    yield (
        f"predicted: peak {readable_size(step.peak_bytes)} in {report.peak_in or 'no layer'}, step "
        f"{significant(step.seconds)} s of which {step.stall_seconds:.3f} s are waits; "
        f"{readable_size(step.written_bytes)} written; window {window}"
    )
    if report.host is not None:
        yield (
            f"a step writes {readable_size(step.written_bytes)} to the drives and "
            f"{readable_size(report.host.written_bytes)} to host memory, which holds "
            f"{readable_size(report.host.peak_bytes)} at most"
        )
    if report.writes is not None:
        yield f"the plan {report.writes}"


def advice(report: PlanReport, policy_file: str | None) -> str:
    """Return what to do, in one sentence.

    Args:
        report: The plan.
        policy_file: Where it was written as a policy file; ``None`` if it was not.
    """
    step, keep = report.step, readable_size(report.keep_peak_bytes)
    what, peak = layers_by_placement(report.names, report.placements), readable_size(step.peak_bytes)
    if not step.fits:
        budget = readable_size(step.budget_bytes or 0)
        written = "" if policy_file is None else f" {policy_file} holds that plan."
        if report.device is not None:
            needed = readable_size(step.peak_bytes + report.beside_bytes)
            return (
                f"Give a device of more than {needed}, which the lowest peak found takes ({what}).{written}"
            )
        lowest = f"that is the lowest peak found ({what}), over {budget}."
        return f"Give a budget of more than {peak}: {lowest}{written}"
    if set(report.placements) == {"keep"}:
        return _advice_to_keep(report, what)
    use = f"Use {'-o policy.yaml' if policy_file is None else policy_file}"
    return f"{use}: {what}; peak {peak} of keep's {keep}{_against_keep(report)}."


def _advice_to_keep(report: PlanReport, what: str) -> str:
    peak, budget = readable_size(report.keep_peak_bytes), report.step.budget_bytes
    what = what[0].upper() + what[1:]
    if budget is not None:
        return f"{what}: the peak of {peak} fits the budget of {readable_size(budget)}."
    return (
        f"{what} (peak {peak}): nothing frees much of it without waits or a longer step; with --budget SIZE "
        "you get the fastest plan for less memory."
    )


def _against_keep(report: PlanReport) -> str:
    seconds = report.step.seconds
    if report.keep_seconds is None:
        return (
            f" in a step of {significant(seconds)} s, of which {report.step.stall_seconds:.3f} s are waits "
            "(keep's step time is not known from this log, because no layer was kept in the run)"
        )
    return f" at {seconds / report.keep_seconds:.2f} x its step" if report.keep_seconds else ""


# Picture


def draw_frontier(report: PlanReport, path: str | os.PathLike[str]) -> None:
    """Draws predicted step time over predicted peak: the best plan of each budget, the plan, the run itself.

    Args:
        report: The plan.
        path: The picture to write, SVG or PNG by its suffix.

    Raises:
        ConfigError: No plan fits its budget, or another suffix.
        MissingDependencyError: matplotlib is not installed.
        OSError: The picture cannot be written.
    """
    path = Path(path)
    kind = picture_kind(path)
    if not any(step.fits for step in report.frontier):
        raise ConfigError("no plan fits its budget, so there is no frontier to draw")
    require_matplotlib()
    from tba_offload.report import picture

    write_regular(path, picture.frontier_curve(report, kind))


# The run


def title_of(model: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    """Return the model and the machine of a run in words, as far as its log tells.

    Args:
        model: What the log's header says about the model; free form.
        hardware: What it says about the machine.
    """
    return "; ".join(part for part in (_model_in_words(model), _hardware_in_words(hardware)) if part)


_SIZES = {
    "layers": "{} layers",
    "num_layers": "{} layers",
    "hidden": "width {}",
    "hidden_size": "width {}",
    "sequence": "sequence {}",
    "seq_length": "sequence {}",
    "batch_size": "batch size {}",
    "dtype": "{}",
}
"""Words for the sizes of a model; of those that mean the same the first counts."""


def _model_in_words(model: Mapping[str, Any]) -> str:
    said = {form: model[key] for key, form in reversed(_SIZES.items()) if model.get(key) is not None}
    forms = dict.fromkeys(form for form in _SIZES.values() if form in said)
    return ", ".join(
        [*([str(model["name"])] if model.get("name") else []), *(form.format(said[form]) for form in forms)]
    )


def _hardware_in_words(hardware: Mapping[str, Any]) -> str:
    counts = [(hardware.get("cpus"), "CPU"), (hardware.get("threads"), "thread")]
    known = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts if count]
    return ", ".join([*([str(hardware["device"])] if hardware.get("device") else []), *known])
