"""What ``tba-offload plan`` prints and draws."""

from __future__ import annotations

import dataclasses
from typing import Any

from tba_offload.config.policy import Placement
from tba_offload.planner.model import PlannedStep
from tba_offload.report.plans import PlanReport
from tba_offload.report.text import as_text

MIB = 2**20
NAMES = tuple(f"model.layers.{layer}" for layer in range(12))
KEEP, OFFLOAD = Placement.KEEP, Placement.OFFLOAD


def planned(peak: float, seconds: float, budget: float | None, layers: str) -> PlannedStep:
    return PlannedStep(
        budget_bytes=None if budget is None else int(budget * MIB),
        fits=budget is None or peak <= budget,
        layers=layers,
        window_bytes=10 * MIB,
        seconds=seconds,
        stall_seconds=0.004,
        peak_bytes=int(peak * MIB),
        activation_peak=int(peak * MIB),
        written_bytes=258 * MIB,
    )


FRONTIER = (
    planned(41, 1.70, 28, "12 offload"),
    planned(41, 1.70, 43, "12 offload"),
    planned(58, 1.66, 60, "2 keep, 10 offload"),
    planned(284, 1.50, 300, "12 keep"),
)


def report_of(*placements: str, **changes: Any) -> PlanReport:
    """Of a run whose layers were all kept at 284 MiB in 1.5 s; by default nine are offloaded."""
    placements = placements or ("offload",) * 9 + ("keep",) * 3
    report = PlanReport(
        names=NAMES,
        plan={"placements": placements},
        step=planned(84, 1.53, None, "3 keep, 9 offload"),
        frontier=FRONTIER,
        keep_peak_bytes=284 * MIB,
        keep_seconds=1.5,
        run=(41 * MIB, 1.71),
        title="tiny Llama, 12 layers; x86_64, 2 CPUs",
    )
    return dataclasses.replace(report, **changes)


def test_one_sentence_says_what_to_do() -> None:
    does = "offload layers 0-8, keep layers 9-11; peak 84.0 MiB of keep's 284 MiB at 1.02 x its step."
    assert report_of().advice() == f"Use -o policy.yaml: {does}"
    assert report_of().advice("mine.yaml") == f"Use mine.yaml: {does}"
    assert "at a step of 1.53 s (no layer was kept" in report_of(keep_seconds=None).advice()
    kept = report_of(*("keep",) * 12, step=planned(284, 1.5, 300, "12 keep"))
    assert kept.advice() == "Keep every layer: the peak of 284 MiB fits the budget of 300 MiB."
    tight = report_of(*("offload",) * 12, step=planned(41, 1.7, 28, "12 offload"))
    lowest = "the lowest peak found is 41.0 MiB (offload all 12 layers)."
    assert tight.advice() == f"Give a budget of more than 41.0 MiB: {lowest}"
    device = dataclasses.replace(tight, beside_bytes=52 * MIB)
    assert device.advice() == f"Use a device of more than 93.0 MiB: {lowest}"


def test_the_tables() -> None:
    said = [" ".join(line.split()) for line in as_text(*report_of().parts()).splitlines()]
    assert "| 28.0 | too high | 1.70 | 1.13 | 12 offload |" in said
    assert "| 300 | 284 | 1.50 | 1.00 | 12 keep |" in said
    assert "| model.layers.0-8 | offload |" in said
    assert not any("x keep" in line for line in as_text(*report_of(keep_seconds=None).parts()).splitlines())
