"""What is said while a race runs, by a clock that is set by hand; when it is refused."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress as RichProgress

from tba_lab.demo import progress as module
from tba_lab.demo.progress import SILENCE, BarProgress, Pace, PlannedStep, Progress, TooLongError, duration
from tba_offload.errors import TbaError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Told:
    """Lines of a race of two processes, and the clock that they are told by."""

    def __init__(self, steps: int = 3, time_limit: float = 600.0) -> None:
        self.clock, self.lines = Clock(), list[str]()
        self.progress = Progress(
            self.lines.append, time_limit=time_limit, remedy="take less", clock=self.clock
        )
        names = ("keep", "offload") * steps
        self.progress.plan([PlannedStep(name, 1.0, opens=number == 0) for number, name in enumerate(names)])

    def step(self, seconds: float) -> list[str]:
        """Runs a step, with ticks and looks every second; the lines that came."""
        before = len(self.lines)
        self.progress.begin()
        self.wait(seconds)
        self.progress.end()
        return self.lines[before:]

    def wait(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(self.clock.now + 1.0, until)
            self.progress.wait()
            self.progress.tick()


def test_the_first_step_is_told_at_once_with_what_is_left() -> None:
    told = Told()
    assert told.step(2.4) == ["step 1 of 6 (keep) took 2.40 s; 4 s to 12 s to go"]


def test_later_steps_are_told_after_a_silence() -> None:
    told = Told(steps=8)
    told.step(1.0)
    assert [told.step(1.0) for _ in range(4)] == [[], [], [], []]
    assert told.step(1.0) == ["step 6 of 16 (offload); about 10 s to go"]  # of which none is done yet
    assert told.step(1.0) == []


def test_a_long_step_is_told_while_it_runs() -> None:
    told = Told()
    *during, last = told.step(12.0)
    assert during == [
        f"step 1 of 6 (keep) has taken {seconds} s so far; the first step tells how long it takes"
        for seconds in (5, 10)
    ]
    assert last == "step 1 of 6 (keep) took 12.00 s; 20 s to 1:00 min to go"


def test_phases_are_told_and_again_while_they_last() -> None:
    told = Told()
    told.progress.phase("starting 2 processes")
    told.wait(11.0)
    assert told.lines == [
        "starting 2 processes",
        "starting 2 processes: 5 s so far",
        "starting 2 processes: 10 s so far",
    ]


def test_between_steps_it_says_how_many_are_done() -> None:
    told = Told(steps=1)
    told.step(1.0)
    told.wait(6.0)
    assert told.lines[-1] == "1 of 2 steps done; 0 s to 1 s to go"
    told.step(1.0)
    assert told.lines[-1] == "2 steps done"
    told.wait(6.0)
    assert told.lines[-1] == "the processes are ending"


@given(st.lists(st.floats(0.0, 100.0), min_size=4, max_size=20))
def test_there_is_never_a_long_silence(seconds: list[float]) -> None:
    told = Told(steps=len(seconds) // 2, time_limit=1e9)
    times: list[float] = [told.clock.now]
    told.progress._say = lambda _: times.append(told.clock.now)
    for each in seconds[: 2 * (len(seconds) // 2)]:
        told.step(each)
    times.append(told.clock.now)
    assert max(later - sooner for sooner, later in itertools.pairwise(times)) < SILENCE + 2


def test_what_is_left_counts_costs_and_starts() -> None:
    clock = Clock()
    steps = [PlannedStep("a", 2.0, opens=True), PlannedStep("b", 3.0), PlannedStep("a", 2.0)]
    pace = Pace([*steps, PlannedStep("b", 3.0), PlannedStep("c", 4.0, opens=True)], clock)
    assert pace.eta is None
    clock.now += 7.0  # processes start
    pace.begin()
    clock.now += 20.0
    assert pace.end() == 20.0
    assert (pace.eta, pace.is_warm) == (10.0 * 12 + 7.0, False)
    pace.begin()
    clock.now += 6.0
    assert pace.running == 6.0
    pace.end()
    pace.begin()
    clock.now += 2.0
    pace.end()
    assert (pace.eta, pace.is_warm) == (1.0 * 7 + 7.0, True)  # the first steps allocate and count no more


def test_a_run_that_takes_too_long_is_refused_after_its_first_step() -> None:
    told = Told(steps=20)  # 39 steps are left
    told.step(45.0)  # first steps may take three times as long
    with pytest.raises(TooLongError) as caught:
        told.step(60.0)
    assert isinstance(caught.value, TbaError)
    assert str(caught.value).startswith("the 3")
    assert "longer than 10:00 min: take less" in str(caught.value)


def test_a_run_is_refused_within_its_first_step() -> None:
    told = Told(steps=20)
    began = told.clock.now
    with pytest.raises(TooLongError, match="the 40 steps that are left would take 10:"):
        told.step(900.0)
    assert told.clock.now - began < 60.0


def test_a_first_step_that_takes_longer_than_the_others_is_no_reason_to_stop() -> None:
    told = Told(steps=20)
    told.step(40.0)
    told.step(40.0)
    for _ in range(38):
        told.step(14.0)
    assert told.lines[-1] == "40 steps done"


def test_a_single_step_that_is_held_up_does_not_speak_for_all() -> None:
    told = Told(steps=60, time_limit=600.0)
    for seconds in (3.0, 3.0, 2.0, 7.0):
        told.step(seconds)
    assert told.progress.pace.is_early is False
    assert told.progress.pace.least == pytest.approx(116 * 4.5)


def test_a_machine_that_becomes_slow_late_loses_nothing() -> None:
    told = Told(steps=20)
    for _ in range(4):
        told.step(10.0)
    told.step(500.0)


def test_without_steps_nothing_is_measured() -> None:
    """As while the job is still being fitted."""
    lines: list[str] = []
    progress = Progress(lines.append)
    progress.phase("measuring")
    progress.begin()
    progress.wait()
    progress.end()
    assert lines == ["measuring"]
    assert progress.status().startswith("measuring: ")


def test_a_thread_ticks_while_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK", 0.001)
    said = threading.Event()
    clock = Clock()
    progress = Progress(lambda line: said.set() if "so far" in line else None, clock=clock)
    with progress.alive() as same:
        assert same is progress
        progress.phase("importing")
        clock.now += SILENCE
        assert said.wait(30.0)
    assert "tba-progress" not in {thread.name for thread in threading.enumerate()}


def test_on_a_terminal_a_bar_is_brought_up_to_date() -> None:
    console = Console(force_terminal=True, width=120, record=True, stderr=True)
    with RichProgress(console=console, auto_refresh=False) as rich:
        bar = BarProgress(rich, time_limit=600.0)
        bar.phase("starting 2 processes")
        bar.plan([PlannedStep("keep", 1.0), PlannedStep("offload", 1.0)])
        bar.begin()
        bar.end()
        bar.begin()
        bar.tick()
        (task,) = rich.tasks
        assert (task.completed, task.total) == (1, 2)
        assert task.description.startswith("step 2 of 2 (offload)")
    text = console.export_text()
    assert "starting 2 processes" in text
    assert "step 1 of 2 (keep) took 0.0" in text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "0 s"), (59.4, "59 s"), (60.0, "1:00 min"), (185.9, "3:05 min"), (3600.0, "60:00 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
