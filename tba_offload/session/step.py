"""One training step of a session: what it is measured by, and its record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from weakref import ref

    from tba_offload.device.memory import MemoryMeter
    from tba_offload.report.run_log import StepRecord
    from tba_offload.session.steps import Steps


class Step:
    """One step of a session; see :meth:`Session.step`.

    Attributes:
        loss: Set it to have it in the run log.
        tokens: As given to :meth:`Session.step`; may be set inside the block. If it is ``None``, the tokens
            that the model was seen to take count.
        model_flops: As given to :meth:`Session.step`; may be set inside the block.
        record: The :class:`StepRecord`, once the step has ended without an exception.
        began: When it began, by :func:`time.perf_counter`.
        seconds: Duration of the block less that of optimizers in it, by the host's clock; a step that opened
            by itself ends with its last backward pass. Nothing waits for the device at its end.
        optimizer_seconds: Duration of the steps of optimizers; ``None`` if none was seen.
        meter: Measures its memory; ``None`` if that is not wanted.
        activation_peak_bytes: Peak of live bytes minus those live when it began, gradients and optimizer
            states that were allocated in it left out.
        rest_bytes: Most live bytes beside the activations of layers, seen around the loss; meant for steps in
            which all layers run with hooks.
        state_bytes: By how much optimizers have let memory grow.
        left: Whether it has ended.
        gradients_allocated: Whether every gradient existed when it began.
        skipped: Whether its gradients were dropped without an update.
        opened_itself: Whether the first forward opened it, not :meth:`Session.step`.
        overlaps: Whether a step of another session was open meanwhile, so that its memory cannot be told.
        failed: Whether a forward in it has raised an exception.
        updated: Ids of the parameters that optimizers have made their step with.
        layers_end: Number in autograd's sequence of what the last layer put out.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        tokens: int | None,
        model_flops: float | None,
        meter: MemoryMeter | None,
        opened_itself: bool = False,
    ) -> None:
        self._steps = steps
        self.meter = meter
        self.tokens = tokens
        self.model_flops = model_flops
        self.opened_itself = opened_itself
        self.loss: float | None = None
        self.record: StepRecord | None = None
        self.seconds = 0.0
        self.optimizer_seconds: float | None = None
        self.activation_peak_bytes: int | None = None
        self.rest_bytes = 0
        self.state_bytes = 0
        self.gradients_allocated = False
        self.skipped = False
        self.overlaps = False
        self.left = False
        self.began = 0.0
        self.failed = False
        self.updated: frozenset[int] = frozenset()
        self.layers_end = 0
        self._graphs: list[ref[Callable[..., None]]] = []
        self._base = 0
        self._live_at_pause: int | None = None
        self._seen_tokens: int | None = None
        self._optimizers: list[tuple[float, float]] = []
        self._overflows: list[bool] = []  # of the optimizers' steps, whether a scaler made them skip

    def __enter__(self) -> Self:
        self._steps.begin(self)
        return self

    def measure_base(self, *, gradients_allocated: bool) -> None:
        """Reads what the figures of the step are differences to, when all is ready for it."""
        self.gradients_allocated = gradients_allocated
        if self.meter is not None:
            self.meter.reset()
            self._base = self.meter.live()
        self.began = time.perf_counter()

    def overlapped(self) -> None:
        """A step of another session is open at the same time."""
        self.overlaps = True

    def fail(self) -> None:
        """A forward has raised an exception: the step comes to nothing."""
        self.failed = True

    def skip(self) -> None:
        """Its gradients were dropped without an update."""
        self.skipped = True

    def saw_graph(self, end: int, graph: ref[Callable[..., None]]) -> None:
        """A layer has run.

        Args:
            end: Number in autograd's sequence of what it put out.
            graph: Is gone when the graph of the layer is.
        """
        self.layers_end = end
        self._graphs.append(graph)

    @property
    def has_graph(self) -> bool:
        """Whether the graph of any forward of this step is alive."""
        return any(graph() is not None for graph in self._graphs)

    def saw_tokens(self, count: int) -> None:
        """Counts the tokens of a micro-batch."""
        self._seen_tokens = (self._seen_tokens or 0) + count

    def saw_rest(self, of_layers: int) -> None:
        """Notes what is live now beside ``of_layers`` bytes of activations of layers."""
        if self.meter is not None:
            self.rest_bytes = max(self.rest_bytes, self.meter.live() - self._base - of_layers)

    @property
    def all_tokens(self) -> int | None:
        """Tokens of the step, as told or else as seen."""
        return self._seen_tokens if self.tokens is None else self.tokens

    def pause(self) -> None:
        """From now on an optimizer works: its memory is not that of activations."""
        if self.meter is not None and self._live_at_pause is None:
            self.meter.pause()
            self._live_at_pause = self.meter.live()

    def resume(self) -> None:
        """The optimizer is done; what it has left allocated are its states."""
        self._count_states()
        if self.meter is not None:
            self.meter.resume()

    def optimizer_worked(
        self, began: float, ended: float, *, parameters: frozenset[int], overflowed: bool
    ) -> None:
        """Notes that an optimizer made a step; forward and backward may have taken place in it.

        Args:
            began: When it began, by :func:`time.perf_counter`.
            ended: When it ended.
            parameters: The ids of the optimizer's parameters.
            overflowed: Whether a gradient scaler made it skip the update.
        """
        self._optimizers.append((began, ended))
        self._overflows.append(overflowed)
        self.updated |= parameters

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has made a step."""
        return bool(self._overflows)

    @property
    def overflowed(self) -> bool:
        """Whether optimizers have made steps, and a gradient scaler made all of them skip the update."""
        return self.stepped and all(self._overflows)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
        steps = self._steps
        if steps.ongoing.is_inert:
            return
        try:
            self._measure_time(steps.trace.backward_ends)
            if kind is None and not self.opened_itself:
                steps.trace.end_step()
            if self.meter is not None:
                self._measure_memory(self.meter)
        except BaseException:
            steps.end(failed=True)
            raise
        steps.end(failed=kind is not None)
        if kind is None:
            self.record = steps.conclude(self)

    def leave(self) -> None:
        """It has ended, whatever comes of it."""
        self.left = True

    def _measure_time(self, backward_ends: Sequence[float]) -> None:
        ended = time.perf_counter()
        updates = [_update(since, until, backward_ends) for since, until in self._optimizers]
        if updates:
            self.optimizer_seconds = sum(until - since for since, until in updates)
        if self.opened_itself and backward_ends:
            ended = backward_ends[-1]
        within = (min(until, ended) - since for since, until in updates)
        self.seconds = ended - self.began - sum(max(seconds, 0.0) for seconds in within)

    def _measure_memory(self, meter: MemoryMeter) -> None:
        self._count_states()
        peak = max(meter.peak() - self._base, 0)
        self.activation_peak_bytes = None if self.overlaps else peak

    def _count_states(self) -> None:
        if self.meter is not None and self._live_at_pause is not None:
            self.state_bytes += max(self.meter.live() - self._live_at_pause, 0)
            self._live_at_pause = None


def _update(began: float, ended: float, backward_ends: Sequence[float]) -> tuple[float, float]:
    """The part of an optimizer's step that is its own: a closure that it calls is forward and backward."""
    return max([began, *(end for end in backward_ends if began < end < ended)]), ended
