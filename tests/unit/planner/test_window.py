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
    ("nbytes", "in_flight", "more", "is_crowded"),
    [
        (None, 10**15, 10**15, False),
        (100, 60, 40, False),
        (100, 60, 41, True),
        (100, 0, 1000, False),  # alone
        (100, 1, 1000, True),
        (0, 0, 1, False),
        (0, 1, 0, True),
    ],
)
def test_what_does_not_fit_waits_unless_it_is_alone(
    nbytes: int | None, in_flight: int, more: int, *, is_crowded: bool
) -> None:
    assert Window(nbytes).is_crowded(in_flight, more) is is_crowded


@pytest.mark.parametrize(
    ("nbytes", "in_flight", "largest", "is_tight"),
    [
        (None, 1000, 1000, False),
        (100, 60, 40, False),
        (100, 60, 41, True),
        (100, 60, 100, True),
        (100, 60, 101, False),  # that one waits for all writes anyway
        (100, 0, 100, False),
    ],
)
def test_all_is_written_if_the_next_one_may_find_no_room(
    nbytes: int | None, in_flight: int, largest: int, *, is_tight: bool
) -> None:
    assert Window(nbytes).is_tight(in_flight, largest) is is_tight


@pytest.mark.parametrize(
    ("nbytes", "in_flight", "is_worth_filling"),
    [(None, 10**15, True), (100, 75, True), (100, 76, False), (0, 0, True), (0, 1, False)],
)
def test_reading_ahead_starts_again_with_a_quarter_free(
    nbytes: int | None, in_flight: int, *, is_worth_filling: bool
) -> None:
    assert Window(nbytes).is_worth_filling(in_flight) is is_worth_filling


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
