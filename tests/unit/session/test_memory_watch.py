"""What holds memory, told from an allocator's figures and the offloader's books, without a training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tba_offload.capture.scope import ScopeKey
from tba_offload.device.memory import MemoryMeter
from tba_offload.planner.profile import Beside
from tba_offload.session.memory import EMBEDDINGS, MemoryWatch, frozen_bytes, static_bytes
from tba_offload.session.outputs import Outputs

CPU = torch.device("cpu")


class Counted(MemoryMeter):
    """A meter of bytes that a test allocates: it sees it when it is asked to, or the most of a stretch."""

    source = "counted"

    def __init__(self, *, samples: bool) -> None:
        super().__init__()
        self.samples = samples
        self.now = self.most = 1000  # before the step
        self.aside = 7  # gradients

    def live(self) -> int:
        return self.now

    def cut(self) -> int:
        self.sample()
        return self.now

    def sample(self, grows_by: int = 0) -> None:
        most, self.most = self.most, self.now
        self._seen(self.now if self.samples else most, self.aside)

    def reset(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...
    def peak(self) -> int:
        return self.now


class Used:
    """What backward has used, run by run."""

    def __init__(self) -> None:
        self.sizes: list[tuple[ScopeKey, int]] = []

    @property
    def uses(self) -> int:
        return len(self.sizes)

    def used_bytes(self, scope: ScopeKey, since: int, until: int) -> int:
        return sum(nbytes for key, nbytes in self.sizes[since:until] if key == scope)


def run_of(index: int) -> ScopeKey:
    return ScopeKey(7 + index, 0, 0, f"layers.{index}")


class Bench:
    """A watch over two layers, and what a test has them do."""

    def __init__(self, *, samples: bool = True, number: int = 1) -> None:
        self.ledger = SimpleNamespace(in_flight=0, read_ahead=0, settled=0)
        self.trace = SimpleNamespace(kept_bytes=0, planned_kept_bytes=0)
        self.meter = Counted(samples=samples)
        offloader: Any = SimpleNamespace(ledger=self.ledger, own_bytes=0)
        self.offloader = offloader
        self.lookahead = Used()
        capture: Any = SimpleNamespace(trace=self.trace, lookahead=self.lookahead, offloader=offloader)
        gradients: Any = SimpleNamespace(parts=(7, 0))
        self.watch = MemoryWatch(gradients, Outputs(capture, CPU, 1), capture, ["layers.0", "layers.1"])
        self.meter.tell(self.watch.seen)
        self.begin(number)

    def begin(self, number: int) -> None:
        self.watch.begin_step(self.meter, number)
        self.watch.started()

    def grow(self, nbytes: int, **books: int) -> None:
        """Bytes are allocated or freed, and the offloader's books change."""
        self.meter.now += nbytes
        self.meter.most = max(self.meter.most, self.meter.now)
        for name, change in books.items():
            setattr(self.ledger, name, getattr(self.ledger, name) + change)
        self.offloader.own_bytes = self.ledger.in_flight + self.ledger.settled
        if self.meter.samples:
            self.meter.sample()

    def backward(self, index: int) -> None:
        self.watch.backward_reached(index, run_of(index))

    def forward(self, way: str, *, nbytes: int = 10) -> None:
        for index in range(2):
            self.watch.layer_begins(index)
            self.grow(nbytes + 5)
            self.grow(-5)
            self.watch.layer_ended(index, way)

    @property
    def held(self) -> dict[str, dict[str, int]]:
        return {phase: peak.held._asdict() for phase, peak in self.watch.peaks.items()}


@pytest.mark.parametrize(
    ("way", "holder"), [("keep", "kept"), ("recompute", "inputs"), ("offload", "outputs")]
)
def test_what_layers_leave_is_told_by_how_they_ran(way: str, holder: str) -> None:
    bench = Bench()
    bench.forward(way)
    bench.grow(30)
    assert bench.watch.peaks["loss"].nbytes == 50
    assert bench.held["loss"][holder] == 20
    assert sum(bench.held["loss"].values()) == 20
    bench.backward(1)
    # Of what layers leave whose activations travel no plan knows.
    assert bench.watch.runs.beside_at_loss == (50 if holder == "outputs" else 30)
    assert [(layer.leaves, layer.forward) for layer in bench.watch.layers] == [(10, 15), (10, 15)]


