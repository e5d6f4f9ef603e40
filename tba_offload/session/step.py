"""One training step of a session: what it is measured by, and its record."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Self

from tba_offload.errors import SessionError
from tba_offload.report.log import TimelineEvent, read_event
from tba_offload.session.figures import StepMemory, Times, Updates
from tba_offload.session.record import LateValue

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from weakref import ref

    import torch

    from tba_offload.report.log import StepRecord
    from tba_offload.session.steps import Steps


class Step:
    """One step of a session; see :meth:`Session.step`.

    Attributes:
        loss: Set it to have it in the run log: a number, or a tensor of one element, for which nothing waits.
        tokens: As given to :meth:`Session.step`; may be set inside the block. If it is ``None``, the tokens
            that the model was seen to take count.
        model_flops: As given to :meth:`Session.step`; may be set inside the block.
        record: The :class:`StepRecord`, once the step has ended without an exception. Of a device that works
            later than the host it has the figures that are known by then; :meth:`Session.report` completes
            them.
        timeline: The step over time, if it was recorded.
        memory: Its memory.
        updates: What optimizers did in it.
        state: What has become of it.
        graphs: What its forward passes have recorded.
        opened_itself: Whether the first forward opened it, not :meth:`Session.step`.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        tokens: int | None,
        model_flops: float | None,
        memory: StepMemory,
        opened_itself: bool = False,
        trace: bool = False,
    ) -> None:
        self._steps = steps
        self.tokens = tokens
        self.model_flops = model_flops
        self.opened_itself = opened_itself
        self.loss: float | torch.Tensor | LateValue[float | None] | None = None
        self.record: StepRecord | None = None
        self.timeline = StepTimeline(wanted=trace)
        self.memory = memory
        self.updates = Updates()
        self.state = StepState()
        self.graphs = Graphs()
        self._seen_tokens: int | None = None

    def __enter__(self) -> Self:
        self._steps.begin(self)
        return self

    def start(self, *, gradients_allocated: bool) -> None:
        """All is ready for it: reads what its figures are differences to.

        Args:
            gradients_allocated: Whether every gradient exists.
        """
        self.memory.begin(gradients_allocated=gradients_allocated)
        self.state.begin()

    @property
    def began(self) -> float:
        """When it began, by :func:`time.perf_counter`."""
        return self.state.began

    def will_have_loss(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        loss: Callable[[list[list[float]]], float | None],
    ) -> None:
        """Have :attr:`loss` made of small tensors when the device has come to them; nothing waits for that.

        Args:
            groups: The tensors.
            loss: Makes it of their numbers, a list for each group.
        """
        self.loss = LateValue(self._steps.device, groups, loss)

    def saw_tokens(self, count: int) -> None:
        """Count the tokens of a micro-batch."""
        self._seen_tokens = (self._seen_tokens or 0) + count

    @property
    def all_tokens(self) -> int | None:
        """Tokens of the step, as told or else as seen."""
        return self._seen_tokens if self.tokens is None else self.tokens

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.state.leave()
        steps = self._steps
        if steps.ongoing.is_inert:
            return
        try:
            times = self._times()
            if kind is None and not self.opened_itself:
                steps.trace.end_step()
            self.memory.end()
            if kind is None:
                steps.look_back()
        except BaseException:
            steps.end(failed=True)
            raise
        steps.end(failed=kind is not None)
        if kind is None:
            self.record = steps.conclude(self, times)

    def _times(self) -> Times:
        ended, backward_ends = time.perf_counter(), self._steps.trace.backward_ends
        if self.opened_itself and backward_ends:
            ended = backward_ends[-1]
        updates = self.updates
        return Times.of(self.began, ended, updates.times(backward_ends), updates.seconds_before)


class StepTimeline:
    """A step over time, once it has ended, if it was recorded.

    Args:
        wanted: Whether the user asked for it.

    Attributes:
        is_wanted: As given.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.is_wanted = wanted
        self._figures: Mapping[str, object] | None = None

    def tell(self, figures: Mapping[str, object]) -> None:
        """Record that the step has ended, and was recorded."""
        self._figures = figures

    @property
    def event(self) -> TimelineEvent:
        """What was recorded.

        Raises:
            SessionError: The step was not recorded, has not ended, or was left by an exception.
        """
        if self._figures is None:
            raise SessionError(
                "this step was not recorded over time: ask for it with session.step(trace=True), and look at "
                "it after its end"
            )
        return read_event(TimelineEvent, self._figures)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the step as a picture (``.svg``) or as a trace (``.json``).

        Args:
            path: The file.

        Raises:
            SessionError: The step was not recorded.
            ConfigError: Another suffix.
            MissingDependencyError: A picture needs matplotlib, which is not installed.
            OSError: The file cannot be written.
        """
        from tba_offload.report.timeline import write_timeline

        write_timeline(self.event, path)


class StepState:
    """What has become of a step.

    Attributes:
        began: When it began, by :func:`time.perf_counter`.
        left: Whether it has ended.
        failed: Whether a forward in it has raised an exception.
        skipped: Whether its gradients were dropped without an update.
    """

    def __init__(self) -> None:
        self.began = 0.0
        self.left = False
        self.failed = False
        self.skipped = False

    def begin(self) -> None:
        """Record that it begins."""
        self.began = time.perf_counter()

    def leave(self) -> None:
        """Record that it has ended, whatever comes of it."""
        self.left = True

    def fail(self) -> None:
        """Record that a forward has raised an exception: the step comes to nothing."""
        self.failed = True

    def skip(self) -> None:
        """Its gradients were dropped without an update."""
        self.skipped = True


class Graphs:
    """What the forward passes of a step have recorded.

    Attributes:
        end: Number in autograd's sequence of what the last layer put out.
    """

    def __init__(self) -> None:
        self.end = 0
        self._all: deque[ref[Callable[..., None]]] = deque()

    def add(self, end: int, graph: ref[Callable[..., None]]) -> None:
        """Record that a layer has run.

        Args:
            end: Number in autograd's sequence of what it put out.
            graph: Is gone when the graph of the layer is.
        """
        self.end = end
        self._all.append(graph)

    def __bool__(self) -> bool:
        graphs = self._all
        while graphs and graphs[0]() is None:
            graphs.popleft()
        return bool(graphs)
