"""A session wires the parts together: layers, capture, offloader, store, meters, run log."""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import nn

from tba_offload.adapt.controller import Controller
from tba_offload.adapt.task import Task
from tba_offload.adapt.thinking import InSlices
from tba_offload.capture import resize, transforms
from tba_offload.capture.site import check_unattached
from tba_offload.config import ConfigLike, OffloadConfig, read_config
from tba_offload.config.policy import Placement
from tba_offload.errors import ConfigError, SessionError
from tba_offload.formatting import layers_by_placement
from tba_offload.layers.stack import LayerStack, check_disjoint
from tba_offload.plan.goals import default_objective
from tba_offload.plan.model import Plan
from tba_offload.report.why import Diagnosis
from tba_offload.session.backward import BackwardWatch, TailWatch
from tba_offload.session.boundaries import Boundaries
from tba_offload.session.conclusions import Conclusions
from tba_offload.session.layer_runs import LayerRuns
from tba_offload.session.notices import tell
from tba_offload.session.ongoing import Ongoing
from tba_offload.session.parts import make_parts, plan_of
from tba_offload.session.record import Journal, header_of, label_of
from tba_offload.session.states_choice import StatesChoice
from tba_offload.session.steps import Steps
from tba_offload.session.tokens import Tokens, token_counter
from tba_offload.session.world import World
from tba_offload.states import offload_optimizer
from tba_offload.store.base import close_after
from tba_offload.store.options import directories_of
from tba_offload.weights import FrozenWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from torch import Tensor
    from torch.optim import Optimizer

    from tba_offload.adapt.planning import Planning
    from tba_offload.capture.gradients import Gradients
    from tba_offload.capture.hooks import Capture
    from tba_offload.report.log import StepRecord
    from tba_offload.session.parts import Parts
    from tba_offload.session.step import Step
    from tba_offload.session.tokens import TokenCounter
    from tba_offload.states import OptimizerStates, StatesRecord
    from tba_offload.store.base import ActivationStore
    from tba_offload.transfer.offloader import Offloader


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
            forward; by default the elements of ``input_ids``, where the model is given any.
        status: Whether each step is told in a line; new plans always are: :mod:`tba_offload.session.notices`.
        steps_by_hand: Whether every step is a block of :meth:`step`, and none opens by itself.
        optimizers: Those whose states are offloaded too.
        masters: Master copies among their parameters; see :func:`tba_offload.offload_optimizer`.
        updated_by: Optimizers that update the model, where every step is told by hand, and none of them is
            seen to work.
        on_step: Are called with the record of each step.
        trace_steps: Numbers of the steps that are recorded over time.

    Attributes:
        weights: The frozen weights of the layers, if the policy has them offloaded.

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
        optimizers: Sequence[Optimizer] = (),
        masters: Mapping[Tensor, Tensor] | None = None,
        updated_by: Iterable[Optimizer] = (),
        on_step: Sequence[Callable[[StepRecord], object]] = (),
        trace_steps: Iterable[int] = (),
    ) -> None:
        check_disjoint(stack.layers)
        check_unattached(stack.layers)
        count_tokens = token_counter(tokens)
        self.config = config
        self.layers = stack.layers
        self._world = world or World(layers=tuple(layer.id for layer in stack.layers))
        self._ongoing = Ongoing()
        parts = self._parts = make_parts(
            stack,
            modules,
            config,
            world=self._world,
            ongoing=self._ongoing,
            measure_memory=measure_memory,
        )
        try:
            strategy = strategy or label_of(config, self._world, modules, has_states=bool(optimizers))
            header = header_of(config, strategy, model_info, parts)
            self._journal = Journal(run_log, header, tells=status, on_step=on_step)
            self._start_planning(config)
        except BaseException:
            parts.meters.close()
            parts.store.close()
            raise
        parts.optimizers.update(updated_by)
        journal = self._journal
        choice = self._choice = _states_choice(config, parts, journal)
        conclusions = Conclusions(parts, journal, learned=_nothing if choice is None else choice.step_ended)
        self._steps = Steps(self._ongoing, parts, conclusions, traced=frozenset(trace_steps))
        self._boundaries = None if steps_by_hand else _boundaries_of(self._steps, parts, count_tokens)
        backward_ended = _nothing if self._boundaries is None else self._boundaries.backward_ended
        watch = BackwardWatch(self._ongoing, parts, backward_ended)
        self._runs = LayerRuns(stack, config, self._ongoing, parts, watch, self._boundaries, self)
        for site in parts.sites:
            site.install(self._runs.run)
        resize.watch(self.capture)
        transforms.watch(self.capture)
        _open_sessions.add(self)
        self.weights: FrozenWeights | None = None
        try:
            for number, optimizer in enumerate(optimizers):
                updated = partial(_updated, journal, choice, number)
                parts.states.append(
                    offload_optimizer(optimizer, config, model=modules, masters=masters, updated=updated)
                )
            if choice is not None:
                choice.begin(self.states)
            if config.frozen_percent:
                blocks = [layer.module for layer in self.layers]
                live = parts.gradients.live
                self.weights = FrozenWeights(
                    modules, blocks, config, count=live.shift, tell=tell, traffic=parts.weights
                )
        except BaseException:
            self.close()
            raise

    @property
    def states(self) -> tuple[OptimizerStates, ...]:
        """The states of each optimizer whose states are offloaded."""
        return tuple(self._parts.states)

    @property
    def store(self) -> ActivationStore:
        """Where bytes go."""
        return self._parts.store

    @property
    def offloader(self) -> Offloader:
        """What moves them."""
        return self._parts.offloader

    @property
    def capture(self) -> Capture:
        """What sees the tensors that layers save."""
        return self._parts.capture

    @property
    def gradients(self) -> Gradients:
        """The gradients of the model."""
        return self._parts.gradients

    @property
    def planning(self) -> Planning:
        """The plan in force, and what renews it."""
        return self._parts.planning

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.planning.plan

    # ---- for users -------------------------------------------------------------------------------

    def step(
        self,
        *,
        tokens: int | None = None,
        model_flops: float | None = None,
        measure_memory: bool | None = None,
        trace: bool = False,
    ) -> Step:
        """One training step, told by hand: any number of micro-batches, forward and backward.

        Args:
            tokens: Tokens that the step trains on, for the run log; by default those that the model is given.
            model_flops: Algorithmic FLOPs of the step; recomputed ones do not count.
            measure_memory: Whether to measure the activation peak; by default what :func:`attach` was told.
            trace: Whether to record the step over time, for ``step.timeline``, the run log and
                ``tba-offload timeline``; its memory is measured then. In a profile of :mod:`torch.profiler`
                that is being made when it begins, the step and the runs of its layers are ranges.

        Returns:
            A context manager. After its block ``record`` holds the :class:`StepRecord`.

        Raises:
            SessionError: On entering, if the session is closed, another step is open, or this is a
                forked child.
            UnsupportedError: The memory of this device cannot be measured.
        """
        return self._steps.new(
            tokens=tokens, model_flops=model_flops, measure_memory=measure_memory, trace=trace
        )

    def apply(self, config: ConfigLike) -> None:
        """Change the placements between steps; store and budget stay as they are.

        Raises:
            SessionError: A step is open, or the session is closed.
            ConfigError: The policy is wrong or asks for another store or budget.
        """
        self._ongoing.check_usable()
        self._steps.settle()
        if self._steps.open_step() is not None:
            raise SessionError("placements cannot change inside a step; apply the policy between steps")
        wanted = read_config(config, layers=self._world.layers)
        if not wanted.store.directories:
            wanted = replace(wanted, store=replace(wanted.store, directories=self.config.store.directories))
        budgets = [(each.budget.limits, each.budget.device_bytes) for each in (wanted, self.config)]
        if wanted.store != self.config.store or budgets[0] != budgets[1]:
            raise ConfigError(
                "store and budget are those that the session was opened with; close it and attach anew",
                file=wanted.file,
            )
        self._start_planning(wanted)
        self.config = wanted
        self._runs.configure(wanted)
        self.capture.configure(min_tensor_bytes=wanted.min_tensor_bytes)
        self.offloader.failures.resolve(keep_when_full=wanted.on_full == "keep")

    def report(self) -> list[StepRecord]:
        """Return the records of the steps so far, oldest first; of the last 10,000, the run log has all.

        Nothing waits for a device: of steps that it has not come to the end of, the loss is missing if it was
        given as a tensor, and ``seconds`` are the host's.
        """
        self._steps.settle()
        self._journal.write_known()
        return self._journal.records

    def why(self) -> Diagnosis:
        """Why memory is where it is, and the one change that would help most: ``print(session.why())``.

        Raises:
            RunLogError: No step has ended yet.
        """
        self.report()
        return Diagnosis.of(self._journal.log())

    def close(self) -> None:
        """Give the model back as it was, closes the store and the run log. May be called twice.

        What a call that was interrupted has left is done by the next one.

        Raises:
            SessionError: A step is open.
        """
        if not self._ongoing.is_closed:
            self._steps.finish()
            if self._steps.open_step() is not None:
                raise SessionError("a session cannot be closed inside one of its steps")
        self._ongoing.close()
        with ExitStack() as at_last:
            for states in self.states:
                at_last.callback(states.close)
            if self._choice is not None:
                at_last.callback(self._choice.close)
            if self.weights is not None:
                at_last.callback(self.weights.close)
            if self in _open_sessions:
                self._let_go()

    def _let_go(self) -> None:
        for site in self._parts.sites:
            site.uninstall()
        self._runs.close()
        if self._boundaries is not None:
            self._boundaries.close()
            self._steps.end_by(settle=_nothing, finish=_nothing)
        self._parts.verifier.close()  # in cycles, as with the boundaries, all would stay alive, and the model
        self.gradients.close()
        resize.unwatch(self.capture)
        transforms.unwatch(self.capture)
        if not self._ongoing.is_inert:
            self.planning.close()
            try:
                self.store.close()
            finally:
                self._parts.meters.close()
                self._journal.close()
        _open_sessions.discard(self)

    def __repr__(self) -> str:
        placed = layers_by_placement(
            [layer.id.name for layer in self.layers], [placement.value for placement in self.plan.placements]
        )
        kind = self.store.description.get("kind", type(self.store).__name__)
        state = "closed" if self._ongoing.is_closed else f"{self._ongoing.number} steps"
        return f"<Session: {placed}; store {kind}; {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and self._ongoing.step is not None:
            self._steps.end(failed=True)  # an interrupt struck before the step could end itself
        close_after(error, self.close)

    def finish_step(self) -> None:
        """End a step that opened by itself: no more of it will come. The run log is complete then."""
        self._steps.finish()
        if not self._ongoing.is_inert:
            self._journal.write_all()

    def become_inert(self) -> None:
        """In a forked child: its locks, threads and descriptors are those of the parent."""
        self._ongoing.become_inert()
        self.offloader.become_inert()

    # ---- the plan --------------------------------------------------------------------------------

    def _start_planning(self, config: OffloadConfig) -> None:
        """Start with the plan of a policy, and with what learns from steps and decide where that is open.

        Without a layer that is placed ``auto`` it is of use for the run log only.
        """
        limits, controller = self._parts.budget.limits, None
        plan = plan_of(config, self.layers, self._world, limits)
        is_auto = Placement.AUTO in Plan.from_policy(config.policy, self._world.layers).placements
        if is_auto or self._journal.is_written:
            task = Task(
                plan.placements,
                tuple((layer.chunk, layer.id.name) for layer in self.layers),
                limits,
                config.budget.objective or default_objective(limits),
                host_capacity=config.store.host_capacity,
                drives=_drives_of(config),
                is_shared=is_auto and self._world.agree is not None,
            )
            controller = Controller(task, think=InSlices)
        self.planning.start(plan, controller, self._world.agree)


