"""Drives that fail on demand: named faults, put below the product's own code.

A fault strikes in the lowest calls of the file store: ``pwrite``, ``pread``, those that join several extents,
``pwritev`` and ``preadv``, and ``fallocate``. All above them, queues, threads, checksums, the continuation of
short transfers and the translation of errors, is what runs with a healthy drive too: a joined call that fails
or is cut short is followed by one for each extent::

    with inject("flip-read:n=3", "hang-write:after=5,drive=1") as faults:
        ...                       # train
    print(faults.fired)           # what was really injected, and where

Stores of kind ``gds`` go to the drive through cuFile, and host memory has no drive: neither is touched.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tba_offload.config import format_size, parse_size
from tba_offload.errors import ConfigError
from tba_offload.store import posix
from tba_offload.store.extents import BLOCK
from tba_offload.store.file import FileStore
from tba_offload.store.process import open_stores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

WRITE, READ, GROW = "write", "read", "grow"

KINDS = {
    "fail": (WRITE, READ, GROW),
    "short": (WRITE, READ),
    "nothing": (WRITE, READ),
    "zeros": (WRITE, READ),
    "flip": (WRITE, READ),
    "lost": (WRITE,),
    "delay": (WRITE, READ, GROW),
    "hang": (WRITE, READ, GROW),
}
"""The legal kinds of faults, and in which calls each can strike.

``fail`` raises an ``errno``; ``short`` moves half of the bytes, in whole pages; ``nothing`` moves none;
``zeros`` moves zeros instead of the data; ``flip`` changes one bit; ``lost`` reports a write that was not
made; ``delay`` takes some seconds more; ``hang`` does not return until :meth:`Faults.release`.
"""


_DELAY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and when it strikes: whenever all conditions that are given hold, or at every call.

    Calls, bytes and strikes are counted for each drive alone; a call that joins several extents is one.

    Attributes:
        kind: What happens, one of :data:`KINDS`.
        verb: In which calls: "write", "read" or "grow".
        n: The n-th call only, from 1.
        after: Every call after the call of this number.
        bytes: Every call with which more bytes than this would have moved.
        time: Every call from this number of seconds after the start of the injection on.
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
    after: int | None = None
    bytes: int | None = None
    time: float | None = None
    chance: float | None = None
    times: int | None = None
    drive: int | None = None
    errno: int = errno.EIO
    seconds: float = _DELAY_SECONDS
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read a fault as it stands on a command line.

        Args:
            text: ``KIND-VERB`` or ``KIND-VERB:KEY=VALUE,…``; the keys are the attributes, such as
                ``fail-write:errno=ENOSPC,bytes=64MiB``, ``flip-read:n=3`` or ``hang-write:after=5,drive=1``.

        Raises:
            ConfigError: It is none; the message says what is legal.
        """
        name, colon, conditions = text.partition(":")
        kind, _, verb = name.partition("-")
        if verb not in KINDS.get(kind, ()):
            raise ConfigError(f"fault {text!r}: {name!r} is not one of {', '.join(_names())}")
        values: dict[str, Any] = {"errno": errno.ENOSPC} if (kind, verb) == ("fail", GROW) else {}
        for condition in conditions.split(",") if colon else ():
            key, _, value = condition.partition("=")
            values[key] = _value_of(text, key, value)
        return cls(kind, verb, **values)

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in {"kind", "verb"}}
        defaults = {f.name: f.default for f in fields(self)}
        shown = [f"{key}={_text_of(key, value)}" for key, value in given.items() if value != defaults[key]]
        return f"{self.kind}-{self.verb}{':' if shown else ''}{','.join(shown)}"


def _names() -> list[str]:
    return [f"{kind}-{verb}" for kind, verbs in KINDS.items() for verb in verbs]


def _number_of_error(text: str) -> int:
    number = getattr(errno, text, None)
    if not isinstance(number, int):
        raise ValueError(text)
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _ordinal(text: str) -> int:
    if not _count(text):
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise ValueError(text)
    return float(text)


def _share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise ValueError(text)
    return float(text)


