"""Training on several ranks through megatron-core's own schedules: bit for bit the same with a session.

The ranks are processes that talk over the loopback interface; what they do is in ``megatron_ranks``.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron_masters
import megatron_ranks
import pytest
import torch
from harness import PATIENCE, made
from megatron_masters import KINDS, SUB_GROUP
from megatron_ranks import JOB_SECONDS, MICRO_BATCH, SEQUENCE, STEPS, Job, Layout
from models import same_bits
from pretrain_runs import slow

from tba_offload.report.log import read_run_log
from tba_offload.report.ranks import path_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warm import Warm

    from tba_offload.report.log import RunLog, StepRecord

pytestmark = pytest.mark.megatron

FOUR = ("0", "1", "2", "3")
WIDE = 256
"""A width at which the buffers of all parameters are larger than what is copied for a second run."""
STAGES = (("0", "1"), ("2", "3"))
WITH_SECOND_TOKEN = (
    ("decoder.layers.0", "decoder.layers.1"),
    ("decoder.layers.2", "decoder.layers.3", "mtp.layers.0.*"),
)
ENCODER_AND_DECODER = ("encoder:0", "encoder:1", "decoder:0", "decoder:1")

LAYOUTS = {
    "attention recomputed by Megatron": Layout(STAGES, recompute_attention=True),
    "tensor and sequence": Layout((FOUR,), model="llama", tensor=2, sequence_parallel=True, bf16=True),
    "interleaved pipeline": Layout((("0", "2"), ("1", "3")), chunks=2, micro_batches=(4, 4, 4)),
    "second token": Layout(WITH_SECOND_TOKEN, model="mtp", micro_batches=(4, 4, 4)),
    "distributed optimizer, wide": Layout(
        (FOUR,), data=2, distributed_optimizer=True, bf16=True, hidden=WIDE
    ),
    "experts and tensor": Layout((FOUR,), model="moe", tensor=2, expert=2, sequence_parallel=True),
    "experts, balanced by counts, in a pipeline": Layout(STAGES, model="balanced moe"),
    "bert in a pipeline": Layout(STAGES, model="bert"),
    "t5": Layout((ENCODER_AND_DECODER,), model="t5", tensor=2),
}

MIXED = ("recompute", "offload", "keep", "auto")
"""Of the first four layers; what follows them begins anew."""


def placements(variant: str, layout: Layout) -> dict[str, str]:
    layers = [layer for stage in layout.stages for layer in stage]
    layers.sort(key=lambda layer: (not layer.startswith("encoder"), layer))
    wanted = MIXED if variant == "mixed" else [variant]
    return dict(zip(layers, itertools.cycle(wanted), strict=False))


IN_TURN = (("offload", "recompute", "mixed"), ("offload", "keep", "mixed"), ("offload", "mixed"))
"""Variants of layouts, in turn: the mixed one keeps and recomputes layers too."""
INPUTS = "recompute-offload"
INPUTS_TRAVEL = ("tensor and sequence", "t5")
"""Layouts in which one more variant recomputes all layers from inputs that travel."""


def variants_of(name: str) -> tuple[str, ...]:
    variants = IN_TURN[list(LAYOUTS).index(name) % len(IN_TURN)]
    return (*variants, INPUTS) if name in INPUTS_TRAVEL else variants


def policy_of(variant: str, layout: Layout) -> str:
    """Everything that reasonably can be is written, and little may be in memory."""
    rules = ""
    if variant == "mixed":
        rules = "layers:\n" + "".join(
            f'  - match: "{layer}"\n    placement: {placement}\n'
            for layer, placement in placements(variant, layout).items()
        )
    default = "offload" if variant == "mixed" else variant
    window = "4KiB" if variant == INPUTS else "32KiB"  # inputs are few
    return f"default: {default}\n{rules}budget:\n  in_flight_bytes: {window}\nmin_tensor_bytes: 1KiB\n"


def make_job(name: str, directory: Path) -> Job:
    layout = LAYOUTS[name]
    variants: dict[str, list[str] | None] = {"plain": None}
    for variant in variants_of(name):
        policy = directory / f"{variant}.yaml"
        policy.write_text(policy_of(variant, layout))
        drives = [made(directory / f"{variant}-drive{number}") for number in range(2)]
        variants[variant] = [
            *("--tba-policy", str(policy), "--tba-store", "file"),
            *("--tba-run-log", str(directory / f"{variant}.jsonl")),
            *("--tba-directory", *map(str, drives)),
        ]
    return Job(layout, variants, str(directory))


def run_ranks(python: Warm, job: Job) -> None:
    done = python.run(megatron_ranks.__file__, str(job.save()), timeout=JOB_SECONDS + PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    statuses = json.loads(done.stdout.splitlines()[-1])
    if any(status != 0 for status in statuses):
        said = [job.output(rank).read_text()[-4000:] for rank in range(job.layout.ranks)]
        pytest.fail(f"the ranks ended with {statuses}\n" + "\n---\n".join(said))


SHORT = {"tensor and sequence", "bert in a pipeline"}
"""Layouts that run everywhere; the others beside Megatron's training loop only."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[slow] * (name not in SHORT)) for name in LAYOUTS])
def test_training_is_the_same_bit_for_bit(name: str, python_with_megatron: Warm, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    job = make_job(name, tmp_path)
    run_ranks(python_with_megatron, job)
    check_bits(job, variants_of(name))
    for variant in variants_of(name):
        logs = read_logs(job, variant)
        for rank, log in enumerate(logs):
            check_header(layout, variant, log)
            history = torch.load(job.results(variant, rank))
            check_steps(layout, placements(variant, layout), rank, log, history)
    left = [file for drive in tmp_path.glob("*-drive*") for file in drive.iterdir()]
    assert left == []


# Layers that are the planner's

AUTO_STEPS = 7
AGREED_BEHIND = tuple(range(1, AUTO_STEPS))
"""The steps behind which ranks agree: each of the first sixteen."""

AUTO_LAYOUTS = {
    "tensor and sequence": Layout((FOUR,), tensor=2, sequence_parallel=True),
    "interleaved pipeline": Layout(
        (("0", "1", "4", "5"), ("2", "3", "6", "7")), chunks=2, micro_batches=(4, 4, 4)
    ),
}

AUTO_VARIANTS = {"auto": False, "auto within a budget": True, "auto at odds": False}
"""Whether each has a budget. Everything fits into it in the end, so that what is tried before can be
foretold."""


def make_auto_job(layout: Layout, directory: Path) -> Job:
    variants: dict[str, list[str] | None] = {"plain": None}
    for variant, has_budget in AUTO_VARIANTS.items():
        drive = made(directory / f"{variant}-drive")
        variants[variant] = [
            *("--tba-placement", "auto", "--tba-store", "file", "--tba-directory", str(drive)),
            *("--tba-run-log", str(directory / f"{variant}.jsonl")),
            *("--tba-policy", str(directory / "policy.yaml")),
            *(("--tba-activation-bytes", f"{512 * layout.hidden}KiB") if has_budget else ()),
        ]
    # Or the first step may keep everything on a busy machine, and nobody learns how fast the drive is.
    policy = "budget:\n  in_flight_bytes: 32KiB\nmin_tensor_bytes: 1KiB\non_slow: wait\n"
    (directory / "policy.yaml").write_text(policy)
    return Job(layout, variants, str(directory), AUTO_STEPS, at_odds=("auto at odds",))


@slow
@pytest.mark.parametrize("name", AUTO_LAYOUTS)
def test_the_planner_changes_no_bit(name: str, python_with_megatron: Warm, tmp_path: Path) -> None:
    layout = AUTO_LAYOUTS[name]
    job = make_auto_job(layout, tmp_path)
    run_ranks(python_with_megatron, job)
    check_bits(job, AUTO_VARIANTS)
    for variant in AUTO_VARIANTS:
        histories = [torch.load(job.results(variant, rank)) for rank in range(layout.ranks)]
        check_agreement(layout, variant, histories)
        for log, history in zip(read_logs(job, variant), histories, strict=True):
            check_plans(layout, variant, log, history)
    assert [file for drive in tmp_path.glob("*-drive") for file in drive.iterdir()] == []


def check_agreement(layout: Layout, variant: str, histories: list[dict[str, Any]]) -> None:
    """Ranks that share layers recompute the same ones in each step, whatever each of them wanted."""
    assert {name for history in histories for name in history["placements"][0]} == {
        f"decoder.layers.{layer}" for layer in range(layout.layers)
    }
    for stage in range(layout.pipeline):
        ranks = [each for rank, each in enumerate(histories) if layout.stage_of(rank) == stage]
        done = [list(map(recomputed, each["placements"])) for each in ranks]
        assert all(each == done[0] for each in done)
        if variant == "auto at odds":
            # Each turn brings something new, and what comes is what the last of them wants.
            wanted = [list(map(recomputed, each["proposals"])) for each in ranks]
            assert [done[0][step] for step in AGREED_BEHIND] == wanted[-1][:-1]
            assert all(one != other for one, other in pairwise(wanted[-1]))
            assert all(each != wanted[-1] for each in wanted[:-1])


def recomputed(placements: dict[str, str]) -> frozenset[str]:
    return frozenset(name for name, placement in placements.items() if placement.startswith("recompute"))


def check_plans(layout: Layout, variant: str, log: RunLog, history: dict[str, Any]) -> None:
    count, placed = layout.micro_batches[-1], history["placements"]
    assert len(placed) == len(log.steps) == AUTO_STEPS
    for step, placements in zip(log.steps, placed, strict=True):
        assert step.scopes == len(placements) * count
        assert step.recomputed_scopes == len(recomputed(placements)) * count
    assert set(placed[0].values()) == {"auto"}
    assert "auto" not in {placement for step in placed[3:] for placement in step.values()}
    if variant == "auto within a budget":  # the first steps learn what recomputing takes
        assert set(placed[-1].values()) == {"keep"}
    plans = {event["step"]: event for event in log.others if event["event"] == "plan"}
    assert all(event["names"] == list(placed[-1]) for event in plans.values())
    told = {step: event["plan"]["placements"] for step, event in plans.items()}
    if variant == "auto at odds":  # whose plans come from the test: none of them was made from measured steps
        assert not told
    else:
        assert told[max(told)] == list(placed[-1].values())


def check_bits(job: Job, variants: Iterable[str]) -> None:
    for rank in range(job.layout.ranks):
        plain = torch.load(job.results("plain", rank))
        check_plain(job.layout, rank, plain, job.steps)
        for variant in variants:
            check_same(f"{variant} on rank {rank}", plain, torch.load(job.results(variant, rank)))


def check_plain(layout: Layout, rank: int, plain: dict[str, Any], steps: int) -> None:
    """The baseline is a training run worth comparing with."""
    is_last = layout.stage_of(rank) == layout.pipeline - 1
    counts = (
        (*layout.micro_batches, *layout.micro_batches[-1:] * (steps - STEPS)) if is_last else (0,) * steps
    )
    assert [len(step) for step in plain["losses"]] == list(counts)
    evaluated = counts[:STEPS] + counts[STEPS:][-1:]
    assert [len(step) for step in plain["evaluations"]] == list(evaluated)
    if is_last:
        assert len({number for step in plain["losses"] for each in step for number in each}) > steps
        assert plain["evaluations"][0] != plain["evaluations"][-1]
    kinds = Counter(name.split()[0] for name in plain["tensors"])
    assert kinds["gradient"] == steps * kinds["parameter"] > 0
    assert kinds["random"] > 1
    # What routers log, and what they balance by, counts a micro-batch once however often its layers run.
    assert (kinds["router"] > 0) == layout.has_experts
    counts = [name for name in plain["tensors"] if name.endswith("tokens_per_expert")]
    assert bool(counts) == (layout.model == "balanced moe")


def check_same(where: str, plain: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("losses", "evaluations", "norms"):
        assert other[name] == plain[name], f"{where}: {name}"
    assert other["tensors"].keys() == plain["tensors"].keys()
    for name, tensor in plain["tensors"].items():
        assert same_bits(other["tensors"][name].detach(), tensor.detach()), f"{where}: {name}"


def read_logs(job: Job, variant: str) -> list[RunLog]:
    path, ranks = Path(job.directory) / f"{variant}.jsonl", job.layout.ranks
    if ranks == 1:
        return [read_run_log(path)]
    logs = [read_run_log(path_of_rank(path, rank)) for rank in range(ranks)]
    assert [(log.header.rank, log.header.ranks) for log in logs] == [(rank, ranks) for rank in range(ranks)]
    assert len({log.header.run for log in logs}) == 1
    return logs


def check_header(layout: Layout, variant: str, log: RunLog) -> None:
    wanted = placements(variant, layout)
    assert len(log.header.plan) == len(wanted)
    for name, entry in log.header.plan.items():
        # By its number, alone or within a stack, by its name or by what is above it.
        number, stack, above = entry["layer"], name.partition(".")[0], name.rpartition(".")[0]
        (layer,) = {str(number), f"{stack}:{number}", name, f"{above}.*"} & wanted.keys()
        assert entry["placement"] == wanted[layer]


def check_steps(
    layout: Layout, wanted: dict[str, str], rank: int, log: RunLog, history: dict[str, Any]
) -> None:
    own = Counter(wanted[layer] for layer in layout.stages[layout.stage_of(rank)])
    assert len(log.steps) == STEPS
    recomputed = own["recompute"] + own[INPUTS]
    for step, count, reported in zip(log.steps, layout.micro_batches, history["losses"], strict=True):
        assert step.scopes == own.total() * count
        # Layers placed auto are recomputed in the steps that learn how long that takes.
        assert recomputed * count <= step.recomputed_scopes <= (recomputed + own["auto"]) * count
        assert step.tokens == count * MICRO_BATCH * layout.data * SEQUENCE / layout.ranks
        assert step.loss == mean_loss(layout, reported)
        assert step.left_alone_scopes == 0
        check_transfers(step, own)


def mean_loss(layout: Layout, reported: list[list[str]]) -> float | None:
    """The mean of means, or the sum over all tokens: as the training loop of Megatron does it."""
    if not reported:
        return None
    numbers = [[float.fromhex(number) for number in each] for each in reported]
    if layout.model == "bert":
        return sum(each[0] for each in numbers) / len(numbers)
    return sum(each[0] for each in numbers) / sum(each[1] for each in numbers)


def check_transfers(step: StepRecord, own: Counter[str]) -> None:
    """Where several layers are offloaded, what they save is more than may be in flight."""
    moved = step.offloaded_bytes + step.forwarded_bytes
    # The schedule itself holds what a stage is given, so the first of the inputs need not travel.
    if own["offload"] + max(own[INPUTS] - 1, 0) > 1:
        assert step.offloaded_bytes > 0
        assert step.read_bytes > 0
    if own["offload"] + own[INPUTS]:
        assert moved > 0
        assert step.fallback_kept_bytes == 0 or own["auto"]
    elif not own["auto"]:  # else a lesson keeps the layer, or recomputes it
        assert (moved, step.read_bytes, step.fallback_kept_bytes) == (0, 0, 0)


# Masters of Megatron's own optimizers


COUNTS_BYTES = 20_000
"""Bytes that counts of steps and stand-ins may take."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow] * (not kind.distributed)) for name, kind in KINDS.items()]
)
def test_parameters_masters_and_checkpoints_have_the_bits_of_plain_training(
    name: str, python_with_megatron: Warm, tmp_path: Path
) -> None:
    done = python_with_megatron.run(megatron_masters.__file__, name, str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    trained, reloaded, saved = json.loads(done.stdout.splitlines()[-1])
    masters = trained["masters"]
    assert masters > 6 * SUB_GROUP
    assert trained["away"] == masters * 3
    assert trained["updates"] == (4 if "fp16" in name else 5)
    assert trained["slots"] <= 3 * SUB_GROUP
    assert max(trained["grown"]) <= 4 * SUB_GROUP + COUNTS_BYTES  # slots, and what Adam makes for a moment
    assert max(reloaded["grown"]) <= 4 * SUB_GROUP + COUNTS_BYTES
    assert saved["tensors"] > 0
    assert max(saved["loaded"]) <= 2 * SUB_GROUP  # until enough is there for a sub-group
