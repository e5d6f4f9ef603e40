"""The records of a session's steps: remembered, told, and written to the run log.

Some figures are known only when the device has come to the end of the step, mostly within the next one. A
record that lacks them is told and written when they are there, and what comes after it waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tba_offload.report.log import MEMORY, RunLog, RunLogWriter, describe_step
from tba_offload.session.notices import tell

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tba_offload.report.log import RunHeader, StepRecord
    from tba_offload.session.late import LateFigures
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
        on_step: Are called with the record of each step when it is complete, and in the run log.

    Attributes:
        records: The latest, oldest first.

    Raises:
        RunLogError: The run log cannot be begun.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        header: RunHeader,
        *,
        tells: bool,
        on_step: Sequence[Callable[[StepRecord], object]] = (),
    ) -> None:
        self.records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)
        self._run_log = RunLogWriter(path, header) if path is not None else None
        self._tells = tells
        self._on_step = tuple(on_step)
        self._steps = 0
        self._header = header
        self._looks: deque[dict[str, object]] = deque(maxlen=_REMEMBERED_LOOKS)
        self._updates: dict[int, dict[str, object]] = {}  # the latest of each optimizer
        self._waiting: deque[tuple[LateFigures | None, Callable[[], object]]] = deque()

    @property
    def is_written(self) -> bool:
        """Whether there is a run log."""
        return self._run_log is not None

    def record(self, record: StepRecord, late: LateFigures | None = None) -> None:
        """Record that a step has ended well.

        Args:
            record: What is known of it.
            late: What it is to be completed by.
        """
        self.records.append(record)
        self._steps = record.step
        self._in_order(partial(self._write, record, late), late)

    def note_plan(self, news: dict[str, object]) -> None:
        """There is a new plan."""
        self._note("plan", news)

    def note_look(self, event: str, figures: dict[str, object]) -> None:
        """Record that a step was looked at.

        Args:
            event: At what of it.
            figures: What was seen.
        """
        if event == MEMORY:
            self._looks.append({"event": MEMORY, **figures})
        self._note(event, figures)

    def log(self, records: Sequence[StepRecord]) -> RunLog:
        """Return what is remembered, as a log that was read.

        Args:
            records: The records.
        """
        path = Path("this session") if self._run_log is None else self._run_log.path
        others = (*self._looks, *self._updates.values())
        return RunLog(header=self._header, steps=tuple(records), path=path, others=others)

    def note_states(self, number: int, record: StatesRecord) -> None:
        """Record that an optimizer has made an update.

        Args:
            number: Which of the session's optimizers.
            record: What its update was like.
        """
        document = {"optimizer": number, "step": self._steps, **asdict(record)}
        self._updates[number] = {"event": "states", **document}
        self._note("states", document)

    def note_states_choice(self, line: str | None, document: dict[str, object]) -> None:
        """Record that it was decided how many sub-groups of optimizer states travel.

        Args:
            line: How many, in words; ``None`` if it is as many as before.
            document: What that was decided by.
        """
        if line is not None and self._header.rank == 0:
            tell(f"states after step {self._steps}: {line}")
        self._note("states_plan", document)

    def write_known(self) -> None:
        """Write what waits for nothing any more."""
        waiting = self._waiting
        while waiting and (waiting[0][0] is None or waiting[0][0].are_there()):
            _, write = waiting.popleft()
            write()

    def write_all(self) -> None:
        """Write everything; waits for the device."""
        while self._waiting:
            _, write = self._waiting.popleft()
            write()

    def _note(self, event: str, document: dict[str, object]) -> None:
        if self._run_log is not None:
            self._in_order(partial(self._run_log.note, event, document))

    def _in_order(self, write: Callable[[], object], late: LateFigures | None = None) -> None:
        self._waiting.append((late, write))
        self.write_known()

    def _write(self, record: StepRecord, late: LateFigures | None) -> None:
        if late is not None:
            known, record = record, late.complete(record)
            self._put_in_place_of(known, record)
        if self._tells:
            tell(describe_step(record))
        if self._run_log is not None:
            self._run_log.write(record)
        for sink in self._on_step:
            sink(record)

    def _put_in_place_of(self, known: StepRecord, complete: StepRecord) -> None:
        records = self.records
        for index in range(len(records) - 1, -1, -1):
            if records[index] is known:
                records[index] = complete
                return

    def close(self) -> None:
        """Write what is missing, for which it waits, and close the run log."""
        try:
            self.write_all()
        finally:
            if self._run_log is not None:
                self._run_log.close()
