"""kvikio as far as the store uses it, on host memory, for tests of what is built on the store.

The store itself is tested with the real one, on a stub of the driver (``stub_driver.py``); there a test also
compares the names and arguments.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import os
import sys
import types
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
HAS_KVIKIO = importlib.util.find_spec("kvikio") is not None
"""Whether the real one is installed."""


class IOFutureStream:
    """What transfers on a stream return; it moves when it is asked."""

    def __init__(self, move: Callable[[], int]) -> None:
        self._move = move

    def check_bytes_done(self) -> int:
        return self._move()


class CuFile:
    """A file that is opened by its path, twice."""

    def __init__(self, file: str, flags: str = "r") -> None:
        if flags != "r+":
            raise ValueError(f"the store reads and writes, so not {flags!r}")
        self._fds = [os.open(file, os.O_RDWR | os.O_CLOEXEC) for _ in range(2)]

    def raw_write_async(
        self, buf: Any, raw_stream: int, size: int | None = None, file_offset: int = 0, dev_offset: int = 0
    ) -> IOFutureStream:
        memory = _bytes(buf)[dev_offset:][:size]
        return IOFutureStream(lambda: os.pwrite(self._fds[0], memory, file_offset))

    def raw_read_async(
        self, buf: Any, raw_stream: int, size: int | None = None, file_offset: int = 0, dev_offset: int = 0
    ) -> IOFutureStream:
        memory = _bytes(buf)[dev_offset:][:size]
        return IOFutureStream(lambda: os.preadv(self._fds[0], [memory], file_offset))

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _bytes(buf: Any) -> memoryview:
    """The bytes of a CUDA array, which lie on the host here."""
    interface = buf.__cuda_array_interface__
    (nbytes,), (address, _) = interface["shape"], interface["data"]
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


class CompatMode(enum.Enum):
    OFF, ON, AUTO = range(3)


def install(**driver: Any) -> types.ModuleType:
    """Puts it where ``import kvikio`` finds it.

    Args:
        **driver: What ``kvikio.cufile_driver.get`` tells; ``compat`` for ``is_compat_mode_preferred``.
    """
    package, defaults, cufile = (
        types.ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
    )
    driver = {"compat": False, "is_gds_available": True} | driver
    package.CuFile, package.__version__ = CuFile, "fake"  # type: ignore[attr-defined]
    package.CompatMode = CompatMode  # type: ignore[attr-defined]
    package.defaults, package.cufile_driver = defaults, cufile  # type: ignore[attr-defined]
    defaults.set = lambda *_: nullcontext()  # type: ignore[attr-defined]
    defaults.is_compat_mode_preferred = lambda: driver["compat"]  # type: ignore[attr-defined]
    cufile.get = driver.__getitem__  # type: ignore[attr-defined]
    cufile.libcufile_version = lambda: (1, 15)  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (package, defaults, cufile)})
    return package
