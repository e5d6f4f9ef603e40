"""The trace of one step: when layers ran, which tensors layers saved, and when backward used the tensors.

One run of a layer, from the start of forward to the end of its backward, is called a scope. Times are host
times (:func:`time.perf_counter`). An accelerator runs asynchronously, so host times show only when the host
submitted work. If the planner needs device times, the trace also records marks (events) on the device. After
the step, :meth:`StepTrace.device_times` turns the marks into times.
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
    """One run of a layer.

    Attributes:
        layer: Global index of the layer, from 0.
        micro_batch: Number of the micro-batch in the framework. If the framework sets no number, a count
            of the layer's runs in the step, from 0.
        chunk: Index of the model chunk in an interleaved pipeline.
        name: Module name of the layer.
    """

    layer: int
    micro_batch: int
    chunk: int
    name: str

    def __str__(self) -> str:
        return f"layer {self.layer} ({self.name}), micro-batch {self.micro_batch}"


class ActivationKey(NamedTuple):
    """A storage that a run of a layer saved.

    Attributes:
        scope: The run of the layer.
        number: Index of the storage among the storages that this run saved.
    """

    scope: ScopeKey
    number: int

    def __str__(self) -> str:
        return f"{self.scope}, activation {self.number}"


class Treatment(enum.Enum):
    """Decision of the saved-tensor hooks about one activation."""

    OFFLOADED = "offloaded"
    LEARNED_KEEP = "learned keep"
    SLOW_KEEP = "slow keep"
    PLANNED_KEEP = "planned keep"
    REBUILT = "rebuilt"


class ScopeTimes(NamedTuple):
    """Start of forward, end of forward and start of backward in one run of a layer."""

    forward_began: float
    forward_ended: float
    backward_began: float


class StepTimes(NamedTuple):
    """The times of one step in seconds, all by the same clock. Only differences between times are meaningful.

    Attributes:
        began: Start of the step.
        ended: End of the step.
        scopes: Times of the runs of layers, in the order of :meth:`StepTrace.whole_scopes`.
        backward_ends: Times at which the backward passes ended.
        stalls: Start and end of each wait for I/O, in order.
    """

    began: float
    ended: float
    scopes: Sequence[ScopeTimes | ScopeTrace]
    backward_ends: Sequence[float]
    stalls: Sequence[tuple[float, float]]


@dataclass(slots=True)
class ActivationTrace:
    """A storage that a run of a layer saved. All times are host times.

    A step has too many activations to record a mark on the device for each. Host times show the order in
    which a layer saves activations, and roughly how much of the layer's work comes before each activation.
    """

    key: ActivationKey
    nbytes: int
    treatment: Treatment
    packed_at: float = field(default_factory=perf_counter)
    unpacked_at: float | None = None


@dataclass(slots=True)
class ScopeTrace:
    """One run of a layer. All times are host times.

    Attributes:
        key: The run.
        placement: The placement with which the layer ran; ``keep`` if the session did not capture the layer.
        forward_began: Time at which forward began.
        input_bytes: Bytes of the activations among the layer's arguments.
        forward_ended: Time at which forward ended; 0 until forward ends.
        backward_began: Time at which backward began; 0 until backward begins.
        marks: Marks on the device at the start and end of forward and at the start of backward. The list is
            empty on a CPU, and if the planner does not need device times.
        attention_bytes: Bytes of the output of fused attention, for placement
            ``recompute-except-attention``.
        forward_gradients: Bytes of gradients that existed at the start of forward; ``None`` if not counted.
        backward_gradients: Bytes of gradients that existed at the start of backward; ``None`` if not counted.
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
    """Everything that was recorded in one step.

    Attributes:
        scopes: The runs of layers, in the order in which forward began.
        activations: The activations, in the order of saving.
        sources: Offloaded tensors from which placement ``offload-remat`` rebuilds saved tensors.
        kept_bytes: Bytes of saved tensors that the hooks kept in memory, except parameters and buffers.
        deduplicated_bytes: Bytes of saved tensors whose storage was already saved in this step.
        rebuilt_bytes: Bytes of activations that placement ``offload-remat`` computes again.
        left_alone: Number of runs of layers that were not captured, because other code had set saved-tensor
            hooks or a transform of ``torch.func`` forbade hooks.
        backward_seconds: Total seconds of the backward passes. A pass is timed from the first layer that
            backward reaches to the end of the graph.
        backward_ends: Times at which the backward passes ended.
        device: The accelerator on which marks are recorded; ``None`` if no marks are recorded.
        marks: Marks on the device at the start and end of the step.
        backward_marks: Marks on the device at the ends of the backward passes.
        gradients: Function that returns the bytes of existing gradients; ``None`` if gradients are not
            counted.
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
        """Record a mark for the start of the step on ``device``, and record all later marks too."""
        self.device, self.marks = device, [device.mark()]

    def end_step(self) -> None:
        """Record the end of the step."""
        if self.device is not None:
            self.marks[1:] = [self.device.mark()]

    def begin_scope(self, key: ScopeKey, placement: str, *, inputs: int = 0) -> ScopeTrace:
        """Record the start of a layer's forward.

        Args:
            key: The run.
            placement: The placement with which the layer runs.
            inputs: Bytes of the activations among the layer's arguments.
        """
        scope = ScopeTrace(key, placement, perf_counter(), input_bytes=inputs)
        if self.device is not None:  # no helper function, because this code runs once for each run of a layer
            scope.marks.append(self.device.mark())
        if self.gradients is not None:
            scope.forward_gradients = self.gradients()
        self.scopes.append(scope)
        return scope

    def end_scope(self, scope: ScopeTrace) -> None:
        """Record the end of a layer's forward."""
        scope.forward_ended = perf_counter()
        if self.device is not None:
            scope.marks.append(self.device.mark())

    def backward_reached(self, scope: ScopeTrace) -> bool:
        """Record that backward reaches a run of a layer; return True for the first run in a backward pass."""
        scope.backward_began = perf_counter()
        del scope.marks[2:]  # an earlier backward through the same graph may have added a mark
        if self.device is not None:
            scope.marks.append(self.device.mark())
        if self.gradients is not None:
            scope.backward_gradients = self.gradients()
        is_first = self._backward_began is None
        self._backward_began = self._backward_began or scope.backward_began
        return is_first

    def backward_ended(self) -> None:
        """Record the end of a backward pass."""
        if self._backward_began is not None:
            self.backward_ends.append(perf_counter())
            self.backward_seconds += self.backward_ends[-1] - self._backward_began
            self._backward_began = None
            if self.device is not None:
                self.backward_marks.append(self.device.mark())

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun but not ended, for example because of an exception."""
        return self._backward_began is not None

    def whole_scopes(self) -> list[ScopeTrace]:
        """Return the runs of layers whose forward ended and whose backward began, in the order of forward."""
        return [scope for scope in self.scopes if scope.forward_ended and scope.backward_began]

    def host_times(self, stalls: Sequence[tuple[float, float]], *, began: float, ended: float) -> StepTimes:
        """Return the times by the host's clock.

        Args:
            stalls: Start and end of each wait of the training thread for I/O.
            began: Start of the step.
            ended: End of the step.
        """
        return StepTimes(began, ended, self.whole_scopes(), self.backward_ends, stalls)

    def device_times(self, stalls: Sequence[tuple[Mark, Mark]]) -> StepTimes:
        """Wait for the end of the step on the device, and return its times by the device's clock.

        Args:
            stalls: Marks on the device before and after each wait of the host for I/O. The time between the
                two marks of a wait is the idle time of the device.
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
        """Wait for the end of the step on the device, and return its duration by the device's clock."""
        device: Any = self.device
        began, ended = device.seconds(self.marks)
        return float(ended - began)

    def forward_seconds(self) -> float:
        """Return the total seconds of forward in all layers, in host time."""
        return sum(s.forward_ended - s.forward_began for s in self.scopes if s.forward_ended)
