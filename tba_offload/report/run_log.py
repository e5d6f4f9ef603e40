r"""The run log: JSON lines, one header and then one record for every step.

::

    {"event": "run", "schema": 1, "started": "2025-01-01T00:00:00+00:00", "strategy": "offload", ...}
    {"event": "step", "step": 0, "seconds": 1.25, "loss": 10.4, ...}
    {"event": "step", "step": 1, "seconds": 1.12, "loss": 10.1, ...}
    {"event": "plan", "step": 1, "profile": {...}, "drive": {...}, "layers": {...}, ...}
    {"event": "memory", "step": 1, "phases": {...}, "layers": [...], "static": {...}, ...}
    {"event": "timeline", "step": 3, "scopes": [...], "stalls": [...], "points": [...], ...}
    {"event": "gap", "missing_steps": 12, "missing_events": 0, "reason": "No space left on device"}

A finite float survives bit for bit: JSON gets its shortest exact decimal form. JSON has no word for the
other floats, so they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``; reading turns them back
into floats wherever a field is a float. Sign and payload of a NaN are not kept. Inside the free-form
dictionaries of the header they stay strings.

Within schema 1 fields and events may be added: a reader keeps those that it does not know aside, in ``extra``
and in :attr:`RunLog.others`. Any other schema number is refused.
"""

from __future__ import annotations

import math
import reprlib
import sys
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from types import NoneType, UnionType
from typing import TYPE_CHECKING, ClassVar, get_args, get_origin, get_type_hints

from tba_offload.errors import RunLogError

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 1

PLAN = "plan"
"""The event that holds a new plan and what it was made from."""

MEMORY = "memory"
"""The event that tells where in a step memory was at its peak, and what held it."""

TIMELINE = "timeline"
"""The event that tells of one step over time."""

GAP = "gap"
"""The event that stands where steps are missing because the log could not be written."""

