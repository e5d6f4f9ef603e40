"""Functions that compute the profile of a step from a trace of the step.

Compute times come from the clock of the device. Only the host's clock records when a layer saves and uses an
activation, so the profile holds these two times as fractions of the layer's time on the host.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import accumulate
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.planner.model import (
    Bandwidth,
    Beside,
    LayerKind,
    Saved,
    Slot,
    StepProfile,
    Timing,
    computed_as,
    median_of,
)
from tba_offload.planner.play import layer_under

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tba_offload.capture.trace import ActivationTrace, ScopeTrace, StepTimes, StepTrace
    from tba_offload.planner.model import Plan, Timings
    from tba_offload.report.log import StepRecord
    from tba_offload.store.base import DriveLoad

LayerKey = tuple[int, str]
"""Model chunk and module name of a layer."""

ALIKE = 0.25
"""Largest relative difference in saved bytes between two similar layers. Similar layers also save equal
numbers of activations."""

OFFLOADED, REBUILT, LEARNED_KEEP = "offloaded", "rebuilt", "learned keep"
"""Values of ``treatment`` in an activation trace."""

UNKNOWN = LayerKind((), small_bytes=0, input_bytes=0)
"""Layer kind for layers that were never measured."""

REMEMBERED = 3
"""Number of recent steps whose times are kept. The planner uses the median, so a single slow step has no
effect."""


ASSUMED = Bandwidth(1e9, 1e9, is_assumed=True)
"""Assumed rates of drives, until a transfer is measured."""

EVIDENCE = 32 << 20
"""After this number of transferred bytes, the rates measured in steps replace the rates of a store probe."""


_Size = tuple[int, int]

RunSize = tuple[int, ...]
"""Size of one run of a layer: the number of the layer's forwards without a backward so far, the bytes and the
number of gradients, and the dimensions of the inputs."""


class SeenBeside(NamedTuple):
    """Largest memory use in a step, without saved activations.

    Attributes:
        at_loss: Bytes in use between the last forward and the first backward.
        layers: For each layer, the bytes in use while the layer runs.
    """

    at_loss: int
    layers: Sequence[Beside]


@dataclass(frozen=True)
class StepObservation:
    """Measurements of a finished step, from which the controller plans.

    Attributes:
        trace: The trace of the step.
        stalls: Start and end of each wait of the training thread for I/O.
        loads: Transfers of each drive and of host memory.
        plan: The plan of the step.
        record: The figures of the step in the run log.
        began: Start of the step, by :func:`time.perf_counter`.
        beside: Memory use without saved activations; ``None`` if not measured.
        on_device: Function that returns the times of the step by the device's clock; ``None`` on a CPU.
        not_recomputed: Indices of the layers that must not be recomputed.
    """

    trace: StepTrace
    stalls: Sequence[tuple[float, float]]
    loads: Sequence[DriveLoad]
    plan: Plan
    record: StepRecord
    began: float
    beside: SeenBeside | None = None
    on_device: Callable[[], StepTimes] | None = None
    not_recomputed: frozenset[int] = frozenset()


class _Run(NamedTuple):
    """One run of a layer, with the activations that the layer saved.

    Each interval is a start time and an end time.
    """

    layer: int
    scope: ScopeTrace
    saved: Sequence[ActivationTrace]
    sources: Sequence[ActivationTrace]
    forward: tuple[float, float]
    backward: tuple[float, float]
    host_forward: tuple[float, float]
    host_backward: tuple[float, float]

    @property
    def way(self) -> Placement:
        return Placement(self.scope.placement)

    @property
    def is_captured(self) -> bool:
        """Whether hooks recorded the saved tensors. Layers with ``keep`` run with hooks in one step."""
        return self.way.is_offloaded or (self.way is Placement.KEEP and bool(self.saved))


def profile_of(
    seen: StepObservation, layers: Sequence[LayerKey], before: StepProfile | None, *, nets: bool
) -> StepProfile | None:
    """Return the profile of a step.

    Args:
        seen: The measured step.
        layers: Model chunk and module name of each layer of this process.
        before: Profile of earlier steps of the same size, which the new step updates.
        nets: Whether the profile includes gradient bytes.

    Returns:
        The profile; ``None`` if no layer has run with hooks so far, or if the step ran no backward.
    """
    trace, ended = seen.trace, seen.began + seen.record.seconds
    on_host = trace.host_times(seen.stalls, began=seen.began, ended=ended)
    times = on_host if seen.on_device is None else seen.on_device()
    index = {key: number for number, key in enumerate(layers)}
    saved, sources = _by_scope(trace.activations), _by_scope(trace.sources)
    times_of = zip(trace.whole_scopes(), _intervals(times), _intervals(on_host), strict=True)
    runs = [
        _Run(index[scope.key.chunk, scope.key.name], scope, saved[scope.key], sources[scope.key], *own, *host)
        for scope, own, host in times_of
    ]
    kept = (each.nbytes for each in trace.activations if each.treatment.value not in (OFFLOADED, REBUILT))
    small = (trace.kept_bytes - sum(kept)) // max(sum(run.way.offloads or run.is_captured for run in runs), 1)
    kinds, of_layers = _kinds(runs, _clock(seen.stalls), small, len(layers), before)
    if not (runs and kinds):
        return None
    clock = _clock(times.stalls)
    slots, last = _slots(runs, clock(times.began), seen.record.gradient_peak_bytes if nets else None)
    if before is not None:
        slots = _with_skipped(slots, {slot.layer for slot in before.slots})
    return StepProfile(
        kinds=kinds,
        layers=of_layers,
        timings=_timings(runs, len(kinds), of_layers, before),
        slots=slots,
        tail=max(clock(times.ended) - last, 0.0),
        loss_bytes=0 if before is None else before.loss_bytes,
        headroom=0 if before is None else before.headroom,
    )


# ---- time ----------------------------------------------------------------------------------------


def _clock(stalls: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Return a function that converts wall time to compute time, which excludes waits for I/O."""
    begins = [began for began, _ in stalls]
    waited = [0.0, *accumulate(ended - began for began, ended in stalls)]

    def compute(when: float) -> float:
        number = bisect.bisect_right(begins, when)
        in_last = max(stalls[number - 1][1] - when, 0.0) if number else 0.0
        return when - (waited[number] - in_last)

    return compute


