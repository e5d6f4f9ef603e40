"""One step over time, for a timeline: memory and traffic as they were, and when layers ran.

A few steps are recorded without being asked for, and those that a user asks for: there are as many points as
the meter takes samples anyway, and a line for each call that moves bytes.
"""

from __future__ import annotations

import time
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tba_offload.capture.trace import ScopeTrace, StepTrace
    from tba_offload.device.memory import MemoryMeter
    from tba_offload.plan.model import Limits
    from tba_offload.session.memory_watch import MemoryWatch
    from tba_offload.session.step import Step
    from tba_offload.states import OptimizerStates
    from tba_offload.store.base import ActivationStore, Moved
    from tba_offload.transfer.offloader import Offloader
    from tba_offload.weights import WeightsTraffic

_STATES, _WEIGHTS = "optimizer states", "frozen weights"

_FIRST = 3
"""Number of the first step that is recorded: states exist, and drives are warm."""

_POINTS = 300
"""Points of a curve: a picture has some 600 columns. There are up to four times as many where a step takes
more samples than the one before it did; each takes some 10 us of processor time until it is in the log."""

_MOST_SCOPES = 20_000
"""Runs of layers of a step that is told: a line of some MiB."""

_MOST_MOVES = 20_000
"""Calls that moved bytes of a step that is told, or pairs of them, and so on: as much again."""


Point = tuple[float, int, int, int, int, int, int, int]
"""Memory and traffic at one moment. It is a plain tuple, because one is made for each sample:

1. when, by :func:`time.perf_counter`;
2. live bytes, without gradients;
3. bytes in flight;
4. those of them that were read ahead;
5. bytes written since the step began;
6. bytes read since then;
7. bytes that the offloader keeps outside of its window: backward uses them, or no drive took them;
8. bytes that layers have left in memory beside that, and that wait for backward.
"""

_LIVE = 1
"""Place of the live bytes."""


