"""Forward of attached layers with their planned placement, and hooks that observe backward."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tba_offload import torch_private
from tba_offload.capture.hooks import LayerHooks
from tba_offload.capture.rematerialize import RematerializingHooks
from tba_offload.errors import UnsupportedError
from tba_offload.layers import graph
from tba_offload.placements import Placement, Staying
from tba_offload.planner.measure import rough_bytes
from tba_offload.recompute.arguments import is_cache
from tba_offload.recompute.attention import AttentionOnce
from tba_offload.recompute.checkpoint import RecomputedLayer, Trial
from tba_offload.session.memory import BACKWARD, BETWEEN, EMBEDDINGS, FORWARD

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from tba_offload.capture.hooks import Kept, Packed
    from tba_offload.capture.site import Site
    from tba_offload.capture.trace import ScopeTrace, StepTrace
    from tba_offload.recompute.arguments import Arguments
    from tba_offload.session.loop import Step
    from tba_offload.session.session import Session


class LayerRuns:
    """Runner of the attached layers, each with its planned placement.

    Args:
        session: The session. The layers keep the session alive.

    Attributes:
        recomputed: For each layer, its :class:`~tba_offload.recompute.checkpoint.RecomputedLayer`.
    """

    def __init__(self, session: Session) -> None:
        stack, self._loop, self._watch = session.stack, session.loop, session.watch
        self._micro_batch = stack.micro_batch
        self._session: Any = session
        # The backward of the embeddings comes after the backward of the first layer of their stack.
        stacks = [layer.id.name.rpartition(".")[0] for layer in stack.layers]
        self._firsts = {stacks.index(each) for each in stacks}
        self.recomputed = [RecomputedLayer(site, session.verifier, stack.states) for site in session.sites]

    def close(self) -> None:
        """Run layers without offloading from now on, and drop the reference to the session."""
        self._session = None
        self.recomputed = []  # in a cycle with the sites, the model would stay alive

    def run(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run a layer with its planned placement.

        Raises:
            UnsupportedError: The layer does not support its placement.
        """
        if self._session is None:  # closed, but other code that wraps the layer's forward still calls this
            return site.forward(*args, **kwargs)
        # These checks are inline, because each call of a function costs time in cold caches.
        if not torch.is_grad_enabled() or self._loop.is_inert or torch_private.is_recomputation():
            # A forward inside a reentrant checkpoint or a loss that caches gradients opens no step.
            if site.runs == 0 and torch.is_grad_enabled() and torch_private.is_recomputation():
                self._leave_alone(site)
            return site.run_plainly(site.forward, args, kwargs)
        if self._loop.step is None:  # the program calls the layer without its model
            if not self._loop.opens_steps:
                return site.run_plainly(site.forward, args, kwargs)
            self._loop.open_step()
        session, arguments = self._session, (*args, *kwargs.values())
        is_profiled = session.notes_inputs and session.planning.controller is not None
        inputs = self._note_inputs(site, arguments) if is_profiled else 0
        placement = self._placement_here(site, arguments)
        # Only asynchronous devices have graphs, which launch kernels without the host.
        may_be_graph = session.device.runs_behind and placement is not Placement.KEEP
        run_as = self._run_ungraphed if may_be_graph else self._run_as
        trace, memory, way = session.capture.trace, session.memory, placement.as_run
        scope = trace.begin_scope(site.next_run(self._micro_batch), way, inputs=inputs)
        if memory.is_on:
            memory.enter(FORWARD, site.index)
            if site.index in self._firsts:
                self._watch.watch_input(arguments)
        try:
            output = run_as(placement, site, scope, (args, kwargs))
        except BaseException:
            self._loop.fail()
            raise
        trace.end_scope(scope)
        if memory.is_on:
            memory.layer_ended(site.index, way)
        memory.sample()
        self._watch.watch(site, output, scope)
        return output

    # ---- placements ------------------------------------------------------------------------------

    def _run_ungraphed(self, placement: Placement, site: Site, scope: ScopeTrace, given: Arguments) -> object:
        device = self._session.device
        is_captured, before = device.is_capturing(), torch_private.graph_node(device.torch_device)
        output = None if is_captured else self._run_as(placement, site, scope, given)
        if is_captured or torch_private.graph_node(device.torch_device) is not before:
            how = "while a CUDA graph is captured" if is_captured else "as CUDA graphs"
            why = f"activations have fixed addresses in CUDA graphs, and {site.layer.id} runs {how}"
            modes = "mode='default' or 'max-autotune-no-cudagraphs'"
            raise UnsupportedError(f"{why}. Compile with {modes}, or set the placement to 'keep'")
        return output

    def _run_as(self, placement: Placement, site: Site, scope: ScopeTrace, given: Arguments) -> object:
        layer, (args, kwargs) = self.recomputed[site.index], given
        if placement.recomputes:
            if not placement.offloads:
                return layer.run(site.forward, given, placement)
            hooks = self._hooks(placement, site, scope)
            with hooks:  # the checkpoint saves only the arguments through these hooks
                if not placement.spares_attention:
                    return layer.run(site.forward, given, placement)
                once = AttentionOnce(site.forward, hooks.pack, hooks.capture.unpack)
                output, scope.attention_bytes = layer.run(once, given, placement), once.nbytes
                return output
        session = self._session
        if not placement.offloads:
            if layer.is_left or _hooks_are_taken():
                if session.planning.plan.placements[site.index].offloads:
                    hooks = LayerHooks(session.capture, scope.key, when_slow=False)
                    torch_private.save_arguments_again(hooks)
                return site.run_plainly(site.forward, args, kwargs)
            controller = session.planning.controller
            if controller is None or not controller.wants_saved or site.is_compiled:
                return site.forward(*args, **kwargs)
            with LayerHooks(session.capture, scope.key, when_slow=False, stays=lambda _: True):  # only counts
                return site.forward(*args, **kwargs)
        if site.index in session.planning.chosen and session.world.may_plan_recomputation and layer.may_try():
            return self._try_out(placement, site, scope, given)
        with self._hooks(placement, site, scope):
            return site.forward(*args, **kwargs)

    def _hooks(self, placement: Placement, site: Site, scope: ScopeTrace) -> LayerHooks:
        capture, key, slow = self._session.capture, scope.key, self._keeps_when_slow(placement)
        if placement.rebuilds and not site.is_compiled:  # modes do not see operations of a compiled graph
            return RematerializingHooks(capture, key, self._session.verifier, when_slow=slow)
        stays = Staying(placement.percent).stays if placement.percent < 100 else None
        return LayerHooks(capture, key, when_slow=slow, stays=stays, saves_inputs=placement.recomputes)

    def _keeps_when_slow(self, placement: Placement) -> bool:
        """Return True if activations stay in memory while the drive is slow.

        By default, a layer with ``offload`` waits for a slow drive. Without a memory budget, a layer with
        ``auto`` keeps its activations in memory until the first plan.
        """
        planning, has_budget = self._session.planning, self._session.budget.limits.budget is not None
        # With a budget, no activation is kept before the memory of the rest of the step was measured.
        by_default = "keep" if placement is Placement.AUTO and not has_budget else "wait"
        on_slow = self._session.config.on_slow or by_default
        if on_slow == "wait" or planning.has_planned:
            return False  # the plan has decided what to keep, within the budget
        # The bytes of layers that are not offloaded are not counted.
        return not has_budget or all(each.is_offloaded for each in planning.plan.placements)

    def _try_out(self, placement: Placement, site: Site, scope: ScopeTrace, given: Arguments) -> object:
        """Run a layer with offloading. In backward, run the layer again and compare the saved tensors."""
        layer, slow = self.recomputed[site.index], self._keeps_when_slow(placement)
        hooks = _TriedHooks(self._session.capture, scope.key, when_slow=slow)
        with hooks:
            trial = Trial(layer, site.forward, given)
            hooks.trial = trial  # not earlier, because the trial itself saves tensors
            try:
                output = site.forward(*given[0], **given[1])
            finally:
                hooks.trial = None  # otherwise the graph of the layer would hold a reference to itself
        trial.first_run_ended(output)
        return output

    def _placement_here(self, site: Site, arguments: Sequence[object]) -> Placement:
        """Return the planned placement, or another placement if the layer cannot run as planned."""
        planning = self._session.planning
        placement: Placement = planning.plan.placements[site.index]
        if placement is Placement.KEEP:
            return placement
        if _hooks_are_taken():
            self._leave_alone(site)
            return Placement.KEEP
        if any(map(is_cache, arguments)):
            self._session.notices.warn_once("cache")
        if placement.recomputes and self.recomputed[site.index].is_left:
            return Placement.KEEP
        is_planned = placement.recomputes and site.index in planning.chosen
        # If ranks have agreed on a placement, a single rank must not change it.
        is_free = is_planned and self._session.world.agree is None
        if is_free and not self.recomputed[site.index].may_repeat():
            return Placement.OFFLOAD  # recomputation was planned for another mode of the layer
        return placement

    # ---- what surrounds a call -------------------------------------------------------------------

    def _note_inputs(self, site: Site, arguments: Sequence[object]) -> int:
        """Return the bytes of a layer's inputs that require gradients.

        If the inputs are larger than the inputs in the planner's profile, discard the plan.
        """
        session = self._session
        # A frozen layer saves nothing.
        if session.planning.has_budget and _has_backward(site.layer.module, arguments):
            gradients = (0, 0)
            if session.budget.limits.nets_gradients:  # gradients reduce the memory for activations
                gradients = rough_bytes(session.gradients.alone() or 0), len(session.gradients.watched)
            site.waiting += 1
            size = (site.waiting, *gradients, *_dimensions(arguments))
            session.planning.leave_if_outgrown(site.index, size)
        given = (each for each in arguments if isinstance(each, torch.Tensor) and each.requires_grad)
        return sum(each.numel() * each.itemsize for each in given)

    def _leave_alone(self, site: Site) -> None:
        placement = self._session.planning.plan.placements[site.index]
        if placement is not Placement.KEEP and not self._loop.is_inert:
            self._session.capture.trace.left_alone += 1
            self._session.notices.warn_once("left alone", site.layer.id)


