"""Calls of Python on the training thread for each tensor that is saved, so that they do not creep back.

Each costs about as much as the next, whatever it does: a hook runs after the model's work, in cold caches. So
their number says what a hook costs better than a clock on a busy machine does.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import KIB, MIB, assert_all_given_back, quiesce, session_for
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from tba_offload.session import Session

SAVED = 256
ONE = 64 * KIB
SHARED = SimpleNamespace(**{f"width_{number}": number for number in range(200)}, more=[SimpleNamespace()] * 9)
"""Settings as frameworks have them in each module of a layer."""


WAITS = {"_read_to_end", "_make_room"}
"""Functions in which the training thread waits for drives: how often it asks there is their affair."""


class Calls:
    """Counts calls of Python on this thread, those while it waits for a drive left out; a block each time."""

    def __init__(self) -> None:
        self.count = 0
        self._waits: FrameType | None = None

    def __enter__(self) -> None:
        sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if self._waits is not None:
            if event == "return" and frame is self._waits:
                self._waits = None
        elif event == "call":
            if frame.f_code.co_name in WAITS:
                self._waits = frame
            else:
                self.count += 1


class Chain(nn.Module):
    def __init__(self, *operations: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operations = operations
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for _ in range(SAVED):
            for operation in self.operations:
                x = operation(x)
        return x


ONCE = Chain(torch.relu)
"""Each operation saves its own output."""

TWICE = Chain(torch.tanh, torch.sin)
"""The output of each first one is saved by it and by the second one."""


def step(model: nn.Module, session: Session, *, written: bool) -> Calls:
    """Everything that is saved is ``written`` before backward begins, or waits."""
    x = torch.full((ONE // 4,), 0.5, requires_grad=True)
    calls = Calls()
    with session.step():
        with calls:
            loss = model(x).sum()
            if written:
                session.offloader.flush()
        if written:
            quiesce(session.offloader)
        with calls:
            loss.backward()
    return calls


def calls_of(chain: Chain, directory: Path, *, written: bool = True, **settings: Any) -> tuple[int, Session]:
    model, settings = nn.Sequential(chain), {"in_flight": 64 * MIB, "directory": directory, **settings}
    with session_for(model, layers=list(model), **settings) as session:
        for _ in range(3):
            calls = step(model, session, written=written)
        assert_all_given_back(session)
        return calls.count, session


@pytest.fixture
def written_and_read(tmp_path: Path) -> float:
    calls, session = calls_of(ONCE, tmp_path)
    assert session.records[-1].read_bytes >= 0.95 * SAVED * ONE
    return calls / SAVED


def test_a_tensor_that_is_written_and_read(written_and_read: float) -> None:
    assert written_and_read <= 50


def test_a_tensor_that_backward_comes_for_before_its_batch_is_due(tmp_path: Path) -> None:
    calls, session = calls_of(ONCE, tmp_path, in_flight=4 * SAVED * ONE, written=False)
    assert session.records[-1].offloaded_bytes == 0
    assert session.records[-1].forwarded_bytes >= 0.95 * SAVED * ONE
    assert calls / SAVED <= 26


def test_a_tensor_whose_storage_was_saved_before(written_and_read: float, tmp_path: Path) -> None:
    calls, session = calls_of(TWICE, tmp_path)
    assert session.records[-1].deduplicated_bytes >= 0.95 * SAVED * ONE
    assert calls / SAVED - written_and_read <= 12


def test_a_tensor_that_is_small(tmp_path: Path) -> None:
    calls, session = calls_of(ONCE, tmp_path, min_tensor_bytes=2 * ONE)
    assert session.records[-1].offloaded_bytes == 0
    assert calls / SAVED <= 4


def calls_with(layers: int, directory: Path) -> int:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers)))
    with session_for(model, layers=list(model), directory=directory, min_tensor_bytes=ONE) as session:
        for _ in range(3):
            calls = Calls()
            with session.step(), calls:
                model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return calls.count


def test_a_run_of_a_layer_and_a_pass_of_the_model(tmp_path: Path) -> None:
    """Both with what PyTorch calls: for the layer three modules, two gradients and three saved tensors."""
    one, nine = (calls_with(layers, tmp_path) for layers in (1, 9))
    layer = (nine - one) / 8
    assert layer <= 78
    assert one - layer <= 44


def calls_beside(modules: int, directory: Path) -> int:
    """The calls of a whole step of a model: a layer, and that number of modules of two weights each."""
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4)) for _ in range(modules)))
    with session_for(model, layers=[model[0]], directory=directory, min_tensor_bytes=ONE) as session:
        for _ in range(3):
            calls = Calls()
            with calls, session.step():
                model[0](torch.ones(2, 4)).sum().backward()
        return calls.count


def test_weights_that_a_step_does_not_meet(tmp_path: Path) -> None:
    """Adapters make thousands of small modules of a model, and each step looks at all of its parameters."""
    few, many = (calls_beside(modules, tmp_path) for modules in (10, 210))
    assert (many - few) / 200 <= 26


def test_a_layer_that_is_run_a_second_time(tmp_path: Path) -> None:
    """What verifying takes for each module of a layer, and for all that they share, such as settings."""
    layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    for module in layer:
        module.settings = SHARED  # type: ignore[assignment]
    model = nn.Sequential(layer)
    with session_for(model, layers=list(model), directory=tmp_path, default="recompute") as session:
        calls = Calls()
        for _ in range(3):
            calls = Calls()
            with session.step(), calls:
                model(torch.ones(2, 4)).sum().backward()
    assert calls.count <= 3_400
