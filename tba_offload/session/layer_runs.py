"""Runs the layers of a model the way the plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tba_offload.config.policy import Placement
from tba_offload.errors import UnsupportedError
from tba_offload.layers import checkpoint
from tba_offload.layers.checkpoint import is_recomputation
from tba_offload.layers.graph import latest_node
from tba_offload.layers.guards import cache_warning, holds_cache, is_checkpointed
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.planner.sizes import rough_bytes
from tba_offload.session.layer_call import Call
from tba_offload.session.notices import tell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from tba_offload.capture.site import Site
    from tba_offload.config import OffloadConfig
    from tba_offload.layers.stack import LayerStack
    from tba_offload.session.backward import BackwardWatch
    from tba_offload.session.loop import Loop
    from tba_offload.session.session import Session


class LayerRuns:
    """Stands in front of the layers of a session.

    Args:
        stack: The layers, and how they are checkpointed.
        config: What the user wanted.
        ongoing: The step that is open.
        parts: What works in a step.
        watch: Notes when backward comes back to a layer.
    """

    def __init__(
        self, stack: LayerStack, config: OffloadConfig, ongoing: Loop, parts: Session, watch: BackwardWatch
    ) -> None:
        self._stack = stack
        self._config = config
        self._ongoing = ongoing
        self._parts: Any = parts  # the session lives as long as its layers, although a program may lose it
        self._watch = watch
        self._load_checkpoint()

    def close(self) -> None:
        """Record that the layers are given back, and keep the session no longer."""
        self._parts = None

    def configure(self, config: OffloadConfig) -> None:
        """Another policy is in force."""
        self._config = config
        self._load_checkpoint()

    def _load_checkpoint(self) -> None:
        """Load now what the first call of a checkpoint would load, if a layer may be recomputed."""
        controller, placements = self._parts.planning.controller, self._parts.planning.plan.placements
        may_choose = controller is not None and controller.task.may_recompute
        is_wanted = may_choose or any(placement.recomputes for placement in placements)
        if is_wanted and self._stack.checkpoint is checkpoint.torch_checkpoint and not checkpoint.is_loaded():
            tell("loading torch._dynamo, which recomputation needs, so that no step has to (some seconds)")
            checkpoint.load()

    def run(self, site: Site, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a layer the way the plan says.

        Raises:
            UnsupportedError: The policy has the layer recomputed, and it cannot be.
        """
        if self._parts is None:  # closed, and something that wraps the layer's forward calls this still
            return site.forward(*args, **kwargs)
        # Checks stand here and not in what they lead to: in cold caches a call costs as much as what it does.
        if not torch.is_grad_enabled() or self._ongoing.is_inert or is_recomputation():
            self._notice_outer_checkpoint(site)
            return site.forward(*args, **kwargs)
        if self._ongoing.step is None and not self._opens_step(site):
            return site.forward(*args, **kwargs)
        parts, arguments = self._parts, (*args, *kwargs.values())
        is_planned = parts.planning.controller is not None  # otherwise nothing asks what a layer is given
        inputs = self._note_inputs(site, arguments) if is_planned else 0
        placement = self._placement_here(site, arguments)
        # Graphs spare a host the launches that it makes ahead of its device: other devices have none.
        may_be_graph = parts.device.runs_behind and placement is not Placement.KEEP
        graph = self._graph_before(site, placement) if may_be_graph else None
        trace, memory, way = parts.capture.trace, parts.memory.watch, placement.as_run
        if trace.gone:
            self._watch.note_gone()
        before = latest_node() - 1
        scope = trace.begin_scope(site.next_run(self._stack.micro_batch), way, inputs=inputs)
        if memory.is_on and memory.layer_begins(site.index):
            self._watch.watch_input(arguments)
        try:
            call = Call(parts, self._config, self._stack, site, placement, scope, args, kwargs)
            output = self._in_range(site, call) if parts.ranges.is_on else call.run()
            if may_be_graph:
                self._check_graphs(site, placement, graph)
        except BaseException:
            self._ongoing.fail()
            raise
        trace.end_scope(scope)
        if memory.is_on:
            memory.layer_ended(site.index, way)
        if parts.memory.meter is not None:
            parts.outputs.layer_returned(site, way, output)
            parts.memory.meter.sample()
        self._watch.watch(site, output, scope, before)
        return output

    def _in_range(self, site: Site, call: Call) -> object:
        """Run a layer in a range of its own, for a profile to show it."""
        with self._parts.ranges.forward(site.layer.id.name):
            return call.run()

    def _graph_before(self, site: Site, placement: Placement) -> object:
        """Return what the device ran last as a graph before a layer that is not kept.

        Raises:
            UnsupportedError: A graph is captured.
        """
        device = self._parts.device
        if device.is_capturing():
            raise UnsupportedError(
                f"{site.layer.id} is placed {placement.value} and runs while a CUDA graph is captured: "
                "a graph fixes the addresses of activations, so they cannot travel. capture no graph "
                "around attached layers, or place them keep"
            )
        return device.compiled_graph()

    def _check_graphs(self, site: Site, placement: Placement, before: object) -> None:
        """Check that a layer that has run, and is not kept, was not compiled to graphs.

        Raises:
            UnsupportedError: It was.
        """
        if self._parts.device.compiled_graph() is not before:
            raise UnsupportedError(
                f"{site.layer.id} is placed {placement.value} and runs as CUDA graphs, which fix the "
                "addresses of activations, so they cannot travel. compile it with mode='default' or "
                "'max-autotune-no-cudagraphs', or place it keep"
            )

    def _opens_step(self, site: Site) -> bool:
        """Whether a step is open now: the layer was called without its model, or outside of any step."""
        if not self._ongoing.opens_steps or self._ongoing.is_closed:
            if site.layer.module.training and not self._ongoing.is_closed:
                self._parts.notices.outside_step()
            return False
        self._ongoing.open_step()
        return True

    def _note_inputs(self, site: Site, arguments: Sequence[object]) -> int:
        """Bytes that a layer is given; where it is more than the plan is for, the step goes on without it."""
        planning = self._parts.planning
        # A layer that is frozen saves nothing.
        if planning.has_budget and _has_backward(site.layer.module, arguments):
            size = (site.wait(), *self._gradients_there(), *_dimensions(arguments))
            planning.leave_if_outgrown(site.index, size)
        return _activation_bytes(arguments)

    def _gradients_there(self) -> tuple[int, int]:
        """Bytes of gradients, and parameters that get some, if those take room from activations."""
        parts = self._parts
        if not parts.budget.limits.nets_gradients:
            return 0, 0
        return rough_bytes(parts.gradients.alone() or 0), parts.gradients.trained

    # ---- the placement ---------------------------------------------------------------------------

    def _placement_here(self, site: Site, arguments: Sequence[object]) -> Placement:
        """Return what the plan says, unless the layer runs where our hooks or a second run cannot be.

        Raises:
            UnsupportedError: The policy has the layer recomputed, and it must not run twice.
        """
        planning = self._parts.planning
        placement = planning.plan.placements[site.index]
        if placement is Placement.KEEP:
            return placement
        if _hooks_are_taken():
            self._leave_alone(site)
            return Placement.KEEP
        is_planned = placement.recomputes and site.index in planning.chosen
        # What ranks have agreed on is no longer the business of one of them.
        if is_planned and self._parts.world.agree is None:
            mode = self._parts.verifier.mode_of(site.index)
            if not self._parts.verifier.may_repeat(mode):
                placement = Placement.OFFLOAD  # the planner chose it for another mode of the layer
        # Checkpointed by its framework it gets no cache.
        if holds_cache(arguments) and not is_checkpointed(site.layer.module):
            return self._with_cache(site, placement)
        found: Placement = placement
        return found

    def _with_cache(self, site: Site, placement: Placement) -> Placement:
        """Where a layer goes whose forward appends to a cache of keys and values: it must not run twice.

        Raises:
            UnsupportedError: The policy wants it to.
        """
        is_recomputed = placement.recomputes
        if is_recomputed and site.index not in self._parts.planning.chosen:
            raise UnsupportedError(
                f"{site.layer.id} is placed {placement.value}, but its forward appends to a cache of "
                "keys and values, so that a second one would find other keys: switch the cache off "
                "(use_cache=False, to the model or in its config), or place it otherwise"
            )
        self._parts.notices.warn_once("cache", cache_warning())
        return Placement.OFFLOAD if is_recomputed else placement

    def _notice_outer_checkpoint(self, site: Site) -> None:
        """Record that a reentrant checkpoint around a layer records no graph of it before backward.

        Nor does a loss that caches gradients, and there no step has opened either.
        """
        is_placed = self._parts.planning.plan.placements[site.index] is not Placement.KEEP
        if self._ongoing.is_inert or not is_placed or not is_recomputation():
            return
        if self._ongoing.step is not None:
            if site.runs == 0:
                self._leave_alone(site)
        elif torch.is_grad_enabled():
            self._parts.notices.runs_in_backward(site.layer)

    def _leave_alone(self, site: Site) -> None:
        self._parts.capture.trace.leave_alone()
        self._parts.notices.left_alone(site.layer)


