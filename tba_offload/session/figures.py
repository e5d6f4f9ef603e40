"""What a step is measured by: its memory, and the work of its optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from tba_offload.adapt.beside import SeenBeside
from tba_offload.session.memory_watch import BETWEEN, UPDATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.device.memory import MemoryMeter
    from tba_offload.session.memory_watch import MemoryWatch
    from tba_offload.session.outputs import Outputs


class StepMemory:
    """The memory of one step, as differences to what was live when it began.

    Args:
        meter: Measures it; ``None`` if that is not wanted.
        watch: Looks at what it is for.
        outputs: Those of earlier steps are none of what lasts.

    Attributes:
        meter: As given.
        gradients_allocated: Whether every gradient existed when the step began.
        base_bytes: Bytes that were live when the step began, gradients and outputs of earlier steps left out;
            ``None`` if not measured.
        state_bytes: By how much optimizers have let memory grow.
        reserved_bytes: Most bytes that the allocator held in the step; ``None`` if that is not known.
        device_peak_bytes: Most live bytes in forward and backward, gradients and states included.
    """

    def __init__(self, meter: MemoryMeter | None, watch: MemoryWatch, outputs: Outputs) -> None:
        self.meter = meter
        self._watch = watch
        self._outputs = outputs
        self.gradients_allocated = False
        self.state_bytes = 0
        self.base_bytes: int | None = None
        self._live_at_pause: int | None = None
        self.reserved_bytes: int | None = None
        self.device_peak_bytes: int | None = None
        self._peak: int | None = None
        self._overlaps = False

    def begin(self, *, gradients_allocated: bool) -> None:
        """Read what is live now; the step begins."""
        self.gradients_allocated = gradients_allocated
        self._outputs.begin_step()
        if self.meter is not None:
            self.meter.reset()
            self.base_bytes = self.meter.live() - self._outputs.at_begin

    def overlapped(self) -> None:
        """Record that a step of another session is open at the same time.

        The memory of neither can be told.
        """
        self._overlaps = True

    @property
    def beside(self) -> SeenBeside | None:
        """Most bytes beside the activations of layers; ``None`` if the memory of this step was not seen."""
        at_loss = self._watch.runs.beside_at_loss
        if self._overlaps or at_loss is None:
            return None
        return SeenBeside(at_loss, [layer.beside for layer in self._watch.layers])

    def pause(self) -> None:
        """From now on an optimizer works: its memory is not that of activations."""
        if self.meter is not None and self._live_at_pause is None:
            self.meter.pause()
            self._live_at_pause = self.meter.live()
            if self._watch.is_on:
                self._watch.leave(UPDATE)

    def resume(self) -> None:
        """Record that the optimizer is done; what it has left allocated are its states."""
        self._count_states()
        if self.meter is not None:
            self.meter.resume()
            if self._watch.is_on:
                self._watch.leave(BETWEEN)

    def end(self) -> None:
        """Record that the step has ended."""
        if self.meter is not None:
            self._count_states()
            self._peak = max(self.meter.peak() - (self.base_bytes or 0), 0)
            self.reserved_bytes = self.meter.reserved()
            self.device_peak_bytes = self.meter.whole_peak()

    @property
    def peak_bytes(self) -> int | None:
        """Peak of live bytes, gradients and states left out that the step allocated; ``None`` if untold."""
        return None if self._overlaps else self._peak

    def _count_states(self) -> None:
        if self.meter is not None and self._live_at_pause is not None:
            self.state_bytes += max(self.meter.live() - self._live_at_pause, 0)
            self._live_at_pause = None


class Updates:
    """What optimizers did in one step.

    Attributes:
        parameters: Ids of the parameters that they have made their step with.
        seconds_before: How long they worked between the last step and this one.
    """

    def __init__(self) -> None:
        self.parameters: frozenset[int] = frozenset()
        self.seconds_before = 0.0
        self._times: list[tuple[float, float]] = []
        self._overflows: list[bool | Tensor] = []

    def follow(self, seconds: float) -> None:
        """Note how long optimizers worked between the last step and this one."""
        self.seconds_before = seconds

    def add(
        self, began: float, ended: float, *, parameters: frozenset[int], overflowed: bool | Tensor
    ) -> None:
        """Note that an optimizer made a step; forward and backward may have taken place in it.

        Args:
            began: When it began, by :func:`time.perf_counter`.
            ended: When it ended.
            parameters: The ids of the optimizer's parameters.
            overflowed: Whether a gradient scaler made it skip the update; a tensor of one element if its
                device is still to tell.
        """
        self._times.append((began, ended))
        self._overflows.append(overflowed)
        self.parameters |= parameters

    def __bool__(self) -> bool:
        return bool(self._times)

    @property
    def overflowed(self) -> bool:
        """Whether it is known that a gradient scaler made all optimizers skip the update."""
        return bool(self) and all(each is True for each in self._overflows)

    @property
    def undecided(self) -> list[Tensor]:
        """What devices are still to tell, where that decides whether all optimizers skipped the update."""
        if any(each is False for each in self._overflows):
            return []
        return [each for each in self._overflows if isinstance(each, Tensor)]

    def times(self, backward_ends: Sequence[float]) -> list[tuple[float, float]]:
        """When each of them worked, forward and backward left out.

        Args:
            backward_ends: When backward passes ended.
        """
        return [_own_part(began, ended, backward_ends) for began, ended in self._times]


class Times(NamedTuple):
    """How long a step took.

    Attributes:
        seconds: Duration of the step less that of optimizers in it, by the host's clock; a step that opened
            by itself ends with its last backward pass. Nothing waits for the device at its end.
        optimizer_seconds: Duration of the steps of optimizers since the last step; ``None`` if none was seen.
        had_optimizer: Whether optimizers worked between the step's begin and its end.
    """

    seconds: float
    optimizer_seconds: float | None
    had_optimizer: bool

    @classmethod
    def of(
        cls, began: float, ended: float, updates: Sequence[tuple[float, float]], seconds_before: float
    ) -> Times:
        """Return the times of a step.

        Args:
            began: When it began.
            ended: When it ended.
            updates: When optimizers worked.
            seconds_before: How long they worked between the last step and this one.
        """
        within = sum(max(min(until, ended) - since, 0.0) for since, until in updates)
        seconds = seconds_before + sum(until - since for since, until in updates)
        is_seen = bool(updates) or seconds_before > 0
        return cls(ended - began - within, seconds if is_seen else None, within > 0)


def _own_part(began: float, ended: float, backward_ends: Sequence[float]) -> tuple[float, float]:
    """Return the part of an optimizer's step that is its own.

    A closure that it calls is forward and backward.
    """
    return max([began, *(end for end in backward_ends if began < end < ended)]), ended
