"""Points of ROK curves, what follows from them, and the picture."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tba_offload.errors import ConfigError, MissingDependencyError, RunLogError
from tba_offload.report import rok
from tba_offload.report.log import RunHeader, RunLogWriter, StepRecord
from tba_offload.report.rok import RokPoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MIB, GIB = 2**20, 2**30


def save(path: Path, seconds: Sequence[float], peaks: Sequence[int | None] = (), **every: Any) -> Path:
    """Write a log with one step for each time; ``every`` is the same for all steps."""
    every = {"model_flops": 6e12, "tokens": 1000} | every
    header = {name: every.pop(name) for name in ("strategy", "model") if name in every}
    header = {"strategy": "offload", "model": {"batch_size": 4}} | header
    with RunLogWriter(path, RunHeader(**header)) as writer:
        for index, time in enumerate(seconds):
            peak = peaks[index] if peaks else GIB
            source = {"peak_source": None if peak is None else "cuda allocator"} | every
            writer.write(StepRecord(step=index, seconds=time, activation_peak_bytes=peak, **source))
    return path


def make(strategy: str, batch_size: int, peak: int, throughput: float) -> RokPoint:
    """A point with its peak in MiB, whose step time follows from its throughput."""
    seconds = 1e14 / throughput
    quartiles = {"lower_quartile_seconds": seconds, "upper_quartile_seconds": seconds}
    speed: dict[str, Any] = {"throughput": throughput, "unit": "FLOP/s", "step_seconds": seconds, **quartiles}
    run = {"strategy": strategy, "batch_size": batch_size, "source": f"runs/{strategy}-{batch_size}.jsonl"}
    memory = {"activation_peak_bytes": peak * MIB, "peak_source": "cuda allocator"}
    return RokPoint(**run, **memory, **speed, steps=8)


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


def test_a_point_has_the_largest_peak_and_the_median_speed(tmp_path: Path) -> None:
    path = save(tmp_path / "run.jsonl", [9, 2, 3, 1, 6], [50, 10, 30, 20, 10], peak_source="cuda allocator")
    (point,) = rok.points([path])
    assert point.activation_peak_bytes == 30
    assert point.step_seconds == 2.5
    assert (point.lower_quartile_seconds, point.upper_quartile_seconds) == (1.75, 3.75)
    assert (point.throughput, point.unit, point.steps) == (2.4e12, "FLOP/s", 4)
    assert (point.strategy, point.batch_size, point.source) == ("offload", 4, str(path))
    assert point.peak_source == "cuda allocator"


def test_a_run_without_steps_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty, run = save(tmp_path / "empty.jsonl", []), save(tmp_path / "run.jsonl", [1.0])
    assert rok.points([empty, run]) == rok.points([run])
    (told,) = caplog.messages
    assert "empty.jsonl: no steps after the warm-up, so the curve has no point" in told
    with pytest.raises(RunLogError, match=r"empty\.jsonl: no steps after the warm-up"):
        rok.points([empty])


def test_runs_share_a_unit(tmp_path: Path) -> None:
    both = save(tmp_path / "both.jsonl", [2.0])
    tokens = save(tmp_path / "tokens.jsonl", [2.0], model_flops=None)
    flops = save(tmp_path / "flops.jsonl", [2.0], tokens=None)
    assert [point.unit for point in rok.points([both, flops])] == ["FLOP/s"] * 2
    assert [(point.unit, point.throughput) for point in rok.points([both, tokens])] == [("tokens/s", 500)] * 2
    with pytest.raises(RunLogError, match=r"flops\.jsonl, .*tokens\.jsonl: these logs have no common unit"):
        rok.points([flops, tokens])


def test_runs_can_be_compared_by_all_that_lies_on_the_device(tmp_path: Path) -> None:
    path = save(tmp_path / "run.jsonl", [1.0], [None], device_peak_bytes=5 * GIB)
    (point,) = rok.points([path], memory="device")
    assert (point.peak_bytes, point.activation_peak_bytes, point.peak_name) == (5 * GIB, None, "device peak")
    with pytest.raises(
        RunLogError, match="activation_peak_bytes is missing in all 1 steps after the warm-up"
    ):
        rok.points([path])


def test_the_pareto_set_is_sorted_and_free_of_what_is_beaten() -> None:
    found = [(point.strategy, point.batch_size) for point in rok.pareto(CURVES)]
    assert found == [("offload", 1), ("recompute", 2), ("offload", 2), ("offload", 4)]
    twins = [make("keep", 1, 10, 5.0), make("offload", 1, 10, 5.0)]
    assert rok.pareto(twins) == twins


def test_the_picture_has_axes_from_zero_and_a_line_for_each_strategy() -> None:
    with rok.drawing():
        figure = rok.rok_figure([replace(point, title="$x$") for point in CURVES])
    (axes,) = figure.axes
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)
    assert axes.get_xlabel() == "Activation peak (MiB)"
    assert axes.get_ylabel() == "Model throughput (TFLOP/s)"
    drawn = [line.get_xydata().tolist() for line in axes.lines]  # type: ignore[union-attr]
    assert [[120.0, 59.0], [200.0, 88.0], [380.0, 110.0]] in drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["keep", "offload", "recompute", "Pareto set"]
    assert sorted(text.get_text() for text in axes.texts) == ["1", "1", "2", "2", "2", "4", "4"]


def test_runs_of_several_contexts_are_labelled_by_the_tokens_of_a_sequence(tmp_path: Path) -> None:
    logs = []
    for strategy, scale in (("keep", 4), ("recompute-offload", 1)):
        for length in (4096, 8192):
            path, model = tmp_path / f"{strategy}-{length}.jsonl", {"name": "Llama", "seq_length": length}
            peaks = [scale * length] * 3
            logs.append(save(path, [2, 2, 2], peaks, strategy=strategy, model=model, tokens=length))
    found = rok.points(logs)
    assert [point.sequence for point in found] == [4096, 8192, 4096, 8192]
    assert {point.title for point in found} == {"Llama"}
    assert found[0].name == "keep at 4096 tokens"
    assert [sentence.partition(",")[0] for sentence in rok.advice(found)[:2]] == [
        "At 4096 tokens",
        "At 8192 tokens",
    ]
    assert "Tokens" in rok.table(found).headings
    with rok.drawing():
        figure = rok.rok_figure(found)
    assert figure.legends[0].get_title().get_text() == "Numbers are tokens of a sequence"
    assert sorted(text.get_text() for text in figure.axes[0].texts) == ["4096", "4096", "8192", "8192"]
    (alone,) = rok.points(logs[:1])
    assert (alone.sequence, alone.title) == (None, "Llama, seq length 4096")


def test_what_cannot_be_drawn_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        rok.draw(CURVES, tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tba-offload\[plots\]'"):
        rok.draw(CURVES, tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []
