"""The records of a session's steps: made, remembered, told, and written to the run log.

Some figures are known only when the device has come to the end of the step, mostly within the next one. A
record that lacks them is told and written when they are there, and what comes after it waits for it.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from tba_offload.device import device_of
from tba_offload.placements import Placement
from tba_offload.planner.measure import StepObservation
from tba_offload.planner.model import Plan
from tba_offload.report.log import MEMORY, PLAN, RunHeader, RunLog, RunLogWriter, StepRecord
from tba_offload.report.ranks import free_run_log
from tba_offload.session.memory import new_bytes, static_bytes
from tba_offload.session.notices import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tba_offload.capture.trace import StepTrace
    from tba_offload.config.policy import LayerId, Policy
    from tba_offload.device import Event
    from tba_offload.session.loop import Step
    from tba_offload.session.session import Session
    from tba_offload.states import StatesRecord
    from tba_offload.store.base import DriveLoad
    from tba_offload.weights import WeightsMoved

_STEPS = 10_000
"""Steps whose records are remembered."""

_REMEMBERED = {MEMORY: "step", "states": "optimizer"}
"""Events that are remembered too: the latest for each value of this field."""


def run_log_path(
    path: str | os.PathLike[str], *, agreed: Callable[[int], int] = lambda number: number
) -> Path:
    """Return the run log that a process writes: earlier runs and other ranks keep theirs.

    The second run to ``run.jsonl`` writes ``run.2.jsonl``; of several processes each writes its own,
    ``run.rank0.jsonl``, also if the path names the rank in this way already.

    Args:
        path: The path that the user gave.
        agreed: Makes one number of those that ranks have found. Default: each goes by its own.
    """
    world = torch.distributed
    is_alone = not (world.is_available() and world.is_initialized())
    rank, ranks = (0, 1) if is_alone else (world.get_rank(), world.get_world_size())
    wanted, taken = free_run_log(path, rank, ranks, agreed=agreed)
    if taken != wanted and rank == 0:
        tell(f"{wanted} holds an earlier run, so that this one is logged to {taken}")
    return taken


class Records:
    """Keeps the records of steps.

    Args:
        path: Of the run log; ``None`` for none.
        header: What it begins with.
        on_step: Are called with the record of each step when it is complete, and in the run log.

    Attributes:
        is_written: Whether there is a run log.

    Raises:
        RunLogError: The run log cannot be begun.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        header: RunHeader,
        on_step: Sequence[Callable[[StepRecord], object]],
    ) -> None:
        self._run_log = RunLogWriter(path, header) if path is not None else None
        self.is_written = path is not None
        self._header, self._on_step = header, tuple(on_step)
        self._records: dict[int, StepRecord] = {}  # by the number of the step
        self._others: dict[tuple[str, object], dict[str, object]] = {}
        self._waiting: deque[tuple[list[Event], Callable[[], object]]] = deque()

    @property
    def records(self) -> list[StepRecord]:
        """The records of the latest steps, oldest first."""
        return list(self._records.values())

    @property
    def last_step(self) -> int:
        """Number of the last step that has ended well; 0 for none."""
        return next(reversed(self._records), 0)

    def log(self) -> RunLog:
        """Return what is remembered, as a log that was read."""
        path = Path("this session") if self._run_log is None else self._run_log.path
        others = tuple(self._others.values())
        return RunLog(header=self._header, steps=tuple(self.records), path=path, others=others)

    def add(self, record: StepRecord, step: Step, trace: StepTrace) -> StepRecord:
        """Add the record of a step that has ended well.

        Args:
            record: What is known of it.
            step: The step, whose loss may be late.
            trace: The trace of the step; on an accelerator it has the time of the step there.

        Returns:
            The record, complete if nothing of it is late.

        Raises:
            ValueError: The loss is more than one number.
        """
        loss, late = step.loss, []
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(f"step.loss has {loss.numel()} numbers: give one, as loss.mean()")
            device = device_of(loss.device)  # the last stage of a model may have one of its own
            # Into pinned memory, so that nothing waits.
            loss = loss.detach().to("cpu", non_blocking=True, copy=True)
            late.append(device.event())
        # The time of optimizers, no part of the step, is the host's.
        clock = None if step.had_optimizer else trace.device
        if clock is not None:
            late.append(clock.event())
        self._records[record.step] = record
        if len(self._records) > _STEPS:
            del self._records[next(iter(self._records))]
        self._waiting.append((late, partial(self._write, record, loss, None if clock is None else trace)))
        self.write()
        return self._records[record.step]

    def note(self, event: str, document: dict[str, object]) -> None:
        """Add an event of another kind."""
        if event in _REMEMBERED:
            self._others[event, document[_REMEMBERED[event]]] = {"event": event, **document}
        if self._run_log is not None:
            self._waiting.append(([], partial(self._run_log.note, event, document)))
            self.write()

    def note_states(self, number: int, record: StatesRecord) -> None:
        """Add an update of an optimizer, the session's ``number``th."""
        self.note("states", {"optimizer": number, "step": self.last_step, **asdict(record)})

    def note_states_choice(self, line: str, document: dict[str, object]) -> None:
        """Add how many sub-groups of optimizer states are offloaded.

        Args:
            line: How many, in words.
            document: The same for the run log.
        """
        if self._header.rank == 0:
            tell(f"states after step {self.last_step}: {line}")
        self.note("states_plan", document)

    def write(self, *, wait: bool = False) -> None:
        """Write what is known; all of it where that may ``wait`` for the device."""
        while self._waiting:
            late, write = self._waiting[0]
            if not wait and not all(event.query() for event in late):
                return
            self._waiting.popleft()
            for event in late:
                event.synchronize()
            write()

    def close(self) -> None:
        """Write what is missing, for which it waits, and close the run log."""
        try:
            self.write(wait=True)
        finally:
            if self._run_log is not None:
                self._run_log.close()

    def _write(self, record: StepRecord, loss: float | torch.Tensor | None, trace: StepTrace | None) -> None:
        if isinstance(loss, torch.Tensor):
            record = replace(record, loss=loss.item())
        if trace is not None:
            record = replace(record, seconds=trace.device_seconds())
        if record.step in self._records:
            self._records[record.step] = record
        if self._run_log is not None:
            self._run_log.write(record)
        for sink in self._on_step:
            sink(record)


