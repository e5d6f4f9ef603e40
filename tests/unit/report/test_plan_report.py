"""What ``tba-offload plan`` prints and draws, and how a new plan is told in a log."""

from __future__ import annotations

import dataclasses
import io
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from tba_offload.config.policy import Placement
from tba_offload.errors import ConfigError
from tba_offload.plan.describe import describe_plan
from tba_offload.plan.model import Plan, Prediction
from tba_offload.report import plans
from tba_offload.report.plans import PlannedStep, PlanReport, advice, frontier_table, plan_table, title_of

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

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
        written_bytes=258 * MIB,
    )


FRONTIER = (
    planned(41, 1.70, 28, "12 offload"),
    planned(41, 1.70, 43, "12 offload"),
    planned(58, 1.66, 60, "2 keep, 10 offload"),
    planned(63, 1.65, 71, "2 keep, 1 offload, 8 recompute-offload, 1 offload-remat"),
    planned(140, 1.55, 142, "5 keep, 7 offload-remat"),
    planned(284, 1.50, 300, "12 keep"),
)


def report_of(*placements: str, **changes: Any) -> PlanReport:
    """Of a run whose layers were all kept at 284 MiB in 1.5 s; by default nine are offloaded."""
    placements = placements or ("offload",) * 9 + ("keep",) * 3
    why = {"offload": "25.0 MiB take 20.0 ms of the drive", "keep": "25.0 MiB have room"}
    report = PlanReport(
        names=NAMES,
        placements=placements,
        whys=tuple(why[placement] for placement in placements),
        step=planned(84, 1.53, None, "3 keep, 9 offload"),
        peak_in="backward of layer 11",
        keep_peak_bytes=284 * MIB,
        keep_seconds=1.5,
        write=2.3e9,
        read=1.48e9,
        tiers=(),
        host=None,
        frontier=FRONTIER,
        run=(41 * MIB, 1.71),
        title="tiny Llama, 12 layers; x86_64, 2 CPUs",
    )
    return dataclasses.replace(report, **changes)


# Words


def test_one_sentence_says_what_to_do() -> None:
    does = "offload layers 0-8, keep layers 9-11; peak 84.0 MiB of keep's 284 MiB at 1.02 x its step."
    assert advice(report_of(), None) == f"Use -o policy.yaml: {does}"
    assert advice(report_of(), "mine.yaml") == f"Use mine.yaml: {does}"


def test_the_sentence_says_where_keeps_time_is_not_known() -> None:
    said = advice(report_of(keep_seconds=None), None)
    assert "peak 84.0 MiB of keep's 284 MiB in a step of 1.53 s, of which 0.004 s are waits" in said
    assert "keep's step time is not known from this log, because no layer was kept in the run" in said
    assert " x " not in said
    headings = [column.heading for column in frontier_table(report_of(keep_seconds=None)).columns]
    assert headings == ["Budget MiB", "Peak MiB", "Step s", "Waits s", "Layers"]


def test_the_sentence_says_why_everything_is_kept() -> None:
    said = advice(report_of(*("keep",) * 12), None)
    assert said.startswith("Keep all 12 layers (peak 284 MiB): nothing frees much of it")
    assert "--budget" in said
    fits = planned(284, 1.5, 300, "12 keep")
    said = advice(report_of(*("keep",) * 12, step=fits), None)
    assert said == "Keep all 12 layers: the peak of 284 MiB fits the budget of 300 MiB."


def test_the_sentence_says_what_a_budget_would_have_to_be() -> None:
    report = report_of(*("offload",) * 12, step=planned(41, 1.7, 28, "12 offload"))
    expected = (
        "Give a budget of more than 41.0 MiB: that is the lowest peak found (offload all 12 layers), "
        "over 28.0 MiB."
    )
    assert advice(report, None) == expected
    assert advice(report, "plan.yaml") == f"{expected} plan.yaml holds that plan."
    report = dataclasses.replace(report, device="of 80 MiB, less ...", beside_bytes=52 * MIB)
    assert advice(report, None) == (
        "Give a device of more than 93.0 MiB, which the lowest peak found takes (offload all 12 layers)."
    )


def test_equal_layers_are_one_row_of_the_table() -> None:
    cells = {column.heading: column.cells for column in plan_table(report_of()).columns}
    assert cells["Layers"] == ("0-8", "9-11")
    assert cells["Name"] == ("model.layers.0-8", "model.layers.9-11")
    assert cells["Placement"] == ("offload", "keep")
    named = plan_table(report_of("keep", "offload", names=("first", "last")))
    assert [column.heading for column in named.columns] == ["Layers", "Placement", "Why"]


def test_a_plan_that_does_not_fit_shows_no_peak() -> None:
    columns = {column.heading: column.cells for column in frontier_table(report_of()).columns}
    assert columns["Peak MiB"] == ("too high", "41.0", "58.0", "63.0", "140", "284")
    assert columns["x keep"] == ("1.13", "1.13", "1.11", "1.10", "1.03", "1.00")


