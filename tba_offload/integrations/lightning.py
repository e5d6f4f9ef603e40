"""Callback for the ``Trainer`` of the package ``lightning``.

::

    from tba_offload.integrations.lightning import OffloadCallback

    Trainer(callbacks=[OffloadCallback("fit")]).fit(module, data)
"""

from __future__ import annotations

from tba_offload.errors import required
from tba_offload.integrations.lightning_hooks import LightningHooks

with required("lightning", "OffloadCallback", extra="lightning"):
    from lightning.pytorch import Callback


class OffloadCallback(LightningHooks, Callback):  # type: ignore[misc]
    """Callback that offloads during ``Trainer.fit``. See :class:`LightningHooks` for the arguments."""