# What is recorded


def record_of(
    session: Session, step: Step, loads: Sequence[DriveLoad], weights: WeightsMoved | None
) -> StepRecord:
    """Return what a step was like, as far as that is known when it ends.

    Args:
        session: What worked in the step.
        step: The step, which has ended.
        loads: What drives and host memory moved in it.
        weights: What frozen weights moved; ``None`` if none are offloaded.
    """
    gradients, budget, prediction = session.gradients.live, session.budget, session.plan.prediction
    trace, stats = session.capture.trace, session.offloader.window.stats
    figures = session.memory.figures | {f"{name}_bytes": getattr(stats, name) for name in _MOVED}
    figures |= {f"{name}_bytes": getattr(trace, f"{name}_bytes") for name in _SAVED}
    if not session.device.runs_behind:  # how long a device is given its work is not how long that takes
        figures["forward_seconds"] = trace.forward_seconds()
        figures["backward_seconds"] = trace.backward_seconds or None
    if weights is not None:
        figures["weights_read_bytes"] = weights.read_bytes
        figures["weights_waited_seconds"] = weights.waited_seconds
    if prediction is not None:
        figures["predicted_peak_bytes"] = prediction.activation_peak
        figures["predicted_seconds"] = prediction.seconds
        figures["predicted_device_peak_bytes"] = budget.device_peak(prediction.peak_bytes)
    gradient_bytes, gradient_peak_bytes = gradients.take()
    return StepRecord(
        step=step.number,
        seconds=step.seconds,
        optimizer_seconds=step.optimizer_seconds,
        skipped=step.is_skipped,
        stall_seconds=stats.stall_seconds,
        tokens=(step.seen_tokens or None) if step.tokens is None else step.tokens,
        model_flops=step.model_flops,
        loss=None if isinstance(step.loss, torch.Tensor) else step.loss,
        activation_budget_bytes=budget.of_activations,
        gradient_bytes=gradient_bytes,
        gradient_peak_bytes=gradient_peak_bytes,
        own_peak_bytes=stats.own_peak + trace.kept_bytes,
        recomputed_scopes=sum(Placement(scope.placement).recomputes for scope in trace.scopes),
        scopes=len(trace.scopes),
        fallback_kept_bytes=stats.fallback_kept + session.capture.slow_kept_bytes,
        checksum_seconds=sum(load.checksum_seconds for load in loads),
        drives_out_of_service=sum(not load.in_service for load in loads),
        left_alone_scopes=trace.left_alone,
        planning_seconds=session.planning.seconds,
        **figures,
    )


