"""Layers that a framework checkpoints, where a session cannot recompute them or does not run them."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from blocks import Block, Net, assert_same, forward_backward, gradients, make_input, make_net, run
from harness import KIB, config_for, session_for
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from tba_offload.layers.find import explicit_layers
from tba_offload.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = pytest.mark.parametrize("kind", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])


class Counted(Block):
    """A block that counts its runs where no second run of the package looks."""

    runs: ClassVar[Counter[str]] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        Counted.runs["in backward" if torch._C._current_graph_task_id() != -1 else "in forward"] += 1
        return super().forward(nn.functional.dropout(x, 0.2))


class Noisy(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(x.shape, generator=self.source))


class Listing(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen) / 8)
        return super().forward(x * torch.full(x.shape, sum(self.seen)))


class Summing(Counted):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "total"):
            self.total = torch.zeros(x.shape)
        self.total += 0.25
        return super().forward(x + self.total)


class Worldly(Counted):
    number = 0

    def forward(self, x: Tensor) -> Tensor:
        Worldly.number += 1
        return super().forward(x * torch.full(x.shape, float(Worldly.number)))


class Nested(Counted):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged).tanh()
        return super().forward(torch.nested.to_padded_tensor(rows * rows, 0.0))


class Scripted(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Linear(4, 4))


class Partitioned(Counted):
    """Its weights look like those of DeepSpeed's ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.ds_tensor = parameter.data  # type: ignore[attr-defined]


REASONS: dict[type[Counted], str] = {
    Noisy: "module.source, and a second run would repeat the change",
    Listing: "module.seen, and a second run would repeat the change",
    Summing: "the layer's second run gave other numbers",
    Worldly: "the layer's second run gave other numbers",
    Nested: "nested tensors",
    Scripted: "TorchScript",
    Partitioned: "ZeRO-3",
    Counted: "scaling factors of FP8",
}


def checkpointed(block: Callable[[], nn.Module], kind: CheckpointImpl) -> nn.Module:
    return checkpoint_wrapper(block(), kind)


def trained(block: Callable[[], nn.Module], session: bool, steps: int = 3) -> list[list[Tensor]]:
    Counted.runs.clear()
    Worldly.number = 0
    net = make_net(block)
    if session:
        with session_for(net, layers=list(net.layers), in_flight=KIB) as attached:
            figures = run(net, forward_backward, attached, steps)
            assert [record.recomputed_scopes for record in attached.records[1:]] == [0] * (steps - 1)
    else:
        figures = run(net, forward_backward, None, steps)
    return [*figures, [torch.tensor(sorted(Counted.runs.values()))]]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:`torch.jit:DeprecationWarning")
@KINDS
@pytest.mark.parametrize("layer", REASONS)
def test_a_layer_that_cannot_be_recomputed_is_left_to_its_framework(
    layer: type[Counted],
    kind: CheckpointImpl,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with the checkpointing of the framework alone; one line names a layer and the reason."""
    if layer is Nested and kind is CheckpointImpl.NO_REENTRANT:
        pytest.skip("PyTorch's own checkpoint refuses nested tensors that a layer makes")
    if layer is Counted:
        state = SimpleNamespace(is_fp8_enabled=lambda: True)
        module = SimpleNamespace(FP8GlobalStateManager=state)
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", module)  # type: ignore[arg-type]
    block = partial(checkpointed, layer, kind)
    expected = trained(block, session=False)
    with caplog.at_level("INFO", "tba_offload"):
        assert_same(trained(block, session=True), expected)
    (line,) = (line for line in caplog.messages if "cannot be recomputed" in line)
    assert REASONS[layer] in line
    assert "(layers." in line
    assert "framework's own checkpointing recomputes layers" in line


# Runs without a placement


@contextmanager
def by_hand(net: Net) -> Iterator[Session]:
    """A session whose program marks all steps, as that of Megatron-LM does."""
    stack = explicit_layers(net, list(net.layers))
    with Session(stack, [net], config_for(), measure_memory=False, steps_by_hand=True) as session:
        yield session


def figures(net: Net, layers: list[nn.Module] | None = None) -> list[Tensor]:
    Counted.runs.clear()
    torch.manual_seed(0)
    x = make_input()
    y = x * 1
    for layer in layers or net.layers:
        y = layer(y)
    loss = y.pow(2).mean()
    loss.backward()
    assert x.grad is not None
    found = [loss.detach(), x.grad, *gradients(net), torch.tensor(sorted(Counted.runs.values()))]
    assert Counted.runs == {"in forward": 3, "in backward": 3}
    return found


def outside(net: Net) -> list[Tensor]:
    """Outside of the steps that the program marks."""
    with by_hand(net) as session:
        found = figures(net)
        assert session.last is None
    return found


def under_hooks(net: Net) -> list[Tensor]:
    with session_for(net, layers=list(net.layers)), save_on_cpu():
        return figures(net)


def in_copies(net: Net) -> list[Tensor]:
    """In copies that share the attributes of the layers, as those of DataParallel."""
    with session_for(net, layers=list(net.layers)):
        return figures(net, [layer._replicate_for_data_parallel() for layer in net.layers])  # type: ignore[operator]


def in_a_child(net: Net) -> list[Tensor]:
    receiver, sender = os.pipe()
    with session_for(net, layers=list(net.layers)):
        child = os.fork()
        if not child:
            status = 1
            try:
                with os.fdopen(sender, "wb") as file:
                    torch.save(figures(net), file)
                status = 0
            finally:
                os._exit(status)
        os.close(sender)
        with os.fdopen(receiver, "rb") as file:
            data = file.read()
        assert os.waitpid(child, 0)[1] == 0
    return torch.load(io.BytesIO(data))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*runs inside saved-tensor hooks", "ignore:copies of layers")
@KINDS
@pytest.mark.parametrize("use", [outside, under_hooks, in_copies, in_a_child])
def test_layers_that_the_session_does_not_run_are_checkpointed_by_their_framework(
    use: Callable[[Net], list[Tensor]], kind: CheckpointImpl
) -> None:
    block = partial(checkpointed, Counted, kind)
    assert_same([use(make_net(block))], [figures(make_net(block))])
