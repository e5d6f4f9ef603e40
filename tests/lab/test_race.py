"""Races: lanes in processes of their own, step by step in turn."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tba_lab.race import Entrant, RaceError, race

if TYPE_CHECKING:
    from collections.abc import Iterator


class Diary:
    """Writes down what it is told to do, in a file that all lanes share, and fails where it is told to."""

    def __init__(self, name: str, diary: Path, fails: str = "", how: str = "raise") -> None:
        self.name, self.diary, self.fails, self.how = name, diary, fails, how
        self.steps = 0
        self.write("made")

    def write(self, what: str) -> None:
        with self.diary.open("a") as file:
            file.write(f"{self.name} {what}\n")
        if what == self.fails:
            {"raise": complain, "kill": kill, "sleep": sleep}[self.how]()

    def step(self) -> dict[str, Any]:
        self.steps += 1
        self.write(f"step {self.steps}")
        return {"step": self.steps, "pid": os.getpid(), "malloc": os.environ.get("GLIBC_TUNABLES")}

    def close(self) -> None:
        self.write("closed")


def complain() -> None:
    raise ValueError("the layer is on fire")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(300)


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    return tmp_path / "diary"


def entries(diary: Path) -> list[str]:
    return diary.read_text().splitlines()


@pytest.fixture(autouse=True)
def no_process_and_no_descriptor_is_left() -> Iterator[None]:
    before, tunables = descriptors(), os.environ.get("GLIBC_TUNABLES")
    yield
    assert multiprocessing.active_children() == []
    assert descriptors() == before
    assert os.environ.get("GLIBC_TUNABLES") == tunables


def descriptors() -> int:
    """How many pipes to processes are open."""
    gc.collect()
    links = (str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(link.startswith("socket:") for link in links)


def test_lanes_alternate_and_each_round_starts_with_another(diary: Path) -> None:
    said: list[str] = []
    lanes = {name: Entrant(Diary, {"name": name, "diary": diary}) for name in "abc"}
    results = race(lanes, 4, say=said.append)
    order = entries(diary)
    assert sorted(order[:3]) == ["a made", "b made", "c made"]  # all of them before the first step
    assert [entry[0] for entry in order[3:-3]] == [*"abc", *"bca", *"cab", *"abc"]
    assert order[-3:] == ["a closed", "b closed", "c closed"]
    assert said[0] == "starting 3 processes: a, b, c"
    assert {name: [step["step"] for step in steps] for name, steps in results.items()} == {
        name: [1, 2, 3, 4] for name in "abc"
    }
    processes = {step["pid"] for steps in results.values() for step in steps}
    assert len(processes | {os.getpid()}) == 4
    assert {step["malloc"] for steps in results.values() for step in steps} == {"glibc.malloc.hugetlb=1"}


@pytest.mark.parametrize("place", ["made", "step 2", "closed"])
def test_a_lane_that_raises_is_named_with_its_traceback(diary: Path, place: str) -> None:
    lanes = {
        "good": Entrant(Diary, {"name": "good", "diary": diary}),
        "bad": Entrant(Diary, {"name": "bad", "diary": diary, "fails": place}),
    }
    with pytest.raises(RaceError) as caught:
        race(lanes, 3)
    message = str(caught.value)
    assert message.startswith("bad failed:\nTraceback (most recent call last):\n")
    assert message.endswith("ValueError: the layer is on fire\n")
    assert entries(diary).count("good closed") == 1  # whatever happens to the others
    assert entries(diary).count("bad closed") == (place != "made")
