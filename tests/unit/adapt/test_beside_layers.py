"""What is learned of the bytes that lie beside layers, and what plans make of it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tba_offload.adapt.beside import BesideLayers, SeenBeside
from tba_offload.config.policy import Placement
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.beside import Beside, own_bytes
from tba_offload.plan.condense import condensed
from tba_offload.plan.model import Plan
from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing
from tba_offload.plan.simulate import simulate
from tba_offload.plan.tuning import TUNING

KEEP, OFFLOAD, RECOMPUTE = Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE
DRIVE = Bandwidth(1e9, 1e9)


def profile_of(layers: int = 2, kinds: tuple[LayerKind, ...] | None = None) -> StepProfile:
    """Each layer saves 60 bytes, which it can rebuild, 40, and 3 that are small; its input has 10."""
    saved = Saved(60, 0.2, 0.8, rebuilt=True), Saved(40, 0.6, 0.4, rebuilt=False)
    kinds = kinds or (LayerKind(saved, 3, 10, attention_bytes=20),)
    slots = [Slot(layer, 0, False, 0.0) for layer in range(layers)]
    slots += [Slot(layer, 0, True, 0.0) for layer in reversed(range(layers))]
    timings = ({KEEP: Timing(0.1, 0.2)},) * len(kinds)
    return StepProfile(kinds, tuple(layer % len(kinds) for layer in range(layers)), timings, tuple(slots))


def seen(*of_layers: tuple[int, int], at_loss: int = 0) -> SeenBeside:
    return SeenBeside(at_loss, [Beside(*beside, beside[1]) for beside in of_layers])


@pytest.mark.parametrize(
    ("placement", "own"),
    [
        (KEEP, (103, 0)),
        (OFFLOAD, (3, 0)),
        (Placement("offload-40%"), (63, 0)),
        (Placement.OFFLOAD_REMAT, (3, 60)),
        (RECOMPUTE, (10, 93)),
        (Placement.RECOMPUTE_OFFLOAD, (0, 93)),
        (Placement.RECOMPUTE_EXCEPT_ATTENTION, (0, 73)),
    ],
)
def test_what_a_layer_leaves_or_makes_again_is_its_own_and_lies_not_beside_it(
    placement: Placement, own: tuple[int, int]
) -> None:
    plan, profile = Plan((placement, placement)), profile_of()
    assert own_bytes(profile.kinds[0], plan, 0) == Beside(*own, own[1])
    layers = BesideLayers(TUNING)
    layers.note(seen((200, 200), (200, 200)), plan, profile)
    (kind,) = layers.put_in(profile).kinds
    assert list(kind.beside.values()) == [Beside(200 - own[0], 200 - own[1], 200 - own[1])]


def test_the_last_look_counts_and_the_most_of_layers_that_are_alike() -> None:
    layers, plan, profile = BesideLayers(TUNING), Plan((OFFLOAD, OFFLOAD)), profile_of()
    for first, at_loss in ((503, 90), (103, 30), (203, 40)):
        layers.note(seen((first, 300), (153, 100), at_loss=at_loss), plan, profile)
        known = layers.put_in(profile)
        assert known.kinds[0].beside == {OFFLOAD: Beside(max(first, 153) - 3, 300, 300)}
        assert known.loss_bytes == at_loss


def test_what_a_layer_was_not_seen_under_for_long_is_forgotten_unless_it_does_not_run_at_all() -> None:
    """Kernels may have taken memory once then, and no plan would ever try it again."""
    layers, profile = BesideLayers(TUNING), profile_of()
    layers.note(seen((0, 900), (0, 800)), Plan((OFFLOAD, OFFLOAD)), profile)
    for number in range(TUNING.remembered_rests):
        (kind,) = layers.put_in(profile).kinds
        assert kind.beside[OFFLOAD] == Beside(0, 900, 900)
        layers.note(seen((0, 50 + number), (0, 0)), Plan((KEEP, KEEP)), profile)
    (kind,) = layers.put_in(profile).kinds
    last = 49 + TUNING.remembered_rests
    assert kind.beside == {KEEP: Beside(0, last, last), OFFLOAD: Beside(0, 800, 800)}


def test_a_layer_that_did_not_run_tells_nothing() -> None:
    layers, profile = BesideLayers(TUNING), profile_of()
    layers.note(seen((20, 30), (0, 0)), Plan((KEEP, OFFLOAD)), profile)
    assert layers.put_in(profile).kinds[0].beside == {KEEP: Beside(0, 30, 30)}


def test_what_was_seen_grows_with_the_layers_and_is_forgotten_after_the_first_step() -> None:
    layers, plan, profile = BesideLayers(TUNING), Plan((OFFLOAD, OFFLOAD)), profile_of()
    for at_loss in (10, 30):
        layers.note(seen((at_loss + 3, at_loss), (0, 0), at_loss=at_loss), plan, profile)
    layers.grow(2.5)
    known = layers.put_in(profile)
    assert (known.kinds[0].beside, known.loss_bytes) == ({OFFLOAD: Beside(75, 75, 75)}, 75)
    layers.forget()
    assert layers.put_in(known) == profile


# What plans make of it


def test_what_lies_beside_a_layer_counts_while_it_runs_and_logits_while_there_are_some() -> None:
    wide = LayerKind((Saved(100, 0.5, 0.5),), 0, 10, beside={KEEP: Beside(0, 50), RECOMPUTE: Beside(5, 20)})
    narrow = LayerKind((Saved(30, 0.5, 0.5),), 0, 10, beside={KEEP: Beside(0, 1)})
    profile = profile_of(2, (wide, narrow))

    def peak_of(*placements: Placement, at_loss: int = 0, rest: int = 0) -> int:
        played = dataclasses.replace(profile, loss_bytes=at_loss, rest_bytes=rest)
        return simulate(played, Plan(placements), DRIVE).peak_bytes

    assert peak_of(KEEP, KEEP) == 100 + 50  # when the wide one goes backward, the narrow one has gone
    assert peak_of(KEEP, KEEP, at_loss=15) == 100 + 50
    assert peak_of(KEEP, KEEP, at_loss=21) == 100 + 30 + 21
    assert peak_of(RECOMPUTE, KEEP, at_loss=21) == 10 + 90 + 20
    assert peak_of(RECOMPUTE, KEEP, at_loss=21, rest=7) == 10 + 90 + 20 + 7
    # Never seen so: as if it is offloaded, or as under the placement under which there was most.
    assert peak_of(OFFLOAD, KEEP) == 100 + 50
    wide.beside[OFFLOAD] = Beside(0, 40, 40)
    assert peak_of(Placement.OFFLOAD_REMAT, KEEP) == 100 + 40
    assert peak_of(Placement.RECOMPUTE_EXCEPT_ATTENTION, KEEP) == 10 + 90 + 20  # as if it is recomputed
    known = dataclasses.replace(profile, loss_bytes=21, rest_bytes=7)
    assert known.beside_bytes((KEEP, KEEP)) == 50 + 7
    assert known.beside_bytes((RECOMPUTE, RECOMPUTE)) == 21 + 7  # of placements that are in force


@pytest.mark.parametrize(
    ("placement", "beside"),
    [
        (OFFLOAD, Beside(30, 90, 20)),
        (Placement.OFFLOAD_REMAT, Beside(30, 90, 20)),
        (KEEP, Beside(30, 20, 20)),
        (RECOMPUTE, Beside(30, 40, 40)),
        (Placement.RECOMPUTE_EXCEPT_ATTENTION, Beside(30, 40, 40)),
    ],
)
def test_what_an_offloaded_layer_needs_when_it_has_used_much_lies_not_beside_all_that_it_saves(
    placement: Placement, beside: Beside
) -> None:
    """What was used makes room; but a second forward has the temporaries of the first one, and a gradient."""
    (kind,) = profile_of().kinds
    kind.beside[OFFLOAD] = Beside(30, 90, 20)
    assert kind.beside_as(placement) == beside
    kind.beside[KEEP] = Beside(50, 10, 10)
    if placement.recomputes:
        assert kind.beside_as(placement) == Beside(50, 60, 60)


def test_gradients_that_come_later_leave_room_to_logits() -> None:
    """Under a budget of all that a device holds there are none yet when the loss is computed."""
    profile = profile_of(1)
    slots = (profile.slots[0], profile.slots[1]._replace(gradients=80))
    late = dataclasses.replace(profile, slots=slots, loss_bytes=70)
    found = simulate(late, Plan((KEEP,)), DRIVE)
    assert (found.activation_bytes, found.peak_bytes) == (103 + 70, 103)


def test_each_of_several_micro_batches_has_its_loss() -> None:
    profile = profile_of(1)
    first, last = profile.slots
    slots = first, last, first._replace(micro_batch=1), last._replace(micro_batch=1, gradients=80)
    slots = slots[0], slots[1]._replace(gradients=80), slots[2]._replace(gradients=80), slots[3]
    late = dataclasses.replace(profile, slots=slots, loss_bytes=70)
    assert simulate(late, Plan((KEEP,)), DRIVE).peak_bytes == 103 + 70


def test_a_profile_keeps_what_lies_beside_in_a_run_log_and_when_it_is_condensed() -> None:
    kind = LayerKind(
        tuple(Saved(25, n / 4, 1 - n / 4) for n in range(4)), 0, 10, beside={KEEP: Beside(5, 50, 40)}
    )
    profile = dataclasses.replace(profile_of(8, (kind,)), loss_bytes=9)
    assert StepProfile.from_json(json.loads(json.dumps(profile.as_json()))) == profile
    old = profile.as_json()
    old["kinds"][0]["beside"] = {"keep": [5, 50]}
    assert StepProfile.from_json(old).kinds[0].beside == {KEEP: Beside(5, 50, 50)}
    del old["loss_bytes"], old["kinds"][0]["beside"]
    assert StepProfile.from_json(old).beside_bytes((KEEP,) * 8) == 0
    small = condensed(profile, [None] * 8, 4).profile
    assert len(small.layers) < 8
    assert small.beside_bytes((KEEP,) * len(small.layers)) == profile.beside_bytes((KEEP,) * 8) == 50


def test_of_two_kinds_the_most_that_lies_beside_counts() -> None:
    kind = profile_of().kinds[0]
    some = dataclasses.replace(kind, beside={KEEP: Beside(1, 20)})
    other = dataclasses.replace(kind, beside={KEEP: Beside(3, 10), OFFLOAD: Beside(7, 7)})
    assert some.at_least(other).beside == {KEEP: Beside(3, 20), OFFLOAD: Beside(7, 20)}
