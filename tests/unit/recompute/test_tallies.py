"""Buffers that a layer writes to only where gradients are computed, where its first run computes none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tba_offload.errors import SavedTensorModifiedError
from tba_offload.recompute.surroundings import Surroundings
from tba_offload.recompute.tallies import Tallies


class Router(nn.Module):
    """Counts calls in one buffer, and in another those with gradients, as Megatron-LM's count tokens."""

    calls: Tensor
    counted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("counted", torch.zeros(2))

    def forward(self) -> float:
        self.calls += 1
        if torch.is_grad_enabled():
            self.counted += 1
        return float(self.counted[0])


def first_run(router: Router, tallies: Tallies, *, grad_enabled: bool = False) -> Surroundings:
    with torch.set_grad_enabled(grad_enabled):
        found = Surroundings(router, {}, tallies)
        router()
        found.end_first_run()
    return found


def counts(router: Router) -> tuple[float, float]:
    return float(router.calls[0]), float(router.counted[0])


def test_what_only_runs_with_gradients_count_stays_and_adds_up() -> None:
    router, tallies = Router(), Tallies()
    runs = [first_run(router, tallies) for _ in range(3)]  # as the micro-batches of a pipeline
    assert counts(router) == (3, 0)
    for number, found in enumerate(runs, 1):
        with found.restored():
            assert router() == number
        assert counts(router) == (3, number)


def test_what_a_first_run_with_gradients_counts_is_not_counted_again() -> None:
    router, tallies = Router(), Tallies()
    found = first_run(router, tallies, grad_enabled=True)
    with found.restored():
        router()
    assert counts(router) == (1, 1)


def test_what_is_undone_leaves_it_a_tally() -> None:
    router, tallies = Router(), Tallies()
    found = first_run(router, tallies)
    with found.undoing(), found.restored():
        router()
    assert counts(router) == (1, 0)
    with found.restored():
        router()
    assert counts(router) == (1, 1)


def test_a_buffer_that_something_else_has_changed_too_is_an_error() -> None:
    router, tallies = Router(), Tallies()
    found = first_run(router, tallies)
    router.counted += 5
    with pytest.raises(SavedTensorModifiedError, match="counted"), found.restored():
        router()
    assert counts(router) == (1, 5)
