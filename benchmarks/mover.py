"""A process that writes and reads a file when its standard input says so, with plain system calls.

    python benchmarks/mover.py FILE BYTES

After a line such as ``write 0.12`` or ``read 0.25`` the process writes or reads the whole file, spread over
0.12 or 0.25 seconds, and then prints a line. ``floor.py`` runs it beside training.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = 4 << 20
"""Bytes of a system call: as many as the store joins."""


def move(path: str, nbytes: int) -> None:
    """Follows standard input until that ends.

    Args:
        path: The file; it is made, with these bytes.
        nbytes: A multiple of :data:`CALL`.
    """
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = os.urandom(CALL) * (nbytes // CALL)
    view = memoryview(memory)
    parts = [view[at : at + CALL] for at in range(0, nbytes, CALL)]
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    calls = {"write": os.pwritev, "read": os.preadv}
    _spread(calls["write"], file, parts, 0.0)
    print("ready", flush=True)
    for line in sys.stdin:
        what, seconds = line.split()
        _spread(calls[what], file, parts, float(seconds))
        print("done", flush=True)


def _spread(
    call: Callable[[int, list[memoryview], int], int], file: int, parts: list[memoryview], seconds: float
) -> None:
    began = time.perf_counter()
    for number, part in enumerate(parts):
        time.sleep(max(began + seconds * number / len(parts) - time.perf_counter(), 0))
        moved = call(file, [part], number * CALL)
        if moved != CALL:
            raise OSError(f"{moved} of {CALL} bytes were moved")


if __name__ == "__main__":
    move(sys.argv[1], int(sys.argv[2]))
