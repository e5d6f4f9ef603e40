"""The extent allocator, against a model that marks every block."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tba_offload.errors import StoreFullError
from tba_offload.store.extents import BLOCK, ExtentAllocator, round_up

BLOCKS = 24


class AllocatorMachine(RuleBasedStateMachine):
    """Every range is where the model, which looks at every block, would put it."""

    def __init__(self) -> None:
        super().__init__()
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
        for first, blocks in self.live:
            self.allocator.free(first * BLOCK, blocks * BLOCK)
        assert self.allocator.used == 0
        assert self.allocator.allocate(BLOCKS * BLOCK) == 0  # everything is one range again


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=150, stateful_step_count=40)


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
