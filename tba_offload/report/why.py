"""Diagnosis of memory: the peak of a step, the holders of memory at the peak, and the most effective change.

For each cause, a rule proposes one change and computes the bytes that this change would free in each phase.
The peak after a change is computed over all phases, because the peak may move to another phase.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tba_offload.errors import RunLogError
from tba_offload.formatting import readable_size, significant
from tba_offload.report import text
from tba_offload.report.log import MemoryEvent, read_run_log
from tba_offload.report.ranks import paths_of_ranks

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from tba_offload.report.log import PhasePeak, RunLog, StepRecord

    Cause = tuple[str, Callable[["Phase"], int] | int, str, str]

HOLDERS = {
    "parameters": "parameters and buffers of the model",
    "states": "optimizer states",
    "gradients": "gradients",
    "others": "other memory in use between steps, for example other models",
    "kept": "activations that layers keep in memory",
    "in_flight": "activations in flight (being written or prefetched)",
    "settled": "activations that backward is using, or whose write failed",
    "small": "small activations, and activations that the program also references",
    "inputs": "inputs of recomputed layers",
    "outputs": "memory that offloaded layers did not free",
    "put_out": "outputs of the model",
    "beside": "memory allocated before, between or after layers",
    "running": "working memory",
    "store": "the store in host memory",
}
"""Descriptions of the holders of memory."""

_PHASES = {
    "forward": ("forward", "the forward of {}", "working memory of one layer"),
    "loss": ("loss", "the loss, after the last layer", "logits, loss and their gradients"),
    "backward": ("backward", "the backward of {}", "working memory of one layer"),
    "embeddings": ("outside", "modules before {}, in forward or backward", "embeddings and their gradients"),
    "between": ("after backward", "the time after a backward pass", "working memory after backward"),
    "update": ("update", "the optimizer's update", "working memory of the optimizer"),
    "step": ("step", "a phase that is not in the run log", "not recorded"),
}
"""Name and description of each phase, and the name of working memory in this phase."""

_WORTH, _OTHERS = 1 / 32, 2
"""Smallest fraction of the peak that a reported change saves, and largest number of changes that the report
shows after the most effective change."""

_SLOTS, _LARGEST_SUB_GROUP = 3, 64
"""Number of sub-groups of offloaded states in memory at one time, and the largest advised
``states.sub_group_bytes`` in MiB."""

_CHUNK = 1024
"""Number of tokens in an advised chunk of the loss. With only 8 chunks of a long sequence, logits would still
be large."""

_OF_THE_MODEL = ("one large gradient", "gradients", "optimizer states", "frozen weights", "one layer")
"""Causes other than activations. A change of activations cannot lower the peak of backward below the memory
of the gradients and of one layer."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory at the peak of one phase of a step.

    Attributes:
        name: Name of the phase.
        layer: Index of the layer that was running at the peak, or that ran last.
        held: Bytes by holder, with the keys of :data:`HOLDERS`.
    """

    name: str
    layer: int
    held: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Sum of the bytes of all holders."""
        return sum(self.held.values())

    def of(self, *holders: str) -> int:
        """Return the sum of the bytes of the given holders."""
        return sum(self.held.get(holder, 0) for holder in holders)


@dataclass(frozen=True, slots=True)
class Finding:
    """Cause of the memory peak, and the change that removes the cause.

    Attributes:
        cause: Short name of the cause, for use in programs.
        nbytes: Number of bytes that the change frees at the peak; 0 if the bytes belong to an earlier step.
        saves: Number of bytes by which the change lowers the peak.
        what: Description of the cause.
        change: Description of the change.
    """

    cause: str
    nbytes: int
    saves: int
    what: str
    change: str


