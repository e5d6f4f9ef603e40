"""When backward comes back to the layers, and to what lies between the last of them and the loss."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from tba_offload.layers.graph import first_differentiable, nearest_nodes
from tba_offload.session.memory import BETWEEN, EMBEDDINGS

if TYPE_CHECKING:
    from tba_offload.capture.site import Site
    from tba_offload.capture.trace import ScopeTrace, StepTrace
    from tba_offload.session.session import Session
    from tba_offload.session.step import Step

_TAIL = 32
"""Operations of backward next to the model's output: a loss, the logits and a last norm have about 20."""


class BackwardWatch:
    """Notes when backward comes back to a layer.

    Args:
        session: Whose layers. It is not kept: graphs, which keep this, would keep the model.
    """

    def __init__(self, session: Session) -> None:
        self._loop, self._capture = session.loop, session.capture
        self._memory, self._notices = session.memory, session.notices

    def watch(self, site: Site, output: object, scope: ScopeTrace) -> None:
        """Have it noted when backward comes back to a layer.

        Args:
            site: Where the layer is.
            output: What it has put out.
            scope: Its run.
        """
        tensor, step = first_differentiable(output), self._loop.step
        if tensor is None or tensor.grad_fn is None:  # a leaf would keep the hook
            return
        back = partial(self._came_back, site, scope, step, self._capture.trace)
        tensor.register_hook(back)  # type: ignore[no-untyped-call]
        if step is not None:
            step.graph_end = tensor.grad_fn._sequence_nr()
            step.graphs.append(weakref.ref(back))

    def watch_input(self, arguments: tuple[object, ...]) -> None:
        """Have it noted when backward leaves the first layer for what has made its input, as embeddings have.

        Args:
            arguments: What the layer is given.
        """
        tensor = first_differentiable(arguments)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.register_hook(partial(self._left, self._loop.step))  # type: ignore[no-untyped-call]

    def _left(self, step: Step | None, _: torch.Tensor) -> None:
        """Backward has left the first layer of a step."""
        if step is self._loop.step and self._memory.is_on:
            self._capture.trace.backward_left()
            self._memory.leave(EMBEDDINGS)

    def _came_back(
        self, site: Site, scope: ScopeTrace, step: Step | None, trace: StepTrace, _: torch.Tensor
    ) -> None:
        """Backward has come back to a run of a layer."""
        memory, loop, is_current = self._memory, self._loop, step is self._loop.step
        if is_current and site.waiting and scope.backward_began is None:
            site.come_back()
        is_first = trace.backward_reached(scope)
        if memory.is_on:
            memory.backward_reached(site.index, scope.key)
        if is_first:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._pass_ended, trace))
            if not is_current and not loop.is_inert:
                self._notices.warn_once("backward outside")
        self._capture.lookahead.reached()
        memory.sample()

    def _pass_ended(self, trace: StepTrace) -> None:
        trace.backward_ended()
        self._memory.leave(BETWEEN)
        self._loop.backward_ended()

    def watch_tail(self, output: object) -> None:
        """Look at memory around each operation of backward that is nearest to the model's output.

        With logits and loss it is often there that memory is at its peak, for less than a moment.
        """
        step, meter = self._loop.step, self._memory.meter
        if step is None or meter is None:
            return
        if not meter.samples:
            meter.sample()
            return
        meter.cut()
        tensor = first_differentiable(output)
        if tensor is not None and tensor.grad_fn is not None:
            for node in nearest_nodes(tensor.grad_fn, _TAIL, after=step.graph_end):
                node.register_prehook(self._memory.look)
                node.register_hook(self._memory.look)
