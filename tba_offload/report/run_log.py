r"""The run log: JSON lines, one header and then one record for every step.

::

    {"event": "run", "schema": 1, "started": "2025-01-01T00:00:00+00:00", "strategy": "offload", ...}
    {"event": "step", "step": 0, "seconds": 1.25, "loss": 10.4, ...}
    {"event": "step", "step": 1, "seconds": 1.12, "loss": 10.1, ...}
    {"event": "plan", "step": 1, "profile": {...}, "drive": {...}, "layers": {...}, ...}

A finite float survives bit for bit: JSON gets its shortest exact decimal form. JSON has no word for the
other floats, so they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``; reading turns them back
into floats wherever a field is a float. Sign and payload of a NaN are not kept. Inside the free-form
dictionaries of the header they stay strings.

Within schema 1 fields and events may be added: a reader keeps those that it does not know aside, in ``extra``
and in :attr:`RunLog.others`. Any other schema number is refused.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import reprlib
import sys
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

from tba_offload.errors import RunLogError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCHEMA = 1

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
        notes: Whatever else belongs to the run.
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
    notes: Json = field(default_factory=dict)
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step did and cost: times in seconds, amounts of memory and of transfers in bytes.

    None always means *not measured* or *not known*, never zero.

    Attributes:
        step: Number of the step within the session, from 1.
        seconds: Wall-clock time of the whole ``with session.step()`` block, or from the first forward to the
            end of the last backward of a step that opened by itself, without optimizers, by the host's clock.
            On a GPU, which runs behind the host, that is how long the work took only if the block ends with
            something that waits for the device, as ``loss.item()`` does.
        optimizer_seconds: Wall-clock time of the steps of the optimizers, as far as they were in the step.
        skipped: Whether its gradients were dropped without an update, as a gradient scaler does after an
            overflow. Nothing is planned from such a step.
        forward_seconds: Time spent in forward passes; None on a GPU.
        backward_seconds: Time spent in backward passes; None on a GPU.
        stall_seconds: Time that the training thread waited for I/O; a GPU may have had work meanwhile.
        tokens: Tokens trained on.
        model_flops: Algorithmic floating point operations of the step; recomputation is not counted.
        loss: The loss, exactly as the caller gave it; may be NaN or infinite.
        activation_peak_bytes: Peak device memory minus the base, read from the allocator, without gradients
            and optimizer states that were allocated in the step. A gradient counts as an activation while it
            is computed, until autograd has put it in place.
        gradient_bytes: Bytes of gradients that were allocated in the step.
        state_bytes: By how much optimizers let memory grow in the step, in bytes: their states, made in the
            first one.
        peak_source: How ``activation_peak_bytes`` was measured, such as ``"cuda allocator"``.
        own_peak_bytes: Peak of the resident activations of captured layers by our own books. Layers that
            are placed keep or recompute run without hooks, and nothing is known of them.
        resident_peak_bytes: Peak resident set of the process as the operating system counts it (VmHWM).
        gradients_allocated: Whether all gradients existed when the base was read.
        offloaded_bytes: Bytes written to the store.
        read_bytes: Bytes read back from the store.
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
        fallback_kept_bytes: Bytes kept although the plan said offload: store full or drive too slow.
        left_alone_scopes: Executions of layers inside somebody else's saved-tensor hooks, not captured.
        predicted_peak_bytes: What the plan predicted for the activation peak; None before there is a plan.
        predicted_seconds: What the plan predicted for ``seconds``; None before there is a plan.
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
    state_bytes: int | None = None
    peak_source: str | None = None
    own_peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    gradients_allocated: bool = False
    offloaded_bytes: int = 0
    read_bytes: int = 0
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
    left_alone_scopes: int = 0
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """A run log that was read.

    Attributes:
        header: What was the same for every step.
        steps: The steps, in the order of the file.
        path: The file.
        truncated: Whether the last line was cut off, as by a crash; it is left out.
        others: Events of kinds that this version does not know, in the order of the file.
    """

    header: RunHeader
    steps: tuple[StepRecord, ...]
    path: Path
    truncated: bool = False
    others: tuple[Json, ...] = ()


class RunLogWriter:
    """Writes a new run log, line by line.

    Each line reaches the operating system before :meth:`write` returns, so a process that dies loses at most
    the line it was writing. Lines are not forced to the drive: a power cut may take the latest ones.

    Args:
        path: The file to write, readable by its owner only (0600). Missing parent directories are created.
            An empty file that exists already is used, and keeps its mode.
        header: Written at once as the first line.

    Raises:
        RunLogError: The file is not empty, another process is writing it, it cannot be opened or written, or
            the header holds a value that JSON cannot.
    """

    def __init__(self, path: str | os.PathLike[str], header: RunHeader) -> None:
        self.path = Path(path)
        line = _line(header)  # first, so that a header that cannot be written leaves no file behind
        self._file = _open_new(self.path)
        self._append(line)

    def write(self, record: StepRecord) -> None:
        """Append the record of one step.

        Raises:
            RunLogError: The log is closed, a field has the wrong type, or the line could not be written.
                In the last case the log is closed, so that a line cut short stays the last one and the file
                can still be read.
        """
        if self._file.closed:
            raise RunLogError(f"{self.path}: the run log is closed; open a new file to record more steps")
        self._append(_line(record))

    def note(self, event: str, document: Mapping[str, object]) -> None:
        """Append an event of another kind, which readers hand on as it is (:attr:`RunLog.others`).

        Args:
            event: Its kind.
            document: What JSON can hold.

        Raises:
            RunLogError: As :meth:`write` does.
        """
        if self._file.closed:
            raise RunLogError(f"{self.path}: the run log is closed; open a new file to record more")
        self._append(_json_line(event, document))

    def close(self) -> None:
        """Close the file; once is enough, more does no harm."""
        self._file.close()

    def _append(self, line: bytes) -> None:
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self.close()
            reason = error.strerror or error
            raise RunLogError(f"{self.path}: the run log cannot be written: {reason}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_run_log(path: str | os.PathLike[str]) -> RunLog:
    """Read a run log, also one whose run crashed or is still going on.

    A last line without its line end is left out if it is not whole.

    Raises:
        RunLogError: The file cannot be read, is no run log, has another schema, or a line is corrupt (other
            than by being cut off at the end of the file); the message names file and line.
    """
    path = Path(path)
    *lines, tail = _contents(path).split(b"\n")
    truncated = not _is_whole(tail)
    if not truncated:
        lines.append(tail)
    events = [(number, _event(line, path, number)) for number, line in enumerate(lines, 1) if line.strip()]
    if not events:
        raise RunLogError(
            f"{path}: no run log, because it has no complete line; was the run stopped at its start?"
        )
    header = _header(*events[0], path)
    steps, others = _steps(events[1:], path)
    return RunLog(header=header, steps=steps, path=path, truncated=truncated, others=others)


# Writing


def _open_new(path: Path) -> io.FileIO:
    """Open a file that is ours alone, at its (empty) end and without a buffer."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError as error:
        raise RunLogError(f"{path}: the run log cannot be opened: {error.strerror or error}") from error
    try:
        _claim(file, path)
    except RunLogError:
        file.close()
        raise
    return file


