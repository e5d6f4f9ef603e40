"""What happened in one step: when scopes ran, what they saved, when backward used it."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba_offload.capture.scope import ActivationKey, ScopeKey


class Fate(enum.Enum):
    """What became of an activation when it was saved."""

    OFFLOADED = "offloaded"
    LEARNED_KEEP = "learned keep"
    SLOW_KEEP = "slow keep"
    PLANNED_KEEP = "planned keep"


@dataclass(slots=True)
class ActivationTrace:
    """One storage that a scope saved; times are seconds on :func:`time.perf_counter`."""

    key: ActivationKey
    nbytes: int
    fate: Fate
    packed_at: float
    unpacked_at: float | None = None


@dataclass(slots=True)
class ScopeTrace:
    """One execution of a layer; times are seconds on :func:`time.perf_counter`.

    Attributes:
        key: Which one.
        placement: How it ran: what its layer was placed, or ``keep`` if it was left alone.
        forward_began: When it started.
        input_bytes: Bytes of the activations that it was given.
        forward_ended: When it returned.
        backward_began: When backward came back to it.
    """

    key: ScopeKey
    placement: str
    forward_began: float
    input_bytes: int = 0
    forward_ended: float | None = None
    backward_began: float | None = None


@dataclass(slots=True)
class StepTrace:
    """Everything that one step recorded.

    Attributes:
        scopes: In the order in which their forward began.
        activations: In the order in which they were saved.
        kept_bytes: Bytes of saved tensors that stayed because they are small, not understood, or learned
            to be kept elsewhere. Parameters and buffers do not count, nor layers placed ``keep``, which
            run without hooks.
        deduplicated_bytes: Bytes of saved tensors whose storage was recorded already.
        left_alone: Scopes that ran inside somebody else's saved-tensor hooks or under a transform that
            forbids hooks, and were therefore not captured.
        backward_seconds: Time of the backward passes, from the first scope to the end of the graph.
        backward_ends: When they ended.
    """

    scopes: list[ScopeTrace] = field(default_factory=list)
    activations: list[ActivationTrace] = field(default_factory=list)
    kept_bytes: int = 0
    deduplicated_bytes: int = 0
    left_alone: int = 0
    backward_seconds: float = 0.0
    backward_ends: list[float] = field(default_factory=list)
    _backward_began: float | None = None

    def begin_scope(self, key: ScopeKey, placement: str) -> ScopeTrace:
        """Notes that a layer starts to run."""
        scope = ScopeTrace(key, placement, time.perf_counter())
        self.scopes.append(scope)
        return scope

    def saved(self, key: ActivationKey, nbytes: int, fate: Fate) -> ActivationTrace:
        """Notes that a storage was saved."""
        activation = ActivationTrace(key, nbytes, fate, time.perf_counter())
        self.activations.append(activation)
        return activation

    def backward_reached(self, scope: ScopeTrace) -> bool:
        """Notes that backward arrives at a scope; tells whether it is the first of its pass."""
        scope.backward_began = time.perf_counter()
        if self._backward_began is not None:
            return False
        self._backward_began = scope.backward_began
        return True

    def backward_ended(self) -> None:
        """Notes that a backward pass is over."""
        if self._backward_began is not None:
            self.backward_ends.append(time.perf_counter())
            self.backward_seconds += self.backward_ends[-1] - self._backward_began
            self._backward_began = None

    def forward_seconds(self) -> float:
        """Time inside the layers' forward, summed."""
        return sum(s.forward_ended - s.forward_began for s in self.scopes if s.forward_ended is not None)
