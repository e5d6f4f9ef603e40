"""Names of :mod:`tba_offload.device.device` at the place where the stores still import them."""
# ruff: noqa: PLC0414

from tba_offload.device.device import READY as READY
from tba_offload.device.device import Device as Device
from tba_offload.device.device import Event as Event
from tba_offload.device.device import check_not_captured as check_not_captured
from tba_offload.device.device import device_of_model as device_of_model
from tba_offload.device.host_memory import never_freed as never_freed

CpuDevice = Device
