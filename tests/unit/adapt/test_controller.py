"""From steps to plans: what a session learns, what it decides, and that nothing of it changes a bit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from covering import full, of_which
from harness import KIB, MIB, Drive, assert_all_given_back, config_for, session_for
from models import all_written, assert_same_history, loss_of, make_model, make_tokens, train
from torch import nn

import tba_offload as tba
from tba_offload.adapt.controller import Controller
from tba_offload.adapt.phases import Excursion
from tba_offload.adapt.profiler import profile_of
from tba_offload.adapt.rates import Rates
from tba_offload.config.policy import Placement
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.search import make_plan
from tba_offload.plan.tuning import TUNING, Tuning
from tba_offload.plan.what_if import Situation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.adapt.observation import StepObservation
    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import StepProfile
    from tba_offload.report.log import StepRecord
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


# What can be rebuilt


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
