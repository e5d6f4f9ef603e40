"""The session of a trainer's callback, from the start to the end of the trainer's training function."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

from tba_offload.attachment import attach
from tba_offload.config import read_config
from tba_offload.formatting import significant
from tba_offload.report.log import curves_of
from tba_offload.session import session_of

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from tba_offload.config import ConfigLike
    from tba_offload.session import Session
    from tba_offload.session.loop import Step


_begun: weakref.WeakSet[Session] = weakref.WeakSet()
"""All sessions that callbacks have opened."""


class Training:
    """A session that is open from the start to the end of a training.

    Args:
        config: Argument of :func:`tba_offload.attach`.
        run_log: Argument of :func:`tba_offload.attach`.
        options: More arguments for :func:`tba_offload.attach`.

    Attributes:
        session: The session of the current or last training; ``None`` before the first training.
    """

    def __init__(
        self, config: ConfigLike, run_log: str | os.PathLike[str] | None, options: dict[str, Any]
    ) -> None:
        known = inspect.signature(attach).parameters
        for name in options.keys() - known:
            raise TypeError(
                f"OffloadCallback has no argument {name!r}. The arguments of attach() are {', '.join(known)}"
            )
        read_config(config)  # a wrong policy is an error before the training
        self.session: Session | None = None
        self._config, self._run_log, self._options = config, run_log, options
        self._reported = 0
        self._step: Step | None = None  # the open step, for a trainer whose steps callbacks mark

    def begin(
        self,
        model: nn.Module,
        *,
        optimizers: Sequence[Optimizer] = (),
        batch_size: int | None = None,
    ) -> None:
        """Attach the model, after closing sessions that an earlier training left open after an exception.

        Args:
            model: The model to attach.
            optimizers: The optimizers of the model. If the policy has ``states``, the optimizers' states are
                offloaded.
            batch_size: Number of sequences in a step, for the run log. ``batch_size`` is ignored if
                ``model_info`` is passed as an option.
        """
        self.end()
        left = session_of(model)
        if left is not None and left in _begun:  # an exception has stopped that training, as in a notebook
            left.__exit__(None, InterruptedError(), None)
        self._reported = 0
        config = read_config(self._config)
        options = {
            "optimizer": optimizers if config.states is not None else None,
            "model_info": None if batch_size is None else {"batch_size": batch_size},
        } | self._options
        self.session = attach(model, config, run_log=self._run_log, **options)
        _begun.add(self.session)

    def begin_step(self) -> None:
        """Open a step. A trainer calls this method if its optimizer updates copies of the parameters."""
        if self.session is not None:
            self._step = self.session.step()
            self._step.__enter__()

    def end_step(self) -> None:
        """End the step that :meth:`begin_step` opened, if a step is open."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def end(self, error: BaseException | None = None) -> None:
        """Close the session, unless it is already closed. A step that is still open is not recorded.

        Args:
            error: The exception that ended the training, if any. After an exception, an error during closing
                becomes a warning.
        """
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(InterruptedError, None, None)
        if self.session is not None:
            self.session.__exit__(None if error is None else type(error), error, None)

    def news(self) -> dict[str, float]:
        """Return the activation peak and the stall of the last step, but only once for each step."""
        last = self.session.last if self.session is not None else None
        if last is None or last.step == self._reported:
            return {}
        self._reported = last.step
        figures = curves_of(last, ("activation_peak_gib", "stall_seconds"))
        return {name: float(significant(value)) for name, value in figures.items()}
