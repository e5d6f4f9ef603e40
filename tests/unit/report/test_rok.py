from __future__ import annotations

import csv
import dataclasses
import io
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tba_offload.config.policy import Placement
from tba_offload.errors import ConfigError, MissingDependencyError, RunLogError
from tba_offload.report import points as rok_points
from tba_offload.report import rok
from tba_offload.report.advice import advice
from tba_offload.report.log import RunHeader, RunLog, RunLogWriter, StepRecord
from tba_offload.report.points import RokPoint

MIB = 2**20
GIB = 2**30


def run(
    seconds: list[float],
    *,
    strategy: str = "offload",
    model: dict[str, object] | None = None,
    peaks: list[int | None] | None = None,
    **every: Any,
) -> RunLog:
    """A run log with one step for each time; ``every`` is the same for all steps."""
    every = {"model_flops": 6e12, "tokens": 1000, "gradients_allocated": True} | every
    peaks = peaks or [GIB] * len(seconds)
    steps = tuple(
        StepRecord(step=index, seconds=time, activation_peak_bytes=peak, **every)
        for index, (time, peak) in enumerate(zip(seconds, peaks, strict=True))
    )
    header = RunHeader(strategy=strategy, model={"batch_size": 4} if model is None else model)
    return RunLog(header=header, steps=steps, path=Path("run.jsonl"))


def save(log: RunLog, path: Path) -> Path:
    with RunLogWriter(path, log.header) as writer:
        for step in log.steps:
            writer.write(step)
    return path


def make(strategy: str, batch_size: int | None, peak: float, throughput: float, **more: Any) -> RokPoint:
    """A point with its peak in MiB, whose step time follows from its throughput."""
    seconds = 1e14 / throughput
    values: dict[str, Any] = {
        "strategy": strategy,
        "batch_size": batch_size,
        "activation_peak_bytes": int(peak * MIB),
        "throughput": throughput,
        "unit": "FLOP/s",
        "step_seconds": seconds,
        "step_seconds_quartiles": (seconds, seconds),
        "steps": 8,
        "source": f"runs/{strategy}-{batch_size}.jsonl",
        "peak_source": "cuda allocator",
    }
    return RokPoint(**values | more)


CURVES = [
    make("keep", 1, 300, 60e12),
    make("keep", 2, 600, 90e12),
    make("offload", 1, 120, 59e12),
    make("offload", 2, 200, 88e12),
    make("offload", 4, 380, 110e12),
    make("recompute", 2, 150, 68e12),
    make("recompute", 4, 290, 80e12),
]


# One run, one point


def test_a_point_has_the_largest_peak_and_the_median_speed() -> None:
    log = run([9, 9, 2, 3, 1], peaks=[50, 60, 10, 30, 20], peak_source="cuda allocator")
    point = rok_points.point(log)
    assert point.activation_peak_bytes == 30
    assert point.step_seconds == 2
    assert point.step_seconds_quartiles == (1.5, 2.5)
    assert point.throughput == 3e12
    assert point.unit == "FLOP/s"
    assert point.steps == 3
    assert (point.strategy, point.batch_size, point.source) == ("offload", 4, "run.jsonl")
    assert point.peak_source == "cuda allocator"
    assert point.gradients_allocated


@pytest.mark.parametrize(("steps", "counted"), [(1, 1), (2, 1), (4, 3), (5, 3), (10, 8)])
def test_the_default_warm_up_leaves_the_steps_that_it_says(steps: int, counted: int) -> None:
    assert rok_points.point(run([1.0] * steps)).steps == counted


def test_a_given_warm_up_is_taken() -> None:
    assert rok_points.point(run([1, 2, 3]), warmup=0).step_seconds == 2
    assert rok_points.point(run([1, 2, 3]), warmup=2).step_seconds == 3


def test_a_warm_up_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(RunLogError, match=r"run\.jsonl: 3 steps, and none is left after 3 of warm-up"):
        rok_points.point(run([1, 2, 3]), warmup=3)
    with pytest.raises(RunLogError, match="0 steps"):
        rok_points.point(run([]))


