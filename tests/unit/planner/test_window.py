"""The rules of the window, as tables."""

from __future__ import annotations

import pytest

from tba_offload.planner.window import Window


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