def _intervals(times: StepTimes) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the forward and backward intervals of each layer run, in compute time.

    The backward of a layer ends when any layer starts its forward or backward, or with the backward pass.
    """
    clock = _clock(times.stalls)
    begins = [began for scope in times.scopes for began in (scope.forward_began, scope.backward_began)]
    borders = sorted([*begins, *times.backward_ends])
    found = []
    for scope in times.scopes:
        place = bisect.bisect_right(borders, scope.backward_began)
        end = borders[place] if place < len(borders) else scope.backward_began
        forward = clock(scope.forward_began), clock(scope.forward_ended)
        found.append((forward, (clock(scope.backward_began), clock(end))))
    return found


def _slots(runs: Sequence[_Run], began: float, most_gradients: int | None) -> tuple[tuple[Slot, ...], float]:
    """Return the slots (forwards and backwards of layers) in order, and the end time of the last slot.

    The gradient bytes of a slot are the larger of two counts: at the start of the slot, and at the start of
    the next slot.
    """
    intervals = [(run.forward, run, False) for run in runs] + [(run.backward, run, True) for run in runs]
    intervals.sort(key=lambda interval: interval[0][0])
    begins = [
        run.scope.backward_gradients if backward else run.scope.forward_gradients
        for _, run, backward in intervals
    ]
    ends = [*begins[1:], most_gradients]
    are_counted = None not in begins and most_gradients is not None
    slots, last = [], began
    for ((start, end), run, backward), *pair in zip(intervals, begins, ends, strict=True):
        gradients = max(nbytes or 0 for nbytes in pair) if are_counted else 0
        slots.append(Slot(run.layer, run.scope.key.micro_batch, backward, max(start - last, 0.0), gradients))
        last = end
    return tuple(slots), last


def _with_skipped(slots: Sequence[Slot], layers: set[int]) -> tuple[Slot, ...]:
    """Return the slots of a step, with additional slots for each of ``layers`` that did not run."""
    found = list(slots)
    for missing in sorted(layers - {slot.layer for slot in slots}):
        for micro_batch, backward in sorted({slot[1:3] for slot in slots}):
            own = [place for place, slot in enumerate(found) if slot[1:3] == (micro_batch, backward)]
            later = [place for place in own if (found[place].layer > missing) is not backward]
            place = later[0] if later else own[-1] + 1
            beside = found[min(place, len(found) - 1)].gradients
            found.insert(place, Slot(missing, micro_batch, backward, 0.0, beside))
    return tuple(found)


def _timings(
    runs: Sequence[_Run], count: int, layers: Sequence[int], before: StepProfile | None
) -> tuple[Timings, ...]:
    """Return the times of each layer kind and placement in the last steps, including this step."""
    found: defaultdict[tuple[int, Placement], list[Timing]] = defaultdict(list)
    for run in runs:
        timing = Timing(run.forward[1] - run.forward[0], run.backward[1] - run.backward[0])
        found[layers[run.layer], computed_as(run.way)].append(timing)
    renewed: list[Timings] = [{} for _ in range(count)]
    if before is not None:
        for layer, kind in reversed(list(enumerate(layers))):  # the first layer of a kind sets the figures
            renewed[kind] = dict(before.timings[before.layers[layer]])
    for (kind, way), timings in found.items():
        renewed[kind][way] = (*renewed[kind].get(way, ()), median_of(tuple(timings)))[-REMEMBERED:]
    some = next(known for known in renewed if known)
    return tuple(known or dict(some) for known in renewed)


# ---- memory --------------------------------------------------------------------------------------


def _kinds(
    runs: Sequence[_Run],
    clock: Callable[[float], float],
    small: int,
    count: int,
    before: StepProfile | None,
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Return the layer kinds, and the index of each layer's kind.

    A layer that ran without hooks keeps the kind from earlier steps, or gets the most frequent kind.
    """
    groups: dict[_Size, list[_Run]] = {}
    sizes: dict[int, _Size] = {}
    for run in runs:
        if run.is_captured:
            own = len(run.saved), sum(each.nbytes for each in run.saved)
            size = sizes[run.layer] = _alike(own, groups)
            groups.setdefault(size, []).append(run)
    kinds = {size: _kind(group, clock, small, before) for size, group in groups.items()}
    if not kinds and before is None:
        return (), ()
    usual = kinds[statistics.mode(sizes[layer] for layer in sorted(sizes))] if kinds else UNKNOWN
    for layer in (layer for layer in range(count) if layer not in sizes):
        known = usual if before is None else before.kind_of(layer)
        size = sizes[layer] = _alike((len(known.activations), known.nbytes), kinds)
        kinds.setdefault(size, known)
    for run in runs:
        if run.way is Placement.RECOMPUTE_EXCEPT_ATTENTION:
            size, attention = sizes[run.layer], run.scope.attention_bytes
            kinds[size] = dataclasses.replace(kinds[size], attention_bytes=attention)
    numbers = {size: number for number, size in enumerate(kinds)}
    return tuple(kinds.values()), tuple(numbers[sizes[layer]] for layer in range(count))


