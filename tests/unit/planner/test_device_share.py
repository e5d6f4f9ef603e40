"""What a device has left for activations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba_offload.planner.model import SPARE, DeviceShare, Limits

GIB = 2**30

sizes = st.integers(0, 2**50)
shares = st.builds(DeviceShare, sizes, sizes, sizes)


@given(shares)
def test_activations_get_what_is_left_less_a_spare_part(share: DeviceShare) -> None:
    beside = share.base_bytes + share.gradient_bytes
    assert share.budget >= 0
    assert share.budget == 0 or share.budget + beside <= share.device_bytes
    assert share.budget >= (1 - SPARE) * (share.device_bytes - beside) - 1


@given(shares, shares)
def test_a_budget_stays_as_long_as_it_keeps_to_what_is_left(one: DeviceShare, other: DeviceShare) -> None:
    """And as long as it leaves little of that unused."""
    if one.holds_for(other):
        assert one.budget <= max(other.left, 0)
        assert one.budget >= (1 - 2 * SPARE) * other.left
    assert one.holds_for(one) or 0 < one.left < 64


@pytest.mark.parametrize(
    ("base", "holds"),
    [(30, True), (30.6, True), (29.4, True), (30.7, False), (29.2, False), (99, False)],
)
def test_small_changes_of_the_base_make_no_other_budget(base: float, *, holds: bool) -> None:
    before = DeviceShare(80 * GIB, 30 * GIB, 10 * GIB)  # 40 GiB are left, and 39.4 GiB are the budget
    assert before.holds_for(DeviceShare(80 * GIB, int(base * GIB), 10 * GIB)) is holds


def test_where_nothing_is_left_it_stays_so() -> None:
    none = DeviceShare(10 * GIB, 8 * GIB, 3 * GIB)
    assert (none.left, none.budget) == (-GIB, 0)
    assert none.holds_for(DeviceShare(10 * GIB, 9 * GIB, 3 * GIB))
    assert not none.holds_for(DeviceShare(10 * GIB, 5 * GIB, 3 * GIB))


def test_the_smaller_limit_holds() -> None:
    share = DeviceShare(80 * GIB, 30 * GIB, 10 * GIB)
    nets = Limits(share.budget, share.budget, device=share, nets_gradients=True)
    assert Limits().on_device(share) == nets == nets.on_device(share)
    wide = Limits(50 * GIB, GIB, 7).on_device(share)
    assert wide == Limits(share.budget, GIB, 7, share)
    assert wide.setting == "budget.device_bytes"
    narrow = Limits(20 * GIB, GIB).on_device(share)
    assert narrow == Limits(20 * GIB, GIB, device=share)
    assert {narrow.setting, Limits(1).setting, Limits().setting} == {"budget.activation_bytes"}


def test_in_words() -> None:
    words = str(DeviceShare(80 * GIB, 30 * GIB, 10 * GIB))
    assert words == "of 80.0 GiB, less 30.0 GiB live before a step and 10.0 GiB of gradients"