def _claim(file: io.FileIO, path: Path) -> None:
    # Without the lock, two ranks that were given one path could both find the file empty.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunLogError(
            f"{path}: another process is writing this run log; give each its own path"
        ) from error
    except OSError:
        pass  # a file system without locks: the check for an empty file has to do
    if os.fstat(file.fileno()).st_size > 0:
        raise RunLogError(f"{path}: not empty, and run logs are never overwritten; choose another path")


def _line(event: RunHeader | StepRecord) -> bytes:
    """One event as a line of JSON, which is pure ASCII."""
    kinds = _KINDS[event.EVENT]
    document = {name: _checked(name, getattr(event, name), kind) for name, kind in kinds.items()}
    taken = sorted(event.extra.keys() & (document.keys() | {"event"}))
    if taken:
        raise RunLogError(f"extra may not hold {', '.join(taken)}: the run log has such a key of its own")
    return _json_line(event.EVENT, {**document, **event.extra})


def _json_line(event: str, document: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(_plain({"event": event, **document}), allow_nan=False)
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

_Kinds = dict[str, tuple[type, ...]]

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunLogError(f"{path}: the run log cannot be read: {error.strerror or error}") from error


def _is_whole(tail: bytes) -> bool:
    """Whether what follows the last line end is complete: nothing, or JSON to its closing brace."""
    try:
        return not tail.strip() or json.loads(tail.decode()) is not None
    except (ValueError, RecursionError):
        return False


def _event(line: bytes, path: Path, number: int) -> Json:
    try:
        event = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise RunLogError(f"{path}:{number}: not a line of a run log: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise RunLogError(f'{path}:{number}: not a line of a run log: no JSON object with an "event"')
    return event


def _header(number: int, event: Json, path: Path) -> RunHeader:
    if event["event"] != RunHeader.EVENT or "schema" not in event:
        raise RunLogError(f'{path}:{number}: no run log, which starts with {{"event": "run", "schema": …}}')
    schema = event["schema"]
    if schema != SCHEMA:
        raise RunLogError(
            f"{path}: written with schema {schema!r} of the run log, and this version of tba-offload reads "
            f"schema {SCHEMA}; read it with the version that wrote it"
        )
    return _decoded(RunHeader, event, path, number)


def _steps(events: Iterable[tuple[int, Json]], path: Path) -> tuple[tuple[StepRecord, ...], tuple[Json, ...]]:
    steps: list[StepRecord] = []
    others: list[Json] = []
    for number, event in events:
        if event["event"] == StepRecord.EVENT:
            steps.append(_decoded(StepRecord, event, path, number))
        elif event["event"] == RunHeader.EVENT:
            raise RunLogError(f"{path}:{number}: a second header: two run logs in one file; split it here")
        else:
            others.append(event)
    return tuple(steps), tuple(others)


def _decoded(cls: type[_Event], event: Json, path: Path, number: int) -> _Event:
    kinds = _KINDS[cls.EVENT]
    try:
        known = _known(cls, event, kinds)
    except RunLogError as error:
        raise RunLogError(f"{path}:{number}: {error}") from None
    extra = {name: value for name, value in event.items() if name not in kinds and name != "event"}
    return cls(**known, extra=extra)


def _known(cls: type[_Event], event: Json, kinds: _Kinds) -> dict[str, Any]:
    known = {name: _checked(name, event[name], kind) for name, kind in kinds.items() if name in event}
    required = [item.name for item in fields(cls) if item.default is item.default_factory is MISSING]
    missing = [name for name in required if name not in known]
    if missing:
        raise RunLogError(f"the {cls.EVENT} event lacks {', '.join(missing)}")
    return known


# The types of the fields, read from the annotations, so that writing and reading check the same


def _kinds(cls: type[RunHeader | StepRecord]) -> _Kinds:
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
