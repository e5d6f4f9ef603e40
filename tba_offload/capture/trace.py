"""What happened in one step: when scopes ran, what they saved, when backward used it.

All times are the host's, by :func:`time.perf_counter`. On a device that runs behind the host they are the
times at which work was given. So there the trace holds marks in the device's work as well, if a planner is
going to ask for them; :meth:`StepTrace.device_times` turns them into times after the step.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import chain, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tba_offload.device import Device, Mark


class ScopeKey(NamedTuple):
    """One execution of a layer.

    Attributes:
        layer: Global number of the layer, from 0.
        micro_batch: How often the layer ran before in this step, or the schedule's own number.
        chunk: Model chunk of an interleaved pipeline.
        name: Module name of the layer.
    """

    layer: int
    micro_batch: int
    chunk: int
    name: str

    def __str__(self) -> str:
        return f"layer {self.layer} ({self.name}), micro-batch {self.micro_batch}"


class ActivationKey(NamedTuple):
    """One storage that a scope saved; ``number`` counts them within the scope."""

    scope: ScopeKey
    number: int

    def __str__(self) -> str:
        return f"{self.scope}, activation {self.number}"


class Treatment(enum.Enum):
    """What became of an activation when it was saved.

    One that was offloaded and could as well have been rebuilt, as backward found out, counts as rebuilt.
    """

    OFFLOADED = "offloaded"
    LEARNED_KEEP = "learned keep"
    SLOW_KEEP = "slow keep"
    PLANNED_KEEP = "planned keep"
    REBUILT = "rebuilt"


class ScopeTimes(NamedTuple):
    """When a scope ran forward, and when backward came back to it."""

    forward_began: float
    forward_ended: float
    backward_began: float


class StepTimes(NamedTuple):
    """When everything in a step was, by one clock; only differences mean something.

    Attributes:
        began: When the step began.
        ended: When it ended.
        scopes: Times of each of :meth:`StepTrace.whole_scopes`, in their order.
        backward_ends: When the backward passes ended.
        stalls: When compute waited for I/O: from, until; in order.
    """

    began: float
    ended: float
    scopes: Sequence[ScopeTimes | ScopeTrace]
    backward_ends: Sequence[float]
    stalls: Sequence[tuple[float, float]]


@dataclass(slots=True)
class ActivationTrace:
    """One storage that a scope saved; times are seconds on :func:`time.perf_counter`.

    There are no marks of activations, which are too many: on a device that runs behind the host these times
    tell the order within a scope, and roughly the share of its work that was given before.
    """

    key: ActivationKey
    nbytes: int
    treatment: Treatment
    packed_at: float = field(default_factory=perf_counter)
    unpacked_at: float | None = None


@dataclass(slots=True)
class ScopeTrace:
    """One execution of a layer; times are seconds on :func:`time.perf_counter`.

    Attributes:
        key: Which one.
        placement: How it ran: a placement of the package that always goes the way that the layer's own went,
            or ``keep`` if it was left alone.
        forward_began: When it started.
        input_bytes: Bytes of the activations that it was given.
        forward_ended: When it returned; 0 before that.
        backward_began: When backward came back to it; 0 before that.
        marks: The same three in the work of a device that runs behind the host.
        attention_bytes: Bytes that its fused attention put out, if they travel without the rest.
        forward_gradients: Bytes of gradients that there were when it started; ``None`` if they were not
            counted.
        backward_gradients: The same when backward came back to it.
    """

    key: ScopeKey
    placement: str
    forward_began: float
    input_bytes: int = 0
    forward_ended: float = 0.0
    backward_began: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    attention_bytes: int = 0
    forward_gradients: int | None = None
    backward_gradients: int | None = None


@dataclass(slots=True)
class StepTrace:
    """Everything that one step recorded.

    Attributes:
        scopes: In the order in which their forward began.
        activations: In the order in which they were saved.
        sources: Tensors that autograd does not save, offloaded because others are made again from them.
        kept_bytes: Bytes of saved tensors that stayed because they are small, not understood, learned to be
            kept elsewhere, or by plan. Parameters and buffers do not count, nor layers placed ``keep``, which
            run without hooks.
        deduplicated_bytes: Bytes of saved tensors whose storage was recorded already.
        rebuilt_bytes: Bytes of activations that were neither kept nor offloaded, to be computed anew.
        left_alone: Scopes that ran inside saved-tensor hooks of other code or under a transform that
            forbids hooks, and were therefore not captured.
        backward_seconds: Time of the backward passes, from the first scope to the end of the graph.
        backward_ends: When they ended.
        device: The accelerator whose work is marked; ``None`` for no marks.
        marks: Where in the work of the device the step began and ended.
        backward_marks: Where in the work of the device the backward passes ended.
        gradients: Counts the bytes of gradients; ``None`` if it does not matter when they come.
    """

    scopes: list[ScopeTrace] = field(default_factory=list)
    activations: list[ActivationTrace] = field(default_factory=list)
    sources: list[ActivationTrace] = field(default_factory=list)
    kept_bytes: int = 0
    deduplicated_bytes: int = 0
    rebuilt_bytes: int = 0
    left_alone: int = 0
    backward_seconds: float = 0.0
    backward_ends: list[float] = field(default_factory=list)
    device: Device | None = None
    marks: list[Mark] = field(default_factory=list)
    backward_marks: list[Mark] = field(default_factory=list)
    gradients: Callable[[], int | None] | None = None
    _backward_began: float | None = None

    def mark_times(self, device: Device) -> None:
        """Record that the step begins, and from now on everything is marked in the work of ``device`` too."""
        self.device, self.marks = device, [device.mark()]

    def end_step(self) -> None:
        """Record that the step is over."""
        if self.device is not None:
            self.marks[1:] = [self.device.mark()]

    def begin_scope(self, key: ScopeKey, placement: str, *, inputs: int = 0) -> ScopeTrace:
        """Record that a layer starts to run.

        Args:
            key: Which run it is.
            placement: Where what it saves goes.
            inputs: Bytes of the activations that it is given.
        """
        scope = ScopeTrace(key, placement, perf_counter(), input_bytes=inputs)
        if self.device is not None:  # not in a function: it is a call for each run of a layer
            scope.marks.append(self.device.mark())
        if self.gradients is not None:
            scope.forward_gradients = self.gradients()
        self.scopes.append(scope)
        return scope

    def end_scope(self, scope: ScopeTrace) -> None:
        """Record that a layer has returned."""
        scope.forward_ended = perf_counter()
        if self.device is not None:
            scope.marks.append(self.device.mark())

    def backward_reached(self, scope: ScopeTrace) -> bool:
        """Record that backward arrives at a scope; return whether it is the first of its pass."""
        scope.backward_began = perf_counter()
        del scope.marks[2:]  # of an earlier backward through the same graph
        if self.device is not None:
            scope.marks.append(self.device.mark())
        if self.gradients is not None:
            scope.backward_gradients = self.gradients()
        is_first = self._backward_began is None
        self._backward_began = self._backward_began or scope.backward_began
        return is_first

    def backward_ended(self) -> None:
        """Record that a backward pass is over."""
        if self._backward_began is not None:
            self.backward_ends.append(perf_counter())
            self.backward_seconds += self.backward_ends[-1] - self._backward_began
            self._backward_began = None
            if self.device is not None:
                self.backward_marks.append(self.device.mark())

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended; after an exception in it that stays so."""
        return self._backward_began is not None

    def whole_scopes(self) -> list[ScopeTrace]:
        """Return the scopes whose forward and backward both took place, in the order of their forward."""
        return [scope for scope in self.scopes if scope.forward_ended and scope.backward_began]

    def host_times(self, stalls: Sequence[tuple[float, float]], *, began: float, ended: float) -> StepTimes:
        """Return the times by the host's clock.

        Args:
            stalls: When the training thread waited for I/O.
            began: When the step began.
            ended: When it ended.
        """
        return StepTimes(began, ended, self.whole_scopes(), self.backward_ends, stalls)

    def device_times(self, stalls: Sequence[tuple[Mark, Mark]]) -> StepTimes:
        """Return the times by the clock of the device; wait for the end of the step, which has marks.

        The marks of a stall lie before and after a wait. When the device comes to the first, it has done all
        that it was given until then; it comes to the second when that is given to it, or, where its stream
        waits as well, when the bytes have come. So between them it stood still, and for no time if it had
        work for as long as the host waited.

        Args:
            stalls: Marks around each wait for bytes that had not come.
        """
        device: Any = self.device
        scopes = [scope.marks for scope in self.whole_scopes()]
        points = [*self.marks, *self.backward_marks, *chain(*scopes), *chain(*stalls)]
        seconds = iter(device.seconds(points))
        return StepTimes(
            began=next(seconds),
            ended=next(seconds),
            backward_ends=[next(seconds) for _ in self.backward_marks],
            scopes=[ScopeTimes(*islice(seconds, 3)) for _ in scopes],
            stalls=sorted((next(seconds), next(seconds)) for _ in stalls),
        )

    def device_seconds(self) -> float:
        """Return how long the step took by the clock of the device; wait for its end."""
        device: Any = self.device
        began, ended = device.seconds(self.marks)
        return float(ended - began)

    def forward_seconds(self) -> float:
        """Return the time inside the layers' forward, summed."""
        return sum(s.forward_ended - s.forward_began for s in self.scopes if s.forward_ended)
