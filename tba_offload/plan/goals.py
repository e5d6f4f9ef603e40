"""The goals of a plan: what a planner may choose from, and which of two outcomes is better."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from tba_offload.config.policy import Objective, Placement

if TYPE_CHECKING:
    from tba_offload.plan.model import Limits
    from tba_offload.plan.simulate import Outcome
    from tba_offload.plan.tuning import Tuning

Score = tuple[float, ...]
"""Less is better; the first figure is by how many bytes limits are broken, the second a cost in time."""

_EVERYTHING = (
    Placement.KEEP,
    Placement.OFFLOAD,
    Placement.RECOMPUTE,
    Placement.RECOMPUTE_OFFLOAD,
    Placement.RECOMPUTE_EXCEPT_ATTENTION,
    Placement.OFFLOAD_REMAT,
)


class Goal(ABC):
    """One objective, within limits.

    Args:
        limits: What plans must keep to.
        tuning: The numbers that it is judged by.
        seconds_if_kept: The step time if all layers are kept that may be; of use where memory is wanted.

    Attributes:
        choices: The placements that the planner may choose from.
        wants_memory: Whether memory is wanted first, but at no cost in time.
    """

    choices: ClassVar[tuple[Placement, ...]] = _EVERYTHING
    wants_memory: ClassVar[bool] = False

    def __init__(self, limits: Limits, tuning: Tuning, seconds_if_kept: float = 0.0) -> None:
        self._limits = limits
        self._tuning = tuning
        self._seconds_if_kept = seconds_if_kept

    @property
    def drive_share(self) -> float:
        """Share of the measured rates that plans are made for."""
        return 1.0

    def excess(self, outcome: Outcome) -> float:
        """Bytes by which the peak is over what plans are made for."""
        return max(outcome.peak_bytes - self._limits.planned, 0.0)

    def overwritten(self, outcome: Outcome) -> float:
        """Bytes by which a step may write more than its share of a day, less the margin."""
        return max(outcome.sent_bytes - self._limits.planned_in(outcome.seconds), 0.0)

    def broken(self, outcome: Outcome) -> float:
        """Bytes by which both limits are broken."""
        return self.excess(outcome) + self.overwritten(outcome)

    def slower(self, outcome: Outcome) -> float:
        """Return the share by which a step takes longer than it may where memory is wanted first.

        A layer that offloads computes for longer than one that keeps, although nothing waits: hooks take the
        thread that trains, and transfers take cores and memory bandwidth. Where no layer was ever kept, the
        profile takes both to be equal, and only waits count.
        """
        allowed = (1 + self._tuning.no_slower) * self._seconds_if_kept
        return max(outcome.seconds / allowed - 1, 0.0) if allowed else 0.0

    @abstractmethod
    def score(self, outcome: Outcome) -> Score:
        """How good an outcome is to search on from: what is left of the budget can be used."""

    def final_score(self, outcome: Outcome) -> Score:
        """How good an outcome is to end with."""
        return self.score(outcome)


class _Time(Goal):
    """The shortest step."""

    def score(self, outcome: Outcome) -> Score:
        return self.broken(outcome), _rounded(outcome.seconds), outcome.peak_bytes

    def final_score(self, outcome: Outcome) -> Score:
        # Until layers have kept, offloading seems to take no time of its own; nothing is offloaded in vain.
        return self.broken(outcome), _rounded(outcome.seconds), outcome.sent_bytes, outcome.peak_bytes


def _rounded(seconds: float) -> float:
    """Seconds of which the last digits, which depend on the order of a sum, do not count."""
    return round(seconds, 9)


class _Memory(Goal):
    """The lowest peak at which nothing waits; so nothing is recomputed either."""

    choices = (Placement.KEEP, Placement.OFFLOAD, Placement.OFFLOAD_REMAT)
    wants_memory = True

    @property
    def drive_share(self) -> float:
        return self._tuning.slack

    def score(self, outcome: Outcome) -> Score:
        # What is rebuilt spares the drive, so that more can travel; but what waits for it waits.
        lost = outcome.stall_seconds + outcome.rebuild_seconds
        waits = max(lost / outcome.seconds - self._tuning.no_stall, 0.0) if outcome.seconds else 0.0
        cost = max(waits, self.slower(outcome))
        return self.broken(outcome), cost, outcome.peak_bytes, outcome.written_bytes, outcome.seconds


GOALS: dict[Objective, type[Goal]] = {Objective.TIME: _Time, Objective.MEMORY: _Memory}
"""The goal of each objective."""


def default_objective(limits: Limits) -> Objective:
    """Return the objective where the policy names none: memory, or time where there is a budget."""
    return Objective.MEMORY if limits.budget is None else Objective.TIME
