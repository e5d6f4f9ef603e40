"""The demo: one tiny real run through the command line, its figures by hand, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from covering import full

from tba_lab.demo import drive
from tba_lab.demo.race import RaceError, Watch, measures_memory
from tba_lab.demo.run import WARM_UP, DemoSettings, describe, run_demo, summarize
from tba_lab.gpt import GptShape
from tba_offload import cli
from tba_offload.config import OffloadConfig
from tba_offload.config.policy import Placement
from tba_offload.errors import ConfigError
from tba_offload.report.log import RunHeader, RunLogWriter, StepRecord, read_run_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from click.testing import Result
    from warm import Warm

    from tba_lab.demo.race import Entrant

pytestmark = pytest.mark.megatron

TINY = (
    "--layers",
    "2",
    "--hidden",
    "32",
    "--heads",
    "2",
    "--sequence",
    "32",
    "--steps",
    "5",
    "--threads",
    "1",
)
STRATEGIES = ("keep", "recompute", "offload")
SHAPE = GptShape(layers=2, hidden=32, heads=2, sequence=32)
POLICY = """\
default: offload
layers:
  - match: 1
    placement: keep
budget:
  in_flight_bytes: 32KiB
store:
  kind: host
min_tensor_bytes: 1KiB
"""
MOVED = ("offloaded", "read", "forwarded", "deduplicated", "kept", "given_up", "held", "fallback_kept")
RATIOS = {
    "device_peak_offload_over_keep",
    *(f"{what}_offload_over_{other}" for what in ("peak", "time") for other in ("keep", "recompute")),
}
TIMES = {"time_offload_over_keep", "time_offload_over_recompute"}
FIGURES = {
    *("activation_peak_bytes", "activation_peak_bytes_median", "resident_peak_bytes"),
    *("step_seconds_median", "forward_backward_seconds_median", "stall_seconds_median"),
    *("tokens_per_second", "losses", "predicted_peak_bytes", "predicted_seconds"),
    *("predicted_peak_error", "predicted_seconds_error", "device_peak_bytes"),
    *("states_read_bytes", "states_written_bytes"),
    *(f"{name}_bytes" for name in MOVED),
}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def assert_structure(summary: dict[str, Any], *sizes: str) -> None:
    """Every figure that is promised, and no other."""
    assert set(summary) - {"trained"} == {
        *("batch_sizes", "ratios", "spread", "measured"),
        *("identical_losses", "identical_parameters"),
    }
    assert list(summary["batch_sizes"]) == list(summary["ratios"]) == list(summary["spread"]) == list(sizes)
    for size in sizes:
        assert tuple(summary["batch_sizes"][size]) == STRATEGIES
        assert all(set(figures) == FIGURES for figures in summary["batch_sizes"][size].values())
        assert set(summary["ratios"][size]) == RATIOS
        assert set(summary["spread"][size]) == TIMES
        for spread in summary["spread"][size].values():
            assert set(spread) == {"median", "low", "high"}
    assert set(summary["measured"]) == {
        *("activation_peak_bytes", "activation_peak_steps"),
        *("step_seconds_median", "warm_up_steps"),
    }


class Counting(Watch):
    ended = 0

    def end(self) -> None:
        self.ended += 1


# A real run


@dataclass(frozen=True)
class Run:
    said: str
    told: str
    """Standard output, and standard error."""
    output: Path
    policy: Path

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return summary

    def log(self, strategy: str) -> Path:
        return self.output / f"{strategy}-b2.jsonl"


FORKING = """
import multiprocessing, sys
from tba_offload.cli import main
context = multiprocessing.get_context
multiprocessing.get_context = lambda method: context("fork")
try:
    main(sys.argv[1:])
finally:
    assert multiprocessing.active_children() == []
