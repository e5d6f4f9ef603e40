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
Pair = tuple[tuple[int, Any], tuple[int, Any]]

EVERYTHING = "FULL" in os.environ
"""Whether all combinations are run; ``tests/full.sh`` sets it."""

full = pytest.mark.full
"""What is left to ``tests/full.sh``, and to samples."""


def of_which(values: Iterable[Any], *always: Any) -> list[ParameterSet]:
    """Values of a parameter, of which only some are tested every time."""
    return [pytest.param(value, marks=() if value in always else full) for value in values]


def pairwise(*factors: Sequence[Any]) -> list[ParameterSet]:
    """The full product, of which only rows that cover all pairs are tested every time."""
    always = combinations(*factors, everything=False)
    rows = itertools.product(*factors)
    return [pytest.param(*row, marks=() if row in always else full) for row in rows]


def combinations(*factors: Sequence[Any], everything: bool = EVERYTHING) -> list[Row]:
    """One value of each factor to a row, so that every two values of different factors meet in some row.

    Faults that take two settings are found by far fewer rows than the full product has: about as many as
    the two longest factors have pairs. Of rows that add as many new pairs, that with the least common pairs
    is taken, so that no value stands mostly beside one of another factor. The rows are the same each time.

    Args:
        factors: The values of each setting.
        everything: Whether the full product is wanted.
    """
    candidates = list(itertools.product(*factors))
    if everything or len(factors) == 1:
        return candidates
    missing = set(itertools.chain.from_iterable(map(pairs_of, candidates)))
    met: Counter[Pair] = Counter()

    def gain(row: Row) -> tuple[int, int]:
        pairs = list(pairs_of(row))
        return len(missing.intersection(pairs)), -sum(met[pair] for pair in pairs)

    rows: list[Row] = []
    while missing:
        rows.append(max(candidates, key=gain))
        missing.difference_update(pairs_of(rows[-1]))
        met.update(pairs_of(rows[-1]))
    return rows


def pairs_of(row: Row) -> Iterable[Pair]:
    """Every two values of a row, each with the number of its factor."""
    return itertools.combinations(enumerate(row), 2)
