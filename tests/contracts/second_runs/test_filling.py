"""What the last operation of a layer fills after it has saved it is complete when backward is given it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from covering import of_which
from harness import KIB, session_for
from repeatable import ROWS, WIDTH, Plain, assert_same, auto_session, make, train, warm_up
from torch import Tensor

from tba_offload.config.policy import Placement
from tba_offload.layers.graph import is_recomputation

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    warm_up()


def leaky(x: Tensor, noise: Tensor) -> Tensor:
    """Saves the noise, and then draws it; no version tells."""
    return torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.4, True)  # type: ignore[no-any-return]


def stale(layer: Any, x: Tensor) -> Tensor:
    """Has its noise in memory that holds the very same from an earlier run, as an allocator may give it."""
    noise = torch.zeros_like(x)
    if layer.is_stale and is_recomputation():
        state = torch.get_rng_state()
        leaky(x.detach(), noise)
        torch.set_rng_state(state)
    return leaky(x, noise)


LAST: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "new": lambda _, x: F.rrelu(x, training=True),
    "in place": lambda _, x: F.rrelu_(x, training=True),
    # A view of more memory, as parameters are that were gathered.
    "view": lambda _, x: leaky(x, torch.zeros(2 * ROWS, WIDTH)[:ROWS]),
    "stale": stale,
    # A small buffer, which gets its values back after a second run.
    "buffer": lambda layer, x: leaky(x, layer.kept),
    # Running statistics, which backward does not need.
    "statistics": lambda layer, x: F.batch_norm(x, layer.mean, layer.variance, training=True),
}


def ending_with(name: str) -> type[Plain]:
    class Last(Plain):
        is_stale = True

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(ROWS, WIDTH))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("variance", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return LAST[name](self, self.second(F.gelu(self.first(x))))

    return Last


@pytest.mark.parametrize("name", LAST)
def test_what_is_filled_after_it_was_saved_is_recomputed(name: str) -> None:
    net = make(ending_with(name))
    with session_for(net, default=Placement.RECOMPUTE) as session:
        assert_same(train(net, session, steps=3), train(make(ending_with(name)), steps=3))


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("name", of_which(LAST, "stale"))
def test_a_trial_trusts_what_later_steps_fill_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that finds in its memory what is drawn there, where later steps find other bytes."""
    net, plain = make(ending_with(name)), make(ending_with(name))
    with caplog.at_level("INFO", "tba_offload"), auto_session(net, activation=240 * KIB) as session:
        for _ in range(2):
            assert_same(train(net, session, steps=3), train(plain, steps=3))
            for layer in net.layers:
                layer.is_stale = False  # type: ignore[assignment]
    assert "not recomputed by the planner" not in caplog.text
