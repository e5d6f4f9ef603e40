"""Causes of a high peak of memory, each a rule that looks at the evidence, and what to do about each.

A rule tells by how many bytes the peak would be lower without its cause. For that it takes the cause's bytes
away from every phase of the step, because under the highest peak there may be a second one hardly lower.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tba_offload.formatting import readable_size
from tba_offload.report.digest import whole
from tba_offload.report.endurance import limit_in, terabytes
from tba_offload.report.evidence import stored_in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tba_offload.report.evidence import Evidence, Phase

WORTH = 1 / 32
"""Share of the peak that a change has to save to be told."""

_MOST = 1 / 2
"""Share of what layers save, or of their runs, from which on a cause leaves the policy without effect."""

_SWITCHES = (
    "gradient_checkpointing=False of a Hugging Face trainer, model.gradient_checkpointing_disable(), "
    "disable_gradient_checkpointing() of diffusers, set_grad_checkpointing(False) of timm and open_clip"
)
"""Calls by which frameworks leave checkpointing."""

_HUGE = 2.0
"""Bytes of a huge layer, in those of the median layer, from which on it is named."""

_WINDOW_SHARE = 8
"""A window of this part of what a step saves has most of it leave memory, and drives work beside compute."""

SLOTS = 3
"""Sub-groups of offloaded states that are in memory: one is updated, one read, one written."""

SUB_GROUP_ON_CPU = 64 << 20
"""Bytes of a sub-group where the policy does not say, on a CPU."""

SUB_GROUP = 256 << 20
"""Likewise, on an accelerator."""

_CHUNKS = 8
"""Chunks of a loss, of which one at a time is in memory."""

_SLOTS_SHARE = 8
"""Slots of this part of all states have most of them leave memory."""

_SHARE = re.compile(r"offload-\d+%")
"""Placement by which a share of what a layer saves travels."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, and the change that takes it away.

    Attributes:
        cause: A word for it, for programs.
        saves: Bytes by which the peak would be lower.
        what: What is the case, in a sentence.
        change: What to do about it, in a sentence.
        blocks: Whether the policy has no effect because of it, so that it is to be changed before all else.
        is_in_peak: Whether the peak that is told has the bytes in it; what was live before a step is not.
        is_news: Whether it is told last even where it hardly matters for the peak: the policy means something
            else than what happens.
    """

    cause: str
    saves: int
    what: str
    change: str
    blocks: bool = False
    is_in_peak: bool = True
    is_news: bool = False


def findings(evidence: Evidence) -> list[Finding]:
    """All causes that are worth a change, the one first whose change would help most."""
    found = [finding for rule in _RULES for finding in rule(evidence)]
    least = WORTH * evidence.peak.nbytes
    worth = [each for each in found if each.saves > least]
    news = [each for each in found if each.is_news and each.saves <= least]
    return sorted(worth, key=lambda each: (each.blocks, each.saves), reverse=True) + news


# Causes that stand in the way of the policy


def _left_alone(evidence: Evidence) -> Iterator[Finding]:
    step = evidence.step
    if not step.left_alone_scopes:
        return
    runs = max(step.scopes, step.left_alone_scopes)
    share = step.left_alone_scopes / runs
    yield Finding(
        "framework checkpointing",
        evidence.without(lambda phase: int(share * phase.of("kept"))),
        f"{step.left_alone_scopes} of {runs} runs of layers take place inside a checkpoint or other "
        "saved-tensor hooks of the framework, where tba-offload cannot see what they save",
        f"switch the framework's own activation checkpointing off ({_SWITCHES}), and let the policy place "
        "the layers: recompute-offload recomputes as it does, and frees the inputs as well",
        blocks=share >= _MOST,
        is_news=True,
    )


def _checkpointed(evidence: Evidence) -> Iterator[Finding]:
    memory = evidence.memory
    if memory is None or not memory.checkpointed:
        return
    yield Finding(
        "framework checkpointing",
        evidence.without(lambda phase: phase.of("running") // 2 if phase.name == "backward" else 0),
        f"gradient checkpointing is switched on in {memory.checkpointed} of {len(memory.names)} layers: "
        "backward computes them again whatever their placement, and has all that a layer saves in memory",
        f"switch it off ({_SWITCHES}), and let the policy place the layers",
        blocks=memory.checkpointed >= _MOST * len(memory.names),
        is_news=True,
    )


def _wide_window(evidence: Evidence) -> Iterator[Finding]:
    step, saved = evidence.step, evidence.saved_bytes
    wanted = max(saved // _WINDOW_SHARE >> 20, 1) << 20
    if step.in_flight_peak_bytes <= wanted or not saved:
        return
    yield Finding(
        "window",
        evidence.without(lambda phase: max(phase.of("in_flight", "read_ahead") - wanted, 0)),
        f"up to {readable_size(step.in_flight_peak_bytes)} of the {readable_size(saved)} that the layers "
        f"save in a step are in flight at a time, and so in memory, as the window {_window(evidence)} allows",
        f"set budget.in_flight_bytes: {wanted >> 20}MiB, an eighth of what a step saves",
        blocks=step.in_flight_peak_bytes >= _MOST * saved,
    )


def _window(evidence: Evidence) -> str:
    memory = evidence.memory
    if memory is None:
        return "(budget.in_flight_bytes)"
    size = "no limit" if memory.window is None else readable_size(memory.window)
    return f"(budget.in_flight_bytes: {size})"


def _refused(evidence: Evidence) -> Iterator[Finding]:
    step = evidence.step
    refused = step.fallback_kept_bytes
    if not refused:
        return
    is_full = step.drives_out_of_service > 0
    reason = (
        f"{step.drives_out_of_service} of the drives took no more, being full or failing"
        if is_full
        else "the store had no room, or did not follow"
    )
    yield Finding(
        "full drive" if is_full else "store did not take all",
        evidence.without(lambda phase: min(phase.of("settled", "small"), refused)),
        f"{readable_size(refused)} stayed in memory although the plan was to offload them, because {reason}",
        "make room where store.directories are, or name another drive there; raise store.capacity if it is "
        "set; where drives are too slow, add one, or place some layers recompute",
        blocks=refused >= _MOST * max(evidence.saved_bytes, refused),
    )


def _stored_in_memory(evidence: Evidence) -> Iterator[Finding]:
    kind, written = stored_in_memory(evidence.log), evidence.step.offloaded_bytes
    if kind is None or not evidence.is_cpu or not written:
        return
    holder = "store" if kind == "files" else "outputs"
    place = "a file system in memory (tmpfs)" if kind == "files" else "host memory (store.kind: host)"
    yield Finding(
        "memory file system" if kind == "files" else "host store",
        evidence.without(lambda phase: min(phase.of(holder), written)),
        f"the store is in {place}, and so are the activations: the {readable_size(written)} that a step "
        "writes leave one part of memory for another",
        "name directories on a drive in store.directories; `tba-offload doctor DIR` says what each one is",
        blocks=True,
    )


# Causes in what layers save


def _held_elsewhere(evidence: Evidence) -> Iterator[Finding]:
    memory = evidence.memory
    named = {name: size for name, size, _ in memory.held} if memory is not None else {}
    held = _held_bytes(evidence)
    if not held:
        return
    holder = ", ".join(f"{name} ({readable_size(size)})" for name, size in list(named.items())[:3])
    yield Finding(
        "held elsewhere",
        evidence.without(lambda phase: min(held, phase.of("tables", "small", "outputs", "beside"))),
        f"{readable_size(held)} that layers save stay in memory whatever the policy says, because something "
        f"else holds them: {holder or 'no attribute of a module, so perhaps a list of outputs'}",
        "make what is held a buffer of its module if it is a table; otherwise let go of it: use_cache=False, "
        "output_hidden_states=False, no list of hidden states",
    )


def _held_bytes(evidence: Evidence) -> int:
    """Of what layers save, that which something else holds too; later steps know it, and count it as kept."""
    named = 0 if evidence.memory is None else sum(size for _, size, _ in evidence.memory.held)
    return max([named, *(step.held_bytes for step in evidence.log.steps)])


def _kept(evidence: Evidence) -> Iterator[Finding]:
    memory = evidence.memory
    if memory is None or evidence.step.left_alone_scopes:
        return
    whole = memory.placements.count("keep")
    kept = [i for i, word in enumerate(memory.placements) if word == "keep" or _SHARE.fullmatch(word)]
    if not kept:
        return
    told = []
    if whole:
        told.append(
            f"{whole} of {len(memory.names)} layers are placed keep, so that all that they save stays"
        )
    if shares := len(kept) - whole:
        told.append(f"{shares} of {len(memory.names)} layers let only a share of what they save travel")
    largest = max(memory.layers[index][0] for index in kept)
    planned = all(_is_auto(evidence, memory.names[index]) for index in kept)
    limit = limit_in(evidence.log)
    backward = evidence.least_of_backward

    def freed(phase: Phase) -> int:
        """Without what layers keep, backward is at its peak where most gradients are there."""
        kept = max(phase.of("kept") - largest, 0)
        return min(kept, max(phase.nbytes - backward, 0)) if phase.name == "backward" else kept

    yield Finding(
        "layers that keep",
        evidence.without(freed),
        f"{', and '.join(told)}: {readable_size(evidence.peak.of('kept'))} stay in memory",
        f"raise store.write_bytes_per_day: {terabytes(limit['allowed'])} a day leave no room for more"
        if planned and limit is not None and limit["bounds"]
        else "give the planner, which keeps them, a budget.activation_bytes that is lower"
        if planned and evidence.step.activation_budget_bytes is not None
        else "give the planner a budget.activation_bytes: without one it keeps what is faster to keep"
        if planned
        else "place them offload, or auto with a budget; of a log of three such steps `tba-offload plan` "
        "says what other budgets would take",
    )


def _is_auto(evidence: Evidence, name: str) -> bool:
    entry = evidence.log.header.plan.get(name)
    return isinstance(entry, dict) and entry.get("placement") == "auto"


def _small(evidence: Evidence) -> Iterator[Finding]:
    held = _held_bytes(evidence)  # are among them, and another cause
    yield Finding(
        "small tensors",
        evidence.without(lambda phase: max(phase.of("small") - held, 0)),
        f"{readable_size(max(evidence.peak.of('small') - held, 0))} are in tensors that stay because they "
        "are smaller than min_tensor_bytes, or of a kind that is not understood",
        "set min_tensor_bytes lower",
    )


def _inputs(evidence: Evidence) -> Iterator[Finding]:
    yield Finding(
        "inputs of recomputed layers",
        evidence.without(lambda phase: phase.of("inputs")),
        f"layers that are recomputed keep their inputs: {readable_size(evidence.peak.of('inputs'))}",
        "place these layers recompute-offload, which writes the inputs too",
    )


def _huge_layer(evidence: Evidence) -> Iterator[Finding]:
    memory = evidence.memory
    if memory is None or len(memory.layers) < 2:
        return
    takes = [max(forward, backward) for _, forward, backward in memory.layers]
    # What a layer leaves there is kept, and no matter of its size.
    own = [max(forward - left, backward) for left, forward, backward in memory.layers]
    largest = max(range(len(own)), key=own.__getitem__)
    others = [size for index, size in enumerate(takes) if index != largest]
    if own[largest] < _HUGE * statistics.median(others):
        return
    excess = max(own[largest] - max(others), 0)

    def freed(phase: Phase) -> int:
        is_there = phase.layer == largest and phase.name in {"forward", "backward"}
        return min(excess, phase.of("running", "in_flight", "read_ahead", "settled")) if is_there else 0

    yield Finding(
        "one huge layer",
        evidence.without(freed),
        f"{evidence.layer(largest)} alone takes {readable_size(own[largest])} while it runs, and the "
        f"median of the other layers {readable_size(statistics.median(others))}; no window is smaller than "
        "one layer",
        "split it, or run it on parts of its tokens in turn; or name its parts as layers of their own: "
        "attach(model, policy, layers=[...])",
    )


# Causes beside the layers


def _loss(evidence: Evidence) -> Iterator[Finding]:
    def freed(phase: Phase) -> int:
        return phase.of("running") if phase.name in {"loss", "between"} else 0

    head = 0 if evidence.memory is None else evidence.memory.head

    def chunked(phase: Phase) -> int:
        """Each chunk makes a gradient of the head's weights, which is added to that of the chunks before."""
        by_tokens = max(freed(phase) - 2 * head, 0)
        return by_tokens - by_tokens // _CHUNKS

    if most := max(map(freed, evidence.phases)):
        yield Finding(
            "logits and loss",
            evidence.without(chunked),
            f"logits and loss take {readable_size(most)} after the last layer, where no "
            "placement of a layer reaches",
            f"compute the loss in {_CHUNKS} chunks of tokens (or with a fused linear cross-entropy), or take "
            "smaller micro-batches",
        )


