"""Sinks that write the figures of each step to TensorBoard or W&B.

::

    from torch.utils.tensorboard import SummaryWriter
    from tba_offload.sinks import TensorBoardSink

    with tba.attach(model, "fit", on_step=TensorBoardSink(SummaryWriter())) as session:
        ...

A sink is a function that takes the :class:`tba_offload.StepRecord` of a step. The program itself has to flush
and close the writer or the run. Unknown figures are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tba_offload.report.log import FIGURES, PREFIX, curves_of

if TYPE_CHECKING:
    from tba_offload.report.log import StepRecord


class TensorBoardSink:
    """Sink for TensorBoard. The name of a curve is ``tba-offload/`` and the name of the figure.

    Args:
        writer: A ``SummaryWriter``, or another object with an ``add_scalar`` method.
        steps_before: Number of steps before this session, for a run that is resumed.
    """

    def __init__(self, writer: Any, *, steps_before: int = 0) -> None:
        self._writer = writer
        self._before = steps_before

    def __call__(self, record: StepRecord) -> None:
        """Write the figures of a step."""
        for name, value in curves_of(record, FIGURES).items():
            self._writer.add_scalar(name, value, self._before + record.step)


class WandbSink:
    """Sink for W&B. The name of a curve is ``tba-offload/`` and the name of the figure.

    The axis of the curves is ``tba-offload/step``, and not W&B's own counter. On an accelerator, the figures
    of a step are known one step later. W&B drops figures for earlier values of its counter.

    Args:
        run: The run that ``wandb.init`` returned.
        steps_before: Number of steps before this session, for a run that is resumed.
    """

    def __init__(self, run: Any, *, steps_before: int = 0) -> None:
        self._run = run
        self._before = steps_before
        self._axis = f"{PREFIX}step"
        run.define_metric(f"{PREFIX}*", step_metric=self._axis)

    def __call__(self, record: StepRecord) -> None:
        """Write the figures of a step."""
        self._run.log({self._axis: self._before + record.step, **curves_of(record, FIGURES)})