def _activation_bytes(arguments: Iterable[object]) -> int:
    """Bytes of the activations among the arguments of a layer."""
    return sum(
        argument.numel() * argument.itemsize
        for argument in arguments
        if isinstance(argument, torch.Tensor) and argument.requires_grad
    )


def _has_backward(layer: nn.Module, arguments: Sequence[object]) -> bool:
    """Whether gradients are wanted of a layer, or of what it is given."""
    if any(parameter.requires_grad for parameter in layer.parameters()):
        return True
    try:
        return any(tensor.requires_grad for tensor in tensors_in(arguments))
    except TooManyError:
        return True


def _dimensions(arguments: Iterable[object]) -> list[int]:
    """All dimensions of the tensors among the arguments of a layer; of one with ragged rows, its elements."""
    return [
        dimension
        for argument in arguments
        if isinstance(argument, torch.Tensor)
        for dimension in ((argument.numel(),) if argument.is_nested else argument.shape)
    ]


def _hooks_are_taken() -> bool:
    """Whether saved tensors belong to others here.

    Hooks of an outer context (a checkpoint, ``save_on_cpu``) would see nothing of the layer if we pushed
    ours or those of a checkpoint, and under a ``torch.func`` transform pushing any is an error.
    """
    autograd: Any = torch._C._autograd
    return (
        not autograd._saved_tensors_hooks_is_enabled()
        or autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003 - positional in C++
    )
