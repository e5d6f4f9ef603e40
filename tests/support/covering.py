"""Combinations of settings, few enough to be run every time."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from _pytest.mark import ParameterSet

Row = tuple[Any, ...]
Part = tuple[tuple[int, Any], ...]

EVERYTHING = "FULL" in os.environ
"""Whether all combinations are run; ``tests/full.sh`` sets it."""

full = pytest.mark.full
"""What is left to ``tests/full.sh``, and to samples."""


def of_which(values: Iterable[Any], *always: Any) -> list[ParameterSet]:
    """Values of a parameter, of which only some are tested every time."""
    return [pytest.param(value, marks=() if value in always else full) for value in values]


def each_once(*factors: Sequence[Any]) -> list[ParameterSet]:
    """Rows in which every two values meet, of which only some that cover each value are tested every time."""
    always = combinations(*factors, together=1)
    return sorted_out(always, dict.fromkeys([*always, *combinations(*factors)]))


def in_turn(*factors: Sequence[Any]) -> list[ParameterSet]:
    """The full product, of which each value of the longest is always tested, beside others in turn."""
    count = max(map(len, factors))
    always = [tuple(factor[number % len(factor)] for factor in factors) for number in range(count)]
    return sorted_out(always, itertools.product(*factors))


def sorted_out(always: Iterable[Row], rows: Iterable[Row]) -> list[ParameterSet]:
    return [pytest.param(*row, marks=() if row in always else full) for row in rows]


def combinations(*factors: Sequence[Any], together: int = 2) -> list[Row]:
    """One value of each factor to a row, so that every two values of different factors meet in some row.

    Faults that take two settings are found by far fewer rows than the full product has: about as many as
    the two longest factors have pairs. Of rows that add as many new pairs, that with the least common pairs
    is taken, so that no value stands mostly beside one of another factor. The rows are the same each time.

    Args:
        factors: The values of each setting.
        together: How many values of different factors meet: 1 if it is enough that each value is in some row.
    """
    candidates = list(itertools.product(*factors))
    missing = {part for row in candidates for part in parts_of(row, together)}
    met: Counter[Part] = Counter()

    def gain(row: Row) -> tuple[int, int]:
        new = missing.intersection(parts_of(row, together))
        return len(new), -sum(met[pair] for pair in parts_of(row, 2))

    rows: list[Row] = []
    while missing:
        rows.append(max(candidates, key=gain))
        missing.difference_update(parts_of(rows[-1], together))
        met.update(parts_of(rows[-1], 2))
    return rows


def parts_of(row: Row, together: int) -> Iterable[Part]:
    """All choices of ``together`` values from a row, each value with the number of its factor."""
    return itertools.combinations(enumerate(row), together)
