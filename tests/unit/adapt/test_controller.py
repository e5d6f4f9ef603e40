"""From steps to plans: what a session learns, what it decides, and that nothing of it changes a bit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from covering import full, of_which
from harness import KIB, MIB, Drive, assert_all_given_back, config_for, session_for
from machine import Machine, watching
from models import all_written, assert_same_history, loss_of, make_model, make_tokens, train
from torch import nn

import tba_offload as tba
from tba_offload.adapt.beside import SeenBeside
from tba_offload.adapt.controller import Controller
from tba_offload.adapt.needs import Needs
from tba_offload.adapt.pace import Pace
from tba_offload.adapt.phases import Comparison, Excursion, Moment, Settled
from tba_offload.adapt.profiler import ComputeClock, profile_of
from tba_offload.adapt.proposals import bare, best_plan, excursion, probing_plan, worst_peak
from tba_offload.adapt.rates import Rates, drifted
from tba_offload.adapt.task import Case, Task
from tba_offload.capture.scope import ActivationKey, ScopeKey
from tba_offload.capture.trace import ActivationTrace, ScopeTrace, StepTrace, Treatment
from tba_offload.cli import main
from tba_offload.config import load_config
from tba_offload.config.policy import LayerId, Objective, Placement
from tba_offload.errors import RunLogError
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.beside import Beside
from tba_offload.plan.goals import default_objective
from tba_offload.plan.model import Limits, Plan, Prediction
from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing
from tba_offload.plan.search import make_plan
from tba_offload.plan.simulate import simulate
from tba_offload.plan.sizes import Sizes, StepSize
from tba_offload.plan.tuning import TUNING, Tuning
from tba_offload.plan.what_if import Block, one_f_one_b, peak_of_keep, stretched
from tba_offload.report.log import StepRecord, read_run_log
from tba_offload.store.base import DriveLoad, Load
from tba_offload.what_if import FRONTIER, Situation, composition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tba_offload.adapt.observation import StepObservation
    from tba_offload.session import Session

KEEP, OFFLOAD, RECOMPUTE, AUTO = Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.AUTO
OFFLOAD_REMAT = Placement.OFFLOAD_REMAT
LAYERS = 8
SLOW = 5e6
"""Bytes a second: a layer of these models needs many times its own time to travel, on a busy machine too."""
FAST = Bandwidth(1e12, 1e12)


def auto_session(model: Any, drive: Drive, *, activation: int | None = None, **options: Any) -> Session:
    # Or a first step on a drive that hangs may write nothing to learn from.
    options.setdefault("on_slow", "wait")
    session = session_for(model, drive=drive, default=AUTO, in_flight=MIB, activation=activation, **options)
    start_anew(session)  # with a controller that decides at once, however busy the machine
    return session


CALM = Tuning(drift=math.inf, big_drift=math.inf, astray=math.inf)
"""The moods of the machine that runs a test are no reason to plan anew."""


def with_drive(measured: Callable[[Rates], Bandwidth | None]) -> Any:
    """Whatever moods the machine has, this is what a controller takes the drive for."""
    return mock.patch.object(Rates, "bandwidth", measured)


def start_anew(session: Session, **changes: Any) -> Controller:
    """Has a session planned by a new controller whose task differs in this from that of its own one."""
    controller = Controller(dataclasses.replace(controller_of(session).task, **changes))
    session.planning.start(session.plan, controller)
    return controller


def with_free_hooks() -> Any:
    """Layers that offload are taken to take as long as those that keep: these steps are mostly hooks."""

    def profiled(*arguments: Any, **options: Any) -> StepProfile | None:
        found = profile_of(*arguments, **options)
        if found is None:
            return None
        kept = tuple({KEEP: known[KEEP]} if KEEP in known else known for known in found.timings)
        return dataclasses.replace(found, timings=kept)

    return mock.patch("tba_offload.adapt.knowledge.profile_of", profiled)


def profile_in(session: Session) -> StepProfile:
    profile = controller_of(session).knowledge.profile
    assert profile is not None
    return profile


def controller_of(session: Session) -> Controller:
    assert session.planning.controller is not None
    return session.planning.controller


# What is learned


def test_the_clock_of_compute_stands_while_the_thread_waits() -> None:
    clock = ComputeClock([(10.0, 12.0), (20.0, 21.0)])
    assert [clock(when) for when in (5, 10, 11, 12, 15, 20.5, 21, 30)] == [5, 10, 10, 10, 13, 18, 18, 27]
    assert ComputeClock([])(7.0) == 7.0


def test_a_step_without_layers_has_no_profile() -> None:
    assert profile_of(StepTrace(), [], [(0, "layers.0")], began=0.0, ended=1.0) is None


def test_a_profile_tells_what_layers_save_and_in_which_order_they_run() -> None:
    model = make_model(layers=LAYERS)
    with auto_session(model, Drive()) as session:
        train(model, session, steps=4, micro_batches=2, loss=all_written(session))
        profile = profile_in(session)
        record = session.report()[0]
    assert profile.layers == (0,) * LAYERS
    assert len(profile.slots) == 2 * 2 * LAYERS
    assert [slot[:3] for slot in profile.slots[:LAYERS]] == [(layer, 0, False) for layer in range(LAYERS)]
    assert [slot[:3] for slot in profile.slots[-LAYERS:]] == [
        (layer, 1, True) for layer in reversed(range(LAYERS))
    ]
    (kind,) = profile.kinds
    moved = record.offloaded_bytes + record.fallback_kept_bytes
    assert 0.9 * moved <= 2 * LAYERS * kind.nbytes <= 1.3 * moved
    assert kind.input_bytes == 4 * 32 * 64 * 4
    assert all(0 <= saved.at <= 1 and 0 <= saved.until <= 1 for saved in kind.activations)
    assert [saved.at for saved in kind.activations] == sorted(saved.at for saved in kind.activations)
    assert {KEEP, OFFLOAD} <= set(profile.timings[0])


def test_inputs_that_travel_are_not_taken_for_what_a_layer_saves(tmp_path: Path) -> None:
    """Such layers stay as the policy places them, and the profile is that of the others."""
    inputs = Placement.RECOMPUTE_OFFLOAD
    rules = (tba.Rule("0-2", inputs), tba.Rule("3", Placement.KEEP))
    model, path = make_model(layers=LAYERS), tmp_path / "run.jsonl"
    config = config_for(default=AUTO, rules=rules, in_flight=MIB)
    with tba.attach(model, config, measure_memory=False, run_log=path) as session:
        train(model, session, steps=4, loss=all_written(session))
        profile, plan = profile_in(session), session.plan
        first, *_, last = session.report()
    assert plan.placements[:4] == (inputs, inputs, inputs, KEEP)
    assert profile.layers == (0,) * LAYERS
    (kind,) = profile.kinds
    one = kind.input_bytes
    assert kind.nbytes > 8 * one
    # One of the layers is kept, and of three only the input is known to the hooks.
    moved = first.offloaded_bytes + first.forwarded_bytes + first.fallback_kept_bytes
    assert moved == 4 * kind.nbytes + 3 * one
    assert {KEEP, OFFLOAD, RECOMPUTE} <= set(profile.timings[0])
    assert inputs not in profile.timings[0]
    assert plan.prediction is not None
    assert last.recomputed_scopes == 3


def test_layers_that_are_all_recomputed_from_inputs_that_travel_need_no_plan(tmp_path: Path) -> None:
    model = make_model(layers=LAYERS)
    config = config_for(default=Placement.RECOMPUTE_OFFLOAD, in_flight=MIB)
    with tba.attach(model, config, measure_memory=False, run_log=tmp_path / "run.jsonl") as session:
        train(model, session, steps=10)
        assert session.planning.controller is None
        assert {record.predicted_seconds for record in session.report()} == {None}


# What can be rebuilt


def trace_of(*placements: Placement, rebuilt: Sequence[int] = (1,)) -> StepTrace:
    """Layers that save three activations each; in those placed offload-remat one is needed early."""
    trace = StepTrace(backward_ends=[40.0])
    for layer, placement in enumerate(placements):
        key = ScopeKey(layer, 0, 0, f"layers.{layer}")
        start, back = 2.0 * layer, 38.0 - 2.0 * layer
        scope = ScopeTrace(key, placement, start, forward_ended=start + 1.0, backward_began=back)
        trace.scopes.append(scope)
        if placement in {KEEP, RECOMPUTE}:
            continue
        is_remat = placement is OFFLOAD_REMAT
        for number, until in enumerate((0.25 if is_remat else 0.75, 0.5, 0.25)):
            treatment = Treatment.REBUILT if is_remat and number in rebuilt else Treatment.OFFLOADED
            activation = ActivationTrace(
                ActivationKey(key, number), 100, treatment, start + 0.25 * (number + 1)
            )
            activation.unpacked_at = back + 2.0 * until
            trace.activations.append(activation)
    return trace


def profile_by_hand(
    *placements: Placement, before: StepProfile | None = None, rebuilt: Sequence[int] = (1,)
) -> StepProfile:
    layers = [(0, f"layers.{layer}") for layer in range(len(placements))]
    trace = trace_of(*placements, rebuilt=rebuilt)
    profile = profile_of(trace, [], layers, began=0.0, ended=40.0, before=before)
    assert profile is not None
    return profile


def test_what_is_rebuilt_is_learned_from_a_layer_that_runs_so() -> None:
    profile = profile_by_hand(OFFLOAD, OFFLOAD_REMAT, OFFLOAD)
    (kind,) = profile.kinds
    assert [saved.rebuilt for saved in kind.activations] == [False, True, False]
    assert [saved.needed for saved in kind.activations] == [0.25, None, 0.25]
    assert [saved.until for saved in kind.activations] == [0.75, 0.5, 0.25]
    assert kind.small_bytes == 0
    (unknown,) = profile_by_hand(OFFLOAD, OFFLOAD).kinds
    assert [saved.rebuilt for saved in unknown.activations] == [None] * 3


def test_what_it_takes_to_find_out_what_can_be_rebuilt_is_not_what_rebuilding_takes() -> None:
    first = profile_by_hand(OFFLOAD, OFFLOAD_REMAT)
    assert set(first.timings[0]) == {OFFLOAD}
    assert set(profile_by_hand(OFFLOAD, OFFLOAD_REMAT, before=first).timings[0]) == {OFFLOAD, OFFLOAD_REMAT}
    assert set(profile_by_hand(OFFLOAD_REMAT, OFFLOAD_REMAT).timings[0]) == {OFFLOAD_REMAT}


@pytest.mark.parametrize("later", [(OFFLOAD, KEEP), (OFFLOAD_REMAT, OFFLOAD_REMAT), (KEEP, RECOMPUTE)])
def test_what_was_learned_of_rebuilding_stays_known(later: tuple[Placement, ...]) -> None:
    before = profile_by_hand(OFFLOAD, OFFLOAD_REMAT)
    found = profile_by_hand(*later, before=before)
    assert found.kinds == before.kinds
    assert (OFFLOAD_REMAT in found.timings[0]) is (OFFLOAD_REMAT in later)


def test_a_layer_of_which_a_share_travels_does_not_tell_what_offloading_takes() -> None:
    trace = trace_of(Placement("offload-50%"), OFFLOAD)
    trace.scopes[0].forward_ended = 1.75
    trace.activations[0].treatment = Treatment.PLANNED_KEEP
    profile = profile_of(trace, [], [(0, "layers.0"), (0, "layers.1")], began=0.0, ended=40.0)
    assert profile is not None
    assert profile.timings == ({OFFLOAD: Timing(1.0, 2.0)},)


@pytest.mark.parametrize(
    ("placements", "fallback", "rest"),
    [
        ((OFFLOAD, OFFLOAD), 0, 700),
        ((OFFLOAD, OFFLOAD), 1, 900),
        ((AUTO, AUTO), 0, 700),
        ((AUTO, AUTO), 1, 900),
        ((KEEP, AUTO), 1, 7),
    ],
)
def test_what_memory_holds_beside_layers_is_found_with_the_simulator_or_the_books(
    placements: tuple[Placement, ...], fallback: int, rest: int
) -> None:
    """The simulator knows what backward uses, the books what was kept although no plan says so."""
    needs, bandwidth = Needs(task_of(2)), Bandwidth(100, 100)
    profile = dataclasses.replace(profile_by_hand(OFFLOAD, OFFLOAD), rest_bytes=7)
    record = mock.Mock(own_peak_bytes=100, fallback_kept_bytes=fallback, activation_peak_bytes=1000)
    plan = Plan(placements, window=200)
    assert fallback or simulate(dataclasses.replace(profile, rest_bytes=0), plan, bandwidth).peak_bytes == 300
    found = needs.with_rest(profile, plan, bandwidth, record, 1000)
    assert found.rest_bytes == rest
    assert needs.with_rest(profile, plan, bandwidth, record, None) is profile


def test_what_other_plans_needed_beyond_what_is_known_is_not_foretold_of_one_that_was_measured() -> None:
    profile = dataclasses.replace(profile_by_hand(OFFLOAD, OFFLOAD), rest_bytes=700)
    case = case_of(task_of(2, budget=2000), profile)
    needs = Needs(case.task)
    measured, other = Plan((OFFLOAD, OFFLOAD), window=200), Plan((OFFLOAD, KEEP), window=200)
    for peak, activations in ((290, 350), (310, 320), (300, 340)):
        needs.note_peak(measured, peak, activations, is_largest=True)
    told, of_other = (needs.with_prediction(case, plan).prediction for plan in (measured, other))
    assert told is not None
    assert (told.peak_bytes, told.activation_peak) == (300, 340)
    assert needs.peak_of(measured) == 310
    needs.note_peak(measured, 2500, 2500, is_largest=False)  # of a smaller step, which broke the budget
    assert needs.peak_of(measured) == 2500
    assert needs.with_prediction(case, measured).prediction == told
    assert told.seconds == case.play(measured).seconds
    assert of_other is not None
    assert of_other.peak_bytes == case.play(other).peak_bytes > 700


def test_what_a_process_allocates_once_in_its_first_step_is_none_of_what_lies_beside_layers() -> None:
    """Kernels take workspaces then; the next step is one of probes, and does not offload everything."""
    model, once = make_model(layers=LAYERS), []

    def allocate_once(*_: object) -> None:
        if not once:
            once.append(torch.zeros(64 * MIB // 4))

    model.register_forward_hook(allocate_once)
    with auto_session(model, Drive(), activation=256 * MIB) as session:
        train(model, session, steps=3)
        report = session.report()
        assert profile_in(session).rest_bytes < 32 * MIB
    assert (report[0].activation_peak_bytes or 0) >= 64 * MIB
    assert report[1].recomputed_scopes


def test_what_is_not_rebuilt_any_longer_is_noticed() -> None:
    before = profile_by_hand(OFFLOAD, OFFLOAD_REMAT)
    (kind,) = profile_by_hand(OFFLOAD, OFFLOAD_REMAT, before=before, rebuilt=()).kinds
    assert [saved.rebuilt for saved in kind.activations] == [False] * 3


def test_a_run_whose_layers_are_all_rebuilt_in_part_can_be_planned_from() -> None:
    profile = profile_by_hand(OFFLOAD_REMAT, OFFLOAD_REMAT)
    (kind,) = profile.kinds
    assert kind.rebuilt_bytes == 100
    assert [saved.until for saved in kind.activations] == [0.25, 0.5, 0.25]
    plan = make_plan(profile, Bandwidth(10, 10), Limits(250), policy=(AUTO, AUTO), objective=Objective.TIME)
    assert plan.prediction is not None


def test_layers_run_rebuilt_while_the_planner_learns_and_no_bit_changes(tmp_path: Path) -> None:
    """What it has learned is in the run log."""
    expected = train(make_model(layers=LAYERS, dropout=0.1), steps=8)
    model, path = make_model(layers=LAYERS, dropout=0.1), tmp_path / "run.jsonl"
    config = config_for(default=AUTO, in_flight=MIB, activation=16 * MIB)
    plans = []
    with tba.attach(model, config, run_log=path, measure_memory=False) as session:
        found = train(model, session, steps=8, before_step=lambda _: plans.append(session.plan))
        profile, report = profile_in(session), session.report()
        assert_all_given_back(session)
    assert_same_history(found, expected)
    assert [OFFLOAD_REMAT in plan.placements for plan in plans[:3]] == [False, True, True]
    assert report[0].rebuilt_bytes == 0 < report[2].rebuilt_bytes
    (kind,) = profile.kinds
    assert 0.2 * kind.nbytes < kind.rebuilt_bytes < 0.5 * kind.nbytes
    assert OFFLOAD_REMAT in profile.timings[0]
    (logged,) = Situation.of(path).profile.kinds
    assert logged.rebuilt_bytes == kind.rebuilt_bytes


def test_a_plan_made_from_a_run_log_may_rebuild(tmp_path: Path) -> None:
    """And its policy file does what the plan said."""
    model, path = make_model(layers=LAYERS), tmp_path / "run.jsonl"
    rules = (tba.Rule("0-3", OFFLOAD_REMAT),)
    with tba.attach(
        model, config_for(in_flight=MIB, rules=rules), run_log=path, measure_memory=False
    ) as session:
        train(model, session, steps=4)
    profile = Situation.of(path).profile
    (kind,) = profile.kinds
    shares = [(number + 0.5) / len(kind.activations) for number in range(len(kind.activations))]
    evenly = tuple(
        saved._replace(at=share, until=1 - share, needed=None if saved.needed is None else 1 - share)
        for saved, share in zip(kind.activations, shares, strict=True)
    )
    cheap = dataclasses.replace(
        profile,
        kinds=(dataclasses.replace(kind, activations=evenly),),
        timings=({OFFLOAD: Timing(0.01, 0.02), OFFLOAD_REMAT: Timing(0.01, 0.0201)},),
        slots=tuple(slot._replace(gap=0.0) for slot in profile.slots),
        tail=0.0,
    )
    rate = 0.75 * profile.kinds[0].nbytes / 0.01
    situation = dataclasses.replace(Situation.of(path), profile=cheap, bandwidth=Bandwidth(rate, rate))
    plan = situation.plan(2 * MIB)
    assert OFFLOAD_REMAT in plan.placements
    said = situation.why(plan)[plan.placements.index(OFFLOAD_REMAT)]
    assert "of compute spare the drive" in said
    policy = tmp_path / "policy.yaml"
    policy.write_text(situation.policy_for(plan, 2 * MIB).to_yaml())
    placed = load_config(policy).policy
    assert [placed.explain(layer.id)[0] for layer in session.layers] == list(plan.placements)


def test_ranks_need_not_agree_on_what_is_rebuilt() -> None:
    model = make_model(layers=LAYERS)

    def planned(*arguments: Any, **options: Any) -> Plan:
        placements = tuple(OFFLOAD_REMAT if wanted is AUTO else wanted for wanted in options["policy"])
        return dataclasses.replace(make_plan(*arguments, **options), placements=placements)

    with auto_session(model, Drive(), activation=3 * MIB) as session:
        others = Others(session, {1, 4})
        with mock.patch("tba_offload.adapt.proposals.make_plan", planned):
            train(model, session, steps=3)
        assert others.calls[-1][0] == {f"layers.{layer}": OFFLOAD_REMAT for layer in range(LAYERS)}
        agreed = recomputed_layers(session)
        train(model, session, steps=1)
    assert agreed == {1, 4}


def task_of(count: int, **options: Any) -> Task:
    layers = tuple((0, f"layers.{layer}") for layer in range(count))
    limits = Limits(options.pop("budget", 10**6), options.pop("window", None))
    objective = options.pop("objective", default_objective(limits))
    return Task((AUTO,) * count, layers, limits, objective, **options)


def case_of(
    task: Task,
    profile: StepProfile,
    bandwidth: Bandwidth = Bandwidth(100, 100),  # noqa: B008 - never changes
    *,
    not_recomputed: Iterable[int] = (),
) -> Case:
    return Case(task, profile, bandwidth, frozenset(not_recomputed))


def test_each_way_is_tried_once_while_the_planner_learns() -> None:
    plan = probing(task_of(8))
    assert set(plan.placements) == {AUTO, KEEP, RECOMPUTE, OFFLOAD_REMAT}


def probing(task: Task) -> Plan:
    return probing_plan(case_of(task, profile_by_hand(*(OFFLOAD,) * 8)), step=1)


def test_under_a_tight_budget_layers_are_recomputed_to_learn_and_none_is_kept() -> None:
    """What one takes that is recomputed decides there, and is guessed badly from one that offloads."""
    tried = {frozenset(probing(task_of(8, budget=budget)).placements) for budget in range(100, 3000, 20)}
    assert {AUTO, RECOMPUTE, OFFLOAD_REMAT} in tried
    assert {AUTO, KEEP, RECOMPUTE, OFFLOAD_REMAT} in tried


def test_a_layer_that_keeps_takes_no_more_than_one_that_is_recomputed_less_a_forward() -> None:
    """Hooks and threads that move bytes slow a layer down that offloads."""
    profile = profile_by_hand(*(OFFLOAD,) * 8)
    known = {OFFLOAD: Timing(3.0, 5.0), RECOMPUTE: Timing(1.0, 3.0)}
    slowed = dataclasses.replace(profile, timings=(known,))
    assert slowed.timing(0, KEEP) == Timing(1.0, 2.0)
    assert slowed.timing(0, OFFLOAD) == Timing(3.0, 5.0)
    fast = dataclasses.replace(profile, timings=({**known, RECOMPUTE: Timing(4.0, 12.0)},))
    assert fast.timing(0, KEEP) == Timing(3.0, 5.0)


@pytest.mark.parametrize("options", [{"budget": None}, {"objective": Objective.MEMORY}])
def test_nothing_is_recomputed_to_learn_for_those_who_want_memory_at_no_cost(options: Any) -> None:
    assert set(probing(task_of(8, **options)).placements) == {AUTO, KEEP, OFFLOAD_REMAT}


@pytest.mark.parametrize(
    ("before", "tried"),
    [
        ((OFFLOAD, RECOMPUTE), OFFLOAD_REMAT),
        ((OFFLOAD, OFFLOAD_REMAT), RECOMPUTE),
        ((RECOMPUTE, OFFLOAD_REMAT), OFFLOAD),
    ],
)
def test_with_few_layers_an_excursion_tries_first_what_was_never_seen(
    before: tuple[Placement, ...], tried: Placement
) -> None:
    profile = single(profile_by_hand(*before, before=profile_by_hand(*before)))
    assert tried_instead_of(Plan((KEEP,)), profile) == (tried,)


def tried_instead_of(
    plan: Plan, profile: StepProfile, *, rate: float = 100, not_recomputed: Sequence[int] = ()
) -> tuple[Placement, ...] | None:
    """The placements of an excursion from a plan."""
    task, bandwidth = task_of(len(plan.placements)), Bandwidth(rate, rate)
    look = excursion(case_of(task, profile, bandwidth, not_recomputed=not_recomputed), plan)
    return None if look is None else look.placements


def test_an_excursion_does_not_try_to_rebuild_where_nothing_is_rebuilt() -> None:
    profile = single(profile_by_hand(OFFLOAD, OFFLOAD_REMAT, RECOMPUTE, rebuilt=()))
    known = dataclasses.replace(profile, timings=({OFFLOAD: profile.timings[0][OFFLOAD]},))
    assert tried_instead_of(Plan((OFFLOAD,)), known, not_recomputed=[0]) == (KEEP,)
    assert tried_instead_of(Plan((KEEP,)), known, not_recomputed=[0]) == (OFFLOAD,)


@pytest.mark.parametrize(
    ("first", "rate", "tried"), [(OFFLOAD_REMAT, 1000, True), (OFFLOAD_REMAT, 1, False), (KEEP, 1, True)]
)
def test_an_excursion_waits_for_no_drive_that_is_known(first: Placement, rate: int, *, tried: bool) -> None:
    """It is known where the plan moves bytes anyway."""
    profile = profile_by_hand(OFFLOAD_REMAT, OFFLOAD, KEEP, KEEP)
    plan = Plan((first, KEEP, KEEP, KEEP), window=100)
    look = tried_instead_of(plan, profile, rate=rate, not_recomputed=range(4))
    assert (look is not None) is tried
    assert look is None or OFFLOAD in look


def single(profile: StepProfile) -> StepProfile:
    """The step of the first layer alone."""
    slots = tuple(slot for slot in profile.slots if slot.layer == 0)
    return dataclasses.replace(profile, layers=profile.layers[:1], slots=slots)


# What is decided


def test_without_a_budget_a_fast_drive_takes_nearly_everything() -> None:
    expected = train(make_model(layers=LAYERS, dropout=0.1), steps=6)
    model = make_model(layers=LAYERS, dropout=0.1)
    with with_drive(lambda _: FAST), with_free_hooks(), auto_session(model, Drive()) as session:
        found = train(model, session, steps=6)
        report = session.report()
        assert_all_given_back(session)
    assert_same_history(found, expected)
    assert session.plan.placements.count(KEEP) <= 2
    assert set(session.plan.placements) <= {KEEP, OFFLOAD, OFFLOAD_REMAT}
    assert [record.predicted_seconds is None for record in report] == [True] * 3 + [False] * 3


def test_without_a_budget_nothing_travels_where_hooks_take_as_long_as_layers_do(tmp_path: Path) -> None:
    """And the run log tells what was planned, and why."""

    def profiled(*arguments: Any, **options: Any) -> StepProfile | None:
        found = profile_of(*arguments, **options)
        if found is None:
            return None
        timing = {KEEP: Timing(0.01, 0.02), OFFLOAD: Timing(0.02, 0.04)}
        return dataclasses.replace(found, timings=(timing,) * len(found.kinds))

    model, path = make_model(layers=LAYERS), tmp_path / "run.jsonl"
    config = config_for(default=AUTO, in_flight=MIB)
    with (
        with_drive(lambda _: FAST),
        mock.patch("tba_offload.adapt.knowledge.profile_of", profiled),
        tba.attach(model, config, run_log=path, measure_memory=False) as session,
    ):
        train(model, session, steps=5)
        assert session.plan.placements == (KEEP,) * LAYERS
    (event,) = [event for event in read_run_log(path).others if event["event"] == "plan"]
    summary = str(event["summary"])
    assert event["caution"] == 1.0
    assert summary.startswith("keep all 8 layers; predicted peak ")
    assert summary.endswith("; made because 3 steps were measured")
    assert Situation.of(path).plan(None).placements == (KEEP,) * LAYERS


def test_what_a_run_did_not_recompute_no_plan_from_its_log_recomputes(tmp_path: Path) -> None:
    """A layer that the policy placed was not tried, and counts as those of its kind."""
    model, path = make_model(layers=4), tmp_path / "run.jsonl"
    for layer in model.layers[:3]:
        layer.turn = iter(range(1000))  # cannot be turned back for a second run
    config = config_for(default=AUTO, rules=(tba.Rule("last 1", KEEP),), in_flight=MIB, activation=16 * MIB)
    with tba.attach(model, config, run_log=path, measure_memory=False) as session:
        train(model, session, steps=5)
    event = [event for event in read_run_log(path).others if event["event"] == "plan"][-1]
    assert event["not_recomputed"] == [0, 1, 2]
    situation = Situation.of(path)
    assert situation.not_recomputed == {0, 1, 2, 3}
    assert situation.changed(layers=8).not_recomputed == set(range(8))
    slow = situation.changed(write=1e6, read=1e6)  # so that any layer that may be is recomputed
    free = dataclasses.replace(slow, not_recomputed=frozenset())
    budget = situation.peak_of_keep // 2
    assert RECOMPUTE in free.plan(budget).placements
    for plan in [slow.plan(budget), *(choice.plan for choice in slow.frontier())]:
        assert not any(placement.recomputes for placement in plan.placements)


@pytest.mark.parametrize(
    ("recent", "waited", "rate", "peak", "why"),
    [
        ((1.0, 1.0), (0.0, 0.0), 1e9, 0, None),
        ((2.0, 2.0), (0.0, 0.0), 1e9, 0, "steps took 2.00 s instead of 1.00 s"),
        ((1.0, 1.0), (0.5, 0.5), 1e9, 0, "steps waited for more than 2% of their time"),
        ((1.0, 1.0), (0.0, 0.0), 2e9, 0, "2.00 GB/s / 2.00 GB/s instead of 1.00 GB/s / 1.00 GB/s"),
        ((1.0, 1.0), (0.0, 0.0), 1e9, 3 * MIB, "a step peaked at 3.00 MiB, over the budget of 2.00 MiB"),
    ],
)
def test_a_doubt_about_a_plan_says_what_is_wrong(
    recent: tuple[float, float], waited: tuple[float, float], rate: float, peak: int, why: str | None
) -> None:
    task = task_of(4, budget=2 * MIB, objective=Objective.MEMORY)
    found = doubt_of(task, zip(recent, waited, strict=True), bandwidth=Bandwidth(rate, rate), peak=peak)
    assert found == why or (why is not None and found is not None and found.endswith(why))


def doubt_of(task: Task, steps: Iterable[tuple[float, float]], **seen: Any) -> str | None:
    """The doubt about a plan that was to take 1 s, after steps of so many seconds and shares of waits."""
    plan = Plan((OFFLOAD,) * len(task.policy), prediction=Prediction(1.0, 0.0, MIB, 0))
    pace = Pace(task.tuning)
    for seconds, waited in steps:
        record = StepRecord(step=9, seconds=seconds, stall_seconds=waited * seconds)
        pace.note(record, None, is_planned=True)
    return Settled(plan, "", planned_for=Bandwidth(1e9, 1e9)).doubt(moment_of(task, plan, pace, **seen))


QUIET = (0.236, 0.242, 0.233, 0.238, 0.235, 0.240, 0.237, 0.236, 0.239, 0.234, 0.236, 0.238)
BUSY = (0.176, 0.165, 0.306, 0.256, 0.242, 0.220, 0.236, 0.196, 0.289, 0.296, 0.337, 0.691)
"""Seconds of steps of 50 small layers, recorded while two loops kept both cores of the machine busy."""


def doubts_about(times: Sequence[float], expected: float = 0.236) -> list[int]:
    """After which of the steps the plan is in doubt."""
    task, plan = task_of(1, budget=None), Plan((OFFLOAD,), prediction=Prediction(expected, 0.0, MIB, 0))
    pace, doubted = Pace(task.tuning), []
    for number, seconds in enumerate(times):
        pace.note(StepRecord(step=number, seconds=seconds), None, is_planned=True)
        moment = moment_of(task, plan, pace)
        if Settled(plan, "", planned_for=HALF).doubt(moment) is not None:
            doubted.append(number)
    return doubted


@pytest.mark.parametrize(
    ("times", "doubted"),
    [
        (QUIET, []),
        (BUSY, [1, 2]),  # two or three that happen to be alike
        (QUIET[:6] + tuple(1.5 * seconds for seconds in QUIET[6:]), [7, 8, 10, 11]),
        (BUSY[:6] + tuple(4 * seconds for seconds in BUSY[6:]), [1, 2, 7, 8, 9, 10, 11]),
        ((*QUIET[:5], 0.9, *QUIET[5:]), []),
    ],
)
def test_steps_that_differ_from_each_other_are_no_reason_to_plan(
    times: Sequence[float], doubted: Sequence[int]
) -> None:
    """A real change is, although it makes them differ for a while."""
    assert doubts_about(times) == list(doubted)


def moment_of(task: Task, plan: Plan, pace: Pace, **seen: Any) -> Moment:
    usual = {"step": 9, "bandwidth": HALF, "room": None, "peak": 0, "skips": False}
    return Moment(
        **{"task": task, "plan": plan, **usual, **seen},
        size=StepSize(),
        needs=Needs(task),
        pace=pace,
    )


@pytest.mark.parametrize(
    ("rates", "is_doubted"),
    [
        ((1.0, 1.0, 1.0, 0.5), False),  # one odd step
        ((1.0, 1.0, 1.0, 0.5, 0.5), True),
        ((1.0, 1.4, 0.7, 1.3, 0.6, 1.5, 0.7), False),
        ((1.0, 1.4, 0.7, 1.3, 0.6, 0.1, 0.1), True),
    ],
)
def test_a_drive_is_another_one_if_it_is_so_for_longer_than_a_step(
    rates: Sequence[float], *, is_doubted: bool
) -> None:
    task = task_of(1, budget=None)
    plan, found = Plan((OFFLOAD,), prediction=Prediction(1.0, 0.0, MIB, 0)), Rates(task)
    for rate in rates:
        load = Load(MIB, MIB / (1e9 * rate))
        found.note([DriveLoad(load, load)], fell_back=False)
    bandwidth = found.bandwidth()
    assert bandwidth is not None
    seen = {"bandwidth": bandwidth, "usual": found.usual(), "deviation": found.deviation()}
    doubt = Settled(plan, "", planned_for=Bandwidth(1e9, 1e9)).doubt(
        moment_of(task, plan, Pace(task.tuning), **seen)
    )
    assert (doubt is not None) is is_doubted


@pytest.mark.parametrize("budget", [400, 900], ids=["less", "more"])
def test_another_budget_is_a_reason_to_plan_at_once(budget: int) -> None:
    """And the plan that is made for it is taken, whatever it gains."""
    profile, drive = profile_by_hand(*(OFFLOAD,) * 4), Bandwidth(100, 100)
    before = task_of(4, budget=700)
    plan = best_plan(case_of(before, profile, drive))
    settled = Settled(plan, "", planned_for=drive, is_measured=True, is_refined=True)
    steady = moment_of(before, plan, Pace(before.tuning), bandwidth=drive)
    assert (settled.doubt(steady), settled.is_pressing(steady)) == (None, False)
    task = task_of(4, budget=budget)
    moment = moment_of(task, plan, Pace(task.tuning), bandwidth=drive)
    limited = settled.limited(task)
    assert isinstance(limited, Settled)
    assert limited.is_pressing(moment)
    assert limited.is_turn(moment)
    assert limited.doubt(moment) == f"{budget} B are left for activations now"
    case = case_of(task, profile, drive)
    decided, new = limited.decide(moment, case)
    assert decided.settled is not None
    assert not decided.settled.is_overdue
    assert bare(new) == bare(best_plan(case))
    assert bare(new) != bare(plan)
    assert isinstance(Excursion(settled).limited(task), Settled)


def test_a_policy_that_leaves_nothing_to_decide_gets_the_window_of_another_budget() -> None:
    task = dataclasses.replace(task_of(2, budget=None), policy=(OFFLOAD, OFFLOAD))
    settled = Settled(Plan(task.policy, window=MIB), "", planned_for=HALF)
    limited = settled.limited(dataclasses.replace(task, limits=Limits(KIB, KIB)))
    assert limited.settled is not None
    assert (limited.settled.plan.window, limited.settled.is_overdue) == (KIB, False)


def test_without_a_budget_a_slow_drive_gets_what_it_can_take() -> None:
    drive, model = Drive(), make_model(layers=LAYERS)
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = SLOW
    with auto_session(model, drive) as session:
        train(model, session, steps=6)
        report = session.report()
    assert session.plan.placements.count(KEEP) >= 2
    assert report[-1].recomputed_scopes == 0
    assert waiting_share(report[-2:]) < 0.5


def waiting_share(report: Sequence[StepRecord]) -> float:
    """Of the step that waited least: a plan is made for steps like those before, and some are quicker."""
    return min((record.stall_seconds or 0.0) / record.seconds for record in report)


@pytest.mark.parametrize("share", of_which([0.6, 0.8], 0.6))
def test_a_budget_and_a_slow_drive_mean_recomputation(share: float) -> None:
    """And the training is the same to the last bit, through all the changes of plan."""
    expected = train(make_model(layers=LAYERS, dropout=0.1), steps=8)
    probe = make_model(layers=LAYERS, dropout=0.1)
    with auto_session(probe, Drive()) as session:
        train(probe, session, steps=4)
        whole = LAYERS * profile_in(session).kinds[0].nbytes
    drive, model = Drive(), make_model(layers=LAYERS, dropout=0.1)
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = SLOW
    plans: list[Plan] = []
    with auto_session(model, drive, activation=int(share * whole)) as session:
        found = train(model, session, steps=8, before_step=lambda _: plans.append(session.plan))
        report = session.report()
        assert_all_given_back(session)
    assert_same_history(found, expected)
    # Of nothing else is predicted what it brings: neither of probes nor of a step that tries something else.
    step, plan = [(step, plan) for step, plan in enumerate(plans) if plan.prediction is not None][-1]
    recomputed = sum(placement.recomputes for placement in plan.placements)
    assert recomputed > 0
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= share * whole
    assert report[step].recomputed_scopes == recomputed
    assert max(record.own_peak_bytes or 0 for record in report) <= share * whole


def test_a_drive_that_gets_slower_gets_less_within_three_steps() -> None:
    drive, model, measured, now = Drive(), make_model(layers=LAYERS), Rates.bandwidth, [0]

    def before(step: int) -> None:
        now.append(step)
        if step == 6:
            # Slow is what needs longer than the steps do, which take long themselves on a busy machine.
            last = session.report()[-3:]
            rate = max(record.offloaded_bytes for record in last) / max(record.seconds for record in last)
            drive.writes.bytes_per_second = drive.reads.bytes_per_second = min(SLOW, rate / 3)

    with (
        with_drive(lambda rates: FAST if now[-1] < 6 else measured(rates)),
        with_free_hooks(),
        auto_session(model, drive) as session,
    ):
        train(model, session, steps=11, before_step=before)
        report = session.report()
    moved = [record.offloaded_bytes for record in report]
    assert max(moved[9:]) < 0.9 * min(moved[3:6])
    assert waiting_share(report[-2:]) < 0.5


def test_plans_are_made_again_when_a_step_under_one_was_measured_and_leave_more_of_the_budget_free() -> None:
    """Before that no step was measured in which layers had several placements."""
    model, budgets = make_model(layers=LAYERS), []

    def noted(profile: StepProfile, bandwidth: Bandwidth, limits: Limits, **options: Any) -> Plan:
        budgets.append(limits.budget)
        return make_plan(profile, bandwidth, limits, **options)

    with (
        mock.patch("tba_offload.adapt.proposals.make_plan", noted),
        auto_session(model, Drive(), activation=16 * MIB) as session,
    ):
        start_anew(session, tuning=CALM)  # there is no other reason to plan
        train(model, session, steps=5)
        is_measured = [record.activation_peak_bytes is not None for record in session.report()]
    # After the first step it is looked up only whether there is a plan that fits.
    assert budgets == [int((1 - TUNING.unmeasured) * 16 * MIB)] * 3
    assert is_measured == [True] * 4 + [False]


def test_a_plan_takes_the_whole_budget_where_nothing_smaller_fits() -> None:
    profile, bandwidth = profile_by_hand(*(OFFLOAD,) * 8), Bandwidth(100, 100)
    lowest = make_plan(profile, bandwidth, Limits(1, 1), policy=(AUTO,) * 8).prediction
    assert lowest is not None
    task = task_of(8, budget=int(lowest.peak_bytes / (1 - TUNING.margin)) + 1, window=1)
    plan = best_plan(case_of(task, profile, bandwidth))
    assert plan.prediction is not None
    planned = task.limits.planned
    assert (1 - TUNING.unmeasured) * planned < plan.prediction.peak_bytes <= planned


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_plans_leave_free_what_was_never_measured_with_a_full_window_too(share: float) -> None:
    """Where there is such a plan: the drive may become slower at any time."""
    profile = steady_profile()
    task = task_of(LAYERS, budget=int(share * peak_of_keep(profile, HALF)))
    case = case_of(task, profile, HALF)
    plan = best_plan(case)
    assert OFFLOAD in plan.placements or OFFLOAD_REMAT in plan.placements
    assert worst_peak(case, plan) <= (task.careful_limits.budget or 0)


def steady_profile(layers: int = LAYERS) -> StepProfile:
    """A step whose layers save five activations of 1 MiB each, of which one can be rebuilt."""
    saved = tuple(Saved(MIB, (n + 0.5) / 5, 1 - (n + 0.5) / 5, rebuilt=n == 2) for n in range(5))
    slots = [Slot(layer, 0, False, 0.0) for layer in range(layers)]
    slots += [Slot(layer, 0, True, 0.0) for layer in reversed(range(layers))]
    plain, again = Timing(0.03, 0.06), Timing(0.03, 0.09)
    timing = {KEEP: plain, OFFLOAD: plain, RECOMPUTE: again, OFFLOAD_REMAT: Timing(0.03, 0.066)}
    return StepProfile((LayerKind(saved, 0, MIB),), (0,) * layers, (timing,), tuple(slots), rest_bytes=MIB)


HALF = Bandwidth(LAYERS * 5 * MIB / 0.6, LAYERS * 5 * MIB / 0.6)
"""A drive that can take about half of what that step saves."""


def machine_of(bandwidth: Bandwidth = HALF, **options: Any) -> Machine:
    return Machine(Controller(task_of(LAYERS, **options)), steady_profile(), bandwidth)


def settled_in(machine: Machine) -> Settled:
    assert machine.controller.phase.settled is not None
    return machine.controller.phase.settled


@pytest.mark.parametrize("again", [False, True])
def test_what_broke_the_budget_in_early_steps_is_forgotten_when_many_went_well(*, again: bool) -> None:
    """Kernels for shapes that are new take memory once; what comes back is remembered for twice as long."""
    machine, long = machine_of(budget=60 * MIB), TUNING.turn * TUNING.remembered_rests
    usual = machine.profile

    def run_with(rest: int, steps: int) -> int:
        machine.profile = dataclasses.replace(usual, rest_bytes=rest)
        machine.run(steps)
        profile = machine.controller.knowledge.profile
        assert profile is not None
        return profile.rest_bytes

    with pytest.warns(RuntimeWarning, match="cannot be met"):
        assert run_with(100 * MIB, 5) == 100 * MIB
    poor = settled_in(machine).plan
    assert run_with(MIB, TUNING.remembered_rests - 2) == 100 * MIB
    assert run_with(MIB, long) == MIB
    assert settled_in(machine).plan.placements.count(OFFLOAD) < poor.placements.count(OFFLOAD)
    assert "beside the layers now" in settled_in(machine).why
    if again:
        assert run_with(100 * MIB, 1) == 100 * MIB
        assert run_with(MIB, long) == 100 * MIB
        assert run_with(MIB, 2 * long) == MIB


def beside_in(machine: Machine, way: Placement = OFFLOAD) -> Beside | None:
    """What is known to lie beside the layers of a machine, of which all that offload are alike."""
    profile = machine.controller.knowledge.profile
    assert profile is not None
    return profile.kinds[0].beside.get(way)


def seen(nbytes: int) -> SeenBeside:
    return SeenBeside(nbytes, [Beside(backward=nbytes)] * LAYERS)


def test_what_lies_beside_layers_is_what_the_last_step_showed_and_not_the_first() -> None:
    machine = machine_of(budget=60 * MIB)
    for known, shown in ((9 * MIB, 9), (2 * MIB, 2), (3 * MIB, 3)):
        machine.step(beside=seen(shown * MIB))
        assert beside_in(machine) == Beside(backward=known)
    profile = machine.controller.knowledge.profile
    assert profile is not None
    assert profile.loss_bytes == 3 * MIB


@pytest.mark.parametrize("options", [{"peak": 50.0}, {"retains": True}])
def test_a_step_that_breaks_the_budget_or_keeps_its_graph_does_not_show_what_lies_beside_layers(
    options: Any,
) -> None:
    machine = machine_of(budget=60 * MIB)
    machine.run(4, beside=seen(2 * MIB))
    before = beside_in(machine)
    machine.step(beside=seen(30 * MIB), **options)
    assert beside_in(machine) == before == Beside(backward=2 * MIB)


@pytest.mark.parametrize("is_seen", [False, True])
def test_what_lies_beside_layers_grows_with_them_unless_it_is_seen(*, is_seen: bool) -> None:
    machine = machine_of(budget=200 * MIB)
    machine.run(4, beside=seen(2 * MIB))
    (kind,) = machine.profile.kinds
    grown = tuple(saved._replace(nbytes=3 * saved.nbytes) for saved in kind.activations)
    kind = dataclasses.replace(kind, activations=grown, input_bytes=3 * kind.input_bytes)
    machine.profile = dataclasses.replace(machine.profile, kinds=(kind,))
    machine.step(beside=seen(7 * MIB) if is_seen else None)
    assert beside_in(machine) == Beside(backward=(7 if is_seen else 6) * MIB)


def test_a_plan_that_was_retreated_from_comes_back_when_what_broke_it_is_gone() -> None:
    """Without an excursion, which might find it too."""
    machine = machine_of(budget=60 * MIB, tuning=dataclasses.replace(TUNING, excursions=(10**6,)))
    machine.run(20)
    usual, good = machine.profile, bare(settled_in(machine).plan)
    machine.profile = dataclasses.replace(usual, rest_bytes=40 * MIB)
    machine.step()
    machine.profile = usual
    assert bare(machine.plan) != good
    machine.run(2 * TUNING.turn * TUNING.remembered_rests)
    assert bare(machine.plan) == good


def test_a_plan_that_breaks_the_budget_again_stays_out() -> None:
    """What it needs is its own, and was not allocated once: it is forgiven a single time."""
    machine = machine_of(budget=60 * MIB, tuning=dataclasses.replace(TUNING, excursions=(10**6,)))
    machine.run(20)
    usual, bold, broken = machine.profile, machine.plan.placements, 0
    for _ in range(600):
        is_bold = machine.plan.placements == bold
        machine.profile = dataclasses.replace(usual, rest_bytes=40 * MIB) if is_bold else usual
        machine.step()
        broken += is_bold
    assert broken == 2


def test_a_session_that_waits_where_nothing_should_wait_plans_for_a_slower_drive() -> None:
    """The simulator may say that a plan waits for nothing, while compute or the drive have their moods."""
    machine = machine_of(budget=None, window=8 * MIB, tuning=CALM)
    shares: list[float] = []

    def noted(profile: StepProfile, bandwidth: Bandwidth, *arguments: Any, **options: Any) -> Plan:
        shares.append(round(bandwidth.write / HALF.write, 9))
        return make_plan(profile, bandwidth, *arguments, **options)

    with mock.patch("tba_offload.adapt.proposals.make_plan", noted):
        machine.run(20, waits=0.1)
    steps = list(dict.fromkeys(shares))  # one that tries something else makes a plan after it anyway
    expected = [max(TUNING.caution**count, TUNING.most_caution) for count in range(len(steps))]
    assert steps == pytest.approx(expected)
    assert steps[-1] == TUNING.most_caution


def test_caution_is_given_up_little_by_little_and_told() -> None:
    calm = dataclasses.replace(CALM, excursions=(99, 8))
    machine = machine_of(budget=None, window=8 * MIB, tuning=calm)
    told: list[Any] = []

    def run(steps: int, waits: float = 0.0) -> float:
        for _ in range(steps):
            machine.step(waits=waits)
            news = machine.controller.news()
            told.extend([] if news is None else [news["caution"]])
        return settled_in(machine).caution

    assert run(3) == 1.0
    while settled_in(machine).caution > TUNING.caution**2:
        run(1, waits=0.1)
    at = -(-machine.steps // 8) * 8
    assert run(at - 1 - machine.steps) == pytest.approx(TUNING.caution**2)
    assert [run(1), run(7), run(1), run(8)] == pytest.approx([TUNING.caution, TUNING.caution, 1.0, 1.0])
    assert set(told) <= {1.0, TUNING.caution, TUNING.caution**2}
    assert len(told) > 1


def test_plans_do_not_alternate() -> None:
    """Where a drive does a little more or less, one plan is as good as the other, and the first stays."""
    doubting = Tuning(drift=0.01, big_drift=0.01, odd=0.0)
    machine = machine_of(budget=None, window=8 * MIB, tuning=doubting)
    drives = cycle((0.97, 1.03))
    plans: list[Plan] = []
    with mock.patch("tba_offload.adapt.proposals.make_plan", side_effect=make_plan) as planned:
        machine.run(3)
        for _ in range(60):
            plans.append(settled_in(machine).plan)
            machine.step(bandwidth=HALF.scaled(next(drives)))
    changes = sum(old.placements != new.placements for old, new in pairwise(plans))
    assert 0 < plans[0].placements.count(OFFLOAD) < LAYERS
    assert changes <= 2 < planned.call_count


# What is predicted


def test_the_simulator_says_how_long_a_step_waits_for_a_slow_drive() -> None:
    """A drive is never faster than it is told to be, however noisy the machine; so both must have waited."""
    drive, model = Drive(), make_model(layers=LAYERS)
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = SLOW
    with session_for(model, drive=drive, default=OFFLOAD, in_flight=256 * KIB) as session:
        observed = watching(session)
        train(model, session, steps=4)
        report = session.report()
    profile, found = observed.knowledge.profile, observed.knowledge.rates.bandwidth()
    assert profile is not None
    assert found is not None
    assert max(found.write, found.read) < 1.05 * SLOW
    predicted = simulate(profile, session.plan, found)
    computing = predicted.seconds - predicted.stall_seconds
    for record in report[1:]:
        moving = max(record.offloaded_bytes, record.read_bytes) / SLOW
        # How close it is to what was measured is for the benchmark to say.
        assert record.seconds > 0.9 * moving
        assert predicted.stall_seconds > 0.9 * moving - computing


# Host memory beside the drive


def test_bytes_in_host_memory_are_not_counted_as_the_drives() -> None:
    rates = Rates(task_of(1, host_capacity=MIB))
    nothing = Load(0, 0.0)
    drive = DriveLoad(Load(2_000_000, 0.001), Load(1_000_000, 0.001))
    busy = DriveLoad(Load(9_000_000, 0.001), Load(7_000_000, 0.001), "host")
    rates.note([drive, drive, DriveLoad(nothing, nothing, "host")], fell_back=False)
    assert rates.bandwidth() == Bandwidth(4e9, 2e9).with_host(MIB)
    rates.note([drive, drive, busy], fell_back=False)
    assert rates.bandwidth() == Bandwidth(4e9, 2e9).with_host(MIB, write=9e9, read=7e9)
    alone = Rates(task_of(1))
    alone.note([drive], fell_back=False)
    assert alone.bandwidth() == Bandwidth(2e9, 1e9)


def test_host_memory_that_is_not_as_assumed_is_noticed() -> None:
    then = Bandwidth(1e9, 1e9).with_host(MIB)

    def is_another(now: Bandwidth) -> bool:
        return drifted(now, then, TUNING.drift, TUNING)

    assert not is_another(then)
    assert is_another(then.scaled(0.8))
    assert not is_another(then.with_host(MIB, write=3.2e9))
    assert is_another(then.with_host(MIB, write=1e9))
    assert is_another(then.with_host(MIB, read=1e9))
    assert not is_another(then.with_host(None))


@pytest.fixture(scope="module")
def host_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("host")
    model = make_model(layers=LAYERS)
    config = config_for(in_flight=MIB, default=OFFLOAD, directory=directory, host_capacity=2 * MIB)
    with (
        mock.patch.multiple("tba_offload.plan.window", SPILL_SHARE=-1.0),  # host memory first
        tba.attach(model, config, run_log=directory / "run.jsonl", measure_memory=False) as session,
    ):
        train(model, session, steps=4)
    return directory / "run.jsonl"


def test_the_run_log_tells_of_host_memory(host_log: Path) -> None:
    bandwidth = Situation.of(host_log).bandwidth
    assert bandwidth.host is not None
    assert bandwidth.host.capacity == 2 * MIB
    assert bandwidth.host.write != TUNING.host_speed * bandwidth.write  # it was measured
    steps = read_run_log(host_log).steps
    assert all(0 < step.host_offloaded_bytes <= step.offloaded_bytes for step in steps)
    assert all(0 < step.host_read_bytes <= step.read_bytes for step in steps)
    output = run_plan(host_log).output
    assert "2.00 MiB of host memory, written at" in output
    assert "to host memory, which holds" in output


@full
def test_what_if_there_were_host_memory(run_log: Path, host_log: Path, tmp_path: Path) -> None:
    slow = ("--write", "20MB", "--read", "20MB", "--budget", "3MiB", "--json")
    found = [
        json.loads(run_plan(log, *slow, *options).output)
        for log, options in ((run_log, ()), (run_log, ("--host", "1GiB")), (host_log, ("--host", "0")))
    ]
    without, with_host, none = found
    assert without["written_bytes"]["host"] == none["written_bytes"]["host"] == 0
    slow_with_host = Situation.of(run_log).changed(write=1e6, read=1e6, host=MIB)
    moved = slow_with_host.outcome(Plan((OFFLOAD,) * LAYERS, window=MIB))
    assert 0 < moved.host_peak_bytes <= MIB
    assert moved.host_written_bytes > 0 < moved.written_bytes
    seconds = [each["plan"]["prediction"]["seconds"] for each in (with_host, without)]
    assert seconds == sorted(seconds)
    assert "of host memory" not in run_plan(host_log, "--host", "0").output
    situation = Situation.of(host_log)
    assert situation.changed(host=MIB, drives=3).bandwidth.host == dataclasses.replace(
        situation.bandwidth.host, capacity=MIB
    )


def test_the_policy_file_asks_for_the_host_memory(run_log: Path, host_log: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    for options, expected in (((), 2 * MIB), (("--host", "5MiB"), 5 * MIB), (("--host", "0"), None)):
        run_plan(host_log, *options, "-o", policy)
        assert load_config(policy).store.host_capacity == expected
    result = invoke_plan(run_log, "--host", "1GiB", "-o", policy)
    assert result.exit_code == 1
    assert "host_capacity: this is memory beside drives" in result.output


def test_a_policy_that_was_not_planned_is_not_replaced(run_log: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("default: keep  # by hand\n")
    result = invoke_plan(run_log, "-o", policy)
    assert result.exit_code == 1
    assert "policy.yaml: was not written by this command" in result.output
    assert policy.read_text() == "default: keep  # by hand\n"
    run_plan(run_log, "-o", policy, "--force")
    planned = policy.read_text()
    assert planned.startswith("# Written by tba-offload plan")
    run_plan(run_log, "-o", policy)  # its own
    assert policy.read_text() == planned
    before = run_log.read_bytes()
    result = invoke_plan(run_log, "-o", run_log, "--force")
    assert result.exit_code == 1
    assert "is a run log, and stays as it is" in result.output
    assert run_log.read_bytes() == before


# What a run log tells


@pytest.fixture(scope="module")
def run_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "run.jsonl"
    model = make_model(layers=LAYERS)
    config = config_for(in_flight=MIB, default=OFFLOAD)
    with tba.attach(model, config, run_log=path, measure_memory=False) as session:
        train(model, session, steps=4, micro_batches=2)
    return path


def invoke_plan(*arguments: object, whole_sweep: bool = False) -> Any:
    """What the command prints; of the budgets of its sweep two, unless the test is about the sweep."""
    with mock.patch("tba_offload.what_if.FRONTIER", FRONTIER if whole_sweep else (0.25, 1.05)):
        return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def run_plan(*arguments: object, whole_sweep: bool = False) -> Any:
    result = invoke_plan(*arguments, whole_sweep=whole_sweep)
    assert result.exit_code == 0, result.output
    return result


def test_a_run_that_was_not_auto_can_be_planned_from(run_log: Path) -> None:
    found = json.loads(run_plan(run_log, "--json", whole_sweep=True).output)
    assert len(found["frontier"]) >= 8
    assert found["names"] == [f"layers.{layer}" for layer in range(LAYERS)]
    fitting = [row for row in found["frontier"] if row["fits"]]
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in fitting)
    seconds = [round(row["seconds"], 9) for row in fitting]
    assert seconds == sorted(seconds, reverse=True)


def test_the_policy_file_reproduces_the_plan(run_log: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    options = ("--budget", "3MiB", "--write", "100KB", "--read", "100KB", "-o", policy, "--json")
    found = json.loads(run_plan(run_log, *options).output)
    assert set(found["plan"]["placements"]) != {"offload"}
    model = make_model(layers=LAYERS)
    config = load_config(policy)
    with tba.attach(model, config, measure_memory=False) as session:
        assert [placement.value for placement in session.plan.placements] == found["plan"]["placements"]
        assert session.plan.window == found["plan"]["window"]


def test_a_plan_for_a_device_has_what_the_run_left_on_it(tmp_path: Path, run_log: Path) -> None:
    path, policy = tmp_path / "run.jsonl", tmp_path / "policy.yaml"
    model = make_model(layers=LAYERS)
    with tba.attach(model, config_for(in_flight=MIB, default=OFFLOAD), run_log=path) as session:
        train(model, session, steps=4, micro_batches=2)
        records = session.report()
    beside = max(record.base_bytes or 0 for record in records)
    gradients = max(record.gradient_peak_bytes or 0 for record in records)
    device_bytes = beside + gradients + 4 * MIB
    options = ("--device-bytes", f"{device_bytes}B")
    said = run_plan(path, *options, "-o", policy).output
    assert re.search(
        r"^3\.9\d MiB are left for activations of .*, less .* live before a step and", said, re.MULTILINE
    )
    assert load_config(policy).budget.device_bytes is None  # each layer is placed, and waits for its drive
    for arguments, what in (
        ((path, "--device-bytes", "1MiB"), "nothing is left for activations of 1.00 MiB, less"),
        ((path, *options, "--layers", "9"), "what lies on the device beside activations is not known"),
        ((run_log, *options), "what lies on the device beside activations is not known"),
        ((path, *options, "--budget", "3MiB"), "--budget and --device-bytes both say"),
    ):
        failed = invoke_plan(*arguments)
        assert failed.exit_code != 0
        assert what in failed.output


def test_the_policy_of_one_stage_leaves_the_others_as_they_were(run_log: Path, tmp_path: Path) -> None:
    """Those that are not in the log of this rank: the header of each names all."""
    header, *lines = run_log.read_text().splitlines()
    document = json.loads(header)
    for layer in range(LAYERS, 3 * LAYERS):
        document["plan"][f"layers.{layer}"] = {"layer": layer, "placement": "auto", "why": "default"}
    stage, policy = tmp_path / "run.rank0.jsonl", tmp_path / "policy.yaml"
    stage.write_text("\n".join([json.dumps(document), *lines]) + "\n")
    found = json.loads(run_plan(stage, "--budget", "3MiB", "-o", policy, "--json").output)
    placed = load_config(policy).policy
    layers = [LayerId(layer, f"layers.{layer}") for layer in range(3 * LAYERS)]
    own, others = layers[:LAYERS], layers[LAYERS:]
    assert [placed.explain(layer)[0].value for layer in own] == found["plan"]["placements"]
    assert {placed.explain(layer)[0] for layer in others} == {AUTO}
    assert placed.resolve(layers)
    assert Situation.of(stage).changed(layers=LAYERS + 1).elsewhere == ()


def test_of_several_ranks_one_has_to_be_named(run_log: Path, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"run.rank{rank}.jsonl").write_text(run_log.read_text())
    result = invoke_plan(tmp_path / "run.jsonl")
    assert result.exit_code == 1
    assert "each of the 2 ranks has a log of its own" in " ".join(result.output.split())
    assert "run.rank0.jsonl" in result.output


def test_the_table_says_why(run_log: Path, tmp_path: Path) -> None:
    picture = tmp_path / "frontier.svg"
    output = run_plan(run_log, "--budget", "3MiB", "--picture", picture).output
    assert "8 layers; the drives write" in output
    assert re.search(r"measured: the store wrote [\d.]+ [MG]B/s \(± \d+%\) and read \d", output)
    place = r"(back|for)ward of layer \d \(layers\.\d\), micro-batch \d"
    assert re.search(rf"predicted: peak [\d.]+ [KM]iB in {place}, step", output)
    assert "The best plan for each budget" in output
    assert re.search(r"[KM]iB have room|of the drive, and recomputing", output)
    assert picture.read_bytes().startswith(b"<?xml")


def test_equal_layers_are_told_together_and_the_last_line_says_what_to_do(
    run_log: Path, tmp_path: Path
) -> None:
    fast = ("--write", "100GB", "--read", "100GB", "--budget", "3MiB")
    output = run_plan(run_log, *fast).output
    # Which layers are equal is a matter of the times that were measured: one that took longer may be kept.
    assert re.search(r"^\| (\d)-(\d) +\| layers\.\1-\2 +\|", output, re.MULTILINE)
    last = output.splitlines()[-1]
    assert re.match(
        r"Use -o policy\.yaml: .*layers.*; peak \d\S* [KM]iB of keep's 4\.\d+ MiB in a step of", last
    )
    assert "keep's step time is not known from this log, because no layer was kept in the run" in last
    policy = tmp_path / "mine.yaml"
    assert run_plan(run_log, *fast, "-o", policy).output.splitlines()[-1].startswith(f"Use {policy}: ")


def test_what_failed_a_second_run_is_not_recomputed_in_what_ifs(run_log: Path, tmp_path: Path) -> None:
    """Nor those of their kind that were placed otherwise, which says nothing of them."""
    changed = tmp_path / "run.jsonl"
    lines = []
    for line in run_log.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event.get("event") == "plan":
            event["not_recomputed"] = [2]
            tried = ["auto", "recompute", "auto", "recompute-except-attention", "auto", "recompute-offload"]
            event["policy"] = [*tried, "offload", "a-word-of-its-own"]
        lines.append(json.dumps(event))
    changed.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert Situation.of(changed).not_recomputed == {2, 6, 7}


def test_layers_keep_their_names_in_what_ifs(run_log: Path) -> None:
    found = json.loads(run_plan(run_log, "--layers", "12", "--json").output)
    assert found["names"] == [f"layers.{layer}" for layer in range(12)]
    assert "| layers.0-11 |" in run_plan(run_log, "--layers", "12", "--write", "1TB", "--read", "1TB").output


def test_where_a_layer_was_kept_keeps_time_is_known(tmp_path: Path) -> None:
    path, model = tmp_path / "run.jsonl", make_model(layers=LAYERS)
    config = config_for(in_flight=MIB, default=OFFLOAD, rules=(tba.Rule("6-7", KEEP),))
    with tba.attach(model, config, run_log=path, measure_memory=False) as session:
        train(model, session, steps=4)
    keep = json.loads(run_plan(path, "--json").output)["keep"]
    kept = Plan((KEEP,) * LAYERS)
    assert keep["seconds"] == simulate(Situation.of(path).profile, kept, FAST).seconds
    assert keep["peak_bytes"] == Situation.of(path).peak_of_keep
    slow = run_plan(path, "--write", "1KB", "--read", "1KB").output  # there is only one thing to do
    assert "keeping everything peaks at" in slow
    assert re.search(r" x keep \|", slow)
    assert slow.splitlines()[-1].startswith("Keep all 8 layers (peak ")


def test_the_picture_has_the_point_of_the_run_unless_it_is_about_another(tmp_path: Path) -> None:
    path, model = tmp_path / "run.jsonl", make_model(layers=LAYERS)
    config = config_for(in_flight=MIB, default=OFFLOAD)
    with tba.attach(model, config, run_log=path, model_info={"name": "tiny"}) as session:
        train(model, session, steps=4)
    situation = Situation.of(path)
    assert situation.run is not None
    steps = read_run_log(path).steps
    assert situation.run[0] == max(step.activation_peak_bytes or 0 for step in steps[1:])
    assert situation.title.startswith("tiny, 8 layers; ")
    assert situation.changed(drives=1).run == situation.run
    more = situation.changed(layers=16)
    assert more.run is None
    assert more.title == f"{situation.title}; what if it had 16 layers"
    assert situation.changed(write=1e6).run is None


def test_an_older_log_can_be_planned_from(run_log: Path, tmp_path: Path) -> None:
    """Rates were not told once, and later plans could keep a part of an activation."""
    older = tmp_path / "older.jsonl"
    with older.open("w") as file:
        for line in run_log.read_text().splitlines():
            event = json.loads(line)
            event.pop("rates", None)
            if event["event"] == "plan":
                event["plan"]["part"] = {"layer": 0, "number": 1, "nbytes": 4096}
            file.write(json.dumps(event) + "\n")
    assert "measured:" not in run_plan(older).output


@pytest.mark.parametrize(
    ("options", "layers", "runs"),
    [
        ((), 8, 32),
        pytest.param(("--layers", "16"), 16, 64, marks=full),
        (("--micro-batches", "5", "--layers", "3"), 3, 30),
    ],
)
def test_what_if_there_were_more(run_log: Path, options: tuple[str, ...], layers: int, runs: int) -> None:
    found = json.loads(run_plan(run_log, "--json", *options).output)
    assert len(found["plan"]["placements"]) == layers
    situation = Situation.of(run_log)
    changes = dict(zip(("micro_batches", "layers"), (5, 3), strict=True)) if len(options) == 4 else {}
    changes = changes or ({"layers": 16} if options else {})
    assert len(situation.changed(**changes).profile.slots) == runs


def test_what_if_the_drives_were_faster(run_log: Path) -> None:
    slow = Situation.of(run_log).changed(write=1e5, read=1e5)
    times = [slow.changed(drives=drives).plan(3 * MIB).prediction.seconds for drives in (1, 100, 1e6)]  # type: ignore[union-attr]
    assert times[0] > times[2]
    assert all(slow >= (1 - 1e-9) * fast for slow, fast in pairwise(times))


@pytest.mark.parametrize(
    "config",
    [config_for(default=KEEP), config_for(default=OFFLOAD, in_flight=256 * MIB)],
    ids=["nothing is offloaded", "all stays in the window"],
)
def test_a_log_that_captured_nothing_is_told(tmp_path: Path, config: tba.OffloadConfig) -> None:
    path = tmp_path / "run.jsonl"
    model = make_model(layers=2)
    with tba.attach(model, config, run_log=path, measure_memory=False) as session:
        train(model, session, steps=4)
    with pytest.raises(RunLogError, match=r"log at least three steps .* save more than budget.in_flight"):
        Situation.of(path)


def test_composition_counts() -> None:
    assert composition((KEEP, OFFLOAD, OFFLOAD)) == "1 keep, 2 offload"


# Schedules


def test_one_forward_one_backward() -> None:
    def word(blocks: list[Block]) -> str:
        return " ".join(f"{'B' if block.backward else 'F'}{block.micro_batch}" for block in blocks)

    assert word(one_f_one_b(3, 1)) == "F0 B0 F1 B1 F2 B2"
    assert word(one_f_one_b(4, 2)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert word(one_f_one_b(2, 4)) == "F0 F1 B0 B1"


def test_a_profile_stretched_to_what_it_was_is_what_it_was(run_log: Path) -> None:
    profile = Situation.of(run_log).profile
    same = stretched(profile, layers=LAYERS, micro_batches=2)
    assert [slot[:3] for slot in same.slots] == [slot[:3] for slot in profile.slots]
    whole = sum(slot.gap for slot in profile.slots)
    assert sum(slot.gap for slot in same.slots) == pytest.approx(whole)
    with pytest.raises(ValueError, match="no step of 0 layers"):
        stretched(profile, layers=0)


# What is unusual


class Counting(nn.Module):
    """A layer that is not the same if its forward runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.runs = torch.zeros(256, 256)  # so large that no copy of it is kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + torch.tanh(self.linear(x) / self.runs[0])