@pytest.mark.parametrize(("samples", "beside"), [(True, 50), (False, 10)])
def test_the_most_beside_layers_need_not_be_there_when_there_is_most_of_all(
    *, samples: bool, beside: int
) -> None:
    """A meter of stretches does not tell when in one there was most: perhaps before the window drained."""
    bench = Bench(samples=samples)
    bench.grow(60, in_flight=60)
    bench.forward("keep", nbytes=0)
    bench.grow(10)
    bench.grow(-20, in_flight=-60)
    bench.backward(1)
    assert bench.watch.runs.beside_at_loss == beside


def test_what_lies_beside_a_layer_is_told_for_both_its_runs() -> None:
    """What others hold is there as well; what it leaves itself is known when the next one begins."""
    bench = Bench()
    bench.grow(3)  # embeddings
    bench.forward("keep")
    bench.watch.model_ended([])
    bench.backward(1)
    bench.grow(8)
    bench.grow(-18)
    bench.backward(0)
    bench.grow(20)
    bench.watch.leave(EMBEDDINGS)
    assert [layer.beside for layer in bench.watch.layers] == [Beside(18, 23, 23), Beside(18, 11, 11)]


@pytest.mark.parametrize(("samples", "whole"), [(True, 25), (False, 75)])
def test_what_backward_has_used_makes_room_for_what_it_needs_later(*, samples: bool, whole: int) -> None:
    """A meter of stretches does not tell how much was used when there was most."""
    bench = Bench(samples=samples)
    bench.forward("offload", nbytes=0)
    bench.watch.model_ended([])
    bench.lookahead.sizes.append((run_of(1), 1000))  # before, in another pass
    bench.backward(1)
    bench.grow(20)  # gradients of what the layer put out
    bench.lookahead.sizes += [(run_of(1), 30), (run_of(0), 4000)]
    bench.grow(30)  # the first activation comes back
    bench.grow(5)
    bench.lookahead.sizes.append((run_of(1), 20))
    bench.grow(20)  # and the second, before the first is gone
    bench.grow(-55)
    bench.watch.leave(EMBEDDINGS)
    assert bench.watch.layers[1].beside == Beside(5, 75, whole)


def test_the_loss_comes_after_the_model_whichever_layer_ran_last() -> None:
    bench = Bench()
    bench.watch.layer_begins(0)
    bench.grow(10)
    bench.watch.layer_ended(0, "keep")  # the next one is skipped
    bench.watch.model_ended([])
    bench.grow(30)
    bench.backward(0)
    assert bench.watch.runs.beside_at_loss == 30
    assert bench.held["loss"]["kept"] == 10


def test_what_is_read_ahead_for_others_is_nothing_that_a_layer_takes() -> None:
    bench = Bench()
    bench.backward(1)
    bench.grow(100, in_flight=100, read_ahead=100)
    bench.grow(20, read_ahead=-15)  # it uses some, and works with more
    bench.backward(0)
    assert bench.watch.layers[1].backward == 35


@pytest.mark.parametrize(("samples", "steps"), [(True, range(1, 20)), (False, (1, 2, 3, 4, 8, 16))])
def test_where_looking_takes_long_few_steps_are_looked_at(samples: bool, steps: Any) -> None:
    bench = Bench(samples=samples)
    looked = []
    for number in range(1, 20):
        bench.begin(number - 1)
        if bench.watch.is_on:
            looked.append(number)
        bench.watch.is_on = False
    assert looked == list(steps)


# What lasts


def test_each_storage_counts_once_for_what_holds_it_first() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(50))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert static_bytes([model], [optimizer], [], CPU) == {
        "parameters": 400,
        "gradients": 400,
        "buffers": 200,
        "optimizer_states": 804,
        "masters": 0,
    }
    assert set(static_bytes([model], [optimizer], [], torch.device("meta")).values()) == {0}


def test_frozen_weights_that_could_travel_are_those_of_layers() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
            self.buffers = []  # type: ignore[assignment]  # as Megatron's data-parallel wrapper has it

    model = Wrapped()
    for layer in model.module[1:]:
        layer.requires_grad_(requires_grad=False)
    assert frozen_bytes(list(model.module[:3]), CPU) == 800


def test_parameters_of_an_optimizer_that_are_not_the_models_are_masters() -> None:
    model = nn.Linear(10, 10, bias=False).to(torch.bfloat16)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD([*masters, *model.parameters()])
    static = static_bytes([model], [optimizer], [], CPU)
    assert (static["parameters"], static["masters"]) == (200, 400)
