"""Races: strategies in processes of their own, step by step in turn."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from covering import full, of_which

from tba_lab.demo.race import (
    Entrant,
    RaceError,
    Spread,
    Watch,
    median_interval,
    paired_ratio,
    prediction_error,
    race,
    timed_rounds,
)
from tba_offload.errors import TbaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# Entrants: a race imports them in its processes


class Diary:
    """Writes down what it is told to do, in a file that all entrants share."""

    def __init__(self, name: str, diary: Path, variables: tuple[str, ...] = ()) -> None:
        self.name = name
        self.diary = diary
        self.variables = variables
        self.steps = 0
        self.write("made")

    def write(self, what: str) -> None:
        with self.diary.open("a") as file:
            file.write(f"{self.name} {what}\n")

    def step(self) -> dict[str, Any]:
        self.steps += 1
        self.write(f"step {self.steps}")
        environment = {name: os.environ.get(name) for name in self.variables}
        return {"name": self.name, "step": self.steps, "pid": os.getpid(), "environment": environment}

    def close(self) -> None:
        self.write("closed")


class Failing(Diary):
    """Fails where it is told to."""

    def __init__(self, name: str, diary: Path, place: str, how: str) -> None:
        super().__init__(name, diary)
        self.place = place
        self.how = how
        self.fail("make")

    def step(self) -> dict[str, Any]:
        figures = super().step()
        if self.steps == 2:
            self.fail("step")
        return figures

    def close(self) -> None:
        super().close()
        self.fail("close")

    def fail(self, place: str) -> None:
        if place == self.place:
            {"raise": complain, "exit": lambda: os._exit(7), "kill": kill, "interrupt": interrupt}[self.how]()


class Sleeping(Diary):
    """Its steps do not end."""

    def step(self) -> dict[str, Any]:
        super().step()
        while True:
            time.sleep(60)


class Calling(Watch):
    """Calls a function after every step, and notes what it was told."""

    def __init__(self, after: Callable[[], object]) -> None:
        self.after = after
        self.told: list[str] = []

    def begin(self) -> None:
        self.told.append("begin")

    def end(self) -> None:
        self.told.append("end")
        self.after()


class Unpicklable(Diary):
    """Its figures cannot travel."""

    def step(self) -> dict[str, Any]:
        return {"figures": lambda: None}


def complain() -> None:
    raise ValueError("the layer is on fire")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    return tmp_path / "diary"


def entries(diary: Path) -> list[str]:
    return diary.read_text().splitlines()


@pytest.fixture(autouse=True)
def no_process_and_no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert multiprocessing.active_children() == []
    assert descriptors() == before


def descriptors() -> int:
    """How many pipes to processes are open."""
    gc.collect()
    links = (str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(link.startswith("socket:") for link in links)


# What a race does


def test_entrants_alternate_and_each_round_starts_with_another(diary: Path) -> None:
    ticks: list[int] = []
    watch = Calling(lambda: ticks.append(len(entries(diary))))
    entrants = {name: Entrant(Diary, {"name": name, "diary": diary}) for name in "abc"}
    results = race(entrants, 4, watch=watch)
    order = entries(diary)
    assert sorted(order[:3]) == ["a made", "b made", "c made"]  # all of them before the first step
    assert [entry[0] for entry in order[3:-3]] == [*"abc", *"bca", *"cab", *"abc"]
    assert order[-3:] == ["a closed", "b closed", "c closed"]
    assert ticks == list(range(4, 16))  # after every single step
    assert watch.told == ["begin", "end"] * 12

    assert list(results) == ["a", "b", "c"]
    for name, figures in results.items():
        assert [(step["name"], step["step"]) for step in figures] == [(name, n) for n in (1, 2, 3, 4)]
    processes = {name: {step["pid"] for step in figures} for name, figures in results.items()}
    assert [len(pids) for pids in processes.values()] == [1, 1, 1]
    assert len(set.union(*processes.values(), {os.getpid()})) == 4


def test_variables_reach_their_own_child_and_are_put_back(
    diary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TBA_TEST_THERE", "before")
    monkeypatch.delenv("TBA_TEST_NEW", raising=False)
    names = ("TBA_TEST_THERE", "TBA_TEST_NEW")
    given = {"TBA_TEST_THERE": "inside", "TBA_TEST_NEW": "1"}
    seen_outside: list[str | None] = []
    results = race(
        {
            "set": Entrant(Diary, {"name": "set", "diary": diary, "variables": names}, given),
            "plain": Entrant(Diary, {"name": "plain", "diary": diary, "variables": names}),
        },
        1,
        watch=Calling(lambda: seen_outside.extend(os.environ.get(name) for name in names)),
    )
    assert results["set"][0]["environment"] == given
    assert results["plain"][0]["environment"] == {"TBA_TEST_THERE": "before", "TBA_TEST_NEW": None}
    assert seen_outside == ["before", None] * 2
    assert os.environ["TBA_TEST_THERE"] == "before"
    assert "TBA_TEST_NEW" not in os.environ


def test_variables_are_put_back_when_a_process_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_TEST_THERE", "before")
    entrant = Entrant(lambda: None, {}, {"TBA_TEST_THERE": "inside"})  # type: ignore[arg-type]
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        race({"local": entrant}, 1)
    assert os.environ["TBA_TEST_THERE"] == "before"


# What goes wrong


def failing(diary: Path, place: str, how: str) -> dict[str, Entrant]:
    return {
        "good": Entrant(Diary, {"name": "good", "diary": diary}),
        "bad": Entrant(Failing, {"name": "bad", "diary": diary, "place": place, "how": how}),
    }


@pytest.mark.parametrize("place", of_which(["make", "step", "close"], "make"))
def test_an_entrant_that_raises_is_named_with_its_traceback(diary: Path, place: str) -> None:
    with pytest.raises(RaceError) as caught:
        race(failing(diary, place, "raise"), 3)
    message = str(caught.value)
    assert message.startswith("bad failed:\nTraceback (most recent call last):\n")
    assert "in complain" in message
    assert message.endswith("ValueError: the layer is on fire\n")
    assert isinstance(caught.value, TbaError)
    assert entries(diary).count("good closed") == 1  # whatever happens to the others
    if place == "step":
        assert entries(diary).count("bad closed") == 1


@pytest.mark.full
def test_an_entrant_that_is_interrupted_is_named(diary: Path) -> None:
    with pytest.raises(RaceError, match=r"^bad failed:\n(.*\n)*KeyboardInterrupt\n$"):
        race(failing(diary, "step", "interrupt"), 3)
    assert {"good closed", "bad closed"} <= set(entries(diary))


@pytest.mark.parametrize(
    ("place", "how", "status"),
    [
        pytest.param("make", "exit", "7", marks=full),
        pytest.param("step", "exit", "7", marks=full),
        ("step", "kill", "-9; so the system ends what takes too much memory"),
        pytest.param("close", "exit", "7", marks=full),
    ],
)
def test_an_entrant_that_dies_is_named_with_its_status(
    diary: Path, place: str, how: str, status: str
) -> None:
    with pytest.raises(RaceError, match=rf"^bad: its process ended with status {status}$"):
        race(failing(diary, place, how), 3)
    assert entries(diary).count("good closed") == 1


@pytest.mark.full
def test_figures_that_cannot_travel_are_an_error_of_their_entrant(diary: Path) -> None:
    entrants = {
        "plain": Entrant(Diary, {"name": "plain", "diary": diary}),
        "odd": Entrant(Unpicklable, {"name": "odd", "diary": diary}),
    }
    with pytest.raises(RaceError, match=r"^odd failed:\nTraceback(.*\n)*.*pickle"):
        race(entrants, 1)
    assert {"plain closed", "odd closed"} <= set(entries(diary))


@pytest.mark.full
def test_an_entrant_that_refuses_its_arguments_is_named(diary: Path) -> None:
    with pytest.raises(
        RaceError, match=r"^a failed:\n(.*\n)*TypeError: .*unexpected keyword argument 'pace'"
    ):
        race({"a": Entrant(Diary, {"name": "a", "diary": diary, "pace": 1})}, 1)


@pytest.mark.parametrize("error", of_which([KeyboardInterrupt, OSError], KeyboardInterrupt))
def test_an_interrupted_race_closes_its_entrants(diary: Path, error: type[BaseException]) -> None:
    def stop() -> None:
        raise error

    entrants = {name: Entrant(Diary, {"name": name, "diary": diary}) for name in "ab"}
    with pytest.raises(error):
        race(entrants, 3, watch=Calling(stop))
    assert sorted(entries(diary)) == ["a closed", "a made", "a step 1", "b closed", "b made"]


def test_a_race_can_be_stopped_inside_a_step(diary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_lab.demo.race._BUSY_SECONDS", 0.0)
    monkeypatch.setattr("tba_lab.demo.race._WAIT_SECONDS", 0.01)

    class Impatient(Watch):
        def wait(self) -> None:
            if diary.exists() and "a step 1" in entries(diary):
                raise TimeoutError

    entrants = {"a": Entrant(Sleeping, {"name": "a", "diary": diary})}
    with pytest.raises(TimeoutError):
        race(entrants, 3, watch=Impatient())
    assert entries(diary) == ["a made", "a step 1"]  # killed: it could not close


# Figures


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], (5.0, 5.0, 5.0)),
        ([1.0, 3.0], (2.0, 1.5, 2.5)),
        ([4.0, 1.0, 2.0], (2.0, 1.5, 3.0)),
        ([4.0, 3.0, 2.0, 1.0], (2.5, 1.75, 3.25)),
        ([10.0, 0.0, 20.0, 40.0, 30.0], (20.0, 10.0, 30.0)),
        ([7.0] * 6, (7.0, 7.0, 7.0)),
    ],
)
def test_spread_is_a_median_between_quartiles(values: list[float], expected: tuple[float, ...]) -> None:
    assert Spread.of(values) == Spread(*expected)


def test_spread_as_text() -> None:
    assert str(Spread(1.0456, 0.9, 1.25)) == "1.046 (0.900 to 1.250)"


@pytest.mark.parametrize(
    ("count", "places"), [(1, (1, 1)), (2, (1, 2)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (25, (8, 18))]
)
def test_a_median_lies_between_two_of_the_values(count: int, places: tuple[int, int]) -> None:
    """As tables of the sign test have it."""
    values = [float(place) for place in range(1, count + 1)]
    assert median_interval(values[::-1]) == places


def test_ratios_are_taken_round_by_round() -> None:
    # 2, 1.5 and 4: the ratio of the medians would be 3 / 2
    assert paired_ratio([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == Spread(2.0, 1.75, 3.0)
    # a machine that is ten times slower in one round changes nothing
    assert paired_ratio([1.5, 15.0, 1.5], [1.0, 10.0, 1.0]) == Spread(1.5, 1.5, 1.5)


def test_rounds_in_which_a_lane_measured_memory_have_no_time() -> None:
    ours = [{"seconds": float(round_), "peak": 9 if round_ in {1, 3} else None} for round_ in range(6)]
    others = [{"seconds": -float(round_), "peak": 9 if round_ in {1, 4} else None} for round_ in range(6)]
    timed = timed_rounds(ours, others, warm_up=1, peak="peak")
    assert [tuple(step["seconds"] for step in steps) for steps in timed] == [(2.0, -2.0), (5.0, -5.0)]
    assert [step["seconds"] for (step,) in timed_rounds(ours, warm_up=1, peak="peak")] == [2.0, 4.0, 5.0]


def test_each_step_is_held_against_its_own_prediction() -> None:
    """The machine gets slower by half, and the planner notices a step later."""
    steps = [{"then": then, "now": now} for then, now in ((1.0, 1.0), (1.0, 1.5), (1.5, 1.5), (None, 1.5))]
    assert prediction_error(steps, "then", "now") == 0.0
    assert prediction_error(steps[:2], "then", "now") == pytest.approx(-1 / 6)
    assert prediction_error(steps[3:], "then", "now") is None


def test_if_memory_was_measured_in_every_round_their_times_must_do() -> None:
    ours = [{"seconds": 1.0, "peak": None}, {"seconds": 2.0, "peak": 9}, {"seconds": 3.0, "peak": None}]
    others = [{"seconds": 4.0, "peak": None}, {"seconds": 5.0, "peak": None}, {"seconds": 6.0, "peak": 9}]
    timed = timed_rounds(ours, others, warm_up=1, peak="peak")
    assert [tuple(step["seconds"] for step in steps) for steps in timed] == [(2.0, 5.0), (3.0, 6.0)]
    ours[2]["peak"] = 9  # like with like, if there is
    timed = timed_rounds(ours, others, warm_up=1, peak="peak")
    assert [tuple(step["seconds"] for step in steps) for steps in timed] == [(3.0, 6.0)]


@pytest.mark.parametrize(("numerator", "denominator"), [([1.0, 2.0], [1.0]), ([1.0], [1.0, 2.0])])
def test_ratios_need_the_same_rounds(numerator: list[float], denominator: list[float]) -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_ratio(numerator, denominator)
