"""Comparison of training runs on a noisy machine, in processes that alternate step by step.

Each run has its own model, optimizer, random state, heap and peak of resident memory. In each round every run
trains one step. Noise of the machine affects all runs of a round, so ratios are more reliable than times.
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

    Say = Callable[[str], object]

MEASURE_EVERY = 4
"""Every fourth round measures memory. Times of these rounds do not count, because sampling uses a core."""

_SILENCE = 5.0
FAST_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # direct I/O pins 512 times fewer pages


class RaceError(TbaError, RuntimeError):
    """A process failed, or the comparison would take longer than the time limit."""


class Entrant(NamedTuple):
    """One run of a comparison. Its process calls ``step`` and ``close`` of ``make(**arguments)``."""

    make: Callable[..., Any]
    arguments: Mapping[str, Any] = {}


def race(
    entrants: Mapping[str, Entrant],
    rounds: int,
    *,
    say: Say = lambda _: None,
    time_limit: float = math.inf,
    ahead: float = 0.0,
) -> dict[str, list[dict[str, Any]]]:
    """Train all runs in alternation for ``rounds`` steps, and return the results of all steps.

    ``say`` prints a line of progress. A :class:`RaceError` means that a run failed, or that this and later
    comparisons would take longer than ``time_limit`` seconds. ``ahead`` is the length of later comparisons as
    a multiple of this comparison.
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
    """Printer of progress messages every few seconds, which also checks the time limit."""

    def __init__(self, lanes: int, rounds: int, say: Say, limit: float, ahead: float) -> None:
        self._lanes, self._steps, self._ahead = lanes, lanes * rounds, ahead * lanes * rounds
        self._say, self._limit = say, limit
        self._began = self._said = self._warm = time.monotonic()
        self._done, self.doing = 0, ""

    def tick(self) -> None:
        now, early = time.monotonic(), 2 * self._lanes
        is_known = self._done > self._lanes  # the first steps allocate memory, so they take longer
        each = (now - self._warm) / max(self._done - self._lanes, 1)
        left = each * (self._steps - self._done + self._ahead)
        time_left = f"about {duration(left)} left" if is_known else f"{now - self._began:.0f} s so far"
        if self._done <= early and (left if self._done == early else now - self._began) > self._limit:
            raise RaceError(
                f"{time_left}, but the limit is {duration(self._limit)}. Pass fewer --steps or --layers, a "
                "smaller --hidden, --sequence or --batch-size, or a longer --time-limit"
            )
        if now - self._said > _SILENCE:
            self._said = now
            number = min(self._done + 1, self._steps)
            step = f"step {number} of {self._steps} ({self.doing})" if self.doing else "starting"
            self._say(f"{step}, {time_left}")

    def step_ended(self) -> None:
        self._done += 1
        if self._done == self._lanes:
            self._warm = time.monotonic()
        self.tick()


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of names in a round, counted from 0. Each round starts with another name."""
    shift = (number + number // MEASURE_EVERY) % len(names)
    return [*names[shift:], *names[:shift]]


def measures_memory(number: int) -> bool:
    """Return True if memory is measured in a round, counted from 0."""
    return number % MEASURE_EVERY == MEASURE_EVERY - 1


def duration(seconds: float) -> str:
    """Return a time as text, for example ``3:05 min`` or ``42 s``."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02} min"


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the median and quartiles of values. For a single value, all three are equal."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Return the ratio of each round, in which noise that affects the whole round cancels."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def timed_rounds(*lanes: Sequence[Any], measured: Callable[[Any], bool]) -> list[tuple[Any, ...]]:
    """Return the rounds in which no run measured memory. If all rounds measured memory, return all rounds."""
    rounds = list(zip(*lanes, strict=True))
    return [steps for steps in rounds if not any(map(measured, steps))] or rounds


# Processes


@dataclass
class _Lane:
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
            why = " (the system kills processes when memory is full)" if status == -signal.SIGKILL else ""
            raise RaceError(f"{self.name}: the process ended with status {status}{why}") from None
        if not worked:
            raise RaceError(f"{self.name} failed:\n{answer}")
        return answer


@contextlib.contextmanager
def _started(entrants: Mapping[str, Entrant], tick: Callable[[], None]) -> Iterator[dict[str, _Lane]]:
    """Start all processes, wait until all are ready, and end the processes with the block."""
    lanes: dict[str, _Lane] = {}
    patience = 2.0  # a killed process leaves no store files, so an error need not wait longer
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
            raise  # the parent process has ended the comparison
        except BaseException as error:
            is_ours = isinstance(error, TbaError)
            pipe.send((False, f"{type(error).__name__}: {error}" if is_ours else traceback.format_exc()))
            raise