def _not_attached(evidence: Evidence) -> Iterator[Finding]:
    memory = evidence.memory
    if memory is None:
        return
    alike, others = memory.not_attached, [words for words, _ in memory.left_out]
    count = alike + sum(blocks for _, blocks in memory.left_out)
    if not count:
        return
    # Blocks of other classes are taken to save as much as a layer does.
    nbytes = count * evidence.saved_bytes // max(evidence.step.scopes, 1)
    found = [*([f"{alike} modules of the same class as the layers"] * (alike > 0)), *others]
    yield Finding(
        "layers not attached",
        evidence.without(lambda phase: min(phase.of("running", "beside"), nbytes)),
        f"{' and '.join(found)} are not among the layers, and keep all that they save, about "
        f"{readable_size(nbytes)}",
        "name all that are to be placed: attach(model, policy, layers=[...])"
        if others
        else "leave out layers=... in attach, or name them there too",
    )


def _embeddings(evidence: Evidence) -> Iterator[Finding]:
    def freed(phase: Phase) -> int:
        return phase.of("running", "beside") if phase.name == "embeddings" else 0

    yield Finding(
        "embeddings",
        evidence.without(freed),
        f"{readable_size(max(map(freed, evidence.phases)))} are made before the first layer or after its "
        "backward, where no placement of a layer reaches: in backward each embedding makes a gradient as "
        "large as its weights, and one that a head shares makes two",
        "freeze the embeddings (requires_grad_(False)) if training allows it, or shard them over ranks; "
        "where other modules run there, name them as layers too: attach(model, policy, layers=[...])",
    )


