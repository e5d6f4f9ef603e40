"""The extent allocator, against a model that marks every block."""

from __future__ import annotations

import math
import random
from unittest.mock import patch

import pytest
from covering import EVERYTHING
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tba_offload.errors import StoreFullError
from tba_offload.store import extents
from tba_offload.store.extents import BLOCK, ExtentAllocator, round_up

BLOCKS = 24


class AllocatorMachine(RuleBasedStateMachine):
    """Every range is where the model, which looks at every block, would put it."""

    fanout = extents._FANOUT

    def __init__(self) -> None:
        super().__init__()
        self.patch = patch.object(extents, "_FANOUT", self.fanout)
        self.patch.start()
        self.allocator = ExtentAllocator(BLOCKS * BLOCK + 100)
        self.taken = [False] * BLOCKS
        self.live: list[tuple[int, int]] = []
        self.high_water = 0

    @rule(blocks=st.integers(1, 9))
    def allocate(self, blocks: int) -> None:
        offset = self.allocator.allocate(blocks * BLOCK)
        fits = [i for i in range(BLOCKS - blocks + 1) if not any(self.taken[i : i + blocks])]
        if not fits:
            assert offset is None
            return
        assert offset == fits[0] * BLOCK
        self.taken[fits[0] : fits[0] + blocks] = [True] * blocks
        self.live.append((fits[0], blocks))
        self.high_water = max(self.high_water, (fits[0] + blocks) * BLOCK)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        first, blocks = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.free(first * BLOCK, blocks * BLOCK)
        self.taken[first : first + blocks] = [False] * blocks

    @rule()
    def rebuild(self) -> None:
        self.allocator.rebuild((first * BLOCK, blocks * BLOCK) for first, blocks in self.live)

    @rule(first=st.integers(0, BLOCKS - 1), blocks=st.integers(1, 4))
    def free_what_is_not_taken(self, first: int, blocks: int) -> None:
        if all(self.taken[first : first + blocks]) and first + blocks <= BLOCKS:
            return
        with pytest.raises(ValueError, match="not taken"):
            self.allocator.free(first * BLOCK, blocks * BLOCK)

    @invariant()
    def counters_agree(self) -> None:
        assert self.allocator.used == sum(self.taken) * BLOCK
        assert self.allocator.high_water == self.high_water

    def teardown(self) -> None:
        self.patch.stop()
        for first, blocks in self.live:
            self.allocator.free(first * BLOCK, blocks * BLOCK)
        assert self.allocator.used == 0
        assert self.allocator.allocate(BLOCKS * BLOCK) == 0  # everything is one range again


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=150 if EVERYTHING else 50, stateful_step_count=40)


class DeepAllocatorMachine(AllocatorMachine):
    """The tree of holes has nodes so small that few holes make it deep."""

    fanout = 2

    @precondition(lambda self: any(self.taken))
    @rule()
    def free_every_other_block(self) -> None:
        """Many holes at once."""
        for first, blocks in self.live:
            self.allocator.free(first * BLOCK, blocks * BLOCK)
        kept = range(0, BLOCKS, 2)
        assert [self.allocator.allocate(BLOCK) for _ in range(BLOCKS)] == [i * BLOCK for i in range(BLOCKS)]
        for first in range(1, BLOCKS, 2):
            self.allocator.free(first * BLOCK, BLOCK)
        self.live = [(first, 1) for first in kept]
        self.taken = [first in kept for first in range(BLOCKS)]
        self.high_water = BLOCKS * BLOCK


TestDeepAllocatorMachine = DeepAllocatorMachine.TestCase
TestDeepAllocatorMachine.settings = settings(max_examples=150 if EVERYTHING else 50, stateful_step_count=40)


def test_thousands_of_holes_are_filled_lowest_first() -> None:
    """Against the plain scan, and the tree is as deep as the logarithm of their number."""
    draws, allocator = random.Random(0), ExtentAllocator(None)
    live = [
        (allocator.allocate(length), length)
        for length in draws.choices(range(BLOCK, 9 * BLOCK, BLOCK), k=6000)
    ]
    draws.shuffle(live)
    for _ in range(3000):
        allocator.free(*live.pop())
    for step in range(3000):
        length = draws.randrange(BLOCK, 9 * BLOCK, BLOCK)
        expected = first_fit(live, length) if step % 50 == 0 else None
        live.append((allocator.allocate(length), length))
        assert expected in {None, live[-1][0]}
        allocator.free(*live.pop(draws.randrange(len(live))))
    assert depth(allocator) <= 4
    assert allocator.used == sum(length for _, length in live)


