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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from tba_offload.config.policy import Placement
from tba_offload.device.streams import device_of
from tba_offload.plan.model import Plan
from tba_offload.report.log import MEMORY, RunHeader, RunLog, RunLogWriter, StepRecord, describe_step
from tba_offload.session.notices import tell
from tba_offload.store.base import HOST_TIER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from tba_offload.capture.trace import StepMarks
    from tba_offload.config import OffloadConfig
    from tba_offload.config.policy import LayerId, Policy
    from tba_offload.device import Device
    from tba_offload.session.figures import Times
    from tba_offload.session.parts import Parts
    from tba_offload.session.step import Step
    from tba_offload.session.world import World
    from tba_offload.states import StatesRecord
    from tba_offload.store.base import DriveLoad
    from tba_offload.weights import WeightsMoved

Value = TypeVar("Value")

_REMEMBERED_STEPS = 10_000

_REMEMBERED_LOOKS = 16
"""Steps whose memory was looked at: as many as there are in the first 8,192."""


class Journal:
    """Keeps the records of steps.

    Args:
        path: Of the run log; ``None`` for none.
        header: What it begins with.
        tells: Whether each step is told in a line.
        on_step: Are called with the record of each step when it is complete, and in the run log.

    Raises:
        RunLogError: The run log cannot be begun.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        header: RunHeader,
        *,
        tells: bool,
        on_step: Sequence[Callable[[StepRecord], object]] = (),
    ) -> None:
        self._run_log = RunLogWriter(path, header) if path is not None else None
        self._header = header
        self._tells = tells
        self._on_step = tuple(on_step)
        self._records: dict[int, StepRecord] = {}  # by the number of the step
        self._looks: deque[dict[str, object]] = deque(maxlen=_REMEMBERED_LOOKS)
        self._updates: dict[int, dict[str, object]] = {}  # the latest of each optimizer
        self._waiting: deque[tuple[LateFigures | None, Callable[[], object]]] = deque()

    @property
    def is_written(self) -> bool:
        """Whether there is a run log."""
        return self._run_log is not None

    @property
    def records(self) -> list[StepRecord]:
        """The records of the latest steps, oldest first."""
        return list(self._records.values())

    def log(self) -> RunLog:
        """Return what is remembered, as a log that was read."""
        path = Path("this session") if self._run_log is None else self._run_log.path
        others = (*self._looks, *self._updates.values())
        return RunLog(header=self._header, steps=tuple(self.records), path=path, others=others)

    def record(self, record: StepRecord, late: LateFigures | None = None) -> None:
        """Record that a step has ended well.

        Args:
            record: What is known of it.
            late: What it is to be completed by.
        """
        self._records[record.step] = record
        if len(self._records) > _REMEMBERED_STEPS:
            del self._records[next(iter(self._records))]
        self._in_order(partial(self._write, record, late), late)

    def note(self, event: str, document: dict[str, object]) -> None:
        """Record an event of another kind."""
        if event == MEMORY:
            self._looks.append({"event": event, **document})
        if self._run_log is not None:
            self._in_order(partial(self._run_log.note, event, document))

    def note_states(self, number: int, record: StatesRecord) -> None:
        """Record that an optimizer, the session's ``number``th, has made an update."""
        document = {"optimizer": number, "step": self._steps, **asdict(record)}
        self._updates[number] = {"event": "states", **document}
        self.note("states", document)

    def note_states_choice(self, line: str | None, document: dict[str, object]) -> None:
        """Record that it was decided how many sub-groups of optimizer states travel.

        Args:
            line: How many, in words; ``None`` if it is as many as before.
            document: What that was decided by.
        """
        if line is not None and self._header.rank == 0:
            tell(f"states after step {self._steps}: {line}")
        self.note("states_plan", document)

    def write_known(self) -> None:
        """Write what waits for nothing any more."""
        waiting = self._waiting
        while waiting and (waiting[0][0] is None or waiting[0][0].are_there()):
            _, write = waiting.popleft()
            write()

    def write_all(self) -> None:
        """Write everything; wait for the device."""
        while self._waiting:
            _, write = self._waiting.popleft()
            write()

    def close(self) -> None:
        """Write what is missing, for which it waits, and close the run log."""
        try:
            self.write_all()
        finally:
            if self._run_log is not None:
                self._run_log.close()

    @property
    def _steps(self) -> int:
        return next(reversed(self._records), 0)

    def _in_order(self, write: Callable[[], object], late: LateFigures | None = None) -> None:
        self._waiting.append((late, write))
        self.write_known()

    def _write(self, record: StepRecord, late: LateFigures | None) -> None:
        if late is not None:
            record = late.complete(record)
            if record.step in self._records:
                self._records[record.step] = record
        if self._tells:
            tell(describe_step(record))
        if self._run_log is not None:
            self._run_log.write(record)
        for sink in self._on_step:
            sink(record)