def test_a_negative_warm_up_is_an_error() -> None:
    with pytest.raises(ConfigError, match="warmup must be 0 or more steps, and is -1"):
        rok_points.point(run([1]), warmup=-1)


def test_tokens_stand_in_where_flops_are_unknown() -> None:
    point = rok_points.point(run([2.0], model_flops=None))
    assert (point.throughput, point.unit) == (500, "tokens/s")


def test_a_unit_that_the_run_does_not_know_is_an_error() -> None:
    with pytest.raises(RunLogError, match="FLOP/s cannot be told; only tokens/s can"):
        rok_points.point(run([2.0], model_flops=None), unit="FLOP/s")
    with pytest.raises(RunLogError, match="some steps tell neither model_flops nor tokens"):
        rok_points.point(run([2.0], model_flops=None, tokens=None))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_step_time_that_cannot_be_is_an_error(seconds: float) -> None:
    with pytest.raises(RunLogError, match=r"run\.jsonl: step 0 took .* seconds"):
        rok_points.point(run([seconds]))


def test_steps_that_measured_memory_do_not_count_for_the_time_if_there_are_others() -> None:
    assert rok_points.point(run([1, 1, 9, 3, 5, 9], peaks=[None, None, 7, None, None, 8])).step_seconds == 4
    assert rok_points.point(run([1, 1, 9, 3, 5, 9], peaks=[7] * 6)).step_seconds == 7


def test_a_step_takes_as_long_as_with_its_update() -> None:
    point = rok_points.point(run([1.5, 1.5, 1.5], optimizer_seconds=0.5))
    assert (point.step_seconds, point.throughput) == (2, 3e12)


def test_runs_can_be_compared_by_all_that_lies_on_the_device(tmp_path: Path) -> None:
    """The activation peak does not count optimizer states, so it cannot show what offloading these gains."""
    few, many = (
        run([2.0], strategy="states", device_peak_bytes=3 * GIB),
        run([1.0], device_peak_bytes=5 * GIB),
    )
    few = replace(few, others=({"event": "states", "optimizer": 0},))
    by_activations = [rok_points.point(log) for log in (few, many)]
    assert [point.name for point in rok_points.pareto(by_activations)] == ["offload at batch size 4"]
    assert any("--memory device compares" in sentence for sentence in advice(by_activations))
    by_device = [rok_points.point(log, memory="device") for log in (few, many)]
    assert [point.peak_bytes for point in by_device] == [3 * GIB, 5 * GIB]
    assert len(rok_points.pareto(by_device)) == 2
    told = " ".join(advice(by_device))
    assert "states has the lowest device peak (3.00 GiB)" in told
    assert "activation" not in told
    assert "largest device peak" in rok.text(by_device)
    assert [row["device_peak_bytes"] for row in rok.rows(by_activations)] == [3 * GIB, 5 * GIB]
    with pytest.raises(RunLogError, match="no device peak was measured in the 1 counted steps"):
        rok_points.points([save(run([1.0]), tmp_path / "run.jsonl")], memory="device")


def test_a_run_needs_no_other_peak_than_that_it_is_compared_by() -> None:
    log = run([1.0], peaks=[None], device_peak_bytes=5 * GIB)
    point = rok_points.point(log, memory="device")
    assert (point.peak_bytes, point.activation_peak_bytes) == (5 * GIB, None)
    with pytest.raises(RunLogError, match="no activation peak was measured"):
        rok_points.point(log)


def test_runs_of_which_some_tell_no_update_are_doubted() -> None:
    points = [rok_points.point(run([1.0] * 3, optimizer_seconds=seconds)) for seconds in (None, 0.5)]
    doubt = "The update is not in the time of a step of offload at batch size 4."
    assert doubt in advice(points)
    assert doubt not in advice(points[:1])
    assert doubt in advice([replace(points[0], offloads_states=True)])  # what that costs is in the update


