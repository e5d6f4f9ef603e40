"""Records of the steps of a session, for the program, the run log and the planner.

Some figures are known only when the device has finished the step, usually during the next step. A record is
written when all its figures are known. Records are written in the order of the steps.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from tba_offload.device import device_of
from tba_offload.placements import Placement
from tba_offload.planner.measure import StepObservation
from tba_offload.report.log import MEMORY, PLAN, RunHeader, RunLog, RunLogWriter, StepRecord
from tba_offload.report.ranks import path_of_rank
from tba_offload.session.memory import new_bytes, static_bytes
from tba_offload.session.notices import tell
from tba_offload.store.base import HOST_TIER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tba_offload.capture.trace import StepTrace
    from tba_offload.device import Event
    from tba_offload.session.loop import Step
    from tba_offload.session.session import Session
    from tba_offload.states import StatesRecord
    from tba_offload.states.home import Reads
    from tba_offload.store.base import DriveLoad

_STEPS = 10_000
"""Number of records that are kept in memory."""

_REMEMBERED = {MEMORY: "step", "states": "optimizer"}
"""For each kind of event that is kept in memory, the name of the field that identifies an event.

For example, a new ``states`` event replaces the last ``states`` event with the same ``optimizer``.
"""


def rank_of_process() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks. Without ``torch.distributed``: 0 and 1."""
    world = torch.distributed
    is_alone = not (world.is_available() and world.is_initialized())
    return (0, 1) if is_alone else (world.get_rank(), world.get_world_size())


def run_log_path(path: str | os.PathLike[str], *, agreed: Callable[[int], int] = lambda own: own) -> Path:
    """Return a path for a run log that no earlier run and no other rank uses.

    If ``run.jsonl`` exists, the path is ``run.2.jsonl``. With several ranks, the path contains the rank, as
    in ``run.rank0.jsonl``.

    Args:
        path: The path that the user gave.
        agreed: Function that all ranks call together. The argument is the number of this rank's first free
            path, such as 2 for ``run.2.jsonl``. The function returns one number for all ranks. By default,
            each rank uses its own first free path.
    """
    rank, ranks = rank_of_process()
    name = Path(path)
    if ranks > 1:  # a program may have put the rank into the name itself
        name = name.with_name(name.name.replace(f".rank{rank}.jsonl", ".jsonl"))

    def own(number: int) -> Path:
        found = name.with_name(f"{name.name.removesuffix('.jsonl')}.{number}.jsonl") if number > 1 else name
        return path_of_rank(found, rank) if ranks > 1 else found

    free = next(number for number in count(1) if not os.path.lexists(own(number)))
    taken = own(agreed(free))
    if taken != own(1) and rank == 0:
        tell(f"the run log {own(1)} exists, so this run is logged to {taken}")
    return taken