"""
"""The command, whose processes do not import megatron-core again; tests of races start processes anew."""


@pytest.fixture(scope="module", params=["forked", pytest.param("started anew", marks=full)])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, python_with_megatron: Warm
) -> Run:
    """Three processes train a GPT on the text of the standard library, the last with a policy file."""
    directory = tmp_path_factory.mktemp("demo")
    policy = directory / "policy.yaml"
    policy.write_text(POLICY)
    output = directory / "new" / "output"
    arguments = ("demo", *TINY, "--batch-size", "2", "--output", str(output), "--policy", str(policy))
    if request.param == "forked":
        done = python_with_megatron.run("-c", FORKING, *arguments)
        assert done.returncode == 0, done.stderr
        return Run(done.stdout, done.stderr, output, policy)
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert multiprocessing.active_children() == []
    return Run(result.stdout, result.stderr, output, policy)


def test_a_run_leaves_logs_pictures_and_figures_and_nothing_else(finished: Run) -> None:
    assert {path.name for path in finished.output.iterdir()} == {
        *(f"{name}-b2.jsonl" for name in STRATEGIES),
        *("rok.svg", "rok.png", "summary.json"),
    }
    assert (finished.output / "rok.svg").read_bytes().startswith(b"<?xml")
    assert (finished.output / "rok.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_has_every_figure(finished: Run) -> None:
    assert_structure(finished.summary, "2")
    trained = finished.summary["trained"]
    assert trained["dtype"] in {"bf16", "fp32"}
    assert trained["instruction_set"] == torch.backends.cpu.get_cpu_capability()
    assert (trained["layers"], trained["hidden"], trained["sequence"], trained["steps"]) == (2, 32, 32, 5)
    for figures in finished.summary["batch_sizes"]["2"].values():
        assert figures["activation_peak_bytes"] >= figures["activation_peak_bytes_median"] > 0
        assert figures["step_seconds_median"] >= figures["forward_backward_seconds_median"] > 0
        assert len(figures["losses"]) == 5


def test_the_strategies_have_the_same_losses(finished: Run) -> None:
    keep, recompute, offload = (
        finished.summary["batch_sizes"]["2"][name]["losses"] for name in ("keep", "recompute", "offload")
    )
    assert keep == recompute == offload
    assert len(set(keep)) == 5
    assert finished.summary["identical_losses"] is True


def test_the_summary_is_that_of_the_run_logs(finished: Run) -> None:
    for name in STRATEGIES:
        figures, log = finished.summary["batch_sizes"]["2"][name], read_run_log(finished.log(name))
        assert log.header.strategy == name
        assert log.header.model["batch_size"] == 2
        assert {key: log.header.model[key] for key in ("layers", "hidden", "heads", "sequence")} == {
            "layers": 2,
            "hidden": 32,
            "heads": 2,
            "sequence": 32,
        }
        assert log.header.hardware["threads"] == 1
        assert log.header.hardware["instruction_set"] == finished.summary["trained"]["instruction_set"]
        assert log.header.model["dtype"] == finished.summary["trained"]["dtype"]
        assert [step.loss for step in log.steps] == figures["losses"]
        counted = log.steps[WARM_UP:]
        assert max(step.activation_peak_bytes or 0 for step in counted) == figures["activation_peak_bytes"]
        sources = {step.peak_source for step in counted if step.activation_peak_bytes is not None}
        assert sources == {finished.summary["measured"]["activation_peak_bytes"]}
        assert [step.activation_peak_bytes is None for step in log.steps] == [
            not measures_memory(round_) for round_ in range(len(log.steps))
        ]
        assert all(step.gradient_bytes for step in log.steps)  # made anew in each, as by default
        assert {step.tokens for step in log.steps} == {64}


def test_each_strategy_did_what_it_is_called(finished: Run) -> None:
    keep, recompute, offload = (read_run_log(finished.log(name)).steps for name in STRATEGIES)
    assert [step.recomputed_scopes for step in (keep[-1], recompute[-1], offload[-1])] == [0, 2, 0]
    assert [step.scopes for step in (keep[-1], recompute[-1], offload[-1])] == [2, 2, 2]
    assert all(step.offloaded_bytes == 0 for step in (*keep, *recompute))
    assert all(step.offloaded_bytes > 0 for step in offload)


def test_the_policy_file_is_that_of_the_offload_strategy_alone(finished: Run) -> None:
    policies = {
        name: OffloadConfig.from_yaml(read_run_log(finished.log(name)).header.policy or "")
        for name in STRATEGIES
    }
    assert policies["offload"] == OffloadConfig.from_yaml(POLICY)
    assert {name: policies[name].default.value for name in STRATEGIES} == {name: name for name in STRATEGIES}
    assert policies["keep"].layers == policies["recompute"].layers == ()
    offload = read_run_log(finished.log("offload"))
    assert offload.header.store["kind"] == "host"
    assert read_run_log(finished.log("keep")).header.store["kind"] == "file"
    # Nothing in so small a model reaches the default of 64 KiB.
    assert all(step.offloaded_bytes > 0 for step in offload.steps)


def test_the_console_says_what_was_run_and_found(finished: Run) -> None:
    text = finished.said
    chosen, fitted, described, *_ = text.splitlines()
    dtype, instructions = (finished.summary["trained"][name] for name in ("dtype", "instruction_set"))
    assert chosen.startswith(f"dtype {dtype}, the faster one: bf16 ")
    assert chosen.endswith(f"; instruction set {instructions}")
    assert fitted == "width 32, sequence 32, 5 steps: fits this machine"
    assert described.startswith(
        f"gpt with 2 layers of width 32, sequence 32, {dtype}, dropout 0.1; batch sizes 2; 5 steps"
    )
    assert f"Recompute, offload, keep ({dtype}, {instructions})" in text
    assert all(f" {name} " in text for name in STRATEGIES)
    assert "losses of the 3 strategies over 5 steps: identical to the last bit\n" in text
    assert f"activation peak: {finished.summary['measured']['activation_peak_bytes']}\n" in text
    assert f"curve: {finished.output / 'rok.png'}; figures: {finished.output / 'summary.json'}\n" in text
    ratio = finished.summary["ratios"]["2"]["peak_offload_over_keep"]
    assert f"batch size 2: offload needs {ratio:.3f} x the activation peak of keep" in text
    lines = finished.told.splitlines()
    assert lines[0] == "loading PyTorch and megatron-core"
    assert "starting 3 processes at batch size 2: keep, recompute, offload" in lines
    (first,) = (line for line in lines if line.startswith("step 1 of 15 (keep, batch size 2) took "))
    assert re.search(r"took \d+\.\d\d s; .+ to .+ to go$", first)
    last = "15 steps done", "drawing the curve"
    assert [line for line in lines if line in last] == [*last]


def test_rok_reads_the_run_logs(finished: Run) -> None:
    logs = [str(finished.log(name)) for name in STRATEGIES]
    result = call("rok", "--json", *logs, "--warmup", str(WARM_UP))
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    assert [point["strategy"] for point in points] == list(STRATEGIES)
    assert [point["activation_peak_bytes"] for point in points] == [
        finished.summary["batch_sizes"]["2"][name]["activation_peak_bytes_median"] for name in STRATEGIES
    ]


def test_a_step_of_each_strategy_is_told_over_time(finished: Run) -> None:
    for name in STRATEGIES:
        picture = finished.output.parent / f"{name}.svg"
        result = call("timeline", str(finished.log(name)), "-o", str(picture))
        assert result.exit_code == 0, result.output
        assert "memory was not measured" not in picture.read_text()


def test_an_output_with_run_logs_is_not_mixed_with_another_run(finished: Run) -> None:
    before = {path: path.read_bytes() for path in finished.output.iterdir()}
    result = call("demo", *TINY, "--output", str(finished.output))
    assert_one_line(
        result, 1, f"{finished.output} holds run logs of another run (keep-b2.jsonl); choose a new directory"
    )
    assert {path: path.read_bytes() for path in finished.output.iterdir()} == before


# Races that did not take place


def figures(seconds: float, peak: int | None, loss: float = 1.0, **others: Any) -> dict[str, Any]:
    moved = {f"{name}_bytes": 0 for name in MOVED}
    return {
        "activation_peak_bytes": peak,
        "peak_source": "nowhere",
        "resident_peak_bytes": None,
        "device_peak_bytes": None if peak is None else peak + 1000,
        "states": [],
        "parameters": None,
        "whole_step_seconds": seconds,
        "seconds": seconds / 2,
        "stall_seconds": 0.0,
        "tokens": 64,
        "loss": loss,
        "predicted_peak_bytes": None,
        "predicted_seconds": None,
        **moved,
        **others,
    }


WARM = [figures(1000.0, None, loss=float(number)) for number in range(WARM_UP)]
PLAYED = [*WARM, figures(1000.0, 100), figures(1.0, None)]
"""The least that makes a summary: one step measures memory, one time."""


def fake_race(rounds: dict[str, list[dict[str, Any]]], seen: list[dict[str, Any]]) -> Callable[..., Any]:
    """A race that hands out figures, and writes the run logs that the entrants would have written."""

    def race(entrants: Mapping[str, Entrant], steps: int, *, watch: Watch) -> dict[str, list[dict[str, Any]]]:
        for name, entrant in entrants.items():
            seen.append(dict(entrant.arguments) | {"environment": dict(entrant.environment)})
            if entrant.arguments["run_log"] is None:
                continue
            with RunLogWriter(entrant.arguments["run_log"], RunHeader(strategy=name)) as log:
                for step in range(steps):
                    watch.begin()
                    watch.end()
                    log.write(StepRecord(step=step, seconds=1.0, tokens=64, activation_peak_bytes=2**20))
        return rounds

    return race


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of the entrants of races that are only played."""
    seen: list[dict[str, Any]] = []
    rounds = dict.fromkeys(STRATEGIES, PLAYED)
    monkeypatch.setattr("tba_lab.demo.run.race", fake_race(rounds, seen))
    monkeypatch.setattr("tba_lab.demo.run.write_text", lambda directory: directory)
    return seen


