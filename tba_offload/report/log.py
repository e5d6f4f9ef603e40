"""Run logs: records, reader and writer, and the choice of the steps from which figures are computed.

A run log is a file of JSON lines, each with the key ``event``: one header, then one record for each step, and
other events.

Finite floats are written in their shortest exact decimal form, so every bit is preserved. Other floats are
written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, because JSON has only finite numbers. For fields
of type float, the reader converts these strings back to floats.

Later versions may add fields and events to schema 1. The reader ignores unknown fields, and keeps unknown
events in :attr:`RunLog.others`. The reader refuses logs with another schema number. This module does not
import torch.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shlex
import statistics
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from tba_offload.days import bytes_per_day
from tba_offload.errors import RunLogError, log_warning
from tba_offload.formatting import readable_size, significant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tba_offload.planner.model import Prediction

SCHEMA = 1

PLAN, MEMORY, TIMELINE = "plan", "memory", "timeline"
"""Names of events in a run log: a new plan, the memory of a step by holder, and the timeline of a step."""

Json = dict[str, object]
Bytes = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


# Records

_TITLE = ("name", "layers", "hidden", "hidden_size", "sequence", "seq_length", "dtype", "device", "cpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """Header of a run log, with the facts that are the same for all steps of a run.

    Attributes:
        strategy: Label of the run, for example ``"offload"``. Runs with equal labels form one line of a ROK
            curve.
        schema: Schema number of the log.
        run: Name of the run, which is the same in the logs of all ranks; None for a run with one rank.
        rank: Rank of the process that wrote the log.
        ranks: Number of ranks of the run. Each rank writes its own log.
        started: Start time of the run in UTC, in ISO 8601 format.
        versions: Versions of packages, by package name.
        hardware: Facts about the machine, with arbitrary keys.
        model: Facts about the model, with arbitrary keys such as name, layers, hidden, batch_size and
            sequence. A ROK curve orders points by ``batch_size``, the number of sequences in a step.
        policy: The policy as YAML text, or None if the run has no policy.
        plan: For each layer name on all ranks: the layer's number, its placement, and the reason for the
            placement.
        store: Facts about the store, such as the kind, the I/O path of each directory and the alignment.
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

    @property
    def writes_to_memory(self) -> bool:
        """Whether a directory of the store is in host memory, so that offloaded bytes still take memory."""
        places: Any = self.store.get("stores", [self.store])
        return any(place.get("in_memory") for place in places)

    @property
    def title(self) -> str:
        """Text with the model and the machine in one line, without the batch size."""
        return self.title_without()

    def title_without(self, *names: str) -> str:
        """Return the title without the facts in ``names``.

        Args:
            names: Names of facts to leave out, for example ``"sequence"``.
        """
        facts = {**self.model, **self.hardware}
        shown = [name for name in _TITLE if name not in names and facts.get(name)]
        words = [f"{name.replace('_', ' ')} {facts[name]}" for name in shown]
        return ", ".join(words).removeprefix("name ")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The measurements of one step: times in seconds, memory and transfers in bytes.

    None means that a value was not measured or is unknown. None never means zero.

    Attributes:
        step: Number of the step in the session, counted from 1.
        seconds: Wall-clock time of the ``with session.step()`` block. Without a ``session.step()`` block, a
            step lasts from the first forward to the end of the last backward, without optimizers. The time is
            measured by the GPU's clock if no optimizer runs inside the block, and if the run has a run log or
            an ``auto`` layer. Otherwise, the host's clock measures the time. On a GPU, host time is too short
            unless the block ends with a call that waits for the device, such as ``loss.item()``.
        optimizer_seconds: Wall-clock time of optimizer steps since the end of the previous step; None without
            an update. On a GPU, only the time that the host took to launch the update or to wait for the
            update.
        skipped: Whether the gradients were dropped without an update, as a gradient scaler does after an
            overflow. The planner ignores skipped steps.
        forward_seconds: Time of forward passes; None on a GPU.
        backward_seconds: Time of backward passes; None on a GPU.
        stall_seconds: Time that the training thread waited for I/O of activations. A GPU may compute while
            the thread waits.
        tokens: Number of tokens in the step.
        model_flops: Number of floating point operations of the model in the step, without recomputation.
        loss: Loss that the program set, perhaps NaN or infinite. A loss that was set as a tensor is None
            until the device has computed the tensor.
        activation_peak_bytes: Peak memory of the device minus ``base_bytes``, without gradients and optimizer
            states allocated in the step. A gradient counts as an activation until autograd has stored the
            gradient in ``.grad``.
        gradient_bytes: Bytes of gradients allocated in the step.
        gradient_peak_bytes: Peak bytes of gradients, including gradients from earlier steps, and of frozen
            weights that were read back.
        state_bytes: Growth of memory during optimizer steps. Optimizers allocate their states in the first
            step.
        sampled_peak_bytes: Highest memory sample of a step in which a CPU was too busy to take enough
            samples. The fields ``activation_peak_bytes`` and ``device_peak_bytes`` of this step are None.
        peak_samples: Number of memory samples on a CPU; None if the allocator itself records the peak.
        peak_source: Method that measured ``activation_peak_bytes``, for example ``"cuda allocator"``.
        base_bytes: Live bytes of the allocator at the start of the step, such as parameters and optimizer
            states, without gradients and outputs of earlier steps. On a CPU, ``base_bytes`` counts live bytes
            of the whole process.
        earlier_outputs_bytes: Bytes of model outputs from earlier steps that the program still referenced
            when the step began, as in ``outputs = model(...)``. The activation peak includes the bytes of
            these outputs.
        reserved_peak_bytes: Peak memory that the allocator reserved on the GPU, including the allocator's
            cache; None on a CPU.
        device_peak_bytes: Peak live bytes of the allocator during forward and backward. On a CPU,
            ``device_peak_bytes`` counts live bytes of the whole process.
        activation_budget_bytes: Limit of the activation peak in the step; None without a budget. The limit is
            the smaller of ``budget.activation_bytes`` and the part of ``budget.device_bytes`` that is left
            for activations and gradients.
        own_peak_bytes: Peak bytes of activations in memory, as counted by the offloader. The offloader does
            not count activations of layers with the placement keep or recompute, because these layers run
            without hooks.
        resident_peak_bytes: Peak resident set of the process, as the operating system reports it (VmHWM).
        offloaded_bytes: Bytes written to the store.
        host_bytes: Bytes written to host memory, in a store with drives and host memory; a part of
            ``offloaded_bytes``.
        read_bytes: Bytes read back from the store.
        reread_bytes: Bytes read again after a failed read.
        forwarded_bytes: Bytes that backward took from memory without a read, because the memory was not freed
            yet.
        deduplicated_bytes: Bytes that were not written, because their storage was already offloaded.
        rebuilt_bytes: Bytes of tensors that backward computed again, because they were neither kept nor
            written.
        kept_bytes: Bytes that layers with hooks kept in memory: small tensors, tensors of unsupported kinds,
            and tensors with references outside autograd.
        recomputed_scopes: Number of layer runs that backward recomputed.
        scopes: Number of layer runs in the step. Each layer runs once for each micro-batch.
        in_flight_peak_bytes: Peak bytes in flight: saved bytes that are not freed yet, plus prefetched bytes
            that are not used yet.
        given_up_bytes: Bytes of prefetches that were dropped before backward used the bytes.
        held_bytes: Bytes that were written although another reference kept the tensor in memory, so nothing
            was freed.
        fallback_kept_bytes: Bytes of offloaded layers that were kept in memory, because the store was full,
            failed or was too slow.
        drives_out_of_service: Number of drives that accept no writes at the end of the step, because a
            transfer failed or the drive did not answer.
        weights_read_bytes: Bytes of frozen weights that were read in the step; None if no frozen weights are
            offloaded.
        weights_waited_seconds: Time that the training thread waited for frozen weights; None if no frozen
            weights are offloaded. ``stall_seconds`` does not include the wait for weights.
        left_alone_scopes: Number of layer runs without hooks of tba-offload, because saved-tensor hooks of
            other code were active.
        planning_seconds: Time that training waited for the planner after the previous step; None without a
            planner.
        predicted_peak_bytes: Activation peak that the plan predicted; None before the first plan.
        predicted_seconds: Value of ``seconds`` that the plan predicted; None before the first plan.
        predicted_device_peak_bytes: Value of ``device_peak_bytes`` that the plan predicted; None without
            ``budget.device_bytes``. The prediction adds three figures: the live bytes before the step, the
            largest gradient bytes, and the bytes of the budget that the plan needs.
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
    host_bytes: int = 0
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
    drives_out_of_service: int = 0
    weights_read_bytes: int | None = None
    weights_waited_seconds: float | None = None
    left_alone_scopes: int = 0
    planning_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_device_peak_bytes: int | None = None

    def __str__(self) -> str:
        return describe_step(self)

    @property
    def activation_peak_gib(self) -> float | None:
        """Activation peak in GiB; None if the peak was not measured."""
        return None if self.activation_peak_bytes is None else self.activation_peak_bytes / 2**30

    @property
    def seconds_with_update(self) -> float:
        """Sum of ``seconds`` and ``optimizer_seconds``."""
        return self.seconds + (self.optimizer_seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """The content of a run log.

    Attributes:
        header: The header, with the facts that are the same for all steps.
        steps: Records of the steps, in the order of the file.
        path: Path of the run log.
        others: All other events as dicts, in the order of the file.
    """

    header: RunHeader
    steps: tuple[StepRecord, ...]
    path: Path
    others: tuple[Json, ...] = ()

    def events(self, model: type[AnyEvent]) -> list[AnyEvent]:
        """Return all events of one class.

        Args:
            model: Class of the events, for example :class:`PlanEvent`.

        Raises:
            RunLogError: A field of an event is missing or has the wrong type.
        """
        found = [event for event in self.others if event["event"] == model.EVENT]
        try:
            return [_valid(model.model_validate, model.EVENT, event) for event in found]
        except RunLogError as error:
            raise RunLogError(f"{self.path}: {error}") from None


# Which steps count for figures. In every command and picture, a peak is the largest of `counted_steps(log)`,
# and a time is the median of `timed_steps(counted_steps(log))`.


def counted_steps(log: RunLog) -> list[StepRecord]:
    """Return the steps that count for figures: all steps after the warm-up, except steps without update.

    In a run of more than six steps, the first three steps are the warm-up. In a run of two to six steps, only
    the first step is the warm-up.
    """
    warm_up = 3 if len(log.steps) > 6 else int(len(log.steps) > 1)
    return [step for step in log.steps[warm_up:] if not step.skipped]


def timed_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps without a memory measurement, because measuring takes time.

    If memory was measured in all steps, return all steps.
    """
    return [step for step in steps if step.peak_source is None] or list(steps)


# Reading


def read_run_log(path: str | os.PathLike[str]) -> RunLog:
    """Read the run log of a run that ended, crashed, or is still running.

    The reader ignores an incomplete last line.

    Raises:
        RunLogError: The file cannot be read or is not a run log. The log has another schema number, a damaged
            line or a second header. The message names the file and the line.
    """
    path = Path(path)
    try:
        *lines, _ = path.read_bytes().split(b"\n")
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
    header, *others = found or [{}]
    if not isinstance(header, RunHeader):
        what = "the first line has no run header" if header else "the file has no complete line"
        raise RunLogError(f"{path}: the file is not a run log: {what}. Pass another file")
    if any(isinstance(each, RunHeader) for each in others):
        raise RunLogError(f"{path}: the file has two run headers. Write each run log to its own file")
    return RunLog(
        header=header,
        steps=tuple(each for each in others if isinstance(each, StepRecord)),
        path=path,
        others=tuple(each for each in others if isinstance(each, dict)),
    )


def _parsed(line: bytes) -> RunHeader | StepRecord | Json:
    try:
        event: Any = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not isinstance(kind := event.get("event"), str):
        raise RunLogError('the line is not a JSON object with an "event". Remove the line')
    if kind == RunHeader.EVENT and event.get("schema") != SCHEMA:
        found = f"the log has schema {event.get('schema')!r}, and this version reads schema {SCHEMA}"
        raise RunLogError(f"{found}. Read the log with the version of tba-offload that wrote the log")
    kinds = {each.EVENT: each for each in (RunHeader, StepRecord)}
    return _checked(kinds[kind], event) if kind in kinds else event


_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (RunHeader, StepRecord)}
_NAMES = {kind: [each.name for each in fields(kind)] for kind in _ADAPTERS}


def _checked(kind: type[RunHeader | StepRecord], values: Json) -> Any:
    return _valid(_ADAPTERS[kind].validate_python, kind.EVENT, values)


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
    """Writer of a new run log.

    A process that crashes loses at most the line that it was writing. A power cut may lose several lines,
    because lines are not synced to the drive.

    A failed write does not stop training. If the drive is full or the file was removed, the writer warns once
    and then writes no more lines.

    Args:
        path: Path of the file to create, in an existing directory. Only the owner can read the file (mode
            0600).
        header: The header, which the constructor writes as the first line.

    Raises:
        RunLogError: The directory does not exist, the file exists, the file cannot be opened, or JSON
            cannot represent the header.
    """

    def __init__(self, path: str | os.PathLike[str], header: RunHeader) -> None:
        self.path = Path(path)
        line = _line(header)  # before the file is created, since it may raise
        self._file = _open_new(self.path)
        self._has_ended = False
        self._append(line)

    def write(self, record: StepRecord) -> None:
        """Append the record of one step.

        Raises:
            RunLogError: A field has the wrong type.
        """
        self._append(_line(record))

    def note(self, event: str, document: Mapping[str, object]) -> None:
        """Append an event that is neither a header nor a step record (see :attr:`RunLog.others`).

        Args:
            event: Name of the event.
            document: Fields of the event, with values that JSON can represent.

        Raises:
            RunLogError: JSON cannot represent the document.
        """
        self._append(_json_line(event, document))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._warn_once():  # a network file system reports failed writes when the file is closed
            self._file.close()

    def _append(self, line: bytes) -> None:
        if not self._has_ended:
            with self._warn_once():
                self._write_whole(line)

    def _write_whole(self, line: bytes) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed")
        while line:
            line = line[self._file.write(line) :]

    @contextmanager
    def _warn_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = "%s: the run log cannot be written: %s. Training continues. Make room on the disk"
            if not self._has_ended:
                log_warning(__name__, message, self.path, error.strerror or error)
            self._has_ended = True

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_new(path: Path) -> io.FileIO:
    try:
        return io.FileIO(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            reason = f"the directory does not exist: mkdir -p {shlex.quote(str(path.absolute().parent))}"
        elif isinstance(error, FileExistsError):
            reason = (
                "the file exists, and run logs are never overwritten. Name another file. If several ranks "
                f"write logs, name a file for each rank, for example {path.stem}.rank0{path.suffix}"
            )
        raise RunLogError(f"{path}: the run log cannot be opened: {reason}") from error


def _line(record: RunHeader | StepRecord) -> bytes:
    names = _NAMES[type(record)]
    checked = _checked(type(record), {name: getattr(record, name) for name in names})
    return _json_line(record.EVENT, {name: getattr(checked, name) for name in names})


def _json_line(event: str, document: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps({"event": event} | _in_json(document), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunLogError(f"the {event} event has a value that JSON cannot represent: {error}") from error
    return text.encode("ascii") + b"\n"


def _in_json(value: Any) -> Any:
    """Replace NaN and infinite floats by strings, because JSON cannot represent these values."""
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
"""Names of the numeric fields of a step record. TensorBoard and other loggers get a curve of each field."""

PREFIX = "tba-offload/"
"""Prefix of curve names."""


def curves_of(record: StepRecord, names: Iterable[str] = FIGURES) -> dict[str, float]:
    """Return the known figures of a step by curve name, such as ``tba-offload/seconds``."""
    known = {f"{PREFIX}{name}": getattr(record, name) for name in names}
    return {name: value for name, value in known.items() if value is not None}


def describe_step(record: StepRecord) -> str:
    """Return a text with the main figures of a step."""
    parts = [f"step {record.step}" + (" (skipped)" if record.skipped else "")]
    if record.activation_peak_bytes is not None:
        parts.append(f"activation peak {readable_size(record.activation_peak_bytes)}")
    if record.gradient_bytes:
        parts.append(f"gradients {readable_size(record.gradient_bytes)}")
    stall = f" (stall {significant(record.stall_seconds)} s)" if record.stall_seconds else ""
    parts.append(f"{significant(record.seconds)} s{stall}")
    kept = record.kept_bytes + record.fallback_kept_bytes
    amounts = (record.offloaded_bytes, record.host_bytes, record.read_bytes, record.forwarded_bytes, kept)
    moved = zip(amounts, ("written", "to host memory", "read", "forwarded", "kept"), strict=True)
    parts += [f"{readable_size(nbytes)} {what}" for nbytes, what in moved if nbytes]
    if record.weights_read_bytes:
        parts.append(f"{readable_size(record.weights_read_bytes)} of frozen weights read")
    if record.recomputed_scopes:
        parts.append(f"{record.recomputed_scopes} of {record.scopes} layers recomputed")
    if record.loss is not None:
        parts.append(f"loss {record.loss:.6g}")
    return "; ".join(parts)


_ENOUGH = 3
"""Smallest number of steps under one plan from which a median time is computed."""


def describe_run(log: RunLog, keep: Prediction | None) -> str | None:
    """Return a text with the cost of a run; ``None`` if no activation peak was measured after the first step.

    Args:
        log: The run log.
        keep: Prediction for a step that keeps all layers; ``None`` if unknown.
    """
    steps = counted_steps(log) if len(log.steps) > 1 else []
    peak = max((step.activation_peak_bytes or 0 for step in steps), default=0)
    if not peak:
        return None
    if len({step.tokens for step in steps}) > 1:
        keep = None  # the prediction holds for one batch size
    of_keep = "" if keep is None else f" (keep: {readable_size(keep.activation_peak)})"
    parts = [f"activation peak {readable_size(peak)}{of_keep}"]
    # The plan of the last step counts. Earlier steps measured what other placements cost.
    planned = [step for step in steps if step.predicted_seconds == steps[-1].predicted_seconds]
    steps = planned if len(planned) >= _ENOUGH else steps[-_ENOUGH:]
    if keep is not None and keep.seconds > 0:
        ratio = statistics.median(step.seconds for step in timed_steps(steps)) / keep.seconds
        parts.append(f"step time {significant(ratio)} x the prediction for 'keep'")
    states: Any = [each["written_bytes"] for each in log.others if each["event"] == "states"]
    written = sum(states) + statistics.median(step.offloaded_bytes - step.host_bytes for step in steps)
    if written and log.header.store.get("kind") != "host" and not log.header.writes_to_memory:
        seconds = statistics.median(step.seconds_with_update for step in steps)
        year = significant(365 * bytes_per_day(written, seconds) / 1e12)
        parts.append(f"{readable_size(written)} written per step: {year} TB per year at this rate")
    return ", ".join(parts)


# Other events


class Event(BaseModel):
    """Event of a run log that is neither a header nor a step record. The types of the fields are checked."""

    EVENT: ClassVar[str]


AnyEvent = TypeVar("AnyEvent", bound=Event)


class PlanEvent(Event):
    """A new plan, with all data that is needed to compute the plan again.

    Attributes:
        names: Module names of the attached layers.
        policy: Placement of each layer in the policy.
        plan: The plan, in the form of :class:`tba_offload.planner.model.Plan`.
        profile: Profile of the measured step, in the form of :class:`tba_offload.planner.model.StepProfile`.
        drive: Rates of the store, in the form of :class:`tba_offload.planner.model.Bandwidth`.
        limits: Limits that the plan had to keep.
    """

    EVENT = PLAN

    names: list[str]
    policy: list[str]
    plan: Json
    profile: Json
    drive: Json
    limits: Json


class HeldBytes(NamedTuple):
    """Bytes in memory at one time, divided by holder.

    Attributes:
        in_flight: Activations that are being written or were prefetched.
        settled: Activations that backward is using, and activations whose write failed.
        small: Tensors that layers with hooks saved and kept in memory, as in ``StepRecord.kept_bytes``.
        kept: Activations of layers that keep at least some saved tensors, and of layers that run without
            hooks.
        inputs: Inputs of recomputed layers.
        outputs: Memory that offloaded layers allocated and did not free, except saved tensors.
        put_out: Live outputs of the model, from this step or from earlier steps.
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
        """Bytes of the layers' activations, which plans predict."""
        return sum(self) - self.outputs - self.put_out


class PhasePeak(NamedTuple):
    """Memory at the peak of one phase of a step.

    Attributes:
        nbytes: Live bytes allocated in the step, without gradients and optimizer states.
        layer: Index of the layer that was running at the peak, or that ran last.
        held: The part of ``nbytes`` with a known holder, in bytes.
        beside: Bytes without a known holder that were live when the layer began.
        gradients: Bytes of gradients at the peak.
        frozen: Bytes of frozen weights that were read back and in memory at the peak.
    """

    nbytes: Bytes
    layer: Bytes
    held: HeldBytes
    beside: Bytes
    gradients: Bytes
    frozen: Bytes

    @property
    def whole(self) -> int:
        """Bytes of the peak, including gradients and frozen weights."""
        return self.nbytes + self.gradients + self.frozen

    def as_json(self) -> dict[str, object]:
        """Return the fields as a dict for the run log."""
        return {**self._asdict(), "held": self.held._asdict()}


class StaticBytes(BaseModel):
    """Memory that stays in use between steps, in bytes.

    Attributes:
        parameters: Parameters and buffers of the model.
        gradients: Gradients of all parameters.
        states: Optimizer states, and parameters that only the optimizer has, such as fp32 masters.
    """

    parameters: Bytes
    gradients: Bytes
    states: Bytes


class MemoryEvent(Event):
    """Memory of one step, measured by phase.

    Attributes:
        step: Number of the step.
        names: Module names of the attached layers.
        placements: Placement of each layer in the step.
        static: Bytes that stay in memory between steps.
        phases: Peak of each phase, by the name of the phase.
        left_out: Number of modules with trained parameters that look like layers but are not attached.
        outside: Name and bytes of the largest trained parameter outside the layers.
        frozen_weights: Bytes of the layers' frozen weights that are in memory.
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
