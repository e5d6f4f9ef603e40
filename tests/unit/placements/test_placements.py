"""Placements by name, and layers of which a share of the bytes is offloaded."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tba_offload as tba
from tba_offload import Placement
from tba_offload.placements import Staying, staying

HALF = Placement("offload-50%")

sizes = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=40)


@given(sizes, sizes, st.integers(1, 99))
def test_the_share_is_met_by_each_beginning(nbytes: list[int], others: list[int], percent: int) -> None:
    stays = staying(nbytes, percent)
    away = (100 - percent) * sum(nbytes) - 100 * sum(nbytes[number] for number in stays)
    assert abs(away) <= 50 * max(nbytes)
    assert stays == {number for number in staying([*nbytes, *others], percent) if number < len(nbytes)}
    rule = Staying(percent)  # what has no size counts neither way
    assert stays == {n for n, size in enumerate(nbytes) if (rule.stays(0), rule.stays(size))[1]}


@pytest.mark.parametrize("placement", [*Placement, HALF, Placement("offload-7%")], ids=str)
def test_a_placement_is_its_name(placement: Placement) -> None:
    assert Placement(placement.value) is copy.deepcopy(placement) is placement
    assert pickle.loads(pickle.dumps(placement)) is placement
    assert f"{placement}" == placement.value == placement
    assert {placement: 1}[placement.value] == 1  # type: ignore[index]


def test_a_share_is_a_placement() -> None:
    assert [Placement(f"offload-{n}%").percent for n in range(1, 100)] == list(range(1, 100))
    assert HALF.is_offloaded
    assert HALF not in list(Placement)


@pytest.mark.parametrize(
    "word", ["offload-0%", "offload-100%", "offload-05%", "offload-5.5%", "offload-50", "offload-N%", "Keep"]
)
def test_other_words_are_errors_that_list_the_names(word: str) -> None:
    with pytest.raises(ValueError, match=r"is not a placement. The placements are keep, .*auto, offload-N%"):
        Placement(word)
    with pytest.raises(tba.ConfigError, match=r"offload-N%"):
        tba.OffloadConfig.from_yaml(f"default: {word}")
