"""What the last operation of a layer fills after it has saved it is complete when backward is given it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from covering import of_which
from harness import KIB, session_for
from repeatable import (
    RECOMPUTED,
    ROWS,
    WIDTH,
    Plain,
    assert_same,
    auto_session,
    make,
    train,
    warm_up,
)
from torch import Tensor, nn

from tba_offload.config.policy import Placement
from tba_offload.layers.graph import is_recomputation


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    warm_up()


def leaky(x: Tensor, noise: Tensor) -> Tensor:
    """Saves the noise, and then draws it; no version tells."""
    return torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.4, True)  # type: ignore[no-any-return]


class Last(Plain):
    """Ends with such an operation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(F.gelu(self.first(x))))

    def last(self, x: Tensor) -> Tensor:
        return F.rrelu(x, training=True)


class InPlace(Last):
    def last(self, x: Tensor) -> Tensor:
        return F.rrelu_(x, training=True)


class View(Last):
    """Its noise is a view of more memory, as parameters are that were gathered."""

    def last(self, x: Tensor) -> Tensor:
        return leaky(x, torch.zeros(2 * ROWS, WIDTH)[:ROWS])


class Stale(Last):
    """Has its noise in memory that holds the very same from an earlier run, as an allocator may give it."""

    is_stale = True

    def last(self, x: Tensor) -> Tensor:
        noise = torch.zeros_like(x)
        if self.is_stale and is_recomputation():
            state = torch.get_rng_state()
            leaky(x.detach(), noise)
            torch.set_rng_state(state)
        return leaky(x, noise)


class Kept(Last):
    """Keeps its noise in a small buffer, which gets its values back after a second run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(ROWS, WIDTH))

    def last(self, x: Tensor) -> Tensor:
        return leaky(x, self.kept)


class KeptEarlier(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(ROWS, 2 * WIDTH))

    def noise(self, x: Tensor) -> Tensor:
        return leaky(x, self.kept)


class Normed(Last):
    """Changes running statistics that it has saved, which backward does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def last(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


KINDS = [Last, InPlace, View, Stale, Kept, KeptEarlier, Normed]


@pytest.mark.parametrize("placement", of_which(RECOMPUTED, Placement.RECOMPUTE))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_filled_after_it_was_saved_is_recomputed(kind: type[Plain], placement: Placement) -> None:
    net = make(kind)
    with session_for(net, default=placement) as session:
        assert_same(train(net, session, steps=3), train(make(kind), steps=3))


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("kind", of_which(KINDS, Stale))
def test_a_trial_trusts_what_later_steps_fill_right(
    kind: type[Plain], caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that finds in its memory what is drawn there, where later steps find other bytes."""
    net, plain = make(kind), make(kind)
    with caplog.at_level("INFO", "tba_offload"), auto_session(net, activation=240 * KIB) as session:
        for _ in range(2):
            assert_same(train(net, session, steps=3), train(plain, steps=3))
            for layer in net.layers:
                layer.is_stale = False  # type: ignore[assignment]
    assert "is not recomputed by the planner" not in caplog.text