class StepCurve:
    """Records memory and traffic of some steps.

    Args:
        offloader: Knows what travels.
        store: Tells what its drives move.
        watch: Knows what layers leave in memory.
        states: States of optimizers that travel too, in stores of their own; more may come.
        weights: What frozen weights move, likewise.
    """

    def __init__(
        self,
        offloader: Offloader,
        store: ActivationStore,
        watch: MemoryWatch,
        states: Sequence[OptimizerStates],
        weights: WeightsTraffic,
    ) -> None:
        self._ledger = offloader.ledger
        self._movers = _Movers(store, states, weights)
        self._watch = watch
        self._is_on = False
        self._points: list[Point] = []
        self._moves: dict[str, list[Moved]] = {}  # by what they moved
        self._highest: Point | None = None  # of those that become the next point
        self._samples = 0  # in this step
        self._each = 1
        self._source = ""
        self._was_on = False

    def begin_step(self, meter: MemoryMeter | None, number: int, *, wanted: bool = False) -> None:
        """Record that a step begins.

        Args:
            meter: Its meter; without one there is no memory to record.
            number: How many ended before it.
            wanted: Whether a user asks for it.
        """
        self.stop()
        self._points, self._highest = [], None
        self._each, self._samples = self._samples // _POINTS + 1, 0
        self._moves = {"": [], _STATES: [], _WEIGHTS: []}
        self._is_on = self._was_on = wanted or (meter is not None and _is_due(number + 1))
        self._source = meter.source if meter is not None else ""
        if self._is_on:
            self._movers.tell({what: moves.append for what, moves in self._moves.items()})

    def seen(self, live: int, _aside: int) -> None:
        """Record that the meter has seen ``live`` bytes in use.

        Of several moments the one with most of them stays.
        """
        self._samples += 1
        if not self._is_on:
            return
        ledger, highest = self._ledger, self._highest
        if highest is None or live > highest[_LIVE]:
            stats = ledger.stats
            self._highest = (
                time.perf_counter(),
                live,
                ledger.in_flight,
                ledger.read_ahead,
                stats.offloaded,
                stats.read,
                ledger.settled,
                self._watch.runs.all_left,
            )
        if self._samples % self._each == 0:
            self._keep()

    def _keep(self) -> None:
        if self._highest is not None:
            self._points.append(self._highest)
        self._highest = None
        if len(self._points) >= 4 * _POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [max(pair, key=itemgetter(_LIVE)) for pair in pairs]
            self._each *= 2

    def stop(self) -> None:
        """Nothing is recorded any more."""
        if self._is_on:
            self._is_on = False
            self._movers.tell({})

    def figures(
        self,
        step: Step,
        trace: StepTrace,
        waits: Sequence[tuple[float, float]],
        names: Sequence[str],
        limits: Limits,
    ) -> dict[str, object] | None:
        """All of it, for the run log; ``None`` of a step that was not recorded.

        Args:
            step: The step, which has ended.
            trace: What ran.
            waits: When training waited for I/O: from, until.
            names: Module names of the layers.
            limits: Budget and window.
        """
        if not self._was_on or len(trace.scopes) > _MOST_SCOPES:
            return None
        began, base = step.began, step.memory.base_bytes or 0
        index = {name: number for number, name in enumerate(names)}

        def at(seconds: float | None) -> float | None:
            return None if seconds is None else round(max(seconds - began, 0.0), 6)

        moves = self._moves_since(began)
        drives = sorted({(what, move.drive, move.place) for what, move in moves})
        number_of: dict[int, int] = {}  # of I/O threads, in the order in which each first moved bytes
        return {
            "source": self._source,
            "names": list(names),
            "scopes": [
                [index[scope.key.name], scope.key.micro_batch, *map(at, _times(scope))]
                for scope in trace.scopes
                if scope.key.name in index
            ],
            "backward_ends": [at(seconds) for seconds in trace.backward_ends],
            "layers_left": [at(seconds) for seconds in trace.layers_left],
            "updates": [[at(since), at(until)] for since, until in step.updates.times(trace.backward_ends)],
            "stalls": [[at(since), at(until)] for since, until in waits[:_MOST_SCOPES]],
            "budget": limits.budget,
            "window": limits.window,
            "points": [
                # Other threads change the sums, so that one may be negative for a moment.
                [at(seconds), *[max(0, nbytes) for nbytes in (live - base, *others)]]
                for seconds, live, *others in list(self._points)
            ],
            "drives": [[drive, place, what] for what, drive, place in drives],
            "moves": [
                [
                    drives.index((what, move.drive, move.place)),
                    move.writes,
                    at(move.began),
                    at(move.ended),
                    move.nbytes,
                    number_of.setdefault(move.thread, len(number_of)),
                ]
                for what, move in moves
            ],
        }

    def _moves_since(self, began: float) -> list[tuple[str, Moved]]:
        """Return the calls that moved bytes, each with what it moved."""
        moves = (
            (what, move)
            for what, seen in self._moves.items()
            for move in _few([move for move in list(seen) if move.began >= began])
        )
        return sorted(moves, key=lambda each: each[1].began)


class _Movers(NamedTuple):
    """What tells of the calls that move bytes."""

    store: ActivationStore
    states: Sequence[OptimizerStates]
    weights: WeightsTraffic

    def tell(self, seen: Mapping[str, Callable[[Moved], object]]) -> None:
        """Have functions told, by what they move; others are told no more."""
        self.store.watch_moves(seen.get(""))
        for states in self.states:
            states.watch_moves(seen.get(_STATES))
        self.weights.watch_moves(seen.get(_WEIGHTS))


def _few(moves: list[Moved]) -> list[Moved]:
    """Return the calls, or where they are too many, pairs of those that follow each other on a thread."""
    while len(moves) > _MOST_MOVES:
        waiting: dict[tuple[int, bool, int], Moved] = {}
        paired: list[Moved] = []
        for move in moves:
            key = move.drive, move.writes, move.thread
            first = waiting.pop(key, None)
            if first is None:
                waiting[key] = move
            else:
                paired.append(first._replace(ended=move.ended, nbytes=first.nbytes + move.nbytes))
        moves = paired + list(waiting.values())
    return sorted(moves, key=attrgetter("began"))


def _times(scope: ScopeTrace) -> tuple[float | None, ...]:
    return scope.forward_began, scope.forward_ended, scope.backward_began


def _is_due(number: int) -> bool:
    """Return the third step, and from the 16th on each whose number is a power of four."""
    return number == _FIRST or (number >= 16 and number.bit_count() == 1 and number.bit_length() % 2 == 1)
