"""Callback for the ``Trainer`` of the package ``pytorch_lightning``.

::

    from tba_offload.integrations.pytorch_lightning import OffloadCallback

    Trainer(callbacks=[OffloadCallback("fit")]).fit(module, data)
"""

from __future__ import annotations

from tba_offload.errors import MissingDependencyError
from tba_offload.integrations.lightning_hooks import LightningHooks

try:
    from pytorch_lightning import Callback
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "pytorch_lightning":
        raise
    raise MissingDependencyError("pytorch_lightning", "OffloadCallback", extra="lightning") from error


class OffloadCallback(LightningHooks, Callback):  # type: ignore[misc]
    """Callback that offloads during ``Trainer.fit``. See :class:`LightningHooks` for the arguments."""
