"""A profile has the times of whoever computes: the device's, where that runs behind the host.

The device is a twin on which operations take the seconds that a test gives them, see ``ordered_device.py``.
On the host they take next to none, so a time of the host's is found at once.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from harness import KIB, config_for, in_time, session_for
from machine import watching
from models import make_model, train
from ordered_device import TimedDevice, attached
from torch import Tensor, nn

import tba_offload as tba
from tba_offload import Placement, Rule
from tba_offload.adapt.pace import Pace
from tba_offload.adapt.phases import Probe
from tba_offload.adapt.profiler import profile_of
from tba_offload.capture.scope import ActivationKey, ScopeKey
from tba_offload.capture.trace import ActivationTrace, DeviceTimes, ScopeTrace, StepTrace, Treatment
from tba_offload.device import CpuDevice
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.profile import StepProfile, Timing
from tba_offload.plan.simulate import simulate
from tba_offload.plan.tuning import TUNING
from tba_offload.plan.window import Window
from tba_offload.report.log import read_run_log
from tba_offload.transfer.storage import Span
from tba_offload.transfer.watchdog import Watchdog
from tba_offload.transfer.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.adapt.controller import Controller
    from tba_offload.session import Session
    from tba_offload.store.base import IoFuture

KEEP, OFFLOAD, RECOMPUTE, AUTO = Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.AUTO
LAYERS = 5
SECONDS = {"neg": 1.0, "sin": 4.0, "cos": 16.0, "abs": 0.5}
"""Sums of them are exact."""

FORWARD, BACKWARD = 4.0, 17.0
"""A sine; a cosine, and the negation behind it."""

STEP = LAYERS * (1.0 + FORWARD + BACKWARD) + 0.5
DRY = 3.0
"""Seconds for which a device has nothing to do because the host waits."""


class Wave(nn.Module):
    """A layer that saves its input and its sine."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(256))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * self.scale


