"""Sinks that write the figures of each step to TensorBoard or W&B.

::

    from torch.utils.tensorboard import SummaryWriter
    from tba_offload.sinks import TensorBoardSink

    with tba.attach(model, "fit", on_step=TensorBoardSink(SummaryWriter())) as session:
        ...

A sink is a callable that takes the :class:`tba_offload.StepRecord` of a step. A sink writes no value for an
unknown figure. The program must flush and close the TensorBoard writer or the W&B run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tba_offload.report.log import FIGURES, PREFIX, curves_of

if TYPE_CHECKING:
    from tba_offload.report.log import StepRecord


class TensorBoardSink:
    """Sink for TensorBoard. Each curve is named ``tba-offload/`` plus the name of the figure.

    Args:
        writer: A ``SummaryWriter``, or another object with an ``add_scalar`` method.
        steps_before: Number of steps that a resumed run had before this session.
    """

    def __init__(self, writer: Any, *, steps_before: int = 0) -> None:
        self._writer = writer
        self._before = steps_before

    def __call__(self, record: StepRecord) -> None:
        """Write the figures of a step to the curves."""
        for name, value in curves_of(record, FIGURES).items():
            self._writer.add_scalar(name, value, self._before + record.step)


class WandbSink:
    """Sink for W&B. Each curve is named ``tba-offload/`` plus the name of the figure.

    The x-axis of the curves is ``tba-offload/step``. W&B's own step counter is not used, because W&B would
    drop the figures of steps on an accelerator, which are known one step later.

    Args:
        run: The run object from ``wandb.init``.
        steps_before: Number of steps that a resumed run had before this session.
    """

    def __init__(self, run: Any, *, steps_before: int = 0) -> None:
        self._run = run
        self._before = steps_before
        self._axis = f"{PREFIX}step"
        run.define_metric(f"{PREFIX}*", step_metric=self._axis)

    def __call__(self, record: StepRecord) -> None:
        """Write the figures of a step to the curves."""
        self._run.log({self._axis: self._before + record.step, **curves_of(record, FIGURES)})
