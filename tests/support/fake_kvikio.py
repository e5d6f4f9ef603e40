"""kvikio and cuFile as far as the store uses them, on host memory, for tests of what is built on the store.

The store itself is tested with the real kvikio, on a stub of the driver (``stub_driver.py``).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import types
from typing import Any

from tba_offload.device import Device


class PinningDevice(Device):
    pins_memory = True


MODULES = ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
HAS_KVIKIO = importlib.util.find_spec("kvikio") is not None
"""Whether the real one is installed."""


class CuFile:
    def __init__(self, fd: int) -> None:
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    def write(self, _: int, address: int, nbytes: int, offset: int) -> int:
        return os.pwrite(self._fd, _bytes(address, nbytes), offset)

    def read(self, _: int, address: int, nbytes: int, offset: int) -> int:
        return os.preadv(self._fd, [_bytes(address, nbytes)], offset)

    def close(self) -> None:
        os.close(self._fd)


def _bytes(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def install(**driver: Any) -> types.ModuleType:
    """Put it where ``import kvikio`` finds it; ``driver`` is what it tells of the driver and of its mode."""
    package, defaults, cufile = (
        types.ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
    )
    driver = {"compat": False, "is_gds_available": True} | driver
    package.defaults, package.cufile_driver = defaults, cufile  # type: ignore[attr-defined]
    defaults.is_compat_mode_preferred = lambda: driver["compat"]  # type: ignore[attr-defined]
    cufile.get = driver.__getitem__  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (package, defaults, cufile)})
    return package