class Waves(nn.Module):
    """Layers with something between them that saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wave() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.neg())
        return x


def run_step(model: nn.Module, session: Session, between: Callable[[], object] = lambda: None) -> None:
    with session.step():
        y = model(torch.ones(64, 256, requires_grad=True))
        in_time(session.offloader.quiesce)  # everything is written, so everything is read
        between()
        y.abs().sum().backward()


def timed_session(device: TimedDevice, model: Waves, **settings: Any) -> Any:
    settings.setdefault("in_flight", None)
    return attached(device, model, {}, layers=list(model.layers), **settings)


def learned_by(controller: Controller | None) -> StepProfile:
    assert controller is not None
    assert controller.knowledge.profile is not None
    return controller.knowledge.profile


def assert_times_of_the_device(profile: StepProfile, **placements: Timing) -> None:
    """Every gap, and every layer under its placement."""
    (timings,) = profile.timings
    assert {placement.value: timing for placement, timing in timings.items()} == placements
    forward, backward = profile.slots[:LAYERS], profile.slots[LAYERS:]
    assert [slot.gap for slot in forward] == [1.0] * LAYERS
    assert [slot.gap for slot in backward] == [0.5, *[0.0] * (LAYERS - 1)]
    assert profile.tail == 0.0


# The device's times


def test_a_profile_has_the_times_of_the_device() -> None:
    device, model = TimedDevice(SECONDS), Waves()
    rules = (Rule("0", KEEP), Rule("1", RECOMPUTE))
    with timed_session(device, model, rules=rules) as session, device.computing():
        planner = watching(session)
        for _ in range(3):
            run_step(model, session)
        report, profile = session.report(), learned_by(planner)
    again = Timing(FORWARD, BACKWARD + FORWARD)
    as_usual = Timing(FORWARD, BACKWARD)
    assert_times_of_the_device(profile, keep=as_usual, recompute=again, offload=as_usual)
    assert device.now == 3 * (STEP + FORWARD) + FORWARD  # in the first step it is compared as well
    # What the host took to give the work is no time of the work.
    assert [record.seconds for record in report] == [STEP + 2 * FORWARD, STEP + FORWARD, STEP + FORWARD]
    assert {(record.forward_seconds, record.backward_seconds) for record in report} == {(None, None)}


def test_a_device_that_is_far_behind_when_a_step_begins_has_the_same_times() -> None:
    device, model = TimedDevice(SECONDS), Waves()
    with timed_session(device, model) as session, device.computing():
        planner = watching(session)
        for _ in range(3):
            for _ in range(100):
                torch.ones(1).neg()
            run_step(model, session)
        profile = learned_by(planner)
    assert_times_of_the_device(profile, offload=Timing(FORWARD, BACKWARD))


def test_activations_are_ordered_within_their_layer_by_the_host() -> None:
    device, model = TimedDevice(SECONDS), Waves()
    with timed_session(device, model) as session, device.computing():
        planner = watching(session)
        run_step(model, session)
        profile = learned_by(planner)
    (kind,) = profile.kinds
    assert [saved.nbytes for saved in kind.activations] == [64 * KIB] * 2
    ((_, first, last), (_, then, before)) = (saved[:3] for saved in kind.activations)  # input and sine
    assert 0 < first < then < 1
    assert 0 < before < last < 1


def test_only_sessions_that_plan_mark_times() -> None:
    device, model = TimedDevice(SECONDS), Waves()
    with timed_session(device, model) as session, device.computing():
        with mock.patch.object(TimedDevice, "mark", side_effect=AssertionError("nobody will ask")):
            run_step(model, session)
        watching(session)
        run_step(model, session)
        session.planning.start(session.plan, None)
        with mock.patch.object(TimedDevice, "mark", side_effect=AssertionError("nobody will ask")):
            run_step(model, session)
    assert {record.offloaded_bytes for record in session.report()} == {2 * LAYERS * 64 * KIB}


# Waiting for I/O


@contextmanager
def waiting_for_reads(device: TimedDevice, seconds: float) -> Iterator[None]:
    """The host waits for each read, and the device stands still for so long."""
    wait_for = Watchdog.wait_for
    awaited: list[IoFuture] = []

    def waits(watchdog: Watchdog, transfer: IoFuture, *given: Any, **also: Any) -> None:
        wait_for(watchdog, transfer, *given, **also)
        awaited.append(transfer)
        time.sleep(0.001)
        device.runs_dry(seconds)

    def has_come(_: Span, reads: list[IoFuture]) -> bool:
        return all(read in awaited for read in reads)

    with (
        mock.patch.object(Span, "has_come", autospec=True, side_effect=has_come),
        mock.patch.object(Span, "arrived", return_value=False),
        mock.patch.object(Watchdog, "wait_for", autospec=True, side_effect=waits),
    ):
        yield


@pytest.mark.parametrize("seconds", [0.0, DRY])
def test_waits_for_reads_are_no_compute_time(seconds: float) -> None:
    """Nor are they if the host waits while the device has work: then they take no time at all."""
    device, model = TimedDevice(SECONDS), Waves()
    with timed_session(device, model) as session, device.computing(), waiting_for_reads(device, seconds):
        planner = watching(session)
        for _ in range(3):
            run_step(model, session)
            assert len(session.offloader.stats.marked_stalls) == 2 * LAYERS
        profile = learned_by(planner)
        trace, stalls = session.capture.trace, session.offloader.stats.stalls
        by_host = profile_of(trace, stalls, planner.task.layers, began=0.0, ended=0.0)
    assert_times_of_the_device(profile, offload=Timing(FORWARD, BACKWARD))
    assert device.now == 3 * (STEP + 2 * LAYERS * seconds)
    # Shares within a layer are the host's, whose own waits are none of its work either.
    assert by_host is not None
    assert profile.kinds == by_host.kinds


def test_waits_for_room_are_no_compute_time() -> None:
    device, model = TimedDevice(SECONDS), Waves()
    admit, wait = Writer.admit, Watchdog.wait_until_changed
    admitting: list[int] = []
    waited: list[int] = []

    def admits(writer: Writer, nbytes: int) -> None:
        admitting.append(nbytes)
        admit(writer, nbytes)
        admitting.pop()

    def waits(*given: Any) -> None:
        wait(*given)
        if admitting:  # and not at the end of the forward pass
            waited.extend(admitting)
            device.runs_dry(DRY)

    with (
        timed_session(device, model, in_flight=100 * KIB) as session,
        device.computing(),
        mock.patch.object(Window, "is_crowded", return_value=True),
        mock.patch.object(Writer, "admit", autospec=True, side_effect=admits),
        mock.patch.object(Watchdog, "wait_until_changed", autospec=True, side_effect=waits),
    ):
        planner = watching(session)
        run_step(model, session)
        assert (
            len(session.offloader.stats.marked_stalls) >= LAYERS
        )  # two for each, unless a write was done by then
        profile = learned_by(planner)
    assert_times_of_the_device(profile, offload=Timing(FORWARD, BACKWARD))
    assert device.now == STEP + DRY * len(waited) > STEP


def test_reads_that_have_arrived_are_not_marked() -> None:
    device, model = TimedDevice(SECONDS), Waves()
    with (
        timed_session(device, model) as session,
        device.computing(),
        mock.patch.object(Span, "arrived", return_value=True),
    ):
        watching(session)
        run_step(model, session)
        assert session.offloader.stats.read > 0
        assert session.offloader.stats.marked_stalls == []


# When the device is waited for


def test_nobody_waits_for_the_device_inside_a_step() -> None:
    device, model = TimedDevice(SECONDS), Waves()
    with timed_session(device, model, default=AUTO) as session, device.computing():
        watching(session)  # it decides at once, so each of the first steps is looked at
        for _ in range(6):
            with session.step():
                waits = device.waits
                model(torch.ones(64, 256, requires_grad=True)).abs().sum().backward()
                assert device.waits == waits
            assert device.waits == waits + 1  # behind a step that is looked at closely
        session.planning.start(session.plan, None)
        run_step(model, session)
        assert device.waits == waits + 1


def test_the_device_is_waited_for_only_when_a_step_is_looked_at_closely() -> None:
    device, model = TimedDevice(SECONDS), Waves()
    with timed_session(device, model) as session, device.computing():
        pace = watching(session).knowledge.pace
        run_step(model, session)
        assert (device.waits, pace.seconds) == (1, (STEP,))
        with mock.patch.object(Probe, "is_turn", return_value=False):
            run_step(model, session)
            run_step(model, session)  # the device has not come to the end of the step before
            assert (device.waits, pace.seconds) == (1, (STEP,))
            device.catches_up()
            device.runs_dry(DRY)
            run_step(model, session, partial(device.runs_dry, DRY))
            assert (device.waits, pace.seconds) == (1, (STEP, STEP))
            device.catches_up()
        run_step(model, session)
    assert device.waits == 2
    assert pace.seconds == (STEP, STEP, STEP + DRY, STEP)


@pytest.mark.parametrize("dry", [0.0, DRY])
def test_waits_of_the_device_make_the_planner_careful(dry: float) -> None:
    """Not those of the host, while the device has work."""
    device, model = TimedDevice(SECONDS), Waves()
    with timed_session(device, model) as session, device.computing(), waiting_for_reads(device, dry):
        watching(session)
        run_step(model, session)
        times = DeviceTimes(session.capture.trace, session.offloader.stats.marked_stalls)
        pace = Pace(TUNING)
        pace.note(session.report()[-1], times, is_planned=True)
        assert pace.waited == ()  # the device was not asked
        pace.read(times.read(), is_planned=True)
    lost = 2 * LAYERS * dry
    assert pace.waited == (lost / (STEP + lost),)


# A device that does its work at once


def test_on_a_cpu_nothing_is_marked() -> None:
    model = make_model(layers=3)
    with (
        mock.patch.object(CpuDevice, "mark", side_effect=AssertionError("the host's times are the device's")),
        session_for(model, default=AUTO, in_flight=200 * KIB) as session,
    ):
        train(model, session, steps=4)
        profile = learned_by(session.planning.controller)
        report = session.report()
        assert session.capture.trace.marks is None
        assert session.offloader.stats.marked_stalls == []
    assert all(timing.forward > 0 < timing.backward for timing in profile.timings[0].values())
    assert all(record.forward_seconds and record.backward_seconds for record in report)


def test_marks_of_a_cpu_are_times() -> None:
    device = CpuDevice()
    marks = [device.mark(), device.mark()]
    assert device.seconds(marks) == marks == sorted(marks)
    assert all(map(device.is_reached, marks))


def trace_by_hand() -> StepTrace:
    """Two layers, with times of all lengths."""
    trace = StepTrace(backward_ends=[11.3])
    for layer, (began, ended, back) in enumerate([(1.1, 2.3, 9.7), (2.7, 4.9, 6.1)]):
        key = ScopeKey(layer, 0, 0, f"layers.{layer}")
        scope = ScopeTrace(key, "offload", began, input_bytes=10, forward_ended=ended, backward_began=back)
        trace.scopes.append(scope)
        for number in range(2):
            at, until = began + 0.3 * (number + 1), back + 0.7 * (2 - number)
            saved = ActivationTrace(ActivationKey(key, number), 100, Treatment.OFFLOADED, at, until)
            trace.activations.append(saved)
    return trace


LAYERS_BY_HAND = [(0, "layers.0"), (0, "layers.1")]
STALLS_BY_HAND = [(1.5, 1.7), (3.1, 4.2), (6.4, 7.9)]


def test_a_profile_by_the_hosts_clock_is_what_it_was() -> None:
    """To the last bit; the figures are those from before there was any other clock."""
    found = profile_of(trace_by_hand(), STALLS_BY_HAND, LAYERS_BY_HAND, began=0.9, ended=12.1)
    assert found is not None
    (kind,) = found.kinds
    assert [(saved.at, saved.until) for saved in kind.activations] == [
        (0.28636363636363626, 0.5089285714285718),
        (0.38181818181818206, 0.2901785714285713),
    ]
    assert found.timings == ({OFFLOAD: Timing(1.05, 1.85)},)
    assert [tuple(slot.as_json()) for slot in found.slots] == [
        (0, 0, False, 0.20000000000000007),
        (1, 0, False, 0.40000000000000036),
        (1, 0, True, 1.1999999999999993),
        (0, 0, True, 0.0),
    ]
    assert found.tail == 0.8000000000000007


def test_a_profile_without_marks_of_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was marked in this step"):
        DeviceTimes(StepTrace(), [])


def test_a_run_log_is_written_on_a_device_that_runs_behind(tmp_path: Any) -> None:
    """And what is predicted from it is the device's time."""
    device, model = TimedDevice(SECONDS), Waves()
    with (
        mock.patch("tba_offload.session.parts.device_of_model", return_value=device),
        tba.attach(
            model,
            config_for(default=OFFLOAD),
            layers=list(model.layers),
            run_log=tmp_path / "run.jsonl",
            measure_memory=False,
        ) as session,
        device.computing(),
    ):
        for _ in range(4):
            run_step(model, session)
    (event,) = [event for event in read_run_log(tmp_path / "run.jsonl").others if event["event"] == "plan"]
    profile = StepProfile.from_json(event["profile"])
    predicted = simulate(profile, session.plan, Bandwidth.from_json(event["drive"]))
    assert predicted.seconds - predicted.stall_seconds == pytest.approx(STEP)
