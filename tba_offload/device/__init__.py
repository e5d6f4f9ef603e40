"""The machine under the stores: streams, events and memory of a device, each with a CPU twin."""

from __future__ import annotations

from tba_offload.device.ranges import ByteRange
from tba_offload.device.streams import READY, CpuDevice, CudaDevice, Device, Event, Mark, device_of

__all__ = ["READY", "ByteRange", "CpuDevice", "CudaDevice", "Device", "Event", "Mark", "device_of"]
