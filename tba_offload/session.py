"""A session wires the parts together: layers, capture, offloader, store, meters, run log."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import tempfile
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from tba_offload import interrupts
from tba_offload.adapt.controller import AutoPlanner
from tba_offload.adapt.planning import Planning
from tba_offload.boundaries import Boundaries, Tokens, token_counter
from tba_offload.capture import resize, transforms
from tba_offload.capture.gradients import Gradients
from tba_offload.capture.hooks import Capture, LayerHooks
from tba_offload.capture.rematerialize import Rebuilds, SelectiveHooks
from tba_offload.capture.retained import is_retained, life_of_layer
from tba_offload.capture.scope import ScopeKey
from tba_offload.capture.site import Site, check_unattached, install
from tba_offload.capture.trace import DeviceTimes
from tba_offload.config import ConfigLike, OffloadConfig, format_size, read_config
from tba_offload.config.policy import LayerId, Placement
from tba_offload.device.memory import MemoryMeter, ResidentPeak, meter_of
from tba_offload.device.streams import device_of
from tba_offload.errors import (
    ConfigError,
    NothingSavedWarning,
    SessionError,
    TransferError,
    UnsupportedError,
)
from tba_offload.formatting import layers_by_placement, readable_size
from tba_offload.layers.checkpoint import is_recomputation
from tba_offload.layers.graph import first_differentiable, latest_node, nearest_nodes
from tba_offload.layers.guards import (
    cache_warning,
    checkpointing_warning,
    holds_cache,
    is_checkpointed,
)
from tba_offload.layers.nested import TooManyError, tensors_in
from tba_offload.layers.stack import LayerStack, check_disjoint
from tba_offload.notices import describe_step, tell
from tba_offload.plan.model import Plan
from tba_offload.plan.search import Limits
from tba_offload.recompute.rescue import Rescue
from tba_offload.recompute.run import Run
from tba_offload.recompute.trial import Trial
from tba_offload.recompute.verdicts import Mode, Verifier
from tba_offload.report.run_log import RunHeader, RunLogWriter, StepRecord
from tba_offload.step import Step
from tba_offload.store import exit_status, open_store
from tba_offload.store.base import HOST_TIER, close_after
from tba_offload.transfer.offloader import Offloader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from tba_offload.adapt.controller import Need
    from tba_offload.capture.trace import ScopeTrace
    from tba_offload.device.streams import Device
    from tba_offload.store.base import ActivationStore, DriveLoad

_REMEMBERED_STEPS = 10_000

_RESCUED = frozenset({Placement.OFFLOAD, Placement.AUTO})
"""Placements of layers that may be repeated to make again what a drive does not give back."""

_OTHER_RANKS = (
    "the planner recomputes no layer, because other ranks may run the same layers and would have to do the "
    "same; place layers recompute to have it so on all ranks"
)

_LOOKED_AT = 3
"""Steps in which it is looked whether the window is too wide: later ones save as much."""

_TAIL = 32
"""Operations of backward next to the model's output: a loss, the logits and a last norm have about 20."""


@dataclass(frozen=True)
class World:
    """The ranks that a model is spread over, as one of them sees them.

    Attributes:
        layers: The layers of all ranks: by them the rules of a policy are judged.
        rank: This one.
        ranks: How many there are.
        run: A word that all of them share, by which their run logs are put together; ``None`` if alone.
        agree: Given what this rank proposes, name of a layer to its placement, and how much it needs it,
            tells the proposal that counts for each layer; all ranks call it at once. ``None`` if alone.
    """

    layers: tuple[LayerId, ...]
    rank: int = 0
    ranks: int = 1
    run: str | None = None
    agree: Callable[[dict[str, Placement], Need], dict[str, Placement]] | None = None


