"""A training script on ``megatron.training`` of the installed package: data, evaluation, checkpoints, reruns.

Losses of micro-batches and digests of parameters are compared, with a run of the same script to which nothing
is attached.
"""

from __future__ import annotations

import json
import re
import warnings
from typing import TYPE_CHECKING

import pytest
from commands import call
from covering import of_which
from pretrain_runs import (
    OFFLOADING,
    ON_A_CPU,
    PLAIN,
    SCRIPT,
    STEPS,
    TINY,
    Figures,
    fork,
    needs_training,
    train,
)

from tba_offload.megatron.arguments import CONFLICTS
from tba_offload.report.log import MEMORY, RunLog, read_run_log

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900), needs_training]

LAYERS = 4
TOKENS = 64
"""In a micro-batch."""
PLACEMENTS = {
    "offload": {},
    "recompute": {0: "recompute", 1: "recompute", 2: "recompute", 3: "recompute"},
    "mixed": {1: "recompute", 3: "keep"},
}
"""Layers that are not offloaded."""


def tba_flags(directory: Path, placement: str = "mixed") -> tuple[str, ...]:
    """Small activations travel too, or none of this model would; the run log is ``run.jsonl``."""
    directory.mkdir(exist_ok=True)
    (directory / "drive").mkdir(exist_ok=True)
    rules = "".join(
        f"  - match: {layer}\n    placement: {name}\n" for layer, name in PLACEMENTS[placement].items()
    )
    policy = directory / "policy.yaml"
    policy.write_text(
        f"layers:{' []' * (not rules)}\n{rules}budget:\n  in_flight_bytes: 64KiB\nmin_tensor_bytes: 1KiB\n"
        "on_slow: wait\n"  # or a first step on a drive that hangs may write nothing to learn from
    )
    return (
        *("--tba-policy", str(policy), "--tba-directory", str(directory / "drive"), "--tba-checksum"),
        *("--tba-run-log", str(directory / "run.jsonl")),
    )


def offload(
    python: Warm | None,
    directory: Path,
    *flags: str,
    placement: str = "mixed",
    batch: int = 4,
    says: str = "",
) -> tuple[Figures, RunLog]:
    own = tba_flags(directory, placement)
    (found,) = train(python, OFFLOADING, directory / "figures", *flags, *own, batch=batch, says=says)
    assert list((directory / "drive").iterdir()) == []
    return found, read_run_log(directory / "run.jsonl")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, python_with_scripts: Warm) -> Figures:
    (found,) = train(python_with_scripts, PLAIN, tmp_path_factory.mktemp("plain"))
    assert len(found.of("train")) == 2 * STEPS
    # Twice on the way, then once with each of the other splits; two micro-batches each.
    assert [iteration for iteration, _ in found.of("valid")] == [2, 2, *[STEPS] * 6]
    assert len(set(found.losses)) == len(found.losses)
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_and_evaluation_are_those_of_the_plain_run(
    placement: str, plain: Figures, tmp_path: Path, python_with_scripts: Warm
) -> None:
    found, log = offload(python_with_scripts, tmp_path, placement=placement)
    assert found == plain
    assert [step.step for step in log.steps] == [1, 2, 3, 4]  # evaluations are none
    recomputed = sum(name == "recompute" for name in PLACEMENTS[placement].values())
    for step in log.steps:
        assert (step.scopes, step.recomputed_scopes) == (2 * LAYERS, 2 * recomputed)
        assert (step.offloaded_bytes > 0) is (placement != "recompute")
    static = [event["static"] for event in log.others if event["event"] == MEMORY][-1]
    assert static["states"] >= 2 * static["parameters"] > 0  # Adam's two, in fp32
    losses = [float.fromhex(loss) / TOKENS for _, loss in plain.of("train")]
    means = [sum(pair) / 2 for pair in zip(losses[::2], losses[1::2], strict=True)]
    assert [step.loss for step in log.steps] == means
    if placement == "mixed":
        assert log.header.plan == {
            "decoder.layers.0": {"layer": 0, "placement": "offload", "why": "default"},
            "decoder.layers.1": {"layer": 1, "placement": "recompute", "why": "rule '1' (line 2)"},
            "decoder.layers.2": {"layer": 2, "placement": "offload", "why": "default"},
            "decoder.layers.3": {"layer": 3, "placement": "keep", "why": "rule '3' (line 4)"},
        }


