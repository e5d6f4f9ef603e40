"""Backward in two passes, as zero-bubble pipelines have it: gradients of inputs, and later those of weights.

Between the two a graph lives on, and so does what its layers keep. The passes are those of PyTorch's own
pipelines, in one process and in an order that a test gives: ``F0 I0 F1 W0`` is the forward of micro-batch 0,
its gradients of inputs, another forward, and the gradients of weights. ``B`` is backward in one go, ``R`` the
same with ``retain_graph``, and ``D`` drops a loss.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from harness import session_for
from models import same_bits
from profiles import FAST, KEEP, OFFLOAD, all_of, make_profile, rebuilding
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from tba_offload.adapt.profiler import profile_of
from tba_offload.config.policy import Placement
from tba_offload.plan.condense import condensed, with_few_micro_batches
from tba_offload.plan.profile import Slot, StepProfile
from tba_offload.plan.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.session import Session

LAYERS, WIDTH = 3, 32
FREED = "F0 F1 B0 B1"


class Block(nn.Module):
    """Ends with a sum, to which the gradients of weights need not come."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """Backward comes to it in both passes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def make_stage(layer: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(LAYERS)))


def play(stage: nn.Module, order: str, between: Callable[[], object] = lambda: None) -> list[Tensor]:
    """Passes in an order; returns the gradients of the inputs."""
    inputs: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    split: dict[str, Any] = {}
    for letter, number in order.split():
        between()
        if letter == "F":
            generator = torch.Generator().manual_seed(int(number))
            inputs[number] = torch.randn(8, WIDTH, generator=generator).requires_grad_()
            losses[number] = stage(inputs[number]).pow(2).mean()
        elif letter == "I":
            _, split[number] = stage_backward_input(
                [losses[number]], None, [inputs[number]], stage.parameters()
            )
        elif letter == "W":
            del losses[number]
            stage_backward_weight(stage.parameters(), split.pop(number))
        elif letter == "D":
            del losses[number]
        else:
            losses[number].backward(retain_graph=letter == "R")
    return [x.grad for x in inputs.values() if x.grad is not None]


def recorded(
    order: str,
    default: Placement = OFFLOAD,
    layer: Callable[[], nn.Module] = Block,
    before: StepProfile | None = None,
) -> StepProfile:
    """The profile of a step in which passes came in an order."""
    stage = make_stage(layer)
    with session_for(stage, layers=list(stage), default=default, min_tensor_bytes=64) as session:
        with session.step():
            play(stage, order)
        layers = [(layer.chunk, layer.id.name) for layer in session.layers]
        found = profile_of(session.capture.trace, [], layers, began=0.0, ended=1e9, before=before)
    assert found is not None
    return found


def held(profile: StepProfile) -> dict[str, list[str]]:
    """Of each backward, by micro-batch and last layer first: what came when its memory was gone."""
    slots = profile.slots

    def name(place: int | None) -> str:
        if place is None:
            return "freed"
        return "end" if place == len(slots) else f"{'FB'[slots[place].backward]}{slots[place].micro_batch}"

    found: dict[str, list[str]] = {}
    for slot in slots:
        if slot.backward:
            found.setdefault(str(slot.micro_batch), []).append(name(slot.held_until))
    return found


# What is recorded


@pytest.mark.parametrize("default", [OFFLOAD, KEEP, Placement.OFFLOAD_REMAT])
def test_what_a_layer_holds_is_gone_when_its_weights_have_their_gradients(default: Placement) -> None:
    before = recorded(FREED)
    profile = recorded("F0 F1 I0 F2 I1 W0 F3 W1 I2 I3 W2 W3", default, before=before)
    assert held(profile) == {
        "0": ["F3"] * LAYERS,
        "1": ["B2"] * LAYERS,
        "2": ["end"] * LAYERS,
        "3": ["end"] * LAYERS,
    }


@pytest.mark.parametrize("order", [FREED, "F0 B0 F1 B1", "F0 R0 B0 F1 R1 R1 B1"])
@pytest.mark.parametrize("default", [OFFLOAD, KEEP])
def test_what_the_last_backward_frees_is_not_held(order: str, default: Placement) -> None:
    found = held(recorded(order, default, before=recorded(FREED)))
    assert found == {"0": ["freed"] * LAYERS, "1": ["freed"] * LAYERS}


