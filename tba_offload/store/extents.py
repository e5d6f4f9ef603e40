"""Which byte ranges of a store are taken: first fit, lowest offset first, neighbours coalesced.

Lowest first means that the same blocks are used again step after step, so that a file stays as small as the
largest moment of a step and a drive sees overwrites of a small region. Whatever is asked for, with at most n
bytes taken at a time in extents of at most m blocks, the file stays within H(m) / ln 2 x n, where H(m) is the
m-th harmonic number (Robson, "Worst case fragmentation of first fit and best fit storage allocation
strategies", The Computer Journal, 1977); best fit would have no better bound than m x n.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from tba_offload.config import values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BLOCK = values.BLOCK
"""Offsets and lengths of extents are multiples of this, bytes."""

_FANOUT = 32
"""Entries that a node of the tree of holes has at most."""


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``nbytes``."""
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
        self._holes = _Holes()  # those below the end, never adjacent to each other or to the end

    def allocate(self, nbytes: int) -> int | None:
        """Take a range.

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
        """Give a range back.

        Raises:
            ValueError: Part of the range is free already.
        """
        end = offset + nbytes
        start, length = self._holes.last_before(end)
        if start + length > offset or end > self._end or nbytes <= 0:
            raise ValueError(f"bytes [{offset}, {end}) are not taken, so they cannot be freed")
        self.used -= nbytes
        touches = length > 0 and start + length == offset
        if not touches:
            start = offset
        if end == self._end:  # there is no hole after it
            self._end = start
            if touches:
                self._holes.remove(start)
            return
        after = self._holes.length_at(end)
        if after:
            self._holes.remove(end)
        self._holes.put(start, end + after - start)

    def rebuild(self, taken: Iterable[tuple[int, int]]) -> None:
        """Start anew from what is taken, after an interrupt that may have struck anywhere.

        Args:
            taken: Offset and length of each range.
        """
        used, end, holes = 0, 0, _Holes()
        for offset, nbytes in sorted(taken):
            if offset > end:
                holes.put(end, offset - end)
            used += nbytes
            end = offset + nbytes
        self.used, self._end, self._holes = used, end, holes

    def _take_hole(self, nbytes: int) -> int | None:
        found = self._holes.first_of(nbytes)
        if found is None:
            return None
        start, length = found
        self._holes.remove(start)
        if length > nbytes:
            self._holes.put(start + nbytes, length - nbytes)
        return start

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


class _Holes:
    """Disjoint ranges in the order of their offsets: a B-tree whose nodes know the longest range below them.

    Nodes that run empty go, others are not merged: it is as deep as the most holes that there ever were ask.
    """

    def __init__(self) -> None:
        self._root = _Node([], [], None)

    def first_of(self, nbytes: int) -> tuple[int, int] | None:
        """Offset and length of the first range that is at least so long."""
        node = self._root
        while (index := node.first_of(nbytes)) is not None:
            if node.below is None:
                return node.starts[index], node.lengths[index]
            node = node.below[index]
        return None

    def last_before(self, offset: int) -> tuple[int, int]:
        """Offset and length of the last range that starts before ``offset``; zeros if there is none."""
        node, index = self._root, bisect_left(self._root.starts, offset) - 1
        if index < 0:
            return 0, 0
        while node.below is not None:
            node = node.below[index]
            index = bisect_left(node.starts, offset) - 1
        return node.starts[index], node.lengths[index]

    def length_at(self, offset: int) -> int:
        """Length of the range that starts there; 0 if none does."""
        start, length = self.last_before(offset + 1)
        return length if start == offset else 0

    def put(self, start: int, length: int) -> None:
        """Add a range, or set the length of the one that starts there."""
        right = self._root.put(start, length)
        if right is not None:
            self._root = _Node.above([self._root, right])

    def remove(self, start: int) -> None:
        """Take out the range that starts there."""
        self._root.remove(start)
        if not self._root.starts:
            self._root = _Node([], [], None)


class _Node:
    """A part of the tree: for each entry its first offset, its longest range and, above leaves, its node."""

    __slots__ = ("below", "lengths", "starts")

    def __init__(self, starts: list[int], lengths: list[int], below: list[_Node] | None) -> None:
        self.starts = starts
        self.lengths = lengths
        self.below = below

    @classmethod
    def above(cls, nodes: list[_Node]) -> _Node:
        """Return a node over others."""
        return cls([node.starts[0] for node in nodes], [max(node.lengths) for node in nodes], nodes)

    def first_of(self, nbytes: int) -> int | None:
        """Return the first entry with a range that is at least so long."""
        for index, length in enumerate(self.lengths):
            if length >= nbytes:
                return index
        return None

    def put(self, start: int, length: int) -> _Node | None:
        """Add a range or set a length; return the upper half of the node if it had to be split."""
        if self.below is None:
            index = bisect_left(self.starts, start)
            if index < len(self.starts) and self.starts[index] == start:
                self.lengths[index] = length
                return None
            self.starts.insert(index, start)
            self.lengths.insert(index, length)
        else:
            index = max(bisect_right(self.starts, start) - 1, 0)
            right = self.below[index].put(start, length)
            self._look_at(index)
            if right is not None:
                self.below.insert(index + 1, right)
                self.starts.insert(index + 1, right.starts[0])
                self.lengths.insert(index + 1, max(right.lengths))
        return self._split() if len(self.starts) > _FANOUT else None

    def remove(self, start: int) -> None:
        """Take out the range that starts there, which is below this node."""
        index = bisect_right(self.starts, start) - 1
        if self.below is not None:
            self.below[index].remove(start)
            if self.below[index].starts:
                self._look_at(index)
                return
            del self.below[index]
        del self.starts[index], self.lengths[index]

    def _look_at(self, index: int) -> None:
        """Take note of what has changed below an entry."""
        if self.below is not None:
            node = self.below[index]
            self.starts[index], self.lengths[index] = node.starts[0], max(node.lengths)

    def _split(self) -> _Node:
        half = len(self.starts) // 2
        below = None if self.below is None else self.below[half:]
        right = _Node(self.starts[half:], self.lengths[half:], below)
        del self.starts[half:], self.lengths[half:]
        if self.below is not None:
            del self.below[half:]
        return right
