"""Layers of which all but attention is recomputed, as profile, simulator and search see them."""

from __future__ import annotations

import dataclasses

import pytest
from profiles import AUTO, FAST, MIB, RECOMPUTE, RECOMPUTE_OFFLOAD, make_profile

from tba_offload.config.policy import Placement
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.model import Limits, Plan
from tba_offload.plan.profile import StepProfile, Timing
from tba_offload.plan.search import make_plan
from tba_offload.plan.simulate import simulate

SPARED = Placement.RECOMPUTE_EXCEPT_ATTENTION
LAYERS = 8
ATTENTION = 2 * MIB
DRIVE = Bandwidth(100e6, 100e6)
"""So slow that 12 MiB of a layer take twice its time."""


def profile_with(attention: int | None = ATTENTION, **measured: tuple[float, float]) -> StepProfile:
    """A step whose layers keep for 30 and 60 ms, and other placements as measured."""
    profile = make_profile(LAYERS)
    (kind,), (timing,) = profile.kinds, profile.timings
    known = {Placement(word.replace("_", "-")): Timing(*seconds) for word, seconds in measured.items()}
    return dataclasses.replace(
        profile,
        kinds=(dataclasses.replace(kind, attention_bytes=attention),),
        timings=({**timing, **known},),
    )


@pytest.mark.parametrize(
    ("measured", "spared", "whole"),
    [
        ({}, (0.03, 0.09), (0.03, 0.09)),
        ({"recompute": (0.03, 0.1)}, (0.03, 0.1), (0.03, 0.1)),
        ({"recompute_except_attention": (0.03, 0.07)}, (0.03, 0.07), (0.03, 0.09)),
        ({"recompute_except_attention": (0.03, 0.05)}, (0.03, 0.06), (0.03, 0.09)),
        ({"recompute_except_attention": (0.04, 0.11)}, (0.04, 0.11), (0.04, 0.11)),
        (
            {"recompute": (0.03, 0.1), "recompute_except_attention": (0.03, 0.12)},
            (0.03, 0.1),
            (0.03, 0.1),
        ),
    ],
    ids=["nothing", "recomputed", "spared", "less than keep", "more than estimated", "both"],
)
def test_it_takes_what_was_measured_between_keeping_and_recomputing(
    measured: dict[str, tuple[float, float]], spared: tuple[float, float], whole: tuple[float, float]
) -> None:
    profile = profile_with(**measured)
    assert profile.timing(0, SPARED) == pytest.approx(spared)
    assert profile.timing(0, RECOMPUTE) == profile.timing(0, RECOMPUTE_OFFLOAD) == pytest.approx(whole)


def test_inputs_travel_and_what_attention_puts_out() -> None:
    profile = profile_with()
    (kind,) = profile.kinds
    outcome, inputs = (simulate(profile, Plan((way,) * LAYERS), FAST) for way in (SPARED, RECOMPUTE_OFFLOAD))
    moved, others = (found.read_bytes + found.forwarded_bytes for found in (outcome, inputs))
    assert moved == LAYERS * (kind.input_bytes + ATTENTION)
    assert moved - others == LAYERS * ATTENTION
    assert outcome.peak_bytes <= inputs.peak_bytes + 2 * LAYERS * ATTENTION


FAST_REST = {"recompute": (0.03, 0.09), "recompute_except_attention": (0.03, 0.065)}


@pytest.mark.parametrize(("attention", "is_chosen"), [(ATTENTION, True), (0, False), (None, False)])
def test_it_is_chosen_where_the_drive_has_no_time_and_there_is_attention(
    attention: int | None, is_chosen: bool
) -> None:
    profile = profile_with(attention, **FAST_REST)
    plan = make_plan(profile, DRIVE, Limits(40 * MIB, None), policy=(AUTO,) * LAYERS)
    assert (SPARED in plan.placements) is is_chosen
    without = profile_with(0, **FAST_REST)
    other = make_plan(without, DRIVE, Limits(40 * MIB, None), policy=(AUTO,) * LAYERS)
    assert plan.prediction is not None
    assert other.prediction is not None
    assert (plan.prediction.seconds < other.prediction.seconds) is is_chosen


def test_it_is_not_chosen_for_layers_that_must_not_be_recomputed() -> None:
    profile, every = profile_with(**FAST_REST), frozenset(range(LAYERS))
    plan = make_plan(profile, DRIVE, Limits(40 * MIB, None), policy=(AUTO,) * LAYERS, not_recomputed=every)
    assert SPARED not in plan.placements
