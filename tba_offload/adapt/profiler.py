"""Makes a profile for the planner from what a step has recorded.

How long things took is read on the clock of what did them: on a device that runs behind the host, the
device's. Where in its layer an activation was saved and used is a share of the time that the host took to
give the layer's work: the device is not asked for each of them, and what counts is their order.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.capture.trace import Treatment
from tba_offload.config.policy import Placement
from tba_offload.plan.profile import LayerKind, Saved, Slot, StepProfile, Timing, computed_as, median_of
from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tba_offload.capture.scope import ScopeKey
    from tba_offload.capture.trace import ActivationTrace, ScopeTrace, StepTimes, StepTrace
    from tba_offload.plan.profile import Samples
    from tba_offload.plan.tuning import Tuning

LayerKey = tuple[int, str]
"""Model chunk and module name of a layer."""


class ComputeClock:
    """Seconds of compute: time on some clock less the time that compute waited for I/O.

    Args:
        stalls: When it waited, on that clock: from, until; in order.
    """

    def __init__(self, stalls: Sequence[tuple[float, float]]) -> None:
        self._began = [began for began, _ in stalls]
        self._lengths = [ended - began for began, ended in stalls]
        self._before = [0.0, *accumulate(self._lengths)]

    def __call__(self, when: float) -> float:
        """Return what this clock said at a time on the other one."""
        number = bisect.bisect_right(self._began, when)
        waited = self._before[number]
        if number:  # perhaps in the middle of the last one
            waited -= max(self._lengths[number - 1] - (when - self._began[number - 1]), 0.0)
        return when - waited


class _Stretches(NamedTuple):
    """From when to when a scope ran forward and backward, on a compute clock."""

    forward: tuple[float, float]
    backward: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Run:
    """One execution of a layer with its times on the compute clocks.

    Attributes:
        layer: Index of the layer.
        scope: What was recorded.
        forward: From when to when it ran forward.
        backward: From when to when it ran backward.
        host: The same, but by the host's clock.
    """

    layer: int
    scope: ScopeTrace
    forward: tuple[float, float]
    backward: tuple[float, float]
    host: _Stretches

    @property
    def timing(self) -> Timing:
        return Timing(self.forward[1] - self.forward[0], self.backward[1] - self.backward[0])


def profile_of(
    trace: StepTrace,
    stalls: Sequence[tuple[float, float]],
    layers_of_process: Sequence[LayerKey],
    *,
    began: float,
    ended: float,
    on_device: StepTimes | None = None,
    before: StepProfile | None = None,
    has_grown: bool = False,
    most_gradients: int | None = None,
    tuning: Tuning = TUNING,
) -> StepProfile | None:
    """Return the profile of a step.

    Args:
        trace: What it recorded.
        stalls: When the training thread waited for I/O.
        layers_of_process: Model chunk and module name of each of them.
        began: When the step began, by :func:`time.perf_counter`.
        ended: When it ended.
        on_device: The times by the clock of the device, if it runs behind the host: then they are those of
            the profile, and the host's only order the activations of a layer.
        before: What was known before. Layers that ran without hooks in this step, or did not run, save what
            they saved then.
        has_grown: Layers were given more than before: what they saved and took then says nothing of now, but
            for those that did not run.
        most_gradients: Most bytes of gradients that there were; ``None`` if it does not matter when they
            come.
        tuning: Says which layers are alike, and how many measurements count.

    Returns:
        ``None`` if too little is known: no layer ever ran with hooks, or there was no backward.
    """
    on_host = trace.host_times(stalls, began=began, ended=ended)
    times = on_device or on_host
    runs = _runs(trace, times, on_host, {key: index for index, key in enumerate(layers_of_process)})
    if not runs:
        return None
    host_clock = ComputeClock(stalls)
    kinds, layers = _kinds(
        trace, runs, host_clock, len(layers_of_process), before, has_grown=has_grown, alike=tuning.alike
    )
    if not kinds:
        return None
    clock = ComputeClock(times.stalls)
    slots, last = _slots(runs, clock(times.began), most_gradients)
    samples = _samples(runs, kinds, layers, before, remembered=1 if has_grown else tuning.remembered_times)
    return StepProfile(
        kinds=kinds,
        layers=layers,
        timings=tuple(
            {placement: median_of(measured) for placement, measured in known.items()} for known in samples
        ),
        samples=samples,
        slots=slots,
        tail=max(clock(times.ended) - last, 0.0),
        rest_bytes=before.rest_bytes if before is not None else 0,
    )


# Time


def _runs(trace: StepTrace, times: StepTimes, on_host: StepTimes, index: dict[LayerKey, int]) -> list[_Run]:
    """Return executions whose forward and backward both took place, in the order of their forward."""
    by_host = _stretches(on_host)
    stretches = by_host if times is on_host else _stretches(times)
    runs = []
    for scope, (forward, backward), host in zip(trace.whole_scopes(), stretches, by_host, strict=True):
        layer = index[scope.key.chunk, scope.key.name]
        runs.append(_Run(layer, scope, forward, backward, host))
    return runs


def _stretches(times: StepTimes) -> list[_Stretches]:
    """Of each scope: from when to when it computed."""
    clock = ComputeClock(times.stalls)
    # Backward of a scope goes on until something else begins.
    begins = [began for scope in times.scopes for began in (scope.forward_began, scope.backward_began)]
    borders = sorted([*begins, *times.backward_ends])
    stretches = []
    for scope in times.scopes:
        start = scope.backward_began
        following = bisect.bisect_right(borders, start)
        end = borders[following] if following < len(borders) else start
        forward = clock(scope.forward_began), clock(scope.forward_ended)
        stretches.append(_Stretches(forward, (clock(start), clock(end))))
    return stretches


def _slots(runs: Sequence[_Run], began: float, most_gradients: int | None) -> tuple[tuple[Slot, ...], float]:
    """Return the compute of a step in its order, and when the last of it ended.

    A forward pass ends where a layer of its chunk runs again, or backward begins: where layers are skipped,
    how often a layer ran before does not tell the micro-batch.
    """
    stretches = sorted(
        [(*run.forward, run, False) for run in runs] + [(*run.backward, run, True) for run in runs],
        key=lambda stretch: stretch[0],
    )
    slots, last = [], began
    begins = [_begin(run.scope, backward=backward) for _, _, run, backward in stretches]
    gradients = _gradients([(run.scope, backward) for _, _, run, backward in stretches], most_gradients)
    ran: defaultdict[int, set[int]] = defaultdict(set)  # in the pass of each chunk that goes on
    passes: Counter[int] = Counter()
    pass_of: dict[int, int] = {}  # by the id of a run
    for (start, end, run, backward), nbytes in zip(stretches, gradients, strict=True):
        held_until = None
        if backward:
            ran.clear()
            held_until = _held_until(run.scope, begins) if run.scope.is_retained else None
        else:
            chunk = run.scope.key.chunk
            if not ran[chunk] or run.layer in ran[chunk]:
                passes[chunk] += 1
                ran[chunk] = set()
            ran[chunk].add(run.layer)
            pass_of[id(run)] = passes[chunk] - 1
        gap = max(start - last, 0.0)
        slots.append(Slot(run.layer, pass_of[id(run)], backward, gap, held_until, nbytes))
        last = end
    return tuple(slots), last


def _gradients(slots: Sequence[tuple[ScopeTrace, bool]], most: int | None) -> list[int]:
    """Most bytes of gradients in each slot of a step; zeros if they were not counted.

    There are as many at the end of a slot as when the next one begins: in a backward they come, and before it
    a program may let those of the last step go.

    Args:
        slots: Scopes, and whether it is their backward.
        most: Most bytes that there were; ``None`` if it does not matter when they come.
    """
    at_begin = [
        scope.backward_gradients if is_backward else scope.forward_gradients for scope, is_backward in slots
    ]
    counted = [nbytes for nbytes in at_begin if nbytes is not None]
    if most is None or len(counted) < len(slots):
        return [0] * len(slots)
    return [max(pair) for pair in zip(counted, [*counted[1:], most], strict=True)]


def _begin(scope: ScopeTrace, *, backward: bool) -> float:
    return (scope.backward_began or 0.0) if backward else scope.forward_began


def _held_until(scope: ScopeTrace, begins: Sequence[float]) -> int:
    """Return the place of the first slot that began when the graph of a scope was gone."""
    return len(begins) if scope.gone_by is None else bisect.bisect_left(begins, scope.gone_by)


def _samples(
    runs: Sequence[_Run],
    kinds: Sequence[LayerKind],
    layers: Sequence[int],
    before: StepProfile | None,
    *,
    remembered: int,
) -> tuple[Samples, ...]:
    """Return the last measurements of each kind under each placement, with the median of this step's.

    What a layer takes to find out what can be rebuilt of it, or while a share of what it saves stays,
    counts only if nothing else is known. Of one that has a share travel it is known what more it would take.
    """
    found: list[dict[Placement, list[Timing]]] = [defaultdict(list) for _ in kinds]
    odd: list[dict[Placement, list[Timing]]] = [defaultdict(list) for _ in kinds]
    for run in runs:
        placement = computed_as(Placement(run.scope.placement))
        finds_out = placement is Placement.OFFLOAD_REMAT and not (
            before is not None and before.kind_of(run.layer).knows_rebuilt
        )
        whole = _if_all_travelled(run, before)
        is_odd = finds_out or (whole is None and Placement(run.scope.placement).percent < 100)
        (odd if is_odd else found)[layers[run.layer]][placement].append(whole or run.timing)
    known: list[Samples] = [{} for _ in kinds]
    if before is not None:
        for layer, kind in enumerate(layers):
            known[kind] = before.samples_of(layer)
    renewed = [
        _renewed(old, usual_ways, remembered) or _renewed(old, odd_ways, remembered)
        for old, usual_ways, odd_ways in zip(known, found, odd, strict=True)
    ]
    some = next(samples for samples in renewed if samples)
    return tuple(samples or dict(some) for samples in renewed)  # a kind of which no layer went backward


def _if_all_travelled(run: _Run, before: StepProfile | None) -> Timing | None:
    """Return what a layer of which a share travels would have taken if everything had.

    ``None`` of others, and as long as nothing is known of the layer's times.
    """
    percent = Placement(run.scope.placement).percent
    if percent == 100 or before is None or not before.timings[before.layers[run.layer]]:
        return None
    kind = before.kind_of(run.layer)
    stays = sum(kind.activations[number].nbytes for number in kind.staying(percent)) / max(kind.nbytes, 1)
    offloaded, kept = (before.timing(run.layer, each) for each in (Placement.OFFLOAD, Placement.KEEP))
    return Timing(*(own + stays * (a - b) for own, a, b in zip(run.timing, offloaded, kept, strict=True)))


def _renewed(old: Samples, found: dict[Placement, list[Timing]], remembered: int) -> Samples:
    """Return new measurements with the last ones, under all placements.

    If the machine has become faster or slower under some of them, it has under the others too. Otherwise what
    was measured in a good moment would stand against what was measured in a bad one.
    """
    new, drifts = dict(old), []
    for placement, timings in found.items():
        before = old.get(placement, ())
        new[placement] = (*before, median_of(timings))[-remembered:]
        if before and (seconds := median_of(before).whole):
            drifts.append(median_of(new[placement]).whole / seconds)
    if drifts:
        drift = statistics.mean(drifts)
        for placement in old.keys() - found.keys():
            new[placement] = tuple(Timing(*(drift * s for s in timing)) for timing in old[placement])
    return new


# Memory


def _kinds(
    trace: StepTrace,
    runs: Sequence[_Run],
    clock: ComputeClock,
    count: int,
    before: StepProfile | None,
    *,
    has_grown: bool,
    alike: float,
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Return the kinds of layers and which each is; nothing if no layer was captured, now or before.

    Of a layer that ran with several sizes counts the run that saved most.
    """
    saved: dict[ScopeKey, list[ActivationTrace]] = defaultdict(list)
    for activation in trace.activations:
        saved[activation.key.scope].append(activation)
    captured = [run for run in runs if Placement(run.scope.placement).is_offloaded]
    hooked = [run for run in runs if Placement(run.scope.placement).offloads]
    small = _small_bytes(trace) // max(len(hooked), 1)
    members: list[list[tuple[_Run, list[ActivationTrace]]]] = []
    sizes = _Sizes(alike)
    layers, most = [-1] * count, [-1] * count
    for run in captured:
        activations = saved[run.scope.key]
        nbytes = sum(activation.nbytes for activation in activations)
        kind = sizes.kind_of(len(activations), nbytes)
        if kind == len(members):
            members.append([])
        members[kind].append((run, activations))
        if nbytes > most[run.layer]:
            layers[run.layer], most[run.layer] = kind, nbytes
    kinds = [_kind(group, clock, small, before) for group in members]
    if not kinds and (before is None or has_grown):
        return (), ()
    usual = statistics.mode(kind for kind in layers if kind >= 0) if kinds else 0
    grown = {run.layer for run in runs} if has_grown else set()
    sizes = _Sizes(alike, [(len(kind.activations), kind.nbytes) for kind in kinds])
    for layer in (layer for layer, kind in enumerate(layers) if kind < 0):
        # One that never ran with hooks is taken for one of the usual kind.
        known = kinds[usual] if before is None or layer in grown else before.kind_of(layer)
        kind = sizes.kind_of(len(known.activations), known.nbytes)
        if kind == len(kinds):
            kinds.append(known)
        layers[layer] = kind
    for kind, nbytes in _attention_bytes(runs, layers).items():
        kinds[kind] = dataclasses.replace(kinds[kind], attention_bytes=nbytes)
    return tuple(kinds), tuple(layers)