def train_layers(model: nn.Module, session: Session, steps: int, *, rows: int = 64) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        with session.step():
            model(torch.randn(rows, 256)).pow(2).mean().backward()
        model.zero_grad()


def test_layers_that_change_their_tensors_are_not_recomputed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Counting() for _ in range(6)))
    drive = Drive()
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = SLOW
    observe, observed = Controller.observe, []

    def noted(controller: Controller, observation: StepObservation) -> Plan:
        observed.append(observation)
        return observe(controller, observation)

    with (
        mock.patch.object(Controller, "observe", noted),
        auto_session(model, drive, activation=900 * KIB, layers=list(model)) as session,
    ):
        train_layers(model, session, 6)
        assert observed[-1].not_recomputed == set(range(6))
        assert {record.recomputed_scopes for record in session.report()} == {0}
    assert [int(layer.runs[0, 0]) for layer in model] == [6] * 6


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_layers_may_save_less_than_when_they_were_planned() -> None:
    """As the last batch of an epoch does."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(6))
    )
    with auto_session(model, Drive(), activation=800 * KIB, layers=list(model)) as session:
        train_layers(model, session, 5)
        session.planning.plan = dataclasses.replace(session.plan, placements=(Placement("offload-50%"),) * 6)
        train_layers(model, session, 4, rows=2)
        train_layers(model, session, 2)
        assert_all_given_back(session)


def test_a_planner_that_fails_leaves_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ZeroDivisionError("what no test has thought of")

    expected = train(make_model(layers=4), steps=4)
    model = make_model(layers=4)
    with auto_session(model, Drive()) as session:
        monkeypatch.setattr("tba_offload.adapt.proposals.make_plan", failing)
        with pytest.warns(RuntimeWarning, match="no plan could be made after step 3.*no test has thought of"):
            found = train(model, session, steps=4)
    assert_same_history(found, expected)


def test_inputs_without_memory_of_their_own_do_not_disturb_a_logged_run(tmp_path: Path) -> None:
    model = make_model(layers=2)
    config = config_for(default=OFFLOAD)
    with tba.attach(model, config, run_log=tmp_path / "run.jsonl", measure_memory=False) as session:
        parameters = dict(model.named_parameters())

        def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, given, (make_tokens(0)[:, :-1],)).sum()

        with session.step(), pytest.warns(UserWarning, match="neither offloaded nor recomputed"):
            gradients = torch.func.grad(loss)(parameters)
    assert set(gradients) == set(parameters)


def test_a_layer_without_backward_does_not_keep_the_others_from_being_planned() -> None:
    model = make_model(layers=LAYERS)
    for parameter in [*model.embedding.parameters(), *model.layers[0].parameters()]:
        parameter.requires_grad_(requires_grad=False)
    with with_drive(lambda _: FAST), with_free_hooks(), auto_session(model, Drive()) as session:
        for number in range(5):
            with session.step():
                loss_of(model, make_tokens(number)).backward()
        assert session.plan.prediction is not None
        assert session.plan.placements.count(KEEP) < LAYERS - 1


def test_chunks_with_equal_names_are_told_apart() -> None:
    torch.manual_seed(0)
    chunks = [make_model(layers=3, seed=seed) for seed in (1, 2)]
    with session_for(chunks, drive=Drive(), default=AUTO, in_flight=MIB) as session:
        for number in range(5):
            with session.step():
                for chunk in chunks:
                    loss_of(chunk, make_tokens(number)).backward()
        assert session.plan.prediction is not None
        assert len(session.plan.placements) == 6


def test_a_budget_that_cannot_be_met_is_told_once_and_planned_for_now_and_then() -> None:
    model = make_model(layers=4)
    with (
        auto_session(model, Drive(), activation=100 * KIB) as session,
        mock.patch("tba_offload.adapt.proposals.make_plan", side_effect=make_plan) as planned,
    ):
        start_anew(session, tuning=CALM)  # nor is there another reason to plan
        with pytest.warns(RuntimeWarning, match="the budget of 100 KiB cannot be met") as told:
            train(model, session, steps=24)
    assert 2 <= planned.call_count <= 6
    assert len([each for each in told if "cannot be met" in str(each.message)]) == 1
    assert not Path(told[0].filename).is_relative_to(Path(tba.__file__).parent)  # but the user's own program


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--write", "0"), "must be more than 0"),
        (("--budget", "12"), "has no unit"),
        (("--drives", "nan"), "no number of drives"),
    ],
)
def test_a_wrong_option_is_told(options: tuple[str, ...], problem: str, run_log: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(run_log), *options])
    assert result.exit_code == 2
    assert problem in result.output


# Several ranks


class Others:
    """Stands for the ranks that share layers with a session: what they want is told in advance.

    Args:
        session: Its controller is going to ask.
        recomputed: Numbers of the layers that the others want recomputed.
        tuning: The numbers that it plans with.
    """

    def __init__(self, session: Session, recomputed: set[int], tuning: Tuning = TUNING) -> None:
        self.recomputed = recomputed
        self.calls: list[tuple[dict[str, Placement], tuple[float, float]]] = []
        task = dataclasses.replace(controller_of(session).task, is_shared=True, tuning=tuning)
        session.planning.start(session.plan, Controller(task), self.agree)

    def agree(self, proposed: dict[str, Placement], need: tuple[float, float]) -> dict[str, Placement]:
        self.calls.append((proposed, need))
        wanted = {f"layers.{number}" for number in self.recomputed}
        return {name: RECOMPUTE if name in wanted else AUTO for name in proposed}


def recomputed_layers(session: Session) -> set[int]:
    return {layer for layer, placement in enumerate(session.plan.placements) if placement.recomputes}


def test_what_is_recomputed_is_agreed_and_all_else_is_each_ranks_own() -> None:
    """Each calls the others behind the same steps, and the rest of its plan follows."""
    seen = []
    model = make_model(layers=LAYERS)
    with with_drive(lambda _: FAST), with_free_hooks(), auto_session(model, Drive()) as session:
        others = Others(session, {1, 4})
        train(model, session, steps=9, before_step=lambda _: seen.append(recomputed_layers(session)))
        assert session.plan.prediction is not None
        assert session.plan.placements.count(KEEP) <= 2
        assert AUTO not in session.plan.placements
        report = session.report()
    assert seen == [set(), *[{1, 4}] * 8]
    assert [record.recomputed_scopes for record in report] == [0, *[2] * 8]
    # Behind the steps that learn, the first under a plan, before and behind one that may try something else,
    # and behind the eighth.
    assert [need > (0.0, 0.0) for _, need in others.calls] == [False] * 2 + [True] * 5


@full
def test_what_ranks_have_agreed_to_recompute_none_of_them_tries_otherwise() -> None:
    """Another one may have no memory for it."""
    model = make_model(layers=LAYERS)
    tried: list[bool] = []

    def planned(*arguments: Any, **options: Any) -> Plan:
        placements = (RECOMPUTE,) * LAYERS
        return dataclasses.replace(make_plan(*arguments, **options), placements=placements)

    def before(_: int) -> None:
        tried.append(isinstance(controller_of(session).phase, Excursion))

    with (
        mock.patch("tba_offload.adapt.proposals.make_plan", planned),
        auto_session(model, Drive(), activation=16 * MIB) as session,
    ):
        Others(session, set(range(LAYERS)), CALM)
        train(model, session, steps=9, before_step=before)
    assert not any(tried)


def test_one_of_several_ranks_tries_only_what_is_its_own_business() -> None:
    model = make_model(layers=LAYERS)
    tried: list[tuple[bool, int, int]] = []

    def planned(*arguments: Any, **options: Any) -> Plan:
        return dataclasses.replace(make_plan(*arguments, **options), placements=(OFFLOAD,) * LAYERS)

    def before(_: int) -> None:
        placements = session.plan.placements
        on_excursion = isinstance(controller_of(session).phase, Excursion)
        tried.append((on_excursion, placements.count(OFFLOAD_REMAT), placements.count(RECOMPUTE)))

    with (
        mock.patch("tba_offload.adapt.proposals.make_plan", planned),
        auto_session(model, Drive(), activation=16 * MIB) as session,
    ):
        Others(session, set(), CALM)
        train(model, session, steps=9, before_step=before)
    assert [on_excursion for on_excursion, _, _ in tried] == [False] * 6 + [True] + [False] * 2
    assert tried[6] == (True, 1, 0)
    assert tried[7] == (False, 0, 0)


def test_a_rank_that_is_over_its_budget_says_so() -> None:
    model = make_model(layers=LAYERS)
    with auto_session(model, Drive(), activation=100 * KIB) as session:
        others = Others(session, set())
        with pytest.warns(RuntimeWarning, match="cannot be met"):
            train(model, session, steps=3)
    excess, seconds = others.calls[-1][1]
    assert excess > 0
    assert seconds > 0


def test_no_rank_recomputes_alone_what_the_others_do_not() -> None:
    """Although it has to, under its budget."""
    drive, model = Drive(), make_model(layers=LAYERS)
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = SLOW
    with auto_session(model, drive, activation=4 * MIB) as session:
        others = Others(session, set())
        train(model, session, steps=9)
        report = session.report()
    assert any(placement.recomputes for proposed, _ in others.calls for placement in proposed.values())
    assert {record.recomputed_scopes for record in report} == {0}


def test_a_rank_that_cannot_plan_does_what_was_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal plans
        plans += 1
        if plans > 1:  # the first is what it proposes, the second what it makes of the agreement
            raise ZeroDivisionError("what no test has thought of")
        return make_plan(*arguments, **options)

    expected = train(make_model(layers=LAYERS), steps=5)
    model = make_model(layers=LAYERS)
    with auto_session(model, Drive()) as session:
        Others(session, {2})
        monkeypatch.setattr("tba_offload.adapt.proposals.make_plan", failing)
        with pytest.warns(RuntimeWarning, match="of what the ranks agreed on.*no test has thought of"):
            found = train(model, session, steps=5)
        assert recomputed_layers(session) == {2}
        assert session.report()[-1].recomputed_scopes == 1
    assert_same_history(found, expected)


def plans_in_log(path: Path, default: Placement, changing: Callable[[int, set[int]], None]) -> list[Any]:
    """The plan events of nine steps of a rank; behind each step the others may change their minds."""
    model = make_model(layers=4)
    config = config_for(in_flight=MIB, default=default)
    with tba.attach(model, config, run_log=path, measure_memory=False) as session:
        others = Others(session, set())
        train(model, session, steps=9, before_step=lambda step: changing(step, others.recomputed))
    return [event for event in read_run_log(path).others if event["event"] == "plan"]


def test_a_rank_whose_layers_are_all_placed_says_once_what_they_are(tmp_path: Path) -> None:
    """It takes part in the agreement, because others have layers that are the planner's."""
    (event,) = plans_in_log(tmp_path / "run.jsonl", OFFLOAD, lambda step, recomputed: None)
    assert event["step"] == 3
    assert event["plan"]["placements"] == ["offload"] * 4


