"""Why memory is where it is: the peak of a step, what holds it, and the one change that helps most.

A cause is a rule that looks at the evidence. It tells by how many bytes the peak would be lower without the
cause. For that, its bytes are taken from every phase of the step: below the highest phase the next one may be
hardly lower.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import partial
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
    "states": "states of optimizers",
    "gradients": "gradients",
    "others": "whatever else outlives steps, such as other models",
    "kept": "activations of layers that keep them",
    "in_flight": "activations on their way to the store or back",
    "settled": "activations in use by backward, or refused by a drive",
    "small": "activations kept as small, or held elsewhere",
    "inputs": "inputs of layers that are recomputed",
    "outputs": "left by layers that are offloaded",
    "put_out": "outputs of the model that are alive",
    "beside": "made before, between or after layers",
    "running": "working set",
    "store": "store files, which lie in memory",
}
"""Words for what holds memory."""

_PHASES = {
    "forward": ("forward", "the forward of {}", "working set"),
    "loss": ("loss", "the loss, after the last layer", "logits, loss and their gradients"),
    "backward": ("backward", "the backward of {}", "working set"),
    "embeddings": ("outside", "what is before {}, or after its backward", "embeddings, and their gradients"),
    "between": ("after backward", "what follows a backward", "what clipping works with, or another backward"),
    "update": ("update", "the optimizer's update", "what the optimizer works with"),
    "step": ("step", "a phase that the log does not tell", "not known to the offloader"),
}
"""Each phase in a word and in a sentence, and its working set."""

_WORTH, _OTHERS = 1 / 32, 2
"""Share of the peak that a change has to save to be told, and changes that are told beside the first one."""

_SLOTS, _LARGEST_SUB_GROUP = 3, 64
"""Sub-groups of offloaded states that are in memory, and most MiB of one that is advised."""

_OF_THE_MODEL = ("one large gradient", "gradients", "optimizer states", "frozen weights", "one layer")
"""Causes that are no activations: without them backward can take less than gradients and one layer."""

_CPU = ("mallinfo2",)
"""Beginnings of the sources of figures where activations lie in host memory."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The fullest moment of one phase of a step.

    Attributes:
        name: Its name.
        layer: Index of the layer that ran, or had run last.
        held: Bytes by holder, by the names of :data:`HOLDERS`.
    """

    name: str
    layer: int
    held: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """All bytes of the moment."""
        return sum(self.held.values())

    def of(self, *holders: str) -> int:
        """Return the bytes of some holders."""
        return sum(self.held.get(holder, 0) for holder in holders)


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, and the change that takes it away.

    Attributes:
        cause: A word for programs.
        nbytes: Bytes of the peak that the change concerns; 0 where they were live before the step.
        saves: Bytes by which the peak would be lower after the change.
        what: The cause in a sentence.
        change: The change in a sentence.
    """

    cause: str
    nbytes: int
    saves: int
    what: str
    change: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run log says about memory, for the fullest step that was looked at.

    Attributes:
        log: The run.
        step: The record of the step.
        memory: Its memory event; ``None`` if the log has none.
        phases: The phases of the step.
    """

    log: RunLog
    step: StepRecord
    memory: MemoryEvent | None
    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, log: RunLog) -> Evidence:
        """Return the evidence of a log; its first step counts only if it is alone.

        Raises:
            RunLogError: It has no step, or a damaged event.
        """
        if not log.steps:
            raise RunLogError(f"{log.path}: no step is in it, so there is nothing to explain; train some")
        steps = {step.step: step for step in log.steps}
        events = [each for each in log.events(MemoryEvent) if each.step in steps and each.phases]
        # A planner tries other placements in the first steps, and states are made in the very first.
        late = [event for event in events if event.step > 1 or len(events) == 1]
        late = [event for event in late if event.placements == late[-1].placements]
        if not late:
            step = max(log.steps[1:] or log.steps, key=_peak_of)
            return cls(log, step, None, (Phase("step", 0, {"running": _peak_of(step)}),))
        memory = max(late, key=lambda event: _peak_of(steps[event.step]))
        step, found = steps[memory.step], dict(memory.phases)
        for event in late if _is_on_cpu(step) else ():  # samples miss short moments, now here, now there
            for name, peak in event.phases.items():
                found[name] = max(found.get(name, peak), peak, key=lambda each: each.whole)
        lasting = _lasting(log, step, memory)
        phases = [Phase(name, peak.layer, _held(peak, lasting)) for name, peak in found.items()]
        if "update" not in found:  # the block of a step ends before it, and may have freed gradients
            gradients = max(memory.static.gradients, step.gradient_peak_bytes or 0)
            phases.append(Phase("update", 0, lasting | {"gradients": gradients}))
        return cls(log, step, memory, tuple(phases))

    @property
    def peak(self) -> Phase:
        """The phase in which memory is at its peak."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def saved_bytes(self) -> int:
        """Bytes that layers with hooks have saved and backward has used."""
        return max(self.step.forwarded_bytes + self.step.read_bytes, self.step.offloaded_bytes)

    def most(self, holder: str, *phases: str) -> int:
        """Return the most bytes that a holder has in any of some phases; in all by default."""
        return max((each.of(holder) for each in self.phases if each.name in phases or not phases), default=0)

    def where(self, phase: Phase) -> str:
        """Return a phase in words."""
        names = self.memory.names if self.memory is not None else []
        name = f" ({names[phase.layer]})" if phase.layer < len(names) else ""
        return _PHASES[phase.name][1].format(f"layer {phase.layer}{name}")

    def findings(self) -> list[Finding]:
        """Return the causes that are worth a change, the one first whose change would help most."""
        if self.memory is None:
            return []
        found, one_layer = [], self.most("running", "backward")
        for cause, freed, what, change in (each for rule in _RULES for each in rule(self, self.memory)):
            if isinstance(freed, int):
                found.append(Finding(cause, 0, freed, what, change))
                continue
            left = [phase.nbytes - max(freed(phase), 0) for phase in self.phases]
            for place, phase in enumerate(self.phases):
                if phase.name == "backward" and cause not in _OF_THE_MODEL:  # at its end it has all gradients
                    lasting = phase.of("parameters", "states", "others") + self.most("gradients")
                    left[place] = max(left[place], min(lasting + one_layer, phase.nbytes))
            saves = self.peak.nbytes - max(left)
            found.append(Finding(cause, max(freed(self.peak), 0), saves, what, change))
        worth = [each for each in found if each.saves > _WORTH * self.peak.nbytes]
        return sorted(worth, key=lambda each: each.saves, reverse=True)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where memory is at its peak, what holds it, and what would help; ``str`` says it in words.

    Attributes:
        evidence: What it is based on.
        findings: The causes, the one first whose change would help most.
    """

    evidence: Evidence
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, log: RunLog) -> Diagnosis:
        """Return the diagnosis of a run.

        Raises:
            RunLogError: It has no step.
        """
        evidence = Evidence.of(log)
        return cls(evidence, tuple(evidence.findings()))

    @property
    def cause(self) -> str | None:
        """The cause whose change would help most; ``None`` if none is worth one."""
        return self.findings[0].cause if self.findings else None

    def __str__(self) -> str:
        return text.as_text(*self.parts()).removesuffix("\n")

    def parts(self) -> list[text.Table | str]:
        """Return what there is to say, as sentences and tables."""
        seen = self.evidence
        peak, words = seen.peak, HOLDERS | {"running": _PHASES[seen.peak.name][2]}
        held = sorted(((size, name) for name, size in peak.held.items() if size), reverse=True)
        holders = [(words[name], readable_size(size), f"{size / peak.nbytes:.0%}") for size, name in held]
        rank = f" of rank {seen.log.header.rank}" if seen.log.header.ranks > 1 else ""
        at = f"In step {seen.step.step}{rank} memory is at its peak in {seen.where(peak)}"
        activations = readable_size(_peak_of(seen.step))
        phases = [(_PHASES[p.name][0], readable_size(p.nbytes), seen.where(p)) for p in seen.phases]
        return [
            f"{at}: {readable_size(peak.nbytes)}; the activation peak is {activations}.",
            text.Table(("Held by", "Size", "Share"), holders, right=("Size", "Share"), title="What holds it"),
            text.Table(("Phase", "Peak", "At"), phases, right=("Peak",), title="Phases of the step"),
            *_doubts(seen),
            *self.advice(),
        ]

    def advice(self) -> list[str]:
        """Return what to do: the change that helps most, and what to do next."""
        phases, peak = self.evidence.phases, self.evidence.peak.nbytes
        if self.evidence.memory is None:
            return ["What held it was not seen: attach(..., measure_memory=True), and train two steps."]
        if not self.findings:
            near = [_PHASES[each.name][0] for each in phases if each.nbytes > (1 - _WORTH) * peak]
            also = f": {' and '.join(near)} are about as high" if near[1:] else ""
            return [f"Nothing that is worth a change stands out{also}."]
        first, *others = self.findings
        then = f"The peak would be about {readable_size(peak - first.saves)}, not {readable_size(peak)}."
        if not first.nbytes:
            then = f"That would be {readable_size(first.saves)} less in the last step of the log."
        change = f"The one change that would help most: {first.change}. {then}"
        return [f"Cause: {first.what}.", change, *(f"Next: {e.what}; {e.change}." for e in others[:_OTHERS])]

    def as_json(self) -> dict[str, Any]:
        """Return the same for programs."""
        seen = self.evidence
        return {
            "step": seen.step.step,
            "peak_bytes": seen.peak.nbytes,
            "peak_in": seen.where(seen.peak),
            "phases": [{"phase": each.name, "bytes": each.nbytes} | asdict(each) for each in seen.phases],
            "activation_peak_bytes": seen.step.activation_peak_bytes,
            "predicted_peak_bytes": seen.step.predicted_peak_bytes,
            "cause": self.cause,
            "findings": [asdict(finding) for finding in self.findings],
        }


def why(path: str | os.PathLike[str]) -> Diagnosis:
    """Return the diagnosis of a run by its log; of several ranks that of the fullest.

    Raises:
        RunLogError: It cannot be read, or has no step.
    """
    found = [Diagnosis.of(read_run_log(each)) for each in paths_of_ranks(path)]
    return max(found, key=lambda each: each.evidence.peak.nbytes)


def _doubts(seen: Evidence) -> Iterator[str]:
    planned, measured = seen.step.predicted_peak_bytes, seen.step.activation_peak_bytes
    if _is_on_cpu(seen.step):
        yield "On a CPU memory is sampled: a phase may have been higher for a moment, above all a short one."
    if planned and measured is not None:
        ratio = significant(measured / planned)
        yield f"Planned was an activation peak of {readable_size(planned)}; measured was {ratio} times that."


def _peak_of(step: StepRecord) -> int:
    return step.activation_peak_bytes or 0


def _is_on_cpu(step: StepRecord) -> bool:
    return (step.peak_source or "").startswith(_CPU)


def _lasting(log: RunLog, step: StepRecord, memory: MemoryEvent) -> dict[str, int]:
    """Return the bytes that are there in each phase."""
    known = {"parameters": memory.static.parameters, "states": memory.static.states}
    # In host memory the program itself is among what outlives steps.
    others = 0 if _is_on_cpu(step) else max((step.base_bytes or 0) - sum(known.values()), 0)
    is_in_memory = "lies in memory" in str(log.header.store)
    return known | {"others": others, "store": step.offloaded_bytes if is_in_memory else 0}


def _held(peak: PhasePeak, lasting: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of a peak by holder; no more than were live, as books may count what is gone."""
    left, books = peak.nbytes, peak.held._asdict() | {"beside": peak.beside}
    held = dict(lasting) | {"gradients": peak.gradients}
    held["parameters"] += peak.frozen
    for holder, nbytes in books.items():
        held[holder] = min(nbytes, left)
        left -= held[holder]
    return held | {"running": left}


