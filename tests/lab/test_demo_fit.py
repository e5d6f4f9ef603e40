"""The job that fits a machine: never beyond a limit, and shrunk in the order that was promised."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_lab.demo import sizing
from tba_lab.demo.fit import (
    FEWEST_STEPS,
    HIDDEN,
    MOST_STEPS,
    SEQUENCES,
    DoesNotFitError,
    Fit,
    Job,
    Limits,
    Probe,
    Wish,
    check_room,
    fit,
    heads_for,
    layers_for,
    parameters_of,
    sizes_for,
)
from tba_lab.demo.race import Watch
from tba_lab.gpt import GptShape, model_flops
from tba_offload.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
PLENTY = Limits(240.0, 1000 * GIB, 1000 * GIB)
MODEL: dict[str, Any] = {"layers": 12, "heads": 12, "dtype": "bf16", "dropout": 0.1, "style": "gpt"}


def wish(**given_: Any) -> Wish:
    fields: dict[str, Any] = {
        **dict.fromkeys(("hidden", "sequence", "steps")),
        "batch_sizes": (2, 3),
        "strategies": ("keep", "recompute", "offload"),
    }
    model = {name: given_.pop(name) for name in list(given_) if name in MODEL}
    return Wish(**(fields | given_), model=MODEL | model)


def probe(gflops: float, hidden: int = HIDDEN, optimizer_ns: float = 0.0) -> Probe:
    return Probe(hidden, 1e9, 1 / gflops, 10**6, optimizer_ns * 1e-3)


def fitted(wished: Wish, limits: Limits, *probes: Probe) -> Fit:
    return fit(wished.jobs(), limits, probes)


def measures(job: Job) -> tuple[int, int, int]:
    return job.shape.hidden, job.shape.sequence, job.steps


limits_of = st.builds(Limits, st.floats(10, 1e4), st.integers(GIB, 200 * GIB), st.integers(2**20, 200 * GIB))
probes_of = st.lists(
    st.builds(probe, st.floats(0.5, 1e6), st.sampled_from((192, 768, 1536)), st.floats(0, 100)),
    min_size=1,
    max_size=3,
)
wishes = st.builds(
    wish,
    hidden=st.none() | st.sampled_from((96, 768, 3072)),
    sequence=st.none() | st.sampled_from((32, 160, 512)),
    steps=st.none() | st.sampled_from((5, 12, 100)),
    dtype=st.sampled_from(("bf16", "fp32")),
    style=st.sampled_from(("gpt", "llama")),
    heads=st.sampled_from((4, 12)),
    batch_sizes=st.sampled_from(((1,), (2, 3), (2, 8))),
    strategies=st.sampled_from((("keep", "recompute", "offload"), ("keep", "recompute", "auto", "control"))),
)


# What holds for all


@settings(max_examples=60)
@given(wished=wishes, limits=limits_of, probes=probes_of)
def test_no_limit_is_exceeded_unless_nothing_fits(wished: Wish, limits: Limits, probes: list[Probe]) -> None:
    found = fitted(wished, limits, *probes)
    jobs = list(wished.jobs())
    if found.broken:
        assert found.job == jobs[-1]
        assert all(job.exceeds(limits, probes) for job in jobs)
    else:
        assert found.job.seconds(probes) <= limits.seconds
        assert found.job.memory_bytes <= limits.memory_bytes
        assert found.job.activation_bytes <= limits.disk_bytes


@settings(max_examples=60)
@given(wished=wishes, limits=limits_of, probes=probes_of)
def test_it_shrinks_by_steps_then_sequence_then_width(
    wished: Wish, limits: Limits, probes: list[Probe]
) -> None:
    """No job fits that is wider, as wide with a longer sequence, or differs only in having more steps."""
    found = fitted(wished, limits, *probes).job
    preferred = [job for job in wished.jobs() if measures(job) > measures(found)]
    assert all(job.exceeds(limits, probes) for job in preferred)


@settings(max_examples=60)
@given(wished=wishes, limits=limits_of, probes=probes_of)
def test_what_was_given_is_kept(wished: Wish, limits: Limits, probes: list[Probe]) -> None:
    found = fitted(wished, limits, *probes).job
    for wanted, chosen in zip((wished.hidden, wished.sequence, wished.steps), measures(found), strict=True):
        assert wanted in (None, chosen)
    assert (found.batch_sizes, found.strategies) == (wished.batch_sizes, wished.strategies)
    assert {name: getattr(found.shape, name) for name in wished.model} == wished.model


@settings(max_examples=60)
@given(limits=limits_of, probes=probes_of, factor=st.floats(1, 100))
def test_a_faster_machine_never_gets_less(limits: Limits, probes: list[Probe], factor: float) -> None:
    faster = [
        dataclasses.replace(
            each, seconds=each.seconds / factor, optimizer_seconds=each.optimizer_seconds / factor
        )
        for each in probes
    ]
    one, other = (fitted(wish(), limits, *each).job for each in (probes, faster))
    assert measures(other) >= measures(one) or one.exceeds(limits, probes)


# Single cases


def test_a_fast_machine_gets_the_published_job() -> None:
    found = fitted(wish(), PLENTY, probe(2000.0))
    assert measures(found.job) == (1536, 160, 20)
    assert str(found) == "width 1536, sequence 160, 20 steps: fits this machine"


def test_two_cores_with_avx512_get_the_published_job() -> None:
    """Its steps took 1.5 and 1.8 seconds, of which the update was a fifth."""
    found = fitted(wish(), Limits(240.0, 14 * GIB, 40 * GIB), probe(560.0, optimizer_ns=0.8))
    assert measures(found.job) == (1536, 160, 20)


@pytest.mark.parametrize("gflops", [20.0, 40.0, 60.0, 100.0])
def test_two_slow_cores_get_one_that_fills_the_time(gflops: float) -> None:
    limits = Limits(240.0, 14 * GIB, 40 * GIB)
    speed = probe(gflops, hidden=192, optimizer_ns=3.0)
    found = fitted(wish(dtype="fp32"), limits, speed).job
    assert found.shape.hidden >= 576
    assert 120.0 < found.seconds([speed]) <= 240.0


def test_first_steps_then_sequence_then_width() -> None:
    seen = [measures(fitted(wish(), PLENTY, probe(rate)).job) for rate in (900, 440, 200, 40, 10)]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == (HIDDEN, SEQUENCES[0], MOST_STEPS)
    hidden, sequence, steps = seen[1]
    assert (hidden, sequence) == (HIDDEN, SEQUENCES[0])
    assert FEWEST_STEPS <= steps < MOST_STEPS
    assert seen[2][0] == HIDDEN
    assert seen[2][1] < SEQUENCES[0]
    assert seen[-1][0] < HIDDEN


def test_where_states_travel_a_slow_machine_gets_a_narrower_model_for_as_many_tokens() -> None:
    strategies = ("keep", "recompute", "offload", "states")
    wished = wish(layers=layers_for(strategies), batch_sizes=sizes_for(strategies), strategies=strategies)
    for rate in (1e6, 560, 100, 20):
        found = fitted(wished, PLENTY, probe(rate)).job
        assert found.batch_sizes[0] * found.shape.sequence == 16 * SEQUENCES[0]
    assert found.shape.hidden < HIDDEN
    assert found.seconds([probe(20)]) <= PLENTY.seconds


def test_little_memory_makes_the_model_narrower_and_says_so() -> None:
    found = fitted(wish(dtype="fp32"), Limits(240.0, 12 * GIB, 40 * GIB), probe(1e6))
    assert found.job.shape.hidden < HIDDEN
    assert found.job.steps == MOST_STEPS
    assert found.job.memory_bytes <= 12 * GIB
    assert str(found).startswith(f"{found.job}, fitted to this machine: ")
    assert "width 1536, sequence 160, 20 steps would need 1" in str(found)
    assert str(found).endswith(" GiB of memory (at most 12.0 GiB)")


def test_a_small_disk_makes_the_sequence_shorter() -> None:
    largest = next(wish().jobs())
    found = fitted(wish(), Limits(240.0, 100 * GIB, largest.activation_bytes // 2), probe(1e6))
    assert found.job.shape.hidden == HIDDEN
    assert found.job.shape.sequence < SEQUENCES[0]
    assert "of disk (at most" in str(found)


def test_what_is_given_and_does_not_fit_is_told() -> None:
    given_ = wish(hidden=1536, sequence=160, steps=20)
    found = fitted(given_, Limits(240.0, 5 * GIB, 40 * GIB))
    assert found.job == found.largest
    assert str(found).startswith("width 1536, sequence 160, 20 steps, as given: would need 1")


def test_where_nothing_fits_the_smallest_is_taken_and_told() -> None:
    found = fitted(wish(), PLENTY, probe(0.01))
    assert measures(found.job) == (192, 64, 10)
    assert "; this still needs " in str(found)


def test_the_time_of_a_job_is_that_of_its_strategies_and_batch_sizes() -> None:
    shape = GptShape(**MODEL, hidden=192, sequence=64)
    job = Job(shape, 10, (2, 3), ("keep", "recompute", "offload"))
    forward_backward = model_flops(shape, 5) / 1e9 * (1 + 4 / 3 + 1.1)
    updates = 6 * parameters_of(shape) * 2e-9
    assert job.seconds([probe(1.0, 192, optimizer_ns=2.0)]) == pytest.approx(
        10 * (forward_backward + updates)
    )


def test_probes_of_wider_models_do_not_count() -> None:
    shape = GptShape(**MODEL, hidden=768, sequence=64)
    job = Job(shape, 10, (2,), ("keep",))
    alone = job.seconds([probe(2.0, 192)])
    assert job.seconds([probe(2.0, 192), probe(9.0, 1536)]) == alone
    assert job.seconds([probe(2.0, 192), probe(4.0, 768)]) == alone / 2
    assert job.seconds([probe(2.0, 192), probe(1.0, 768)]) == alone  # a slow moment of the machine
    assert job.seconds([probe(9.0, 1536)]) < alone  # if there is no other


def test_parameters_are_those_of_the_model() -> None:
    from tba_lab.gpt import build_gpt
    from tba_lab.megatron_cpu import single_process

    for style in ("gpt", "llama"):
        shape = GptShape(layers=2, hidden=96, heads=4, sequence=32, style=style)
        with single_process():
            counted = sum(parameter.numel() for parameter in build_gpt(shape, seed=1).parameters())
        outputs = shape.vocab * shape.hidden if style == "llama" else 0  # not shared with the embedding
        assert parameters_of(shape) == pytest.approx(counted - outputs, rel=0.03)


def test_more_than_there_is_is_refused() -> None:
    job = next(wish(hidden=1536, sequence=160, steps=20).jobs())
    check_room(job, Limits(0.0, job.memory_bytes, job.activation_bytes))
    for room in (
        Limits(0.0, job.memory_bytes - 1, job.activation_bytes),
        Limits(0.0, job.memory_bytes, job.activation_bytes - 1),
    ):
        with pytest.raises(DoesNotFitError, match=r"needs .* GiB\); give a smaller --hidden, ") as caught:
            check_room(job, room)
        assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("hidden", "heads"),
    [(None, 12), (1536, 12), (768, 12), (512, 8), (1000, 10), (60, 10), (7, 1)],
)
def test_heads_divide_the_width(hidden: int | None, heads: int) -> None:
    assert heads_for(hidden) == heads


def test_widths_are_multiples_of_the_heads() -> None:
    assert wish().widths == (1536, 1344, 1152, 960, 768, 576, 384, 192)
    assert wish(heads=5).widths[0] == 1520
    assert wish(heads=200).widths == (3200,)
    assert wish(hidden=100).widths == (100,)


@given(heads=st.integers(1, 40), style=st.sampled_from(("gpt", "llama")))
def test_probes_grow_up_to_the_widest(heads: int, style: str) -> None:
    wished = wish(heads=heads, style=style)
    shapes = wished.probe_shapes()
    widths = [shape.hidden for shape in shapes]
    assert widths[-1] == wished.widths[0]
    assert widths == sorted(set(widths))
    assert widths[0] <= max(384, 32 * heads)
    assert {shape.layers for shape in shapes} == {1}


# On this machine


def test_widths_are_timed_until_one_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(shape: GptShape, batch_size: int) -> Probe:
        return Probe(shape.hidden, model_flops(shape, batch_size), shape.hidden / 384, 1, 0.0)

    monkeypatch.setattr(sizing, "time_steps", timed)
    monkeypatch.setattr(sizing, "keep_freed_pages", lambda: True)
    runner = sizing.Sizing(shapes=wish().probe_shapes(), batch_size=2, threads=None)
    assert [found["hidden"] for found in runner.step()["probes"]] == [192, 384]
    runner.close()


@pytest.mark.megatron
def test_a_step_is_really_timed() -> None:
    shape = GptShape(layers=1, hidden=32, heads=2, sequence=16)
    found = sizing.time_steps(shape, 2)
    assert (found.hidden, found.flops) == (32, model_flops(shape, 2))
    assert found.seconds > 0
    assert found.optimizer_seconds > 0
    assert found.parameters >= parameters_of(shape)


def test_a_complete_wish_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "race", lambda *_, **__: pytest.fail("timed"))
    monkeypatch.setattr(sizing, "available_bytes", lambda _: 100 * GIB)
    wished = wish(hidden=96, sequence=16, steps=5)
    found = sizing.fitted(wished, [tmp_path / "not" / "yet"], seconds=240.0, threads=None, watch=Watch())
    assert measures(found.job) == (96, 16, 5)


def test_limits_are_shares_of_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [dataclasses.asdict(probe(1e6))]
    monkeypatch.setattr(sizing, "race", lambda *_, **__: {"sizing": [{"probes": probes}]})
    monkeypatch.setattr(sizing, "available_bytes", lambda _: 10 * GIB)
    found = sizing.fitted(wish(), [tmp_path], seconds=240.0, threads=None, watch=Watch())
    assert found.job.shape.hidden < HIDDEN
    assert found.job.memory_bytes <= 6 * GIB
    with pytest.raises(DoesNotFitError):
        sizing.fitted(wish(hidden=6144), [tmp_path], seconds=240.0, threads=None, watch=Watch())


def test_room_on_the_drive_is_that_of_the_directory_that_is_going_to_be_made(tmp_path: Path) -> None:
    here = sizing.free_disk_bytes(tmp_path)
    assert here > 0
    there = sizing.free_disk_bytes(tmp_path / "a" / "b")
    assert abs(there - here) < GIB