class Session:
    """Offloading for one model; made by :func:`tba_offload.attach`.

    In a step the activations of the model's layers go where the policy says. A step opens with the model's
    first forward that records a graph and ends when the optimizers of its parameters have made theirs; or it
    is the block of ``with session.step()``, for loops that want to say so themselves.

    Args:
        stack: The layers.
        modules: The model or its chunks; their parameters and buffers are never offloaded.
        config: The policy and its settings.
        run_log: Where to write the run log; ``None`` for none.
        strategy: Label of this run in ROK plots; by default the placement that all layers share.
        model_info: What the run log's header says about the model.
        measure_memory: Whether to measure the activation peak of steps that do not say so themselves. On CUDA
            that is free; on a CPU a thread samples, which takes part of a core.
        world: The other ranks that the model is spread over; by default there are none.
        tokens: Tokens of one micro-batch, or a function that tells them from the arguments of the model's
            forward; by default the elements of ``input_ids``, where the model is given any.
        status: Whether each step is told in a line, see :mod:`tba_offload.notices`; new plans always are.
        steps_by_hand: Whether every step is a block of :meth:`step`, and none opens by itself.

    Raises:
        ConfigError: A rule of the policy takes no effect.
        StoreError: The store cannot be opened.
        UnsupportedError: The model cannot be offloaded.
    """

    def __init__(
        self,
        stack: LayerStack,
        modules: Sequence[nn.Module],
        config: OffloadConfig,
        *,
        run_log: str | os.PathLike[str] | None = None,
        strategy: str | None = None,
        model_info: Mapping[str, object] | None = None,
        measure_memory: bool = True,
        world: World | None = None,
        tokens: Tokens | None = None,
        status: bool = False,
        steps_by_hand: bool = False,
    ) -> None:
        check_disjoint(stack.layers)
        check_unattached(stack.layers)
        count_tokens = token_counter(tokens)
        self.config = config
        self.layers = stack.layers
        self._stack = stack
        self._modules = tuple(modules)
        self._world = world or World(layers=tuple(layer.id for layer in stack.layers))
        plan = self._plan_of(config)
        self._device = device_of(_device_of_model(modules))
        self.gradients = Gradients(self._modules, self._device.torch_device, self._look_at_memory)
        self.store = _open_store(config, self._device)
        self.offloader = Offloader(
            self.store,
            self._device,
            ceiling=config.budget.ceiling,
            keep_when_full=config.on_full == "keep",
            stall_limit=config.store.stall_seconds,
            budget_bytes=config.budget.activation_bytes,
        )
        self.capture = Capture(
            self.offloader,
            min_tensor_bytes=config.min_tensor_bytes,
            budget_bytes=config.budget.activation_bytes,
        )
        self.planning = Planning(
            plan, [layer.id.number for layer in stack.layers], self.capture, self.offloader
        )
        self._rebuilds = Rebuilds(self.capture, stack.functions)
        self._measure_memory = measure_memory
        self._status = status
        self._meter: MemoryMeter | None = None
        self._resident = ResidentPeak()
        self._steps = 0
        self._step: Step | None = None
        self._records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)
        self._closed = False
        self._inert = False
        self._verifier = Verifier(
            stack.layers, stack.generators(self._device.torch_device), stack.not_compared, tell
        )
        self._layers_end = 0  # number in autograd's sequence of what the last layer put out
        self._graphs: list[weakref.ref[Callable[..., None]]] = []
        self._warned: set[str] = set()
        try:
            if measure_memory:
                self._meter = self._meter_if_possible()
            header = self._header(strategy, model_info)
            self._run_log = RunLogWriter(run_log, header) if run_log is not None else None
            self.planning.start(plan, self._planner_of(config, plan))
        except BaseException:
            if self._meter is not None:
                self._meter.close()
            self.store.close()
            raise
        self._boundaries = None if steps_by_hand else Boundaries(self, self._modules, count_tokens)
        self._sites = [install(index, layer, self._run) for index, layer in enumerate(stack.layers)]
        resize.watch(self.capture)
        transforms.watch(self.capture)
        _open_sessions.add(self)

    # ---- for users -------------------------------------------------------------------------------

    def step(
        self,
        *,
        tokens: int | None = None,
        model_flops: float | None = None,
        measure_memory: bool | None = None,
    ) -> Step:
        """One training step, told by hand: any number of micro-batches, forward and backward.

        Args:
            tokens: Tokens that the step trains on, for the run log; by default those that the model is given.
            model_flops: Algorithmic FLOPs of the step; recomputed ones do not count.
            measure_memory: Whether to measure the activation peak; by default what :func:`attach` was told.

        Returns:
            A context manager. After its block ``record`` holds the :class:`StepRecord`.

        Raises:
            SessionError: On entering, if the session is closed, another step is open, or this is a
                forked child.
            UnsupportedError: The memory of this device cannot be measured.
        """
        if measure_memory and self._meter is None:
            self._meter = self._new_meter()
        return Step(
            self, tokens=tokens, model_flops=model_flops, meter=self._meter_of_step(wanted=measure_memory)
        )

    def _step_that_opens_itself(self) -> Step:
        return Step(
            self, tokens=None, model_flops=None, meter=self._meter_of_step(wanted=None), opened_itself=True
        )

    def _meter_of_step(self, *, wanted: bool | None) -> MemoryMeter | None:
        wanted = self._measure_memory if wanted is None else wanted
        if not wanted and self.planning.planner is not None and self.planning.planner.wants_memory:
            wanted = True
            self._meter = self._meter or self._meter_if_possible()
        return self._meter if wanted else None

    def _new_meter(self) -> MemoryMeter:
        own = weakref.ref(self)  # the thread of a meter must not keep a model alive

        def static() -> int:
            session = own()
            return session._static_bytes() if session is not None else 0

        return meter_of(self._device, static)

    def _meter_if_possible(self) -> MemoryMeter | None:
        """Training goes on where memory cannot be measured; the run log has no figure then."""
        try:
            return self._new_meter()
        except UnsupportedError as error:
            self._warn_once("meter", f"the activation peak is not measured: {error}")
            return None

    def _static_bytes(self) -> int:
        """Live bytes that are no activations and may have come into being in this step."""
        return self.gradients.live.nbytes + (self._step.state_bytes if self._step is not None else 0)

    def _look_at_memory(self, grows_by: int = 0) -> None:
        if self._step is not None and self._step.meter is not None:
            self._step.meter.look(grows_by)

    def apply(self, config: ConfigLike) -> None:
        """Changes the placements between steps; store and budget stay as they are.

        Raises:
            SessionError: A step is open, or the session is closed.
            ConfigError: The policy is wrong or asks for another store or budget.
        """
        self._check_usable()
        self._settle()
        if self._open_step() is not None:
            raise SessionError("placements cannot change inside a step; apply the policy between steps")
        wanted = read_config(config, layers=self._world.layers)
        if not wanted.store.directories:
            wanted = replace(wanted, store=replace(wanted.store, directories=self.config.store.directories))
        if (wanted.store, wanted.budget.limits) != (self.config.store, self.config.budget.limits):
            raise ConfigError(
                "store and budget are those that the session was opened with; close it and attach anew",
                file=wanted.file,
            )
        plan = self._plan_of(wanted)
        planner = self._planner_of(wanted, plan)
        self.config = wanted
        self.planning.start(plan, planner)
        self.capture.min_tensor_bytes = wanted.min_tensor_bytes
        self.offloader.keep_when_full = wanted.on_full == "keep"

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.planning.plan

    def report(self) -> list[StepRecord]:
        """The records of the steps so far, oldest first; of the last 10,000, the run log has all."""
        self._settle()
        return list(self._records)

    def close(self) -> None:
        """Gives the model back as it was, closes the store and the run log. May be called twice.

        What a call that was interrupted has left is done by the next one.

        Raises:
            SessionError: A step is open.
        """
        if self not in _open_sessions:
            return
        if not self._closed:
            self._leave_step()
        self._closed = True
        for site in self._sites:
            site.uninstall()
        if self._boundaries is not None:
            self._boundaries.close()
        self.gradients.close()
        resize.unwatch(self.capture)
        transforms.unwatch(self.capture)
        if not self._inert:
            self._shut_down()
        _open_sessions.discard(self)

    def _leave_step(self) -> None:
        if self._boundaries is not None and not self._inert:
            self._boundaries.finish()
        if self._open_step() is not None:
            raise SessionError("a session cannot be closed inside one of its steps")

    def __repr__(self) -> str:
        placed = layers_by_placement(
            [layer.id.name for layer in self.layers], [placement.value for placement in self.plan.placements]
        )
        kind = self.store.description.get("kind", type(self.store).__name__)
        state = "closed" if self._closed else f"{self._steps} steps"
        return f"<Session: {placed}; store {kind}; {state}>"

    def _shut_down(self) -> None:
        try:
            self.store.close()
        finally:
            if self._meter is not None:
                self._meter.close()
            if self._run_log is not None:
                self._run_log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and self._step is not None:
            self._end(failed=True)  # an interrupt struck before the step could end itself
        close_after(error, self.close)

    # ---- the layers ------------------------------------------------------------------------------

    def _run(self, site: Site, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Runs a layer the way the plan says."""
        if not torch.is_grad_enabled() or self._inert or is_recomputation():
            self._notice_outer_checkpoint(site)
            return site.forward(*args, **kwargs)
        if self._step is None:
            if self._boundaries is None or self._closed:
                self._warn_outside_step(site)
                return site.forward(*args, **kwargs)
            self._boundaries.open_step()  # the layer was called without its model
        if self.planning.planner is not None and self.planning.planner.has_budget:
            self._note_size(self.planning.planner, site, (*args, *kwargs.values()))
        placement = self._placement_here(site)
        if placement is not Placement.KEEP and _appends_to_cache(site, args, kwargs):
            placement = self._with_cache(site, placement)
        self._note_gone()
        before = latest_node() - 1
        scope = self.capture.trace.begin_scope(self._scope_key(site), placement)
        if self.planning.planner is not None:
            scope.input_bytes = _activation_bytes((*args, *kwargs.values()))
        try:
            output = self._run_placed(site, placement, scope, args, kwargs)
        except BaseException:
            if self._boundaries is not None:
                self._boundaries.layer_failed()
            raise
        self.capture.trace.end_scope(scope)
        self._look_at_memory()
        self._watch_backward(site, output, scope, before)
        return output

    def _placement_here(self, site: Site) -> Placement:
        """What the plan says, unless the layer runs where our hooks cannot be."""
        placement = self.plan.placements[site.index]
        if placement is not Placement.KEEP and _hooks_are_taken():
            self._leave_alone(site)
            return Placement.KEEP
        is_planned = placement.recomputes and site.index in self.planning.chosen
        # What ranks have agreed on is no longer the business of one of them.
        if is_planned and self._world.agree is None:
            mode = self._verifier.mode_of(site.index)
            if not self._verifier.may_repeat(mode):
                return Placement.OFFLOAD  # the planner chose it for another mode of the layer
        return placement

    def _run_placed(
        self,
        site: Site,
        placement: Placement,
        scope: ScopeTrace,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        forward = self._forward_of(site, placement)
        if placement is Placement.KEEP:
            # No hooks at all: autograd's own way, its own checks, no cost.
            return forward(*args, **kwargs)
        if placement is Placement.RECOMPUTE:
            return self._stack.checkpoint(forward, *args, **kwargs)
        hooks = self._hooks(site, placement, scope, forward if isinstance(forward, Rescue) else None)
        with hooks:
            if placement is Placement.RECOMPUTE_OFFLOAD:
                # Checkpoints save the inputs through the hooks around them, and nothing else.
                return self._stack.checkpoint(forward, *args, **kwargs)
            output = forward(*args, **kwargs)
        if isinstance(forward, Trial):
            forward.saved(hooks.saved)
        return output

    def _forward_of(self, site: Site, placement: Placement) -> Callable[..., object]:
        """The layer's forward; with what verifies a second run of it, if there is or may be one."""
        if placement is Placement.KEEP:
            return site.forward
        mode = self._verifier.mode_of(site.index)
        if placement.recomputes:
            return Run(self._verifier, mode, site.forward, is_planned=site.index in self.planning.chosen)
        if placement in _RESCUED and self._verifier.may_rescue(mode) and self._is_alone():
            return self._rescued(site, mode)
        return self._tried(site, mode) if self._tries(site, mode) else site.forward

    def _tried(self, site: Site, mode: Mode) -> Trial:
        return Trial(
            *(self._verifier, mode, site.forward),
            device=self._device.torch_device,
            hold=self.capture.hold,
            fetch=self.capture.held,
        )

    def _rescued(self, site: Site, mode: Mode) -> Rescue:
        return Rescue(
            *(self._verifier, mode, site.forward),
            device=self._device.torch_device,
            hold=self.capture.borrow,
            fetch=self.capture.held,
            samples_only=self.config.store.checksum,
        )

    def _tries(self, site: Site, mode: Mode) -> bool:
        """Whether a layer is run a second time to see whether the planner may have it recomputed."""
        is_choice = site.index in self.planning.chosen
        return is_choice and self._may_plan_recompute() and self._verifier.may_try(mode)

    def _may_plan_recompute(self) -> bool:
        """Whether the planner decides for all ranks that would have to take part in a second run."""
        return self._world.agree is not None or self._is_alone()

    def _is_alone(self) -> bool:
        """Whether no other rank would have to take part in a second run of a layer."""
        if self._world.ranks > 1:
            return False
        distributed = torch.distributed
        return not (distributed.is_available() and distributed.is_initialized()) or (
            distributed.get_world_size() == 1
        )

    def _hooks(
        self, site: Site, placement: Placement, scope: ScopeTrace, rescue: Rescue | None
    ) -> LayerHooks:
        kept, part = self.plan.kept_of(site.index), self.plan.part_of(site.index)
        slow = self._keeps_when_slow(placement)
        if placement is Placement.SELECTIVE and not site.is_compiled:  # a graph of one node tells nothing
            layer = site.layer.module
            return SelectiveHooks(self._rebuilds, layer, scope.key, when_slow=slow, kept=kept, part=part)
        return LayerHooks(self.capture, scope.key, when_slow=slow, kept=kept, part=part, rescue=rescue)

    def _with_cache(self, site: Site, placement: Placement) -> Placement:
        """Where a layer goes whose forward appends to a cache of keys and values: it must not run twice.

        Raises:
            UnsupportedError: The policy wants it to.
        """
        if placement.recomputes and site.index not in self.planning.chosen:
            raise UnsupportedError(
                f"layer {site.layer.id.number} ({site.layer.id.name}) is placed {placement.value}, but its "
                "forward appends to a cache of keys and values, so that a second one would find other keys: "
                "switch the cache off (use_cache=False, to the model or in its config), or place it otherwise"
            )
        self._warn_once("cache", cache_warning())
        return Placement.OFFLOAD if placement.recomputes else placement

    def _notice_outer_checkpoint(self, site: Site) -> None:
        """A reentrant checkpoint around a layer records no graph of it before backward."""
        is_first_run = site.runs == 0 and is_recomputation() and self._step is not None
        if is_first_run and not self._inert and self.plan.placements[site.index] is not Placement.KEEP:
            self._leave_alone(site)

    def _leave_alone(self, site: Site) -> None:
        """A layer runs inside somebody else's hooks, where neither ours nor a checkpoint's can be."""
        self.capture.trace.left_alone += 1
        self._warn_once(
            "left alone",
            f"layer {site.layer.id.number} ({site.layer.id.name}) runs inside saved-tensor hooks or a "
            "transform of somebody else (a checkpoint, save_on_cpu, torch.func), so it is neither "
            "offloaded nor recomputed; switch that off, or place the layer keep. the run log counts "
            "left_alone_scopes",
        )

    def _keeps_when_slow(self, placement: Placement) -> bool:
        """``offload`` waits for a slow drive unless told otherwise, ``auto`` keeps until there is a plan."""
        if self.planning.planner is not None and self.planning.planner.has_planned:
            return False  # what is kept was decided with the budget in view
        counted = {Placement.OFFLOAD, Placement.SELECTIVE, Placement.AUTO}
        if self.config.budget.activation_bytes is not None and not counted.issuperset(self.plan.placements):
            return False  # nobody counts what the others hold
        if self.config.on_slow is None:
            # Under a budget nothing is kept before it is known what else a step holds.
            return placement is Placement.AUTO and self.config.budget.activation_bytes is None
        return self.config.on_slow == "keep"

    def _scope_key(self, site: Site) -> ScopeKey:
        told = self._stack.micro_batch
        number = told(site.layer.module) if told is not None else None
        count, site.runs = site.runs, site.runs + 1
        return ScopeKey(
            site.layer.id.number, count if number is None else number, site.layer.chunk, site.layer.id.name
        )

    def _note_gone(self) -> None:
        """Notes which graphs are gone that a backward pass had left alive.

        Their gradients of parameters were put in place by no pass that backward hooks are told of.
        """
        trace = self.capture.trace
        if trace.has_retained and trace.note_gone() and not self._inert:
            self.gradients.count()

    def _watch_backward(self, site: Site, output: object, scope: ScopeTrace, before: int) -> None:
        """Notes when backward comes back to the layer, whose nodes come after number ``before``."""
        tensor = first_differentiable(output)
        if tensor is None or tensor.grad_fn is None:  # a leaf would keep the hook
            return
        trace, lookahead, step = self.capture.trace, self.capture.lookahead, self._step

        def ended() -> None:
            trace.backward_ended()
            if self._boundaries is not None:
                self._boundaries.backward_ended()

        def reached(_: torch.Tensor) -> None:
            if step is self._step and scope.backward_began is None:
                site.waiting -= 1
            self._note_gone()
            is_first = trace.backward_reached(scope)
            if is_retained():
                trace.retained(scope, life_of_layer(before))
            if is_first:
                torch.autograd.Variable._execution_engine.queue_callback(ended)
                if step is not self._step and not self._inert:
                    self._warn_backward_outside_step()
            lookahead.reached()
            self._look_at_memory()

        tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        self._layers_end = tensor.grad_fn._sequence_nr()
        self._graphs.append(weakref.ref(reached))

    def _watch_tail(self, output: object) -> None:
        """Looks at memory around each operation of backward that is nearest to the model's output.

        With logits and loss it is often there that memory is at its peak, for less than a moment.
        """
        if self._step is None or self._step.meter is None:
            return
        self._look_at_memory()
        tensor = first_differentiable(output)
        if self._step.meter.samples and tensor is not None and tensor.grad_fn is not None:
            for node in nearest_nodes(tensor.grad_fn, _TAIL, after=self._layers_end):
                node.register_prehook(lambda _: self._look_at_tail())
                node.register_hook(lambda *_: self._look_at_tail())

    def _look_at_tail(self) -> None:
        step = self._step
        if step is not None and step.meter is not None:
            step.meter.look()
            step.saw_rest(self.offloader.own_bytes + self.capture.trace.kept_bytes)

    def _has_graph(self) -> bool:
        """Whether the graph of any forward of this step is alive."""
        return any(graph() is not None for graph in self._graphs)

    def _warn_outside_step(self, site: Site) -> None:
        if site.layer.module.training and not self._closed:
            self._warn_once(
                "outside",
                "a layer trains outside of session.step(): its activations stay in memory; "
                "put forward and backward into `with session.step():`",
            )

    def _warn_backward_outside_step(self) -> None:
        self._warn_once(
            "backward outside",
            "backward runs outside of the step that its forward was in: gradients are right, but the figures "
            "of that step lack it; put forward and backward into one `with session.step():`",
        )

    def _warn_full(self, nbytes: int) -> None:
        self._warn_once(
            "full",
            f"the store is full: {readable_size(nbytes)} of activations stayed in memory in step "
            f"{self._steps}{self._over_budget()}; make room where store.directories are, or raise "
            "store.capacity. the run log counts fallback_kept_bytes",
        )

    def _over_budget(self) -> str:
        """By how much what a step kept in memory went over the budget, for a warning."""
        budget = self.config.budget.activation_bytes
        resident = self.offloader.stats.own_peak + self.capture.trace.kept_bytes
        if budget is None or resident <= budget:
            return ""
        return f", {readable_size(resident - budget)} beyond budget.activation_bytes"

    def _warn_of_wide_window(self) -> None:
        """A window that holds most of what a step saves leaves most of it in memory."""
        window = self.config.budget.ceiling
        if self._steps > _LOOKED_AT or window is None or Placement.OFFLOAD not in self.plan.placements:
            return
        if self.planning.planner is not None and Placement.AUTO in self.planning.planner.policy:
            return
        saved = sum(activation.nbytes for activation in self.capture.trace.activations)
        if saved and window > saved / 2:
            self._warn_once(
                "window",
                f"offloading frees little here: the layers save {readable_size(saved)} in a step, and "
                f"budget.in_flight_bytes lets {readable_size(window)} of it stay in memory at a time; with "
                f"in_flight_bytes: {format_size(_suggested_window(saved))} most of it leaves memory",
                NothingSavedWarning,
            )

    def _warn_of_checkpointing(self) -> None:
        """Trainers may switch checkpointing on long after the model was attached: every step looks."""
        if "checkpointing" in self._warned:
            return
        placed = zip(self.layers, self.plan.placements, strict=True)
        count = sum(
            is_checkpointed(layer.module) for layer, placement in placed if placement is not Placement.KEEP
        )
        if count:
            self._warn_once("checkpointing", checkpointing_warning(count, len(self.layers)))

    def _warn_once(self, what: str, message: str, category: type[Warning] = UserWarning) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, category, stacklevel=_stack_level())

    def _tell_once(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            tell(line)

    # ---- steps -----------------------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        try:
            interrupts.put_up(step)
            self._prepare(step)
        except BaseException:
            interrupts.take_down(step)
            raise

    def _prepare(self, step: Step) -> None:
        self._check_usable()
        if self._boundaries is not None and not step.opened_itself:
            self._boundaries.finish()
        if self._open_step() is not None:
            raise SessionError("another step of this session is still open")
        self.offloader.drain()
        self._raise_failures()
        self.capture.static.refresh(self._modules)
        self._warn_of_checkpointing()
        self.capture.begin_step()
        self._verifier.begin_step()
        self._rebuilds.begin_step()
        samples = step.meter is not None and step.meter.samples
        self.capture.look_at_memory = self._look_at_memory if samples else None
        for site in self._sites:
            site.runs = site.waiting = 0
        self.planning.begin_step()
        self._graphs.clear()
        self.offloader.reset_stats()
        self.store.take_loads()  # those of a failed step belong to none
        self.gradients.begin_step()
        if self._boundaries is not None:
            self._boundaries.step_began()
        self._resident.reset()
        if self._meter is not None and step.meter is None:
            self._meter.peak()  # an interrupted step may have left it watching
        self._note_overlap(step)
        step.measure_base()
        self._step = step

    def _note_overlap(self, step: Step) -> None:
        """Live bytes are those of the process: of two steps at once none can tell its own."""
        for session in _open_sessions:
            if session is not self and session._device.torch_device == self._device.torch_device:
                session._settle()
                other = session._step
                if other is not None and step.meter is not None:
                    step.overlaps = True
                    other.overlaps = True
                    self._warn_once(
                        "overlap",
                        "steps of two attached models are open at once: the activation peak of neither can "
                        "be told and is left out of their records",
                    )

    def _settle(self) -> None:
        """Ends a step that opened by itself and is over."""
        if self._boundaries is not None and not self._inert:
            self._boundaries.settle()

    def _open_step(self) -> Step | None:
        """The step that is open; one whose end was interrupted is ended now."""
        if self._step is not None and self._step.left:
            self._end(failed=True)
        return self._step

    def _end(self, *, failed: bool) -> None:
        step, self._step = self._step, None
        try:
            self.capture.end_step(failed=failed)
            self._rebuilds.end_step(failed=failed)
        finally:
            if step is not None:
                interrupts.take_down(step)
        if failed:
            return
        self._raise_failures()
        self._steps += 1

    def _raise_failures(self) -> None:
        """The first failed transfer ends the step; those that failed with it must not end the next one."""
        try:
            self.offloader.flush()  # a graph that outlives its step shall not keep memory
            self.offloader.raise_failures()
        except TransferError:
            self.offloader.abandon()
            raise

    def _record(self, step: Step, loads: Sequence[DriveLoad]) -> StepRecord:
        """What the step was like, from the meters, the trace and the offloader's books."""
        # How long it took to give a device its work is not how long the work took.
        computed_in_time = not self._device.runs_behind
        trace, stats, prediction = self.capture.trace, self.offloader.stats, self.plan.prediction
        recomputed = sum(Placement(scope.placement).recomputes for scope in trace.scopes)
        on_host = [load for load in loads if load.tier == HOST_TIER]
        return StepRecord(
            step=self._steps,
            seconds=step.seconds,
            optimizer_seconds=step.optimizer_seconds,
            skipped=step.skipped,
            forward_seconds=trace.forward_seconds() if computed_in_time else None,
            backward_seconds=(trace.backward_seconds or None) if computed_in_time else None,
            stall_seconds=stats.stall_seconds,
            tokens=step.all_tokens,
            model_flops=step.model_flops,
            loss=step.loss,
            activation_peak_bytes=step.activation_peak_bytes,
            peak_source=step.meter.source if step.activation_peak_bytes is not None and step.meter else None,
            gradient_bytes=self.gradients.live.take_added(),
            state_bytes=step.state_bytes if step.meter is not None else None,
            own_peak_bytes=stats.own_peak + trace.kept_bytes,
            resident_peak_bytes=self._resident.read(),
            gradients_allocated=step.gradients_allocated,
            offloaded_bytes=stats.offloaded,
            read_bytes=stats.read,
            reread_bytes=stats.reread,
            rescued_bytes=stats.rescued,
            host_offloaded_bytes=sum(load.write.nbytes for load in on_host),
            host_read_bytes=sum(load.read.nbytes for load in on_host),
            forwarded_bytes=stats.forwarded,
            deduplicated_bytes=trace.deduplicated_bytes,
            rebuilt_bytes=trace.rebuilt_bytes,
            kept_bytes=trace.kept_bytes,
            recomputed_scopes=recomputed,
            scopes=len(trace.scopes),
            in_flight_peak_bytes=stats.in_flight_peak,
            given_up_bytes=stats.given_up,
            held_bytes=stats.held,
            fallback_kept_bytes=stats.fallback_kept + self.capture.slow_kept_bytes,
            drives_out_of_service=sum(not load.in_service for load in loads),
            left_alone_scopes=trace.left_alone,
            predicted_peak_bytes=prediction.peak_bytes if prediction is not None else None,
            predicted_seconds=prediction.seconds if prediction is not None else None,
        )

    def _conclude(self, step: Step) -> None:
        """Records a step that has ended, and learns from it."""
        self.gradients.count()
        if self.offloader.stats.full:
            self._warn_full(self.offloader.stats.fallback_kept)
        self._warn_of_wide_window()
        loads = self.store.take_loads()
        step.record = self._record(step, loads)
        self._log(step.record)
        if not step.skipped:
            self._learn(step, step.record, loads)

    def _log(self, record: StepRecord) -> None:
        self._records.append(record)
        if self._status:
            tell(describe_step(record))
        if self._run_log is not None:
            self._run_log.write(record)

    # ---- planning --------------------------------------------------------------------------------

    def _planner_of(self, config: OffloadConfig, plan: Plan) -> AutoPlanner | None:
        """Who learns what steps are like, and decides on the layers that are placed ``auto``.

        Without such layers it is of use for the run log only.
        """
        everywhere = Plan.from_policy(config.policy, self._world.layers).placements
        is_auto = Placement.AUTO in everywhere
        if not is_auto and self._run_log is None:
            return None
        return AutoPlanner(
            plan.placements,
            [(layer.chunk, layer.id.name) for layer in self.layers],
            Limits(config.budget.activation_bytes, config.budget.ceiling),
            objective=config.budget.objective,
            host_capacity=config.store.host_capacity,
            drives=_drives_of(config),
            agree=self._world.agree if is_auto else None,
        )

    def _note_size(self, planner: AutoPlanner, site: Site, arguments: Sequence[object]) -> None:
        """Where a layer is given more than the plan is for, the rest of the step runs without it."""
        if not _has_backward(site.layer.module, arguments):
            return  # one that is frozen saves nothing, and is planned for when it no longer is
        site.waiting += 1
        size = (site.waiting, *_dimensions(arguments))
        self.planning.leave_if_outgrown(planner, site.index, size)

    def _mark_times(self) -> None:
        """A step begins: has times marked in the work of a device that runs behind, if a planner watches."""
        wanted = self.planning.planner is not None and self._device.runs_behind
        self.offloader.marks_stalls = wanted
        if wanted:
            self.capture.trace.mark_times(self._device)

    def _learn(self, step: Step, record: StepRecord, loads: Sequence[DriveLoad]) -> None:
        """Has the next step planned by what this one was like."""
        planner, chosen = self.planning.planner, self.planning.chosen
        if planner is None:
            return
        may_plan = self._may_plan_recompute()
        if not may_plan and chosen:
            self._tell_once(_OTHER_RANKS)
        trace, stalls = self.capture.trace, self.offloader.stats.marked_stalls
        news = self.planning.learn(
            record,
            loads,
            began=step.began,
            rest_bytes=step.rest_bytes,
            repeatable=[index for index in chosen if may_plan and self._verifier.may_plan(index)],
            on_device=DeviceTimes(trace, stalls) if trace.marks is not None else None,
        )
        if news is None:
            return
        if planner.has_planned and self._world.rank == 0:
            tell(f"plan after step {record.step}: {news['summary']}")
        if self._run_log is not None:
            self._run_log.note("plan", {"step": record.step, **news})

    def _gradients_allocated(self) -> bool:
        return all(_has_gradient(parameter) for parameter in self.gradients.parameters())

    # ---- wiring ----------------------------------------------------------------------------------

    def _plan_of(self, config: OffloadConfig) -> Plan:
        ids = [layer.id for layer in self.layers]
        return Plan.from_policy(config.policy, ids, self._world.layers, window=config.budget.ceiling)

    def _explained(self) -> dict[str, object]:
        """The placement of every layer of the model, on whatever rank, and why."""
        policy = self.config.policy
        explained: dict[str, object] = {}
        for layer in self._world.layers:
            placement, why = policy.explain(layer)
            explained[layer.name] = {"layer": layer.number, "placement": placement.value, "why": why}
        return explained

    def _header(self, strategy: str | None, model_info: Mapping[str, object] | None) -> RunHeader:
        return RunHeader(
            strategy=strategy or Plan.from_policy(self.config.policy, self._world.layers).strategy,
            run=self._world.run,
            rank=self._world.rank,
            ranks=self._world.ranks,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            hardware={
                "device": _device_name(self._device.torch_device),
                "cpus": os.cpu_count(),
                "instruction_set": torch.backends.cpu.get_cpu_capability(),
                "threads": torch.get_num_threads(),
            },
            model={"layers": len(self._world.layers), **(model_info or {})},
            policy=self.config.to_yaml(),
            plan=self._explained(),
            store=dict(self.store.description),
        )

    def _check_usable(self) -> None:
        if self._inert:
            raise SessionError("this session belongs to the parent process; attach the model in the child")
        if self._closed:
            raise SessionError("this session is closed; attach the model again")

    def _become_inert(self) -> None:
        """In a forked child: its locks, threads and descriptors are those of the parent."""
        self._inert = True
        self._step = None
        self.offloader.become_inert()


def _open_store(config: OffloadConfig, device: Device) -> ActivationStore:
    directories = config.store.directories
    if not directories and config.store.kind != "host":
        directories = (Path(tempfile.gettempdir()),)
    return open_store(
        kind=config.store.kind,
        directories=directories,
        capacity=config.store.capacity,
        host_capacity=config.store.host_capacity,
        checksum=config.store.checksum,
        stall_seconds=config.store.stall_seconds,
        device=device,
    )


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Whether the memory of its gradient exists; Megatron's lies in a buffer of its own."""
    return parameter.grad is not None or getattr(parameter, "main_grad", None) is not None


def _suggested_window(saved: int) -> int:
    """An eighth of what a step saves, in whole MiB: wide enough that drives work while layers compute."""
    return max(saved // 8 >> 20, 1) << 20


def _drives_of(config: OffloadConfig) -> list[int]:
    """The device numbers of the file systems that a configuration names, in its order."""
    if config.store.kind == "host":
        return []
    directories = config.store.directories or (tempfile.gettempdir(),)
    return [Path(directory).stat().st_dev for directory in directories if Path(directory).is_dir()]


def _appends_to_cache(site: Site, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether the layer's forward leaves something in a cache; checkpointed by its framework it gets none."""
    return holds_cache((*args, *kwargs.values())) and not is_checkpointed(site.layer.module)


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


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return torch.get_device_module(device).get_device_name(device)  # type: ignore[no-any-return]


def _device_of_model(modules: Sequence[nn.Module]) -> torch.device:
    parameter = next((parameter for module in modules for parameter in module.parameters()), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def _hooks_are_taken() -> bool:
    """Whether saved tensors belong to somebody else here.

    Hooks of an outer context (a checkpoint, ``save_on_cpu``) would see nothing of the layer if we pushed
    ours or those of a checkpoint, and under a ``torch.func`` transform pushing any is an error.
    """
    autograd: Any = torch._C._autograd
    return (
        not autograd._saved_tensors_hooks_is_enabled()
        or autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003 - positional in C++
    )


def _stack_level() -> int:
    """The ``stacklevel`` of a warning that points at the nearest caller outside of this package and torch."""
    own, torchs = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((own, torchs)):
        frame, level = frame.f_back, level + 1
    return level


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_open_sessions):
        session._become_inert()


os.register_at_fork(after_in_child=_after_fork_in_child)


@exit_status.failing
def _finish_at_exit() -> None:
    """The last step of a session that was never closed is in its run log all the same."""
    for session in list(_open_sessions):
        if session._boundaries is not None and not session._inert:
            session._boundaries.finish()


atexit.register(_finish_at_exit)
