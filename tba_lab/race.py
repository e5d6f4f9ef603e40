"""Compares lanes fairly on a noisy machine: each in a process of its own, single steps in turn.

So each lane has its own model, optimizer, random state, heap and peak of resident memory. Whatever else the
machine does hits all lanes of a round alike: ratios hold where absolute times do not.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from tba_offload.errors import TbaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

MEASURE_EVERY = 4
"""Rounds of which one measures memory. Its time does not count, since sampling takes part of a core."""

_SILENCE = 5.0
FAST_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # huge pages: direct I/O pins 512 times fewer


class RaceError(TbaError, RuntimeError):
    """A process of a race failed, or the race would take longer than its limit."""


class Entrant(NamedTuple):
    """One lane: what ``make(**arguments)`` returns in its process has ``step()`` and ``close()``."""

    make: Callable[..., Any]
    arguments: Mapping[str, Any] = {}


def race(
    entrants: Mapping[str, Entrant],
    rounds: int,
    *,
    say: Callable[[str], object] = lambda _: None,
    time_limit: float = math.inf,
    ahead: float = 0.0,
) -> dict[str, list[dict[str, Any]]]:
    """Run ``rounds`` steps of every lane, alternating, each round starting with another one.

    It returns what the steps of each lane returned. ``say`` prints a line of progress. A lane that fails is a
    :class:`RaceError`, and so is a race that would take longer than ``time_limit`` seconds with the races
    ``ahead``, which are counted in times of this one.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in entrants}
    progress = _Progress(len(entrants), rounds, say, time_limit, ahead)
    say(f"starting {len(entrants)} processes: {', '.join(entrants)}")
    with _started(entrants, progress.tick) as lanes:
        for number in range(rounds):
            for name in turns(list(entrants), number):
                progress.doing = name
                results[name].append(lanes[name].ask("step", progress.tick))
                progress.step_ended()
        for lane in lanes.values():
            lane.ask("close", progress.tick)
    return results


class _Progress:
    """Says every few seconds how far a race is, and ends one that takes too long."""

    def __init__(
        self, lanes: int, rounds: int, say: Callable[[str], object], limit: float, ahead: float
    ) -> None:
        self._lanes, self._steps, self._ahead = lanes, lanes * rounds, ahead * lanes * rounds
        self._say, self._limit = say, limit
        self._began = self._said = self._warm = time.monotonic()
        self._done, self.doing = 0, ""

    def tick(self) -> None:
        now, early = time.monotonic(), 2 * self._lanes
        is_known = self._done > self._lanes  # the first steps allocate: they tell little of the others
        left = (
            (now - self._warm) / max(self._done - self._lanes, 1) * (self._steps - self._done + self._ahead)
        )
        told = f"about {duration(left)} to go" if is_known else f"{now - self._began:.0f} s so far"
        if self._done <= early and (left if self._done == early else now - self._began) > self._limit:
            raise RaceError(
                f"{told}, longer than {duration(self._limit)}; give fewer --steps or --layers, a smaller "
                "--hidden, --sequence or --batch-size, or more minutes by --time-limit"
            )
        if now - self._said > _SILENCE:
            self._said = now
            number = min(self._done + 1, self._steps)
            step = f"step {number} of {self._steps} ({self.doing})" if self.doing else "starting"
            self._say(f"{step}; {told}")

    def step_ended(self) -> None:
        self._done += 1
        if self._done == self._lanes:
            self._warm = time.monotonic()
        self.tick()


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round, counted from 0: each starts with another lane, measured ones too."""
    shift = (number + number // MEASURE_EVERY) % len(names)
    return [*names[shift:], *names[:shift]]


def measures_memory(number: int) -> bool:
    """Return whether memory is measured in a round, counted from 0."""
    return number % MEASURE_EVERY == MEASURE_EVERY - 1


def duration(seconds: float) -> str:
    """Return minutes and seconds, such as ``3:05 min``; less than a minute in seconds."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02} min"


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the quartiles of some values; of one value it is that value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Return the ratio round by round: what the machine did in a round cancels out."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def timed_rounds(*lanes: Sequence[Any], measured: Callable[[Any], bool]) -> list[tuple[Any, ...]]:
    """Return the rounds whose time counts: those in which no lane measured memory, if there are any."""
    rounds = list(zip(*lanes, strict=True))
    return [steps for steps in rounds if not any(map(measured, steps))] or rounds


# Processes


@dataclass
class _Lane:
    """The process of one entrant, seen from the race."""

    name: str
    process: BaseProcess
    pipe: Connection

    def ask(self, what: str, tick: Callable[[], None]) -> Any:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(what)
        return self.answer(tick)

    def answer(self, tick: Callable[[], None]) -> Any:
        while not self.pipe.poll(1.0):
            tick()
        try:
            worked, answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=10)
            status = self.process.exitcode
            why = "; so the system ends what takes too much memory" if status == -signal.SIGKILL else ""
            raise RaceError(f"{self.name}: its process ended with status {status}{why}") from None
        if not worked:
            raise RaceError(f"{self.name} failed:\n{answer}")
        return answer


@contextlib.contextmanager
def _started(entrants: Mapping[str, Entrant], tick: Callable[[], None]) -> Iterator[dict[str, _Lane]]:
    """Start all processes at once and wait until each is ready; none outlives the block."""
    lanes: dict[str, _Lane] = {}
    patience = 2.0  # a store leaves nothing behind when its process is killed
    try:
        for name, entrant in entrants.items():
            lanes[name] = _start(name, entrant)
        for lane in lanes.values():
            lane.answer(tick)
        yield lanes
        patience = 20.0
    finally:
        for lane in lanes.values():
            lane.pipe.close()
        for lane in lanes.values():
            lane.process.join(timeout=patience)
            if lane.process.is_alive():
                lane.process.kill()
                lane.process.join()


def _start(name: str, entrant: Entrant) -> _Lane:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_lane, args=(entrant, theirs), name=f"tba-{name}", daemon=True)
    with patch.dict(os.environ, FAST_ALLOCATOR):
        process.start()
    theirs.close()
    return _Lane(name, process, ours)


def _run_lane(entrant: Entrant, pipe: Connection) -> None:
    """Make the runner in its process, then do as it is told until the pipe closes."""
    with contextlib.suppress(EOFError, BrokenPipeError), contextlib.ExitStack() as stack:
        try:
            runner = entrant.make(**entrant.arguments)
            stack.callback(runner.close)
            pipe.send((True, None))
            while pipe.recv() == "step":
                pipe.send((True, runner.step()))
            stack.close()
            pipe.send((True, None))
        except (EOFError, BrokenPipeError):
            raise  # the race is over, for whatever reason
        except BaseException as error:
            text = (
                f"{type(error).__name__}: {error}" if isinstance(error, TbaError) else traceback.format_exc()
            )
            pipe.send((False, text))
            raise
