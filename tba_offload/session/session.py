"""A session: offloading for one model.

A step has six stages:

1. The model's first forward opens the step (:class:`~tba_offload.session.loop.Loop`).
2. :meth:`Session.begin_step` prepares the offloader and the observers.
3. Each layer runs with its planned placement (:class:`~tba_offload.session.layers.LayerRuns`). Hooks observe
   when backward reaches a layer (:class:`~tba_offload.session.layers.BackwardWatch`).
4. The optimizer's update ends the step.
5. :meth:`Session.end_step` stops the observers.
6. :meth:`Session.record_step` writes the record of the step. The planner then plans the next step.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from tba_offload import torch_private
from tba_offload.capture.gradients import Gradients
from tba_offload.capture.hooks import Capture
from tba_offload.capture.rematerialize import unwrap_classes
from tba_offload.capture.site import Site, check_unattached
from tba_offload.config.policy import LayerId, Objective, Placement
from tba_offload.device import device_of_model, has_peers
from tba_offload.device.meters import fitting_bytes
from tba_offload.errors import SessionError, TransferError, UnsupportedError
from tba_offload.layers.find import LayerStack, check_disjoint, chunks_of
from tba_offload.planner.auto import Agree, Controller, Task
from tba_offload.planner.model import DeviceShare, Limits, Plan
from tba_offload.planner.planning import Budget, Planning, ResidentData, Swappable
from tba_offload.recompute import attention
from tba_offload.recompute.verify import Verifier
from tba_offload.report.log import MEMORY, TIMELINE, StepRecord, describe_run
from tba_offload.report.why import Diagnosis
from tba_offload.session.checkpointing import Checkpointing
from tba_offload.session.layers import BackwardWatch, LayerRuns
from tba_offload.session.loop import Loop, Step, Tokens, token_counter
from tba_offload.session.memory import Memory
from tba_offload.session.notices import OTHER_RANKS, Notices, tell, warn_after
from tba_offload.session.record import Recorder, header_of, learn, memory_event, rank_of_process, record_of
from tba_offload.states import OptimizerStates, offload_optimizer
from tba_offload.store.base import close_after
from tba_offload.store.doctor import measure
from tba_offload.store.open import open_store
from tba_offload.transfer.offloader import Offloader
from tba_offload.weights import FrozenWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tba_offload.config import OffloadConfig


@dataclass(frozen=True)
class World:
    """The ranks that train one model together, and the model's layers on all ranks.

    Attributes:
        layers: The layers on all ranks. The rules of a policy select layers from this tuple.
        rank: The rank of this process.
        ranks: Number of ranks.
        run: Identifier of the training run. All ranks write the same identifier into their run logs.
            ``None`` for a single rank.
        agree: Function that all ranks call together to agree on placements; ``None`` for a single rank. The
            first argument has the placements that this rank proposes, by layer name. The second argument is a
            prediction for a step that offloads all ``auto`` layers: the bytes over the budget, and the
            seconds. The function returns the agreed placements by layer name.
    """

    layers: tuple[LayerId, ...]
    rank: int = 0
    ranks: int = 1
    run: str | None = None
    agree: Agree | None = None

    @property
    def may_plan_recomputation(self) -> bool:
        """Whether the planner may choose recomputation. Several ranks must be able to agree."""
        return self.agree is not None or not has_peers()


class Session:
    """Offloading for one model. :func:`tba_offload.attach` creates sessions.

    A step begins with the model's first forward that records a graph, and ends when the optimizers have
    updated the model's parameters. A loop may also mark a step with ``with session.step()``.

    Args:
        stack: The layers to attach to.
        modules: The model or its chunks. Parameters and buffers of the model are never offloaded as
            activations.
        config: The configuration.
        run_log: Path of the run log; ``None`` for no run log.
        strategy: Label of this run in ROK plots. The default label names the placement of the layers and the
            other offloaded data.
        model_info: Facts about the model for the header of the run log.
        measure_memory: Whether to measure the activation peak. On CUDA, the allocator records the peak at no
            cost. On a CPU, a thread samples memory and uses part of a core. :meth:`step` can override this
            setting for one step.
        world: The ranks that train the model; by default only this rank.
        tokens: Number of tokens of one micro-batch, or a function that gets the arguments of the model's
            forward and returns this number. By default, the session counts the elements of the keyword
            argument ``input_ids``. Without ``input_ids``, the session counts the elements of the first
            positional tensor of integers.
        steps_by_hand: Whether the program marks each step with :meth:`step`.
        optimizers: The optimizers whose states are offloaded too.
        masters: Maps each master copy among the parameters of ``optimizers`` to its model parameter. See
            :func:`tba_offload.offload_optimizer`.
        updated_by: Optimizers that update the model. If ``steps_by_hand`` is False, the session finds
            these optimizers, and ``updated_by`` may be empty.
        on_step: Functions to call with the record of each step.
        trace_steps: Numbers of the steps, from 1, for which a timeline is recorded.

    Attributes:
        config: The configuration.
        layers: The attached layers.
        states: The offloaded states of each optimizer.
        weights: The offloaded frozen weights; ``None`` if the policy offloads no frozen weights.
        store: The store of offloaded bytes.
        offloader: The object that moves bytes between memory and the store.
        capture: The object that captures the tensors that layers save.
        gradients: The gradients of the model.
        planning: The current plan, and the controller that makes new plans.
        saved: Three byte counts of the step with the most saved activations: all saved activations, the most
            activations saved at one time, and the largest activation.
        notes_inputs: Whether the session counts the bytes of each layer's inputs, for plans or the run log.

    Raises:
        ConfigError: A rule of the policy has no effect.
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
        steps_by_hand: bool = False,
        optimizers: Sequence[Optimizer] = (),
        masters: Mapping[Tensor, Tensor] | None = None,
        updated_by: Iterable[Optimizer] = (),
        on_step: Sequence[Callable[[StepRecord], object]] = (),
        trace_steps: Iterable[int] = (),
    ) -> None:
        check_disjoint(stack.layers)
        check_unattached(stack.layers)
        count_tokens = token_counter(tokens)
        self.config, self.stack, self.layers, self.modules = config, stack, stack.layers, tuple(modules)
        self.world = world or World(layers=tuple(layer.id for layer in stack.layers))
        self.device = device_of_model(modules)
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet(updated_by)
        self.states: list[OptimizerStates] = []
        self.weights: FrozenWeights | None = None
        self._resident: ResidentData | None = None
        self._controller: Any = None
        self._traced, self._is_measured = frozenset(trace_steps), measure_memory
        self.saved, self.notes_inputs = (0, 0, 0), run_log is not None
        self._closers: list[Callable[[], object]] = []  # in the order of opening
        try:
            self._open_engine()
            header = header_of(self, strategy, model_info, has_states=bool(optimizers))
            self.recorder = Recorder(run_log, header, on_step)
            self._closers.append(self.recorder.close)
            self._open_control(None if steps_by_hand else count_tokens)
            self._open_states(optimizers, masters)
        except BaseException:  # an interrupt too
            self._close()
            raise

    # ---- open: store, engine, observers, control; each appends the function that closes it ---------

    def _open_engine(self) -> None:
        config, device, modules, layers = self.config, self.device, self.modules, self.layers
        self.notices = Notices()
        may_plan = self.world.may_plan_recomputation
        self.sites = [Site(layer, index) for index, layer in enumerate(layers)]
        self.checkpointing = Checkpointing(self.stack, self.sites, may_plan=may_plan)
        self._closers.append(self.checkpointing.close)
        self._take_over()
        self.store = open_store(config.store, device=device)
        self._closers.append(self.store.close)
        window, keeps = config.budget.window(), config.on_full == "keep"
        self.offloader = Offloader(self.store, device, window=window, keep_when_full=keeps)
        self.capture = Capture(self.offloader, min_tensor_bytes=config.min_tensor_bytes)
        plan, numbers = self._plan_of_policy(), [layer.id.number for layer in layers]
        probe = partial(measure, self.store, device, extent_bytes=256 << 10, seconds=0.05)
        self.planning = Planning(plan, numbers, self.capture, self.offloader, probe)
        # The observers.
        self.gradients = Gradients(modules, device.torch_device, lambda nbytes: memory.sample(nbytes))  # noqa: PLW0108 - comes later
        self._closers.append(self.gradients.close)
        self.memory = memory = Memory(self)
        self._closers.append(self.memory.close)
        self.verifier = Verifier(tell)
        self._closers.append(self.verifier.close)

    def _open_control(self, count_tokens: Callable[..., int | None] | None) -> None:
        limits = self._limits()
        self.budget = Budget(limits, self.planning, self.gradients.live)
        self.capture.budget_bytes = limits.budget
        self._start_planning()
        self._closers.append(self.say_summary)
        self.loop = Loop(self, count_tokens)
        self._closers.append(self.loop.close)
        self.watch = BackwardWatch(self)
        self.runs = LayerRuns(self)
        self._closers += [self.runs.close, self._uninstall]  # first: an interrupt may strike between layers
        for site in self.sites:
            site.install(self.runs.run)
        torch_private.watch(self.capture)
        _open_sessions.add(self)

    def _open_states(self, optimizers: Sequence[Optimizer], masters: Mapping[Tensor, Tensor] | None) -> None:
        config, modules = self.config, self.modules
        for number, optimizer in enumerate(optimizers):
            updated = partial(self.recorder.note_states, number)
            states = offload_optimizer(optimizer, config, model=modules, masters=masters, updated=updated)
            self.states.append(states)
            self._closers.append(states.close)
        if config.frozen_percent:
            blocks, count = [layer.module for layer in self.layers], self.gradients.live.shift
            self.weights = FrozenWeights(modules, blocks, config, count=count, tell=tell)
            self._closers.append(self.weights.close)
        data: list[Swappable] = []
        if config.weights is not None and config.weights.frozen == "auto" and self.weights is not None:
            data.append(self.weights)
        if config.states is not None and config.states.default == "auto":
            data += self.states
        if data:
            self._resident = ResidentData(self.planning, self.budget, data, self.recorder.note_resident)
            self._closers.append(self._resident.close)

    # ---- one step, as the loop asks for it -------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Prepare the offloader and the observers for a step.

        Raises:
            TransferError: A transfer failed between the last step and this step.
        """
        gradients, memory, offloader = self.gradients, self.memory, self.offloader
        # Failures and loads since the last step, for example from an evaluation, belong to no step.
        self.raise_failures()
        offloader.begin_step()
        self.store.take_loads()
        if self.weights is not None:  # a compiled model has already read weights of its first layers
            self.weights.begin_step()
        # The model may have other buffers and parameters now, and trainers switch checkpointing on late.
        self.capture.static.refresh(self.modules)
        if self._take_over():
            self._start_planning()
        gradients.begin_step()
        gradients.live.take()
        # Counters of the layers start at zero, and the plan for this step comes into force.
        samples = step.meter is not None and step.meter.samples
        self.capture.begin_step(look_at_memory=memory.sample if samples else None)
        for site in self.sites:
            site.runs = site.waiting = 0
        self.planning.begin_step()
        # Observers begin last, so that they do not observe the preparation of the step. The planner needs
        # times by the clock of an asynchronous device, and with budget.device_bytes the times at which
        # gradients are allocated.
        has_marks = self.planning.controller is not None and self.device.runs_behind
        offloader.marks_stalls = has_marks
        if has_marks:
            self.capture.trace.mark_times(self.device)
        if self.budget.limits.nets_gradients:
            self.capture.trace.gradients = gradients.alone
        step.number = self.recorder.last_step + 1
        keeps = all(each is Placement.KEEP for each in self.planning.plan.placements)
        wanted = step.is_traced or self.planning.wants_memory
        memory.begin_step(step, self.weights, keeps=keeps, wanted=wanted)
        step.began = time.perf_counter()
        # Other memory on the device may have grown, so less memory than planned may be free for activations.
        self.budget.begin_step(memory.base_bytes)

    def end_step(self, step: Step, *, failed: bool, is_broken: bool) -> None:
        """Stop the observers and end the transfers of a step.

        Args:
            step: The step.
            failed: If True, the step is not recorded.
            is_broken: If True, all saved storages of the step are dropped.

        Raises:
            TransferError: A transfer of the step failed.
        """
        trace, memory = self.capture.trace, self.memory
        try:
            step.stop(trace.backward_ends)
            if not failed and not step.opened_itself:
                trace.end_step()
            memory.end()
        except BaseException:
            failed = is_broken = True
            raise
        finally:
            memory.stop()
            self.capture.end_step(failed=failed, is_broken=is_broken)
        if not failed:
            self.verifier.end_step()
            self.raise_failures()

    def raise_failures(self) -> None:
        """Raise the error of the first failed transfer, and drop the errors of later transfers.

        Raises:
            TransferError: A transfer failed.
        """
        try:
            self.offloader.flush()  # a graph that outlives its step must not keep memory
            self.offloader.raise_failures()
        except TransferError:
            self.offloader.abandon()
            raise

    def record_step(self, step: Step) -> StepRecord:
        """Record a step that ended without an exception, and plan the next step."""
        self.gradients.count()
        loads, moved = self.store.take_loads(), None if self.weights is None else self.weights.take()
        record = self.recorder.add(record_of(self, step, loads, moved), step, self.capture.trace)
        if self.memory.is_due:
            self.recorder.note(MEMORY, memory_event(self, step))
        waits = sorted([*self.offloader.window.stats.stalls, *(() if moved is None else moved.waits)])
        if (curve := self.memory.curve) is not None:
            step.over_time = {"step": step.number, **curve.figures(self, step, waits)}
            self.recorder.note(TIMELINE, step.over_time)
        self.budget.end_step(record)
        warn_after(self, record)
        if not step.is_skipped:
            learn(self, step, record, loads)
            if self._resident is not None:
                self._resident.step_ended(record)
        return record

    # ---- for users -------------------------------------------------------------------------------

    def step(
        self,
        *,
        tokens: int | None = None,
        model_flops: float | None = None,
        measure_memory: bool | None = None,
        trace: bool = False,
    ) -> Step:
        """Return a context manager for one training step: forward and backward of all its micro-batches.

        Args:
            tokens: Number of tokens of the step, for the run log. By default, the session counts the tokens
                that the model receives.
            model_flops: Number of floating-point operations of the model in the step, without recomputation.
            measure_memory: Whether to measure the activation peak. The default is the value that was passed
                to :func:`attach`.
            trace: Whether to record a timeline of the step, in ``step.timeline`` and in the run log.
                ``trace=True`` also measures memory.

        Returns:
            The step. After the ``with`` block, ``step.record`` is the :class:`StepRecord`.

        Raises:
            SessionError: The session is closed, another step is open, or the process is a forked child. The
                error is raised when the ``with`` block begins.
        """
        trace = trace or self.recorder.last_step + 1 in self._traced
        wanted = self._is_measured if measure_memory is None else measure_memory
        is_used = wanted or trace or self.planning.wants_memory or self.budget.device_bytes is not None
        meter = self.memory.meter_of_step() if is_used else None
        return Step(self.loop, meter, tokens, model_flops, trace=trace)

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self.planning.plan

    @property
    def last(self) -> StepRecord | None:
        """The record of the last finished step; ``None`` if no step has finished."""
        return next(reversed(self.records), None)

    @property
    def records(self) -> list[StepRecord]:
        """The records of the last 10,000 steps, oldest first. The run log has all steps.

        Reading the records does not wait for the device. Until the device has finished a step, the step's
        record has ``seconds`` by the host's clock. A loss that is a tensor is added when the device has
        finished the step.
        """
        return self._settled().records

    def _settled(self) -> Recorder:
        self.loop.settle()
        self.recorder.write()
        return self.recorder

    def why(self) -> Diagnosis:
        """Return a diagnosis of the memory peak: which data are in memory, and which change helps most.

        Raises:
            RunLogError: No step has ended yet.
        """
        return Diagnosis.of(self._settled().log())

    def close(self) -> None:
        """Restore the model, and close the store and the run log. Further calls do nothing.

        If Ctrl-C interrupts ``close``, call ``close`` again.

        Raises:
            SessionError: A step is open.
        """
        self.loop.finish()
        if self.loop.step is not None:
            raise SessionError("the session cannot be closed while a step is open. End the step first")
        self._close()

    def say_summary(self) -> None:
        """Log one line with the cost of the run, if an activation peak was measured after the first step."""
        self.recorder.write(wait=True)
        line = describe_run(self.recorder.log(), self._controller.keep)
        rank, ranks = rank_of_process()
        if rank == 0 and line is not None:
            tell(line if ranks == 1 else f"{line} (rank 0 of {ranks})")

    def _uninstall(self) -> None:
        for site in self.sites:
            site.uninstall()
        torch_private.unwatch(self.capture)
        unwrap_classes()
        self.capture.look_at_memory = None  # a cycle
        _open_sessions.discard(self)
        if not _open_sessions:
            attention.take_out()

    def _close(self) -> None:
        with ExitStack() as opened:
            for close in self._closers:
                opened.callback(close)
        self._closers.clear()  # in cycles, the model would stay alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self.loop.step is not None:
            self.loop.end(self.loop.step, failed=True)  # an interrupt struck before the end of the step
        close_after(error, self.close)

    def become_inert(self) -> None:
        """Switch off the session in this process, because the process is a forked child."""
        self.loop.is_inert, self.loop.step = True, None
        of_parent = self.recorder.close, self.say_summary, self.memory.close, self.store.close
        self._closers = [close for close in self._closers if close not in of_parent]
        self.offloader.is_inert = True

    # ---- the plan --------------------------------------------------------------------------------

    def _plan_of_policy(self) -> Plan:
        ids, window = [layer.id for layer in self.layers], self.config.budget.window(*self.saved[1:])
        placed = self.config.policy.resolve(ids, self.world.layers)
        return Plan(tuple(map(self.checkpointing.placed, ids, placed.values())), window=window)

    def _take_over(self) -> bool:
        before, found = self.checkpointing.taken, self.checkpointing.take_over()
        if found and rank_of_process()[0] == 0:
            what = f"{found.total()} of {len(self.layers)} layers ({', '.join(found)})"
            placed = zip(self.sites, self._plan_of_policy().placements, strict=True)
            placements = " or ".join(dict.fromkeys(each for site, each in placed if site.checkpoint))
            tell(f"the session replaces the checkpointing of {what} by the placement {placements}")
        return self.checkpointing.taken != before

    def _limits(self) -> Limits:
        """Return the memory limits for the first plan, before memory for other data is subtracted.

        Without a budget, ``auto`` layers get a limit that fits the device, if device memory can be measured.

        Raises:
            UnsupportedError: The policy sets budget.device_bytes, but the memory cannot be measured.
        """
        config, budget = self.config, self.config.budget
        limits = Limits(budget.activation_bytes, budget.window(), config.store.write_bytes_per_day)
        if budget.device_bytes is not None:
            if self.memory.meter_of_step() is None:
                why = "the memory of this device cannot be measured. Set budget.activation_bytes instead"
                raise UnsupportedError(f"budget.device_bytes has no effect: {why}")
            return limits.on_device(DeviceShare(budget.device_bytes))
        is_auto = Placement.AUTO in config.policy.placements(self.world.layers)
        is_fit = is_auto and budget.activation_bytes is None and budget.objective is not Objective.MEMORY
        if not is_fit or self.memory.meter_of_step() is None:
            return limits
        return replace(limits.on_device(DeviceShare(fitting_bytes(self.device.torch_device))), is_fit=True)

    def _start_planning(self) -> None:
        """Set the first plan from the policy, and create the controller that learns from steps.

        Without ``auto`` layers, the controller only measures the first steps, for the run log. If the
        placements of the policy have not changed since the last call, do nothing.

        Raises:
            UnsupportedError: The framework switched checkpointing during training, but several ranks plan
                together.
        """
        config, limits, before = self.config, self.budget.limits, self._controller
        plan = self._plan_of_policy()
        if before is not None and plan.placements == before.task.policy:
            return
        if before is not None and before.task.agree is not None:
            why = "several ranks cannot switch checkpointing on or off after attach()"
            raise UnsupportedError(f"{why}. Switch checkpointing before attach()")
        self.planning.plan = plan
        is_auto = Placement.AUTO in config.policy.placements(self.world.layers)
        self.notes_inputs |= is_auto
        names = tuple((layer.chunk, layer.id.name) for layer in self.layers)
        goal = config.budget.objective or (Objective.MEMORY if limits.budget is None else Objective.TIME)
        task = Task(plan.placements, names, limits, goal, self.world.agree if is_auto else None)
        self._controller = Controller(task)
        # The controller's measurements wait for an asynchronous device, so the controller measures only for
        # plans and the run log.
        is_worth_it = self.notes_inputs or not self.device.runs_behind
        self.planning.start(self._controller if is_worth_it else None)
        if task.may_recompute and not self.world.may_plan_recomputation:
            tell(OTHER_RANKS)
        if task.may_recompute or any(placement.recomputes for placement in plan.placements):
            torch_private.load_compiler()


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def session_of(model: nn.Module | Sequence[nn.Module]) -> Session | None:
    """Return the open session of a model.

    For example, a notebook cell may have overwritten the variable that held the session.

    Args:
        model: The model (with or without a wrapper), one of its layers, or its chunks.

    Returns:
        An open session with a layer of the model; ``None`` if the model has no open session.
    """
    modules = {module for chunk in chunks_of(model) for module in chunk.modules()}
    return next((s for s in list(_open_sessions) if modules & {layer.module for layer in s.layers}), None)


def _after_fork_in_child() -> None:
    """Make sessions inert in a forked child, because locks, threads and descriptors belong to the parent."""
    for session in list(_open_sessions):
        session.become_inert()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _finish_at_exit() -> None:
    """Record the last step of each session that is still open, and log the cost of its run."""
    for session in list(_open_sessions):
        if not session.loop.is_inert:
            session.planning.controller = None  # from Python 3.12, no thread can start here
            session.loop.finish()
            session.say_summary()


atexit.register(_finish_at_exit)
