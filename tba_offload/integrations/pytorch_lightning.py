"""Callback for the ``Trainer`` of the package ``pytorch_lightning``.

::

    from tba_offload.integrations.pytorch_lightning import OffloadCallback

    Trainer(callbacks=[OffloadCallback("fit")]).fit(module, data)
"""

from __future__ import annotations

from tba_offload.errors import required
from tba_offload.integrations.lightning_hooks import LightningHooks

with required("pytorch_lightning", "OffloadCallback", extra="lightning"):
    from pytorch_lightning import Callback


class OffloadCallback(LightningHooks, Callback):  # type: ignore[misc]
    """Callback that offloads during ``Trainer.fit``. See :class:`LightningHooks` for the arguments."""
