"""When backward comes back to the layers, and to what lies between the last of them and the loss."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from tba_offload.capture.retained import is_retained, life_of_layer
from tba_offload.layers.graph import first_differentiable, nearest_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.capture.site import Site
    from tba_offload.capture.trace import ScopeTrace
    from tba_offload.session.ongoing import Ongoing
    from tba_offload.session.parts import Parts

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
        """Notes which graphs are gone that a backward pass had left alive.

        Their gradients of parameters were put in place by no pass that backward hooks are told of.
        """
        trace = self._parts.capture.trace
        if trace.has_retained and trace.note_gone() and not self._ongoing.is_inert:
            self._parts.gradients.count()

    def watch(self, site: Site, output: object, scope: ScopeTrace, before: int) -> None:
        """Has it noted when backward comes back to a layer.

        Args:
            site: Where the layer is.
            output: What it has put out.
            scope: Its run.
            before: Number in autograd's sequence of the node before its first one.
        """
        tensor, step = first_differentiable(output), self._ongoing.step
        if tensor is None or tensor.grad_fn is None:  # a leaf would keep the hook
            return
        trace, lookahead = self._parts.capture.trace, self._parts.capture.lookahead

        def ended() -> None:
            trace.backward_ended()
            self._ended()

        def reached(_: torch.Tensor) -> None:
            is_current = step is self._ongoing.step
            if is_current and scope.backward_began is None:
                site.come_back()
            self.note_gone()
            is_first = trace.backward_reached(scope)
            if is_retained():
                trace.retained(scope, life_of_layer(before))
            if is_first:
                torch.autograd.Variable._execution_engine.queue_callback(ended)
                if not is_current and not self._ongoing.is_inert:
                    self._parts.notices.backward_outside()
            lookahead.reached()
            self._ongoing.look_at_memory()

        tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        if step is not None:
            step.graphs.add(tensor.grad_fn._sequence_nr(), weakref.ref(reached))


class TailWatch:
    """Looks at memory around each operation of backward that is nearest to the model's output.

    With logits and loss it is often there that memory is at its peak, for less than a moment.

    Args:
        ongoing: The step that is open.
        own_bytes: Tells the bytes of activations of layers that are in memory.
    """

    def __init__(self, ongoing: Ongoing, own_bytes: Callable[[], int]) -> None:
        self._ongoing = ongoing
        self._own_bytes = own_bytes

    def watch(self, output: object) -> None:
        """The model's forward has ended with this output."""
        step = self._ongoing.step
        if step is None or step.memory.meter is None:
            return
        self._ongoing.look_at_memory()
        tensor = first_differentiable(output)
        if step.memory.meter.samples and tensor is not None and tensor.grad_fn is not None:
            for node in nearest_nodes(tensor.grad_fn, _TAIL, after=step.graphs.end):
                node.register_prehook(lambda _: self._look())
                node.register_hook(lambda *_: self._look())

    def _look(self) -> None:
        step = self._ongoing.step
        if step is not None:
            step.memory.sample()
            step.memory.saw_rest(self._own_bytes())
