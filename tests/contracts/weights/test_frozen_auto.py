"""``weights: {frozen: auto}``: weights stay in memory where the limit of the device leaves room."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from exact_memory import counted_bytes, exact_memory
from harness import KIB
from models import same_bits
from torch import nn

import tba_offload as tba

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

WIDTH, LAYERS = 128, 8
FROZEN = LAYERS * 4 * (WIDTH * WIDTH + WIDTH)  # bytes


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + 0.1 * self.adapter(x)


def train(directory: Path, rows: list[int], **policy: Any) -> tuple[list[int], list[Tensor], list[int]]:
    """Train one step for each number of rows. Return peaks, trained weights, and bytes read in each step."""
    gc.collect()
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(LAYERS)))
    store = {"directories": str(directory)}
    with tba.attach(
        model, {"min_tensor_bytes": KIB, "store": store, **policy}, layers=list(model), measure_memory=True
    ) as session:
        for number, count in enumerate(rows):
            torch.manual_seed(number)
            with session.step():
                model(torch.randn(count, WIDTH)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        records = session.records
    weights = [torch.from_numpy(each.detach().numpy().copy()) for each in model.parameters()]
    return (
        [each.device_peak_bytes or 0 for each in records],
        weights,
        [each.weights_read_bytes or 0 for each in records],
    )


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_weights_fill_what_activations_leave(share: float, tmp_path: Path) -> None:
    rows = [64] * 10
    with exact_memory(slots_too=True):
        others = counted_bytes()
        kept, expected, _ = train(tmp_path, rows, default="keep")
        least, _, all_read = train(tmp_path, rows, default="keep", weights={"frozen": "offload"})
        budget = max(least) + int(share * (max(kept) - max(least))) + (max(kept) - others) // 25
        peaks, found, read = train(
            tmp_path, rows, default="keep", weights={"frozen": "auto"}, budget={"device_bytes": budget}
        )
    assert all(map(same_bits, found, expected))
    assert max(peaks[2:]) <= budget
    assert read[0] >= FROZEN  # all are offloaded until the memory of a step is known
    if share == 0:
        assert read[-1] > 0.7 * all_read[-1]
    elif share == 0.5:
        assert 0.2 * all_read[-1] < read[-1] < 0.8 * all_read[-1]
    else:
        assert read[-1] == 0


def test_weights_leave_when_activations_need_more(tmp_path: Path) -> None:
    rows = [16] * 6 + [160] * 6 + [16] * 2
    with exact_memory(slots_too=True):
        kept, expected, _ = train(tmp_path, rows, default="keep")
        budget = max(kept) - FROZEN // 2
        peaks, found, read = train(
            tmp_path, rows, default="keep", weights={"frozen": "auto"}, budget={"device_bytes": budget}
        )
    assert all(map(same_bits, found, expected))
    assert read[5] < 0.5 * read[11]
    assert max(peaks[7:]) <= budget  # the first large step shows how much it needs


def test_without_a_limit_it_is_refused() -> None:
    with pytest.raises(tba.ConfigError, match=r"frozen: auto needs a limit. Set budget\.device_bytes"):
        tba.OffloadConfig.from_dict({"default": "offload", "weights": {"frozen": "auto"}})
    assert (
        tba.OffloadConfig.from_dict({"default": "auto", "weights": {"frozen": "auto"}}).frozen_percent == 100
    )
