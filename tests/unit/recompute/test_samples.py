"""The elements by which second runs of layers are compared with first ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tba_offload.recompute.samples import Samples

RUNS = 400
VIEWS = {
    "contiguous": torch.arange(3 * 5 * 7).view(3, 5, 7),
    "heads before rows": torch.arange(2 * 4 * 15 * 8).view(2, 15, 4, 8).transpose(1, 2),
    "queries among keys and values": torch.arange(2 * 4 * 15 * 24)
    .view(2, 15, 4, 24)[..., :8]
    .transpose(1, 2),
    "each second column": torch.arange(20 * 40).view(20, 40)[:, ::2],
    "expanded": torch.arange(40).view(40, 1).expand(40, 3),
    "expanded, with gaps": torch.arange(10)[::5].view(2, 1).expand(2, 3),
    "scalar": torch.tensor(3),
    "neither begins nor ends its memory": torch.arange(300)[7:279],
}


def sampled(tensor: Tensor) -> set[int]:
    """The values of all elements that are looked at in many runs."""
    found: set[int] = set()
    for number in range(RUNS):
        found.update(Samples(number)._sample(tensor).view(tensor.dtype).tolist())
    return found


@pytest.mark.parametrize("view", VIEWS)
def test_runs_look_at_all_parts_of_a_tensor_and_at_nothing_else(view: str) -> None:
    tensor = VIEWS[view]
    found = sampled(tensor)
    assert found <= set(tensor.flatten().tolist())
    for dimension, size in enumerate(tensor.shape):
        if tensor.stride(dimension):
            parts = [set(part.flatten().tolist()) for part in tensor.split(1, dimension)]
            assert len(parts) == size
            assert all(part & found for part in parts)