def _attention_bytes(runs: Sequence[_Run], layers: Sequence[int]) -> dict[int, int]:
    """Return what attention put out, by the kinds of layers that told it in this step."""
    found: dict[int, int] = {}
    for run in runs:
        if run.scope.placement == Placement.RECOMPUTE_EXCEPT_ATTENTION:
            kind = layers[run.layer]
            found[kind] = max(run.scope.attention_bytes, found.get(kind, 0))
    return found


class _Sizes:
    """What layers save, in kinds: one is of the first kind whose first layer is like it.

    Args:
        share: Of the bytes, by which they may differ.
        firsts: How many activations the first layer of each kind saves, and their bytes.
    """

    def __init__(self, share: float, firsts: Iterable[tuple[int, int]] = ()) -> None:
        self._share = share
        self._firsts = list(firsts)
        self._known: dict[tuple[int, int], int] = {}  # there may be as many kinds as layers, but few sizes

    def kind_of(self, count: int, nbytes: int) -> int:
        """Return the kind of a layer, by what it saves; the next number if it is the first of its kind."""
        size = count, nbytes
        kind = self._known.get(size)
        if kind is None:
            alike = (number for number, first in enumerate(self._firsts) if self._are_alike(first, size))
            kind = self._known[size] = next(alike, len(self._firsts))
            if kind == len(self._firsts):
                self._firsts.append(size)
        return kind

    def _are_alike(self, some: tuple[int, int], other: tuple[int, int]) -> bool:
        nbytes = some[1], other[1]
        return some[0] == other[0] and abs(nbytes[0] - nbytes[1]) <= self._share * max(nbytes)


