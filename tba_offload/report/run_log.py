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

import itertools
import json
import logging
import math
import reprlib
import sys
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

from tba_offload.errors import RunLogError
from tba_offload.reading import UnreadableError, open_regular
from tba_offload.report.log_file import LogFile

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

logger = logging.getLogger(__name__)

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


_LONGEST_WAIT = 64
"""Steps between two attempts at most, while a log cannot be written: a failed one takes microseconds."""


@dataclass(slots=True)
class _Gap:
    """What a log that cannot be written lacks, and when it is tried again.

    Attributes:
        steps: Records of steps that are missing.
        events: Events of other kinds that are missing.
        reason: What the system said.
        interval: Steps between the last attempt and the next.
        wait: Steps until the next.
    """

    reason: str
    steps: int = 0
    events: int = 0
    interval: int = 1
    wait: int = 1

    def is_due(self) -> bool:
        """Whether the next line is worth an attempt; each attempt is followed by a longer pause."""
        if self.wait > 0:
            return False
        self.interval = min(2 * self.interval, _LONGEST_WAIT)
        self.wait = self.interval
        return True

    def miss(self, *, is_step: bool) -> None:
        """Counts a line that was not written."""
        self.steps += is_step
        self.events += not is_step
        self.wait -= is_step

    def line(self) -> bytes:
        """The line that tells of it."""
        said = {"missing_steps": self.steps, "missing_events": self.events, "reason": self.reason}
        return _json_line(GAP, said)


class RunLogWriter:
    """Writes a new run log, line by line.

    Each line reaches the operating system before :meth:`write` returns, so a process that dies loses at most
    the line it was writing. Lines are not forced to the drive: a power cut may take the latest ones.

    Training never ends for its log. If a line cannot be written, as on a full drive or when the directory is
    gone, a warning says so once, and the log is tried again after 1, 2, 4, … and at most 64 steps. Where it
    goes on, a line ``{"event": "gap", "missing_steps": …}`` tells how many steps are missing there.

    Args:
        path: The file to write, readable by its owner only (0600). Its directory has to exist. An empty file
            that exists already is used, and keeps its mode.
        header: Written at once as the first line.

    Raises:
        RunLogError: Its directory does not exist, or the file is not empty, a link, no regular file, another
            process is writing it, or it cannot be opened or written. Or JSON cannot hold the header.
    """

    def __init__(self, path: str | os.PathLike[str], header: RunHeader) -> None:
        self.path = Path(path)
        line = _line(header)  # first, so that a header that cannot be written leaves no file behind
        self._file = LogFile(self.path, line)
        self._gap: _Gap | None = None
        self._has_warned = False

    def write(self, record: StepRecord) -> None:
        """Append the record of one step.

        Raises:
            RunLogError: The log is closed, or a field has the wrong type.
        """
        self._append(_line(record), is_step=True)

    def note(self, event: str, document: Mapping[str, object]) -> None:
        """Append an event of another kind, which readers hand on as it is (:attr:`RunLog.others`).

        Args:
            event: Its kind.
            document: What JSON can hold.

        Raises:
            RunLogError: The log is closed, or JSON cannot hold the document.
        """
        self._append(_json_line(event, document), is_step=False)

    def close(self) -> None:
        """Close the file; once is enough, more does no harm."""
        if self._file.closed:
            return
        try:
            if self._gap is not None:
                self._file.append_again(self._gap.line())
        except OSError as error:
            self._warn(error)
        try:
            self._file.close()
        except OSError as error:
            self._warn(error)

    def _append(self, line: bytes, *, is_step: bool) -> None:
        if self._file.closed:
            raise RunLogError(f"{self.path}: the run log is closed; open a new file to record more steps")
        if self._gap is None:
            self._append_first(line, is_step=is_step)
        elif self._gap.is_due():
            self._append_after(self._gap, line, is_step=is_step)
        else:
            self._gap.miss(is_step=is_step)

    def _append_first(self, line: bytes, *, is_step: bool) -> None:
        try:
            self._file.append(line)
        except OSError as error:
            self._warn(error)
            self._gap = _Gap(error.strerror or str(error))
            self._gap.miss(is_step=is_step)

    def _append_after(self, gap: _Gap, line: bytes, *, is_step: bool) -> None:
        try:
            self._file.append_again(gap.line() + line)
        except OSError:
            gap.miss(is_step=is_step)
        else:
            self._gap = None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the run log cannot be written: %s; training goes on, and the log when it can be written "
                "again: make room there",
                self.path,
                error.strerror or error,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_run_log(path: str | os.PathLike[str]) -> RunLog:
    """Read a run log, also one whose run crashed or is still going on.

    A line that is damaged is skipped and named in :attr:`RunLog.complaints`. A last line without its line end
    is left out if it is not whole.

    Raises:
        RunLogError: The file cannot be read, is no regular file or too large, is no run log, has another
            schema, or is two; the message names file and line.
    """
    return _Reader(Path(path)).read()


