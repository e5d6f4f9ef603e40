"""Steps in which layers are skipped are completed with the layers that ran in others."""

from __future__ import annotations

import dataclasses
from itertools import groupby

import pytest

from tba_offload.adapt.profiler import profile_of
from tba_offload.capture.scope import ScopeKey
from tba_offload.capture.trace import ScopeTrace, StepTrace
from tba_offload.config.policy import Placement
from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing
from tba_offload.plan.skipped import with_skipped

KINDS = (LayerKind((Saved(100, 0.5, 0.5),), 0, 10),)
LAYERS = 12


def step(schedule: str, *runs: str) -> StepProfile:
    """A step in which each micro-batch runs some layers, one digit each, in the order of the schedule."""
    slots: list[Slot] = []
    begun, ended = iter(enumerate(runs)), iter(enumerate(runs))
    for letter in schedule:
        number, layers = next(begun if letter == "F" else ended)
        order = layers if letter == "F" else reversed(layers)
        slots += [Slot(int(layer), number, letter == "B", 1.0) for layer in order]
    return StepProfile(KINDS, (0,) * LAYERS, ({Placement.OFFLOAD: Timing(1.0, 2.0)},), tuple(slots))


def told(profile: StepProfile) -> str:
    """The layers of each pass; those of a backward pass follow a minus sign."""
    passes = groupby(profile.slots, key=lambda slot: (slot.micro_batch, slot.backward))
    return " ".join(
        "-" * backward + "".join(str(slot.layer) for slot in slots) for (_, backward), slots in passes
    )


@pytest.mark.parametrize(
    ("before", "ran", "expected"),
    [
        ("0123", "0123", "0123"),
        ("0123", "023", "0123"),
        ("0123", "12", "0123"),
        ("0123", "3", "0123"),
        ("023", "013", "0123"),
        ("123", "023", "0123"),
        ("0246", "1357", "01234567"),
        ("1357", "0246", "01234567"),
        ("3012", "302", "3012"),
        ("3012", "12", "3012"),
        ("312", "302", "3012"),
        ("0123", "3210", "3210"),
    ],
)
def test_layers_that_were_skipped_run_where_they_ran_before(before: str, ran: str, expected: str) -> None:
    found = with_skipped(step("FB", ran), step("FB", before))
    assert told(found) == f"{expected} -{expected[::-1]}"
    assert sum(slot.gap for slot in found.slots) == 2 * len(ran)  # what was measured beside layers stays


@pytest.mark.parametrize(
    ("schedule", "runs", "expected"),
    [
        ("FBFB", ("023", "13"), "0123 -3210 0123 -3210"),
        ("FFBB", ("12", "03"), "0123 0123 -3210 -3210"),
        ("FFBFBB", ("012", "013", "123"), "0123 0123 -3210 0123 -3210 -3210"),
        ("FFBFBB", ("0123", "0", "3"), "0123 0123 -3210 0123 -3210 -3210"),
    ],
)
def test_each_micro_batch_may_run_what_those_of_the_step_before_ran(
    schedule: str, runs: tuple[str, ...], expected: str
) -> None:
    before = step(schedule, *(("0123",) * len(runs)))
    found = with_skipped(step(schedule, *runs), before)
    assert told(found) == expected
    assert with_skipped(found, before) == found


def test_what_outlives_its_backward_does_so_until_the_same_slot() -> None:
    whole, some = step("FFBB", "012", "012"), step("FFBB", "12", "02")
    first = next(place for place, slot in enumerate(some.slots) if slot.backward)
    for until in (first + 1, len(some.slots)):
        slots = list(some.slots)
        slots[first] = slots[first]._replace(held_until=until)
        found = with_skipped(dataclasses.replace(some, slots=tuple(slots)), whole).slots
        (held,) = (slot.held_until for slot in found if slot[:3] == slots[first][:3])
        assert held is not None
        ran = [slot[:3] for slot in slots]
        assert [slot[:3] for slot in found[held:] if slot[:3] in ran] == ran[until:]


def test_micro_batches_that_share_a_layer_may_run_what_the_other_ran() -> None:
    assert told(with_skipped(step("FBFB", "013", "023"), None)) == "0123 -3210 0123 -3210"
    assert told(with_skipped(step("FBFB", "01", "02"), step("FB", "0123"))) == "0123 -3210 0123 -3210"


def test_micro_batches_without_a_common_layer_are_left_apart() -> None:
    """Such as those of two models that are trained in turn."""
    two = step("FBFB", "012", "345")
    assert with_skipped(two, None) == with_skipped(two, two) == two
    assert told(with_skipped(step("FBFB", "02", "35"), two)) == told(two)


def test_the_schedule_with_more_micro_batches_under_way_counts() -> None:
    deep, flat = step("FFBFBB", *("012",) * 3), step("FBFBFB", *("023",) * 3)
    expected = "0123 0123 -3210 0123 -3210 -3210"
    assert told(with_skipped(flat, deep)) == told(with_skipped(deep, flat)) == expected


def test_a_forward_pass_ends_where_a_layer_runs_again_or_backward_begins() -> None:
    """How often a layer ran before does not tell, where layers are skipped."""
    trace, now = StepTrace(), 0.0
    runs: dict[int, list[ScopeTrace]] = {}
    passes = [("F", "02"), ("F", "012"), ("B", "0"), ("F", "12"), ("B", "13")]
    for number, (letter, layers) in enumerate(passes):
        chosen = [int(layer) for layer in layers]
        if letter == "F":
            runs[number] = []
            for layer in chosen:
                key = ScopeKey(layer, sum(s.key.layer == layer for s in trace.scopes), 0, str(layer))
                scope = ScopeTrace(key, Placement.OFFLOAD, now, forward_ended=now + 1)
                runs[number].append(scope)
                trace.scopes.append(scope)
                now += 1
            continue
        for batch in chosen:
            for scope in reversed(runs[batch]):
                scope.backward_began = now
                now += 1
    profile = profile_of(trace, [], [(0, str(layer)) for layer in range(3)], began=0.0, ended=now)
    assert profile is not None
    assert told(profile) == "02 012 -20 12 -210 -21"
    assert [slot.micro_batch for slot in profile.slots if not slot.backward] == [0, 0, 1, 1, 1, 2, 2]