def _by_scope(activations: Sequence[ActivationTrace]) -> defaultdict[object, list[ActivationTrace]]:
    found: defaultdict[object, list[ActivationTrace]] = defaultdict(list)
    for activation in activations:
        found[activation.key.scope].append(activation)
    return found


def _alike(size: _Size, sizes: Iterable[_Size]) -> _Size:
    for other in sizes:
        if other[0] == size[0] and abs(other[1] - size[1]) <= ALIKE * max(other[1], size[1]):
            return other
    return size


def _kind(
    runs: Sequence[_Run], clock: Callable[[float], float], small: int, before: StepProfile | None
) -> LayerKind:
    columns = list(zip(*(run.saved for run in runs), strict=True))
    old = UNKNOWN if before is None else before.kind_of(runs[0].layer)
    known = old.activations if len(old.activations) == len(columns) else [None] * len(columns)
    sources = old.sources
    for run in runs:
        if run.way.rebuilds:
            sources = tuple(_saved([run], [each], None, clock) for each in run.sources)
    return dataclasses.replace(
        old,
        activations=tuple(_saved(runs, *pair, clock) for pair in zip(columns, known, strict=True)),
        small_bytes=small,
        input_bytes=max(run.scope.input_bytes for run in runs),
        sources=sources,
    )


