"""Which combinations of settings are tested."""

from __future__ import annotations

import itertools
import math

import pytest
from covering import combinations

FACTORS = [("a", "b", "c"), (1, 2, 3, 4), (True, False), (0.0, 0.1), ("x",)]


def test_every_two_values_meet_in_few_rows() -> None:
    rows = combinations(*FACTORS, everything=False)
    for (i, first), (j, second) in itertools.combinations(enumerate(FACTORS), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(first, second))
    assert 12 <= len(rows) <= 14 < math.prod(map(len, FACTORS))
    assert rows == combinations(*FACTORS, everything=False)


def test_everything_is_the_full_product() -> None:
    assert combinations(*FACTORS, everything=True) == list(itertools.product(*FACTORS))


@pytest.mark.parametrize("everything", [False, True])
def test_one_setting_has_all_its_values(everything: bool) -> None:
    assert combinations("abc", everything=everything) == [("a",), ("b",), ("c",)]
