"""When backward comes back to the layers, and to what lies between the last of them and the loss."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from tba_offload.capture.retained import is_retained, life_of_layer
from tba_offload.layers.graph import first_differentiable, keeps_graph, nearest_nodes
from tba_offload.session.memory_watch import BETWEEN, EMBEDDINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.capture.site import Site
    from tba_offload.capture.trace import ScopeTrace, StepTrace
    from tba_offload.session.ongoing import Ongoing
    from tba_offload.session.parts import Parts
    from tba_offload.session.step import Step

_TAIL = 32
"""Operations of backward next to the model's output: a loss, the logits and a last norm have about 20."""


class BackwardWatch:
    """Notes when backward comes back to a layer.

    Args:
        ongoing: The step that is open.
        parts: What works in a step.
        ended: Is called when a backward pass has ended.
    """

    def __init__(self, ongoing: Ongoing, parts: Parts, ended: Callable[[], object]) -> None:
        self._ongoing = ongoing
        self._parts = parts
        self._ended = ended

    def note_gone(self) -> None:
        """Note which graphs are gone that a backward pass had left alive.

        Their gradients of parameters were put in place by no pass that backward hooks are told of.
        """
        if self._parts.capture.trace.note_gone() and not self._ongoing.is_inert:
            self._parts.gradients.count()

    def watch(self, site: Site, output: object, scope: ScopeTrace, before: int) -> None:
        """Have it noted when backward comes back to a layer.

        Args:
            site: Where the layer is.
            output: What it has put out.
            scope: Its run.
            before: Number in autograd's sequence of the node before its first one.
        """
        tensor, step = first_differentiable(output), self._ongoing.step
        if tensor is None or tensor.grad_fn is None:  # a leaf would keep the hook
            return
        back = _Return(self, site, scope, before, step, self._parts.capture.trace)
        tensor.register_hook(back)  # type: ignore[no-untyped-call]
        if step is not None:
            step.graphs.add(tensor.grad_fn._sequence_nr(), weakref.ref(back))

    def watch_input(self, arguments: tuple[object, ...]) -> None:
        """Have it noted when backward leaves the first layer for what has made its input, as embeddings have.

        Args:
            arguments: What the layer is given.
        """
        tensor = first_differentiable(arguments)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.register_hook(partial(_left, weakref.ref(self), self._ongoing.step))  # type: ignore[no-untyped-call]

    def left(self, step: Step | None) -> None:
        """Backward has left the first layer of a step."""
        if step is self._ongoing.step and self._parts.memory_watch.is_on:
            self._parts.capture.trace.backward_left()
            self._parts.memory_watch.leave(EMBEDDINGS)

    def came_back(self, to: _Return) -> None:
        """Backward has come back to a run of a layer."""
        parts, trace, scope = self._parts, to.trace, to.scope
        is_current = to.step is self._ongoing.step
        if is_current and to.site.waiting and scope.backward_began is None:
            to.site.come_back()
        if parts.capture.trace.gone:
            self.note_gone()
        if parts.ranges.is_on:
            parts.ranges.backward_reached(to.site.layer.id.name)
        is_first = trace.backward_reached(scope)
        if parts.memory_watch.is_on:
            parts.memory_watch.backward_reached(to.site.index, scope.key)
        if keeps_graph() and is_retained():
            trace.retained(scope, life_of_layer(to.before, trace.gone.append))
        if is_first:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._pass_ended, trace))
            if not is_current and not self._ongoing.is_inert:
                parts.notices.backward_outside()
        parts.capture.lookahead.reached()
        if self._ongoing.meter is not None:
            self._ongoing.meter.sample()

    def _pass_ended(self, trace: StepTrace) -> None:
        trace.backward_ended()
        if self._parts.ranges.is_on:
            self._parts.ranges.backward_ended()
        if self._parts.memory_watch.is_on:
            self._parts.memory_watch.leave(BETWEEN)
        self._ended()


def _left(watch: weakref.ref[BackwardWatch], step: Step | None, _: torch.Tensor) -> None:
    found = watch()
    if found is not None:
        found.left(step)


class _Return:
    """A hook of autograd on what a run of a layer has put out: backward comes back to it.

    One object for each run, and no function with what it closes over, which are ten: as long as graphs live
    the cyclic collector looks at every object that they hold.
    """

    __slots__ = ("__weakref__", "before", "scope", "site", "step", "trace", "watch")

    def __init__(
        self,
        watch: BackwardWatch,
        site: Site,
        scope: ScopeTrace,
        before: int,
        step: Step | None,
        trace: StepTrace,
    ) -> None:
        self.watch = watch
        self.site = site
        self.scope = scope
        self.before = before
        self.step = step
        self.trace = trace

    def __call__(self, _: torch.Tensor) -> None:
        self.watch.came_back(self)


class TailWatch:
    """Looks at memory around each operation of backward that is nearest to the model's output.

    With logits and loss it is often there that memory is at its peak, for less than a moment.

    Args:
        ongoing: The step that is open.
    """

    def __init__(self, ongoing: Ongoing) -> None:
        self._ongoing = ongoing

    def watch(self, output: object) -> None:
        """Record that the model's forward has ended with this output."""
        step, meter = self._ongoing.step, self._ongoing.meter
        if step is None or meter is None:
            return
        if not meter.samples:
            meter.sample()
            return
        meter.cut()
        tensor = first_differentiable(output)
        if tensor is not None and tensor.grad_fn is not None:
            for node in nearest_nodes(tensor.grad_fn, _TAIL, after=step.graphs.end):
                node.register_prehook(lambda _: self._look())
                node.register_hook(lambda *_: self._look())

    def _look(self) -> None:
        meter = self._ongoing.meter
        if meter is not None:
            meter.cut()
