"""The run log: its records, reading, writing, and the one rule of which steps count for figures.

A run log is JSON lines, one header and then one record for every step::

    {"event": "run", "schema": 1, "started": "2025-01-01T00:00:00+00:00", "strategy": "offload", ...}
    {"event": "step", "step": 1, "seconds": 1.25, "loss": 10.4, ...}
    {"event": "step", "step": 2, "seconds": 1.12, "loss": 10.1, ...}
    {"event": "plan", "step": 2, "profile": {...}, "drive": {...}, "layers": {...}, ...}
    {"event": "memory", "step": 3, "phases": {...}, "layers": [...], "static": {...}, ...}
    {"event": "timeline", "step": 3, "scopes": [...], "stalls": [...], "points": [...], ...}

A finite float survives bit for bit: JSON gets its shortest exact decimal form. JSON has no word for other
floats, so they are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``. Reading turns these back into
floats wherever a field is a float.

Within schema 1 fields and events may be added. A reader keeps unknown ones aside, in ``extra`` and in
:attr:`RunLog.others`. Any other schema number is refused. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import shlex
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from tba_offload.errors import RunLogError
from tba_offload.formatting import readable_size, significant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

SCHEMA = 1

PLAN, MEMORY, TIMELINE = "plan", "memory", "timeline"
"""Events: a new plan; where in a step memory was at its peak, and what held it; one step over time."""

Json = dict[str, object]
Bytes = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


# Records


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
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
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
            overflow. Nothing is planned from such a step.
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
        sampled_peak_bytes: The highest sample, where samples were too thin to be taken for the peak, as they
            may be on a busy CPU; then ``activation_peak_bytes`` and ``device_peak_bytes`` are None.
        peak_samples: Samples of the peak on a CPU; None where the allocator keeps the peak itself.
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
        offloaded_bytes: Bytes written to the store.
        read_bytes: Bytes read back from the store.
        reread_bytes: Bytes read again because a read of them failed.
        forwarded_bytes: Bytes handed to backward from memory, without a read, because they were still there.
        deduplicated_bytes: Bytes not written because the same storage was offloaded already.
        rebuilt_bytes: Bytes neither kept nor written, because backward computed them anew.
        kept_bytes: Bytes that captured layers kept because they are small, not understood, or held elsewhere.
        recomputed_scopes: Scopes that were recomputed in backward.
        scopes: Scopes that ran: one for each layer, micro-batch and model chunk.
        in_flight_peak_bytes: Most bytes in flight at one time: packed and not yet freed, plus read ahead and
            not yet used.
        given_up_bytes: Prefetches given up, to be read on demand instead.
        held_bytes: Bytes written although something else kept the storage in memory until backward.
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
    sampled_peak_bytes: int | None = None
    peak_samples: int | None = None
    peak_source: str | None = None
    base_bytes: int | None = None
    earlier_outputs_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    activation_budget_bytes: int | None = None
    own_peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    offloaded_bytes: int = 0
    read_bytes: int = 0
    reread_bytes: int = 0
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
        others: Events of other kinds, as they were read, in the order of the file.
    """

    header: RunHeader
    steps: tuple[StepRecord, ...]
    path: Path
    truncated: bool = False
    others: tuple[Json, ...] = ()

    def events(self, model: type[AnyEvent]) -> list[AnyEvent]:
        """Return the events of one kind with their types.

        Args:
            model: The class of these events, such as :class:`PlanEvent`.

        Raises:
            RunLogError: A part of an event is missing or has another type.
        """
        found = [event for event in self.others if event["event"] == model.EVENT]
        try:
            return [read_event(model, event) for event in found]
        except RunLogError as error:
            raise RunLogError(f"{self.path}: {error}") from None


# Which steps count for figures. In every command and picture a peak is the largest of `counted_steps(log)`.
# A time is the median of `timed_steps(counted_steps(log))`.


def warm_up_steps(total: int) -> int:
    """Return how many steps at the start of a run of ``total`` steps count for no figure.

    Three of more than six, one of two to six, none of one: the first step allocates, the next settle.
    """
    return 3 if total > 6 else int(total > 1)


def counted_steps(log: RunLog, warm_up: int | None = None) -> list[StepRecord]:
    """Return the steps of a run that count for figures: after warm-up, and with an update.

    Args:
        log: The run.
        warm_up: Steps to leave out at the start. Default: :func:`warm_up_steps`.
    """
    late = log.steps[warm_up_steps(len(log.steps)) if warm_up is None else warm_up :]
    return [step for step in late if not step.skipped]


