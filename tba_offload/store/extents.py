"""Which byte ranges of a store are taken: first fit, lowest offset first, neighbours coalesced.

Lowest first means that the same blocks are used again step after step, so that a file stays as small as the
largest moment of a step and a drive sees overwrites of a small region.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 4096
"""Offsets and lengths of extents are multiples of this, bytes."""


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class ExtentAllocator:
    """Hands out disjoint ranges of [0, capacity). Its owner holds a lock around every call.

    Args:
        capacity: Bytes there are; ``None`` for no limit. Rounded down to whole blocks.
        grow: Called with the new end before a range beyond all earlier ones is handed out. What it raises
            reaches the caller of :meth:`allocate`, and nothing has changed then.

    Attributes:
        used: Bytes handed out now.
        high_water: The largest end that was ever handed out.
    """

    def __init__(self, capacity: int | None, grow: Callable[[int], None] | None = None) -> None:
        self.capacity = None if capacity is None else capacity // BLOCK * BLOCK
        self.used = 0
        self.high_water = 0
        self._grow = grow
        self._end = 0  # everything from here on is free
        # The holes below the end, sorted, never adjacent to each other or to the end.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def allocate(self, nbytes: int) -> int | None:
        """Takes a range.

        Args:
            nbytes: Its length, a positive multiple of 4096.

        Returns:
            Its offset, or ``None`` if there is no room within the capacity.

        Raises:
            ValueError: The length is not a positive multiple of 4096.
        """
        if nbytes <= 0 or nbytes % BLOCK:
            raise ValueError(f"an extent is a positive multiple of {BLOCK} bytes long, not {nbytes}")
        offset = self._take_hole(nbytes)
        if offset is None:
            offset = self._take_end(nbytes)
        if offset is not None:
            self.used += nbytes
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Gives a range back.

        Raises:
            ValueError: Part of the range is free already.
        """
        end = offset + nbytes
        after = bisect_left(self._starts, offset)  # first hole at or behind the range
        overlaps_before = after > 0 and self._ends[after - 1] > offset
        overlaps_after = after < len(self._starts) and self._starts[after] < end
        if overlaps_before or overlaps_after or end > self._end or nbytes <= 0:
            raise ValueError(f"bytes [{offset}, {end}) are not taken, so they cannot be freed")
        self.used -= nbytes
        self._insert_hole(after, offset, end)

    def _take_hole(self, nbytes: int) -> int | None:
        for index, start in enumerate(self._starts):
            rest = self._ends[index] - start - nbytes
            if rest >= 0:
                if rest:
                    self._starts[index] = start + nbytes
                else:
                    del self._starts[index], self._ends[index]
                return start
        return None

    def _take_end(self, nbytes: int) -> int | None:
        offset, end = self._end, self._end + nbytes
        if self.capacity is not None and end > self.capacity:
            return None
        if end > self.high_water:
            if self._grow is not None:
                self._grow(end)
            self.high_water = end
        self._end = end
        return offset

    def _insert_hole(self, index: int, start: int, end: int) -> None:
        """Adds a hole before the one at ``index``, merged with the neighbours that it touches."""
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index > 0 and self._ends[index - 1] == start:
            index -= 1
            start = self._starts[index]
            del self._starts[index], self._ends[index]
        if end == self._end:
            self._end = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
