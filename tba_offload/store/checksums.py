"""Checksums of what stores move: xxh3, or none."""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING

from xxhash import xxh3_64

from tba_offload.store import posix

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from tba_offload.device import ByteRange


class Checksums:
    """The checksums of one store.

    Args:
        on: Whether there are any.
    """

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self._seconds = 0.0
        self._lock = Lock()

    def hasher(self) -> xxh3_64 | None:
        """Return a new checksum for one transfer, ``None`` if checksums are off.

        An object, because the functions of xxhash before 4.0 hold the interpreter's lock while they hash.
        """
        return xxh3_64() if self.on else None

    def of(self, data: torch.Tensor) -> int | None:
        """Return the checksum of bytes on any device."""
        if (hasher := self.hasher()) is None:
            return None
        on_host = data.cpu()
        self.add(hasher, on_host.data_ptr(), on_host.numel())
        return hasher.intdigest()

    def of_range(self, memory: ByteRange) -> int | None:
        """Return the checksum of bytes in host memory."""
        return self.of_ranges([memory])[0]

    def of_ranges(self, memories: Iterable[ByteRange]) -> list[int | None]:
        """Return the checksum of each."""
        if not self.on:
            return [None for _ in memories]
        began = time.thread_time()
        digests: list[int | None] = [_digest(memory) for memory in memories]
        self._count(began)
        return digests

    def add(self, hasher: xxh3_64 | None, address: int, nbytes: int) -> None:
        """Have a checksum go on over bytes in host memory; without one nothing is done."""
        if hasher is not None:
            began = time.thread_time()
            hasher.update(posix.view(address, nbytes))
            self._count(began)

    def take_seconds(self) -> float:
        """Processor time that threads have spent on checksums since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _count(self, began: float) -> None:
        with self._lock:
            self._seconds += time.thread_time() - began


def _digest(memory: ByteRange) -> int:
    hasher = xxh3_64()
    hasher.update(posix.view(memory.address, memory.nbytes))
    return hasher.intdigest()
