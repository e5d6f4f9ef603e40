"""Hooks of a PyTorch Lightning callback, shared by both packages that contain Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tba_offload.integrations.training import Training

if TYPE_CHECKING:
    import os

    from torch import nn

    from tba_offload.config import ConfigLike
    from tba_offload.session import Session


class LightningHooks:
    """Hooks that attach offloading to the model of a Lightning ``Trainer`` during ``fit``.

    The module's ``log_dict`` logs the activation peak in GiB and the stall in seconds of each step.

    Args:
        config: As for :func:`tba_offload.attach`, such as ``"fit"`` or a placement. If the policy has
            ``states``, the states of the trainer's optimizers are offloaded too.
        module: Name of the attribute of the LightningModule that is the model, such as ``"model"`` or
            ``"model.encoder"``. By default the LightningModule itself.
        run_log: As for :func:`tba_offload.attach`.
        options: More arguments for :func:`tba_offload.attach`.
    """

    def __init__(
        self,
        config: ConfigLike = None,
        *,
        module: str | None = None,
        run_log: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._module = module
        self._training = Training(config, run_log, options)

    @property
    def session(self) -> Session | None:
        """The session of the current or last training; ``None`` before the first one."""
        return self._training.session

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Attach the model, after Lightning has moved, wrapped and checked it."""
        model = pl_module if self._module is None else pl_module.get_submodule(self._module)
        self._training.begin(model, optimizers=trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: object) -> None:
        """Log the figures of a step that has ended."""
        figures = self._training.news()
        if figures:
            pl_module.log_dict(figures)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Close the session, because Lightning calls no other hook after an exception."""
        self._training.end(exception)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Close the session, which restores the model."""
        self._training.end()