_TAIL = 32
"""Number of backward operations, nearest to the model's output, at which memory is sampled.

The last norm, the logits and the loss have about 20 operations.
"""


class BackwardWatch:
    """Observer of backward passes.

    Args:
        session: The session. Autograd graphs keep ``BackwardWatch`` alive, so ``BackwardWatch`` has no
            reference to the session.
    """

    def __init__(self, session: Session) -> None:
        self._loop, self._capture = session.loop, session.capture
        self._memory, self._notices = session.memory, session.notices

    def watch(self, site: Site, output: object, scope: ScopeTrace) -> None:
        """Register a hook that is called when backward reaches a layer.

        Args:
            site: The :class:`Site` of the layer.
            output: The output of the layer.
            scope: The trace of the layer's forward.
        """
        tensor, step = graph.first_differentiable(output), self._loop.step
        if tensor is None or tensor.grad_fn is None:  # a leaf would keep the hook forever
            return
        back = partial(self._came_back, site, scope, step, self._capture.trace)
        tensor.register_hook(back)  # type: ignore[no-untyped-call]
        if step is not None:
            step.graph_end = torch_private.number_of(tensor.grad_fn)
            step.graphs.append(weakref.ref(back))

    def watch_input(self, arguments: tuple[object, ...]) -> None:
        """Register a hook that is called when backward leaves the first layer and reaches the embeddings.

        Args:
            arguments: The arguments of the layer.
        """
        tensor = graph.first_differentiable(arguments)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.register_hook(partial(self._left, self._loop.step))  # type: ignore[no-untyped-call]

    def _left(self, step: Step | None, _: torch.Tensor) -> None:
        if step is self._loop.step and self._memory.is_on:
            self._memory.enter(EMBEDDINGS)

    def _came_back(self, site: Site, scope: ScopeTrace, step: Any, trace: StepTrace, _: torch.Tensor) -> None:
        memory, loop, is_current = self._memory, self._loop, step is self._loop.step
        if is_current and site.waiting and not scope.backward_began:
            site.waiting -= 1
        is_first = trace.backward_reached(scope)
        memory.enter(BACKWARD, site.index, scope.key)
        if is_first:
            torch_private.call_after_backward(partial(self._pass_ended, trace))
            if not is_current and not loop.is_inert:
                self._notices.warn_once("backward outside")
        self._capture.schedule.reached()

    def _pass_ended(self, trace: StepTrace) -> None:
        trace.backward_ended()
        self._memory.enter(BETWEEN)
        self._loop.backward_ended()

    def watch_tail(self, output: object) -> None:
        """Sample memory before and after the backward operations nearest to the model's output.

        Logits and loss often cause the memory peak of a step. The peak is too short for a thread that samples
        memory at fixed intervals.
        """
        meter, step, tensor = self._memory.meter, self._loop.step, graph.first_differentiable(output)
        if meter is None or not meter.samples or step is None or tensor is None or tensor.grad_fn is None:
            return  # an allocator that records its peak needs no samples
        for node in graph.nearest_nodes(tensor.grad_fn, _TAIL, after=step.graph_end):
            node.register_prehook(self._memory.look)
            node.register_hook(self._memory.look)


class _TriedHooks(LayerHooks):
    """Saved-tensor hooks that also show each saved tensor to a :class:`Trial`."""

    trial: Trial | None = None

    @torch_private.untraced
    def pack(self, tensor: torch.Tensor) -> Kept | Packed:
        if self.trial is not None:
            self.trial.see(tensor)
        return super().pack(tensor)


def _has_backward(layer: nn.Module, arguments: Sequence[object]) -> bool:
    is_trained = any(parameter.requires_grad for parameter in layer.parameters())
    return is_trained or graph.first_differentiable(arguments) is not None


def _dimensions(arguments: Iterable[object]) -> list[int]:
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    return [size for each in tensors for size in ((each.numel(),) if each.is_nested else each.shape)]


def _hooks_are_taken() -> bool:
    """Return True if other code has set saved-tensor hooks, or if saved-tensor hooks are not possible.

    PyTorch calls only the innermost hooks. Hooks of an outer context, such as ``save_on_cpu``, would
    therefore not get the saved tensors of the layer. Under a ``torch.func`` transform, hooks raise an error
    or get tensors without a storage.
    """
    is_plain = not torch_private.is_transformed() and torch_private.hooks_are_allowed()
    return not is_plain or torch_private.hooks_on_top() is not None