_READERS: dict[str, tuple[Callable[[str], float], str]] = {
    "n": (_ordinal, "a number from 1"),
    "after": (_count, "a number"),
    "bytes": (parse_size, "a size such as 64MiB"),
    "time": (_seconds, "seconds"),
    "chance": (_share, "a share from 0 to 1"),
    "times": (_count, "a number"),
    "drive": (_count, "a drive's number from 0"),
    "errno": (_number_of_error, "the name of an error such as EIO"),
    "seconds": (_seconds, "seconds"),
    "seed": (_count, "a number"),
}


def _value_of(text: str, key: str, value: str) -> float:
    """Return the value of one condition of a fault.

    Raises:
        ConfigError: There is no such key, or it has no such value.
    """
    if key not in _READERS:
        raise ConfigError(f"fault {text!r}: {key!r} is not one of {', '.join(_READERS)}")
    read, legal = _READERS[key]
    try:
        return read(value)
    except ValueError:
        raise ConfigError(f"fault {text!r}: {key} must be {legal}, not {value!r}") from None


def _text_of(key: str, value: float) -> str:
    if key == "errno":
        return errno.errorcode[int(value)]
    return format_size(int(value)) if key == "bytes" else f"{value:g}"


class Strike(NamedTuple):
    """One injection that really happened.

    Attributes:
        fault: Which fault.
        drive: The drive's number.
        directory: The drive's directory.
        offset: Where in the store's file, bytes.
        nbytes: Bytes of the call.
        extents: How many the call joined; 1 for one by itself.
    """

    fault: Fault
    drive: int
    directory: str
    offset: int
    nbytes: int
    extents: int