@dataclass(frozen=True)
class Diagnosis:
    """Peak of memory, the holders of memory at the peak, and changes that would lower the peak.

    Attributes:
        log: The run log.
        step: Record of the measured step with the highest peak.
        memory: Memory event of the step; None if the log has no memory event.
        phases: Phases of the step.
    """

    log: RunLog
    step: StepRecord
    memory: MemoryEvent | None
    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, log: RunLog) -> Diagnosis:
        """Return the diagnosis of a run. The first step is ignored if another step was measured.

        Raises:
            RunLogError: The run log has no step, or has a damaged event.
        """
        if not log.steps:
            raise RunLogError(f"{log.path}: the run log has no step. Train at least two steps")
        steps = {step.step: step for step in log.steps}
        events = [each for each in log.events(MemoryEvent) if each.step in steps and each.phases]
        # The planner tries other placements in early steps, and the first step allocates optimizer states.
        late = [event for event in events if event.step > 1 or len(events) == 1]
        late = [event for event in late if event.placements == late[-1].placements]
        if not late:
            step = max(log.steps[1:] or log.steps, key=_peak_of)
            return cls(log, step, None, (Phase("step", 0, {"running": _peak_of(step)}),))
        memory = max(late, key=lambda event: _peak_of(steps[event.step]))
        step, found = steps[memory.step], dict(memory.phases)
        for event in late if _is_on_cpu(step) else ():  # samples miss short peaks
            for name, peak in event.phases.items():
                found[name] = max(found.get(name, peak), peak, key=lambda each: each.whole)
        lasting = _lasting(log, step, memory)
        phases = [Phase(name, peak.layer, _held(peak, lasting)) for name, peak in found.items()]
        if "update" not in found:  # the update runs after the step block, which may have freed gradients
            gradients = max(memory.static.gradients, step.gradient_peak_bytes or 0)
            phases.append(Phase("update", 0, lasting | {"gradients": gradients}))
        return cls(log, step, memory, tuple(phases))

    @property
    def peak(self) -> Phase:
        """Phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def saved_bytes(self) -> int:
        """Number of bytes that layers with hooks saved in the step."""
        return max(self.step.forwarded_bytes + self.step.read_bytes, self.step.offloaded_bytes)

    def most(self, holder: str, *phases: str) -> int:
        """Return the largest number of bytes of a holder in some phases; by default, in all phases."""
        return max((each.of(holder) for each in self.phases if each.name in phases or not phases), default=0)

    def where(self, phase: Phase) -> str:
        """Return a description of a phase, with the name of the layer that was running at the peak."""
        names = self.memory.names if self.memory is not None else []
        name = f" ({names[phase.layer]})" if phase.layer < len(names) else ""
        return _PHASES[phase.name][1].format(f"layer {phase.layer}{name}")

    @cached_property
    def findings(self) -> list[Finding]:
        """Causes whose changes lower the peak noticeably, the most effective change first."""
        if self.memory is None:
            return []
        found, one_layer = [], self.most("running", "backward")
        for cause, freed, what, change in (each for rule in _RULES for each in rule(self, self.memory)):
            if isinstance(freed, int):
                found.append(Finding(cause, 0, freed, what, change))
                continue
            left = [phase.nbytes - max(freed(phase), 0) for phase in self.phases]
            for place, phase in enumerate(self.phases):
                # At the end of backward all gradients are in memory, for every placement of activations.
                if phase.name == "backward" and cause not in _OF_THE_MODEL:
                    lasting = phase.of("parameters", "states", "others") + self.most("gradients")
                    left[place] = max(left[place], min(lasting + one_layer, phase.nbytes))
            saves = self.peak.nbytes - max(left)
            found.append(Finding(cause, max(freed(self.peak), 0), saves, what, change))
        worth = [each for each in found if each.saves > _WORTH * self.peak.nbytes]
        return sorted(worth, key=lambda each: each.saves, reverse=True)

    @property
    def cause(self) -> str | None:
        """Cause with the most effective change; None if no change lowers the peak noticeably."""
        return self.findings[0].cause if self.findings else None

    def __str__(self) -> str:
        return text.as_text(*self.parts()).removesuffix("\n")

    def parts(self) -> list[text.Table | str]:
        """Return the diagnosis as sentences and tables."""
        peak, words = self.peak, HOLDERS | {"running": _PHASES[self.peak.name][2]}
        held = sorted(((size, name) for name, size in peak.held.items() if size), reverse=True)
        holders = [(words[name], readable_size(size), f"{size / peak.nbytes:.0%}") for size, name in held]
        rank = f" of rank {self.log.header.rank}" if self.log.header.ranks > 1 else ""
        at = f"In step {self.step.step}{rank}, memory peaks in {self.where(peak)}"
        activations = readable_size(_peak_of(self.step))
        phases = [(_PHASES[p.name][0], readable_size(p.nbytes), self.where(p)) for p in self.phases]
        return [
            f"{at}: {readable_size(peak.nbytes)}. The activation peak is {activations}.",
            text.Table(("Holder", "Size", "Share"), holders, right=("Size", "Share"), title="At the peak"),
            text.Table(("Phase", "Peak", "Where"), phases, right=("Peak",), title="Peak of each phase"),
            *_doubts(self),
            *self.advice(),
        ]

    def advice(self) -> list[str]:
        """Return sentences about the most effective change and further changes."""
        peak = self.peak.nbytes
        if self.memory is None:
            return ["The run log has no list of tensors in memory. Train two steps with measure_memory=True."]
        if not self.findings:
            return ["No single change would lower the peak noticeably."]
        first, *others = self.findings
        then = f"The peak falls from {readable_size(peak)} to about {readable_size(peak - first.saves)}."
        if not first.nbytes:
            then = f"The change saves {readable_size(first.saves)} in the last step of the run log."
        more = [f"Next cause: {each.what}. Change: {each.change}." for each in others[:_OTHERS]]
        return [f"Cause: {first.what}.", f"Most effective change: {first.change}. {then}", *more]

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as a dict for JSON."""
        return {
            "step": self.step.step,
            "peak_bytes": self.peak.nbytes,
            "peak_in": self.where(self.peak),
            "phases": [{"phase": each.name, "bytes": each.nbytes} | asdict(each) for each in self.phases],
            "activation_peak_bytes": self.step.activation_peak_bytes,
            "predicted_peak_bytes": self.step.predicted_peak_bytes,
            "cause": self.cause,
            "findings": [asdict(finding) for finding in self.findings],
        }