def measured(*peaks: int) -> list[dict[str, Any]]:
    """Steps that measured memory; how long they took must not matter."""
    return [figures(500.0, peak, offloaded_bytes=9) for peak in peaks]


def timed(*seconds: float) -> list[dict[str, Any]]:
    return [figures(each, None) for each in seconds]


def test_summary_by_hand() -> None:
    lanes = {
        "keep": [*WARM, *measured(100, 400, 300), *timed(1.0, 2.0, 2.0)],
        "recompute": [*WARM, *measured(50, 40, 45), *timed(2.0, 4.0, 4.0)],
        "offload": [
            *WARM,
            *measured(10, 20, 12),
            figures(2.0, None, offloaded_bytes=7, resident_peak_bytes=5),
            figures(3.0, None, offloaded_bytes=9, resident_peak_bytes=6),
            figures(8.0, None, offloaded_bytes=9),
        ],
    }
    summary = summarize({2: lanes})
    assert_structure(summary, "2")
    keep, offload = summary["batch_sizes"]["2"]["keep"], summary["batch_sizes"]["2"]["offload"]
    assert (keep["activation_peak_bytes"], keep["activation_peak_bytes_median"]) == (400, 300)
    assert (keep["step_seconds_median"], keep["forward_backward_seconds_median"]) == (2.0, 1.0)
    assert keep["tokens_per_second"] == 32.0
    assert (offload["offloaded_bytes"], offload["resident_peak_bytes"]) == (9, 6)
    assert keep["losses"] == [0.0, 1.0, 2.0, *[1.0] * 6]  # of all steps, those of the warm-up too
    assert summary["ratios"]["2"] == {
        "peak_offload_over_keep": 20 / 400,
        "peak_offload_over_recompute": 20 / 50,
        "device_peak_offload_over_keep": 1020 / 1400,
        "time_offload_over_keep": 2.0,  # of 2, 1.5 and 4
        "time_offload_over_recompute": 1.0,  # of 1, 0.75 and 2
    }
    assert summary["spread"]["2"] == {
        "time_offload_over_keep": {"median": 2.0, "low": 1.75, "high": 3.0},
        "time_offload_over_recompute": {"median": 1.0, "low": 0.875, "high": 1.5},
    }
    assert summary["identical_losses"] is True
    assert summary["measured"]["warm_up_steps"] == WARM_UP


