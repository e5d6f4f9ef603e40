"""Models over two devices, and over two streams, with frozen weights too; see ``test_lagging_device.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lagging
import pytest
import torch
from covering import of_which
from harness import KIB, PLACEMENTS
from lagging import LAG
from torch import Tensor, nn

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYERS, WIDTH, STEPS = 6, 128, 4
DEVICES = tuple(torch.device(LAG, number) for number in range(lagging.DEVICES))
LATE = 0.001
"""Seconds that an operation, or a copy, takes longer: what nothing orders comes before it."""

pytestmark = pytest.mark.filterwarnings("ignore::tba_offload.errors.NoEffectWarning")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.base, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.base(x))) + self.side(x)


class Spread(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        for layer, device in zip(self.layers, self.places(), strict=True):
            layer.to(device)

    @staticmethod
    def places() -> list[torch.device]:
        return [DEVICES[number * len(DEVICES) // LAYERS] for number in range(LAYERS)]

    def forward(self, x: Tensor) -> Tensor:
        for layer, device in zip(self.layers, self.places(), strict=True):
            x = layer(x.to(device))
        return x


class InTurn(nn.Module):
    """Its layers run on two streams of one device in turn, each after the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(0.0) for _ in range(LAYERS))
        self.to(DEVICES[0])
        self.streams = [torch.Stream(DEVICES[0]) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        before = main = torch.accelerator.current_stream()
        for number, layer in enumerate(self.layers):
            stream = self.streams[number % 2]
            stream.wait_event(before.record_event())
            x.record_stream(stream)
            with torch.get_device_module(LAG).stream(stream):
                x = layer(x)
            before = stream
        main.wait_event(before.record_event())
        x.record_stream(main)
        return x


def seeded(make: Callable[[], nn.Module], *, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and ".base." in name))
    return model


def train(model: nn.Module, session: tba.Session | None = None) -> list[float]:
    torch.manual_seed(1)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2, foreach=False)
    losses = []
    for number in range(STEPS):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)).to(DEVICES[0])
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        torch.accelerator.synchronize()  # gradients lie in memory of other streams
        optimizer.zero_grad()
        losses.append(loss)
    return [loss.item() for loss in losses]


def policy(tmp_path: Path, kind: str = "file", **more: Any) -> dict[str, Any]:
    directories = {"directories": [str(tmp_path)]} if kind == "file" else {}
    return {"min_tensor_bytes": KIB, "store": {"kind": kind, **directories}, **more}


@pytest.mark.parametrize("late", of_which(["operations", "copies"], "operations"))
@pytest.mark.parametrize("placement", of_which(PLACEMENTS, "offload", "recompute-offload", "auto"))
def test_a_model_over_two_devices(placement: str, late: str, tmp_path: Path) -> None:
    """Its layers draw random numbers on both, which a second run gets once more, and a trial puts back."""
    expected = train(seeded(lambda: Spread(0.1)))
    model = seeded(lambda: Spread(0.1))
    wanted = policy(tmp_path, default=placement, budget={"in_flight_bytes": 64 * KIB})
    with lagging.late(**{late: LATE}), tba.attach(model, wanted):
        assert train(model) == expected


@pytest.mark.parametrize("kind", of_which(["file", "host"], "file"))
def test_frozen_weights_of_another_device_stay(kind: str, tmp_path: Path) -> None:
    """What copies them would know nothing of the order of work there."""
    expected, model = train(seeded(Spread, frozen=True)), seeded(Spread, frozen=True)
    before = [parameter.detach().cpu() for parameter in model.parameters() if not parameter.requires_grad]
    wanted = policy(tmp_path, kind, default="keep", weights={"frozen": "offload"})
    with lagging.late(operations=LATE), tba.attach(model, wanted) as session:
        assert session.weights is not None
        assert session.weights.nbytes == LAYERS // 2 * WIDTH * WIDTH * 4
        assert train(model) == expected
    after = [parameter.detach().cpu() for parameter in model.parameters() if not parameter.requires_grad]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["file", "host"])
def test_frozen_weights_that_are_read_ahead_on_one_stream_and_used_on_another(
    kind: str, tmp_path: Path
) -> None:
    expected, model = train(seeded(InTurn, frozen=True)), seeded(InTurn, frozen=True)
    wanted = policy(tmp_path, kind, default="keep", weights={"frozen": "offload"})
    with lagging.late(operations=LATE), tba.attach(model, wanted):
        assert train(model) == expected


def test_a_pass_that_fails_on_a_thread_of_the_engine_holds_no_weights(tmp_path: Path) -> None:
    model = seeded(InTurn, frozen=True)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    wanted = policy(tmp_path, default="keep", weights={"frozen": "offload"})
    with tba.attach(model, wanted) as session:
        for number in range(1, LAYERS):
            handle = model.layers[number].side.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                train(model)
            handle.remove()
        train(model)
        assert session.weights is not None
        assert session.weights.resident_bytes == 0