def test_a_layer_that_the_second_pass_comes_to_ends_there() -> None:
    profile = recorded("F0 I0 F1 W0 I1 W1", layer=Linear)
    assert held(profile) == {"0": ["freed"] * LAYERS, "1": ["freed"] * LAYERS}
    assert [slot.backward for slot in profile.slots] == 2 * ([False] * LAYERS) + 2 * ([True] * LAYERS)


def test_a_graph_that_nothing_frees_is_held_until_its_loss_is_dropped() -> None:
    profile = recorded("F0 R0 F1 D0 R1 F2 B2")
    assert held(profile) == {"0": ["B1"] * LAYERS, "1": ["end"] * LAYERS, "2": ["freed"] * LAYERS}


def test_a_second_derivative_leaves_nothing_alive() -> None:
    """Gradients with a graph of their own retain the first one; their backward frees both."""
    stage = make_stage()
    with session_for(stage, layers=list(stage), default=OFFLOAD, min_tensor_bytes=64) as session:
        with session.step():
            x = torch.randn(8, WIDTH).requires_grad_()
            (gradient,) = torch.autograd.grad(stage(x).pow(2).mean(), x, create_graph=True)
            gradient.pow(2).sum().backward()
        assert {scope.is_retained for scope in session.capture.trace.scopes} == {False}


@pytest.mark.parametrize("default", [OFFLOAD, KEEP])
def test_a_split_step_that_keeps_is_predicted_to_hold_all_that_it_holds(default: Placement) -> None:
    before = recorded(FREED)
    late = recorded("F0 I0 F1 I1 F2 I2 W0 W1 W2", default, before=before)
    others = recorded("F0 F1 F2 B0 B1 B2"), recorded("F0 B0 F1 B1 F2 B2")
    profiles = [late, *(dataclasses.replace(late, slots=other.slots) for other in others)]
    peaks = [simulate(each, all_of(each, KEEP), FAST).peak_bytes for each in profiles]
    assert peaks[0] == peaks[1] == 3 * peaks[2] > 0


# What is counted


def test_gradients_that_are_put_in_place_by_hand_are_no_activations() -> None:
    stage = make_stage()
    counted: list[int] = []

    def note(session: Session) -> None:
        counted.append(session.gradients.live.nbytes)

    with session_for(stage, layers=list(stage), default=OFFLOAD, min_tensor_bytes=64) as session:
        with session.step():
            play(stage, "F0 I0 W0 F1 I1 W1", lambda: note(session))
    whole = sum(parameter.nbytes for parameter in stage.parameters())
    assert counted == [0, 0, 0, 0, whole, whole]  # before each pass; a forward looks


@pytest.mark.parametrize("default", [OFFLOAD, KEEP, Placement.OFFLOAD_REMAT, Placement.RECOMPUTE])
@pytest.mark.parametrize("layer", [Block, Linear])
def test_the_bits_are_those_of_a_plain_run(default: Placement, layer: Callable[[], nn.Module]) -> None:
    plain, attached = make_stage(layer), make_stage(layer)
    expected = play(plain, "F0 F1 I0 F2 I1 W0 W1 I2 W2")
    with session_for(attached, layers=list(attached), default=default, min_tensor_bytes=64) as session:
        with session.step():
            found = play(attached, "F0 F1 I0 F2 I1 W0 W1 I2 W2")
    pairs = zip(plain.parameters(), attached.parameters(), strict=True)
    expected += [one.grad for one, _ in pairs if one.grad is not None]
    found += [other.grad for other in attached.parameters() if other.grad is not None]
    assert len(found) == len(expected) == 3 + len([*plain.parameters()])
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_no_life_outlasts_its_graph() -> None:
    stage = make_stage()
    with session_for(stage, layers=list(stage), default=KEEP) as session:
        with session.step():
            play(stage, "F0 I0 F1 I1 W0 W1")
        trace = session.capture.trace
        gc.disable()
        try:
            trace.note_gone()
            retained = [scope for scope in trace.scopes if scope.is_retained]
            assert retained
            assert all(scope.gone_by is not None for scope in retained)
        finally:
            gc.enable()


