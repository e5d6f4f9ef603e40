"""The extent allocator, against a model that marks every block."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from covering import EVERYTHING
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tba_offload.errors import StoreFullError
from tba_offload.store import extents
from tba_offload.store.extents import BLOCK, ExtentAllocator

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
