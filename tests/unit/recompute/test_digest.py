"""A digest tells whether two tensors have the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tba_offload.recompute.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("count", [2**12, 2**16, 2**22])
def test_round_numbers_in_64_bits_count(count: int) -> None:
    """The sum of so many of them has no bit left of 64."""
    zeros = torch.zeros(count, dtype=torch.float64)
    ones = torch.ones_like(zeros)
    assert digest(zeros[1:]) != digest(ones[1:])
    for one, other in ((zeros, ones), (zeros.view(torch.uint8), ones.view(torch.uint8))):
        assert digest(one) != digest(other)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all signs": torch.neg,
    "signs of the odd ones": lambda flat: flat.index_fill(0, _odd(flat), 0) - flat * _is_odd(flat),
    "two signs": lambda flat: torch.cat((flat[:3], -flat[3:5], flat[5:])),
    "two that change places": lambda flat: torch.cat((flat[:3], flat[5:6], flat[4:5], flat[3:4], flat[6:])),
    "one bit": lambda flat: torch.cat((flat[:9], flat[9:10].abs() + 1, flat[10:])),
    "two at the end": lambda flat: torch.cat((flat[:-4], flat[-4:-3] + 8, flat[-3:-1], flat[-1:] + 8)),
    "the order": lambda flat: flat.flip(0),
}


def _is_odd(flat: torch.Tensor) -> torch.Tensor:
    return (torch.arange(flat.numel()) % 2).to(flat.dtype)


def _odd(flat: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, flat.numel(), 2)


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.float32, 50_257), (torch.float64, 16), (torch.bfloat16, 4091)]
)
def test_other_bits_give_another_digest(change: str, dtype: torch.dtype, count: int) -> None:
    """Also in words that fill no row, and elements that fill no word."""
    torch.manual_seed(count)
    flat = torch.randn(count).to(dtype)
    flat[:16] = torch.arange(1, 17)
    assert digest(flat.clone()) == digest(flat)
    assert digest(CHANGES[change](flat)) != digest(flat)
