"""Two planners that others have published, written anew from their descriptions: TBA's cut, TERAIO's greedy.

Both decide which activations travel and never recompute one. What comes out are plans for the simulator of
tba_offload, so that all are judged by the same rules; where its rules are kinder than theirs (a hard ceiling
of bytes in flight, which TBA lacks) they profit.
"""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tba_offload.config.policy import Placement
from tba_offload.plan.model import Plan
from tba_offload.plan.simulate import Outcome, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.profile import LayerKind, StepProfile

CEILINGS = 10
"""How many sizes of the ceiling of bytes in flight are tried for a plan."""

TRIALS = 6
"""How many shares of the tensors that TERAIO's books have no place for are tried."""

Kept = tuple[frozenset[int], ...]
"""For each layer, the numbers of the activations that stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan(Plan):
    """A plan by which single activations of offloaded layers stay.

    Attributes:
        kept: For each layer, the numbers of these.
    """

    kept: Kept

    def staying(self, layer: int, kind: LayerKind) -> frozenset[int]:  # noqa: ARG002 - as of any plan
        """Numbers of the activations of a layer that stay in memory."""
        return self.kept[layer]


@dataclass(frozen=True)
class Played:
    """A plan, and what it did on the simulator."""

    plan: Plan
    outcome: Outcome


def everything_kept(profile: StepProfile, bandwidth: Bandwidth) -> Outcome:
    """Return the ideal: as much memory as it takes."""
    return simulate(profile, Plan((Placement.KEEP,) * len(profile.layers)), bandwidth)


def play(profile: StepProfile, kept: Kept, bandwidth: Bandwidth, window: int | None) -> Played:
    """Plays a plan that offloads whatever it does not keep."""
    placements = (Placement.OFFLOAD,) * len(profile.layers)
    plan = KeptPlan(placements=placements, window=window, kept=kept)
    return Played(plan, simulate(profile, plan, bandwidth))


def windows(profile: StepProfile, most: float) -> list[int]:
    """Ceilings to try, up to that many bytes, from three times the largest activation on."""
    least = 3 * max(saved.nbytes for kind in profile.kinds for saved in kind.activations)
    return sorted({least + int(max(most - least, 0) * share / CEILINGS) for share in range(CEILINGS + 1)})


def best_fitting(profile: StepProfile, kept: Kept, bandwidth: Bandwidth, budget: float) -> Played | None:
    """Plays a plan under ceilings of all sizes: the fastest whose peak fits; ``None`` if none does.

    A larger ceiling is not always faster: what was read ahead too early is in the way of what is saved.
    """
    least = play(profile, kept, bandwidth, windows(profile, 0)[0])
    if least.outcome.peak_bytes > budget:
        return None
    most = (least.plan.window or 0) + budget - least.outcome.peak_bytes
    found = [least, *(play(profile, kept, bandwidth, window) for window in windows(profile, most)[1:])]
    fitting = [played for played in found if played.outcome.peak_bytes <= budget]
    return min(fitting, key=lambda played: played.outcome.seconds)


def smallest_without_stall(profile: StepProfile, kept: Kept, bandwidth: Bandwidth) -> Played:
    """Plays a plan with the smallest ceiling at which compute does not wait, or with none."""
    ideal = everything_kept(profile, bandwidth)
    for window in windows(profile, ideal.peak_bytes):
        played = play(profile, kept, bandwidth, window)
        if played.outcome.stall_seconds <= 1e-3 * ideal.seconds:
            return played
    return play(profile, kept, bandwidth, None)


# ---- TBA -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """Attention or MLP of a layer: what TBA decides on."""

    layer: int
    first: int
    end: int
    nbytes: int
    seconds: float


def scopes_of(profile: StepProfile, ends: Sequence[Sequence[int]]) -> list[Scope]:
    """Return the scopes of one forward, in their order.

    Args:
        profile: The step.
        ends: For each kind of layer, how many activations have been saved when each of its scopes ends.
    """
    found = []
    for layer, kind in enumerate(profile.layers):
        activations = profile.kinds[kind].activations
        forward = profile.timing(layer, Placement.KEEP).forward
        starts = [0, *ends[kind][:-1]]
        times = [activations[start].at for start in starts[1:]] + [1.0]
        for first, end, begins, ended in zip(starts, ends[kind], [0.0, *times], times, strict=False):
            nbytes = sum(saved.nbytes for saved in activations[first:end])
            found.append(Scope(layer, first, end, nbytes, (ended - begins) * forward))
    return found


def tba_cut(scopes: Sequence[Scope], write_rate: float) -> int:
    """TBA's adaptive offloading: the first scope that is kept, with all after it.

    Backward takes twice as long as forward. When it comes to a scope, everything before that scope must have
    been written, and the scope written and read back; the first scope that needs more than the measured write
    rate for this is kept. So is the last one, whose backward begins at once.
    """
    forward = sum(scope.seconds for scope in scopes)
    before_bytes, before_seconds = 0, 0.0
    for number, scope in enumerate(scopes[:-1]):
        if before_bytes + 2 * scope.nbytes > write_rate * (3 * forward - 2 * before_seconds):
            return number
        before_bytes += scope.nbytes
        before_seconds += scope.seconds
    return len(scopes) - 1


def kept_from(profile: StepProfile, scopes: Sequence[Scope], cut: int) -> Kept:
    """Return what stays if everything from a scope on does."""
    kept: list[set[int]] = [set() for _ in profile.layers]
    for scope in scopes[cut:]:
        kept[scope.layer].update(range(scope.first, scope.end))
    return tuple(map(frozenset, kept))


def play_tba(profile: StepProfile, scopes: Sequence[Scope], bandwidth: Bandwidth) -> Played:
    """TBA's plan where memory has no limit, with the smallest ceiling at which nothing waits.

    TBA has no ceiling of bytes in flight: this one is a gift. If compute waits at all, there is none.
    """
    kept = kept_from(profile, scopes, tba_cut(scopes, bandwidth.write))
    return smallest_without_stall(profile, kept, bandwidth)


def fit_tba(
    profile: StepProfile, scopes: Sequence[Scope], bandwidth: Bandwidth, budget: float
) -> Played | None:
    """TBA's plan under a limit of memory: the first cut, from its own on, that fits with some ceiling.

    Plain TBA knows no limit and would run out of memory where its own cut does not fit.
    """
    for cut in range(tba_cut(scopes, bandwidth.write), len(scopes) + 1):
        if played := best_fitting(profile, kept_from(profile, scopes, cut), bandwidth, budget):
            return played
    return None


# ---- TERAIO ----------------------------------------------------------------------------------------


def one_layer_each(profile: StepProfile) -> StepProfile:
    """Return the same step, with every execution of a layer as a layer of its own.

    To be decided on by itself.
    """
    count = len(profile.layers)
    micro_batches = 1 + max(slot.micro_batch for slot in profile.slots)
    return dataclasses.replace(
        profile,
        layers=profile.layers * micro_batches,
        slots=tuple(slot._replace(layer=slot.layer + count * slot.micro_batch) for slot in profile.slots),
    )


@dataclass(frozen=True)
class Inactive:
    """A tensor between its last use in forward and its first in backward; cells count from 0."""

    layer: int
    number: int
    nbytes: int
    start: int
    end: int


@dataclass
class Timeline:
    """A step cut into cells at every moment at which something is saved or used.

    Attributes:
        seconds: Of each cell.
        needed: Bytes that are held in each cell if nothing is offloaded.
        periods: The inactive periods.
    """

    seconds: np.ndarray
    needed: np.ndarray
    periods: list[Inactive]


def timeline_of(profile: StepProfile) -> Timeline:
    """Return the timeline of a profile in which every layer runs once."""
    now, saved_at, used_at, freed_at = 0.0, {}, {}, {}
    for slot in profile.slots:
        now += slot.gap
        kind, timing = profile.kind_of(slot.layer), profile.timing(slot.layer, Placement.KEEP)
        for number, saved in enumerate(kind.activations):
            if slot.backward:
                used_at[slot.layer, number] = now + saved.until * timing.backward
                freed_at[slot.layer, number] = now + timing.backward
            else:
                saved_at[slot.layer, number] = now + saved.at * timing.forward
        now += timing.backward if slot.backward else timing.forward
    bounds = np.unique([0.0, *saved_at.values(), *used_at.values(), *freed_at.values(), now + profile.tail])
    needed = np.full(len(bounds) - 1, float(profile.rest_bytes))
    periods = []
    for (layer, number), born in saved_at.items():
        nbytes = profile.kind_of(layer).activations[number].nbytes
        start, end, freed = np.searchsorted(
            bounds, [born, used_at[layer, number], freed_at[layer, number]]
        ).tolist()
        needed[start:freed] += nbytes
        if start < end:
            periods.append(Inactive(layer, number, nbytes, start, end))
    return Timeline(np.diff(bounds), needed, periods)


@dataclass
class Greedy:
    """TERAIO's planning: books of both directions, and the memory that is needed after what was decided.

    Attributes:
        timeline: The step.
        bandwidth: The rates that are given away.
        capacity: Bytes of memory.
        needed: Bytes that are held in each cell.
        writes: Bytes that each cell has left for offloading.
        reads: Bytes that each cell has left for prefetching.
        chosen: What is offloaded.
    """

    timeline: Timeline
    bandwidth: Bandwidth
    capacity: float
    needed: np.ndarray = field(init=False)
    writes: np.ndarray = field(init=False)
    reads: np.ndarray = field(init=False)
    chosen: list[Inactive] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.needed = self.timeline.needed.copy()
        self.writes = self.timeline.seconds * self.bandwidth.write
        self.reads = self.timeline.seconds * self.bandwidth.read

    @property
    def fits(self) -> bool:
        """Whether what is needed fits."""
        return bool(self.needed.max() <= self.capacity)

    def run(self) -> list[Inactive]:
        """Chooses the best ratio of benefit to cost until everything fits or nothing is left that helps.

        Ratios only fall while the books fill, so one that is still the best after it was computed again is
        the best of all.
        """
        queue = [(-self.ratio(period), -period.nbytes, n) for n, period in enumerate(self.timeline.periods)]
        queue = [entry for entry in queue if entry[0] < 0]
        heapq.heapify(queue)
        while queue and not self.fits:
            _, size, number = heapq.heappop(queue)
            period = self.timeline.periods[number]
            again = (-self.ratio(period), size, number)
            if again[0] < 0 and queue and again > queue[0]:
                heapq.heappush(queue, again)
            elif again[0] < 0:
                self.choose(period)
        return self.chosen

    def ratio(self, period: Inactive) -> float:
        """Bytes times the seconds in which memory lacks them, over the seconds that it takes to move them."""
        out, back = self.gone(period)
        if out >= back:
            return 0.0
        lacks = self.needed[out:back] > self.capacity
        relieved = float(self.timeline.seconds[out:back][lacks].sum())
        return relieved / (1 / self.bandwidth.write + 1 / self.bandwidth.read)

    def gone(self, period: Inactive) -> tuple[int, int]:
        """From which cell to which other a tensor can be away, with what the books have left.

        The first cell by whose end it can have been written, and the last in which reading it must begin.
        """
        left = np.cumsum(self.writes[period.start : period.end])
        out = period.start + int(np.searchsorted(left, period.nbytes)) + 1
        left = np.cumsum(self.reads[period.start : period.end][::-1])
        back = period.end - int(np.searchsorted(left, period.nbytes)) - 1
        return out, back

    def choose(self, period: Inactive) -> None:
        """Take it: less memory is needed while it is away, and less is left of the rates."""
        out, back = self.gone(period)
        self.needed[out:back] -= period.nbytes
        _book(self.writes[period.start : out], period.nbytes)
        _book(self.reads[back : period.end][::-1], period.nbytes)
        self.chosen.append(period)


def _book(cells: np.ndarray, nbytes: int) -> None:
    """Take bytes out of cells, from the first one on."""
    before = np.concatenate(([0.0], np.cumsum(cells)[:-1]))
    cells -= np.clip(nbytes - before, 0.0, cells)


def play_teraio(unrolled: StepProfile, bandwidth: Bandwidth, budget: float) -> tuple[Played | None, bool]:
    """TERAIO's plan, played; and whether its books say that nothing waits.

    If they do not, kernels wait for more tensors to leave ("urgent" migrations): what has the best ratio of
    size and time to cost goes too, as much of it as fits at last.

    Args:
        unrolled: A profile in which every layer runs once.
        bandwidth: The rates.
        budget: Bytes of memory.
    """
    greedy = Greedy(timeline_of(unrolled), bandwidth, budget)
    chosen = {(period.layer, period.number) for period in greedy.run()}
    ends = np.concatenate(([0.0], np.cumsum(greedy.timeline.seconds)))
    others = sorted(
        (period for period in greedy.timeline.periods if (period.layer, period.number) not in chosen),
        key=lambda period: ends[period.start] - ends[period.end],
    )
    played = best_fitting(unrolled, _all_but(unrolled, chosen), bandwidth, budget)
    best = played
    # More that travels leaves more room for what is in flight, and takes more of the drive.
    for count in sorted({round(len(others) * share / TRIALS) for share in range(1, TRIALS + 1)}):
        urgent = {(period.layer, period.number) for period in others[:count]}
        trial = best_fitting(unrolled, _all_but(unrolled, chosen | urgent), bandwidth, budget)
        if trial is not None and (best is None or trial.outcome.seconds < best.outcome.seconds):
            best = trial
    return best, greedy.fits


def _all_but(profile: StepProfile, moved: set[tuple[int, int]]) -> Kept:
    return tuple(
        frozenset(
            number
            for number in range(len(profile.kind_of(layer).activations))
            if (layer, number) not in moved
        )
        for layer in range(len(profile.layers))
    )
