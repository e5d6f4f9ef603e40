"""One training step of a session: what is known of it, and its block."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

from tba_offload.errors import SessionError
from tba_offload.report.log import StepRecord, read_event
from tba_offload.report.timeline import TimelineEvent

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from tba_offload.device.memory import MemoryMeter
    from tba_offload.session.loop import Loop


class Step:
    """One step of a session; see :meth:`Session.step`.

    Attributes:
        loss: Set it to have it in the run log: a number, or a tensor of one element, for which nothing waits.
        tokens: As given to :meth:`Session.step`; may be set inside the block. If it is ``None``, the tokens
            that the model was seen to take count.
        model_flops: As given to :meth:`Session.step`; may be set inside the block.
        record: The :class:`StepRecord`, once the step has ended without an exception. On a device that works
            later than the host, it has the figures that are known by then; :meth:`Session.report` completes
            them.
        is_traced: Whether the user asked to have it recorded over time.
        over_time: What was recorded so, once it has ended; ``None`` if nothing was.
        opened_itself: Whether the first forward opened the step, not :meth:`Session.step`.
        meter: Measures its memory; ``None`` if that is not wanted.
        thread: Number of the thread that opened the step.
        began: Time of its begin, by :func:`time.perf_counter`.
        has_failed: Whether a forward or an optimizer raised an exception in it.
        is_skipped: Whether its gradients were dropped without an update.
        graphs: Hooks on outputs of layers that ran: each lives as long as the graph of its layer. A set of
            weak references would have finalizers, in which an interrupt is lost.
        graph_end: Number in autograd's sequence of the output of the layer that ran last.
        seen_tokens: Tokens of the micro-batches, as seen.
        updates: When optimizers made their steps in it, begin and end.
        updated: Ids of the parameters that optimizers have updated; the optimizers hold these parameters.
        seconds: Duration of the step less that of optimizers in it, by the host's clock; a step that opened
            by itself ends with its last backward pass. Nothing waits for the device at its end.
        optimizer_seconds: Duration of the steps of optimizers since the last step; ``None`` if none was seen.
        had_optimizer: Whether optimizers worked between the step's begin and its end.
        seconds_before: Time that optimizers worked between the last step and this one.
    """

    def __init__(
        self, loop: Loop, meter: MemoryMeter | None, tokens: int | None, flops: float | None, *, trace: bool
    ) -> None:
        self._loop, self.meter, self.tokens, self.model_flops = loop, meter, tokens, flops
        self.loss: float | torch.Tensor | None = None
        self.record: StepRecord | None = None
        self.is_traced = trace
        self.over_time: Mapping[str, object] | None = None
        self.thread = threading.get_ident()
        self.began = self.seconds_before = 0.0
        self.seconds, self.had_optimizer = 0.0, False
        self.optimizer_seconds: float | None = None
        self.opened_itself = self.has_failed = self.is_skipped = False
        self.graph_end = 0
        self.updated: frozenset[int] = frozenset()
        self.graphs: list[weakref.ref[Callable[..., None]]] = []
        self.updates: list[tuple[float, float]] = []
        self.seen_tokens = 0

    def __enter__(self) -> Self:
        self._loop.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(failed=kind is not None)

    def end(self, *, failed: bool) -> None:
        """End the step. As in all of this file, an interrupt waits until that is done."""
        self._loop.end(self, failed=failed)

    @property
    def timeline(self) -> TimelineEvent:
        """The step over time; its ``write(path)`` makes a picture or a trace of it.

        Raises:
            SessionError: The step was not recorded, has not ended, or was left by an exception.
        """
        if self.over_time is None:
            raise SessionError(
                "this step was not recorded over time: ask for it with session.step(trace=True), and look at "
                "it after its end"
            )
        return read_event(TimelineEvent, self.over_time)

    # ---- optimizers ------------------------------------------------------------------------------

    def add_update(self, began: float, parameters: frozenset[int]) -> None:
        """Record that an optimizer made its step; forward and backward may have taken place in it.

        Args:
            began: When it began, by :func:`time.perf_counter`.
            parameters: The ids of the optimizer's parameters.
        """
        self.updates.append((began, time.perf_counter()))
        self.updated |= parameters

    def update_times(self, backward_ends: Sequence[float]) -> list[tuple[float, float]]:
        """Return when each optimizer worked; forward and backward of a closure are left out.

        Args:
            backward_ends: When backward passes ended.
        """
        return [
            (max([began, *(end for end in backward_ends if began < end < ended)]), ended)
            for began, ended in self.updates
        ]

    def stop(self, backward_ends: Sequence[float]) -> None:
        """Take the times of the step, which ends now.

        Args:
            backward_ends: When backward passes ended.
        """
        ended = backward_ends[-1] if self.opened_itself and backward_ends else time.perf_counter()
        updates = self.update_times(backward_ends)
        within = sum(max(min(until, ended) - since, 0.0) for since, until in updates)
        self.seconds, self.had_optimizer = ended - self.began - within, within > 0
        if updates or self.seconds_before > 0:
            self.optimizer_seconds = self.seconds_before + sum(until - since for since, until in updates)