def test_steps_without_an_update_count_in_nothing() -> None:
    log = run([9, 9, 1.0, 5.0, 1.0], peaks=[GIB, GIB, GIB, 9 * GIB, GIB])
    steps = [replace(step, skipped=step.step == 3) for step in log.steps]
    point = rok_points.point(replace(log, steps=tuple(steps)))
    assert (point.steps, point.step_seconds, point.activation_peak_bytes) == (2, 1.0, GIB)
    nothing = replace(log, steps=tuple(replace(step, skipped=True) for step in log.steps))
    with pytest.raises(
        RunLogError, match="5 steps, and none is left after 2 of warm-up and 3 without an update"
    ):
        rok_points.point(nothing)


def test_gradients_that_are_counted_apart_are_no_doubt() -> None:
    apart = run([1.0] * 4, gradients_allocated=False, gradient_bytes=GIB)
    assert rok_points.point(apart).gradients_allocated
    assert not rok_points.point(run([1.0] * 4, gradients_allocated=False)).gradients_allocated


def test_an_activation_peak_must_have_been_measured() -> None:
    assert rok_points.point(run([1, 1, 1], peaks=[9, None, 7])).activation_peak_bytes == 7
    with pytest.raises(RunLogError, match="no activation peak was measured in the 2 counted steps"):
        rok_points.point(run([1, 1, 1], peaks=[9, None, None]))
    with pytest.raises(RunLogError, match="the activation peak is -1 bytes"):
        rok_points.point(run([1], peaks=[-1]))


def test_one_late_gradient_marks_the_point() -> None:
    log = run([1, 1, 1])
    late = replace(log.steps[-1], gradients_allocated=False)
    assert not rok_points.point(replace(log, steps=(*log.steps[:-1], late))).gradients_allocated


@pytest.mark.parametrize("batch_size", [None, "4", 4.0, True])
def test_a_batch_size_that_is_no_whole_number_is_unknown(batch_size: object) -> None:
    point = rok_points.point(run([1], model={"batch_size": batch_size}))
    assert point.batch_size is None
    assert point.name == "offload (run.jsonl)"


def test_the_model_is_compared_without_its_batch_size() -> None:
    small, large = (rok_points.point(run([1], model={"layers": 2, "batch_size": size})) for size in (1, 8))
    other = rok_points.point(run([1], model={"layers": 3, "batch_size": 1}))
    assert small.model == large.model != other.model


# Several runs


def test_points_take_the_unit_that_all_runs_know(tmp_path: Path) -> None:
    both = save(run([1.0]), tmp_path / "both.jsonl")
    tokens = save(run([1.0], model_flops=None), tmp_path / "tokens.jsonl")
    assert [point.unit for point in rok_points.points([both, both])] == ["FLOP/s", "FLOP/s"]
    assert [point.unit for point in rok_points.points([both, tokens])] == ["tokens/s", "tokens/s"]


def test_runs_without_a_common_unit_are_an_error(tmp_path: Path) -> None:
    flops = save(run([1.0], tokens=None), tmp_path / "flops.jsonl")
    tokens = save(run([1.0], model_flops=None), tmp_path / "tokens.jsonl")
    with pytest.raises(RunLogError, match=r"flops\.jsonl: FLOP/s; .*tokens\.jsonl: tokens/s"):
        rok_points.points([flops, tokens])


def test_lines_follow_the_batch_size() -> None:
    unknown = make("keep", None, 5, 1.0)
    lines = rok_points.lines([unknown, CURVES[4], CURVES[1], CURVES[0], CURVES[2]])
    assert lines == {"keep": [CURVES[0], CURVES[1], unknown], "offload": [CURVES[2], CURVES[4]]}
    assert list(lines) == ["keep", "offload"]


def test_the_pareto_set_is_sorted_and_free_of_what_is_beaten() -> None:
    names = [point.name for point in rok_points.pareto(CURVES)]
    assert names == [
        "offload at batch size 1",
        "recompute at batch size 2",
        "offload at batch size 2",
        "offload at batch size 4",
    ]