def test_a_planner_that_measured_memory_in_every_step_has_times_all_the_same() -> None:
    lanes = {
        "keep": [*WARM, *timed(1.0, 2.0), figures(4.0, 300)],
        "recompute": [*WARM, *timed(2.0, 4.0), figures(8.0, 50)],
        "auto": [*WARM, *(figures(each, 200) for each in (2.0, 2.0, 2.0))],
    }
    summary = summarize({2: lanes}, "auto")
    assert summary["batch_sizes"]["2"]["auto"]["step_seconds_median"] == 2.0
    assert summary["ratios"]["2"]["time_auto_over_keep"] == 0.5  # in the round that measured both
    assert summary["ratios"]["2"]["time_auto_over_recompute"] == 0.25


@pytest.mark.parametrize("strategy", ["recompute", "offload"])
@pytest.mark.parametrize("step", [0, WARM_UP])
def test_one_loss_that_differs_in_the_last_bit_is_found(strategy: str, step: int) -> None:
    lanes = {name: [dict(one) for one in PLAYED] for name in STRATEGIES}
    assert summarize({2: lanes})["identical_losses"] is True
    lanes[strategy][step]["loss"] += 2.0**-50
    assert summarize({1: dict.fromkeys(STRATEGIES, lanes["keep"]), 2: lanes})["identical_losses"] is False


