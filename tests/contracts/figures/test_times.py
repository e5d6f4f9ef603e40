"""A profile has the times of whoever computes: the device's, where that runs behind the host.

The device is a twin on which operations take the seconds that a test gives them, see ``ordered_device.py``.
On the host they take next to none, so a time of the host's is found at once.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
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
from tba_offload.adapt.profiler import profile_of
from tba_offload.device import CpuDevice
from tba_offload.plan.bandwidth import Bandwidth
from tba_offload.plan.profile import StepProfile, Timing
from tba_offload.plan.simulate import simulate
from tba_offload.report.log import read_run_log
from tba_offload.transfer.storage import Span
from tba_offload.transfer.watchdog import Watchdog

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