@pytest.mark.parametrize(("method", "count", "taken"), [("uniform", 2, LAYERS), ("block", 2, 2)])
def test_recomputation_by_megatron_is_taken_over(
    method: str, count: int, taken: int, tmp_path: Path, python_with_scripts: Warm
) -> None:
    """The bits are those of Megatron's own recomputation, and the inputs of its layers are offloaded."""
    flags = ("--recompute-granularity", "full", "--recompute-method", method)
    flags += ("--recompute-num-layers", str(count))
    (alone,) = train(python_with_scripts, PLAIN, tmp_path / "alone", *flags)
    found, log = offload(python_with_scripts, tmp_path / "taken", *flags, placement="offload")
    assert found == alone
    placements = [each["placement"] for each in log.header.plan.values()]
    assert placements == ["recompute-offload"] * taken + ["offload"] * (LAYERS - taken)
    for step in log.steps:
        assert (step.recomputed_scopes, step.left_alone_scopes) == (2 * taken, 0)
        assert step.offloaded_bytes > 0


def read_curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Iteration and value of every point; TensorBoard stores them in single precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TensorBoard uses of others
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(directory))
        events.Reload()
        return {
            tag: [(point.step, point.value) for point in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }


# Checkpoints

HALF = STEPS // 2
REPEATABLE = ("--hidden-dropout", "0")
"""Without a GPU the data loaders draw from the generator that hidden dropout draws from, once a process: one
that resumes has drawn once more. Dropout within attention has a generator of its own, which is part of the
checkpoint."""

SAVINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "save": ((), "successfully saved checkpoint"),
    "async-save": (
        ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"),
        "scheduled an async checkpoint save",
    ),
}
"""Flags, and what Megatron says when it saves so."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, python_with_scripts: Warm) -> Figures:
    (found,) = train(python_with_scripts, PLAIN, tmp_path_factory.mktemp("uninterrupted"), *REPEATABLE)
    return found


@pytest.mark.parametrize("saving", of_which(SAVINGS, "async-save"))
def test_a_run_that_is_resumed_ends_as_the_one_that_was_not_interrupted(
    saving: str, uninterrupted: Figures, tmp_path: Path
) -> None:
    """Every step is saved; if asynchronously, by a process that forks while the next one trains."""
    how, says = SAVINGS[saving]
    checkpoints = (*REPEATABLE, "--save", str(tmp_path / "checkpoints"), "--save-interval", "1", *how)
    first, log = offload(None, tmp_path / "first", *checkpoints, "--exit-interval", str(HALF), says=says)
    assert len(log.steps) == HALF
    board = tmp_path / "board"
    resume = ("--load", str(tmp_path / "checkpoints"), "--tensorboard-dir", str(board))
    second, log = offload(None, tmp_path / "second", *checkpoints, *resume, placement="offload", says=says)
    assert len(log.steps) == STEPS - HALF
    assert first.losses + second.losses == uninterrupted.losses
    assert first.parameters != second.parameters == uninterrupted.parameters
    curves = read_curves(board)
    for name in ("lm loss", "tba-offload/offloaded_bytes"):
        assert [iteration for iteration, _ in curves[name]] == [HALF + 1, STEPS]


# Steps that are not simply one after the other


def test_a_step_that_megatron_doubts_is_run_again_and_counts_twice(
    plain: Figures, tmp_path: Path, python_with_scripts: Warm
) -> None:
    found, log = offload(python_with_scripts, tmp_path, "--suspect-iteration", "3")
    again = [loss for loss in plain.of("train") if loss[0] == 3]
    expected = plain.of("train")
    expected[6:6] = again
    assert found.of("train") == expected
    assert (found.of("valid"), found.parameters) == (plain.of("valid"), plain.parameters)
    assert len(log.steps) == STEPS + 1
    third, fourth = log.steps[2:4]
    assert (third.loss, third.scopes) == (fourth.loss, fourth.scopes)


def test_the_batch_may_grow(tmp_path: Path, python_with_scripts: Warm) -> None:
    """From one micro-batch to two, after two steps."""
    schedule = ("--step-batch-size-schedule", f"0:2 {2 * TOKENS}:4")
    (expected,) = train(python_with_scripts, PLAIN, tmp_path / "plain", *schedule, batch=0)
    found, log = offload(python_with_scripts, tmp_path / "run", *schedule, batch=0)
    assert [iteration for iteration, _ in expected.of("train")] == [1, 2, 3, 3, 4, 4]
    assert found == expected
    assert [step.tokens for step in log.steps] == [TOKENS, TOKENS, 2 * TOKENS, 2 * TOKENS]
    assert [step.scopes for step in log.steps] == [LAYERS, LAYERS, 2 * LAYERS, 2 * LAYERS]
    flops = [step.model_flops for step in log.steps]
    assert flops[0] == flops[1] == flops[2] / 2 == flops[3] / 2


# Several ranks, whose layers are the planner's

STAGES = ("--pipeline-model-parallel-size", "2", "--num-layers", "8", "--eval-interval", "3")
ITERATIONS, FIRST = 12, 5
"""Steps, and those before the run is interrupted; the planner begins anew behind them."""
LONGER = ("--train-iters", str(ITERATIONS), *REPEATABLE)


def test_two_stages_plan_save_and_resume_and_train_the_same(
    tmp_path: Path, python_with_scripts: Warm
) -> None:
    """At first everything would fit into the budget, and later nothing; evaluations come in between."""
    expected = train(python_with_scripts, PLAIN, tmp_path / "plain", *STAGES, *LONGER, ranks=2)
    checkpoints = ("--save", str(tmp_path / "checkpoints"), "--save-interval", str(FIRST))
    common, own = (*STAGES, *LONGER, *checkpoints), tmp_path / "run"

    def part(name: str, budget: str, *flags: str) -> list[Figures]:
        auto = "--tba-placement", "auto", "--tba-activation-bytes", budget
        more = *common, *flags, *tba_flags(own, "offload"), *auto
        return train(python_with_scripts, OFFLOADING, tmp_path / name, *more, ranks=2)

    first = part("first", "1GiB", "--exit-interval", str(FIRST))
    second = part("second", "1KiB", "--load", str(tmp_path / "checkpoints"))
    assert [len(rank.losses) > 0 for rank in first] == [False, True]
    for rank in range(2):
        assert first[rank].losses + second[rank].losses == expected[rank].losses
        assert first[rank].parameters != second[rank].parameters == expected[rank].parameters
        log = read_run_log(own / f"run.rank{rank}.jsonl")
        assert log.header.rank == rank
        assert list(log.header.plan) == [f"decoder.layers.{layer}" for layer in range(8)]  # of all ranks
        assert last_plan(log) == {f"decoder.layers.{4 * rank + layer}": "keep" for layer in range(4)}
        later = read_run_log(own / f"run.2.rank{rank}.jsonl")
        assert len(later.steps) == ITERATIONS - FIRST
        assert last_plan(later).keys() == last_plan(log).keys()
        assert later.steps[-1].predicted_peak_bytes is not None
        assert "keep" not in last_plan(later).values()
        done = call("plan", later.path, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["names"] == list(last_plan(log))
    done = call("rok", own / "run.jsonl", "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.output)["points"]) == 1  # the run logs of two ranks are one point


def last_plan(log: RunLog) -> dict[str, str]:
    *_, event = (event for event in log.others if event["event"] == "plan")
    return dict(zip(event["names"], event["plan"]["placements"], strict=True))


# The command line


def test_a_flag_that_is_in_the_way_is_named_before_training(
    tmp_path: Path, python_with_scripts: Warm
) -> None:
    flags = (*TINY, *ON_A_CPU, "--distribute-saved-activations", *tba_flags(tmp_path))
    status, output = fork(python_with_scripts, (*OFFLOADING, str(SCRIPT), *flags), 1)
    assert status == 2
    assert "cannot be combined with --distribute-saved-activations" in " ".join(output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drive", "policy.yaml"]


def test_every_conflict_is_a_setting_of_some_release(python_with_scripts: Warm) -> None:
    """A flag that is renamed must not slip through."""
    _, text = fork(python_with_scripts, (*OFFLOADING, str(SCRIPT), "--help"), 1)
    known = {name.replace("-", "_") for name in re.findall(r"--([a-z0-9-]+)", text)}
    settings_only = {"cpu_offloading"}  # of the model's configuration, without a flag
    assert {conflict.name for conflict in CONFLICTS} - known <= settings_only
