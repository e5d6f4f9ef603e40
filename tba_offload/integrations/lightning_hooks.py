"""Hooks of a Lightning callback, for the packages ``lightning`` and ``pytorch_lightning``."""

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

    For each step, the hooks log two figures with the module's ``log_dict``: the activation peak in GiB, and
    the stall in seconds.

    Args:
        config: The policy, such as ``"fit"`` or a placement; see :func:`tba_offload.attach`. If the policy
            has ``states``, the states of the trainer's optimizers are also offloaded.
        module: Name of the submodule to attach, such as ``"model"`` or ``"model.encoder"``. By default, the
            whole LightningModule is attached.
        run_log: Path of the run log; see :func:`tba_offload.attach`.
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
        """The session of the current or last training; ``None`` before the first training."""
        return self._training.session

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Attach the model after Lightning has moved, wrapped and checked the model."""
        model = pl_module if self._module is None else pl_module.get_submodule(self._module)
        self._training.begin(model, optimizers=trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: object) -> None:
        """Log the activation peak and the stall of the last complete step."""
        figures = self._training.news()
        if figures:
            pl_module.log_dict(figures)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Close the session after an exception, because Lightning calls no other hook afterwards."""
        self._training.end(exception)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Close the session and restore the model."""
        self._training.end()
