"""The sessions of a callback: one for each training that its trainer does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from tba_offload.attachment import attach
from tba_offload.config import read_config
from tba_offload.report.log import MAIN_FIGURES, curves_of

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from tba_offload.config import ConfigLike
    from tba_offload.session import Session
    from tba_offload.session.loop import Step


_open: weakref.WeakSet[Training] = weakref.WeakSet()
"""Those that have begun."""


class Training:
    """Opens a session when a training begins and closes it when the training ends.

    Args:
        config: As for :func:`tba_offload.attach`.
        run_log: As for :func:`tba_offload.attach`.
        options: More arguments for :func:`tba_offload.attach`.

    Attributes:
        session: That of this training or the last one; ``None`` before the first.
    """

    def __init__(
        self, config: ConfigLike, run_log: str | os.PathLike[str] | None, options: dict[str, Any]
    ) -> None:
        self.session: Session | None = None
        self._config, self._run_log, self._options = config, run_log, options
        self._reported = 0
        self._step: Step | None = None  # told by hand, and open

    def begin(
        self,
        model: nn.Module,
        *,
        optimizers: Sequence[Optimizer] = (),
        batch_size: int | None = None,
    ) -> None:
        """Attaches the model; a session that an exception has left open is closed first.

        Args:
            model: The model.
            optimizers: Those that train it; where the configuration has ``states``, theirs are offloaded.
            batch_size: Sequences of a step, for the run log, unless the options have a ``model_info``.
        """
        self.end()
        for other in list(_open):  # of a callback that an exception has cut off, as in a notebook
            if other.session is not None and other.holds(model):
                other.end()
        _open.add(self)
        self._reported = 0
        config = read_config(self._config)
        options = {
            "optimizer": optimizers if config.states is not None else None,
            "model_info": None if batch_size is None else {"batch_size": batch_size},
        } | self._options
        self.session = attach(model, config, run_log=self._run_log, **options)

    def begin_step(self) -> None:
        """Open a step by hand, for a trainer whose steps are not found."""
        if self.session is not None:
            self._step = self.session.step()
            self._step.__enter__()

    def end_step(self) -> None:
        """End that step, if there is one."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def end(self, error: BaseException | None = None) -> None:
        """Close the session; may be called twice. A step that is open comes to nothing.

        Args:
            error: What has ended the training; errors of the session's own are only warnings then.
        """
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(InterruptedError, None, None)
        if self.session is not None:
            self.session.__exit__(None if error is None else type(error), error, None)

    def holds(self, model: nn.Module) -> bool:
        """Whether the session is attached to layers of a model."""
        layers = {layer.module for layer in self.session.layers} if self.session is not None else set()
        return not layers.isdisjoint(model.modules())

    def news(self) -> dict[str, float]:
        """Return the main figures of the last step, once; nothing if no step has ended since."""
        records = self.session.report() if self.session is not None else []
        if not records or records[-1].step == self._reported:
            return {}
        self._reported = records[-1].step
        return curves_of(records[-1], MAIN_FIGURES)
