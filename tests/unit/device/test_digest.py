"""Digests of tensors: other bits, or the same in another order, give another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tba_offload.device.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Callable

    Change = Callable[[torch.Tensor], torch.Tensor]

CHANGES: dict[str, Change] = {
    "all signs": torch.neg,
    "signs of the odd ones": lambda flat: flat.index_fill(0, _odd(flat), 0) - flat * _is_odd(flat),
    "two signs": lambda flat: torch.cat((flat[:3], -flat[3:5], flat[5:])),
    "two that change places": lambda flat: torch.cat((flat[:3], flat[5:6], flat[4:5], flat[3:4], flat[6:])),
    "one bit": lambda flat: torch.cat((flat[:9], flat[9:10].abs() + 1, flat[10:])),
}


def _is_odd(flat: torch.Tensor) -> torch.Tensor:
    return (torch.arange(flat.numel()) % 2).to(flat.dtype)


def _odd(flat: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, flat.numel(), 2)


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [16, 2304, 50_001])
def test_other_bits_give_another_digest(change: str, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    flat = torch.randn(count).to(dtype)
    flat[:16] = torch.arange(1, 17)
    digest = Digest.of(flat)
    assert Digest.of(flat.clone()).equals(digest)
    assert not Digest.of(CHANGES[change](flat)).equals(digest)


def test_rows_that_change_places_give_another_digest() -> None:
    table = torch.randn(300, 64)
    assert not Digest.of(table[torch.randperm(300)]).equals(Digest.of(table))


def test_conjugates_give_another_digest() -> None:
    value = torch.randn(64, 64, dtype=torch.complex64)
    assert not Digest.of(value.conj()).equals(Digest.of(value))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 7, 9])
def test_short_tensors_and_integers_have_digests(dtype: torch.dtype, count: int) -> None:
    value = torch.ones(count).to(dtype)
    assert Digest.of(value[:]).equals(Digest.of(value.clone()))
