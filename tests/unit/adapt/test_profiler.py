"""A profile takes no longer for each run of a layer where there are more layers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tba_offload.adapt.profiler import profile_of
from tba_offload.capture.scope import ActivationKey, ScopeKey
from tba_offload.capture.trace import ActivationTrace, ScopeTrace, StepTrace, Treatment
from tba_offload.config.policy import Placement
from tba_offload.placements import staying

if TYPE_CHECKING:
    from tba_offload.plan.profile import StepProfile


def trace_of(layers: int, micro_batches: int) -> StepTrace:
    """A step of layers that all save another number of bytes."""
    trace = StepTrace(backward_ends=[1e6])
    for layer in range(layers):
        for micro_batch in range(micro_batches):
            key = ScopeKey(layer, micro_batch, 0, str(layer))
            number = micro_batch * layers + layer
            began, back = 2.0 * number + 1, 1e6 - 2.0 * number - 2
            trace.scopes.append(ScopeTrace(key, "offload", began, 0, began + 1, back))
            saved = ActivationTrace(ActivationKey(key, 0), 2**layer, Treatment.OFFLOADED, began, back)
            trace.activations.append(saved)
    return trace


def calls_for_each_run(layers: int, micro_batches: int) -> float:
    """Calls of Python and of C."""
    trace, count = trace_of(layers, micro_batches), 0

    def look(_: object, event: str, __: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(look)
    try:
        found = profile_of(trace, [], [(0, str(layer)) for layer in range(layers)], began=0.0, ended=1e6)
    finally:
        sys.setprofile(None)
    assert found is not None
    assert len(found.kinds) == layers
    return count / (layers * micro_batches)


def test_layers_of_which_none_is_like_another_are_told_apart_without_a_search() -> None:
    assert calls_for_each_run(layers=80, micro_batches=16) <= 1.5 * calls_for_each_run(10, 16)


@pytest.mark.parametrize(
    ("forward", "backward", "most", "found"),
    [
        ((0, 0), (3, 1), 8, [0, 1, 3, 8]),  # a head brings 1 before backward comes to the last layer
        ((8, 8), (3, 1), 8, [8, 8, 3, 8]),  # those of the step before go when forward is over
        ((0, 0), (2, 1), 8, [0, 1, 2, 8]),
        ((0, 0), (2, 1), None, [0, 0, 0, 0]),  # it does not matter
        ((0, 0), (None, 1), 8, [0, 0, 0, 0]),  # not counted throughout
    ],
)
def test_gradients_are_known_from_one_begin_of_a_layer_to_the_next(
    forward: tuple[int, ...], backward: tuple[int | None, ...], most: int | None, found: list[int]
) -> None:
    trace = trace_of(2, 1)
    for scope, at_forward, at_backward in zip(trace.scopes, forward, backward, strict=True):
        scope.forward_gradients, scope.backward_gradients = at_forward, at_backward
    layers = [(0, str(layer)) for layer in range(2)]
    profile = profile_of(trace, [], layers, began=0.0, ended=1e6, most_gradients=most)
    assert profile is not None
    assert [slot.gradients for slot in profile.slots] == found
    assert [slot.backward for slot in profile.slots] == [False, False, True, True]


SIZES = (4, 4, 4, 4)


def profile_under(
    placement: str, *, forward: float, backward: float, before: StepProfile | None = None
) -> StepProfile:
    """The profile of a step of one layer, which saves its activations at even distances."""
    percent = Placement(placement).percent
    key, back = ScopeKey(0, 0, 0, "0"), forward + 10.0
    trace = StepTrace(backward_ends=[back + backward])
    trace.scopes.append(ScopeTrace(key, placement, 0.0, 0, forward, back))
    for number, nbytes in enumerate(SIZES):
        share = (number + 0.5) / len(SIZES)
        stays = number in staying(SIZES, percent)
        treatment = Treatment.PLANNED_KEEP if stays else Treatment.OFFLOADED
        used = None if stays else back + (1 - share) * backward
        activation = ActivationTrace(ActivationKey(key, number), nbytes, treatment, share * forward)
        activation.unpacked_at = used
        trace.activations.append(activation)
    ended = back + backward
    found = profile_of(trace, [], [(0, "0")], began=0.0, ended=ended, before=before)
    assert found is not None
    return found


def test_what_stays_of_a_layer_is_used_when_it_was_before() -> None:
    before = profile_under("offload", forward=1.0, backward=2.0)
    uses = [saved.until for saved in before.kinds[0].activations]
    assert uses == pytest.approx([0.875, 0.625, 0.375, 0.125])
    for known in (before, None):
        found = profile_under("offload-50%", forward=1.0, backward=2.0, before=known)
        assert [saved.until for saved in found.kinds[0].activations] == pytest.approx(uses)


def test_a_layer_of_which_a_share_travels_tells_how_long_it_would_offload() -> None:
    """Half of what offloading takes is spared; that the machine has become slower is noticed all the same."""
    before = profile_under(
        "keep", forward=1.0, backward=2.0, before=profile_under("offload", forward=1.2, backward=2.4)
    )
    assert before.timing(0, Placement.OFFLOAD).whole - before.timing(
        0, Placement.KEEP
    ).whole == pytest.approx(0.6)
    same = profile_under("offload-50%", forward=1.1, backward=2.2, before=before)
    slower = profile_under("offload-50%", forward=2.1, backward=4.2, before=before)
    assert same.timing(0, Placement.OFFLOAD) == pytest.approx(before.timing(0, Placement.OFFLOAD))
    for placement in (Placement.OFFLOAD, Placement.KEEP):
        assert slower.timing(0, placement).whole > 1.3 * before.timing(0, placement).whole