def _saved(
    runs: Sequence[_Run],
    column: Sequence[ActivationTrace],
    known: Saved | None,
    clock: Callable[[float], float],
) -> Saved:
    """Return the figures of one activation, as medians over the runs of similar layers.

    Figures that were not measured in the step come from ``known``.
    """
    pairs = list(zip(runs, column, strict=True))
    saved_at = statistics.median(_fraction(clock(each.packed_at), run.host_forward) for run, each in pairs)
    # If other activations are rebuilt from this activation, backward may need it before its own use.
    until = [
        _fraction(clock(each.unpacked_at), run.host_backward)
        for run, each in pairs
        if each.unpacked_at is not None and not run.way.rebuilds
    ]
    used = 1.0 - saved_at if known is None else known.until  # backward uses the last saved activation first
    moving = (each.nbytes for each in column if each.treatment.value != LEARNED_KEEP)
    treatments = [each.treatment.value for run, each in pairs if run.way.rebuilds]
    rebuilt = all(treatment == REBUILT for treatment in treatments) if treatments else known and known.rebuilt
    return Saved(max(moving, default=0), saved_at, statistics.median(until) if until else used, rebuilt)


def _fraction(when: float, interval: tuple[float, float]) -> float:
    began, ended = interval
    return min(max((when - began) / (ended - began), 0.0), 1.0) if ended > began else 0.0


def with_beside(profile: StepProfile, seen: SeenBeside, placements: Sequence[Placement]) -> StepProfile:
    """Return the profile with the measured memory other than activations, for each kind of layer.

    Because the simulator adds the bytes that a layer keeps or recomputes, this function subtracts these bytes
    from the measurement.
    """
    found: dict[int, Beside] = {}
    for layer, (way, beside) in enumerate(zip(placements, seen.layers, strict=True)):
        if any(beside):
            number = profile.layers[layer]
            own = layer_under(profile, number, way)
            again = own.again or max((saved.nbytes for saved in own.rebuilt), default=0)
            look = Beside(*(max(a - b, 0) for a, b in zip(beside, (own.left, again, again), strict=True)))
            # With all activations in memory, other memory at the peak is smaller.
            if computed_as(way).is_offloaded:
                look = look._replace(whole=min(look.whole, look.backward))
            found[number] = look.at_least(found.get(number, Beside()))
    kinds = (
        dataclasses.replace(kind, beside=found.get(number, kind.beside))
        for number, kind in enumerate(profile.kinds)
    )
    return dataclasses.replace(profile, kinds=tuple(kinds), loss_bytes=seen.at_loss)


# ---- rates and sizes, from step to step ----------------------------------------------------------


class Rates:
    """Rates of drives and of host memory, from the transfers of the last three steps.

    Attributes:
        floor: Write and read rates that a probe of the store measured, in bytes per second; ``None`` without
            a probe. Until steps have transferred :data:`EVIDENCE` bytes, a measured rate below the probed
            rate is not used. The probe measures the tier (drives or host memory) that gets writes first.
    """

    def __init__(self) -> None:
        self.floor: Sequence[float] | None = None
        self.forget()

    def forget(self) -> None:
        """Discard all measurements, except the rates of the probe."""
        self._drives, self._host = _TierRates(), _TierRates()
        self._order: list[str] = []
        self._fell_back = False

    def note(self, loads: Sequence[DriveLoad], *, fell_back: bool) -> None:
        """Add the transfers of a step.

        Pass ``fell_back=True`` if activations stayed in memory because the store was full, failed or was too
        slow. Pass ``fell_back=True`` also if the policy keeps all layers.
        """
        self._fell_back |= fell_back
        self._order = [load.tier for load in loads]
        for name, tier in (("drive", self._drives), ("host", self._host)):
            tier.note([load for load in loads if load.tier == name and load.in_service])

    def bandwidth(self) -> Bandwidth | None:
        """Return the median rates of the last three steps; ``None`` if no rate was measured or probed.

        If no rate is known because activations stayed in memory, the returned capacity is 0.
        """
        host_first = self._order[:1] == ["host"]
        drives = self._drives.bandwidth(None if host_first else self.floor)
        host = self._host.bandwidth(self.floor if host_first else None)
        if drives is None and host is None:
            return dataclasses.replace(ASSUMED, capacity=0) if self._fell_back else None
        # No step may have needed the second tier. Host memory is at least as fast as drives.
        drives = drives or dataclasses.replace(ASSUMED, capacity=self._drives.room)
        if "host" in self._order:
            host = host or dataclasses.replace(drives, capacity=self._host.room, is_assumed=True)
        return dataclasses.replace(drives, host=host, host_first=host_first)


