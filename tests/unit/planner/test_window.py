"""The rules of the window, as tables."""

from __future__ import annotations

import pytest
from harness import MIB

from tba_offload.planner.window import Window


@pytest.mark.parametrize(
    ("nbytes", "held_back", "batch", "spills_above"),
    [
        (None, 0, 4 * MIB, 64 * MIB),
        (64 * MIB, 16 * MIB, 4 * MIB, 32 * MIB),
        (16 * MIB, 4 * MIB, 4 * MIB, 8 * MIB),
        (8 * MIB, 2 * MIB, 2 * MIB, 4 * MIB),
        (1, 0, 0, 0),
        (0, 0, 0, 0),
    ],
)
def test_sizes(nbytes: int | None, held_back: int, batch: int, spills_above: int) -> None:
    window = Window(nbytes)
    assert (window.held_back, window.batch, window.spills_above) == (held_back, batch, spills_above)


@pytest.mark.parametrize(
    ("nbytes", "in_flight", "read_ahead", "more", "across_forward", "may"),
    [
        (None, 10**15, 10**15, 10**15, True, True),
        (100, 60, 0, 40, False, True),
        (100, 60, 0, 41, False, False),
        (100, 0, 0, 101, False, False),  # read on demand
        (100, 10, 10, 15, True, True),
        (100, 10, 10, 16, True, False),
        (100, 10, 10, 16, False, True),
        (100, 0, 0, 60, True, True),  # the first one, however large
        (100, 60, 0, 41, True, False),
    ],
)
def test_what_may_be_read_ahead(
    nbytes: int | None, in_flight: int, read_ahead: int, more: int, *, across_forward: bool, may: bool
) -> None:
    window = Window(nbytes)
    assert window.may_read_ahead(in_flight, read_ahead, more, across_forward=across_forward) is may