def _kind(
    group: Sequence[tuple[_Run, list[ActivationTrace]]],
    clock: ComputeClock,
    small: int,
    before: StepProfile | None,
) -> LayerKind:
    """Return what the executions of equal layers have in common: the most bytes, the median times."""
    columns = list(zip(*(activations for _, activations in group), strict=True))
    runs = [run for run, _ in group]
    known: Sequence[Saved | None] = [None] * len(columns)
    if before is not None and len(before.kind_of(runs[0].layer).activations) == len(columns):
        known = before.kind_of(runs[0].layer).activations
    return LayerKind(
        activations=tuple(
            _saved(runs, column, clock, last) for column, last in zip(columns, known, strict=True)
        ),
        small_bytes=small,
        input_bytes=max(run.scope.input_bytes for run in runs),
        attention_bytes=None if before is None else before.kind_of(runs[0].layer).attention_bytes,
    )


def _saved(
    runs: Sequence[_Run], column: Sequence[ActivationTrace], clock: ComputeClock, known: Saved | None
) -> Saved:
    """One activation of equal layers; what this step does not tell of it is what was known."""
    at: list[float] = []
    until: list[float] = []
    needed: list[float] = []
    treatments: list[Treatment] = []
    for run, activation in zip(runs, column, strict=True):
        is_remat = Placement(run.scope.placement).rebuilds
        at.append(_share(clock(activation.packed_at), run.host.forward))
        if is_remat:
            treatments.append(activation.treatment)
        if activation.unpacked_at is not None:
            # Where others are rebuilt from it, it may be needed before its own use.
            uses = needed if is_remat else until
            uses.append(_share(clock(activation.unpacked_at), run.host.backward))
    # What is kept elsewhere costs nothing to keep, and gains nothing to offload.
    moving = (each.nbytes for each in column if each.treatment is not Treatment.LEARNED_KEEP)
    saved = Saved(
        max(moving, default=0),
        statistics.median(at),
        statistics.median(until) if until else _used_otherwise(needed, known, statistics.median(at), column),
    )
    if not treatments:
        return saved if known is None else saved._replace(rebuilt=known.rebuilt, needed=known.needed)
    is_rebuilt = all(treatment is Treatment.REBUILT for treatment in treatments)
    early = statistics.median(needed) if needed and not is_rebuilt else None
    return saved._replace(rebuilt=is_rebuilt, needed=early)


def _used_otherwise(
    needed: Sequence[float], known: Saved | None, at: float, column: Sequence[ActivationTrace]
) -> float:
    """When an activation is used, if no layer tells that had it travel.

    Where all layers that saved it keep it by plan, nothing is told of its use: backward uses first what was
    saved last.
    """
    is_kept = any(activation.treatment is Treatment.PLANNED_KEEP for activation in column)
    if known is not None and (needed or is_kept):
        return known.until
    if needed:
        return statistics.median(needed)
    return 1.0 - at if is_kept else 1.0


def _share(when: float, stretch: tuple[float, float]) -> float:
    began, ended = stretch
    return min(max((when - began) / (ended - began), 0.0), 1.0) if ended > began else 0.0


def _small_bytes(trace: StepTrace) -> int:
    """Return what layers with hooks kept because it was too small, or not understood."""
    gone = {Treatment.OFFLOADED, Treatment.REBUILT}
    return trace.kept_bytes - sum(a.nbytes for a in trace.activations if a.treatment not in gone)
