"""Where the figures of steps go beside the run log: to TensorBoard, or to W&B.

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

from typing import TYPE_CHECKING, Any

from tba_offload.report.log import FIGURES, PREFIX, curves_of

if TYPE_CHECKING:
    from tba_offload.report.log import StepRecord


class TensorBoardSink:
    """Writes curves for TensorBoard, named ``tba-offload/`` and the name of the figure.

    Args:
        writer: A ``SummaryWriter``, or another object with its ``add_scalar``.
        steps_before: Steps that were made before this session, as in a run that is resumed.
    """

    def __init__(self, writer: Any, *, steps_before: int = 0) -> None:
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

    def __init__(self, run: Any, *, steps_before: int = 0) -> None:
        self._run = run
        self._before = steps_before
        self._axis = f"{PREFIX}step"
        run.define_metric(f"{PREFIX}*", step_metric=self._axis)

    def __call__(self, record: StepRecord) -> None:
        """Add a step."""
        self._run.log({self._axis: self._before + record.step, **curves_of(record, FIGURES)})
