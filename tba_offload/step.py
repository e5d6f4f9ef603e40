"""One training step of a session: what it is measured by, and its record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tba_offload.device.memory import MemoryMeter
    from tba_offload.report.run_log import StepRecord
    from tba_offload.session import Session


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
    """

    def __init__(
        self,
        session: Session,
        *,
        tokens: int | None,
        model_flops: float | None,
        meter: MemoryMeter | None,
        opened_itself: bool = False,
    ) -> None:
        self._session = session
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
        self._base = 0
        self._live_at_pause: int | None = None
        self._seen_tokens: int | None = None
        self._optimizers: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        self._session._begin(self)
        return self

    def measure_base(self) -> None:
        """Reads what the figures of the step are differences to; the session calls it when it is ready."""
        self.gradients_allocated = self._session._gradients_allocated()
        if self.meter is not None:
            self.meter.reset()
            self._base = self.meter.live()
        self._session._mark_times()
        self.began = time.perf_counter()

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

    def optimizer_worked(self, began: float, ended: float) -> None:
        """Notes when an optimizer made a step; forward and backward may have taken place in it."""
        self._optimizers.append((began, ended))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.left = True
        session = self._session
        if session._inert:
            return
        try:
            self._measure_time()
            if kind is None and not self.opened_itself:
                session.capture.trace.end_step()
            if self.meter is not None:
                self._measure_memory(self.meter)
        except BaseException:
            session._end(failed=True)
            raise
        session._end(failed=kind is not None)
        if kind is None:
            session._conclude(self)

    def _measure_time(self) -> None:
        ended = time.perf_counter()
        backward_ends = self._session.capture.trace.backward_ends
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
