"""Drives that fail on demand: named faults, put below the product's own code.

A fault strikes in the lowest calls of the file store, ``pwrite``, ``pread`` and ``fallocate``: all above them
is what runs with a healthy drive too::

    with inject("flip-read:n=3", "hang-write:after=5") as faults:
        ...                       # train
    print(faults.fired)           # what was really injected
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

from tba_offload.config import parse_size
from tba_offload.store import posix
from tba_offload.store.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

READERS: dict[str, Callable[[str], float]] = {
    **dict.fromkeys(("n", "after", "times", "seed"), int),
    **dict.fromkeys(("chance", "seconds"), float),
    "bytes": parse_size,
    "errno": lambda name: int(getattr(errno, name)),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and when it strikes: whenever all conditions that are given hold, or at every call.

    Calls, bytes and strikes are counted for each drive alone.

    Attributes:
        kind: ``fail`` raises an ``errno``; ``short`` moves half of the bytes, in whole pages; ``nothing``
            moves none; ``zeros`` moves zeros instead of the data; ``flip`` changes one bit; ``lost`` reports
            a write that was not made; ``delay`` takes some seconds more; ``hang`` does not return until
            :meth:`Faults.release`.
        verb: In which calls: "write", "read" or "grow".
        n: The n-th call only, from 1.
        after: Every call after the call of this number.
        bytes: Every call with which more bytes than this would have moved.
        chance: Share of the calls, drawn by ``seed``.
        times: Most strikes.
        errno: The number that ``fail`` raises.
        seconds: How long ``delay`` takes.
        seed: What draws the calls and the bit that changes.
    """

    kind: str
    verb: str
    n: int | None = None
    after: int = 0
    bytes: int | None = None
    chance: float = 1.0
    times: int | None = None
    errno: int = errno.EIO
    seconds: float = 0.05
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``KIND-VERB`` or ``KIND-VERB:KEY=VALUE,…``; the keys are the attributes."""
        name, colon, conditions = text.partition(":")
        kind, verb = name.split("-")
        pairs = [condition.split("=") for condition in conditions.split(",")] if colon else []
        values: dict[str, Any] = {key: READERS[key](value) for key, value in pairs}
        return cls(kind, verb, **values)


class _Trigger:
    """Decides which calls on one drive a fault strikes; its owner holds a lock."""

    def __init__(self, fault: Fault, drive: int) -> None:
        self._fault = fault
        self._random = random.Random(f"{fault.seed} {drive}")
        self._calls = self._bytes = self._strikes = 0

    def pulled(self, nbytes: int) -> bool:
        fault = self._fault
        self._calls += 1
        struck = (
            fault.n in {None, self._calls}
            and self._calls > fault.after
            and (fault.bytes is None or self._bytes + nbytes > fault.bytes)
            and (fault.times is None or self._strikes < fault.times)
            and (fault.chance == 1 or self._random.random() < fault.chance)
        )
        self._strikes += struck
        self._bytes += 0 if struck else nbytes
        return struck

    def bit(self, nbytes: int) -> int:
        """Return a bit in the middle half of ``nbytes``: at the ends there may be padding."""
        return self._random.randrange(2 * nbytes, max(6 * nbytes, 2 * nbytes + 1))


class Faults:
    """Faults in the drives of this process; a context manager, each use of which begins anew.

    Args:
        faults: What to inject; at each call the first that is due strikes, alone.

    Attributes:
        fired: What was injected in this use, or in the last one, in order.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults = tuple(faults)
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.fired: list[Fault] = []
        self._released = threading.Event()
        self._triggers: dict[tuple[int, int], _Trigger] = {}

    def start(self) -> Self:
        """Put the faults below the stores of this process; for scripts that shall never be healthy again."""
        assert not isinstance(getattr(posix.pwrite, "__self__", None), Faults), "name all faults in one call"
        self._begin_anew()
        self._pwrite, self._pread, self._fallocate = posix.pwrite, posix.pread, posix.fallocate
        self._drive = threading.local()  # the one that a thread works for
        for name, call in (("pwrite", self._write), ("pread", self._read), ("fallocate", self._grow)):
            self._stack.enter_context(mock.patch.object(posix, name, call))
        for name in ("write", "read"):
            self._stack.enter_context(mock.patch.object(FileStore, name, self._on_drive(name)))
        return self

    def release(self) -> None:
        self._released.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.release()

    def _on_drive(self, name: str) -> Callable[..., int | None]:
        real = getattr(FileStore, name)

        def call(store: FileStore, extent: Any, memory: Any) -> int | None:
            self._drive.number = extent.drive
            try:
                checksum: int | None = real(store, extent, memory)
            finally:
                del self._drive.number
            return checksum

        return call

    def _write(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        fault, bit = self._strike("write", nbytes)
        if fault is None:
            return self._pwrite(fd, address, nbytes, offset)
        if fault.kind == "lost":
            return nbytes
        if fault.kind in {"flip", "zeros"}:
            with _pages(nbytes) as others:
                if fault.kind == "flip":
                    ctypes.memmove(others, address, nbytes)
                    _flip(others, bit)
                return self._pwrite(fd, others, nbytes, offset)
        return self._pwrite(fd, address, self._begin(fault, nbytes), offset)

    def _read(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        fault, bit = self._strike("read", nbytes)
        if fault is None:
            return self._pread(fd, address, nbytes, offset)
        moved = self._pread(fd, address, self._begin(fault, nbytes), offset)
        if fault.kind == "zeros":
            ctypes.memset(address, 0, moved)
        elif fault.kind == "flip" and bit // 8 < moved:
            _flip(address, bit)
        return moved

    def _grow(self, fd: int, offset: int, nbytes: int) -> None:
        fault, _ = self._strike("grow", nbytes)
        if fault is not None:
            self._begin(fault, nbytes)
        self._fallocate(fd, offset, nbytes)

    def _begin(self, fault: Fault, nbytes: int) -> int:
        """Do what comes before the call itself; return how many bytes it is to move."""
        if fault.kind == "fail":
            raise OSError(fault.errno, os.strerror(fault.errno))
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        if fault.kind == "hang":
            self._released.wait()
        half = nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE or nbytes
        return {"nothing": 0, "short": half}.get(fault.kind, nbytes)

    def _strike(self, verb: str, nbytes: int) -> tuple[Fault | None, int]:
        """Return the fault that strikes this call, if any, and a bit of the bytes."""
        drive = getattr(self._drive, "number", 0 if verb == "grow" else None)
        if drive is None:  # a store is opened
            return None, 0
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.verb != verb:
                    continue
                trigger = self._triggers.setdefault((index, drive), _Trigger(fault, drive))
                if trigger.pulled(nbytes):
                    self.fired.append(fault)
                    return fault, trigger.bit(nbytes)
        return None, 0


@contextmanager
def _pages(nbytes: int) -> Iterator[int]:
    with mmap.mmap(-1, nbytes) as pages:
        here = ctypes.c_char.from_buffer(pages)
        try:
            yield ctypes.addressof(here)
        finally:
            del here


def _flip(address: int, bit: int) -> None:
    byte = ctypes.c_ubyte.from_address(address + bit // 8)
    byte.value ^= 1 << bit % 8


def inject(*faults: str | Fault) -> Faults:
    return Faults([Fault.parse(fault) if isinstance(fault, str) else fault for fault in faults])