def why(path: str | os.PathLike[str]) -> Diagnosis:
    """Return the diagnosis of a run. Of several ranks, choose the rank with the highest peak.

    Args:
        path: Path of the run log.

    Raises:
        RunLogError: The run log cannot be read, or has no step.
    """
    found = [Diagnosis.of(read_run_log(each)) for each in paths_of_ranks(path)]
    return max(found, key=lambda each: each.peak.nbytes)


def _doubts(seen: Diagnosis) -> Iterator[str]:
    planned, measured = seen.step.predicted_peak_bytes, seen.step.activation_peak_bytes
    if _is_on_cpu(seen.step):
        yield "On a CPU, memory is sampled, so short peaks may be missing."
    if planned and measured is not None:
        ratio = significant(measured / planned)
        yield f"The measured activation peak is {ratio} x the predicted peak ({readable_size(planned)})."


def _peak_of(step: StepRecord) -> int:
    return step.activation_peak_bytes or 0


def _is_on_cpu(step: StepRecord) -> bool:
    return (step.peak_source or "").startswith("mallinfo2")


def _lasting(log: RunLog, step: StepRecord, memory: MemoryEvent) -> dict[str, int]:
    """Return the bytes of parameters, optimizer states and other memory that is in use in all phases."""
    known = {"parameters": memory.static.parameters, "states": memory.static.states}
    # On a CPU, base_bytes includes the memory of the program itself.
    others = 0 if _is_on_cpu(step) else max((step.base_bytes or 0) - sum(known.values()), 0)
    return known | {"others": others, "store": step.offloaded_bytes if log.header.writes_to_memory else 0}