def test_equal_points_do_not_beat_each_other() -> None:
    twins = [make("keep", 1, 10, 5.0), make("offload", 1, 10, 5.0)]
    assert rok_points.pareto(twins) == twins


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=12))
def test_the_pareto_set_covers_every_run(pairs: list[tuple[int, int]]) -> None:
    points = [make("keep", index, peak, float(speed)) for index, (peak, speed) in enumerate(pairs)]
    best = rok_points.pareto(points)

    def at_least_as_good(one: RokPoint, other: RokPoint) -> bool:
        return one.activation_peak_bytes <= other.activation_peak_bytes and one.throughput >= other.throughput

    for point in points:
        assert any(at_least_as_good(winner, point) for winner in best)
        covered = any(
            at_least_as_good(other, point) and not at_least_as_good(point, other) for other in points
        )
        assert (point in best) == (not covered)


# Table, CSV, JSON


def test_the_markdown_table() -> None:
    keep = make("keep", 2, 600, 90e12, source="keep.jsonl")
    offload = make("offload", None, 1536, 8e12, source="a|b\n.jsonl")
    points = [
        replace(keep, step_seconds=1.5, step_seconds_quartiles=(1.25, 2)),
        replace(offload, step_seconds=0.1, step_seconds_quartiles=(0.0912, 0.1)),
    ]
    assert rok.text(points) == (
        "| Strategy | Batch | Peak GiB | TFLOP/s | Step s |    Quartiles | Steps | Pareto | Run          |\n"
        "| -------- | ----: | -------: | ------: | -----: | -----------: | ----: | -----: | ------------ |\n"
        "| keep     |     2 |    0.586 |    90.0 |   1.50 |    1.25-2.00 |     8 |      * | keep.jsonl   |\n"
        "| offload  |     ? |     1.50 |    8.00 |  0.100 | 0.0912-0.100 |     8 |        "
        "| a\\|b\\n.jsonl |\n"
        "\n"
        "Peak: largest activation peak of the counted steps, measured by: cuda allocator. Step: median "
        "wall-clock time, update included. Throughput: FLOPs, recomputation not counted, of a step / median "
        "step time.\n"
    )