# What is predicted


def split(profile: StepProfile, until: int) -> StepProfile:
    """The same step, but what backward would free is held until the slot of that place."""
    slots = tuple(
        slot._replace(held_until=max(until, place + 1)) if slot.backward else slot
        for place, slot in enumerate(profile.slots)
    )
    return dataclasses.replace(profile, slots=slots)


@pytest.mark.parametrize("placement", [KEEP, OFFLOAD, Placement.OFFLOAD_REMAT, Placement.RECOMPUTE])
def test_a_step_holds_what_outlives_backward(placement: Placement) -> None:
    """One after the other peaks like all at once, if all are held; what was read goes at once."""
    turns = rebuilding(make_profile(4, micro_batches=3, warm_up=0))
    at_once = rebuilding(make_profile(4, micro_batches=3, warm_up=3))
    turns = dataclasses.replace(turns, rest_bytes=0)
    late = split(turns, len(turns.slots))
    plan = all_of(turns, placement, window=None if placement is KEEP else 4 << 20)
    freed, kept, most = (simulate(each, plan, FAST) for each in (turns, late, at_once))
    if placement is KEEP:
        assert kept.peak_bytes == most.peak_bytes - at_once.rest_bytes == 3 * freed.peak_bytes
    elif placement is Placement.RECOMPUTE:
        assert kept.peak_bytes == freed.peak_bytes + 8 * turns.kinds[0].input_bytes
    else:
        assert freed.peak_bytes <= kept.peak_bytes < 2 * freed.peak_bytes
    assert (kept.seconds, kept.written_bytes) == (freed.seconds, freed.written_bytes)


def test_what_is_held_is_gone_by_the_slot_that_it_is_held_until() -> None:
    slots = (
        *(Slot(0, 0, False, 0.0), Slot(0, 0, True, 0.0, 4), Slot(0, 1, False, 0.0), Slot(0, 1, True, 0.0)),
        *(Slot(0, 2, False, 0.0), Slot(0, 2, True, 0.0), Slot(0, 3, False, 0.0), Slot(0, 3, True, 0.0)),
    )
    profile = dataclasses.replace(make_profile(1), slots=slots, rest_bytes=0)
    one = simulate(dataclasses.replace(profile, slots=slots[4:6]), all_of(profile, KEEP), FAST).peak_bytes
    found = simulate(profile, all_of(profile, KEEP), FAST)
    assert found.peak_bytes == 2 * one
    assert found.peak_slot == slots[2]


def test_a_condensed_step_holds_it_as_long() -> None:
    turns = make_profile(16, micro_batches=3)
    profile = split(turns, 2 * 2 * 16)  # until the last micro-batch
    small = condensed(profile, [None] * 16, 40)
    assert len(small.members) < 16
    of_one = len(small.profile.slots) // 3
    assert [slot.held_until for slot in small.profile.slots if slot.backward][:2] == [2 * of_one] * 2
    whole, of_small = (
        simulate(each, all_of(each, KEEP), FAST).peak_bytes for each in (profile, small.profile)
    )
    assert of_small == whole


def test_of_many_micro_batches_those_stay_that_are_held_together() -> None:
    turns = make_profile(2, micro_batches=30)
    slots = [
        slot._replace(held_until=place + 1 if slot.micro_batch < 20 else min(place + 21, 120))
        if slot.backward
        else slot
        for place, slot in enumerate(turns.slots)
    ]
    profile = dataclasses.replace(turns, slots=tuple(slots))
    shorter = with_few_micro_batches(profile)
    assert len(shorter.slots) < len(profile.slots)
    peaks = [simulate(each, all_of(each, KEEP), FAST).peak_bytes for each in (profile, shorter)]
    assert peaks[0] == peaks[1]


def test_what_is_held_survives_its_way_through_a_run_log() -> None:
    plain = make_profile(2, micro_batches=2)
    profile = split(plain, 6)
    assert StepProfile.from_json(profile.as_json()) == profile
    assert {len(slot) for slot in plain.as_json()["slots"]} == {4}