def test_plans_that_others_have_brought_about_are_in_the_run_log(tmp_path: Path) -> None:
    def changing(step: int, recomputed: set[int]) -> None:
        if step == 5:
            recomputed.add(1)

    events = plans_in_log(tmp_path / "run.jsonl", AUTO, changing)
    first = next(event for event in events if event["step"] > 5)
    assert first["step"] == 6
    assert first["plan"]["placements"][1] == "recompute"


# Steps that are larger than planned


def growing_loss(model: nn.Module, number: int) -> torch.Tensor:
    """The tenth step has twice as many rows, and those after it as many as the first ones."""
    return loss_of(model, make_tokens(number, 8 if number // 100 == 9 else 4))


def test_no_bit_changes_where_a_step_leaves_its_plan() -> None:
    expected = train(make_model(layers=LAYERS, dropout=0.1), steps=11, loss=growing_loss, micro_batches=2)
    model, plans = make_model(layers=LAYERS, dropout=0.1), []
    with auto_session(model, Drive(), activation=8 * MIB) as session:
        found = train(
            model,
            session,
            steps=11,
            loss=growing_loss,
            micro_batches=2,
            before_step=lambda _: plans.append(session.plan),
        )
        grown = session.report()[9]
        assert session.plan.prediction is not None
        assert_all_given_back(session)
    assert_same_history(found, expected)
    assert any(placement is KEEP or placement.percent < 100 for placement in plans[9].placements)
    assert grown.predicted_peak_bytes is None
    assert grown.offloaded_bytes + grown.forwarded_bytes > 0.9 * LAYERS * MIB


@full
def test_a_larger_step_recomputes_what_the_ranks_agreed_on_and_asks_none_of_them() -> None:
    model = make_model(layers=LAYERS)
    with auto_session(model, Drive(), activation=6 * MIB) as session:
        others = Others(session, {1, 4})
        train(model, session, steps=11, loss=growing_loss)
        report, recomputed = session.report(), recomputed_layers(session)
    assert [record.recomputed_scopes for record in report] == [0, *[2] * 10]
    assert recomputed == {1, 4}
    assert len(others.calls) == 7  # as if all steps were alike


def test_a_step_that_failed_after_it_had_left_its_plan_leaves_the_plan_in_force() -> None:
    model = make_model(layers=LAYERS)
    with auto_session(model, Drive(), activation=8 * MIB) as session:
        train(model, session, steps=5)
        plan = session.plan
        with pytest.raises(ZeroDivisionError), session.step():
            loss_of(model, make_tokens(0, 8))
            assert set(session.plan.placements) == {AUTO}
            raise ZeroDivisionError
        with session.step():
            assert session.plan is plan
            loss_of(model, make_tokens(0)).backward()


def step_of(sizes: Sizes, *runs: tuple[int, ...], nbytes: int = 100) -> tuple[bool, StepSize]:
    """Whether the last of the runs of one layer was as planned, and how large the step was."""
    sizes.begin_step()
    fits = [sizes.note(0, run) for run in runs]
    return fits[-1], sizes.end_step(nbytes)


def test_a_run_is_as_planned_if_none_of_its_dimensions_is_larger() -> None:
    sizes = Sizes()
    less = StepSize(is_largest=False, is_full=False)
    assert step_of(sizes, (1, 8, 32)) == (False, StepSize(has_grown=True, is_new=True))
    assert step_of(sizes, (1, 8, 32)) == (True, StepSize())
    assert step_of(sizes, (1, 8, 16), nbytes=50) == (True, less._replace(is_large=False))
    assert step_of(sizes, (1, 8, 30), nbytes=90) == (True, less)
    assert step_of(sizes, (1, 4, 64)) == (False, less._replace(has_grown=True))
    assert step_of(sizes, (1, 4, 64), (1, 8, 32)) == (True, StepSize())
    assert step_of(sizes, (1, 8, 32), (2, 8, 32)) == (False, less._replace(has_grown=True, is_mixed=True))
    assert step_of(sizes, (1, 8, 32, 1))[0] is False


def test_a_large_step_that_does_not_come_again_is_forgotten_some_time() -> None:
    sizes = Sizes()
    step_of(sizes, (1, 64))
    for _ in range(TUNING.forgotten_after):
        assert step_of(sizes, (1, 32), nbytes=50)[0]
    assert not step_of(sizes, (1, 32), nbytes=50)[0]
    assert step_of(sizes, (1, 32), nbytes=50) == (True, StepSize())


def step_with(sizes: Sizes, *layers: int, size: tuple[int, ...] = (1, 8)) -> tuple[bool, StepSize]:
    """Whether every layer that runs was planned for, and how large the step was."""
    sizes.begin_step()
    fits = [sizes.note(layer, size) for layer in layers]
    return all(fits), sizes.end_step(100)


def test_a_step_in_which_layers_are_skipped_is_full_if_the_others_are_given_as_much() -> None:
    sizes = Sizes()
    skipping = StepSize(is_largest=False)
    assert step_with(sizes, 0, 1) == (False, StepSize(has_grown=True, is_new=True))
    assert step_with(sizes, 0, 2) == (False, skipping._replace(has_grown=True, is_mixed=True))
    assert step_with(sizes, 1, 2) == step_with(sizes, 1) == step_with(sizes) == (True, skipping)
    assert step_with(sizes, 0, 1, 2) == (True, StepSize())
    assert step_with(sizes, 0, 1, size=(1, 4)) == (True, skipping._replace(is_full=False))
    assert step_with(sizes, 0, size=(2, 8))[0] is False
    # Of those that ran one still had two runs that waited for their backward.
    sizes.begin_step()
    assert sizes.note(0, (1, 8))
    assert sizes.note(0, (2, 8))
    assert sizes.note(1, (1, 8))
    assert sizes.end_step(100) == skipping


@pytest.mark.parametrize("missing", [{"layers": (0, 2)}, {"layers": (0, 1, 2), "size": (1, 8)}])
def test_what_no_step_runs_any_longer_is_forgotten_some_time(missing: Any) -> None:
    """A layer that is skipped or frozen for good, or the second micro-batch of a schedule."""
    sizes, layers = Sizes(), missing["layers"]
    size = missing.get("size", (2, 8))
    step_with(sizes, 0, 1, 2, size=(2, 8))
    for _ in range(TUNING.forgotten_after - 1):
        assert step_with(sizes, *layers, size=size)[0]
    assert step_with(sizes, 0, 1, 2, size=(2, 8)) == (True, StepSize())
    for _ in range(TUNING.forgotten_after):
        assert step_with(sizes, *layers, size=size)[0]
    assert step_with(sizes, *layers, size=size) == (False, StepSize(has_grown=True, is_new=True))
    assert step_with(sizes, *layers, size=size) == (True, StepSize())
    assert not step_with(sizes, 0, 1, 2, size=(2, 8))[0]


# Layers that are skipped


class Skipping:
    """The loss of a model of which some layers are skipped: those that a step and its micro-batch tell."""

    def __init__(self, skipped: Callable[[int, int], set[int]]) -> None:
        self.skipped = skipped

    def __call__(self, model: Any, number: int) -> torch.Tensor:
        skipped = self.skipped(*divmod(number, 100))
        tokens = make_tokens(number)
        x = model.embedding(tokens[:, :-1])
        for layer, block in enumerate(model.layers):
            x = x if layer in skipped else block(x)
        logits = model.head(model.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def in_turn(step: int, micro_batch: int) -> set[int]:
    return {(step + micro_batch) % LAYERS}


@pytest.mark.parametrize("micro_batches", of_which([1, 2], 1))
def test_plans_are_made_for_all_layers_where_one_is_skipped_in_turn(micro_batches: int) -> None:
    """No bit changes, and when a step under a plan was measured it is made again, although none is whole."""
    options: Any = {"steps": 10, "micro_batches": micro_batches, "loss": Skipping(in_turn)}
    expected = train(make_model(layers=LAYERS, dropout=0.1), **options)
    model, planned = make_model(layers=LAYERS, dropout=0.1), []
    every = [*range(LAYERS), *reversed(range(LAYERS))] * micro_batches

    def noted(profile: StepProfile, *arguments: Any, **keywords: Any) -> Plan:
        step = controller_of(session).knowledge.steps
        planned.append((step, [slot.layer for slot in profile.slots]))
        return make_plan(profile, *arguments, **keywords)

    with (
        mock.patch("tba_offload.adapt.proposals.make_plan", noted),
        auto_session(model, Drive(), activation=16 * MIB, measure_memory=True) as session,
    ):
        start_anew(session, tuning=CALM)
        found = train(model, session, **options)
        settled = controller_of(session).phase.settled
        assert_all_given_back(session)
    assert_same_history(found, expected)
    assert settled is not None
    assert settled.is_refined
    steps = list(dict.fromkeys(step for step, _ in planned))
    # It is looked whether there is a plan that fits; the first plan; it is refined, when two steps tell.
    assert steps[:2] == [2, 3]
    assert steps[2] in {4, 5}
    assert all(layers == every for step, layers in planned if step > 2)


@full
def test_layers_that_are_skipped_for_good_are_planned_for_no_longer() -> None:
    """When they come back the step leaves its plan."""
    forgotten, back = 8, 22
    model, left, slots = make_model(layers=LAYERS), [], []
    least = Controller.least

    def noted(controller: Controller, plan: Plan) -> Plan:
        left.append(controller.knowledge.steps)
        return least(controller, plan)

    with (
        mock.patch.object(Controller, "least", noted),
        auto_session(model, Drive(), activation=16 * MIB) as session,
    ):
        start_anew(session, tuning=Tuning(forgotten_after=forgotten))
        skipping = Skipping(lambda step, _: {0, 3} if 5 <= step < back else set())
        train(
            model,
            session,
            steps=back + 2,
            loss=skipping,
            before_step=lambda step: slots.append(step and len(profile_in(session).slots)),
        )
    whole = 2 * LAYERS
    assert slots[1 : 6 + forgotten] == [whole] * (5 + forgotten)
    assert slots[6 + forgotten : back + 1] == [whole - 4] * (back - 5 - forgotten)
    assert slots[back + 1] == whole
    assert left == [0, 5 + forgotten, back]


@full
def test_a_layer_that_was_frozen_is_planned_for_when_it_no_longer_is() -> None:
    """Frozen ones save nothing, so that no plan was made for them."""
    model, left = make_model(layers=LAYERS), []
    least = Controller.least

    def noted(controller: Controller, plan: Plan) -> Plan:
        left.append(controller.knowledge.steps)
        return least(controller, plan)

    def before(step: int) -> None:
        for module in (model.embedding, *model.layers[:4]):
            module.requires_grad_(step >= 6)

    with (
        mock.patch.object(Controller, "least", noted),
        auto_session(model, Drive(), activation=16 * MIB) as session,
    ):
        train(model, session, steps=8, before_step=before, micro_batches=2)
        assert len(profile_in(session).slots) == 2 * 2 * LAYERS
    assert left == [0, 6]


@pytest.mark.parametrize(
    ("seconds", "skips", "why"),
    [
        (0.7, False, "steps took 0.700 s instead of 1.00 s"),
        (0.7, True, None),
        (1.5, True, "steps took 1.50 s instead of 1.00 s"),
    ],
)
def test_a_step_that_skips_layers_may_take_less_time_than_planned(
    seconds: float, why: str | None, *, skips: bool
) -> None:
    task, bandwidth = task_of(4, budget=2 * MIB), Bandwidth(1e9, 1e9)
    assert doubt_of(task, [(seconds, 0.0)] * 2, bandwidth=bandwidth, peak=MIB, skips=skips) == why


def test_a_step_on_excursion_is_not_taken_for_one_under_the_plan() -> None:
    machine = machine_of(HALF.scaled(0.05), budget=None, window=8 * MIB)
    machine.run(TUNING.excursions[0])
    assert isinstance(machine.controller.phase, Excursion)
    before = machine.controller.knowledge.pace.seconds
    machine.step(slower=100.0)
    assert not isinstance(machine.controller.phase, Excursion)
    assert before
    assert set(machine.controller.knowledge.pace.seconds) <= set(before)


def of_sizes(*sizes: int | None, before: StepProfile | None = None, has_grown: bool = False) -> StepProfile:
    """A step whose layers each save three activations of a size; None for a layer that is skipped."""
    trace = trace_of(*(OFFLOAD,) * len(sizes))
    trace.scopes = [scope for scope in trace.scopes if sizes[scope.key.layer] is not None]
    trace.activations = [a for a in trace.activations if sizes[a.key.scope.layer] is not None]
    for activation in trace.activations:
        activation.nbytes = sizes[activation.key.scope.layer] or 0
    layers = [(0, f"layers.{layer}") for layer in range(len(sizes))]
    found = profile_of(trace, [], layers, began=0.0, ended=40.0, before=before, has_grown=has_grown)
    assert found is not None
    return found


def bytes_of(profile: StepProfile) -> list[int]:
    return [profile.kind_of(layer).nbytes for layer in range(len(profile.layers))]


@pytest.mark.parametrize("has_grown", [False, True])
def test_a_skipped_layer_keeps_what_is_known_of_it(*, has_grown: bool) -> None:
    before = of_sizes(100, 900, 100)
    assert bytes_of(of_sizes(100, None, 100, before=before, has_grown=has_grown)) == [300, 2700, 300]
    assert bytes_of(of_sizes(None, 900, None, before=before, has_grown=has_grown)) == [300, 2700, 300]


def test_sizes_are_compared_layer_by_layer() -> None:
    """Kinds are numbered in the order in which their layers ran, so that a skipped layer changes that."""
    before = of_sizes(100, 900, 100)
    found = of_sizes(None, 800, 120, before=before).at_least(before)
    assert bytes_of(found) == [360, 2700, 360]
    assert found.layers == (1, 0, 1)


# Plain plans


def compared(mixed: float, steps: int = 70, *, is_behind: bool = False) -> Machine:
    """A machine on which plans that place layers in several ways take a multiple of what they should."""
    machine = machine_of(HALF.scaled(0.5), budget=18 * MIB, window=8 * MIB)
    machine.is_behind = is_behind
    for _ in range(steps):
        machine.step(slower=mixed if len(set(bare(machine.plan).placements)) > 1 else 1.0)
    return machine


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_plain_plan_that_a_step_shows_to_be_faster_stays(*, is_behind: bool) -> None:
    """Although each prediction says that another one is better."""
    machine = compared(1.3, is_behind=is_behind)
    (plain,) = set(machine.plan.placements)
    assert plain.recomputes
    settled = settled_in(machine)
    assert settled.favoured > 0.05
    case = case_of(machine.controller.task, steady_profile(), HALF.scaled(0.5))
    again = best_plan(case)
    assert again.prediction is not None
    assert again.prediction.seconds < case.play(machine.plan).seconds


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_plain_plan_is_tried_once_where_predictions_hold(*, is_behind: bool) -> None:
    """By the clock of the device: how long the host took to give it the work says nothing."""
    machine = compared(1.0, is_behind=is_behind)
    assert len(set(machine.plan.placements)) > 1
    assert settled_in(machine).is_compared


def test_a_plain_plan_is_tried_before_a_search_which_may_take_many_steps() -> None:
    machine = machine_of(HALF.scaled(0.5), budget=18 * MIB, window=8 * MIB)
    phases = []
    for _ in range(TUNING.learning + 4):
        machine.step()
        phases.append(type(machine.controller.phase))
    assert phases.index(Comparison) == TUNING.learning + 1  # two steps under the plan tell how long it takes
    assert phases.count(Comparison) == 1


def test_a_plain_plan_is_taken_at_once_where_it_is_faster_by_what_was_measured() -> None:
    """A search finds a better one later."""
    machine = machine_of(budget=24 * MIB)
    machine.run(TUNING.learning)
    assert len(set(machine.plan.placements)) > 1
    timings = machine.profile.timings[0]
    slow = {OFFLOAD: Timing(0.3, 0.6), OFFLOAD_REMAT: Timing(0.3, 0.6)}
    machine.profile = dataclasses.replace(machine.profile, timings=(timings | slow,))
    machine.run(2)
    assert "by what was measured a step under it takes" in settled_in(machine).why
    (plain,) = set(machine.plan.placements)
    assert plain.recomputes


NONE = frozenset[int]()


@pytest.mark.parametrize("steps", [4, 12])
def test_an_odd_step_hardly_changes_what_is_expected_of_the_next_ones(steps: int) -> None:
    """As where another program has the machine for a second: it tells nothing of the steps after it."""
    machine = machine_of(budget=80 * MIB)
    machine.run(steps)
    for _ in range(8):
        machine.step(slower=20.0)
        plan = machine.step()
        assert plan.prediction is not None
        expected = simulate(machine.profile, plan, machine.bandwidth).seconds
        assert plan.prediction.seconds == pytest.approx(expected, rel=0.1)
        machine.run(4)
