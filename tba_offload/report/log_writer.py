"""Writes the run log, line by line."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tba_offload.errors import RunLogError
from tba_offload.report.log_file import LogFile
from tba_offload.report.run_log import GAP, KINDS, checked

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from tba_offload.report.run_log import RunHeader, StepRecord

logger = logging.getLogger(__name__)

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
        """Count a line that was not written."""
        self.steps += is_step
        self.events += not is_step
        self.wait -= is_step

    def line(self) -> bytes:
        """Return the line that tells of it."""
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
        line = _line(header)  # first: no file is made for a header that cannot be written
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


def _line(event: RunHeader | StepRecord) -> bytes:
    """One event as a line of JSON, which is pure ASCII."""
    kinds = KINDS[event.EVENT]
    document = {name: checked(name, getattr(event, name), kind) for name, kind in kinds.items()}
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
    """Return the value with the floats that JSON lacks spelt as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return float.__repr__(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
