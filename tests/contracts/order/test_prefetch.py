"""Reads come before backward needs them: while it is in a layer, those of the layer before have begun."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING

import torch
from around import put_around
from harness import CPU, Drive, session_for
from torch import Tensor, nn

from tba_offload.store.host import HostStore
from tba_offload.store.multi import MultiStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.store.base import Extent

LAYERS, EACH = 12, 2
"""Layers, and activations that each of them saves."""

ROWS, WIDTH = 64, 1024
WINDOW = 6 * ROWS * WIDTH * 4
"""Bytes of three layers: those before the middle one have left memory when backward begins."""


class Layer(nn.Module):
    """Saves two activations, and is left alone with the gradient between their uses."""

    def __init__(self, between: Callable[[], object]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = x * self.scale
        if inner.requires_grad:
            inner.register_hook(lambda _: self._between())
        return torch.sin(inner)


class Transfers:
    """Knows of which layer an extent is: one thread writes activations in the order of saving."""

    def __init__(self) -> None:
        self.late: list[int] = []
        self.begin_step()

    def begin_step(self) -> None:
        self._begun = [threading.Event() for _ in range(LAYERS)]
        self._layer_at: dict[int, int] = {}
        self._written = 0

    @contextlib.contextmanager
    def __call__(self, direction: str, extent: Extent) -> Iterator[None]:
        if direction == "write":
            self._layer_at[extent.offset] = self._written // EACH
            self._written += 1
        else:
            self._begun[self._layer_at[extent.offset]].set()
        yield

    def wait_for(self, layer: int) -> None:
        """Hold backward until reads of a layer have begun: nothing but reading ahead can begin them."""
        is_stored = 0 <= layer < LAYERS // 2
        if is_stored and not self.late and not self._begun[layer].wait(20):
            self.late.append(layer)


def test_backward_finds_the_reads_of_the_layer_before_begun() -> None:
    """In the first step, whose order nothing was seen of, and in one that repeats it."""
    transfers = Transfers()
    model = nn.Sequential(*(Layer(partial(transfers.wait_for, number - 1)) for number in range(LAYERS)))
    store = MultiStore([HostStore(device=CPU)])
    put_around(store, transfers)
    batch = torch.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    with session_for(model, layers=list(model), store=store, in_flight=WINDOW) as session:
        for _ in range(2):
            transfers.begin_step()
            with session.step():
                model(batch).sum().backward()
            assert session.last is not None
            assert session.last.read_bytes >= LAYERS // 2 * EACH * batch.nbytes
    assert not transfers.late


def test_the_tensor_saved_last_is_not_written_while_the_window_has_room_for_one_more() -> None:
    model, drive = nn.Sequential(*(Layer(lambda: None) for _ in range(2))), Drive()
    batch = torch.ones(ROWS, WIDTH)
    drive.writes.hold()
    with session_for(model, layers=list(model), drive=drive, in_flight=4 * batch.nbytes) as session:
        with session.step():
            loss = model(batch).sum()
            assert len(session.offloader._pending) == 1
            drive.release()
            loss.backward()
