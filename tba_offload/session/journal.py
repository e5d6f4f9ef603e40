"""The records of a session's steps: remembered, told, and written to the run log."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tba_offload.report.run_log import MEMORY, RunLog, RunLogWriter
from tba_offload.session.notices import describe_step, tell

if TYPE_CHECKING:
    import os

    from tba_offload.report.run_log import RunHeader, StepRecord
    from tba_offload.states import StatesRecord

_REMEMBERED_STEPS = 10_000

_REMEMBERED_LOOKS = 16
"""Steps whose memory was looked at: as many as there are in the first 8,192."""


class Journal:
    """Keeps the records of steps.

    Args:
        path: Of the run log; ``None`` for none.
        header: What it begins with.
        tells: Whether each step is told in a line.

    Attributes:
        records: The latest, oldest first.

    Raises:
        RunLogError: The run log cannot be begun.
    """

    def __init__(self, path: str | os.PathLike[str] | None, header: RunHeader, *, tells: bool) -> None:
        self.records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)
        self._run_log = RunLogWriter(path, header) if path is not None else None
        self._tells = tells
        self._steps = 0
        self._header = header
        self._looks: deque[dict[str, object]] = deque(maxlen=_REMEMBERED_LOOKS)

    @property
    def is_written(self) -> bool:
        """Whether there is a run log."""
        return self._run_log is not None

    def record(self, record: StepRecord) -> None:
        """A step has ended well."""
        self.records.append(record)
        self._steps = record.step
        if self._tells:
            tell(describe_step(record))
        if self._run_log is not None:
            self._run_log.write(record)

    def note_plan(self, news: dict[str, object]) -> None:
        """There is a new plan."""
        if self._run_log is not None:
            self._run_log.note("plan", news)

    def note_look(self, event: str, figures: dict[str, object]) -> None:
        """A step was looked at.

        Args:
            event: At what of it.
            figures: What was seen.
        """
        if event == MEMORY:
            self._looks.append({"event": MEMORY, **figures})
        if self._run_log is not None:
            self._run_log.note(event, figures)

    def log(self) -> RunLog:
        """What is remembered, as a log that was read."""
        path = Path("this session") if self._run_log is None else self._run_log.path
        return RunLog(header=self._header, steps=tuple(self.records), path=path, others=tuple(self._looks))

    def note_states(self, number: int, record: StatesRecord) -> None:
        """An optimizer has made an update.

        Args:
            number: Which of the session's optimizers.
            record: What its update was like.
        """
        if self._run_log is not None:
            self._run_log.note("states", {"optimizer": number, "step": self._steps, **asdict(record)})

    def close(self) -> None:
        """Closes the run log."""
        if self._run_log is not None:
            self._run_log.close()