def first_fit(live: list[tuple[int, int]], length: int) -> int:
    end = 0
    for start, taken in sorted(live):
        if start - end >= length:
            return end
        end = start + taken
    return end


def depth(allocator: ExtentAllocator) -> int:
    levels, node = 1, allocator._holes._root
    while node.below is not None:
        levels, node = levels + 1, node.below[0]
    return levels


@pytest.mark.parametrize("doublings", [3, 5, 7])
def test_the_worst_program_stays_within_robsons_bound(doublings: int) -> None:
    """Robson's adversary: it keeps what touches every 2^i-th block, and asks for extents of 2^i blocks.

    The bound is that of his paper of 1977, as in Knuth, The Art of Computer Programming, 2.5, exercise 43.
    """
    most, largest = 1 << 11, 1 << doublings
    allocator = ExtentAllocator(None)
    live = [(allocator.allocate(BLOCK) // BLOCK, 1) for _ in range(most)]
    at = 0
    for i in range(1, doublings + 1):
        size = 1 << i
        at = max((at, at + size // 2), key=lambda at: sum(blocks for _, blocks in touching(live, at, size)))
        kept = touching(live, at, size)
        for first, blocks in set(live) - set(kept):
            allocator.free(first * BLOCK, blocks * BLOCK)
        live = kept
        while sum(blocks for _, blocks in live) + size <= most:
            live.append((allocator.allocate(size * BLOCK) // BLOCK, size))
    harmonic = sum(1 / length for length in range(1, largest + 1))
    assert 1.5 * most < allocator.high_water / BLOCK <= harmonic / math.log(2) * most


def touching(live: list[tuple[int, int]], at: int, size: int) -> list[tuple[int, int]]:
    """The extents that hold a block whose number is ``at`` modulo ``size``."""
    return [(first, blocks) for first, blocks in live if (at - first) % size < blocks]


def test_the_same_blocks_are_used_again() -> None:
    allocator = ExtentAllocator(None)
    for _ in range(10):
        offsets = [allocator.allocate(3 * BLOCK) for _ in range(4)]
        assert offsets == [0, 3 * BLOCK, 6 * BLOCK, 9 * BLOCK]
        for offset in (3, 9, 0, 6):
            allocator.free(offset * BLOCK, 3 * BLOCK)
    assert allocator.high_water == 12 * BLOCK


def test_it_grows_before_it_hands_out() -> None:
    sizes: list[int] = []
    allocator = ExtentAllocator(None, sizes.append)
    allocator.allocate(BLOCK)
    allocator.allocate(2 * BLOCK)
    allocator.free(0, BLOCK)
    allocator.allocate(BLOCK)
    allocator.free(BLOCK, 2 * BLOCK)
    allocator.allocate(2 * BLOCK)
    assert sizes == [BLOCK, 3 * BLOCK]


def test_a_growth_that_fails_changes_nothing() -> None:
    def grow(size: int) -> None:
        if size > 4 * BLOCK:
            raise StoreFullError("full")

    allocator = ExtentAllocator(None, grow)
    assert allocator.allocate(3 * BLOCK) == 0
    for _ in range(2):
        with pytest.raises(StoreFullError):
            allocator.allocate(2 * BLOCK)
        assert (allocator.used, allocator.high_water) == (3 * BLOCK, 3 * BLOCK)
    assert allocator.allocate(BLOCK) == 3 * BLOCK


@pytest.mark.parametrize("nbytes", [0, -BLOCK, 1, BLOCK + 1])
def test_lengths_are_whole_blocks(nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive multiple of 4096"):
        ExtentAllocator(None).allocate(nbytes)


@pytest.mark.parametrize(("nbytes", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)])
def test_round_up(nbytes: int, multiple: int, expected: int) -> None:
    assert round_up(nbytes, multiple) == expected
