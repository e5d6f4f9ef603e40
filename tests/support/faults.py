"""Drives that fail on demand: named faults, put below the product's own code.

A fault strikes in the lowest calls of the file store: ``pwrite``, ``pread``, those that join several extents,
``pwritev`` and ``preadv``, and ``fallocate``. All above them is what runs with a healthy drive too::

    with inject("flip-read:n=3", "hang-write:after=5,drive=1") as faults:
        ...                       # train
    print(faults.fired)           # what was really injected

Stores of kind ``gds`` go to the drive through cuFile, and host memory has no drive: neither is touched.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self

from tba_offload.config import parse_size
from tba_offload.store import posix
from tba_offload.store.extents import BLOCK
from tba_offload.store.file import FileStore
from tba_offload.store.process import open_stores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

WRITE, READ, GROW = "write", "read", "grow"
CALLS = ("pwrite", "pread", "fallocate", "pwritev", "preadv")
READERS: dict[str, Callable[[str], float]] = {
    **dict.fromkeys(("n", "after", "times", "drive", "seed"), int),
    **dict.fromkeys(("chance", "seconds"), float),
    "bytes": parse_size,
    "errno": lambda name: int(getattr(errno, name)),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and when it strikes: whenever all conditions that are given hold, or at every call.

    Calls, bytes and strikes are counted for each drive alone; a call that joins several extents is one.

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
        drive: On this drive only, by its place among the store's directories, from 0.
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
    drive: int | None = None
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
        """Whether this call of ``nbytes`` is struck."""
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
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forgets calls, bytes and strikes; what still hangs of an earlier use was let go with that."""
        self.fired: list[Fault] = []
        self._released = threading.Event()
        self._triggers: dict[tuple[int, int], _Trigger] = {}
        self._real: dict[str, Any] = {name: getattr(posix, name) for name in CALLS}

    def start(self) -> Self:
        """Put the faults below the stores of this process; for scripts that shall never be healthy again."""
        assert not isinstance(getattr(posix.pwrite, "__self__", None), Faults), "name all faults in one call"
        self._begin_anew()
        ours = (self._write, self._read, self._grow, self._write_joined, self._read_joined)
        for name, call in zip(CALLS, ours, strict=True):
            setattr(posix, name, call)
        return self

    def release(self) -> None:
        """Lets every call that hangs go on, and those to come."""
        self._released.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        for name, call in self._real.items():
            setattr(posix, name, call)
        self.release()

    def _write(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        fault, bit = self._strike(WRITE, fd, nbytes)
        if fault is None:
            return int(self._real["pwrite"](fd, address, nbytes, offset))
        return self._write_struck(fault, bit, fd, address, nbytes, offset)

    def _write_joined(self, fd: int, address: int, parts: int, offset: int) -> int:
        pieces = _pieces_at(address, parts)
        nbytes = sum(length for _, length in pieces)
        fault, bit = self._strike(WRITE, fd, nbytes, _extents_of(pieces))
        if fault is None:
            return int(self._real["pwritev"](fd, address, parts, offset))
        with _pages(nbytes) as block:  # what lies next to each other in the file
            done = block
            for start, length in pieces:
                ctypes.memmove(done, start, length)
                done += length
            return self._write_struck(fault, bit, fd, block, nbytes, offset)

    def _write_struck(self, fault: Fault, bit: int, fd: int, address: int, nbytes: int, offset: int) -> int:
        if fault.kind == "lost":
            return nbytes
        if fault.kind in {"flip", "zeros"}:
            with _pages(nbytes) as others:
                if fault.kind == "flip":
                    ctypes.memmove(others, address, nbytes)
                    _flip(others, bit)
                return int(self._real["pwrite"](fd, others, nbytes, offset))
        return int(self._real["pwrite"](fd, address, self._begin(fault, nbytes), offset))

    def _read(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        fault, bit = self._strike(READ, fd, nbytes)
        if fault is None:
            return int(self._real["pread"](fd, address, nbytes, offset))
        return self._read_struck(fault, bit, fd, address, nbytes, offset)

    def _read_joined(self, fd: int, address: int, parts: int, offset: int) -> int:
        pieces = _pieces_at(address, parts)
        nbytes = sum(length for _, length in pieces)
        fault, bit = self._strike(READ, fd, nbytes, _extents_of(pieces))
        if fault is None:
            return int(self._real["preadv"](fd, address, parts, offset))
        with _pages(nbytes) as block:
            moved = self._read_struck(fault, bit, fd, block, nbytes, offset)
            done = 0
            for start, length in pieces:
                ctypes.memmove(start, block + done, max(min(length, moved - done), 0))
                done += length
        return moved

    def _read_struck(self, fault: Fault, bit: int, fd: int, address: int, nbytes: int, offset: int) -> int:
        moved = int(self._real["pread"](fd, address, self._begin(fault, nbytes), offset))
        if fault.kind == "zeros":
            ctypes.memset(address, 0, moved)
        elif fault.kind == "flip" and bit // 8 < moved:
            _flip(address, bit)
        return moved

    def _grow(self, fd: int, offset: int, nbytes: int) -> None:
        fault, _ = self._strike(GROW, fd, nbytes)
        if fault is not None:
            self._begin(fault, nbytes)
        self._real["fallocate"](fd, offset, nbytes)

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

    def _strike(
        self, verb: str, fd: int, nbytes: int, extents: Sequence[tuple[int, int]] = ()
    ) -> tuple[Fault | None, int]:
        """Return the fault that strikes this call, if any, and a bit of the bytes.

        Args:
            verb: What the call does.
            fd: To the file of which drive.
            nbytes: How much of it.
            extents: First byte and bytes of each that the call joins.
        """
        drive = _drive_of(fd)
        if drive is None:
            return None, 0
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.verb != verb or fault.drive not in {None, drive}:
                    continue
                trigger = self._triggers.setdefault((index, drive), _Trigger(fault, drive))
                if trigger.pulled(nbytes):
                    start, length = max(extents, default=(0, nbytes), key=itemgetter(1))
                    self.fired.append(fault)
                    return fault, 8 * start + trigger.bit(length)
        return None, 0


def _pieces_at(address: int, parts: int) -> list[tuple[int, int]]:
    """Address and length of the pieces of memory of a joined call."""
    words = (ctypes.c_ulong * (2 * parts)).from_address(address)
    return list(zip(words[::2], words[1::2], strict=True))


def _extents_of(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """First byte and number of the bytes of each extent in a joined call; between them lies filling."""
    found, start = [], 0
    for _, length in pieces:
        if start % BLOCK == 0:  # where extents begin; what fills the rest of one is less than that
            found.append((start, length))
        start += length
    return found


@contextmanager
def _pages(nbytes: int) -> Iterator[int]:
    """Return the address of zeros that are aligned for direct I/O."""
    with mmap.mmap(-1, nbytes) as pages:
        here = ctypes.c_char.from_buffer(pages)
        try:
            yield ctypes.addressof(here)
        finally:
            del here


def _flip(address: int, bit: int) -> None:
    """Flips a bit of memory, counted from an address."""
    byte = ctypes.c_ubyte.from_address(address + bit // 8)
    byte.value ^= 1 << bit % 8


def _drive_of(fd: int) -> int | None:
    """Return the number of the drive whose file this is; none while its store is still opening."""
    for store in open_stores():
        if isinstance(store, FileStore) and store.fileno() == fd:
            return store.drive_index
    return None


def inject(*faults: str | Fault) -> Faults:
    """Faults to put into the drives of this process, as a context manager."""
    return Faults([Fault.parse(fault) if isinstance(fault, str) else fault for fault in faults])
