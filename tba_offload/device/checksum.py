"""The name of :mod:`tba_offload.device.digest` at the place where a store still imports it."""
# ruff: noqa: PLC0414

from tba_offload.device.digest import sums as sums