class _Trigger:
    """Decides which calls on one drive a fault strikes; its owner holds a lock."""

    def __init__(self, fault: Fault, drive: int, began: float) -> None:
        self._fault = fault
        self._random = random.Random(f"{fault.seed} {drive}")
        self._began = began
        self._calls = 0
        self._bytes = 0
        self._strikes = 0

    def pulled(self, nbytes: int) -> bool:
        """Whether this call of ``nbytes`` is struck."""
        self._calls += 1
        struck = all(self._conditions(nbytes))
        self._strikes += struck
        self._bytes += 0 if struck else nbytes
        return struck

    def bit(self, nbytes: int) -> int:
        """Return a bit in the middle half of ``nbytes``: at the ends there may be padding."""
        return self._random.randrange(2 * nbytes, max(6 * nbytes, 2 * nbytes + 1))

    def _conditions(self, nbytes: int) -> Iterable[bool]:
        fault = self._fault
        yield fault.n is None or self._calls == fault.n
        yield fault.after is None or self._calls > fault.after
        yield fault.bytes is None or self._bytes + nbytes > fault.bytes
        yield fault.time is None or time.monotonic() - self._began >= fault.time
        yield fault.times is None or self._strikes < fault.times
        yield fault.chance is None or self._random.random() < fault.chance


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

    def start(self) -> Self:
        """Put the faults below the stores of this process; for scripts that shall never be healthy again.

        Raises:
            RuntimeError: Other faults are there already.
        """
        injected = isinstance(getattr(posix.pwrite, "__self__", None), Faults)
        if injected:
            raise RuntimeError("faults are injected already; name them all in one call of inject()")
        self._begin_anew()
        posix.pwrite, posix.pread, posix.fallocate = self._write, self._read, self._grow
        posix.pwritev, posix.preadv = self._write_joined, self._read_joined
        return self

    def _begin_anew(self) -> None:
        """Forgets calls, bytes and strikes; what still hangs of an earlier use was let go with that."""
        self.fired: list[Strike] = []
        self._released = threading.Event()
        self._triggers: dict[tuple[int, int], _Trigger] = {}
        self._began = time.monotonic()
        self._pwrite, self._pread, self._fallocate = posix.pwrite, posix.pread, posix.fallocate
        self._pwritev, self._preadv = posix.pwritev, posix.preadv

    def stop(self) -> None:
        """Take the faults away, and let go of what hangs."""
        if posix.pwrite == self._write:  # else they are gone, and others may be there
            posix.pwrite, posix.pread, posix.fallocate = self._pwrite, self._pread, self._fallocate
            posix.pwritev, posix.preadv = self._pwritev, self._preadv
        self.release()

    def release(self) -> None:
        """Lets every call that hangs go on, and those to come."""
        self._released.set()

    def counts(self) -> dict[str, int]:
        """How often each fault struck, by its text."""
        struck = Counter(str(strike.fault) for strike in list(self.fired))
        return {str(fault): struck[str(fault)] for fault in self._faults}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _write(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        fault, bit = self._strike(WRITE, fd, offset, nbytes)
        if fault is None:
            return self._pwrite(fd, address, nbytes, offset)
        return self._write_struck(fault, bit, fd, address, nbytes, offset)

    def _write_joined(self, fd: int, address: int, parts: int, offset: int) -> int:
        pieces = _pieces_at(address, parts)
        nbytes = sum(length for _, length in pieces)
        fault, bit = self._strike(WRITE, fd, offset, nbytes, _extents_of(pieces))
        if fault is None:
            return self._pwritev(fd, address, parts, offset)
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
                return self._pwrite(fd, others, nbytes, offset)
        return self._pwrite(fd, address, self._begin(fault, nbytes), offset)

    def _read(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        fault, bit = self._strike(READ, fd, offset, nbytes)
        if fault is None:
            return self._pread(fd, address, nbytes, offset)
        return self._read_struck(fault, bit, fd, address, nbytes, offset)

    def _read_joined(self, fd: int, address: int, parts: int, offset: int) -> int:
        pieces = _pieces_at(address, parts)
        nbytes = sum(length for _, length in pieces)
        fault, bit = self._strike(READ, fd, offset, nbytes, _extents_of(pieces))
        if fault is None:
            return self._preadv(fd, address, parts, offset)
        with _pages(nbytes) as block:
            moved = self._read_struck(fault, bit, fd, block, nbytes, offset)
            done = 0
            for start, length in pieces:
                ctypes.memmove(start, block + done, max(min(length, moved - done), 0))
                done += length
        return moved

    def _read_struck(self, fault: Fault, bit: int, fd: int, address: int, nbytes: int, offset: int) -> int:
        moved = self._pread(fd, address, self._begin(fault, nbytes), offset)
        if fault.kind == "zeros":
            ctypes.memset(address, 0, moved)
        elif fault.kind == "flip" and bit // 8 < moved:
            _flip(address, bit)
        return moved

    def _grow(self, fd: int, offset: int, nbytes: int) -> None:
        fault, _ = self._strike(GROW, fd, offset, nbytes)
        if fault is not None:
            self._begin(fault, nbytes)
        self._fallocate(fd, offset, nbytes)

    def _begin(self, fault: Fault, nbytes: int) -> int:
        """Return what comes before the call itself; returns how many bytes it is to move."""
        if fault.kind == "fail":
            raise OSError(fault.errno, os.strerror(fault.errno))
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        if fault.kind == "hang":
            self._released.wait()
        half = nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE or nbytes
        return {"nothing": 0, "short": half}.get(fault.kind, nbytes)

    def _strike(
        self, verb: str, fd: int, offset: int, nbytes: int, extents: Sequence[tuple[int, int]] = ()
    ) -> tuple[Fault | None, int]:
        """Return the fault that strikes this call, if any, and a bit of the bytes.

        Args:
            verb: What the call does.
            fd: To the file of which drive.
            offset: Where in the file.
            nbytes: How much of it.
            extents: First byte and bytes of each that the call joins.
        """
        drive, directory = _drive_of(fd)
        if drive is None:
            return None, 0
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.verb != verb or fault.drive not in {None, drive}:
                    continue
                trigger = self._triggers.setdefault((index, drive), _Trigger(fault, drive, self._began))
                if trigger.pulled(nbytes):
                    start, length = max(extents, default=(0, nbytes), key=itemgetter(1))
                    self.fired.append(Strike(fault, drive, directory, offset, nbytes, len(extents) or 1))
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


def _drive_of(fd: int) -> tuple[int | None, str]:
    """Return number and directory of the drive whose file this is.

    No number while its store is still opening.
    """
    for store in open_stores():
        if isinstance(store, FileStore) and store.fileno() == fd:
            return store.drive_index, store.directory
    return None, ""


def inject(*faults: str | Fault) -> Faults:
    """Faults to put into the drives of this process, as a context manager.

    Args:
        faults: Each as an object or as :meth:`Fault.parse` reads it.

    Raises:
        ConfigError: A text is no fault.
    """
    return Faults([Fault.parse(fault) if isinstance(fault, str) else fault for fault in faults])