_MOVED, _SAVED = (
    ("offloaded", "read", "reread", "forwarded", "given_up", "held", "in_flight_peak"),
    ("deduplicated", "rebuilt", "kept"),
)
"""Figures of the offloader and of what layers have saved, in bytes."""


def memory_event(session: Session, step: Step) -> dict[str, object]:
    """Return what held memory in a step that was looked at, for the run log."""
    memory, device = session.memory, session.device.torch_device
    layers, modules = [layer.module for layer in session.layers], session.modules
    inner = {each for layer in layers for each in layer.modules()}
    weights = {each for layer in layers for each in layer.parameters()}
    kinds = set(map(type, chain(layers, *(each.blocks for each in session.stack.left_out))))
    blocks = {each for module in modules for each in module.modules() if type(each) in kinds}
    named = chain.from_iterable(module.named_parameters() for module in modules)
    trained = (each for each in named if each[1].requires_grad and not is_lazy(each[1]))
    outside = [(name, each.nbytes) for name, each in trained if each not in weights]
    frozen = (each for each in weights if not each.requires_grad)
    return {
        "step": step.number,
        "names": [layer.id.name for layer in session.layers],
        "placements": [str(placement) for placement in session.plan.placements],
        "static": static_bytes(session),
        "outside": max(outside, key=lambda each: each[1], default=("", 0)),
        "frozen_weights": sum(new_bytes(frozen, device, set())),
        "left_out": sum(map(session.gradients.reached, blocks - inner)),
        "phases": {phase: peak.as_json() for phase, peak in memory.peaks.items()},
    }


def learn(session: Session, step: Step, record: StepRecord, loads: Sequence[DriveLoad]) -> None:
    """Have the next step planned by what this one was like."""
    planning, trace = session.planning, session.capture.trace
    controller, chosen = planning.controller, planning.chosen
    if controller is None:
        return
    may_plan = session.world.may_plan_recomputation
    repeatable = {index for index in chosen if may_plan and session.runs.recomputed[index].may_plan}
    stats = session.offloader.window.stats
    news = planning.learn(
        StepObservation(
            trace=trace,
            stalls=stats.stalls,
            loads=loads,
            plan=planning.plan,
            record=record,
            began=step.began,
            beside=session.memory.beside,
            on_device=partial(trace.device_times, stats.marked_stalls) if trace.device is not None else None,
            not_recomputed=chosen - repeatable,
        )
    )
    if news is not None:
        session.records.note(PLAN, {"step": record.step, **news})
        if controller.has_planned and session.world.rank == 0:
            tell(f"plan after step {record.step}: {news['summary']}")


def header_of(
    session: Session, strategy: str | None, model_info: Mapping[str, object] | None, *, has_states: bool
) -> RunHeader:
    """Return what a run log begins with.

    Args:
        session: The session; its configuration, device and store are known.
        strategy: Label of the run; by default it tells what is offloaded, as ``keep + states + weights``.
        model_info: What the header says about the model.
        has_states: Whether states of optimizers are offloaded.
    """
    world, device, config = session.world, session.device.torch_device, session.config
    processor, module = platform.processor() or platform.machine(), torch.get_device_module(device)
    parameters = chain.from_iterable(module.parameters() for module in session.modules)
    has_weights = config.frozen_percent > 0 and any(not each.requires_grad for each in parameters)
    label = Plan.from_policy(config.policy, world.layers).strategy
    label += " + states" * has_states + " + weights" * has_weights
    return RunHeader(
        strategy=strategy or label,
        run=world.run,
        rank=world.rank,
        ranks=world.ranks,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        hardware={
            "device": processor if device.type == "cpu" else module.get_device_name(device),
            "cpus": os.cpu_count(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        model={"layers": len(world.layers), **(model_info or {})},
        policy=config.to_yaml(),
        plan=explained(config.policy, world.layers),
        store=dict(session.store.description),
    )


def explained(policy: Policy, layers: Sequence[LayerId]) -> dict[str, object]:
    """Return the placement of every layer of the model, on whatever rank, and why."""
    found = ((layer, policy.explain(layer)) for layer in layers)
    return {
        layer.name: {"layer": layer.number, "placement": placement.value, "why": why}
        for layer, (placement, why) in found
    }