# Figures that a device comes to later than the host: nothing waits for them


class LateValue(Generic[Value]):
    """A value that is made of numbers that a device is still to compute.

    Args:
        device: The device.
        groups: Small tensors with the numbers; they are copied when the device has come to them.
        made: Makes the value of the numbers, a list for each group.
    """

    def __init__(
        self,
        device: Device,
        groups: Sequence[Sequence[torch.Tensor]],
        made: Callable[[list[list[float]]], Value],
    ) -> None:
        self._copies = [[device.to_host(tensor) for tensor in group] for group in groups]
        # Each is copied on a stream of its own device, as the last stage of a model may have another.
        others = {tensor.device for tensor in chain(*groups)} - {device.torch_device}
        self._copied = [device.event(), *(device_of(other).event() for other in others)]
        self._made = made

    def is_there(self) -> bool:
        """Whether :meth:`read` waits for nothing."""
        return all(event.query() for event in self._copied)

    def read(self) -> Value:
        """Return the value; wait for its numbers."""
        for event in self._copied:
            event.synchronize()
        return self._made(
            [[number for each in group for number in each.flatten().tolist()] for group in self._copies]
        )


class LateFigures:
    """The figures that a record of a step is to be completed by.

    Args:
        loss: Its loss.
        marks: Where it began and ended in the work of its device; ``None`` to leave the host's time.
        skipped: Whether gradient scalers made all optimizers skip the update; ``None`` if that is known.
    """

    def __init__(
        self,
        loss: LateValue[float | None] | None,
        marks: StepMarks | None,
        skipped: LateValue[bool] | None,
    ) -> None:
        values: dict[str, LateValue[Any] | None] = {"loss": loss, "skipped": skipped}
        self._values = {name: value for name, value in values.items() if value is not None}
        self._marks = marks

    def are_there(self) -> bool:
        """Whether :meth:`complete` waits for nothing."""
        there = self._marks is None or self._marks.are_reached()
        return there and all(value.is_there() for value in self._values.values())

    def complete(self, record: StepRecord) -> StepRecord:
        """Return a record with these figures; wait for them."""
        found: dict[str, Any] = {name: value.read() for name, value in self._values.items()}
        if self._marks is not None:
            found["seconds"] = self._marks.seconds()
        return replace(record, **found)


# What is recorded


