"""Where the figures of steps go beside the run log: TensorBoard, W&B, a table, a line on the terminal.

::

    from torch.utils.tensorboard import SummaryWriter
    from tba_offload.sinks import TensorBoardSink

    with tba.attach(model, "policy.yaml", on_step=TensorBoardSink(SummaryWriter())) as session:
        ...

A sink is called with the :class:`tba_offload.StepRecord` of each step; so may be any function. What a user
gives to it, a writer or a run, stays the user's, to be flushed and closed. A figure that is not known is left
out.
"""

from __future__ import annotations

import csv
import logging
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from tba_offload.report.log import FIGURES, PREFIX, curves_of, describe_step

if TYPE_CHECKING:
    from tba_offload.report.log import StepRecord

logger = logging.getLogger(__name__)

STEP = "step"
"""Name of the column of a table that counts steps."""

_CLEARED = "\r\x1b[K"
"""Characters that empty the line of a terminal that the cursor is in."""


class ScalarWriter(Protocol):
    """What is asked of a writer for TensorBoard; ``torch.utils.tensorboard.SummaryWriter`` is one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Add a point to a curve."""


class WandbRun(Protocol):
    """What is asked of a run of W&B; ``wandb.Run`` is one."""

    def define_metric(self, name: str, *, step_metric: str) -> object:
        """Give curves an axis."""

    def log(self, data: dict[str, Any]) -> object:
        """Add a point to curves."""


class TensorBoardSink:
    """Writes curves for TensorBoard, named ``tba-offload/`` and the name of the figure.

    Args:
        writer: A ``SummaryWriter``.
        steps_before: Steps that were made before this session, as in a run that is resumed.
    """

    def __init__(self, writer: ScalarWriter, *, steps_before: int = 0) -> None:
        self._writer = writer
        self._before = steps_before

    def __call__(self, record: StepRecord) -> None:
        """Add a step."""
        for name, value in curves_of(record, FIGURES).items():
            self._writer.add_scalar(name, value, self._before + record.step)


class WandbSink:
    """Logs to W&B, under ``tba-offload/`` and the name of the figure.

    The axis of these curves is ``tba-offload/step``, not W&B's own counter: on an accelerator the figures of
    a step are known a step later, and W&B drops what comes for a step that it has left.

    Args:
        run: What ``wandb.init`` returned.
        steps_before: Steps that were made before this session, as in a run that is resumed.
    """

    def __init__(self, run: WandbRun, *, steps_before: int = 0) -> None:
        self._run = run
        self._before = steps_before
        self._axis = PREFIX + STEP
        run.define_metric(f"{PREFIX}*", step_metric=self._axis)

    def __call__(self, record: StepRecord) -> None:
        """Add a step."""
        self._run.log({self._axis: self._before + record.step, **curves_of(record, FIGURES)})


class CsvSink:
    """Writes a table, a line for each step, of which the first line names the columns.

    The columns are always the same. A figure that is not known is an empty cell, and a number is written so
    that it can be read back exactly. Where the file cannot be written, a warning says so once, and training
    goes on.

    Args:
        file: An open text file, as by ``open("steps.csv", "w", newline="")``. To one that was opened to
            append (``"a"``) and has lines already, no names of columns are written.
        steps_before: Steps that were made before this session, as in a run that is resumed.
    """

    def __init__(self, file: TextIO, *, steps_before: int = 0) -> None:
        self._file = file
        self._before = steps_before
        self._table = csv.DictWriter(file, (STEP, *FIGURES), lineterminator="\n")
        self._is_begun = file.seekable() and file.tell() > 0
        self._has_warned = False

    def __call__(self, record: StepRecord) -> None:
        """Add a step."""
        figures = {name: getattr(record, name) for name in FIGURES}
        try:
            if not self._is_begun:
                self._is_begun = True
                self._table.writeheader()
            self._table.writerow({STEP: self._before + record.step, **figures})
            self._file.flush()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("the table of steps cannot be written: %s; training goes on", error)


class StatusLine:
    """Shows the last step in one line: on a terminal always the same one, elsewhere one more for each step.

    It is meant for loops that print little themselves: what they print on a terminal begins where the line
    ends. A stream that cannot be written ends no training.

    Args:
        file: Where to; by default what ``sys.stderr`` is when a step comes.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file

    def __call__(self, record: StepRecord) -> None:
        """Show a step."""
        file = self._file or sys.stderr
        line = describe_step(record)
        with suppress(OSError, ValueError):  # it is full, broken or closed
            if file.isatty():
                file.write(_CLEARED + line[: shutil.get_terminal_size().columns - 1])
            else:
                file.write(f"{line}\n")
            file.flush()