def _boundaries_of(steps: Steps, parts: Parts, count_tokens: TokenCounter) -> Boundaries:
    tail, is_whole = TailWatch(steps.ongoing), len(parts.modules) == 1

    def forward_ended(output: object) -> None:
        collected = [] if steps.ongoing.meter is None else parts.outputs.model_ended(output)
        if is_whole:  # a loss does not follow each chunk
            parts.memory_watch.model_ended(collected)
        tail.watch(output)

    boundaries = Boundaries(
        steps,
        parts.gradients,
        [site.layer.module for site in parts.sites],
        parts.modules,
        count_tokens=count_tokens,
        forward_ended=forward_ended,
        optimizers=parts.optimizers,
    )
    steps.end_by(settle=boundaries.settle, finish=boundaries.finish)
    return boundaries


def _nothing(*_: object) -> None:
    """Where steps are told by hand it does not matter when a backward pass ends; not all have a choice."""


def _states_choice(config: OffloadConfig, parts: Parts, journal: Journal) -> StatesChoice | None:
    """Decide how many sub-groups of optimizer states travel, where the policy leaves that open."""
    if config.states is None or config.states.default != "auto":
        return None
    return StatesChoice(parts.planning, parts.budget, journal.note_states_choice)


def _updated(journal: Journal, choice: StatesChoice | None, number: int, record: StatesRecord) -> None:
    """Record that an optimizer has made an update."""
    journal.note_states(number, record)
    if choice is not None:
        choice.updated(number, record)


def _drives_of(config: OffloadConfig) -> tuple[int, ...]:
    """Return the device numbers of the file systems that a configuration names, in its order."""
    directories = directories_of(config.store)
    return tuple(Path(directory).stat().st_dev for directory in directories if Path(directory).is_dir())


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def session_of(model: nn.Module | Sequence[nn.Module]) -> Session | None:
    """Return the open session of a model, for a program that has lost it, as a notebook may.

    Args:
        model: The model, wrapped or not, a layer of it, or its chunks.

    Returns:
        That of the first layer that has one; ``None`` if none has.
    """
    chunks = [model] if isinstance(model, nn.Module) else model
    owners = {layer.module: session for session in list(_open_sessions) for layer in session.layers}
    found = (owners.get(module) for chunk in chunks for module in chunk.modules())
    return next((session for session in found if session is not None), None)


def _after_fork_in_child() -> None:
    for session in list(_open_sessions):
        session.become_inert()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _finish_at_exit() -> None:
    """Record that the last step of a session that was never closed is in its run log all the same."""
    for session in list(_open_sessions):
        session.planning.end()  # for no step that comes; from Python 3.12 on it could start no thread either
        session.finish_step()


atexit.register(_finish_at_exit)