def _held(peak: PhasePeak, lasting: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of a peak by holder. Counters may lag, so their sum is limited to ``peak.nbytes``."""
    left, books = peak.nbytes, peak.held._asdict() | {"beside": peak.beside}
    held = dict(lasting) | {"gradients": peak.gradients}
    held["parameters"] += peak.frozen
    for holder, nbytes in books.items():
        held[holder] = min(nbytes, left)
        left -= held[holder]
    return held | {"running": left}


# Rules of causes. A rule yields the name, the bytes that its change frees in a phase, the cause, the change


def _window(seen: Diagnosis, _: MemoryEvent) -> Iterator[Cause]:
    wanted = max(seen.saved_bytes >> 23, 1)
    most, saved = readable_size(seen.step.in_flight_peak_bytes), readable_size(seen.saved_bytes)
    what = f"the in-flight window is large: {most} of the {saved} that layers save are in flight at one time"
    change = f"set budget.in_flight_bytes: {wanted}MiB, an eighth of the bytes that a step saves"
    yield "window", lambda phase: phase.of("in_flight") - (wanted << 20), what, change


def _store(seen: Diagnosis, _: MemoryEvent) -> Iterator[Cause]:
    refused, written = seen.step.fallback_kept_bytes, seen.step.offloaded_bytes
    by = "drives are full or failed" if seen.step.drives_out_of_service else "the store is full or too slow"
    what = f"{readable_size(refused)} of offloaded activations stayed in memory, because {by}"
    change = "make room in store.directories, add a drive, or raise store.capacity"
    yield "store", lambda phase: min(phase.of("settled", "small"), refused), what, change
    what = f"the store is in memory, so writing {readable_size(written)} per step frees nothing"
    change = "set store.directories to directories on a drive (check each with `tba-offload doctor DIR`)"
    yield "store", lambda phase: min(phase.of("store"), written), what, change


def _held_elsewhere(seen: Diagnosis, _: MemoryEvent) -> Iterator[Cause]:
    held = max(_known_elsewhere(seen), seen.most("outputs"))
    what = f"the program keeps references to {readable_size(held)} of tensors that layers save or return"
    change = (
        "drop these references (output_hidden_states=False, output_attentions=False, no lists of hidden "
        "states or losses), and register constant tables as buffers"
    )
    yield "held elsewhere", lambda phase: min(held, phase.of("small", "outputs", "beside")), what, change


def _known_elsewhere(seen: Diagnosis) -> int:
    """Return the bytes that references outside autograd keep in memory.

    Later steps do not offload the referenced tensors, so the largest number of all steps is used.
    """
    return max(step.held_bytes for step in seen.log.steps)


def _kept_by_the_program(seen: Diagnosis, _: MemoryEvent) -> Iterator[Cause]:
    # The loss may need the outputs. Outputs that are live at another time are referenced by the program.
    held = seen.most("put_out", "forward", "backward", "embeddings", "between", "update")
    what = f"the program keeps {readable_size(held)} of model outputs, as in outputs = model(...)"
    change = "drop outputs before backward (loss = model(...).loss, or del outputs), or keep only .item()"
    yield "outputs", lambda phase: min(phase.of("put_out"), held), what, change
    later = [step for step in seen.log.steps[2:] if step.base_bytes is not None]
    bases = [(step.base_bytes or 0) + (step.earlier_outputs_bytes or 0) for step in later]
    born = [step.state_bytes or 0 for step in later]  # LBFGS allocates states in many steps
    grown = [after - before - made for (before, after), made in zip(pairwise(bases), born, strict=False)]
    each = int(statistics.median(grown)) if len(grown) > 1 else 0
    if each > _WORTH * _peak_of(seen.step):
        what = f"memory in use between steps grows by {readable_size(each)} a step: the program keeps tensors"
        change = "keep losses and outputs without their graph (loss.item(), loss.detach(), no retain_graph)"
        yield "graphs of earlier steps", bases[-1] - bases[0], what, change


def _placements(seen: Diagnosis, memory: MemoryEvent) -> Iterator[Cause]:
    placed = list(zip(memory.names, memory.placements, strict=True))
    kept = [name for name, word in placed if word == "keep" or word.endswith("%")]
    again = [name for name, word in placed if word == "recompute"]
    for holder, names, better in (("kept", kept, "offload"), ("inputs", again, "recompute-offload")):
        if names and not seen.step.left_alone_scopes:
            held = f"{readable_size(seen.most(holder))} of {'activations' if holder == 'kept' else 'inputs'}"
            what = f"{len(names)} of {len(placed)} layers keep {held} in memory"
            change = _change_of_plan(seen, names, better)
            yield "placements", _but_one_layer(holder, len(names)), what, change
    others = _known_elsewhere(seen) + seen.step.fallback_kept_bytes
    what = f"tensors smaller than min_tensor_bytes take {readable_size(max(seen.most('small') - others, 0))}"
    yield "small tensors", lambda phase: phase.of("small") - others, what, "lower min_tensor_bytes"


def _but_one_layer(holder: str, layers: int) -> Callable[[Phase], int]:
    return lambda phase: phase.of(holder) * (layers - 1) // layers


def _change_of_plan(seen: Diagnosis, names: list[str], better: str) -> str:
    """Return how to give layers another placement: in the policy, or by a budget for ``auto`` layers."""
    entries, budget = [seen.log.header.plan.get(name) for name in names], seen.step.activation_budget_bytes
    if not all(isinstance(entry, dict) and entry.get("placement") == "auto" for entry in entries):
        return f"set the placement of these layers to {better}"
    peak = min(filter(None, (budget, seen.step.activation_peak_bytes)), default=None)
    than = "" if peak is None else f" below {readable_size(peak)}"
    return f"set budget.activation_bytes{than}, because the planner chose these placements"


def _loss(seen: Diagnosis, memory: MemoryEvent) -> Iterator[Cause]:
    spared = 2 * memory.outside[1] + _left_out(seen, memory)
    micro_batches = max(seen.step.scopes // max(len(memory.names), 1), 1)
    chunks = max((seen.step.tokens or 0) // micro_batches // _CHUNK, 8)

    def chunked(phase: Phase) -> int:
        """Return the bytes that are freed if the loss is computed in chunks.

        Each chunk still computes a gradient of the whole output layer.
        """
        is_of_loss = phase.name in {"loss", "between"}
        return (phase.of("running") - spared) * (chunks - 1) // chunks if is_of_loss else 0

    what = f"logits and loss need {readable_size(seen.most('running', 'loss', 'between'))} of memory"
    change = f"compute the loss in {chunks} chunks of tokens, or with a fused linear cross-entropy"
    yield "logits and loss", chunked, what, change


def _left_out(seen: Diagnosis, memory: MemoryEvent) -> int:
    """Return the estimated bytes that unattached blocks save. The estimate counts each block as one layer."""
    return memory.left_out * seen.saved_bytes // max(seen.step.scopes, 1)


def _outside(seen: Diagnosis, memory: MemoryEvent) -> Iterator[Cause]:
    nbytes = _left_out(seen, memory) or seen.most("beside", "forward", "loss")

    def beside(phase: Phase) -> int:
        if memory.left_out:
            return min(phase.of("running", "beside"), nbytes)
        return phase.of("beside") if phase.name in {"forward", "loss"} else 0

    blocks = f"{memory.left_out} trained blocks"
    who = blocks if memory.left_out else "modules, for example embeddings or an encoder,"
    what = f"{who} are not attached layers, and save about {readable_size(nbytes)}"
    change = "attach these modules as layers: attach(model, policy, layers=[...])"
    yield "outside the layers", beside, what, change
    made = seen.most("running", "embeddings") + seen.most("beside", "embeddings")
    # The bytes of other holders are estimates, which may include a small part of the gradient.
    name, size = memory.outside if memory.outside[1] <= 1.1 * made else ("", 0)

    def of_table(phase: Phase) -> int:
        made = phase.of("running", "beside") if size and phase.name == "embeddings" else 0
        return min(phase.of("gradients"), size) + made

    what = f"backward allocates the whole gradient of {name} ({readable_size(size)}) with every placement"
    change = "use sparse gradients (nn.Embedding(..., sparse=True), SGD or Adagrad), or freeze the parameter"
    yield "one large gradient", of_table, what, change


def _model(seen: Diagnosis, memory: MemoryEvent) -> Iterator[Cause]:
    updates = [event for event in seen.log.others if event["event"] == "states"]
    states, gradients = seen.most("states"), seen.most("gradients")
    group = min(max(max(states, gradients) // 24 >> 20, 1), _LARGEST_SUB_GROUP)
    setting = f"states.sub_group_bytes: {group}MiB and attach(..., optimizer=optimizer)"
    slots = _SLOTS * group << 20

    def of_states(phase: Phase) -> int:
        return phase.of("states") + (phase.of("running") if phase.name == "update" else 0) - slots

    what = f"gradients take {readable_size(gradients)}, for every batch size and placement"
    if seen.step.scopes > len(memory.names):  # gradients accumulate over micro-batches
        change = "shard gradients over ranks (FSDP2, ZeRO-2), or use 16-bit parameters"
        yield "gradients", lambda phase: phase.of("gradients") // 2, what, change
    elif not any(update.get("in_backward") for update in updates):
        change = f"free gradients during backward: states.when: backward, {setting}"
        yield "gradients", lambda p: p.of("gradients") - max(slots - p.of("states"), 0), what, change
    works = seen.most("running", "update")
    beside = f", and an update needs {readable_size(works)} of working memory" if works else ""
    what = f"optimizer states take {readable_size(states)}{beside}"
    change = f"use smaller sub-groups: {setting}" if updates else f"offload the states: {setting}"
    yield "optimizer states", of_states, what, change
    spare = memory.frozen_weights - 2 * memory.frozen_weights // max(len(memory.names), 2)  # two layers stay
    what = f"frozen weights take {readable_size(memory.frozen_weights)} in every phase"
    change = "offload frozen weights: weights: {frozen: offload}"
    yield "frozen weights", lambda phase: min(spare, phase.of("parameters")), what, change


def _one_layer(seen: Diagnosis, memory: MemoryEvent) -> Iterator[Cause]:
    again = seen.peak.name == "backward" and memory.placements[seen.peak.layer].startswith("recompute")

    def freed(phase: Phase) -> int:
        """Return half of the memory that grows with the micro-batch."""
        return phase.of("running") // 2 if phase.name in {"forward", "backward"} else 0

    whole = ", including recomputed activations" if again else ""
    what = f"{seen.where(seen.peak)} needs {readable_size(seen.peak.of('running'))} at once{whole}"
    change = "for one long sequence, use FlashAttention (or SDPA without dropout), or run the MLP in chunks"
    yield "one layer", freed, what, f"{change} of tokens. Otherwise, use micro-batches of half the size"


_RULES = (
    *(_window, _store, _held_elsewhere, _kept_by_the_program),
    *(_placements, _loss, _outside, _model, _one_layer),
)
"""The rules. Each rule detects one or several causes."""
