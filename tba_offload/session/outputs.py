"""What the model put out and the program still holds, as ``outputs = model(...)`` does until the next one.

Of earlier steps it is there when a step begins, and mostly gone before that ends: it does not last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba_offload.device.live_bytes import LiveBytes, plain_storage
from tba_offload.layers.nested import TooManyError, tensors_in

if TYPE_CHECKING:
    import torch

    from tba_offload.capture.identity import StaticStorages


class Outputs:
    """Counts the storages of what the model put out.

    Args:
        device: Storages elsewhere do not count.
        static: Storages of the model itself, which do not count either.

    Attributes:
        at_begin: Bytes that were there when the step began.
    """

    def __init__(self, device: torch.device, static: StaticStorages) -> None:
        self.at_begin = 0
        self._static = static
        self._live = LiveBytes(device)

    @property
    def nbytes(self) -> int:
        """Bytes that are there now."""
        return self._live.nbytes

    def begin_step(self) -> None:
        """Record that what is there now is of earlier steps."""
        self.at_begin = self.nbytes

    def note(self, output: object) -> None:
        """Record that the model's forward has ended with this output."""
        try:
            tensors = list(tensors_in(output))
        except TooManyError:
            return
        for storage in map(plain_storage, tensors):
            if storage is not None and storage not in self._static:
                self._live.add_storage(storage)