def printed(points: list[RokPoint], width: int) -> list[str]:
    """The lines of the table on a terminal."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(rok.table(points))
    return [line for line in captured.get().splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (150, "Strategy Batch Peak MiB TFLOP/s Step s Quartiles Steps Pareto Run", ""),
        (80, "Strategy Batch Peak MiB TFLOP/s Step s Quartiles Pareto Run", "Steps"),
        (60, "Strategy Batch Peak MiB TFLOP/s Step s Pareto", "Quartiles, Steps, Run"),
        (40, "Strategy Batch Peak MiB TFLOP/s", "Step s, Quartiles, Steps, Pareto, Run"),
    ],
)
def test_the_terminal_table_leaves_out_columns_and_says_which(width: int, shown: str, left_out: str) -> None:
    points = [*CURVES, make("[red]mine", 2, 100, 70e12)]
    heading, _, *rest = printed(points, width)
    assert " ".join(heading.split()) == shown
    rows = [line.split() for line in rest[: len(points)]]
    assert [row[:2] for row in rows] == [[point.strategy, str(point.batch_size)] for point in points]
    said = " ".join(" ".join(rest[len(points) :]).split())
    assert said.startswith(f"No room here for {left_out}: see --csv or --json." if left_out else "Peak:")


@pytest.mark.parametrize("width", [30, 40, 60, 80, 150])
def test_no_digit_is_ever_shortened_and_labels_that_are_too_long_are(width: int) -> None:
    points = [make("recompute-offload, but with quite some more to say", 1024, 123456, 9.87e15), *CURVES]
    whole = rok.table(points)
    heading, _, *rest = printed(points, width)
    for column in whole.columns:
        if column.gives_way == "never" and column.heading in heading:
            end = heading.index(column.heading) + len(column.heading)
            cells = [line[:end].split()[-1] for line in rest[: len(points)] if line[:end].strip()]
            assert column.heading == "Pareto" or cells == list(column.cells)
    assert "Peak GiB" in heading
    assert "PFLOP/s" in heading
    assert ("recompute-offlo" in rest[0]) is (width >= 40)
    assert max(map(len, (heading, *rest))) <= width


def test_the_caption_of_tokens_speaks_of_tokens() -> None:
    assert "Throughput: tokens of a step" in rok.text([make("keep", 1, 1, 5.0, unit="tokens/s")])


def test_csv_and_rows_tell_the_same_in_plain_units() -> None:
    points = [CURVES[1], make("mine, yours", None, 700, 1.5, peak_source=None)]
    first, second = rok.rows(points)
    assert first == {
        "strategy": "keep",
        "batch_size": 2,
        "activation_peak_bytes": 600 * MIB,
        "peak_source": "cuda allocator",
        "gradients_allocated": True,
        "throughput": 90e12,
        "throughput_unit": "FLOP/s",
        "step_seconds": 1e14 / 90e12,
        "step_seconds_lower_quartile": 1e14 / 90e12,
        "step_seconds_upper_quartile": 1e14 / 90e12,
        "steps": 8,
        "pareto": True,
        "source": "runs/keep-2.jsonl",
        "device_peak_bytes": None,
        "memory": "activations",
    }
    parsed = list(csv.DictReader(io.StringIO(rok.csv_text(points))))
    for line, row in zip(parsed, (first, second), strict=True):
        assert line == {key: "" if value is None else str(value) for key, value in row.items()}


# Advice


def said(text: str) -> str:
    """The text without the line breaks and indents of this file."""
    return " ".join(text.split())


def test_advice_compares_strategies_at_equal_batch_size() -> None:
    assert advice(CURVES)[:3] == [
        said("""At batch size 1, offload has the lowest activation peak (120 MiB). Against keep, the fastest
        (300 MiB): offload needs 60.0% less at 98.3% of the throughput."""),
        said("""At batch size 2, recompute has the lowest activation peak (150 MiB). Against keep, the
        fastest (600 MiB): offload needs 66.7% less at 97.8% of the throughput; recompute needs 75.0% less at
        75.6% of the throughput."""),
        said("""At batch size 4, recompute has the lowest activation peak (290 MiB). Against offload, the
        fastest (380 MiB): recompute needs 23.7% less at 72.7% of the throughput."""),
    ]


def test_advice_tells_what_fits_in_the_same_memory_and_what_never_pays() -> None:
    assert advice(CURVES)[3:] == [
        said("""Within the activation peak of keep at batch size 2 (600 MiB), offload fits batch size 4
        (380 MiB), at 122% of its throughput."""),
        said("""No run of keep is in the Pareto set: for each, another run has no higher activation peak and
        is no slower."""),
    ]


def test_advice_finds_no_larger_batch_where_none_fits() -> None:
    points = [make("keep", 2, 200, 8e12), make("offload", 4, 201, 9e12)]
    assert advice(points) == []
    assert (
        "offload fits batch size 4"
        in advice([points[0], replace(points[1], activation_peak_bytes=200 * MIB)])[0]
    )


def test_advice_names_a_strategy_that_is_best_in_both() -> None:
    sentences = advice([make("offload", 2, 100, 9.0), make("keep", 2, 200, 8.0)])
    assert sentences[0] == said("""At batch size 2, offload has both the lowest activation peak (100 MiB) and
    the highest throughput.""")


@pytest.mark.parametrize("peak", [100, 300])
def test_advice_says_when_a_difference_may_be_noise(peak: float) -> None:
    fast = make("keep", 2, 200, 10.0, step_seconds_quartiles=(0.09, 0.12))
    slow = make("offload", 2, peak, 9.0, step_seconds_quartiles=(0.11, 0.13))
    assert "the difference may be noise" in advice([fast, slow])[0]
    apart = replace(slow, step_seconds_quartiles=(0.121, 0.13))
    assert not any("noise" in sentence for sentence in advice([fast, apart]))


def test_advice_survives_peaks_of_zero() -> None:
    sentences = advice([make("keep", 2, 0, 5.0), make("offload", 2, 0, 4.0)])
    assert sentences[0].startswith("At batch size 2, keep has both the lowest activation peak (0 B)")


@pytest.mark.parametrize(
    ("odd", "doubt"),
    [
        ({"steps": 2}, "Fewer than 3 steps counted for offload at batch size 1: run longer"),
        ({"gradients_allocated": False}, "Gradients did not exist yet when the base was read for offload at"),
        ({"peak_source": "mallinfo2"}, "measured in different ways (cuda allocator / mallinfo2)"),
        ({"peak_source": None}, "measured in different ways (cuda allocator / not stated)"),
        ({"model": '{"layers": 3}'}, "The runs are not all of one model"),
        ({"hardware": '{"gpu": "other"}'}, "The runs are not all of one hardware"),
    ],
)
def test_advice_doubts_what_deserves_it(odd: dict[str, Any], doubt: str) -> None:
    keep, offload = CURVES[0], CURVES[2]
    assert any(doubt in sentence for sentence in advice([keep, replace(offload, **odd)]))
    assert not any(doubt in sentence for sentence in advice([keep, offload]))


def test_advice_on_one_strategy_asks_for_another() -> None:
    assert advice(CURVES[:2]) == [
        "Only one strategy was measured: add runs with other placements to compare."
    ]


# Picture


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("A.SVG", b"<?xml")])
def test_the_suffix_picks_the_kind_and_the_picture_is_reproducible(
    tmp_path: Path, name: str, start: bytes
) -> None:
    rok.draw(CURVES, tmp_path / name)
    first = (tmp_path / name).read_bytes()
    assert first.startswith(start)
    rok.draw(CURVES, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


def test_the_picture_does_not_depend_on_the_users_style_and_leaves_it_alone(tmp_path: Path) -> None:
    import matplotlib as mpl

    rok.draw(CURVES, tmp_path / "plain.svg")
    with mpl.rc_context({"font.size": 30, "lines.linewidth": 9}):
        before = dict(mpl.rcParams)
        rok.draw(CURVES, tmp_path / "styled.svg")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "styled.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()


def test_drawing_leaves_pyplot_and_torch_alone(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from tba_offload.report.points import RokPoint\n"
        "from tba_offload.report.rok import draw\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"draw([{CURVES[0]!r}], sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "a.png"], check=True)


def test_the_picture_shows_what_runs_are_compared_by() -> None:
    from tba_offload.report.picture import rok_figure

    (axes,) = rok_figure([make("states", 1, 9, 60e12, memory="device", device_peak_bytes=400 * MIB)]).axes
    assert axes.get_xlabel() == "Device peak (MiB), measured by: cuda allocator"
    assert [*axes.lines[0].get_xydata()[0]] == [400, 60]


def test_the_picture_names_axes_units_and_lines() -> None:
    from tba_offload.report.picture import rok_figure

    figure = rok_figure(CURVES)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "Activation peak (MiB), measured by: cuda allocator"
    assert axes.get_ylabel() == "Model throughput (TFLOP/s, recomputation not counted)"
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    (legend,) = figure.legends
    entries = [text.get_text() for text in legend.get_texts()]
    assert entries == ["keep", "offload", "recompute", "Pareto set", "batch size"]
    assert sorted(text.get_text() for text in axes.texts) == ["1", "1", "2", "2", "2", "4", "4"]


def test_no_two_strategies_look_alike() -> None:
    from tba_offload.report.picture import rok_figure

    names = ["keep", "offload", *(f"strategy {number}" for number in range(20))]
    points = [dataclasses.replace(CURVES[0], strategy=name) for name in names]
    (legend,) = rok_figure(points).legends
    looks = {(str(handle.get_color()), str(handle.get_marker())) for handle in legend.get_lines()}
    assert len(looks) == len(names) + 2  # the ring of the Pareto set, and the digit


def test_each_line_goes_through_its_points() -> None:
    from tba_offload.report.picture import rok_figure

    (axes,) = rok_figure(CURVES).axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]  # type: ignore[union-attr]
    assert [[300.0, 60.0], [600.0, 90.0]] in drawn
    assert [[120.0, 59.0], [200.0, 88.0], [380.0, 110.0]] in drawn
    ringed = [
        [point.activation_peak_bytes / MIB, point.throughput / 1e12] for point in rok_points.pareto(CURVES)
    ]
    assert ringed in drawn


def test_the_pareto_staircase_never_promises_more_than_was_measured() -> None:
    from tba_offload.report.picture import rok_figure

    points = [make("keep", 1, 100, 50e12), make("keep", 2, 200, 70e12), make("keep", 4, 300, 80e12)]
    (axes,) = rok_figure(points).axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]  # type: ignore[union-attr]
    assert [[100.0, 50.0], [200.0, 50.0], [200.0, 70.0], [300.0, 70.0], [300.0, 80.0]] in drawn


batch_sizes = st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=5, unique=True)


@given(
    sizes=st.tuples(batch_sizes, batch_sizes, batch_sizes), memory=st.floats(0.2, 3), speed=st.floats(0.6, 1)
)
@settings(max_examples=8)
def test_labels_do_not_overlap(sizes: tuple[list[int], ...], memory: float, speed: float) -> None:
    from tba_offload.report.picture import rok_figure

    points = [
        make(strategy, size, 100 + 100 * size * memory**index, 1e14 * speed**index * size / (size + 2))
        for index, (strategy, batch) in enumerate(zip(("keep", "offload", "recompute"), sizes, strict=True))
        for size in batch
    ]
    (axes,) = rok_figure(points).axes
    boxes = [label.get_window_extent() for label in axes.texts]
    assert len(boxes) == len(points)
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_strange_labels_are_drawn_as_they_are_and_fit(tmp_path: Path) -> None:
    from tba_offload.report.picture import rok_figure

    strange = [
        "$x",
        "$x$",
        "_hidden",
        "<b>&",
        "far too long a label to be shown whole",
        " ",
        "\\frac",
        "a\nb",
    ]
    points = [make(label, 2, 100 + 10 * index, 1.0) for index, label in enumerate(strange)]
    figure = rok_figure(points)
    (legend,) = figure.legends
    entries = [text.get_text().strip() for text in legend.get_texts()]
    assert entries[:5] == ["$x", "$x$", "_hidden", "<b>&", "far too long a label to be …"]
    assert len(entries) == len(strange) + 2
    assert legend.get_window_extent().width <= figure.bbox.width
    rok.draw(points, tmp_path / "a.svg")


def test_every_strategy_looks_different_and_the_plain_ones_always_the_same() -> None:
    from tba_offload.report.picture import _looks

    plain = [placement.value for placement in Placement if placement is not Placement.AUTO]
    looks = _looks(["a", *plain, "b", "c", "d", "e", "f", "g"])
    assert len(set(looks.values())) == len(looks)
    assert all(_looks(["z", name])[name] == looks[name] for name in plain)


@pytest.mark.parametrize(
    "points",
    [
        [make("keep", None, 300, 60.0)],
        [make("keep", 1, 0, 60.0)],
        [make("keep", 1, 5, 60.0), make("keep", 1, 5, 60.0)],
        [make("keep", 1, 5, 1e-3, unit="tokens/s"), make("offload", 1, 5, 2e7, unit="tokens/s")],
    ],
    ids=["no batch size", "nothing", "twins", "extremes"],
)
def test_odd_points_can_be_drawn(tmp_path: Path, points: list[RokPoint]) -> None:
    rok.draw(points, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


@pytest.mark.parametrize("name", ["a.pdf", "a", ".svg"])
def test_another_suffix_is_an_error_that_names_the_legal_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        rok.draw(CURVES, tmp_path / name)


def test_nothing_or_mixed_units_cannot_be_drawn(tmp_path: Path) -> None:
    mixed = [CURVES[0], replace(CURVES[1], unit="tokens/s")]
    for points in ([], mixed):
        with pytest.raises(ConfigError, match="all with the same unit of throughput"):
            rok.draw(points, tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tba_offload.report.picture", raising=False)
    monkeypatch.delattr("tba_offload.report.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tba-offload\[plots\]'"):
        rok.draw(CURVES, tmp_path / "a.svg")
