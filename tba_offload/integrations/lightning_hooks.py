"""What offloading does when PyTorch Lightning calls, by whichever of its two names it was installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from tba_offload.errors import UnsupportedError
from tba_offload.integrations.training import Training
from tba_offload.layers.find import find_layers

if TYPE_CHECKING:
    import os

    from tba_offload.config import ConfigLike
    from tba_offload.session import Session


class LightningHooks:
    """Attaches offloading to the model of a Lightning ``Trainer`` while it fits.

    The figures of each step, peak, bytes and stall, are logged by the module's own ``log_dict``.

    Args:
        config: As for :func:`tba_offload.attach`. Where it has ``states``, those of the trainer's optimizers
            are offloaded too.
        module: Name of the attribute of the LightningModule that is the model, as ``"model"`` or
            ``"model.encoder"``; by default the LightningModule, or if it has no ``forward`` of its own, that
            one of its modules which holds all the layers.
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
        """The session of this training, or the last one; ``None`` before the first."""
        return self._training.session

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Attaches the model, which Lightning has moved, wrapped and checked by now."""
        model = _called(pl_module) if self._module is None else pl_module.get_submodule(self._module)
        self._training.begin(model, optimizers=trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: object) -> None:
        """Log the figures of a step that has ended."""
        figures = self._training.news()
        if figures:
            pl_module.log_dict(figures)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Give the model back as it was: after an exception Lightning calls nothing else."""
        self._training.end(exception)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Give the model back as it was."""
        self._training.end()


def _called(module: nn.Module) -> nn.Module:
    """Return the model that the training calls: a module without a ``forward`` is never called itself."""
    if _has_forward(module):
        return module
    held = [part for part in module.children() if _has_forward(part) and _holds_layers(part, module)]
    return held[0] if len(held) == 1 else module


def _has_forward(module: nn.Module) -> bool:
    """Whether it can be called: all others inherit a method that only raises an error.

    Lightning's own module has one too, that asks the one above it.
    """
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return owner is not nn.Module and owner.__name__ != "LightningModule"


def _holds_layers(part: nn.Module, module: nn.Module) -> bool:
    try:
        inner = {layer.module for layer in find_layers(part).layers}
        return inner == {layer.module for layer in find_layers(module).layers}
    except UnsupportedError:
        return False