# The causes: a word, the bytes of a phase that are gone without it, the cause and the change in sentences


def _checkpointing(seen: Evidence, _: MemoryEvent) -> Iterator[Cause]:
    alone, runs = seen.step.left_alone_scopes, max(seen.step.scopes, seen.step.left_alone_scopes, 1)
    what = f"{alone} of {runs} runs of layers take place in the framework's checkpoints, which keep inputs"
    change = "switch those off (gradient_checkpointing=False), and place the layers recompute-offload"
    yield "framework checkpointing", lambda phase: phase.of("kept") * alone // runs, what, change


def _window(seen: Evidence, _: MemoryEvent) -> Iterator[Cause]:
    wanted = max(seen.saved_bytes >> 23, 1)
    most, saved = readable_size(seen.step.in_flight_peak_bytes), readable_size(seen.saved_bytes)
    what = f"{most} of the {saved} that layers save are in flight at a time, as budget.in_flight_bytes allows"
    change = f"set budget.in_flight_bytes: {wanted}MiB, an eighth of what a step saves"
    yield "window", lambda phase: phase.of("in_flight") - (wanted << 20), what, change


def _store(seen: Evidence, _: MemoryEvent) -> Iterator[Cause]:
    refused, written = seen.step.fallback_kept_bytes, seen.step.offloaded_bytes
    by = "drives are full or failing" if seen.step.drives_out_of_service else "the store is full or too slow"
    what = f"{readable_size(refused)} that were to be offloaded stayed in memory, because {by}"
    change = "make room where store.directories are, or name another drive; raise store.capacity if it is set"
    yield "store", lambda phase: min(phase.of("settled", "small"), refused), what, change
    holder = "outputs" if _is_host_store_on_cpu(seen) else "store"
    what = f"the store lies in memory: the {readable_size(written)} written in a step do not leave it"
    change = "name directories on a drive in store.directories (`tba-offload doctor DIR` says which are)"
    yield "store", lambda phase: min(phase.of(holder), written), what, change


