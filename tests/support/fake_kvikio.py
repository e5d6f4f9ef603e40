"""kvikio as far as the store uses it, on host memory: same names, same arguments, same errors."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
HAS_KVIKIO = importlib.util.find_spec("kvikio") is not None
"""Whether the real one is installed."""


class IOFuture:
    """What ``pread`` and ``pwrite`` return; it moves when it is asked."""

    def __init__(self, move: Callable[[], int]) -> None:
        self._move = move

    def get(self) -> int:
        return self._move()


class CuFile:
    """A file that is opened by its path, twice."""

    limit: int | None = None
    """Bytes after which a transfer stops short."""

    def __init__(self, file: str, flags: str = "r") -> None:
        if flags != "r+":
            raise ValueError(f"the store reads and writes, so not {flags!r}")
        self._fds = [os.open(file, os.O_RDWR | os.O_CLOEXEC) for _ in range(2)]

    def pwrite(
        self, buf: np.ndarray, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> IOFuture:
        view = self._bytes(buf, size, task_size)
        return IOFuture(lambda: _all(os.pwrite, self._fds[0], view, file_offset))

    def pread(
        self, buf: np.ndarray, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> IOFuture:
        view = self._bytes(buf, size, task_size)
        return IOFuture(
            lambda: _all(lambda fd, part, at: os.preadv(fd, [part], at), self._fds[0], view, file_offset)
        )

    def _bytes(self, buf: np.ndarray, size: int | None, task_size: int | None) -> memoryview:
        if not isinstance(buf, np.ndarray) or not task_size:
            raise TypeError(f"neither an array nor on a GPU: {type(buf)}")
        view = memoryview(buf).cast("B")[:size]
        return view if self.limit is None else view[: self.limit]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _all(move: Callable[[int, memoryview, int], int], fd: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        try:
            moved = move(fd, view[done:], offset + done)
        except OSError as error:
            raise RuntimeError(f"KvikIO failure: {error.strerror}") from None
        if moved == 0:
            break
        done += moved
    return done


def install(**driver: Any) -> types.ModuleType:
    """Puts it where ``import kvikio`` finds it.

    Args:
        **driver: What ``kvikio.cufile_driver.get`` tells; ``compat`` for ``is_compat_mode_preferred``.
    """
    package, defaults, cufile = (
        types.ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
    )
    settings = {"num_threads": 1}
    driver = {"compat": False, "is_gds_available": True} | driver
    package.CuFile, package.__version__ = CuFile, "fake"  # type: ignore[attr-defined]
    package.defaults, package.cufile_driver = defaults, cufile  # type: ignore[attr-defined]
    defaults.get = settings.__getitem__  # type: ignore[attr-defined]
    defaults.set = settings.__setitem__  # type: ignore[attr-defined]
    defaults.is_compat_mode_preferred = lambda: driver["compat"]  # type: ignore[attr-defined]
    cufile.get = driver.__getitem__  # type: ignore[attr-defined]
    cufile.libcufile_version = lambda: (1, 15)  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (package, defaults, cufile)})
    return package
