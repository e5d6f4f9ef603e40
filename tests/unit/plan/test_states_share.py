"""How many sub-groups travel: what that frees, what it costs, and which number is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba_offload.plan.device_share import DeviceShare
from tba_offload.plan.model import Limits, Prediction
from tba_offload.plan.states_share import Expected, StatesLoad, choose

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20


def of_equal(
    count: int, nbytes: int, update_seconds: float, rate: float, *, turns: bool = True
) -> StatesLoad:
    """Sub-groups of one size, with ``nbytes`` bytes in all."""
    return StatesLoad(((nbytes // count,) * count,), update_seconds, rate, turns=turns)


LOAD = of_equal(20, 200 * MIB, update_seconds=0.1, rate=1e9)


def limits_on(device: int, load: StatesLoad) -> Callable[[int], Limits]:
    return lambda count: Limits().on_device(DeviceShare(device, load.device_bytes(count)))


def needs(whole: int, slower: float, least: int = 0) -> Callable[[Limits], Prediction]:
    """Activations that take a second if ``whole`` bytes are left, and longer with each byte less."""

    def plan_of(limits: Limits) -> Prediction:
        budget = limits.budget or 0
        peak = max(min(budget, whole), least)
        return Prediction(1.0 + slower * (whole - peak) / whole, 0.0, peak, 0)

    return plan_of


def test_what_travels_frees_its_bytes_but_for_three_slots() -> None:
    assert LOAD.device_bytes(0) == 200 * MIB
    assert LOAD.device_bytes(20) == 30 * MIB
    assert LOAD.device_bytes(5) == (150 + 30) * MIB
    assert LOAD.useful() == [0, *range(4, 21)]


@pytest.mark.parametrize(("device", "expected"), [(400, 0), (290, 5), (140, 20)])
def test_as_few_as_leave_activations_what_they_need(device: int, expected: int) -> None:
    """Of 290 MiB those that are hidden in the update leave activations most of what they need."""
    tried = choose(LOAD, limits_on(device * MIB, LOAD), needs(120 * MIB, slower=2.0))
    assert tried[0].travelling in {expected, expected + 1, expected + 2, expected + 3}


def test_none_travel_where_that_takes_longer_than_it_saves() -> None:
    tried = choose(LOAD, limits_on(290 * MIB, LOAD), needs(120 * MIB, slower=0.001))
    assert tried[0].travelling == 0


def test_those_that_do_not_fit_are_the_last_resort() -> None:
    tried = choose(LOAD, limits_on(100 * MIB, LOAD), needs(120 * MIB, slower=1.0, least=60 * MIB))
    assert tried[0].over == 0
    for device in (40 * MIB, 20 * MIB):  # what cannot leave takes 30
        nothing = choose(LOAD, limits_on(device, LOAD), needs(120 * MIB, slower=1.0, least=60 * MIB))
        assert nothing[0].travelling == 20


@given(
    st.integers(1, 60),
    st.integers(100, 3000).map(lambda each: each * MIB),
    st.floats(0, 10),
    st.floats(1e8, 1e10),
)
def test_what_is_tried_comes_close_to_the_best(count: int, device: int, slower: float, rate: float) -> None:
    load = of_equal(count, count * 20 * MIB, 0.1, rate)
    limits_of, plan_of = limits_on(device, load), needs(800 * MIB, slower, least=20 * MIB)
    best = choose(load, limits_of, plan_of)[0]
    every = [
        Expected(number, limits_of(number), plan_of(limits_of(number)), load.seconds(number))
        for number in load.useful()
    ]
    fitting = [each for each in every if not each.over]
    if fitting:
        assert best.over == 0
        assert best.seconds <= 1.02 * min(each.seconds for each in fitting)
    assert len(choose(load, limits_of, plan_of, now=1)) <= 16