class Recorder:
    """Recorder of steps and other events, in memory and in the run log.

    Args:
        path: Path of the run log; ``None`` for no run log.
        header: Header of the run log.
        on_step: Functions to call with the record of each step, once the record is complete and in the run
            log.

    Raises:
        RunLogError: The run log cannot be opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, header: RunHeader, on_step: Sequence[Callable[..., object]]
    ) -> None:
        self._run_log = RunLogWriter(path, header) if path is not None else None
        self._header, self._on_step = header, tuple(on_step)
        self._records: dict[int, StepRecord] = {}  # by the number of the step
        self._others: dict[tuple[str, object], dict[str, object]] = {}
        self._waiting: deque[tuple[list[Event], Callable[[], object]]] = deque()

    @property
    def records(self) -> list[StepRecord]:
        """The records of the last steps, oldest first."""
        return list(self._records.values())

    @property
    def last_step(self) -> int:
        """Number of the last recorded step; 0 before the first recorded step."""
        return next(reversed(self._records), 0)

    def log(self) -> RunLog:
        """Return the records and events in memory, in the form of a run log."""
        path = Path("this session") if self._run_log is None else self._run_log.path
        others = tuple(self._others.values())
        return RunLog(header=self._header, steps=tuple(self.records), path=path, others=others)

    def add(self, record: StepRecord, step: Step, trace: StepTrace) -> StepRecord:
        """Add the record of a step.

        Args:
            record: The record, without the figures that the device has not computed yet.
            step: The step, whose loss may be on the device.
            trace: The trace of the step. On an accelerator, the trace has times by the device's clock.

        Returns:
            The record, complete if the device has finished the step.

        Raises:
            ValueError: The loss has more than one element.
        """
        loss, late = step.loss, []
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                remedy = "Assign a tensor with one element, such as loss.mean()"
                raise ValueError(f"step.loss has {loss.numel()} elements. {remedy}")
            device = device_of(loss.device)  # the last stage of a model may be on another device
            # Copy without waiting for the device.
            loss = loss.detach().to("cpu", non_blocking=True, copy=True)
            late.append(device.event())
        # The time of optimizers is known only by the host's clock, so this clock measures the whole step.
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
        """Add an event that is not a step."""
        if event in _REMEMBERED:
            self._others[event, document[_REMEMBERED[event]]] = {"event": event, **document}
        if self._run_log is not None:
            self._waiting.append(([], partial(self._run_log.note, event, document)))
            self.write()

    def note_states(self, number: int, record: StatesRecord) -> None:
        """Add the record of one update by the optimizer with the index ``number``."""
        self.note("states", {"optimizer": number, "step": self.last_step, **asdict(record)})

    def note_resident(self, line: str, document: dict[str, object]) -> None:
        """Record which optimizer states or frozen weights stay in memory from now on.

        Args:
            line: Text for the log of the program.
            document: Fields of the event in the run log.
        """
        if self._header.rank == 0:
            tell(f"after step {self.last_step}: {line}")
        self.note("resident_plan", document)

    def write(self, *, wait: bool = False) -> None:
        """Write the complete records. With ``wait``, wait for the device and write all records."""
        while self._waiting:
            late, write = self._waiting[0]
            if not wait and not all(event.query() for event in late):
                return
            self._waiting.popleft()
            for event in late:
                event.synchronize()
            write()

    def close(self) -> None:
        """Wait for the device, write all records, and close the run log."""
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


# Contents of records


def record_of(session: Session, step: Step, loads: Sequence[DriveLoad], weights: Reads | None) -> StepRecord:
    """Return the record of a step, with the figures that are known at its end.

    Args:
        session: The session.
        step: The step, which has ended.
        loads: Transfers of each drive and of host memory in the step.
        weights: Reads of frozen weights in the step; ``None`` if no frozen weights are offloaded.
    """
    gradients, budget, prediction = session.gradients.live, session.budget, session.plan.prediction
    trace, stats = session.capture.trace, session.offloader.window.stats
    figures = session.memory.figures | {f"{name}_bytes": getattr(stats, name) for name in _MOVED}
    figures |= {f"{name}_bytes": getattr(trace, f"{name}_bytes") for name in _SAVED}
    if not session.device.runs_behind:  # on an accelerator these would be the times of the launches
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
        host_bytes=sum(load.write.nbytes for load in loads if load.tier == HOST_TIER),
        own_peak_bytes=stats.own_peak + trace.kept_bytes,
        recomputed_scopes=sum(Placement(scope.placement).recomputes for scope in trace.scopes),
        scopes=len(trace.scopes),
        fallback_kept_bytes=stats.fallback_kept + session.capture.slow_kept_bytes,
        drives_out_of_service=sum(not load.in_service for load in loads),
        left_alone_scopes=trace.left_alone,
        planning_seconds=session.planning.seconds,
        **figures,
    )


_MOVED = "offloaded", "read", "reread", "forwarded", "given_up", "held", "in_flight_peak"
_SAVED = "deduplicated", "rebuilt", "kept"
"""Names of the byte counts of the offloader (``_MOVED``) and of the trace (``_SAVED``)."""


def memory_event(session: Session, step: Step) -> dict[str, object]:
    """Return an event for the run log that shows which data used memory in a step."""
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
    """Size the in-flight window for the step with the most saved bytes so far, and plan the next step."""
    planning, trace = session.planning, session.capture.trace
    sizes = [each.nbytes for each in trace.activations]
    if sum(sizes) > session.saved[0]:
        session.saved = sum(sizes), _saved_at_once(trace), max(sizes)
        session.budget.resize_window(session.config.budget.window(*session.saved[1:]))
    controller, chosen = planning.controller, planning.chosen
    if controller is None:
        return
    recomputed, stats = session.runs.recomputed, session.offloader.window.stats
    may_plan = session.world.may_plan_recomputation
    barred = frozenset(index for index in chosen if not (may_plan and recomputed[index].may_plan))
    on_device = partial(trace.device_times, stats.marked_stalls) if trace.device is not None else None
    plan, began, beside = planning.plan, step.began, session.memory.beside
    seen = StepObservation(trace, stats.stalls, loads, plan, record, began, beside, on_device, barred)
    news = planning.learn(seen)
    if news is not None:
        session.recorder.note(PLAN, {"step": record.step, **news})
        if controller.has_planned and session.world.rank == 0:
            tell(f"plan after step {record.step}: {news['summary']}")


def _saved_at_once(trace: StepTrace) -> int:
    """Return the largest number of bytes that layers had saved at one time in a step.

    With gradient accumulation, each micro-batch frees its saved tensors before the next micro-batch.
    """
    saved = [(each.packed_at, each.nbytes) for each in trace.activations]
    used = [(each.unpacked_at, -each.nbytes) for each in trace.activations if each.unpacked_at is not None]
    return max(accumulate(nbytes for _, nbytes in sorted(saved + used)), default=0)


def header_of(
    session: Session, strategy: str | None, model_info: Mapping[str, object] | None, *, has_states: bool
) -> RunHeader:
    """Return the header of a run log.

    Args:
        session: The session, with its configuration, device and store.
        strategy: Label of the run. The default label names the placement and the other offloaded data, as in
            ``keep + states + weights``.
        model_info: Facts about the model.
        has_states: Whether optimizer states are offloaded.
    """
    world, device, config = session.world, session.device.torch_device, session.config
    processor, module = platform.processor() or platform.machine(), torch.get_device_module(device)
    parameters = chain.from_iterable(module.parameters() for module in session.modules)
    has_weights = config.frozen_percent > 0 and any(not each.requires_grad for each in parameters)
    plan: Any = explained(session)
    used = {each["placement"] for each in plan.values()}
    label = used.pop() if len(used) == 1 else "mixed"
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
        plan=plan,
        store=dict(session.store.description),
    )


def explained(session: Session) -> dict[str, object]:
    """Return the placement of each layer on all ranks, and the rule that sets this placement."""
    found = ((layer, *session.config.policy.explain(layer)) for layer in session.world.layers)
    place = session.checkpointing.placed
    return {
        layer.name: {"layer": layer.number, "placement": place(layer, placement).value, "why": why}
        for layer, placement, why in found
    }
