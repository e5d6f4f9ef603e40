"""The records of a session's steps: remembered, told, and written to the run log."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING

from tba_offload.report.run_log import RunHeader, RunLogWriter
from tba_offload.session.notices import describe_step, tell

if TYPE_CHECKING:
    import os

    from tba_offload.report.run_log import StepRecord
    from tba_offload.states import StatesRecord

_REMEMBERED_STEPS = 10_000


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