def _is_host_store_on_cpu(seen: Evidence) -> bool:
    """Return True if the store's bytes are live ones of the device: layers seem to leave them in memory."""
    return seen.log.header.store.get("kind") == "host" and _is_on_cpu(seen.step)


def _held_elsewhere(seen: Evidence, _: MemoryEvent) -> Iterator[Cause]:
    held = max(_known_elsewhere(seen), 0 if _is_host_store_on_cpu(seen) else seen.most("outputs"))
    what = f"the model, a list or an attribute holds {readable_size(held)} that layers save or return"
    change = (
        "let go of them: output_hidden_states=False, output_attentions=False, no list of hidden states or "
        "losses; make a table a buffer of its module"
    )
    yield "held elsewhere", lambda phase: min(held, phase.of("small", "outputs", "beside")), what, change


def _known_elsewhere(seen: Evidence) -> int:
    """Return the bytes that something beside autograd holds; they are written in vain once, then kept."""
    return max(step.held_bytes for step in seen.log.steps)


def _kept_by_the_program(seen: Evidence, _: MemoryEvent) -> Iterator[Cause]:
    # A loss may need what the model put out; what is there after it, or before the next, the program holds.
    held = seen.most("put_out", "forward", "backward", "embeddings", "between", "update")
    what = f"the program holds {readable_size(held)} that the model put out, as outputs = model(...) does"
    change = "let go of them before backward: loss = model(...).loss, or del outputs; keep numbers (.item())"
    yield "outputs", lambda phase: min(phase.of("put_out"), held), what, change
    later = [step for step in seen.log.steps[2:] if step.base_bytes is not None]
    bases = [(step.base_bytes or 0) + (step.earlier_outputs_bytes or 0) for step in later]
    born = [step.state_bytes or 0 for step in later]  # LBFGS makes states in many steps
    grown = [after - before - made for (before, after), made in zip(pairwise(bases), born, strict=False)]
    each = int(statistics.median(grown)) if len(grown) > 1 else 0
    if each > _WORTH * _peak_of(seen.step):
        what = f"what outlives steps grows by {readable_size(each)} a step: the program keeps tensors"
        change = "keep no loss and no output with its graph: loss.item() or loss.detach(); no retain_graph"
        yield "graphs of earlier steps", bases[-1] - bases[0], what, change


