"""How far a race is: the time of its first step, when it is going to end, and that it is still alive."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from tba_lab.demo.race import Watch
from tba_offload.errors import TbaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SILENCE = 5.0
"""Seconds without a line after which there is one. Ten are promised; the rest is for a busy machine."""

_TICK = 1.0
"""Seconds between two looks at whether something is to be said."""

_COLD = 3.0
"""Factor that the first step of a process takes longer by at most, where steps take a second or more: it
allocates everything. Measured: 1.1 to 3 times."""


class TooLongError(TbaError, RuntimeError):
    """A run would take longer than its limit; says which options make it shorter or the limit longer."""


@dataclass(frozen=True)
class PlannedStep:
    """A step that a race is going to run.

    Attributes:
        name: The process that runs it, as it is called in messages.
        cost: How long it is expected to take, in a unit that is the same for all steps.
        opens: Whether it is the first of a race, so that processes start before it.
    """

    name: str
    cost: float
    opens: bool = False


class Pace:
    """Measures steps while they run and says how long the others are going to take.

    Args:
        steps: All steps, in their order.
        clock: Seconds.
    """

    def __init__(
        self, steps: Sequence[PlannedStep] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps, self._clock = steps, clock
        self.done = 0
        self._cold: list[tuple[float, float]] = []
        self._warm: list[tuple[float, float]] = []
        self._starts: list[float] = []
        self._changed = clock()
        self.is_running = False

    def begin(self) -> None:
        """Record that a step begins."""
        began = self._clock()
        if self.current.opens:
            self._starts.append(began - self._changed)
        self._changed, self.is_running = began, True

    def end(self) -> float:
        """Return the step has ended; the seconds that it took."""
        seconds, self.is_running = self.running, False
        (self._cold if self._is_cold else self._warm).append((seconds, self.current.cost))
        self._changed += seconds
        self.done += 1
        return seconds

    @property
    def current(self) -> PlannedStep:
        """The step that runs, or comes next."""
        return self.steps[self.done]

    @property
    def running(self) -> float:
        """Seconds since the step began that runs; 0 between steps."""
        return self._clock() - self._changed if self.is_running else 0.0

    @property
    def is_warm(self) -> bool:
        """Whether a process has run a second step, so that :attr:`eta` is more than an upper bound."""
        return bool(self._warm)

    @property
    def eta(self) -> float | None:
        """Seconds until all steps have ended; ``None`` before the first has."""
        known = self._warm or self._cold
        if not known:
            return None
        starts = sum(step.opens for step in self._ahead) * sum(self._starts) / max(len(self._starts), 1)
        return max(self._cost_ahead * _rate(known) + starts - self.running, 0.0)

    @property
    def least(self) -> float:
        """Seconds that are left even if a first step takes :data:`_COLD` times as long as later ones.

        A step that runs tells something too: it takes at least as long as it already has. It is one of those
        that are known, or a single step that a busy machine holds up would speak for all.
        """
        rate = _rate(self._warm) if self._warm else _rate(self._cold) / _COLD
        if self.is_running:
            now = self.running, self.current.cost
            with_it = _rate([*self._cold, now]) / _COLD if self._is_cold else _rate([*self._warm, now])
            rate = max(rate, with_it)
        return max(self._cost_ahead * rate - self.running, 0.0)

    @property
    def is_early(self) -> bool:
        """Whether so little is done that stopping loses next to nothing: two steps of each process."""
        return self.done < 2 * len({step.name for step in self.steps})

    @property
    def _ahead(self) -> Sequence[PlannedStep]:
        return self.steps[self.done :]

    @property
    def _cost_ahead(self) -> float:
        return sum(step.cost for step in self._ahead)

    @property
    def _is_cold(self) -> bool:
        """Whether the current step is the first of its process."""
        return all(step.name != self.current.name for step in self.steps[: self.done])


def _rate(known: Sequence[tuple[float, float]]) -> float:
    """Seconds for each unit of cost."""
    return sum(seconds for seconds, _ in known) / sum(cost for _, cost in known) if known else 0.0


class Progress(Watch):
    """Says how far a race is, in lines.

    Args:
        say: Prints one line.
        time_limit: Seconds; a race that is going to take longer is stopped.
        remedy: What makes it shorter, for the error.
        clock: Seconds.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        *,
        time_limit: float = math.inf,
        remedy: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.time_limit = time_limit
        self._say, self._remedy, self._clock = say, remedy, clock
        self._lock = threading.Lock()
        self.pace = Pace(clock=clock)
        self._phase, self._since = "", clock()
        self._said = clock()

    def plan(self, steps: Sequence[PlannedStep]) -> None:
        """Step that are going to be run."""
        self.pace = Pace(steps, self._clock)

    def phase(self, what: str) -> None:
        """Says what is going on now."""
        with self._lock:
            self._phase, self._since = what, self._clock()
            self._tell(what)

    def begin(self) -> None:
        """Record that a step begins."""
        with self._lock:
            if self.pace.steps:
                self._phase = ""
                self.pace.begin()

    def wait(self) -> None:
        """Record that a process works.

        Raises:
            TooLongError: What is left takes longer than the limit.
        """
        if self.pace.is_early and self.pace.least > self.time_limit:
            raise TooLongError(
                f"the {len(self.pace.steps) - self.pace.done} steps that are left would take "
                f"{duration(self.pace.least)} or more, which is longer than {duration(self.time_limit)}: "
                f"{self._remedy}"
            )

    def end(self) -> None:
        """Record that a step has ended.

        Raises:
            TooLongError: What is left takes longer than the limit.
        """
        if not self.pace.steps:
            return
        with self._lock:
            name, seconds = self.pace.current.name, self.pace.end()
            if self.pace.done == 1:
                self._tell(f"{self._where(1)} ({name}) took {seconds:.2f} s; {self._left()}")
            if self.pace.done == len(self.pace.steps):
                self._tell(f"{self.pace.done} steps done")
        self.wait()
        self.tick()

    def tick(self) -> None:
        """Says how far it is unless something was said a short while ago."""
        with self._lock:
            if self._clock() - self._said >= SILENCE:
                self._tell(self.status())

    def status(self) -> str:
        """Return what goes on now, how long already, and how long it will."""
        if self._phase:
            return f"{self._phase}: {self._clock() - self._since:.0f} s so far"
        pace = self.pace
        if pace.done == len(pace.steps):
            return "the processes are ending"
        if not pace.is_running:
            return f"{pace.done} of {len(pace.steps)} steps done; {self._left()}"
        line = f"{self._where(pace.done + 1)} ({pace.current.name})"
        if pace.running >= SILENCE:
            line += f" has taken {pace.running:.0f} s so far"
        return f"{line}; {self._left()}"

    @contextlib.contextmanager
    def alive(self) -> Iterator[Progress]:
        """Inside the block a thread sees to it that there is never a long silence."""
        over = threading.Event()
        thread = threading.Thread(target=self._tick_until, args=(over,), name="tba-progress", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()

    def _tick_until(self, over: threading.Event) -> None:
        while not over.wait(_TICK):
            self.tick()

    def _tell(self, line: str) -> None:
        self._said = self._clock()
        self._say(line)

    def _where(self, number: int) -> str:
        return f"step {number} of {len(self.pace.steps)}"

    def _left(self) -> str:
        eta = self.pace.eta
        if eta is None:
            return "the first step tells how long it takes"
        if self.pace.is_warm:
            return f"about {duration(eta)} to go"
        return f"{duration(self.pace.least)} to {duration(eta)} to go"


class BarProgress(Progress):
    """The same on a terminal: phases and the first step as lines, what changes below them in a bar.

    Args:
        bar: Where it is drawn.
        limits: As for :class:`Progress`.
    """

    def __init__(self, bar: RichProgress, **limits: Any) -> None:
        super().__init__(bar.console.print, **limits)
        self._bar, self._task = bar, bar.add_task("", total=None)

    def tick(self) -> None:
        """Brings the bar up to date."""
        with self._lock:
            steps = len(self.pace.steps)
            self._bar.update(
                self._task, description=self.status(), completed=self.pace.done, total=steps or None
            )


@contextlib.contextmanager
def shown(**limits: Any) -> Iterator[Progress]:
    """Progress on stderr while the block runs: a bar on a terminal, lines elsewhere.

    Args:
        limits: ``time_limit`` and ``remedy`` of :class:`Progress`; none by default.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        with Progress(console.print, **limits).alive() as progress:
            yield progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        RichProgress(*columns, console=console, transient=True) as bar,
        BarProgress(bar, **limits).alive() as progress,
    ):
        yield progress


def duration(seconds: float) -> str:
    """Minutes and seconds, such as ``3:05 min``; less than a minute in seconds."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"
