"""The machine under the stores: streams, events and memory of a device, each with a CPU twin."""

from __future__ import annotations

from tba_offload.device.ranges import ByteRange
from tba_offload.device.streams import (
    READY,
    Accelerator,
    CpuDevice,
    Device,
    Event,
    Mark,
    device_of,
    is_device_failure,
)

__all__ = [
    "READY",
    "Accelerator",
    "ByteRange",
    "CpuDevice",
    "Device",
    "Event",
    "Mark",
    "device_of",
    "is_device_failure",
]
