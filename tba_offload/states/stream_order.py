"""Work that is given to a device on several streams, in the order in which the host gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba_offload.device import Device


class StreamOrder:
    """A context manager: the work of a block comes after that of the block before, whatever their streams.

    Hooks of autograd are called on the stream that made a gradient, FSDP2's on the one that reduced it; an
    optimizer's step, and what comes instead of it, have another. Blocks may lie within each other.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last = device.event()

    def __enter__(self) -> None:
        self._last.wait(self._device.stream())  # without it, that of the current device

    def __exit__(self, *_: object) -> None:
        self._last = self._device.event()
