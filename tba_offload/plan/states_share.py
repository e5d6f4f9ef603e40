"""How many sub-groups of optimizer states travel, so that activations have the rest of a device's memory.

A sub-group that stays takes memory in the whole step and costs nothing. One that travels is read and written
in each update. What activations cost under the budget that is left then, the planner tells; the two times are
added up.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.formatting import readable_size, significant
from tba_offload.plan.tuning import TUNING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tba_offload.plan.model import Limits, Prediction

SLOTS = 3
"""Sub-groups of which memory is needed as soon as one travels: the slots of :mod:`tba_offload.states`."""

_REMEMBERED = 3
"""Updates whose median counts: one may be odd."""

_WAITED = 0.05
"""Share of an update; if it waits longer for the drive, its bytes tell the rate of that."""

ALIKE = 0.005
"""Share of the step's time by which more sub-groups must shorten it in order to travel: they wear the drive.
Predictions differ by as much from one step to the next."""


@dataclass(frozen=True, slots=True)
class StatesLoad:
    """The states of optimizers, and what updates of them cost.

    Attributes:
        sizes: For each optimizer, bytes of its sub-groups, in the order in which they leave memory.
        update_seconds: Updates of all of them if they wait for no drive.
        rate: Bytes a second that updates read and write, both together.
        turns: Whether updates go to and fro, so that what slots hold need not travel.
    """

    sizes: tuple[tuple[int, ...], ...]
    update_seconds: float
    rate: float
    turns: bool = True

    @property
    def count(self) -> int:
        """How many sub-groups there are."""
        return sum(map(len, self.sizes))

    @classmethod
    def of_updates(cls, updates: Sequence[Mapping[str, Any]]) -> StatesLoad | None:
        """Return what updates in a run log tell, as if sub-groups were of equal size.

        None if that is nothing.

        Args:
            updates: Its ``states`` events.
        """
        last: dict[int, list[Mapping[str, Any]]] = {}
        rate: float | None = None
        for update in updates:
            last.setdefault(update["optimizer"], []).append(update)
            moved = update["read_bytes"] + update["written_bytes"]
            rate = drive_rate(rate, moved, update["seconds"], update["waited_seconds"])
        sizes = tuple(_equal_sizes(each[-1]) for each in last.values())
        if not any(sizes):
            return None
        seconds = sum(
            usual_seconds([(u["seconds"], u["waited_seconds"]) for u in each]) for each in last.values()
        )
        return cls(sizes, seconds, rate or math.inf)

    def split(self, travelling: int) -> tuple[int, ...]:
        """How many of each optimizer travel if ``travelling`` do together: an equal share of each."""
        return tuple(-(-travelling * len(sizes) // self.count) for sizes in self.sizes)

    def device_bytes(self, travelling: int) -> int:
        """Bytes that stay, slots included."""
        pairs = zip(self.sizes, self.split(travelling), strict=True)
        return sum(sum(sizes[some:]) + _slots(sizes[:some]) for sizes, some in pairs)

    def travelled_bytes(self, travelling: int) -> int:
        """Bytes that an update reads and writes."""
        pairs = zip(self.sizes, self.split(travelling), strict=True)
        away = (max(sum(sizes[:some]) - self.turns * _slots(sizes[:some]), 0) for sizes, some in pairs)
        return 2 * sum(away)

    def seconds(self, travelling: int) -> float:
        """Duration of updates."""
        return max(self.update_seconds, self.travelled_bytes(travelling) / self.rate)

    def useful(self) -> list[int]:
        """Get the numbers of travelling sub-groups of which each leaves more memory than those before it."""
        found = [0]
        for travelling in range(1, self.count + 1):
            if self.device_bytes(travelling) < self.device_bytes(found[-1]):
                found.append(travelling)
        return found


def _equal_sizes(update: Mapping[str, Any]) -> tuple[int, ...]:
    count, nbytes = update["sub_groups"], update["states_bytes"] + update.get("staying_bytes", 0)
    return (nbytes // count,) * count if count else ()


def usual_seconds(updates: Sequence[tuple[float, float]]) -> float:
    """Seconds of an update if it waits for no drive.

    Args:
        updates: Of each, how long it took, and how much of that it waited; the first, which makes states or
            finds other ones in the slots, counts only if it is the only one.
    """
    usual = updates[1:] or updates
    return statistics.median(seconds - waited for seconds, waited in usual[-_REMEMBERED:])


def drive_rate(before: float | None, moved: int, seconds: float, waited: float) -> float | None:
    """Bytes a second that updates move; one that did not wait for the drive tells little of it.

    Args:
        before: What was known before.
        moved: Bytes that an update has read and written.
        seconds: How long it took.
        waited: How much of that it waited.
    """
    if not moved or (before is not None and waited <= _WAITED * seconds):
        return before
    return moved / seconds


def _slots(travelling: Sequence[int]) -> int:
    return SLOTS * max(travelling, default=0)


class Expected(NamedTuple):
    """What comes of a number of travelling sub-groups.

    Attributes:
        travelling: The number.
        limits: What activations may take beside the others.
        plan: What the plan for them does.
        update_seconds: Duration of updates.
    """

    travelling: int
    limits: Limits
    plan: Prediction
    update_seconds: float

    @property
    def seconds(self) -> float:
        """Duration of the step and of the updates."""
        return self.plan.seconds + self.update_seconds

    @property
    def over(self) -> int:
        """Bytes by which the plan breaks its budget; where nothing is left for it, with what is missing."""
        budget, device = self.limits.budget, self.limits.device
        if budget is None:
            return 0
        missing = 0 if device is None else max(-device.left, 0)
        return max(self.plan.peak_bytes - budget, 0) + missing

    @property
    def device_peak_bytes(self) -> int | None:
        """Most bytes on the device; ``None`` if what lies there was not measured."""
        device = self.limits.device
        if device is None:
            return None
        return device.base_bytes + device.gradient_bytes + self.plan.peak_bytes

    def as_json(self) -> dict[str, object]:
        """For a run log."""
        return {
            "travelling": self.travelling,
            "budget": self.limits.budget,
            "device_peak_bytes": self.device_peak_bytes,
            "plan": dataclasses.asdict(self.plan),
            "update_seconds": self.update_seconds,
            "seconds": self.seconds,
        }


def choose(
    load: StatesLoad,
    limits_of: Callable[[int], Limits],
    plan_of: Callable[[Limits], Prediction],
    *,
    now: int | None = None,
) -> list[Expected]:
    """Try some numbers of travelling sub-groups.

    Updates take the longer, and the rest of a step the less, the more travel. So a few numbers, and then some
    around the best of them, come close to the best of all.

    Args:
        load: The sub-groups.
        limits_of: What activations may take, by the number of sub-groups that travel.
        plan_of: What the best plan under limits does.
        now: How many travel now; is tried too.

    Returns:
        What was tried, the best first.
    """
    tried: dict[int, Expected] = {}

    def attempt(travelling: int) -> None:
        if travelling not in tried:
            limits = limits_of(travelling)
            tried[travelling] = Expected(travelling, limits, plan_of(limits), load.seconds(travelling))

    useful = load.useful()
    last = len(useful) - 1
    stride = max(last // 4, 1)
    for place in (*range(0, last, stride), last):
        attempt(useful[place])
    while stride > 1:
        stride = -(-stride // 2)
        best = useful.index(min(tried.values(), key=_rank).travelling)
        for place in (max(best - stride, 0), min(best + stride, last)):
            attempt(useful[place])
    if now is not None:
        attempt(now)
    return _sorted(list(tried.values()))


def in_words(chosen: Expected, load: StatesLoad) -> str:
    """Return what was chosen, what it leaves, and what is expected of it."""
    left, staying = readable_size(chosen.limits.budget or 0), load.device_bytes(chosen.travelling)
    return (
        f"{chosen.travelling} of {load.count} sub-groups of optimizer states travel, "
        f"{readable_size(staying)} of states and slots stay, {left} are left for activations; predicted "
        f"step {significant(chosen.plan.seconds)} s and update {significant(chosen.update_seconds)} s"
    )


def settled(tried: Sequence[Expected], now: int | None) -> Expected:
    """Return the choice: the best, if it is clearly faster than what there is or leaves the drive alone.

    Args:
        tried: What :func:`choose` gave.
        now: How many travel now; ``None`` if that was never chosen.
    """
    best, present = tried[0], next((each for each in tried if each.travelling == now), None)
    if present is None or present.over or best.travelling < present.travelling:
        return best
    return best if best.seconds < (1 - TUNING.worth_it) * present.seconds else present


def _rank(found: Expected) -> tuple[int, float, int]:
    return found.over, found.seconds, found.travelling


def _sorted(tried: list[Expected]) -> list[Expected]:
    """Return the best first: the fewest that travel among those that are as fast as any."""
    fastest = min(tried, key=_rank)
    alike = [
        each for each in tried if each.over <= fastest.over and each.seconds <= (1 + ALIKE) * fastest.seconds
    ]
    best = min(alike, key=lambda each: each.travelling)
    return [best, *sorted((each for each in tried if each is not best), key=_rank)]