def timed_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps whose times count: without those that measured memory, if others are left."""
    return [step for step in steps if step.peak_source is None] or list(steps)


# Reading


def read_run_log(path: str | os.PathLike[str]) -> RunLog:
    """Read a run log, also one whose run crashed or is still going on.

    A last line without its end is left out.

    Raises:
        RunLogError: The file cannot be read, is no run log, has another schema or a damaged line, or is two.
            The message names file and line.
    """
    path = Path(path)
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise RunLogError(f"{path}: the run log cannot be read: {reason}") from error
    found: list[RunHeader | StepRecord | Json] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(_parsed(line))
        except RunLogError as error:
            raise RunLogError(f"{path}:{number}: {error}") from None
    if not found:
        raise RunLogError(f"{path}: no run log, for want of a whole line; was the run stopped at its start?")
    header, *others = found
    if not isinstance(header, RunHeader):
        raise RunLogError(f'{path}: no run log, which starts with {{"event": "run", "schema": …}}')
    if any(isinstance(each, RunHeader) for each in others):
        raise RunLogError(f"{path}: a second header: two run logs in one file; split it there")
    return RunLog(
        header=header,
        steps=tuple(each for each in others if isinstance(each, StepRecord)),
        path=path,
        truncated=bool(last.strip()),
        others=tuple(each for each in others if isinstance(each, dict)),
    )


def _parsed(line: bytes) -> RunHeader | StepRecord | Json:
    try:
        event: Any = json.loads(line)
    except ValueError:
        raise RunLogError("not a line of a run log: it is no JSON; remove the line") from None
    if not isinstance(event, dict) or not isinstance(kind := event.get("event"), str):
        raise RunLogError('not a line of a run log: it names no "event"; remove the line')
    if kind == RunHeader.EVENT and event.get("schema") != SCHEMA:
        found = f"with schema {event.get('schema')!r} of the run log, and this version reads schema {SCHEMA}"
        raise RunLogError(f"written {found}; read it with the version of tba-offload that wrote it")
    kinds = {each.EVENT: each for each in (RunHeader, StepRecord)}
    return _checked(kinds[kind], event) if kind in kinds else event


Record = TypeVar("Record", bound=RunHeader | StepRecord)
_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (RunHeader, StepRecord)}
_NAMES = {kind: [each.name for each in fields(kind) if each.name != "extra"] for kind in _ADAPTERS}


def _checked(kind: type[Record], event: Json) -> Record:
    """Return an event as a record, its unknown keys in ``extra``."""
    known: Json = {name: event[name] for name in _NAMES[kind] if name in event}
    known["extra"] = {name: value for name, value in event.items() if name not in {*known, "event"}}
    return _valid(_ADAPTERS[kind].validate_python, kind.EVENT, known)  # type: ignore[no-any-return]


def _valid(validate: Callable[[Any], Any], name: str, values: Mapping[str, object]) -> Any:
    try:
        return validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = ": ".join(part for part in (where, first["msg"].removeprefix("Value error, ")) if part)
        raise RunLogError(f"the {name} event is damaged: {said}") from None


# Writing


class RunLogWriter(AbstractContextManager["RunLogWriter"]):
    """Writes a new run log, line by line.

    Each line reaches the operating system before :meth:`write` returns, so a process that dies loses at most
    the line it was writing. Lines are not forced to the drive: a power cut may take the latest ones.

    Training never ends for its log. If a line cannot be written, as on a full drive or when the file was
    removed, a warning says so once, and the log ends there.

    Args:
        path: The file to create, readable by its owner only (0600). Its directory has to exist.
        header: Written at once as the first line.

    Raises:
        RunLogError: Its directory does not exist, the file exists, or it cannot be opened or written. Or JSON
            cannot hold the header.
    """

    def __init__(self, path: str | os.PathLike[str], header: RunHeader) -> None:
        self.path = Path(path)
        line = _line(header)  # first: no file is made for a header that cannot be written
        self._file = _open_new(self.path)
        self._has_ended = False
        try:
            self._write_whole(line)
        except OSError as error:
            self._file.close()
            raise RunLogError(f"{path}: the run log cannot be written: {error.strerror or error}") from error

    def write(self, record: StepRecord) -> None:
        """Append the record of one step.

        Raises:
            RunLogError: The log is closed, or a field has the wrong type.
        """
        self._append(_line(record))

    def note(self, event: str, document: Mapping[str, object]) -> None:
        """Append an event of another kind, which readers hand on as it is (:attr:`RunLog.others`).

        Args:
            event: Its kind.
            document: What JSON can hold.

        Raises:
            RunLogError: The log is closed, or JSON cannot hold the document.
        """
        self._append(_json_line(event, document))

    def close(self) -> None:
        """Close the file; once is enough, more does no harm."""
        with self._told_once():  # a network file system tells late
            self._file.close()

    def _append(self, line: bytes) -> None:
        if self._file.closed:
            raise RunLogError(f"{self.path}: the run log is closed; open a new file to record more steps")
        if not self._has_ended:
            with self._told_once():
                self._write_whole(line)

    def _write_whole(self, line: bytes) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed")
        while line:
            line = line[self._file.write(line) :]

    @contextmanager
    def _told_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            said = "%s: the run log cannot be written: %s; it ends here. Training goes on; make room there"
            if not self._has_ended:
                logger.warning(said, self.path, error.strerror or error)
            self._has_ended = True

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_new(path: Path) -> io.FileIO:
    """Create a file for this process alone, without a buffer; no file, link or pipe is there before."""
    try:
        return io.FileIO(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            reason = f"its directory does not exist: mkdir -p {shlex.quote(str(path.absolute().parent))}"
        elif isinstance(error, FileExistsError):
            reason = (
                "it exists, and run logs are never overwritten; name another file, one for each rank, such "
                f"as {path.stem}.rank0{path.suffix}"
            )
        raise RunLogError(f"{path}: the run log cannot be opened: {reason}") from error


def _line(record: RunHeader | StepRecord) -> bytes:
    known = {name: getattr(record, name) for name in _NAMES[type(record)]}
    checked = _checked(type(record), record.extra | known)
    return _json_line(record.EVENT, {name: getattr(checked, name) for name in known} | checked.extra)


def _json_line(event: str, document: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps({"event": event} | _in_json(document), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunLogError(f"the {event} event holds a value that JSON cannot: {error}") from error
    return text.encode("ascii") + b"\n"


def _in_json(value: Any) -> Any:
    """Return the value with the floats that JSON lacks spelt as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return float.__repr__(value)
    if isinstance(value, dict):
        return {key: _in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    return value


# A step in figures

_NO_FIGURES = {"step", "skipped", "peak_source"}

FIGURES = tuple(name for name in _NAMES[StepRecord] if name not in _NO_FIGURES)
"""Fields of a step record that are numbers: the curves of :mod:`tba_offload.sinks`."""

MAIN_FIGURES = ("activation_peak_bytes", "offloaded_bytes", "read_bytes", "stall_seconds")
"""Those for frameworks that print the same figures that they hand on."""

PREFIX = "tba-offload/"
"""Beginning of the names of curves."""


def curves_of(record: StepRecord, names: Iterable[str] = FIGURES) -> dict[str, float]:
    """Return the figures of a step that are known, under ``tba-offload/`` and the name of the field."""
    known = {f"{PREFIX}{name}": getattr(record, name) for name in names}
    return {name: value for name, value in known.items() if value is not None}


def describe_step(record: StepRecord) -> str:
    """Return the main figures of a step in one line."""
    parts = [f"step {record.step}" + (" (skipped)" if record.skipped else "")]
    if record.activation_peak_bytes is not None:
        parts.append(f"activation peak {readable_size(record.activation_peak_bytes)}")
    if record.gradient_bytes:
        parts.append(f"gradients {readable_size(record.gradient_bytes)}")
    waits = f", {significant(record.stall_seconds)} s of it waits" if record.stall_seconds else ""
    parts.append(f"{significant(record.seconds)} s{waits}")
    kept = record.kept_bytes + record.fallback_kept_bytes
    amounts = (record.offloaded_bytes, record.read_bytes, record.forwarded_bytes, kept)
    moved = zip(amounts, ("written", "read", "forwarded", "kept"), strict=True)
    parts += [f"{readable_size(nbytes)} {what}" for nbytes, what in moved if nbytes]
    if record.weights_read_bytes:
        parts.append(f"{readable_size(record.weights_read_bytes)} of frozen weights read")
    if record.recomputed_scopes:
        parts.append(f"{record.recomputed_scopes} of {record.scopes} layers recomputed")
    if record.loss is not None:
        parts.append(f"loss {record.loss:.6g}")
    return "; ".join(parts)


# Other events


class Event(BaseModel):
    """An event that is no step; its fields have types before anything is computed from them."""

    EVENT: ClassVar[str]


AnyEvent = TypeVar("AnyEvent", bound=Event)


def read_event(model: type[AnyEvent], event: Mapping[str, object]) -> AnyEvent:
    """Return an event with its types.

    Raises:
        RunLogError: A part is missing or has another type; says which.
    """
    return _valid(model.model_validate, model.EVENT, event)  # type: ignore[no-any-return]


class PlanEvent(Event):
    """A new plan and what it was made from, as far as a plan is made anew from it.

    Attributes:
        names: Module names of the layers.
        policy: Placement that the user wants for each layer.
        plan: The plan.
        profile: The step, as :class:`tba_offload.planner.model.StepProfile` reads it.
        drive: Rates of the store, as :class:`tba_offload.planner.model.Bandwidth` reads them.
        limits: What the plan had to keep to.
    """

    EVENT = PLAN

    names: list[str]
    policy: list[str]
    plan: Json
    profile: Json
    drive: Json
    limits: Json


class HeldBytes(NamedTuple):
    """What holds memory at one moment, in bytes.

    Attributes:
        in_flight: On their way to the store or back.
        settled: Kept by the offloader: in use by backward, or refused by a drive.
        small: Saved by layers with hooks, and kept: small, not understood, or held elsewhere.
        kept: Left in memory by layers that are placed ``keep`` or were left alone, or of which a share stays.
        inputs: Left in memory by layers that are recomputed.
        outputs: Left in memory by layers whose activations travel, beside all that the offloader knows of.
        put_out: Put out by the model, now or in earlier steps, and alive still.
    """

    in_flight: Bytes = 0
    settled: Bytes = 0
    small: Bytes = 0
    kept: Bytes = 0
    inputs: Bytes = 0
    outputs: Bytes = 0
    put_out: Bytes = 0

    @property
    def planned(self) -> int:
        """Bytes of which plans know: activations of layers."""
        return sum(self) - self.outputs - self.put_out


class PhasePeak(NamedTuple):
    """The fullest moment of one phase, gradients included.

    Attributes:
        nbytes: Live bytes, without those that were there before the step, gradients and states of optimizers.
        layer: Index of the layer that ran, or had run last.
        held: What held them.
        beside: Those of nothing in ``held`` that were there when the layer began.
        gradients: Bytes of gradients at the time.
        frozen: Bytes of frozen weights that were there for layers that compute.
    """

    nbytes: Bytes
    layer: Bytes
    held: HeldBytes
    beside: Bytes
    gradients: Bytes
    frozen: Bytes

    @property
    def whole(self) -> int:
        """All bytes of the moment."""
        return self.nbytes + self.gradients + self.frozen

    def as_json(self) -> dict[str, object]:
        """Return the line of it in a run log."""
        return {**self._asdict(), "held": self.held._asdict()}


class StaticBytes(BaseModel):
    """Bytes that last from step to step.

    Attributes:
        parameters: Of parameters and buffers.
        gradients: Of gradients.
        states: Of what optimizers hold: states, and parameters that are not the model's own, as masters.
    """

    parameters: Bytes
    gradients: Bytes
    states: Bytes


class MemoryEvent(Event):
    """What a step that was looked at has shown.

    Attributes:
        step: Its number.
        names: Module names of the layers.
        placements: Their placements.
        static: What lasts from step to step.
        phases: The peak of each phase.
        left_out: How many trained blocks are like the layers and not among them.
        outside: The largest trained parameter beside the layers: name and bytes.
        frozen_weights: Bytes of frozen weights of layers that are in memory.
    """

    EVENT = MEMORY

    step: int
    names: list[str]
    placements: list[str]
    static: StaticBytes
    phases: dict[Literal["forward", "loss", "backward", "embeddings", "between", "update"], PhasePeak]
    left_out: Bytes = 0
    outside: tuple[str, Bytes] = "", 0
    frozen_weights: Bytes = 0