def record_of(
    step: Step,
    times: Times,
    number: int,
    loads: Sequence[DriveLoad],
    weights: WeightsMoved | None,
    parts: Parts,
    *,
    loss: float | None,
) -> StepRecord:
    """Return what a step was like.

    Args:
        step: The step, which has ended.
        times: How long it took.
        number: Of the step.
        loads: What drives and host memory moved in it.
        weights: What frozen weights moved; ``None`` if none are offloaded.
        parts: What worked in it.
        loss: Its loss, if that is known by now.
    """
    # How long it took to give a device its work is not how long the work took.
    computed_in_time = not parts.device.runs_behind
    memory, meter = step.memory, step.memory.meter
    trace, stats = parts.capture.trace, parts.offloader.stats
    prediction = parts.planning.plan.prediction
    on_host = [load for load in loads if load.tier == HOST_TIER]
    return StepRecord(
        step=number,
        seconds=times.seconds,
        optimizer_seconds=times.optimizer_seconds,
        skipped=step.state.skipped,
        forward_seconds=trace.forward_seconds() if computed_in_time else None,
        backward_seconds=(trace.backward_seconds or None) if computed_in_time else None,
        stall_seconds=stats.stall_seconds,
        tokens=step.all_tokens,
        model_flops=step.model_flops,
        loss=loss,
        activation_peak_bytes=memory.peak_bytes,
        base_bytes=memory.base_bytes,
        earlier_outputs_bytes=parts.outputs.at_begin if memory.base_bytes is not None else None,
        peak_source=meter.source if meter is not None and memory.peak_bytes is not None else None,
        reserved_peak_bytes=memory.reserved_bytes,
        device_peak_bytes=memory.device_peak_bytes,
        activation_budget_bytes=parts.budget.of_activations,
        gradient_bytes=parts.gradients.live.take_added(),
        gradient_peak_bytes=parts.gradients.live.take_most(),
        state_bytes=memory.state_bytes if meter is not None else None,
        own_peak_bytes=stats.own_peak + trace.kept_bytes,
        resident_peak_bytes=parts.meters.resident.read(),
        gradients_allocated=memory.gradients_allocated,
        offloaded_bytes=stats.offloaded,
        read_bytes=stats.read,
        reread_bytes=stats.reread,
        host_offloaded_bytes=sum(load.write.nbytes for load in on_host),
        host_read_bytes=sum(load.read.nbytes for load in on_host),
        forwarded_bytes=stats.forwarded,
        deduplicated_bytes=trace.deduplicated_bytes,
        rebuilt_bytes=trace.rebuilt_bytes,
        kept_bytes=trace.kept_bytes,
        recomputed_scopes=sum(Placement(scope.placement).recomputes for scope in trace.scopes),
        scopes=len(trace.scopes),
        in_flight_peak_bytes=stats.in_flight_peak,
        given_up_bytes=stats.given_up,
        held_bytes=stats.held,
        fallback_kept_bytes=stats.fallback_kept + parts.capture.slow_kept_bytes,
        checksum_seconds=sum(load.checksum_seconds for load in loads),
        drives_out_of_service=sum(not load.in_service for load in loads),
        weights_read_bytes=None if weights is None else weights.read_bytes,
        weights_waited_seconds=None if weights is None else weights.waited_seconds,
        left_alone_scopes=trace.left_alone,
        planning_seconds=parts.planning.seconds,
        predicted_peak_bytes=prediction.activation_peak if prediction is not None else None,
        predicted_seconds=prediction.seconds if prediction is not None else None,
        predicted_device_peak_bytes=(
            parts.budget.device_peak(prediction.peak_bytes) if prediction is not None else None
        ),
    )


def label_of(config: OffloadConfig, world: World, modules: Sequence[nn.Module], *, has_states: bool) -> str:
    """Return a label that tells what is offloaded: ``offload``, ``mixed``, ``keep + states + weights``.

    Args:
        config: What the user wanted.
        world: The layers of all ranks.
        modules: The model; its frozen weights travel if the policy says so.
        has_states: Whether states of optimizers are.
    """
    frozen = any(not each.requires_grad for module in modules for each in module.parameters())
    others = {"states": has_states, "weights": frozen and config.frozen_percent > 0}
    first = Plan.from_policy(config.policy, world.layers).strategy
    return " + ".join([first, *(name for name, is_offloaded in others.items() if is_offloaded)])


def header_of(
    config: OffloadConfig, strategy: str, model_info: Mapping[str, object] | None, parts: Parts
) -> RunHeader:
    """Return what a run log begins with.

    Args:
        config: What the user wanted.
        strategy: Label of the run.
        model_info: What the header says about the model.
        parts: What the session is made of.
    """
    world = parts.world
    return RunHeader(
        strategy=strategy,
        run=world.run,
        rank=world.rank,
        ranks=world.ranks,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        hardware={
            "device": _device_name(parts.device.torch_device),
            "cpus": os.cpu_count(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        model={"layers": len(world.layers), **(model_info or {})},
        policy=config.to_yaml(),
        plan=dict(_explained(config.policy, world.layers)),
        store=dict(parts.store.description),
    )


def _explained(policy: Policy, layers: Sequence[LayerId]) -> Iterator[tuple[str, object]]:
    """Yield the placement of every layer of the model, on whatever rank, and why."""
    for layer in layers:
        placement, why = policy.explain(layer)
        yield layer.name, {"layer": layer.number, "placement": placement.value, "why": why}


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return torch.get_device_module(device).get_device_name(device)  # type: ignore[no-any-return]