# Writing


def _line(event: RunHeader | StepRecord) -> bytes:
    """One event as a line of JSON, which is pure ASCII."""
    kinds = _KINDS[event.EVENT]
    document = {name: _checked(name, getattr(event, name), kind) for name, kind in kinds.items()}
    taken = sorted(event.extra.keys() & (document.keys() | {"event"}))
    if taken:
        raise RunLogError(f"extra may not hold {', '.join(taken)}: the run log has such a key of its own")
    return _json_line(event.EVENT, {**document, **event.extra})


def _json_line(event: str, document: Mapping[str, object]) -> bytes:
    document = {"event": event, **document}
    try:
        try:
            text = json.dumps(document, allow_nan=False)
        except ValueError:  # rarely: walking through a long event takes longer than writing it
            text = json.dumps(_plain(document), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunLogError(f"the {event} event holds a value that JSON cannot: {error}") from error
    return text.encode("ascii") + b"\n"


def _plain(value: object) -> object:
    """The value with the floats that JSON lacks spelt as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return float.__repr__(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


# Reading

_Event = TypeVar("_Event", RunHeader, StepRecord)

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


MOST_BYTES = 2**29
"""Bytes of the largest run log that is read: several hundred thousand steps."""

MOST_LINES = 2**20
"""Lines of the longest run log that is read; an event takes some hundred bytes of memory at least."""

LONGEST_LINE = 2**24
"""Bytes of the longest line that is read: a plan event of several hundred thousand scopes."""

MOST_VALUES = 2**23
"""Values of all lines that are kept, those that a step must have left out; each takes some 70 bytes."""

DEEPEST = 64
"""Levels of lists and objects in a line."""

_MOST_COMPLAINTS = 10
"""Damaged lines that are named one by one; a file that is no log has thousands."""

_GREATEST = 2**63
"""Bound of every whole number in a log: bytes, tokens, counts."""


class _Reader:
    """Reads one file, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: RunHeader | None = None
        self._steps: list[StepRecord] = []
        self._others: list[Json] = []
        self._complaints: list[str] = []
        self._skipped = 0
        self._truncated = False
        self._values = 0

    def read(self) -> RunLog:
        try:
            with open_regular(self._path, MOST_BYTES) as file:
                self._read(file)
        except (UnreadableError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunLogError(f"{self._path}: the run log cannot be read: {reason}") from error
        if self._header is None:
            raise RunLogError(
                f"{self._path}: no run log, because it has no complete line; was the run stopped at its "
                "start?"
            )
        return RunLog(
            header=self._header,
            steps=tuple(self._steps),
            path=self._path,
            truncated=self._truncated,
            others=tuple(self._others),
            bad_lines=tuple(self._complaints),
            skipped=self._skipped,
        )

    def _read(self, file: BinaryIO) -> None:
        for number in itertools.count(1):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            is_long = len(line) > LONGEST_LINE
            if is_long and self._header is not None:
                _skip_line(file)
            if number > MOST_LINES or file.tell() > MOST_BYTES or (is_long and self._header is None):
                raise RunLogError(f"{self._path}:{number}: too long to be a run log; is it the right file?")
            if is_long:
                self._complain(number, f"longer than {LONGEST_LINE} bytes")
            elif not line.endswith(b"\n") and not _is_whole(line):
                self._truncated = True
            elif line.strip():
                self._take(number, line)

    def _take(self, number: int, line: bytes) -> None:
        try:
            values = self._values_with(line)
            event = _event(line)
            if self._header is not None and event["event"] != RunHeader.EVENT:
                self._add(event)
                self._values = values
                return
        except RunLogError as error:
            if self._header is None:
                raise RunLogError(f"{self._path}:{number}: {error}") from None
            self._complain(number, str(error))
            return
        self._header = self._first(number, event)

    def _values_with(self, line: bytes) -> int:
        """At least the values that are kept if a line is, told before any memory is taken for them.

        Raises:
            RunLogError: They would be too many.
        """
        of_a_step = len(_KINDS[StepRecord.EVENT]) + 1
        values = self._values + max(sum(map(line.count, (b",", b"[", b"{"))) - of_a_step, 0)
        if values > MOST_VALUES:
            raise RunLogError(f"with what came before it, it holds more than {MOST_VALUES} values")
        return values

    def _add(self, event: Json) -> None:
        """Takes an event after the header.

        Raises:
            RunLogError: It is not what its kind says.
        """
        if event["event"] == StepRecord.EVENT:
            self._steps.append(_possible(_decoded(StepRecord, event)))
            return
        if event["event"] == PLAN:
            from tba_offload.report.plan_event import checked_plan

            checked_plan(event)
        elif event["event"] == MEMORY:
            from tba_offload.report.memory_event import checked_memory

            checked_memory(event)
        elif event["event"] == TIMELINE:
            from tba_offload.report.timeline_event import checked_timeline

            checked_timeline(event)
        self._others.append(event)

    def _first(self, number: int, event: Json) -> RunHeader:
        where = f"{self._path}:{number}"
        if self._header is not None:
            raise RunLogError(f"{where}: a second header: two run logs in one file; split it here")
        if event["event"] != RunHeader.EVENT or "schema" not in event:
            raise RunLogError(f'{where}: no run log, which starts with {{"event": "run", "schema": …}}')
        schema = event["schema"]
        if schema != SCHEMA:
            raise RunLogError(
                f"{self._path}: written with schema {reprlib.repr(schema)} of the run log, and this version "
                f"of tba-offload reads schema {SCHEMA}; read it with the version that wrote it"
            )
        try:
            return _decoded(RunHeader, event)
        except RunLogError as error:
            raise RunLogError(f"{where}: {error}") from None

    def _complain(self, number: int, reason: str) -> None:
        self._skipped += 1
        if self._skipped <= _MOST_COMPLAINTS:
            self._complaints.append(f"{self._path}:{number}: {reason}")


def _skip_line(file: BinaryIO) -> None:
    """Reads to the end of a line without keeping it, or beyond the most that is read."""
    while file.tell() <= MOST_BYTES and (part := file.readline(LONGEST_LINE)) and not part.endswith(b"\n"):
        pass


def _is_whole(tail: bytes) -> bool:
    """Whether what follows the last line end is complete: nothing, or JSON to its closing brace."""
    try:
        return not tail.strip() or json.loads(tail.decode()) is not None
    except (ValueError, RecursionError):
        return False


def _event(line: bytes) -> Json:
    try:
        event = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise RunLogError(f"not a line of a run log: {error}") from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise RunLogError('not a line of a run log: no JSON object with an "event"')
    if _is_deep(event):
        raise RunLogError(f"not a line of a run log: nested in more than {DEEPEST} levels")
    return event


def _is_deep(value: object) -> bool:
    """Whether there are more levels than what walks through them later can take."""
    level = [value]
    for _ in range(DEEPEST):
        level = [item for each in level for item in _items(each)]
        if not level:
            return False
    return True


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _decoded(cls: type[_Event], event: Json) -> _Event:
    kinds = _KINDS[cls.EVENT]
    known = {name: _read_value(name, event[name], kind) for name, kind in kinds.items() if name in event}
    required = [item.name for item in fields(cls) if item.default is item.default_factory is MISSING]
    missing = [name for name in required if name not in known]
    if missing:
        raise RunLogError(f"the {cls.EVENT} event lacks {', '.join(missing)}")
    extra = {name: value for name, value in event.items() if name not in kinds and name != "event"}
    values: dict[str, Any] = known | {"extra": extra}
    return cls(**values)


_MEASURED = (
    "seconds",
    "optimizer_seconds",
    "forward_seconds",
    "backward_seconds",
    "stall_seconds",
    "weights_waited_seconds",
)
"""The times of a step that clocks told, so that they are times, however odd the step."""


def _possible(record: StepRecord) -> StepRecord:
    """The record, if its number and its times can be those of a step."""
    if record.step < 0:
        raise RunLogError(f'"step" must be at least 0, and is {record.step}')
    for name in _MEASURED:
        seconds = getattr(record, name)
        if seconds is not None and not 0 <= seconds < math.inf:
            raise RunLogError(f'"{name}" must be finite and at least 0, and is {seconds}')
    return record


def _read_value(name: str, value: object, kinds: tuple[type, ...]) -> object:
    if float not in kinds and isinstance(value, int) and abs(value) >= _GREATEST:
        raise RunLogError(f'"{name}" must be less than 2**63, and is {reprlib.repr(value)}')
    return _checked(name, value, kinds)


# The types of the fields, read from the annotations, so that writing and reading check the same


def _kinds(cls: type[RunHeader | StepRecord]) -> dict[str, tuple[type, ...]]:
    """The types that the value of each field may have, ``extra`` left out."""
    hints = get_type_hints(cls)
    return {item.name: _accepted(hints[item.name]) for item in fields(cls) if item.name != "extra"}


def _accepted(hint: object) -> tuple[type, ...]:
    if isinstance(hint, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _accepted(part))
    kind = get_origin(hint) or hint
    return (kind,) if isinstance(kind, type) else ()


def _checked(name: str, value: object, kinds: tuple[type, ...]) -> object:
    """The value, as a float where the field is one; RunLogError where the type does not fit."""
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


_KINDS = {cls.EVENT: _kinds(cls) for cls in (RunHeader, StepRecord)}
