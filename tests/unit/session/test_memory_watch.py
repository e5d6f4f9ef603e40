"""What holds memory, told from an allocator's figures and the offloader's books, without a training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tba_offload.capture.identity import StaticStorages
from tba_offload.capture.registry import Registry
from tba_offload.capture.scope import ScopeKey
from tba_offload.device.memory import MemoryMeter
from tba_offload.plan.beside import Beside
from tba_offload.session.memory_seen import BETWEEN, EMBEDDINGS
from tba_offload.session.memory_watch import MemoryWatch, Sources
from tba_offload.session.outputs import Outputs
from tba_offload.session.static_memory import ModuleTensors, frozen_bytes, head_bytes, static_bytes

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
        capture: Any = SimpleNamespace(trace=self.trace, registry=Registry(), lookahead=self.lookahead)
        gradients: Any = SimpleNamespace(parts=(7, 0))
        self.gradients, self.static = gradients, StaticStorages()
        self.outputs = Outputs(CPU, self.static)
        self.watch = MemoryWatch(
            Sources(
                gradients,
                self.outputs,
                offloader,
                capture,
                ModuleTensors([]),
                torch.device("cpu"),
            ),
            2,
        )
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
    bench.watch.model_ended()
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
    bench.watch.model_ended()
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


def test_what_backward_finds_in_memory_makes_room_when_it_is_done_with_it() -> None:
    """The books have it until then, as settled."""
    bench = Bench()
    bench.forward("offload", nbytes=0)
    bench.watch.model_ended()
    bench.grow(30, in_flight=30)  # an activation whose write does not end
    bench.backward(1)
    bench.grow(20)  # the gradient of the output
    bench.lookahead.sizes.append((run_of(1), 0))  # what the ledger has is not told
    bench.grow(0, in_flight=-30, settled=30)
    bench.grow(40)  # what the operation makes
    assert bench.watch.peaks["backward"].nbytes == 90
    bench.grow(-50, settled=-30)
    bench.watch.leave(EMBEDDINGS)
    assert bench.watch.layers[1].beside == Beside(5, 60, 60)


def test_the_loss_comes_after_the_model_whichever_layer_ran_last() -> None:
    bench = Bench()
    bench.watch.layer_begins(0)
    bench.grow(10)
    bench.watch.layer_ended(0, "keep")  # the next one is skipped
    bench.watch.model_ended()
    bench.grow(30)
    bench.backward(0)
    assert bench.watch.runs.beside_at_loss == 30
    assert bench.held["loss"]["kept"] == 10


def test_what_the_offloader_holds_is_left_by_no_layer() -> None:
    bench = Bench()
    bench.watch.layer_begins(0)
    bench.grow(10, in_flight=8)
    bench.watch.layer_ended(0, "offload")
    bench.watch.layer_begins(1)
    assert bench.watch.layers[0].leaves == 2
    assert bench.held["forward"]["in_flight"] == 8
    assert bench.held["forward"]["outputs"] == 0  # not yet known when memory was at its peak


def test_what_is_read_ahead_is_not_in_flight_twice() -> None:
    bench = Bench()
    bench.backward(1)
    bench.grow(10, in_flight=10, read_ahead=6)
    assert (bench.held["backward"]["in_flight"], bench.held["backward"]["read_ahead"]) == (4, 6)


def test_what_is_read_ahead_for_others_is_nothing_that_a_layer_takes() -> None:
    bench = Bench()
    bench.backward(1)
    bench.grow(100, in_flight=100, read_ahead=100)
    bench.grow(20, read_ahead=-15)  # it uses some, and works with more
    bench.backward(0)
    assert bench.watch.layers[1].backward == 35


def test_backward_lets_go_of_a_run_when_it_comes_to_the_next() -> None:
    bench = Bench()
    for _ in range(2):
        bench.forward("keep")
    bench.backward(1)
    bench.grow(100)
    assert bench.held["backward"]["kept"] == 40
    bench.backward(0)
    bench.grow(100)
    assert bench.held["backward"]["kept"] == 30
    assert bench.watch.peaks["backward"].layer == 0
    assert bench.watch.layers[1].backward == 100
    bench.watch.leave(EMBEDDINGS)
    bench.watch.layer_begins(0)
    bench.grow(1000)
    assert bench.held["forward"]["kept"] == 20


def test_small_tensors_are_told_apart_from_what_else_a_layer_leaves() -> None:
    bench = Bench()
    bench.watch.layer_begins(1)
    bench.trace.kept_bytes = 4
    bench.grow(10)
    bench.watch.layer_ended(1, "offload")
    bench.grow(5)
    assert (bench.held["loss"]["small"], bench.held["loss"]["outputs"]) == (4, 6)


def test_what_a_plan_keeps_of_a_layer_that_travels_is_kept() -> None:
    bench = Bench()
    bench.watch.layer_begins(1)
    bench.trace.kept_bytes, bench.trace.planned_kept_bytes = 7, 3
    bench.grow(10)
    bench.watch.layer_ended(1, "offload-50%")
    bench.grow(5)
    held = bench.held["loss"]
    assert (held["kept"], held["small"], held["outputs"]) == (3, 4, 3)


def test_what_was_there_when_a_layer_began_lies_beside_it() -> None:
    bench = Bench()
    bench.grow(12)
    bench.watch.layer_begins(0)
    bench.grow(8)
    peak = bench.watch.peaks["forward"]
    assert (peak.nbytes, peak.beside, peak.gradients) == (20, 12, 7)


@pytest.mark.parametrize(("samples", "steps"), [(True, range(1, 20)), (False, (1, 2, 3, 4, 8, 16))])
def test_where_looking_takes_long_few_steps_are_looked_at(samples: bool, steps: Any) -> None:
    bench = Bench(samples=samples)
    looked = []
    for number in range(1, 20):
        bench.begin(number - 1)
        if bench.watch.is_on:
            looked.append(number)
        bench.watch.stop()
        assert not bench.watch.is_on
    assert looked == list(steps)


def test_the_fullest_moment_counts_gradients() -> None:
    """With activations alone it would be the first layer of backward, where hardly any are there."""
    bench = Bench()
    for index, gradients in ((1, 10), (0, 200)):
        bench.gradients.parts = (gradients, 0)
        bench.backward(index)
        bench.meter.aside = gradients
        bench.grow(50)
        bench.grow(-60)
    peak = bench.watch.peaks["backward"]
    assert (peak.layer, peak.gradients) == (0, 200)


def test_gradients_that_came_after_a_sample_do_not_count() -> None:
    bench = Bench()
    bench.backward(1)
    bench.gradients.parts = (900, 0)
    bench.meter.aside = 30
    bench.grow(50)
    assert bench.watch.peaks["backward"].gradients == 30


def test_the_loss_comes_after_the_layer_that_runs_last() -> None:
    """As in a model of two stacks, of which the second runs first; the first step shows which it is."""
    bench = Bench()
    for number in (1, 2):
        bench.begin(number)
        assert bench.watch.layer_begins(1)
        bench.watch.layer_ended(1, "keep")
        bench.grow(70)
        assert not bench.watch.layer_begins(0)
        bench.grow(-70)
        bench.watch.layer_ended(0, "keep")
        bench.grow(20)
        bench.grow(-20)
        bench.backward(0)
    assert bench.watch.peaks["loss"].nbytes == 20


def test_what_comes_after_a_backward_is_not_of_the_embeddings() -> None:
    bench = Bench()
    bench.forward("keep")
    bench.backward(0)
    bench.watch.leave(EMBEDDINGS)
    bench.grow(5)
    bench.watch.leave(BETWEEN)
    bench.grow(300)
    bench.backward(1)
    assert bench.watch.peaks["between"].nbytes > 300 > bench.watch.peaks["embeddings"].nbytes


def test_what_went_with_the_output_is_left_by_no_layer() -> None:
    bench = Bench()
    bench.forward("offload")
    bench.grow(-15)
    bench.backward(1)
    assert bench.held["backward"]["outputs"] == 5


def test_outputs_of_earlier_steps_are_none_of_what_lasts() -> None:
    bench = Bench()
    output = {"logits": torch.zeros(10), "cache": [torch.zeros(5)]}
    bench.outputs.note(output)
    bench.meter.now += 60
    bench.outputs.begin_step()
    bench.begin(2)
    bench.watch.layer_begins(0)
    assert (bench.outputs.at_begin, bench.held["forward"]["put_out"]) == (60, 60)
    assert bench.watch.peaks["forward"].nbytes == 60
    del output
    assert bench.outputs.nbytes == 0
    weight = torch.zeros(9)
    bench.static.refresh([nn.ParameterList([weight])])
    bench.outputs.note(nn.ParameterList([weight])[0])
    bench.outputs.begin_step()
    assert bench.outputs.at_begin == 0


def test_steps_without_news_are_not_told() -> None:
    bench = Bench()
    told = []
    for number, nbytes in enumerate([100, 50, 50, 50, 110, 120, 50, 50], start=1):
        bench.begin(number - 1)
        bench.grow(nbytes)
        bench.grow(-nbytes)
        bench.watch.stop()
        if bench.watch.figures() is not None:
            told.append(number)
    assert told == [1, 2, 3, 4, 5, 8]


def test_a_step_that_is_not_measured_has_no_figures() -> None:
    bench = Bench()
    bench.watch.begin_step(None, 0)
    bench.watch.started()
    bench.grow(10)
    assert not bench.watch.is_on
    assert bench.watch.figures() is None


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


def test_states_in_lists_count() -> None:
    """LBFGS keeps the directions of earlier steps."""
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.state[model.weight] = {"old_dirs": [torch.zeros(100), torch.zeros(100)], "d": torch.zeros(100)}
    assert static_bytes([model], [optimizer], [], CPU)["optimizer_states"] == 1200


def test_the_head_is_the_largest_trained_parameter_beside_layers() -> None:
    model = nn.ModuleList([nn.Linear(10, 100, bias=False), nn.Linear(10, 10), nn.Linear(10, 50, bias=False)])
    assert head_bytes([model], [model[0]]) == 2000
    model[2].requires_grad_(requires_grad=False)
    assert head_bytes([model], [model[0]]) == 400


def test_frozen_weights_that_could_travel_are_those_of_layers() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
            self.buffers = []  # type: ignore[assignment]  # as Megatron's data-parallel wrapper has it

    model = Wrapped()
    for layer in model.module[1:]:
        layer.requires_grad_(requires_grad=False)
    layers = list(model.module[:3])
    assert frozen_bytes([model], layers, 64, CPU) == {"frozen_weights": 800, "frozen_at_once": 800}
    assert frozen_bytes([model], layers, 500, CPU) == {"frozen_weights": 0, "frozen_at_once": 0}


def test_parameters_of_an_optimizer_that_are_not_the_models_are_masters() -> None:
    model = nn.Linear(10, 10, bias=False).to(torch.bfloat16)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD([*masters, *model.parameters()])
    static = static_bytes([model], [optimizer], [], CPU)
    assert (static["parameters"], static["masters"]) == (200, 400)


def test_attributes_of_modules_that_layers_have_saved_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    kept, made, other = torch.zeros(10), torch.zeros(20), torch.zeros(30)
    model[0].table, model[0].unused = kept, other  # type: ignore[assignment]
    tensors, registry = ModuleTensors([model]), Registry()
    tensors.begin_step()
    model[0].outputs = [made]  # type: ignore[assignment]
    for tensor in (kept, made):
        registry.note_kept(tensor.untyped_storage())
    model[0].alias = [model[0].weight]  # type: ignore[assignment]
    assert tensors.saved(registry) == [("0.table", 40, True), ("0.outputs", 80, False)]
    assert tensors.lasting(registry, torch.device("cpu")) == [("0.unused", 120)]
    assert tensors.lasting(registry, torch.device("meta")) == []