class _TierRates:
    def __init__(self) -> None:
        self._steps: tuple[deque[tuple[float, float]], ...] = deque(maxlen=3), deque(maxlen=3)
        self._moved = [0, 0]
        self.room: int | None = None

    def note(self, serving: Sequence[DriveLoad]) -> None:
        rooms = [load.room for load in serving]
        self.room = None if None in rooms else sum(room or 0 for room in rooms)
        for number, parts in enumerate(([load.write for load in serving], [load.read for load in serving])):
            rates = [part.nbytes / part.seconds for part in parts if part.nbytes > 0 and part.seconds > 0]
            nbytes, steps = sum(part.nbytes for part in parts), self._steps[number]
            # A few small transfers measure latency, not bandwidth.
            if rates and nbytes >= min(EVIDENCE, max((most for _, most in steps), default=0) / 2):
                steps.append((sum(rates), nbytes))
                self._moved[number] += nbytes

    def bandwidth(self, floor: Sequence[float] | None) -> Bandwidth | None:
        found: list[float | None] = []
        for number, steps in enumerate(self._steps):
            rate = statistics.median(rate for rate, _ in steps) if steps else None
            if floor is not None and self._moved[number] < EVIDENCE:
                rate = max(rate or 0.0, floor[number])
            found.append(rate)
        write, read = found
        return None if write is None else Bandwidth(write, read or write, capacity=self.room)


class Sizes:
    """Sizes of a session's steps. The controller makes plans for the largest step.

    A step is larger than the earlier steps in three cases: more layers run, an input of a layer has a larger
    dimension, or more runs of a layer wait for backward.

    Attributes:
        is_largest: Whether the last step was as large as the largest step so far.
    """

    def __init__(self) -> None:
        self._planned: dict[int, set[RunSize]] = {}
        self._most_runs = 0
        self.is_largest = True
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the runs of the last step."""
        self._seen: defaultdict[int, set[RunSize]] = defaultdict(set)
        self._runs = 0
        self._has_grown = False

    def note(self, layer: int, size: RunSize) -> bool:
        """Add a run of a layer before the run starts.

        Return True if the step so far is not larger than planned.
        """
        self._runs += 1
        self._seen[layer].add(size)
        if self._runs > self._most_runs or not _is_within(size, self._planned.get(layer, ())):
            self._has_grown = True
        return not self._has_grown

    def end_step(self) -> bool:
        """Return True if the step was larger than planned, and plan for its size from now on."""
        seen = set().union(*self._seen.values())
        planned = set().union(*(self._planned.get(layer, set()) for layer in self._seen))
        self.is_largest = self._has_grown or (
            self._runs >= self._most_runs and all(_is_within(size, seen) for size in planned)
        )
        if self._has_grown:
            for layer, sizes in self._seen.items():
                known = self._planned.get(layer, set()) | sizes
                self._planned[layer] = {size for size in known if not _is_within(size, known - {size})}
            self._most_runs = max(self._most_runs, self._runs)
        return self._has_grown


def _is_within(size: RunSize, others: Iterable[RunSize]) -> bool:
    return any(len(size) == len(other) and all(map(le, size, other)) for other in others)


def rough_bytes(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to five significant binary digits."""
    coarse = max(nbytes.bit_length() - 5, 0)
    return -(-nbytes >> coarse) << coarse
