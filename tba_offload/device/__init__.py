"""The machine under the stores: streams, events and memory of a device, and what measures that memory."""

from __future__ import annotations

from tba_offload.device.device import (
    READY,
    Accelerator,
    ByteRange,
    Device,
    Event,
    Mark,
    device_of,
    is_device_failure,
)

__all__ = ["READY", "Accelerator", "ByteRange", "Device", "Event", "Mark", "device_of", "is_device_failure"]