def _put_out(evidence: Evidence) -> Iterator[Finding]:
    # A loss may need what the model put out; what is there after it, or before the next, the program holds.
    without_it = (phase for phase in evidence.phases if phase.name not in {"loss", "step"})
    held = max((phase.of("put_out") for phase in without_it), default=0)
    yield Finding(
        "outputs",
        evidence.without(lambda phase: min(phase.of("put_out"), held)),
        f"the program holds {readable_size(held)} that the model put out, as outputs = model(...) does until "
        "the next one is there",
        "let go of them before backward: loss = model(...).loss, or del outputs; keep numbers, as by "
        ".item(), and no tensors",
    )


def _beside(evidence: Evidence) -> Iterator[Finding]:
    yield Finding(
        "made beside layers",
        evidence.without(lambda phase: phase.of("beside") if phase.name in {"forward", "loss"} else 0),
        f"{readable_size(evidence.peak.of('beside'))} are made in the step before, between or after the "
        "layers, such as embeddings and masks",
        "name the modules that make them as layers too: attach(model, policy, layers=[...])",
    )


def _gradients(evidence: Evidence) -> Iterator[Finding]:
    most = max(phase.of("gradients") for phase in evidence.phases)
    born = evidence.step.gradient_bytes or 0
    how = "are allocated in backward, beside the activations" if born else "are there in every phase"
    what = (
        f"gradients take {readable_size(most)} and {how}: they grow with the model, and no placement of a "
        "layer makes them fewer"
    )
    if _accumulates(evidence):
        yield Finding(
            "gradients",
            evidence.without(lambda phase: phase.of("gradients") // 2),
            f"{what}; they stay from one micro-batch of a step to the next",
            "shard them over ranks (FSDP2, ZeRO-2), or have parameters, and with them gradients, in 16 bits",
        )
    elif not any(whole(update.get("in_backward")) for update in _updates(evidence)):
        size, told = _sub_group(evidence, most)

        def freed(phase: Phase) -> int:
            """Slots take the place of states, and where there are few of these more than that."""
            return phase.of("gradients") - max(SLOTS * size - phase.of(*_STATES), 0)

        yield Finding(
            "gradients",
            evidence.without(freed),
            what,
            "have updates made in backward, where gradients are freed at once: states.when: backward and "
            "states.gradients: free, with attach(..., optimizer=optimizer), where nothing clips them or "
            f"takes their norm, as a Hugging Face trainer does{told}",
        )


def _accumulates(evidence: Evidence) -> bool:
    """Whether a layer runs more than once in a step."""
    return evidence.memory is not None and evidence.step.scopes > len(evidence.memory.names)


def _states(evidence: Evidence) -> Iterator[Finding]:
    updates, most = _updates(evidence), max(phase.of(*_STATES) for phase in evidence.phases)
    away = sum(whole(update.get("states_bytes")) for update in updates)
    size, told = _sub_group(evidence, away or most)
    names = "states and masters of optimizers" if evidence.peak.of("masters") else "states of optimizers"
    if updates:
        what = f"{names} are offloaded, and {readable_size(most)} of them are always in memory"
        change = "have fewer in memory at a time"
    else:
        what = f"{names} take {readable_size(most)} always, and are used in the update alone"
        change = (
            "offload them too: attach(..., optimizer=optimizer), states in the policy of a callback, or "
            "--tba-optimizer-states with Megatron-LM"
        )

    def freed(phase: Phase) -> int:
        """Return an update works with one sub-group at a time, too."""
        works_with = phase.of("running") if phase.name == "update" else 0
        return max(phase.of(*_STATES) - SLOTS * size, 0) + max(works_with - size, 0)

    yield Finding("optimizer states", evidence.without(freed), what, change + told)


_STATES = ("states", "masters")
"""Holders that travel with offloaded states."""


def _sub_group(evidence: Evidence, nbytes: int) -> tuple[int, str]:
    """Size of a sub-group for that many bytes of states, and the setting in words where it has to be set."""
    usual = SUB_GROUP_ON_CPU if evidence.is_cpu else SUB_GROUP
    size = min(max(nbytes // (SLOTS * _SLOTS_SHARE) >> 20, 1) << 20, usual)
    if size == usual and not _updates(evidence):
        return size, ""
    setting = f"; states.sub_group_bytes: {size >> 20}MiB, since {SLOTS} sub-groups stay in memory"
    return size, setting


def _updates(evidence: Evidence) -> list[Mapping[str, object]]:
    """Return the latest update of each optimizer whose states are offloaded."""
    updates = (event for event in evidence.log.others if event["event"] == "states")
    return list({whole(event.get("optimizer")): event for event in updates}.values())


def _frozen(evidence: Evidence) -> Iterator[Finding]:
    memory = evidence.memory
    if memory is None:
        return
    spare = max(memory.frozen_weights - memory.frozen_at_once, 0)
    yield Finding(
        "frozen weights",
        evidence.without(lambda phase: min(spare, phase.of("parameters"))),
        f"weights of layers that are not trained take {readable_size(memory.frozen_weights)} always, while "
        "one layer at a time uses its own",
        "offload them: weights: {frozen: offload} in the policy",
    )


def _update(evidence: Evidence) -> Iterator[Finding]:
    def freed(phase: Phase) -> int:
        return phase.of("running") if phase.name == "update" else 0

    yield Finding(
        "working memory of the optimizer",
        evidence.without(freed),
        f"optimizers work with {readable_size(max(map(freed, evidence.phases)))} beside parameters, "
        "gradients and states, as copies that an update makes of them",
        "give the optimizer fused=True, where its class has that, else foreach=False, which updates one "
        "parameter after the other"
        + ("" if _updates(evidence) else "; or offload its states, which updates a few parameters at a time"),
    )


def _caches(evidence: Evidence) -> Iterator[Finding]:
    caches = [] if evidence.memory is None else evidence.memory.caches
    named = ", ".join(f"{name} ({readable_size(size)})" for name, size in caches[:3])
    yield Finding(
        "held by modules",
        evidence.without(lambda phase: phase.of("caches")),
        f"attributes of modules hold {readable_size(evidence.peak.of('caches'))} from step to step that are "
        f"neither parameters nor buffers, and that no layer saves: {named}",
        "let go of what is of no use between steps; keep the rest in fewer bits, or elsewhere",
    )


def _others(evidence: Evidence) -> Iterator[Finding]:
    nbytes = readable_size(evidence.peak.of("others"))
    yield Finding(
        "held by the program",
        evidence.without(lambda phase: phase.of("others")),
        f"{nbytes} outlive steps and are neither of the model nor of an optimizer that was seen: other "
        "models, averages of parameters, masters of another optimizer, tensors of the program",
        "keep models that do not train in fewer bits, or elsewhere; let go of what is of no use in a step",
    )


def _graph_held(evidence: Evidence) -> Iterator[Finding]:
    """Yield what outlives steps grows from step to step.

    States of optimizers, born in the first, do not count.
    """
    later = [step for step in evidence.log.steps[2:] if step.base_bytes is not None]
    bases = [(step.base_bytes or 0) + (step.earlier_outputs_bytes or 0) for step in later]
    states = [step.state_bytes or 0 for step in later]  # LBFGS makes some for many steps
    grown = [after - before - born for (before, after), born in zip(pairwise(bases), states, strict=False)]
    if len(grown) < 2:
        return
    each = int(statistics.median(grown))
    least = WORTH * (evidence.step.activation_peak_bytes or 0)
    if each <= least or sum(size > least for size in grown) < _MOST * len(grown):
        return
    yield Finding(
        "graphs of earlier steps",
        max(bases[-1] - bases[0], 0),
        f"what outlives steps grows by {readable_size(each)} a step, from {readable_size(bases[0])} to "
        f"{readable_size(bases[-1])}: the program keeps graphs, or tensors, of earlier steps",
        "keep no loss and no output of a step with its graph, and no list of outputs: loss.item() or "
        "loss.detach(), no retain_graph=True, torch.no_grad() in evaluations",
        blocks=True,
        is_in_peak=False,
    )


def _working_set(evidence: Evidence) -> Iterator[Finding]:
    """Yield the last resort: half a micro-batch has half the working set."""
    if evidence.memory is None:
        yield Finding(
            "beside the layers",
            evidence.without(lambda phase: phase.of("running") // 2),
            f"{readable_size(evidence.peak.of('running'))} of the peak are none that the offloader knows of: "
            "layers that keep or recompute, logits and loss, what one layer works with",
            "run it again with this version, whose log tells more; or take smaller micro-batches",
        )
        return

    def freed(phase: Phase) -> int:
        return phase.of("running") // 2 if phase.name in {"forward", "backward"} else 0

    yield Finding(
        "working set of a layer",
        evidence.without(freed),
        f"{evidence.where(evidence.peak)} needs {readable_size(evidence.peak.of('running'))} at once, which "
        "no placement makes less",
        "take micro-batches of half the size, and twice as many of them",
    )


_RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    _left_alone,
    _checkpointed,
    _wide_window,
    _refused,
    _stored_in_memory,
    _graph_held,
    _held_elsewhere,
    _kept,
    _small,
    _inputs,
    _huge_layer,
    _loss,
    _not_attached,
    _embeddings,
    _put_out,
    _beside,
    _gradients,
    _states,
    _frozen,
    _update,
    _caches,
    _others,
    _working_set,
)
