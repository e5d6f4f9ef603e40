"""Names of :mod:`tba_offload.device.device` at the place where transfers still import them."""
# ruff: noqa: PLC0414

from tba_offload.device.device import CACHE_LINE as CACHE_LINE
from tba_offload.device.device import ByteRange as ByteRange
from tba_offload.device.device import aligned_range as aligned_range
from tba_offload.device.device import blank as blank
from tba_offload.device.device import new_storage as new_storage
