"""What a run log tells of memory: how much there was in each phase of a step, and what held it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tba_offload.errors import RunLogError
from tba_offload.report.log import MemoryEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tba_offload.report.log import PhasePeak, RunLog, StepRecord

HOLDERS = {
    "parameters": "parameters of the model",
    "frozen": "frozen weights, read for layers that compute",
    "buffers": "buffers of the model",
    "tables": "held by attributes of modules, and saved by layers",
    "caches": "held by attributes of modules, and not saved by layers",
    "gradients": "gradients",
    "states": "states of optimizers",
    "masters": "masters: copies of parameters, which optimizers update",
    "others": "whatever else outlives steps, such as other models",
    "kept": "activations of layers that keep them",
    "in_flight": "activations on their way to the store",
    "read_ahead": "activations read back, not yet used",
    "settled": "activations in use by backward, or refused by a drive",
    "small": "activations kept as small, or held elsewhere",
    "inputs": "inputs of layers that are recomputed",
    "outputs": "left by layers whose activations travel",
    "put_out": "outputs of the model that are alive",
    "beside": "made before, between or after layers",
    "running": "working set",
    "store": "store files, which lie in memory",
}
"""Words for what holds memory."""

_CLEARLY = 5 / 4
"""Peak of a step, in peaks of the one that is looked at, from which on it is clearly higher."""

_CPU = ("mallinfo2", "jemalloc", "tcmalloc")
"""Beginnings of the sources of figures where activations lie in host memory."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The fullest moment of one phase of a step.

    Attributes:
        name: The phase: forward, loss, backward, update; ``step`` where the log does not tell which.
        layer: Index of the layer that ran, or had run last; ``None`` if it is of no importance.
        held: Bytes by holder, those of :data:`HOLDERS`.
    """

    name: str
    layer: int | None
    held: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.held.values())

    def of(self, *holders: str) -> int:
        """Bytes of some holders."""
        return sum(self.held.get(holder, 0) for holder in holders)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is asked to find out what memory is for.

    Attributes:
        log: The run.
        step: The step that is looked at.
        memory: What was seen of its memory; ``None`` where the log does not tell.
        phases: Its phases.
    """

    log: RunLog
    step: StepRecord
    memory: MemoryEvent | None
    phases: tuple[Phase, ...] = field(default=())

    @classmethod
    def of(cls, log: RunLog) -> Evidence:
        """Return what a log tells, by the fullest step that was looked at.

        The first one counts only if it is alone.

        Raises:
            RunLogError: It has no step.
        """
        if not log.steps:
            raise RunLogError(f"{log.path}: no step is in it, so there is nothing to explain; train some")
        steps = {step.step: step for step in log.steps}
        events = log.events(MemoryEvent)
        events = [event for event in events if event.step in steps and event.phases]
        # A planner tries other placements in the first steps, and states are made in the very first.
        late = [event for event in events if event.step > 1 or len(events) == 1]
        late = [event for event in late if event.placements == late[-1].placements]
        memory = max(late, key=lambda event: _peak(steps[event.step]), default=None)
        if memory is None:
            step = _fullest(log)
            return cls(log, step, None, (_unknown(step),))
        if _is_cpu(steps[memory.step]):
            memory = memory.model_copy(update={"phases": _fullest_phases(late)})
        step = steps[memory.step]
        stored = step.offloaded_bytes if stored_in_memory(log) == "files" else 0
        return cls(log, step, memory, tuple(_phases(step, memory, _lasting(step, memory), stored)))

    @property
    def peak(self) -> Phase:
        """The phase in which memory is at its peak."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    def without(self, freed: Callable[[Phase], int]) -> int:
        """By how much the peak would be lower without the bytes that ``freed`` tells for each phase."""
        return self.peak.nbytes - max(phase.nbytes - freed(phase) for phase in self.phases)

    @property
    def least_of_backward(self) -> int:
        """Bytes that backward takes with no activations but those of one layer: what lasts, and gradients."""
        if self.memory is None:
            return 0
        lasting = sum(_lasting(self.step, self.memory).values())
        gradients = max(phase.of("gradients") for phase in self.phases)
        return lasting + gradients + max((backward for *_, backward in self.memory.layers), default=0)

    @property
    def fuller(self) -> StepRecord | None:
        """A step with a clearly higher activation peak, of which is not known what held it."""
        fullest = max(self.log.steps[1:], key=_peak, default=self.step)
        return fullest if _peak(fullest) > _CLEARLY * _peak(self.step) else None

    @property
    def saved_bytes(self) -> int:
        """Bytes that layers with hooks have saved and backward has used."""
        step = self.step
        return max(step.forwarded_bytes + step.read_bytes, step.offloaded_bytes, step.in_flight_peak_bytes)

    @property
    def is_cpu(self) -> bool:
        """Whether activations lie in host memory."""
        return _is_cpu(self.step)

    def where(self, phase: Phase) -> str:
        """Return a phase in words."""
        if phase.name == "update":
            is_measured = self.memory is not None and "update" in self.memory.phases
            return "the optimizer's update" + ("" if is_measured else " (what that works with comes on top)")
        if phase.name == "step":
            return "a phase that the log does not tell"
        if phase.name == "embeddings":
            return "what is before the first layer, or after its backward"
        if phase.name == "loss":
            return "the loss, after the last layer"
        if phase.name == "between":
            return "what is after a backward: clipping, another backward through the loss"
        return f"the {phase.name} of {self.layer(phase.layer or 0)}"

    def layer(self, index: int) -> str:
        """Return a layer by number and name."""
        names = self.memory.names if self.memory is not None else []
        return f"layer {index} ({names[index]})" if index < len(names) else f"layer {index}"


def stored_in_memory(log: RunLog) -> str | None:
    """``files`` if the store is in files on a file system in memory, ``host`` if it is host memory."""
    found = list(_stores(log.header.store))
    if any("lies in memory" in str(store.get("reason")) for store in found):
        return "files"
    kinds = {store.get("kind") for store in found if "stores" not in store and "drives" not in store}
    return "host" if kinds == {"host"} else None


def _fullest_phases(events: Sequence[MemoryEvent]) -> dict[Any, PhasePeak]:
    """Of each phase the fullest moment of several steps: samples miss short ones, now here, now there."""
    found: dict[Any, PhasePeak] = {}
    for event in events:
        for name, peak in event.phases.items():
            if name not in found or peak.whole > found[name].whole:
                found[name] = peak
    return found


def _stores(told: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    yield told
    inner = [told.get("drives"), told.get("host"), *(told.get("stores") or ())] if depth < 3 else []
    for each in inner:
        if isinstance(each, dict):
            yield from _stores(each, depth + 1)


def _peak(step: StepRecord) -> int:
    return step.activation_peak_bytes or 0


def _fullest(log: RunLog) -> StepRecord:
    return max(log.steps[1:] or log.steps, key=_peak)


def _is_cpu(step: StepRecord) -> bool:
    return (step.peak_source or "").startswith(_CPU)


def _phases(
    step: StepRecord, memory: MemoryEvent, lasting: Mapping[str, int], stored: int
) -> Iterator[Phase]:
    for name, peak in memory.phases.items():
        yield Phase(name, peak.layer, {**lasting, **_held(peak), "store": stored})
    if "update" not in memory.phases:  # as where the step's block ends before it
        # A block of session.step() may have freed gradients before its end, where static bytes are counted.
        gradients = max(memory.static.gradients, step.gradient_peak_bytes or 0)
        yield Phase("update", None, {**lasting, "gradients": gradients})


def _lasting(step: StepRecord, memory: MemoryEvent) -> dict[str, int]:
    """Return what is there in each phase."""
    static = memory.static
    known = {
        "parameters": static.parameters,
        "buffers": static.buffers,
        "states": static.optimizer_states,
        "masters": static.masters,
        "tables": sum(size for _, size, lasts in memory.held if lasts),
        "caches": sum(size for _, size in memory.caches),
    }
    # In host memory the program itself is among it.
    others = 0 if _is_cpu(step) else max((step.base_bytes or 0) - sum(known.values()), 0)
    return known | {"others": others}


def _held(peak: PhasePeak) -> dict[str, int]:
    """Return what is told of a peak; no more than was live, as books may count what is not there any more."""
    left, held = peak.nbytes, {"gradients": peak.gradients, "frozen": peak.frozen}
    for name, nbytes in [*peak.held.model_dump().items(), ("beside", peak.beside)]:
        held[name] = min(nbytes, left)
        left -= held[name]
    return held | {"running": left}


def _unknown(step: StepRecord) -> Phase:
    """Return what a record tells alone: peaks that need not have been at one time."""
    peak, own = step.activation_peak_bytes or 0, step.own_peak_bytes or 0
    own = min(own, peak) if step.activation_peak_bytes is not None else own
    in_flight = min(step.in_flight_peak_bytes, own)
    held = {
        "states": step.state_bytes or 0,
        "gradients": step.gradient_bytes or 0,
        "in_flight": in_flight,
        "settled": own - in_flight,
        "running": max(peak - own, 0),
    }
    return Phase("step", None, held)
