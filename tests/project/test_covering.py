"""Which combinations of settings are tested."""

from __future__ import annotations

import itertools
import math

import pytest
from covering import combinations, each_once, in_turn

FACTORS = [("a", "b", "c"), (1, 2, 3, 4), (True, False), (0.0, 0.1), ("x",)]


def test_every_two_values_meet_in_few_rows() -> None:
    rows = combinations(*FACTORS, everything=False)
    for (i, first), (j, second) in itertools.combinations(enumerate(FACTORS), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(first, second))
    assert 12 <= len(rows) <= 14 < math.prod(map(len, FACTORS))
    assert rows == combinations(*FACTORS, everything=False)


def test_every_value_is_in_one_of_fewer_rows() -> None:
    rows = combinations(*FACTORS, everything=False, together=1)
    for i, factor in enumerate(FACTORS):
        assert {row[i] for row in rows} == set(factor)
    assert len(rows) == max(map(len, FACTORS))


def test_the_full_product_has_all_rows_and_marks_those_left_out() -> None:
    always = combinations(*FACTORS, everything=False, together=1)
    found = each_once(*FACTORS)
    assert [param.values for param in found] == list(itertools.product(*FACTORS))
    assert [param.values for param in found if not param.marks] == sorted(always, key=ranked)


def ranked(row: tuple[object, ...]) -> list[int]:
    return [list(factor).index(value) for factor, value in zip(FACTORS, row, strict=True)]


def test_everything_is_the_full_product() -> None:
    assert combinations(*FACTORS, everything=True) == list(itertools.product(*FACTORS))


def test_values_beside_those_of_the_longest_setting_take_turns() -> None:
    found = in_turn("abcde", (1, 2))
    assert [param.values for param in found] == list(itertools.product("abcde", (1, 2)))
    assert [param.values for param in found if not param.marks] == [
        ("a", 1),
        ("b", 2),
        ("c", 1),
        ("d", 2),
        ("e", 1),
    ]


@pytest.mark.parametrize("everything", [False, True])
def test_one_setting_has_all_its_values(everything: bool) -> None:
    assert combinations("abc", everything=everything) == [("a",), ("b",), ("c",)]
