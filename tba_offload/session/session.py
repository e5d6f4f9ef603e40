"""A session: offloading for one model.

A step goes this way. The model's first forward opens it (:class:`~tba_offload.session.loop.Loop`);
:meth:`Session.begin_step` has everything ready; layers run as the plan says
(:class:`~tba_offload.session.layers.LayerRuns`) and backward comes back to them
(:class:`~tba_offload.session.layers.BackwardWatch`); the optimizer's update ends the step;
:meth:`Session.end_step` takes everything back; :meth:`Session.record_step` writes its line in the run log
and has the next step planned.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from tba_offload import torch_private
from tba_offload.capture.gradients import Gradients
from tba_offload.capture.hooks import Capture
from tba_offload.capture.rematerialize import unwrap_classes
from tba_offload.capture.site import Site, check_unattached
from tba_offload.config import ConfigLike, OffloadConfig, read_config
from tba_offload.config.policy import LayerId, Objective, Placement
from tba_offload.device import device_of_model, has_peers
from tba_offload.device.meters import fitting_bytes
from tba_offload.errors import ConfigError, SessionError, TransferError, UnsupportedError
from tba_offload.layers.find import LayerStack, check_disjoint, chunks_of
from tba_offload.planner.auto import Agree, Controller, Task
from tba_offload.planner.model import DeviceShare, Limits, Plan
from tba_offload.planner.planning import Budget, Planning, StatesBeside
from tba_offload.recompute import attention
from tba_offload.recompute.verify import Verifier
from tba_offload.report.log import MEMORY, TIMELINE, StepRecord
from tba_offload.report.why import Diagnosis
from tba_offload.session.layers import BackwardWatch, LayerRuns
from tba_offload.session.loop import Loop, Step, Tokens, token_counter
from tba_offload.session.memory import Memory
from tba_offload.session.notices import OTHER_RANKS, Notices, tell, warn_after
from tba_offload.session.record import Records, explained, header_of, learn, memory_event, record_of
from tba_offload.states import OptimizerStates, offload_optimizer
from tba_offload.store.base import close_after
from tba_offload.store.doctor import measure
from tba_offload.store.open import open_store
from tba_offload.transfer.offloader import Offloader
from tba_offload.weights import FrozenWeights, WeightsTraffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


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
    agree: Agree | None = None

    @property
    def may_plan_recomputation(self) -> bool:
        """Whether the planner decides for all ranks that would have to take part in a second run."""
        return self.agree is not None or not has_peers()


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
        strategy: Label of this run in ROK plots; by default it tells what is offloaded.
        model_info: What the run log's header says about the model.
        measure_memory: Whether to measure the activation peak of steps that do not say so themselves. On CUDA
            that is free; on a CPU a thread samples, which takes part of a core.
        world: The other ranks that the model is spread over; by default there are none.
        tokens: Tokens of one micro-batch, or a function that tells them from the arguments of the model's
            forward; by default the elements of ``input_ids``, or else of the first tensor of whole numbers
            that the model is given by position.
        steps_by_hand: Whether every step is a block of :meth:`step`, and none opens by itself.
        optimizers: Those whose states are offloaded too.
        masters: Master copies among their parameters; see :func:`tba_offload.offload_optimizer`.
        updated_by: Optimizers that update the model, where every step is told by hand, and none of them is
            seen to work.
        on_step: Are called with the record of each step.
        trace_steps: Numbers of the steps that are recorded over time.

    Attributes:
        config: The policy and its settings, as applied last.
        layers: The layers.
        states: The states of each optimizer whose states are offloaded.
        weights: The frozen weights of the layers, if the policy has them offloaded.
        store: Where bytes go.
        offloader: Moves them.
        capture: Sees the tensors that layers save.
        gradients: The gradients of the model.
        planning: The plan in force, and what renews it.

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
        self._states_beside: StatesBeside | None = None
        self._traced, self._is_measured = frozenset(trace_steps), measure_memory
        self._closers: list[Callable[[], object]] = []  # in the order of opening; close() goes backwards
        try:
            self._open_engine()
            header = header_of(self, strategy, model_info, has_states=bool(optimizers))
            self.records = Records(run_log, header, on_step)
            self._closers.append(self.records.close)
            self._open_control(None if steps_by_hand else count_tokens)
            self._open_states(optimizers, masters)
        except BaseException:  # also of an interrupt
            self._close()
            raise

    # ---- open: store, engine, observers, control; each thing that is opened tells how it is closed ------

    def _open_engine(self) -> None:
        config, device, modules, layers = self.config, self.device, self.modules, self.layers
        self.notices = Notices()
        self.store = open_store(config.store, device=device)
        self._closers.append(self.store.close)
        self.offloader = Offloader(
            self.store,
            device,
            window=config.budget.window,
            keep_when_full=config.on_full == "keep",
        )
        self.capture = Capture(self.offloader, min_tensor_bytes=config.min_tensor_bytes)
        numbers = [layer.id.number for layer in layers]
        probe = partial(measure, self.store, device, extent_bytes=256 << 10, seconds=0.05)
        self.planning = Planning(self._plan_of(config), numbers, self.capture, self.offloader, probe)
        # The observers.
        self.weights_traffic = WeightsTraffic()
        self.gradients = Gradients(modules, device.torch_device, lambda nbytes: memory.sample(nbytes))  # noqa: PLW0108 - comes later
        self._closers.append(self.gradients.close)
        self.memory = memory = Memory(self)
        self._closers.append(self.memory.close)
        self.verifier = Verifier(tell)
        self._closers.append(self.verifier.close)

    def _open_control(self, count_tokens: Callable[..., int | None] | None) -> None:
        """Stand in front of the layers, and watch the model and its optimizers."""
        self._start_planning(self.config)
        self.loop = Loop(self, count_tokens)
        self._closers.append(self.loop.close)
        self.watch = BackwardWatch(self)
        self.sites = [Site(layer, index) for index, layer in enumerate(self.layers)]
        self.runs = LayerRuns(self)
        self._closers += [self.runs.close, self._uninstall]  # first: an interrupt may strike between layers
        for site in self.sites:
            site.install(self.runs.run)
        torch_private.watch(self.capture)
        _open_sessions.add(self)

    def _open_states(self, optimizers: Sequence[Optimizer], masters: Mapping[Tensor, Tensor] | None) -> None:
        """Offload the states of optimizers, and frozen weights."""
        config, modules = self.config, self.modules
        for number, optimizer in enumerate(optimizers):
            updated = partial(self.records.note_states, number)
            states = offload_optimizer(optimizer, config, model=modules, masters=masters, updated=updated)
            self.states.append(states)
            self._closers.append(states.close)
        if config.states is not None and config.states.default == "auto":
            told = self.records.note_states_choice
            self._states_beside = StatesBeside(self.planning, self.budget, self.states, told)
            self._closers.append(self._states_beside.close)
        if config.frozen_percent:
            blocks, traffic = [layer.module for layer in self.layers], self.weights_traffic
            count = self.gradients.live.shift
            self.weights = FrozenWeights(modules, blocks, config, count=count, tell=tell, traffic=traffic)
            self._closers.append(self.weights.close)

    # ---- one step, as the loop asks for it -------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Have everything ready for a step.

        Raises:
            TransferError: A transfer failed since the last step.
        """
        gradients, memory, offloader = self.gradients, self.memory, self.offloader
        # What came after the last step belongs to none: dropped handles, failures, loads of an evaluation.
        self.raise_failures()
        offloader.begin_step()
        self.store.take_loads()
        # A compiled model has read the frozen weights of its first layers by now.
        self.weights_traffic.begin_step(gradients.live.parts[1])
        # The model may have other buffers and parameters now, and trainers switch checkpointing on late.
        self.capture.static.refresh(self.modules)
        self.notices.checkpointing(self)
        gradients.begin_step()
        gradients.live.take()
        # The books of the layers are empty, and the plan is the one that was made for this step.
        samples = step.meter is not None and step.meter.samples
        self.capture.begin_step(look_at_memory=memory.sample if samples else None)
        for site in self.sites:
            site.runs = site.waiting = 0
        self.planning.begin_step()
        # Observers begin last: nothing of the above is theirs.
        # The planner asks for times of a device that does its work later than the host gives it out, and
        # under a budget of all that lies on the device for when gradients come.
        has_marks = self.planning.controller is not None and self.device.runs_behind
        offloader.marks_stalls = has_marks
        if has_marks:
            self.capture.trace.mark_times(self.device)
        if self.budget.limits.nets_gradients:
            self.capture.trace.gradients = gradients.alone
        step.number = self.records.last_step + 1
        memory.begin_step(step, wanted=step.is_traced or self.planning.wants_memory)
        step.began = time.perf_counter()
        # What lies on the device by now may leave less to activations than the plan was made for.
        self.budget.begin_step(memory.base_bytes)

    def end_step(self, step: Step, *, failed: bool, is_broken: bool) -> None:
        """Take everything back from a step.

        Args:
            step: The step.
            failed: Whether it comes to nothing.
            is_broken: Whether something went wrong in it, so that it is thrown away whole.

        Raises:
            TransferError: One of its transfers failed.
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
        """Raise the first transfer that failed; others that failed with it must not end the next step.

        Raises:
            TransferError: A transfer failed.
        """
        try:
            self.offloader.flush()  # a graph that outlives its step shall not keep memory
            self.offloader.raise_failures()
        except TransferError:
            self.offloader.abandon()
            raise

    def record_step(self, step: Step) -> StepRecord:
        """Record a step that has ended well, and have the next one planned by what it was like."""
        self.gradients.count()
        loads, moved = self.store.take_loads(), self.weights_traffic.take()
        record = self.records.add(record_of(self, step, loads, moved), step, self.capture.trace)
        if self.memory.is_due:
            self.records.note(MEMORY, memory_event(self, step))
        waits = sorted([*self.offloader.window.stats.stalls, *(() if moved is None else moved.waits)])
        if (curve := self.memory.curve) is not None:
            step.over_time = {"step": step.number, **curve.figures(self, step, waits)}
            self.records.note(TIMELINE, step.over_time)
        self.budget.end_step(record)
        warn_after(self, record)
        if not step.is_skipped:
            learn(self, step, record, loads)
            if self._states_beside is not None:
                self._states_beside.step_ended(record)
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
        """Return one training step, told by hand: any number of micro-batches, forward and backward.

        Args:
            tokens: Tokens that the step trains on, for the run log; by default those that the model is given.
            model_flops: Algorithmic FLOPs of the step; recomputed ones do not count.
            measure_memory: Whether to measure the activation peak; by default what :func:`attach` was told.
            trace: Whether to record the step over time, for ``step.timeline``, the run log and
                ``tba-offload timeline``; its memory is measured then.

        Returns:
            A context manager. After its block ``record`` holds the :class:`StepRecord`.

        Raises:
            SessionError: On entering, if the session is closed, another step is open, or this is a
                forked child.
        """
        trace = trace or self.records.last_step + 1 in self._traced
        wanted = self._is_measured if measure_memory is None else measure_memory
        is_used = wanted or trace or self.planning.wants_memory or self.budget.device_bytes is not None
        meter = self.memory.meter_of_step() if is_used else None
        return Step(self.loop, meter, tokens, model_flops, trace=trace)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.planning.plan

    @property
    def last(self) -> StepRecord | None:
        """The record of the last whole step; ``None`` before the first update has ended one."""
        return next(reversed(self.report()), None)

    def apply(self, config: ConfigLike) -> None:
        """Change the policy between steps: placements, ``min_tensor_bytes``, ``on_full`` and ``on_slow``.

        All else of a policy is what the session was opened with, and another value is refused. The run log
        tells what was applied.

        Raises:
            SessionError: A step is open, or the session is closed.
            ConfigError: The policy is wrong, or asks for something else that cannot change; nothing has.
        """
        self.loop.check_usable()
        self.loop.settle()
        if self.loop.step is not None:
            raise SessionError("placements cannot change inside a step; apply the policy between steps")
        wanted = read_config(config, layers=self.world.layers)
        if not wanted.store.directories:
            wanted = replace(wanted, store=replace(wanted.store, directories=self.config.store.directories))
        fixed = "store", "budget", "states", "weights"
        if others := [name for name in fixed if getattr(wanted, name) != getattr(self.config, name)]:
            how = "cannot change while a session is open: close the session, and attach the model anew"
            raise ConfigError(f"{' and '.join(others)} {how}", file=wanted.file)
        self._start_planning(wanted)
        self.config = wanted
        self.capture.min_tensor_bytes = wanted.min_tensor_bytes
        self.offloader.keep_when_full = wanted.on_full == "keep"
        applied = {"policy": wanted.to_yaml(), "plan": explained(wanted.policy, self.world.layers)}
        self.records.note("policy", {"step": self.records.last_step, **applied})

    def report(self) -> list[StepRecord]:
        """Return the records of the steps so far, oldest first; of the last 10,000, the run log has all.

        Nothing waits for a device: of steps that it has not come to the end of, the loss is missing if it was
        given as a tensor, and ``seconds`` are the host's.
        """
        self.loop.settle()
        self.records.write()
        return self.records.records

    def why(self) -> Diagnosis:
        """Return why memory is where it is, and the one change that helps most: ``print(session.why())``.

        Raises:
            RunLogError: No step has ended yet.
        """
        self.report()
        return Diagnosis.of(self.records.log())

    def close(self) -> None:
        """Give the model back as it was; close the store and the run log. May be called twice.

        What a call that was interrupted has left is done by the next one.

        Raises:
            SessionError: A step is open.
        """
        self.loop.finish()
        if self.loop.step is not None:
            raise SessionError("a session cannot be closed inside one of its steps")
        self._close()

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
        """Close what was opened, the last first; an error of one keeps no other from closing."""
        with ExitStack() as opened:
            for close in self._closers:
                opened.callback(close)
        self._closers.clear()  # in cycles, the model would stay alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self.loop.step is not None:
            self.loop.end(self.loop.step, failed=True)  # an interrupt struck before the step could end itself
        close_after(error, self.close)

    def become_inert(self) -> None:
        """Leave everything to the parent: this is a forked child."""
        self.loop.is_inert, self.loop.step = True, None
        of_parent = self.records.close, self.memory.close, self.store.close
        self._closers = [close for close in self._closers if close not in of_parent]
        self.offloader.become_inert()

    # ---- the plan --------------------------------------------------------------------------------

    def _plan_of(self, config: OffloadConfig) -> Plan:
        ids, window = [layer.id for layer in self.layers], config.budget.window
        return Plan.from_policy(config.policy, ids, self.world.layers, window=window)

    def _limits(self, config: OffloadConfig) -> Limits:
        """Return what plans must keep to; of a device all may be left at first.

        Layers placed ``auto`` without a budget fit the device, where its memory can be measured.

        Raises:
            UnsupportedError: The policy limits all that lies on the device, and that cannot be measured.
        """
        budget, device = config.budget, self.device.torch_device
        limits = Limits(budget.activation_bytes, budget.window, config.store.write_bytes_per_day)
        if budget.device_bytes is not None:
            if self.memory.meter_of_step() is None:
                needs = "needs to know what lies on the device. Set budget.activation_bytes in its place"
                raise UnsupportedError(f"budget.device_bytes {needs}")
            return limits.on_device(DeviceShare(budget.device_bytes))
        is_auto = Placement.AUTO in config.policy.placements(self.world.layers)
        is_fit = is_auto and budget.activation_bytes is None and budget.objective is not Objective.MEMORY
        if not is_fit or self.memory.meter_of_step() is None:
            return limits
        return replace(limits.on_device(DeviceShare(fitting_bytes(device))), is_fit=True)

    def _start_planning(self, config: OffloadConfig) -> None:
        """Start with the plan of a policy, and with what learns from steps and decides where that is open.

        Without a layer that is placed ``auto`` it is of use for the run log only.
        """
        limits, controller, plan = self._limits(config), None, self._plan_of(config)
        if self._states_beside is None:  # which fills what the budget leaves, and only with one of the device
            self.budget = Budget(limits, self.planning, self.gradients.live)
            self.capture.budget_bytes = limits.budget
        is_auto = Placement.AUTO in config.policy.placements(self.world.layers)
        if is_auto or self.records.is_written:
            task = Task(
                plan.placements,
                tuple((layer.chunk, layer.id.name) for layer in self.layers),
                limits,
                config.budget.objective or (Objective.MEMORY if limits.budget is None else Objective.TIME),
                self.world.agree if is_auto else None,
            )
            controller = Controller(task)
        self.planning.start(plan, controller)
        may_choose = controller is not None and controller.task.may_recompute
        if may_choose and not self.world.may_plan_recomputation:
            tell(OTHER_RANKS)
        if may_choose or any(placement.recomputes for placement in plan.placements):
            torch_private.load_compiler()


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def session_of(model: nn.Module | Sequence[nn.Module]) -> Session | None:
    """Return the open session of a model, for a program that has lost it, as a notebook may.

    Args:
        model: The model, wrapped or not, a layer of it, or its chunks.

    Returns:
        A session that has a layer of the model; ``None`` if none has.
    """
    modules = {module for chunk in chunks_of(model) for module in chunk.modules()}
    return next((s for s in list(_open_sessions) if modules & {layer.module for layer in s.layers}), None)


def _after_fork_in_child() -> None:
    """Make sessions inert in a forked child: locks, threads and descriptors are those of the parent."""
    for session in list(_open_sessions):
        session.become_inert()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _finish_at_exit() -> None:
    """Have the last step of a session that was never closed in its run log all the same."""
    for session in list(_open_sessions):
        if not session.loop.is_inert:
            session.planning.controller = None  # no step comes; from Python 3.12 on it could start no thread
            session.loop.finish()
            session.records.write(wait=True)


atexit.register(_finish_at_exit)