def _placements(seen: Evidence, memory: MemoryEvent) -> Iterator[Cause]:
    placed = list(zip(memory.names, memory.placements, strict=True))
    kept = [name for name, word in placed if word == "keep" or word.endswith("%")]
    again = [name for name, word in placed if word == "recompute"]
    for holder, names, better in (("kept", kept, "offload"), ("inputs", again, "recompute-offload")):
        if names and not seen.step.left_alone_scopes:
            how = "keep what they save" if holder == "kept" else "are recomputed, and keep their inputs"
            what = f"{len(names)} of {len(placed)} layers {how}, {readable_size(seen.most(holder))}"
            change = _change_of_plan(seen, names, better)
            yield "placements", partial(_beyond_one_layer, holder, len(names)), what, change
    others = _known_elsewhere(seen) + seen.step.fallback_kept_bytes
    what = f"{readable_size(max(seen.most('small') - others, 0))} are in tensors below min_tensor_bytes"
    yield "small tensors", lambda phase: phase.of("small") - others, what, "set min_tensor_bytes lower"


def _beyond_one_layer(holder: str, layers: int, phase: Phase) -> int:
    return phase.of(holder) * (layers - 1) // layers


def _change_of_plan(seen: Evidence, names: list[str], better: str) -> str:
    """Return how layers come to another placement: by the policy, or by the planner's limits."""
    entries, budget = [seen.log.header.plan.get(name) for name in names], seen.step.activation_budget_bytes
    if not all(isinstance(entry, dict) and entry.get("placement") == "auto" for entry in entries):
        return f"place them {better}"
    than = "" if budget is None else f" below {readable_size(budget)}"
    return f"give the planner, which chose that, a budget.activation_bytes{than}"


