"""Reads run logs, damaged ones too."""

from __future__ import annotations

import itertools
import json
import math
import reprlib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from tba_offload.errors import RunLogError
from tba_offload.reading import UnreadableError, open_regular
from tba_offload.report.run_log import (
    KINDS,
    MEMORY,
    PLAN,
    SCHEMA,
    TIMELINE,
    Json,
    RunHeader,
    RunLog,
    StepRecord,
    checked,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

_Event = TypeVar("_Event", RunHeader, StepRecord)

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


def read_run_log(path: str | os.PathLike[str]) -> RunLog:
    """Read a run log, also one whose run crashed or is still going on.

    A line that is damaged is skipped and named in :attr:`RunLog.complaints`. A last line without its line end
    is left out if it is not whole.

    Raises:
        RunLogError: The file cannot be read, is no regular file or too large, is no run log, has another
            schema, or is two; the message names file and line.
    """
    return _Reader(Path(path)).read()


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
        of_a_step = len(KINDS[StepRecord.EVENT]) + 1
        values = self._values + max(sum(map(line.count, (b",", b"[", b"{"))) - of_a_step, 0)
        if values > MOST_VALUES:
            raise RunLogError(f"with what came before it, it holds more than {MOST_VALUES} values")
        return values

    def _add(self, event: Json) -> None:
        """Take an event after the header.

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
    """Read to the end of a line without keeping it, or beyond the most that is read."""
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
    kinds = KINDS[cls.EVENT]
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
    """Return the record, if its number and its times can be those of a step."""
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
    return checked(name, value, kinds)
