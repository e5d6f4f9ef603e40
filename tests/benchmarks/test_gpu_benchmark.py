"""The benchmark for a GPU, on a CPU: it runs as a whole, finds other bits, and its figures add up."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import PATIENCE
from models import same_bits
from places import BENCHMARKS, TESTS
from torch import nn

from tba_offload.report.log_reader import read_run_log
from tba_offload.store.probe import Rates

sys.path.append(str(BENCHMARKS))  # behind all others: it has an io.py

import gpu
import gpu_timeline
from gpu_timeline import COMPUTE, FROM_HOST, READS, TO_HOST, WRITES
from gpu_ways import OURS, WAYS, Size, Subject, Way, make_way

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from warm import Warm

SCRIPT = TESTS / "gpu.sh"
SIZE = Size.parse("128x3x64x2", "fp32")
"""Just so large that what it saves is offloaded; fp32 is fast on every CPU, bf16 is not."""

CPU = torch.device("cpu")


def settings_for(tmp_path: Path, *ways: str, **others: Any) -> gpu.Settings:
    for name in ("drive", "tmpfs"):
        (tmp_path / name).mkdir()
    given = {
        "device": CPU,
        "sizes": (SIZE,),
        "model": "torch",
        "ways": ways,
        "rounds": 2,
        "minutes": None,
        "budget": 0.5,
        "window": None,
        "drive": tmp_path / "drive",
        "tmpfs": tmp_path / "tmpfs",
        "output": tmp_path,
        "timeline": (),
    }
    return gpu.Settings(**(given | others))


@pytest.fixture
def subject() -> Iterator[Subject]:
    made = Subject("torch", SIZE, CPU)
    yield made
    made.close()


# As a whole


def test_it_runs_on_a_cpu(tmp_path: Path, python_with_torch: Warm) -> None:
    ways = ("recompute", "save_on_cpu", "deepspeed", "host", "drive", "auto, tmpfs")
    command = [
        *(str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--model", "torch"),
        *("--size", "128x3x64x2", "--size", "128x3x64x4", "--rounds", "8", "--window", "64KiB"),
        *(part for way in ways for part in ("--way", way)),
        *("--drive", str(tmp_path), "--tmpfs", str(tmp_path), "--timeline", "drive"),
        *("--output", str(tmp_path / "results")),
    ]
    ended = python_with_torch.run(*command, timeout=5 * PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert "two attached models" not in ended.stderr  # all ways have one, and each opens its own steps only
    (folder,) = (tmp_path / "results").iterdir()
    document = json.loads((folder / "results.json").read_text())
    assert {"started", "machine", "versions", "command", "sizes", "rok"} == set(document)
    assert document["versions"]["torch"] == torch.__version__
    for size in document["sizes"]:
        rows = {row["name"]: row for row in size["rows"]}
        assert list(rows) == ["keep", *(way for way in ways if way != "deepspeed")]
        assert "No module named 'deepspeed'" in size["left_out"]["deepspeed"]
        assert all(row["same_bits"] for row in rows.values())
        assert rows["keep"]["over_keep"]["median"] == rows["keep"]["peak_over_keep"] == 1.0
        assert rows["drive"]["written"] + rows["drive"]["forwarded"] > 3 * 128 * 64 * 2 * 2
        assert rows["drive"]["bound_seconds"] >= rows["keep"]["forward"] + rows["keep"]["backward"]
        assert rows["save_on_cpu"]["written"] == 0
        assert set(size["timelines"]["drive"]) >= {COMPUTE, WRITES}
        assert set(size["tiers"]) == {"host", "drive", "tmpfs"}
        assert [len(steps) for steps in size["steps"].values()] == [8] * 6
    assert "keep" in ended.stdout
    assert {path.name for path in folder.glob("rok-*")} == {"rok-128x3x64.svg", "rok-128x3x64.png"}
    assert (folder / "timeline-128x3x64x4-drive.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads(gzip.decompress((folder / "timeline-128x3x64x4-drive.json.gz").read_bytes()))
    assert {event["name"] for event in trace["traceEvents"] if event.get("cat") == "store"} <= {WRITES, READS}
    log = read_run_log(folder / "runs" / "128x3x64x4-auto-tmpfs.jsonl")
    assert (log.header.strategy, log.header.model["batch_size"], len(log.steps)) == ("auto, tmpfs", 4, 8)
    assert not list(tmp_path.glob("tba-bench-*"))


@pytest.mark.megatron
def test_megatrons_layers_keep_no_scores(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from tba_lab.megatron_cpu import single_process

    with single_process():
        subject = Subject("megatron", Size.parse("128x2x64x2", "fp32"), CPU)
        contest = gpu.Contest(settings_for(tmp_path, "keep", "recompute", "host"), subject)
        saved: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append(tuple(x.shape)) or x, lambda x: x
        ):
            subject.loss(subject.batch_of(0))
        assert not [shape for shape in saved if shape[-2:] == (64, 64)]
        contest.enter()
        contest.run()
        assert contest.left_out == {}
        assert contest.proofs["host"] == contest.proofs["recompute"] == contest.proofs["keep"]
        contest.close()
        subject.close()


# Ways


def test_a_ways_forward_is_there_only_while_it_runs(tmp_path: Path, subject: Subject) -> None:
    contest = gpu.Contest(settings_for(tmp_path, "keep", "recompute", "host", "drive"), subject)
    contest.enter()
    assert list(contest.ways) == ["keep", "recompute", "host", "drive"]
    for name, way in contest.ways.items():
        assert not any("forward" in vars(layer) for layer in subject.layers)
        with way.installed():
            assert all(("forward" in vars(layer)) == (name != "keep") for layer in subject.layers)
    contest.close()
    assert not any("forward" in vars(layer) for layer in subject.layers)


def test_all_ways_of_a_round_see_the_same(tmp_path: Path, subject: Subject) -> None:
    contest = gpu.Contest(settings_for(tmp_path, "keep", "recompute", "host"), subject)
    contest.enter()
    before = subject.layers[0].up.weight.detach().clone()
    contest.run()
    one, two, three = (contest.proofs[name] for name in ("keep", "recompute", "host"))
    assert one == two == three
    assert len(set(one)) == gpu.PROOF_ROUNDS
    assert not torch.equal(subject.layers[0].up.weight, before)  # no round is like the one before
    contest.close()


def test_other_bits_are_found(tmp_path: Path, subject: Subject) -> None:
    """One bit of one gradient."""
    gradient = subject.layers[1].up.weight.grad
    loss = torch.tensor(1.0)
    gradient.fill_(1.0)
    before = subject.fingerprint(loss)
    assert subject.fingerprint(loss) == before
    gradient.view(torch.int16)[5, 7] ^= 1
    assert subject.fingerprint(loss) != before
    gradient.view(torch.int16)[5, 7] ^= 1
    assert subject.fingerprint(torch.nextafter(loss, 2 * loss)) != before
    assert subject.fingerprint(loss) == before


def test_wrong_bits_are_told(tmp_path: Path, subject: Subject) -> None:
    class Rough(Way):
        def step(self, batch: Any, *, measure: bool) -> Any:
            found = super().step(batch, measure=measure)
            subject.layers[0].up.weight.grad.view(torch.int16)[0, 0] ^= 1
            return found

    settings = settings_for(tmp_path, "keep", "host", rounds=gpu.LEAST_ROUNDS)
    contest = gpu.Contest(settings, subject)
    contest.enter()
    contest.ways["host"].__class__ = Rough
    contest.run()
    tiers = {"host": {"write": 1e9, "read": 1e9, "both": 1e9}}
    rows = {row["name"]: row for row in gpu.rows_of(contest, tiers)}
    assert (rows["keep"]["same_bits"], rows["host"]["same_bits"]) == (True, False)
    contest.close()


@pytest.mark.full
def test_a_way_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, subject: Subject) -> None:
    contest = gpu.Contest(settings_for(tmp_path, "keep", "gds", "torchtune", "host", rounds=3), subject)
    contest.enter()
    assert set(contest.left_out) == {"gds", "torchtune"}
    session = contest.ways["host"].session
    assert session is not None
    session.store.close()
    contest.run()
    assert "is closed" in contest.left_out["host"]
    assert (list(contest.ways), list(contest.steps)) == (["keep"], ["keep"])
    assert len(contest.steps["keep"]) == 3
    contest.close()


def test_what_has_no_proof_has_times_nevertheless(
    tmp_path: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, "keep", "host", rounds=gpu.LEAST_ROUNDS)
    contest = gpu.Contest(settings, subject)
    contest.enter()

    def refusing(_: object) -> str:
        raise RuntimeError("no deterministic kernel")

    monkeypatch.setattr(subject, "fingerprint", refusing)
    contest.run()
    tiers = {"host": {"write": 1e9, "read": 1e9, "both": 1e9}}
    rows = {row["name"]: row for row in gpu.rows_of(contest, tiers)}
    assert list(rows) == ["keep", "host"]
    assert not rows["host"]["same_bits"]
    assert "no deterministic kernel" in contest.proofs["host"][0]
    contest.close()


@pytest.mark.parametrize("at", [0, 2, gpu.WARM_UP + 2, gpu.LEAST_ROUNDS])
def test_who_interrupts_gets_what_is_known(
    at: int, tmp_path: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = gpu.Contest(settings_for(tmp_path, "keep", "host", rounds=gpu.LEAST_ROUNDS), subject)
    contest.enter()
    original = subject.batch_of

    def interrupting(number: int) -> Any:
        in_the_middle = len(contest.steps["keep"]) != len(contest.steps["host"])
        if number == at and (in_the_middle or at == gpu.LEAST_ROUNDS):  # those then compare bits
            raise KeyboardInterrupt
        return original(number)

    monkeypatch.setattr(subject, "batch_of", interrupting)
    contest.run()
    assert contest.interrupted
    assert {len(steps) for steps in contest.steps.values()} == {at}
    tiers = {"host": {"write": 1e9, "read": 1e9, "both": 1e9}}
    rows = gpu.rows_of(contest, tiers)
    assert [row["same_bits"] for row in rows] == ([None, None] if at else [])
    assert all(row["seconds"]["median"] > 0 for row in rows)
    gpu.table_of({"model": "torch", "size": "1", "dtype": "fp32", "rounds": at, "rows": rows, "tiers": tiers})
    gpu.write_logs(contest, tmp_path, {})
    gpu.draw_rok(contest.settings, tmp_path, tmp_path)
    contest.close()


@pytest.mark.full
def test_a_tier_that_cannot_be_used_leaves_its_ways_out(tmp_path: Path, subject: Subject) -> None:
    settings = settings_for(tmp_path, "keep", "tmpfs", "host")
    settings.tmpfs.rmdir()
    settings.tmpfs.write_text("no directory")
    tiers = gpu.tiers_of(settings, SIZE, subject)
    assert "error" in tiers["tmpfs"]
    assert "error" not in tiers["host"]
    contest = gpu.Contest(settings, subject)
    contest.enter({"host": {"error": "too small"}})
    assert list(contest.ways) == ["keep"]
    assert contest.left_out["host"] == "UnsupportedError: its tier cannot be used: too small"
    assert "StoreError" in contest.left_out["tmpfs"]
    contest.close()


@pytest.mark.full
def test_the_slowest_are_left_out_where_there_is_no_time(tmp_path: Path, subject: Subject) -> None:
    contest = gpu.Contest(settings_for(tmp_path, "keep", "recompute", "host", "drive"), subject)
    contest.enter()
    for name, seconds in (("keep", 99.0), ("recompute", 2.0), ("host", 5.0), ("drive", 4.0)):
        contest.steps[name] = [{"host_seconds": 100.0}, {"host_seconds": seconds}]
    contest._drop_the_slow(6.0)
    assert list(contest.ways) == list(contest.steps) == ["keep", "recompute", "drive"]
    assert contest.left_out == {"host": "TooSlowError: a step takes 5.0 s, and the minutes are few"}
    contest._drop_the_slow(5.9)
    assert list(contest.ways) == ["keep", "recompute"]
    contest.close()


@pytest.mark.parametrize(
    ("why", "is_failure"),
    [
        ("MissingDependencyError: kvikio", False),
        ("TooSlowError: a step takes 5.0 s", False),
        ("RuntimeError: CUDA error", True),
        ("AssertionError: ", True),
    ],
)
def test_what_is_not_installed_is_no_failure(why: str, is_failure: bool) -> None:
    assert gpu.failed({"left_out": {"host": why}}, "host") == is_failure
    assert not gpu.failed({"left_out": {"host": why}}, "drive")


def test_a_budget_is_a_share_of_keeps_peak(tmp_path: Path, subject: Subject) -> None:
    contest = gpu.Contest(settings_for(tmp_path, "keep", "auto, host", budget=0.25), subject)
    peaks: list[int] = []
    original = Way.step

    def noting(self: Way, batch: Any, *, measure: bool) -> Any:
        figures, loss = original(self, batch, measure=measure)
        peaks.append(figures["peak"])
        return figures, loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Way, "step", noting)
        contest.enter()
    session = contest.ways["auto, host"].session
    assert session is not None
    assert session.config.budget.activation_bytes == int(0.25 * peaks[-1]) > 0
    contest.close()


def test_what_somebody_elses_hooks_move_is_counted(subject: Subject) -> None:
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        expected = subject.loss(subject.batch_of(0))
    way = Way(
        subject,
        tier="host",
        hooks=lambda: torch.autograd.graph.save_on_cpu(),
        counts=lambda tensor: not isinstance(tensor, nn.Parameter) or True,
    )
    figures, loss = way.step(subject.batch_of(0), measure=False)
    assert same_bits(loss.detach(), expected.detach())
    assert figures["written"] == figures["read"] == saved > 0


def test_names_of_ours_are_known() -> None:
    assert OURS[0] == "host"
    assert {"keep", "recompute", "save_on_cpu", "torchtune", "deepspeed"} == set(WAYS) - set(OURS)
    with pytest.raises(KeyError):
        make_way("nonsense", None, None)  # type: ignore[arg-type]


# Figures


@pytest.mark.parametrize(
    ("tier", "least"),
    [
        (Rates(1e9, 1e9, 1e9), 8.0),  # both
        (Rates(1e9, 4e9, 4e9), 6.0),  # the writes alone
        (Rates(4e9, 1e9, 1e9), 5.0),  # the reads alone
        (Rates(1e12, 1e12, 1e12), 3.0),  # computation
    ],
)
def test_no_step_is_faster_than_its_bound(tier: Rates, least: float) -> None:
    assert gpu.bound(1.0, 2.0, 4e9, 4e9, tier) == pytest.approx(least)


def test_needs_are_bytes_by_the_time_that_keep_takes() -> None:
    keep = [{"seconds": 3.0, "forward": 1.0, "backward": 2.0}] * 3
    ours = [{"seconds": 4.5}, {"seconds": 3.0}, {"seconds": 6.0}]
    tiers = {"drive": {"write": 2e9, "read": 4e9, "both": 3e9}}
    row = {"tier": "drive", "written": 8e9, "read": 6e9, "seconds": {"median": 4.5}}
    found = gpu.against_keep(ours, keep, row, tiers)
    assert (found["needs_write"], found["needs_read"]) == (8e9, 3e9)
    assert found["bound_seconds"] == 6.0
    assert found["over_bound"] == 4.5 / 6.0
    assert found["over_keep"]["median"] == 1.5


def test_on_a_cpu_steps_whose_memory_was_sampled_have_no_time() -> None:
    steps = [{"seconds": 9.0}] * gpu.WARM_UP + [{"seconds": 1.0}, {"seconds": 5.0, "peak": 3}]
    assert gpu.timed(steps) == [{"seconds": 1.0}]
    assert len(gpu.timed([{"seconds": 1.0, "peak": 3}] * 6)) == 6 - gpu.WARM_UP


# The script that runs it

MINUTE, STARTING, INSTALLING = 60, 35, 10


def test_the_runbook_keeps_to_the_limits_of_its_steps() -> None:
    text = SCRIPT.read_text()
    told = {step: int(limit) for step, limit in re.findall(r"^#     (\w+) +(\d+) s  ", text, re.MULTILINE)}
    first = ["doctor", "smoke", "quick", "tests", "alone", "compiled", "link", "states", "sanitizer"]
    assert list(told) == [*first, "benchmark"]
    assert [int(limit) for limit in re.findall(r"^[^#\n]*\blimited (\d+)", text, re.MULTILINE)] == [
        *told.values()
    ]
    runs = re.findall(r"run WHEELS RESULTS ([a-z ]+?) +within (\d+):(\d+) min", text)
    assert [step for steps, _, _ in runs for step in steps.split()] == [*first, "benchmark"]
    limits = [60 * int(minutes) + int(seconds) for _, minutes, seconds in runs]
    assert limits == [sum(told[step] for step in steps.split()) for steps, _, _ in runs]
    smoke, race, rest, another_time = limits
    assert smoke <= 3 * MINUTE
    assert max(race, rest, another_time) < 10 * MINUTE
    assert smoke + race + 2 * (STARTING + INSTALLING) <= 15 * MINUTE


def test_the_script_says_how_it_is_used() -> None:
    ended = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "bash tests/gpu.sh download WHEELS",
        "bash tests/gpu.sh run WHEELS RESULTS STEP...",
    ]


# The timeline


def event(name: str, cat: str, start: float, duration: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration, "tid": tid, "pid": 0}


def trace_of(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": [event(gpu_timeline.MARK, "user_annotation", 1000.0, 500.0), *events]}


def test_lanes_of_a_gpu_are_its_kernels_and_copies() -> None:
    trace = trace_of(
        event("gemm", "kernel", 1000, 100),
        event("gelu", "kernel", 1050, 100),
        event("gemm", "kernel", 1300, 100),
        event("aten::mm", "cpu_op", 1000, 900),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 1100, 100),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 1350, 50),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 1000, 5),
    )
    gpu_timeline.add_transfers(trace, {WRITES: [(70.0001, 70.0002)], READS: []}, began=70.0)
    lanes = gpu_timeline.lanes_of(trace)
    assert {
        name: [tuple(round(1e6 * at) for at in span) for span in lane] for name, lane in lanes.items()
    } == {
        COMPUTE: [(0, 150), (300, 400)],
        TO_HOST: [(100, 200)],
        FROM_HOST: [(350, 400)],
        WRITES: [(100, 200)],
        READS: [],
    }
    summary = gpu_timeline.summary(lanes)
    assert summary[TO_HOST]["share_under_compute"] == pytest.approx(0.5)
    assert summary[FROM_HOST]["share_under_compute"] == pytest.approx(1.0)
    assert READS not in summary


def test_without_a_gpu_compute_is_what_the_steps_thread_does() -> None:
    trace = trace_of(event("aten::mm", "cpu_op", 1000, 100), event("aten::mm", "cpu_op", 1200, 100, tid=2))
    assert gpu_timeline.lanes_of(trace)[COMPUTE] == [pytest.approx((0.0, 1e-4))]


def test_watching_a_store_leaves_it_as_it_was(tmp_path: Path, subject: Subject) -> None:
    contest = gpu.Contest(settings_for(tmp_path, "keep", "host", window=64 << 10), subject)
    contest.enter()
    session = contest.ways["host"].session
    assert session is not None
    before = dict(vars(session.store))
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(gpu_timeline.watched(session.store))
        figures, _ = contest.ways["host"].step(subject.batch_of(0), measure=False)
    assert figures["written"] > 0
    assert len(found[WRITES]) > 0
    assert set(vars(session.store)) == set(before)
    contest.close()