def _loss(seen: Evidence, memory: MemoryEvent) -> Iterator[Cause]:
    spared = 2 * memory.outside[1] + _left_out(seen, memory)

    def chunked(phase: Phase) -> int:
        """Return what chunks free; each makes a gradient of the head, added to that of the chunks before."""
        return (phase.of("running") - spared) * 7 // 8 if phase.name in {"loss", "between"} else 0

    what = f"logits and loss take {readable_size(seen.most('running', 'loss', 'between'))} after the layers"
    change = "compute the loss in 8 chunks of tokens, or with a fused linear cross-entropy"
    yield "logits and loss", chunked, what, change


def _left_out(seen: Evidence, memory: MemoryEvent) -> int:
    """Return the bytes that blocks save that are not among the layers, each as much as a layer."""
    return memory.left_out * seen.saved_bytes // max(seen.step.scopes, 1)


def _outside(seen: Evidence, memory: MemoryEvent) -> Iterator[Cause]:
    nbytes = _left_out(seen, memory) or seen.most("beside", "forward", "loss")

    def beside(phase: Phase) -> int:
        if memory.left_out:
            return min(phase.of("running", "beside"), nbytes)
        return phase.of("beside") if phase.name in {"forward", "loss"} else 0

    blocks = f"{memory.left_out} blocks that train"
    who = blocks if memory.left_out else "modules such as embeddings or an encoder"
    what = f"{who} are not among the layers, and keep what they save, about {readable_size(nbytes)}"
    change = "name them as layers too: attach(model, policy, layers=[...])"
    yield "outside the layers", beside, what, change
    made = seen.most("running", "embeddings") + seen.most("beside", "embeddings")
    # Other holders are estimates, so that a little of the gradient may be counted as theirs.
    name, size = memory.outside if memory.outside[1] <= 1.1 * made else ("", 0)

    def of_table(phase: Phase) -> int:
        made = phase.of("running", "beside") if size and phase.name == "embeddings" else 0
        return min(phase.of("gradients"), size) + made

    what = f"backward makes the gradient of {name} whole ({readable_size(size)}), where no placement reaches"
    change = "make it sparse (nn.Embedding(..., sparse=True), SGD or Adagrad) or freeze it"
    yield "one large gradient", of_table, what, change


def _model(seen: Evidence, memory: MemoryEvent) -> Iterator[Cause]:
    updates = [event for event in seen.log.others if event["event"] == "states"]
    states, gradients = seen.most("states"), seen.most("gradients")
    group = min(max(max(states, gradients) // 24 >> 20, 1), _LARGEST_SUB_GROUP)
    setting = f"states.sub_group_bytes: {group}MiB and attach(..., optimizer=optimizer)"
    slots = _SLOTS * group << 20

    def of_states(phase: Phase) -> int:
        return phase.of("states") + (phase.of("running") if phase.name == "update" else 0) - slots

    what = f"gradients take {readable_size(gradients)}, whatever the batch and the placements"
    if seen.step.scopes > len(memory.names):  # they stay for the next micro-batch
        change = "shard them over ranks (FSDP2, ZeRO-2), or have parameters in 16 bits"
        yield "gradients", lambda phase: phase.of("gradients") // 2, what, change
    elif not any(update.get("in_backward") for update in updates):
        change = f"free them in backward: states.when: backward, {setting}"
        yield "gradients", lambda p: p.of("gradients") - max(slots - p.of("states"), 0), what, change
    works = readable_size(seen.most("running", "update"))
    what = f"optimizers hold {readable_size(states)} of states, and an update works with {works}"
    change = f"have smaller sub-groups: {setting}" if updates else f"offload the states: {setting}"
    yield "optimizer states", of_states, what, change
    spare = memory.frozen_weights - 2 * memory.frozen_weights // max(len(memory.names), 2)  # two layers stay
    what = f"weights that are not trained take {readable_size(memory.frozen_weights)} always"
    change = "offload them: weights: {frozen: offload}"
    yield "frozen weights", lambda phase: min(spare, phase.of("parameters")), what, change


def _one_layer(seen: Evidence, memory: MemoryEvent) -> Iterator[Cause]:
    again = seen.peak.name == "backward" and memory.placements[seen.peak.layer].startswith("recompute")

    def freed(phase: Phase) -> int:
        """Return half of what grows with the micro-batch."""
        return phase.of("running") // 2 if phase.name in {"forward", "backward"} else 0

    whole = " with all that it saves, which is made again" if again else ""
    what = f"{seen.where(seen.peak)} needs {readable_size(seen.peak.of('running'))} at once{whole}"
    yield "one layer", freed, what, "take micro-batches of half the size, and twice as many of them"


_RULES = (
    *(_checkpointing, _window, _store, _held_elsewhere, _kept_by_the_program),
    *(_placements, _loss, _outside, _model, _one_layer),
)
"""The ten causes."""