@pytest.mark.parametrize("width", [40, 60, 80, 150])
def test_tables_of_plans_fit_the_terminal_and_numbers_stay_whole(width: int) -> None:
    for table in (frontier_table(report_of()), plan_table(report_of())):
        console = Console(file=io.StringIO(), width=width)
        with console.capture() as captured:
            console.print(table)
        printed = captured.get().splitlines()
        assert max(map(len, printed)) <= width
        shown = captured.get().split()
        for column in table.columns:
            if column.gives_way == "never" and column.rank == 0:
                assert all(word in shown for cell in column.cells for word in cell.split())
        assert "…" not in captured.get()


@pytest.mark.parametrize(
    ("model", "hardware", "title"),
    [
        (
            {"name": "Megatron-LM", "layers": 12, "num_layers": 12, "hidden_size": 1536, "seq_length": 160},
            {"device": "NVIDIA H200", "cpus": 16},
            "Megatron-LM, 12 layers, width 1536, sequence 160; NVIDIA H200, 16 CPUs",
        ),
        (
            {"layers": 4, "batch_size": 2, "dtype": "bf16"},
            {"device": "x86_64", "cpus": 2, "threads": 1},
            "4 layers, batch size 2, bf16; x86_64, 2 CPUs, 1 thread",
        ),
        ({}, {}, ""),
    ],
)
def test_the_title_says_model_and_machine(model: Any, hardware: Any, title: str) -> None:
    assert title_of(model, hardware) == title


# Picture


def figure_of(report: PlanReport) -> Figure:
    from tba_offload.report.picture import frontier_figure

    return frontier_figure(report)


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_picture_shows_budget_run_and_keep_from_zero() -> None:
    figure = figure_of(report_of(step=planned(58, 1.66, 60, "2 keep, 10 offload")))
    (axes,) = figure.axes
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)
    assert axes.get_xlabel() == "Activation peak (MiB)"
    assert axes.get_ylabel() == "Step time (s)"
    assert axes.get_title(loc="left") == "tiny Llama, 12 layers; x86_64, 2 CPUs"
    assert legend_texts(figure) == [
        "keep everything, predicted",
        "this run, measured",
        "the plan: 2 keep, 10 offload",
        "budget 60.0 MiB",
        "1: 12 offload",  # for two budgets, and once in the picture
        "2: 2 keep, 10 offload",
        "3: 2 keep, 1 offload, 8 recompute-offload, 1 offload-remat",
        "4: 5 keep, 7 offload-remat",
        "5: 12 keep",
    ]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "4", "5"]
    measured = next(line for line in axes.lines if line.get_marker() == "X")
    assert [float(values[0]) for values in measured.get_data()] == [41.0, 1.71]


def test_the_picture_leaves_out_what_is_not_known() -> None:
    figure = figure_of(report_of(keep_seconds=None, run=None))
    assert legend_texts(figure)[0] == "the plan: 3 keep, 9 offload"
    assert not any("budget" in text for text in legend_texts(figure))


def test_labels_of_plans_do_not_overlap() -> None:
    crowded = tuple(
        planned(40 + 1.5 * number, 1.7 - 0.002 * number, 100, "12 offload") for number in range(9)
    )
    (axes,) = figure_of(report_of(frontier=crowded)).axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    assert len(boxes) == 9


@pytest.mark.parametrize("step", [planned(0, 0.0, None, "1 keep"), planned(1e-6, 1e-4, 1e-5, "1 keep")])
def test_odd_plans_can_be_drawn(tmp_path: Path, step: PlannedStep) -> None:
    plans.draw_frontier(
        report_of(step=step, frontier=(step,), run=None, keep_seconds=None), tmp_path / "a.png"
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_plan_gives_the_same_picture(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plans.draw_frontier(report_of(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_without_a_plan_that_fits_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no plan fits its budget"):
        plans.draw_frontier(report_of(frontier=FRONTIER[:1]), tmp_path / "a.svg")
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        plans.draw_frontier(report_of(), tmp_path / "a.pdf")


# A line in a log


def test_a_new_plan_is_told_in_one_line() -> None:
    before = Plan((OFFLOAD,) * 12, window=10 * MIB)
    plan = Plan((OFFLOAD,) * 9 + (KEEP,) * 3, window=10 * MIB, prediction=Prediction(1.53, 0.0, 84 * MIB, 0))
    first = describe_plan(NAMES, plan, None, "3 steps were measured")
    assert first == (
        "offload layers 0-8, keep layers 9-11; predicted peak 84.0 MiB, step 1.53 s; "
        "made because 3 steps were measured"
    )
    assert "; before: offload all 12 layers; " in describe_plan(NAMES, plan, before, "why")
    waiting = dataclasses.replace(plan, prediction=Prediction(1.53, 0.25, 84 * MIB, 0))
    assert "step 1.53 s, 0.250 s of it waits;" in describe_plan(NAMES, waiting, before, "why")


def test_what_else_has_changed_is_told_where_placements_are_the_same() -> None:
    before = Plan((OFFLOAD,) * 12, window=10 * MIB)
    smaller = dataclasses.replace(before, window=None)
    assert describe_plan(NAMES, smaller, before, "why") == (
        "offload all 12 layers; window without limit instead of 10.0 MiB; made because why"
    )
