"""Compares strategies fairly on a noisy machine: each in a process of its own, step by step in turn.

A process of its own means that each strategy has its own model, optimizer, random state, data position,
heap and peak of resident memory. Alternating single steps means that whatever else the machine does hits
all of them alike, so that ratios of one round hold where absolute times do not.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import statistics
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tba_offload.errors import TbaError

MEASURE_EVERY = 4
"""Memory is measured in every fourth round."""

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess


class RaceError(TbaError, RuntimeError):
    """A process of a race failed; the message holds its traceback, or a named error of ours."""


class Runner(Protocol):
    """What an entrant does in its process."""

    def step(self) -> dict[str, Any]:
        """Do one training step and return its figures; they travel back to the race."""

    def close(self) -> None:
        """End it."""


class Watch:
    """Is told how far a race is. This one does nothing."""

    def phase(self, what: str) -> None:
        """Something other than a step begins, such as ``drawing the curve``."""

    def begin(self) -> None:
        """Record that a step begins."""

    def wait(self) -> None:
        """Take the call about once a second while a process works; what it raises stops the race."""

    def end(self) -> None:
        """Record that the step has ended; what it raises stops the race."""


_WAIT_SECONDS = 1.0
"""Between two calls of :meth:`Watch.wait`."""

_CLOSING_SECONDS = 20.0
"""Seconds that a process may take to end."""

_BUSY_SECONDS = 2.0
"""The same if the race ends while it is in a step, which may be a long one: its store leaves nothing behind
when it is killed."""


@dataclass(frozen=True)
class Entrant:
    """One strategy.

    Attributes:
        make: Called in the entrant's process with ``arguments``; a function that can be imported.
        arguments: Plain data.
        environment: Variables of the process, such as settings of the allocator.
    """

    make: Callable[..., Runner]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


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


_UNSURE = 0.05
"""Probability that the true median lies outside of its interval."""


def measures_memory(round_: int) -> bool:
    """Whether memory is measured in a round, counted from 0.

    Its time then says little: on a CPU the sampling takes part of a core from the computation.
    """
    return round_ % MEASURE_EVERY == MEASURE_EVERY - 1


def timed_rounds(
    *lanes: Sequence[Mapping[str, Any]], warm_up: int, peak: str
) -> list[tuple[Mapping[str, Any], ...]]:
    """Return the rounds after the warm-up whose time counts: those in which no lane measured memory.

    A planner has it measured in rounds of its own. If that leaves none, those count in which all lanes did.

    Args:
        lanes: The figures of the steps of each.
        warm_up: Rounds that are left out.
        peak: The figure that is ``None`` where memory was not measured.

    Returns:
        For each round, its step of each lane.
    """
    rounds = list(zip(*(steps[warm_up:] for steps in lanes), strict=True))
    for measured in (0, len(lanes)):
        if found := [steps for steps in rounds if sum(step[peak] is not None for step in steps) == measured]:
            return found
    return rounds


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median.

    From one of the values to another, whatever their distribution is.

    Each value is above the true median with probability 1/2, so that the binomial distribution tells between
    which of the sorted values it lies (the sign test). Of fewer than six values it is all of their range.
    """
    ordered, count = sorted(values), len(values)
    below, outside = 0, 2 / 2**count
    while outside <= _UNSURE and below < (count - 1) // 2:
        below += 1
        outside += 2 * math.comb(count, below) / 2**count
    first = max(below - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Return the ratio round by round: what the machine did in a round cancels out."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def ratio_of(rounds: Sequence[tuple[Mapping[str, Any], ...]], seconds: str) -> Spread:
    """Return the paired ratio of the first lane's times to the second's, in rounds that count.

    Args:
        rounds: What :func:`timed_rounds` gave for two lanes.
        seconds: The figure that is the time.
    """
    ours, others = ([step[lane][seconds] for step in rounds] for lane in range(2))
    return paired_ratio(ours, others)


def prediction_error(steps: Sequence[Mapping[str, Any]], predicted: str, measured: str) -> float | None:
    """By how much more was predicted than measured, as a share: the median of the steps that have both.

    Each step is held against what was predicted before it: a planner corrects that as the machine changes.

    Args:
        steps: The figures of each.
        predicted: The figure that was predicted.
        measured: The figure that it is of.
    """
    known = [step for step in steps if step[predicted] is not None and step[measured] is not None]
    return statistics.median(step[predicted] / step[measured] - 1 for step in known) if known else None


def turns(names: Sequence[str], round_: int) -> list[str]:
    """Return the order of a round, counted from 0: each starts with another one.

    Rounds that measure memory do not all start with the same one either.
    """
    shift = (round_ + round_ // MEASURE_EVERY) % len(names)
    return [*names[shift:], *names[:shift]]


def race(
    entrants: Mapping[str, Entrant], rounds: int, *, watch: Watch | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Run ``rounds`` steps of every entrant, alternating, each round starting with another one.

    Args:
        entrants: Name → entrant.
        rounds: Steps of each.
        watch: Told of every single step, for progress lines.

    Returns:
        Name → the figures of its steps, in order.

    Raises:
        RaceError: An entrant failed.
    """
    watch = watch or Watch()
    names = list(entrants)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with _started(entrants, watch) as lanes:
        for round_ in range(rounds):
            for name in turns(names, round_):
                watch.begin()
                results[name].append(lanes[name].ask("step"))
                watch.end()
        for name in names:
            lanes[name].ask("close")
    return results


@dataclass
class _Lane:
    """The process of one entrant, seen from the race."""

    name: str
    process: BaseProcess
    pipe: Connection
    watch: Watch
    is_busy: bool = True
    """Whether an answer is due; the first one is that it is ready."""

    def ask(self, what: str) -> Any:
        try:
            self.is_busy = True
            self.pipe.send(what)
            return self.answer()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self.ended() from None

    def ended(self) -> RaceError:
        """Return that its process has ended, which it should not have."""
        self.process.join(timeout=10)
        status = self.process.exitcode
        killed = "; so the system ends what takes too much memory" if status == -signal.SIGKILL else ""
        return RaceError(f"{self.name}: its process ended with status {status}{killed}")

    def answer(self) -> Any:
        while not self.pipe.poll(_WAIT_SECONDS):
            self.watch.wait()
        worked, answer = self.pipe.recv()
        self.is_busy = False
        if not worked:
            raise RaceError(f"{self.name} failed:\n{answer}")
        return answer


@contextlib.contextmanager
def _started(entrants: Mapping[str, Entrant], watch: Watch) -> Iterator[dict[str, _Lane]]:
    """Start all processes at once and wait until each is ready; none outlives the block."""
    lanes: dict[str, _Lane] = {}
    try:
        for name, entrant in entrants.items():
            lanes[name] = _start(name, entrant, watch)
        for lane in lanes.values():
            try:
                lane.answer()
            except EOFError:
                raise lane.ended() from None
        yield lanes
    finally:
        for lane in lanes.values():
            lane.pipe.close()
        for lane in lanes.values():
            lane.process.join(timeout=_BUSY_SECONDS if lane.is_busy else _CLOSING_SECONDS)
            if lane.process.is_alive():
                lane.process.kill()
                lane.process.join()


def _start(name: str, entrant: Entrant, watch: Watch) -> _Lane:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_lane, args=(entrant, theirs), name=f"tba-{name}", daemon=True)
    with _environment(entrant.environment):
        process.start()
    theirs.close()
    return _Lane(name, process, ours, watch)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a child that is started inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_lane(entrant: Entrant, pipe: Connection) -> None:
    """Record that the process of an entrant.

    Makes its runner, then does as it is told until the pipe closes.
    """
    runner: Runner | None = None
    try:
        runner = entrant.make(**entrant.arguments)
        pipe.send((True, None))
        while pipe.recv() == "step":
            pipe.send((True, runner.step()))
        ending, runner = runner, None
        ending.close()
        pipe.send((True, None))
    except EOFError:
        pass  # the race is over, for whatever reason
    except BaseException as error:
        says_all = isinstance(error, TbaError)
        with contextlib.suppress(BrokenPipeError):
            pipe.send((False, f"{type(error).__name__}: {error}" if says_all else traceback.format_exc()))
        raise
    finally:
        if runner is not None:
            runner.close()
