"""Allocator of byte ranges in one store, with a sorted list of the free ranges.

Allocation is first fit: of all free ranges that are long enough, the range with the lowest offset is used.
Each step therefore uses the same blocks again, and the file does not grow from step to step. If extents of at
most m blocks take at most n bytes at the same time, the file needs at most H(m) / ln 2 x n bytes. H(m) is the
m-th harmonic number (Robson, "Worst case fragmentation of first fit and best fit storage allocation
strategies", The Computer Journal, 1977).
"""

from __future__ import annotations

import errno
import sys
from bisect import bisect_left

from tba_offload.errors import StoreFullError
from tba_offload.store.base import BLOCK, Extent

_ENDLESS = sys.maxsize // BLOCK * BLOCK


class Extents:
    """Allocator of disjoint extents in [0, capacity). The caller of each method must hold a lock.

    Args:
        capacity: Largest number of bytes that extents may take, rounded down to whole blocks; ``None`` for no
            limit.

    Attributes:
        capacity: The argument ``capacity``.
        used: Number of bytes that extents occupy now.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._high_water = 0
        self._end = _ENDLESS if capacity is None else capacity // BLOCK * BLOCK
        self.reset()

    def reset(self) -> None:
        """Free all extents."""
        self.used = 0
        self._free: list[tuple[int, int]] = [(0, self._end)]  # sorted pairs (start, end), with gaps

    def take_high_water(self) -> int:
        """Return the highest end offset of the extents since the last call, in bytes."""
        high_water = self._high_water
        start, end = self._free[-1] if self._free else (self._end, self._end)
        self._high_water = start if end == self._end else self._end
        return high_water

    def reserve(self, nbytes: int, lead: int = 0) -> Extent:
        """Return a new extent for ``lead`` bytes followed by ``nbytes`` bytes of payload.

        Raises:
            StoreFullError: No free range is long enough.
        """
        length = -(-(lead + nbytes) // BLOCK) * BLOCK
        for index, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[index : index + 1] = [(start + length, end)] if end - start > length else []
                self.used += length
                self._high_water = max(self._high_water, start + length)
                return Extent(start, length, nbytes, lead)
        raise StoreFullError(
            errno.ENOSPC, f"no room for {nbytes} bytes: {self.used} of {self.capacity} bytes are taken"
        )

    def release(self, extent: Extent) -> None:
        """Free an extent, and join it with adjacent free ranges.

        Raises:
            ValueError: A part of the extent is already free.
        """
        start, end = extent.offset, extent.offset + extent.length
        index = bisect_left(self._free, (start, end))
        before = self._free[index - 1] if index else (-1, -1)
        after = self._free[index] if index < len(self._free) else (_ENDLESS, _ENDLESS)
        if before[1] > start or after[0] < end:
            raise ValueError(f"{extent} is not reserved and cannot be released")
        self.used -= extent.length
        first, last = index - (before[1] == start), index + (after[0] == end)
        joined = (before[0] if first < index else start, after[1] if last > index else end)
        self._free[first:last] = [joined]