def test_losses_that_differ_are_an_error_on_the_console(
    seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = {name: [*PLAYED[:-1], figures(1.0, None, loss=float(name == "keep"))] for name in STRATEGIES}
    monkeypatch.setattr("tba_lab.demo.run.race", fake_race(rounds, seen))
    result = call("demo", *TINY, "--batch-size", "1", "--output", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "losses of the 3 strategies over 5 steps: DIFFERENT" in result.stdout
    message = "Error: the losses of the strategies differ: this must not happen, please report it"
    assert result.stderr.splitlines()[-1] == message
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["identical_losses"] is False


def test_json_is_the_summary_and_nothing_else(seen: list[dict[str, Any]], tmp_path: Path) -> None:
    options = ("--batch-size", "4", "--batch-size", "1", "--batch-size", "4", "--json")
    result = call("demo", *TINY, *options, "--output", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout == (tmp_path / "out" / "summary.json").read_text()
    assert_structure(json.loads(result.stdout), "1", "4")
    assert [(one["batch_size"], one["strategy"]) for one in seen] == [
        (size, name) for size in (1, 4) for name in STRATEGIES
    ]


def test_without_a_policy_all_layers_do_the_same_in_a_window_that_grows(
    seen: list[dict[str, Any]], tmp_path: Path
) -> None:
    drives = (tmp_path / "a", tmp_path / "b")
    arguments = [argument for drive in drives for argument in ("--directory", str(drive))]
    sizes = ("--batch-size", "2", "--batch-size", "6", "--window", "3MiB")
    result = call("demo", *TINY, *sizes, *arguments, "--output", str(tmp_path / "out"))
    assert result.exit_code == 0
    for one in seen:
        config = OffloadConfig.from_yaml(one["config"])
        assert (config.default, config.layers) == (Placement(one["strategy"]), ())
        assert config.budget.in_flight_bytes == 3 * 2**20 * one["batch_size"] // 2
        assert (config.store.kind, config.store.directories) == ("file", drives)
        assert one["environment"] == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        assert one["shape"].dtype in {"bf16", "fp32"}
        assert (dataclasses.replace(one["shape"], dtype=SHAPE.dtype), one["steps"], one["threads"]) == (
            SHAPE,
            5,
            1,
        )


@pytest.mark.parametrize("stall", [0.05, 0.25])
def test_a_drive_that_is_waited_for_is_told(
    stall: float, seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = {"stall_seconds": stall, "offloaded_bytes": 3 * 10**9, "read_bytes": 2 * 10**9}
    kept = [*PLAYED[:-1], figures(0.5, None)]
    ours = [*WARM, figures(1000.0, 100, **slow), figures(1.0, None, **slow)]
    rounds = {"keep": kept, "recompute": kept, "offload": ours}
    monkeypatch.setattr("tba_lab.demo.run.race", fake_race(rounds, seen))
    result = call("demo", *TINY, "--batch-size", "1", "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    told = "  offload waits for the drive, which would have to read and write 10.0 GB/s to move 4.66 GiB in"
    assert (told in result.stdout) is (stall > 0.1)


def test_a_control_tells_the_noise_and_is_not_in_the_curve(
    seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = dict.fromkeys(STRATEGIES, PLAYED) | {"control": [*PLAYED[:-1], figures(1.25, None)]}
    monkeypatch.setattr("tba_lab.demo.run.race", fake_race(rounds, seen))
    result = call("demo", *TINY, "--batch-size", "1", "--control", "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert (
        "  noise: keep once more, in a process of its own, took 1.250 x the step time of keep"
        in result.stdout
    )
    assert [one["strategy"] for one in seen] == [*STRATEGIES, "control"]
    assert [OffloadConfig.from_yaml(one["config"]).default for one in seen].count(Placement.KEEP) == 2
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary["spread"]["1"]) == TIMES | {"time_control_over_keep"}
    assert {path.name for path in (tmp_path / "out").glob("*.jsonl")} == {
        f"{name}-b1.jsonl" for name in STRATEGIES
    }


def test_a_run_that_would_take_too_long_is_one_line(
    seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def slow(*_: object, watch: Watch) -> None:
        watch.begin()
        time.sleep(0.01)  # or longer; all steps together are to take a millisecond
        watch.end()

    monkeypatch.setattr("tba_lab.demo.run.race", slow)
    result = call("demo", *TINY, "--time-limit", str(0.001 / 60), "--json", "--output", str(tmp_path / "out"))
    assert_one_line(result, 1, "longer than 0 s: give fewer --steps, a shorter --sequence")
    assert "--time-limit" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_offloaded_bytes_go_to_a_directory_of_their_own_that_is_removed(
    seen: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = DemoSettings(shape=SHAPE, batch_sizes=(1,), steps=5, output=tmp_path / "out")
    watch = Counting()
    run_demo(settings, watch=watch)
    assert watch.ended == len(settings.planned_steps()) == 15
    (directory,) = {OffloadConfig.from_yaml(one["config"]).store.directories for one in seen}
    assert [path.parent for path in directory] == [settings.output]
    assert not directory[0].exists()


def test_a_strategy_that_fails_leaves_no_scratch(
    seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def race(*_: object, **__: object) -> None:
        raise RaceError("offload: its process ended with status -9")

    monkeypatch.setattr("tba_lab.demo.run.race", race)
    result = call("demo", *TINY, "--json", "--output", str(tmp_path / "out"))
    assert_one_line(result, 1, "offload: its process ended with status -9")
    assert list((tmp_path / "out").iterdir()) == []


# What it refuses


def assert_one_line(result: Result, status: int, message: str) -> None:
    """Exit status, one line that says what is wrong, and no traceback."""
    assert result.exit_code == status
    assert isinstance(result.exception, SystemExit)  # click ended it; nothing else came through
    *usage, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line
    assert all(line.startswith(("Usage: ", "Try ", "loading PyTorch")) for line in usage if line)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "fp64"), "'fp64' is not one of 'auto', 'bf16', 'fp32'"),
        (("--style", "bert"), "'bert' is not one of 'gpt', 'llama'"),
        (("--layers", "0"), "0 is not in the range x>=1"),
        (("--batch-size", "0"), "0 is not in the range x>=1"),
        (("--sequence", "-1"), "-1 is not in the range x>=1"),
        (("--threads", "0"), "0 is not in the range x>=1"),
        (("--steps", "3"), "3 is not in the range x>=5"),
        (("--dropout", "1"), "1.0 is not in the range 0<=x<1"),
        (("--policy", "no-such-policy.yaml"), "File 'no-such-policy.yaml' does not exist"),
        (("--policy", "."), "File '.' is a directory"),
        (("--nonsense",), "No such option"),
    ],
)
def test_a_wrong_option_has_exit_status_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = call("demo", "--output", str(tmp_path / "out"), *arguments)
    assert_one_line(result, 2, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--output", "--directory"])
def test_a_file_where_a_directory_must_be(option: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    result = call("demo", "--output", str(tmp_path / "out"), option, str(path))
    assert_one_line(result, 2, f"Directory '{path}' is a file")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hidden", "100", "--heads", "12"), "no such model: hidden 100 is not a multiple of heads 12"),
        (
            ("--hidden", "60", "--heads", "12", "--style", "llama"),
            "rotary positions need an even head size, not 5",
        ),
        (("--window", "10"), "'10' has no unit; write one of "),
        (("--window", "much"), "'much' is not a size; write a number and a unit"),
    ],
)
def test_what_makes_no_run_is_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert_one_line(call("demo", "--output", str(tmp_path / "out"), *arguments), 1, message)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_policy_is_named_with_its_line(seen: list[dict[str, Any]], tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: offload\nbudgt: 1GiB\n")
    result = call("demo", *TINY, "--json", "--output", str(tmp_path / "out"), "--policy", str(policy))
    assert_one_line(result, 1, f"{policy}:2: budgt: unknown key")
    assert seen == []


@pytest.mark.parametrize(
    ("steps", "sizes", "message"),
    [
        (3, (1,), "steps is 3: too few for 3 that warm up, one that measures memory, one for time"),
        (4, (1,), "steps is 4: too few"),
        (5, (), r"batch sizes are \(\), and each must be at least 1"),
        (5, (2, 0), r"batch sizes are \(2, 0\), and each must be at least 1"),
    ],
)
def test_settings_that_make_no_run(steps: int, sizes: tuple[int, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoSettings(shape=SHAPE, batch_sizes=sizes, steps=steps, output=tmp_path)


def test_one_line_says_what_is_trained(tmp_path: Path) -> None:
    settings = DemoSettings(shape=SHAPE, batch_sizes=(2, 4), steps=20, output=tmp_path)
    assert describe(settings) == (
        "gpt with 2 layers of width 32, sequence 32, bf16, dropout 0.1; batch sizes 2, 4; "
        "20 steps of keep, recompute, offload in turn; window 1MiB"
    )


# Optimizer states


def test_a_step_is_held_against_what_the_drive_needs() -> None:
    def step(seconds: float, travelled: int) -> dict[str, Any]:
        states = [{"read_bytes": travelled // 4, "written_bytes": travelled // 4}]
        half = {"offloaded_bytes": travelled // 4, "read_bytes": travelled // 4}
        return {"whole_step_seconds": seconds, "states": states, **half}

    bound_by_drive, bound_by_keep = (step(3.0, 2000), step(1.0, 0)), (step(3.0, 400), step(2.0, 0))
    assert drive.travelled(bound_by_drive[0]) == 2000
    assert drive.over_bound([bound_by_drive], rate=1000.0).median == 3.0 / 2.0
    assert drive.over_bound([bound_by_keep], rate=1000.0).median == 3.0 / 2.0
    assert drive.over_bound([bound_by_drive], rate=4000.0).median == 3.0


@pytest.mark.full
@pytest.mark.parametrize("states", ["offload", "backward"])
def test_a_lane_that_offloads_optimizer_states_too(states: str, tmp_path: Path) -> None:
    larger = ("--hidden", "512", "--batch-size", "2")  # or all states fit the slots
    result = call("demo", *TINY, *larger, "--output", str(tmp_path), "--states", states)
    assert result.exit_code == 0, result.output
    assert "parameters of the 4 strategies over 5 steps: identical to the last bit" in result.stdout
    assert "with optimizer states offloaded too: 0." in result.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert tuple(summary["batch_sizes"]["2"]) == (*STRATEGIES, "states")
    assert summary["ratios"]["2"]["device_peak_states_over_keep"] < 1
    figures = summary["batch_sizes"]["2"]["states"]
    assert figures["states_read_bytes"] > 2**20 < figures["states_written_bytes"]
    of_drive = summary["drive"]["2"]
    moved = sum(figures[f"{name}_bytes"] for name in ("offloaded", "read", "states_read", "states_written"))
    assert of_drive["travelled_bytes"] == pytest.approx(moved, rel=0.2)
    over_keep = summary["spread"]["2"]["time_states_over_keep"]["median"]
    assert 0 < of_drive["time_states_over_bound"]["median"] <= over_keep
    assert "which the drive reads and writes at" in result.stdout
    assert [event["event"] for event in read_run_log(tmp_path / "states-b2.jsonl").others].count(
        "states"
    ) == 5


@pytest.mark.full
def test_states_and_activations_within_a_share_of_what_keep_has_on_the_device(tmp_path: Path) -> None:
    larger = ("--hidden", "256", "--sequence", "64", "--batch-size", "4", "--steps", "9")
    auto = ("--policy", "auto", "--device-budget", "85%", "--states", "auto")
    result = call("demo", *TINY, *larger, "--output", str(tmp_path), *auto)
    assert result.exit_code == 0, result.output
    assert "parameters of the 4 strategies over 9 steps: identical to the last bit" in result.stdout
    found = json.loads((tmp_path / "summary.json").read_text())["device_budget"]["4"]
    assert found["lane"] == "states"
    assert found["bytes"] > found["peak_bytes"] > 0
    assert found["kept"] is True
    assert found["predicted_peak_bytes"] > 0 < found["predicted_seconds"]
    assert 0 <= found["travelling"] <= found["sub_groups"]
    assert "device budget of " in result.stdout
    log = read_run_log(tmp_path / "states-b4.jsonl")
    assert "states_plan" in {event["event"] for event in log.others}


def test_states_are_auto_within_a_device_budget(tmp_path: Path) -> None:
    auto = ("--policy", "auto", "--states", "auto")
    result = call("demo", *TINY, "--output", str(tmp_path), *auto)
    assert result.exit_code == 1
    assert "--states auto needs --device-budget" in result.output


def test_parameters_that_differ_are_found() -> None:
    lanes = {name: [*PLAYED[:-1], {**PLAYED[-1], "parameters": "1f"}] for name in STRATEGIES}
    assert summarize({2: lanes})["identical_parameters"] is True
    lanes["offload"][-1]["parameters"] = "2f"
    assert summarize({2: lanes})["identical_parameters"] is False


# Auto


@pytest.mark.full
def test_auto_plans_within_a_share_of_keeps_peak(tmp_path: Path) -> None:
    larger = ("--hidden", "128", "--sequence", "128", "--batch-size", "2")  # or no tensor is worth its way
    auto = ("--policy", "auto", "--budget", "60%", "--json", "--steps", "8")
    result = call("demo", *TINY, *larger, "--output", str(tmp_path), *auto)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["identical_losses"]
    for lanes in summary["batch_sizes"].values():
        assert tuple(lanes) == ("keep", "recompute", "auto")
        assert lanes["auto"]["predicted_seconds"] > 0
        assert lanes["auto"]["predicted_peak_bytes"] > 0
        assert lanes["keep"]["predicted_seconds"] is None
    ratios = {f"{what}_auto_over_{other}" for what in ("peak", "time") for other in ("keep", "recompute")}
    ratios.add("device_peak_auto_over_keep")
    assert all(set(found) == ratios for found in summary["ratios"].values())
    log = read_run_log(next(tmp_path.glob("auto-*.jsonl")))
    assert "activation_bytes" in (log.header.policy or "")
    assert {event["event"] for event in log.others} == {"memory", "plan", "timeline"}


@pytest.mark.parametrize("budget", ["x%", "-3%", "0%", "12"])
def test_a_budget_is_a_size_or_a_share(budget: str, tmp_path: Path) -> None:
    result = call("demo", *TINY, "--output", str(tmp_path), "--policy", "auto", "--budget", budget)
    assert result.exit_code == 1
    assert "a budget is a size" in result.output or "has no unit" in result.output


@pytest.mark.parametrize("budget", ["--budget", "--device-budget"])
def test_a_budget_is_for_auto(budget: str, tmp_path: Path) -> None:
    result = call("demo", *TINY, "--output", str(tmp_path), budget, "64MiB")
    assert result.exit_code == 1
    assert "a budget is for --policy auto" in result.output
    assert "measuring" not in result.output


# Drives that fail.

OFFLOADING = (
    *("--layers", "3", "--hidden", "96", "--heads", "4", "--sequence", "32", "--batch-size", "2"),
    *("--steps", "5", "--dtype", "fp32", "--window", "256KiB", "--threads", "1"),
)
"""A model so large that some of its activations travel."""