Json = dict[str, object]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What was the same for every step of a run.

    Attributes:
        strategy: A free label, such as ``"offload"``. Runs with equal labels form one line of a ROK curve.
        schema: Number of the log's schema.
        run: The same word in the logs of all ranks of one run; None where there is only one.
        rank: The rank that this log is of.
        ranks: How many ranks the run has, each with a log of its own.
        started: When the run started, ISO 8601 in UTC.
        versions: Package name to version.
        hardware: The machine, free form.
        model: The model, free form: for example name, layers, hidden, batch_size, sequence. ``batch_size``
            (sequences a step) is what orders the points of a ROK curve.
        policy: The policy as YAML, None where there was none.
        plan: Name of a layer to its number, its placement, and why; of all ranks.
        store: The store: kind, the I/O path that each directory really used, alignment, and so on.
        extra: Keys that this version does not know; written back as they were read.
    """

    EVENT: ClassVar[str] = "run"

    strategy: str
    schema: int = SCHEMA
    run: str | None = None
    rank: int = 0
    ranks: int = 1
    started: str = field(default_factory=_now)
    versions: Json = field(default_factory=dict)
    hardware: Json = field(default_factory=dict)
    model: Json = field(default_factory=dict)
    policy: str | None = None
    plan: Json = field(default_factory=dict)
    store: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step did and cost: times in seconds, amounts of memory and of transfers in bytes.

    None always means *not measured* or *not known*, never zero.

    Attributes:
        step: Number of the step within the session, from 1.
        seconds: Wall-clock time of the whole ``with session.step()`` block, or from the first forward to the
            end of the last backward of a step that opened by itself, without optimizers. On a GPU, which
            works later than the host, it is by the GPU's clock where there is a run log or a layer is placed
            ``auto``, unless an optimizer worked within; else it is the host's, which is how long the work
            took only if the block ends with something that waits for the device, as ``loss.item()`` does.
        optimizer_seconds: Wall-clock time of the steps that optimizers made in it, and between the last step
            and this one where the program tells what a step is and updates after it. None if there was none.
            On a GPU it is how long the host was held up, to launch the work or to wait for it.
        skipped: Whether its gradients were dropped without an update, as a gradient scaler does after an
            overflow. Nothing is planned from such a step, unless its device tells so only later.
        forward_seconds: Time spent in forward passes; None on a GPU.
        backward_seconds: Time spent in backward passes; None on a GPU.
        stall_seconds: Time that the training thread waited for I/O of activations; a GPU may have had work
            meanwhile.
        tokens: Tokens trained on.
        model_flops: Algorithmic floating point operations of the step; recomputation is not counted.
        loss: The loss, exactly as the caller gave it; may be NaN or infinite. None until the device has come
            to it, if it was given as a tensor.
        activation_peak_bytes: Peak device memory minus the base, read from the allocator, without gradients
            and optimizer states that were allocated in the step. A gradient counts as an activation while it
            is computed, until autograd has put it in place.
        gradient_bytes: Bytes of gradients that were allocated in the step.
        gradient_peak_bytes: Most bytes of gradients at one time in the step, whenever they were allocated,
            and of frozen weights that are offloaded.
        state_bytes: By how much optimizers let memory grow in the step, in bytes: their states, made in the
            first one.
        peak_source: How ``activation_peak_bytes`` was measured, such as ``"cuda allocator"``.
        base_bytes: Bytes that were live in the allocator when the step began, gradients and outputs of
            earlier steps left out: parameters, states of optimizers, and whatever else outlives steps. On a
            CPU all of the process count.
        earlier_outputs_bytes: Bytes of outputs of the model of earlier steps that the program held when the
            step began, as where it is written ``outputs = model(...)``; they are part of the activation peak.
        reserved_peak_bytes: Most memory that the allocator of a GPU had taken from it: of the whole process,
            with what it holds ready for later. None on a CPU.
        device_peak_bytes: Most bytes that were live in the allocator while forward and backward ran: of all
            that there is, on a CPU of the whole process.
        activation_budget_bytes: Most bytes of the activation peak that the step was allowed: the smaller of
            ``budget.activation_bytes`` and what ``budget.device_bytes`` leaves, of which gradients may take
            their part as they come; None without a budget.
        own_peak_bytes: Peak of the resident activations of captured layers by our own ledger. Layers that
            are placed keep or recompute run without hooks, and nothing is known of them.
        resident_peak_bytes: Peak resident set of the process as the operating system counts it (VmHWM).
        gradients_allocated: Whether all gradients existed when the base was read.
        offloaded_bytes: Bytes written to the store.
        read_bytes: Bytes read back from the store.
        reread_bytes: Bytes read again because a read of them failed.
        rescued_bytes: Bytes that a drive did not give back, made again by repeating the forward of a layer.
        host_offloaded_bytes: Those of the bytes written that went to host memory beside the drives.
        host_read_bytes: Those of the bytes read that came from there.
        forwarded_bytes: Bytes handed to backward from memory, without a read, because they were still there.
        deduplicated_bytes: Bytes not written because the same storage was offloaded already.
        rebuilt_bytes: Bytes neither kept nor written, because backward computed them anew.
        kept_bytes: Bytes that captured layers kept because they are small, not understood, or held elsewhere.
        recomputed_scopes: Scopes that were recomputed in backward.
        scopes: Scopes that ran: one for each layer, micro-batch and model chunk.
        in_flight_peak_bytes: Most bytes in flight at one time: packed and not yet freed, plus read ahead and
            not yet used.
        given_up_bytes: Prefetches given up, to be read on demand instead.
        held_bytes: Bytes offloaded in vain, because something else kept their storage alive.
        fallback_kept_bytes: Bytes kept although the plan said offload: store full, drive failed or too slow.
        checksum_seconds: Processor time of I/O threads for checksums of what drives were given and gave back,
            in the step and since the last one; none where a GPU computes them.
        drives_out_of_service: Drives that take no writes at the end of the step: a write to them failed, or
            found no room.
        weights_read_bytes: Bytes of frozen weights that were read in the step; None where the session has
            none offloaded.
        weights_waited_seconds: Time that the training thread waited for them, no part of ``stall_seconds``;
            likewise.
        left_alone_scopes: Executions of layers inside saved-tensor hooks of other code, not captured.
        planning_seconds: How long training waited for the planner before the step; None if there is none.
        predicted_peak_bytes: What the plan predicted for the activation peak; None before there is a plan.
        predicted_seconds: What the plan predicted for ``seconds``; None before there is a plan.
        predicted_device_peak_bytes: What was predicted for ``device_peak_bytes``: what lies there beside
            activations, and what the plan predicted, less what the peaks of gradients and activations were
            apart in the step before; None without ``budget.device_bytes``.
        extra: Keys that this version does not know; written back as they were read.
    """

    EVENT: ClassVar[str] = "step"

    step: int
    seconds: float
    optimizer_seconds: float | None = None
    skipped: bool = False
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    stall_seconds: float | None = None
    tokens: int | None = None
    model_flops: float | None = None
    loss: float | None = None
    activation_peak_bytes: int | None = None
    gradient_bytes: int | None = None
    gradient_peak_bytes: int | None = None
    state_bytes: int | None = None
    peak_source: str | None = None
    base_bytes: int | None = None
    earlier_outputs_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    activation_budget_bytes: int | None = None
    own_peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    gradients_allocated: bool = False
    offloaded_bytes: int = 0
    read_bytes: int = 0
    reread_bytes: int = 0
    rescued_bytes: int = 0
    host_offloaded_bytes: int = 0
    host_read_bytes: int = 0
    forwarded_bytes: int = 0
    deduplicated_bytes: int = 0
    rebuilt_bytes: int = 0
    kept_bytes: int = 0
    recomputed_scopes: int = 0
    scopes: int = 0
    in_flight_peak_bytes: int = 0
    given_up_bytes: int = 0
    held_bytes: int = 0
    fallback_kept_bytes: int = 0
    checksum_seconds: float | None = None
    drives_out_of_service: int = 0
    weights_read_bytes: int | None = None
    weights_waited_seconds: float | None = None
    left_alone_scopes: int = 0
    planning_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_device_peak_bytes: int | None = None
    extra: Json = field(default_factory=dict)

    @property
    def seconds_with_update(self) -> float:
        """``seconds`` and ``optimizer_seconds`` together."""
        return self.seconds + (self.optimizer_seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """A run log that was read.

    Attributes:
        header: What was the same for every step.
        steps: The steps, in the order of the file.
        path: The file.
        truncated: Whether the last line was cut off, as by a crash; it is left out.
        others: Events of kinds that this version does not know, in the order of the file.
        bad_lines: Of the first lines that are damaged, what is wrong with each, with file and line.
        skipped: How many lines are damaged; they were left out.
    """

    header: RunHeader
    steps: tuple[StepRecord, ...]
    path: Path
    truncated: bool = False
    others: tuple[Json, ...] = ()
    bad_lines: tuple[str, ...] = ()
    skipped: int = 0

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is wrong with the file in sentences, the number of lines that were left out last."""
        if not self.skipped:
            return ()
        lines = "a line was" if self.skipped == 1 else f"{self.skipped} lines were"
        return (*self.bad_lines, f"{self.path}: {lines} damaged and left out")


# The types of the fields, read from the annotations, so that writing and reading check the same

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _kinds(cls: type[RunHeader | StepRecord]) -> dict[str, tuple[type, ...]]:
    """Return the types that the value of each field may have, ``extra`` left out."""
    hints = get_type_hints(cls)
    return {item.name: _accepted(hints[item.name]) for item in fields(cls) if item.name != "extra"}


def _accepted(hint: object) -> tuple[type, ...]:
    if isinstance(hint, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _accepted(part))
    kind = get_origin(hint) or hint
    return (kind,) if isinstance(kind, type) else ()


def checked(name: str, value: object, kinds: tuple[type, ...]) -> object:
    """Return the value of a field, as a float where that is one.

    Raises:
        RunLogError: It is of none of the kinds.
    """
    is_bool = isinstance(value, bool)  # a bool is an int to Python, not to a log
    if isinstance(value, kinds) and (bool in kinds or not is_bool):
        return value
    if float in kinds:
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if isinstance(value, int) and not is_bool and abs(value) <= sys.float_info.max:
            return float(value)
    legal = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
    raise RunLogError(f'"{name}" must be {legal}, and is {reprlib.repr(value)}')


KINDS = {cls.EVENT: _kinds(cls) for cls in (RunHeader, StepRecord)}
"""Event: the types that each of its fields may have."""
