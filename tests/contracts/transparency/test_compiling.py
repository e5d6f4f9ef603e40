"""Models that ``torch.compile`` traces: one graph for each layer, the same bits, in recomputation too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from blocks import Net, assert_same, forward_backward, make_net, run
from covering import each_once, of_which
from harness import KIB, PLACEMENTS, session_for
from torch import Tensor, nn
from torch.nn import functional

from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.session import Session

torch._dynamo = pytest.importorskip("torch._dynamo")

LAYERS, STEPS, WIDTH = 3, 3, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Compiler:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.sizes.append(len(graph.graph.nodes))
        made = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return made(*arguments)

        return run


@pytest.fixture(autouse=True)
def compiler() -> Iterator[Compiler]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield Compiler()
    torch._dynamo.reset()


def make() -> Net:
    return make_net(Layer, LAYERS)


def train(model: Any, session: Session | None = None, steps: int = STEPS) -> list[list[Tensor]]:
    return run(model, forward_backward, session, steps)


def attach(model: Net, default: str) -> Session:
    return session_for(model, layers=list(model.layers), default=default, in_flight=128 * KIB)


@pytest.mark.parametrize("default", of_which(PLACEMENTS, "offload", "recompute-offload", "offload-remat"))
def test_each_layer_is_a_graph_and_nothing_else_is_traced(default: str, compiler: Compiler) -> None:
    expected = train(torch.compile(make(), backend=compiler))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiler.sizes.clear()
    model = make()
    with attach(model, default) as session:
        compiled = torch.compile(model, backend=compiler)
        found = train(compiled, session, steps=1)
        assert len(set(compiler.sizes)) == 1 <= len(compiler.sizes) <= LAYERS  # equal layers may share one
        before = len(compiler.sizes)
        compiler.runs = 0
        found += train(compiled, session)[1:]
        assert len(compiler.sizes) == before
        counters = torch._dynamo.utils.counters
        assert not counters["graph_break"]
        assert counters["frames"]["total"] <= LAYERS + 2  # the model's own, a hook of its
        record = session.records[-1]
        assert record.scopes == LAYERS
        assert record.left_alone_scopes == 0
        assert record.offloaded_bytes > 0 or default not in {"offload", "offload-remat"}
        again = 2 if default.startswith("recompute") else 1
        assert compiler.runs == STEPS * LAYERS * again  # backward runs the graphs, not the operations
    assert_same(found, expected)
    after = train(torch.compile(model, backend=compiler))
    assert_same(after, expected)


@pytest.mark.parametrize(
    ("how", "default"), each_once(["in place", "wrapped"], ["offload", "recompute", "offload-remat"])
)
def test_layers_that_were_compiled_before(how: str, default: str, compiler: Compiler) -> None:
    def compiled() -> Net:
        net = make()
        if how == "wrapped":
            wrapped = [torch.compile(layer, backend=compiler) for layer in net.layers]
            net.layers = nn.ModuleList(wrapped)  # type: ignore[arg-type]
        else:
            for layer in net.layers:
                layer.compile(backend=compiler)
        return net

    expected = train(compiled())
    torch._dynamo.reset()
    compiler.sizes.clear()
    model = compiled()
    with attach(model, default) as session:
        assert_same(train(model, session), expected)
        assert len(compiler.sizes) <= LAYERS
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("default", ["offload", "recompute"])
def test_one_graph_of_all_layers_is_refused_by_name(default: str, compiler: Compiler) -> None:
    model = make()
    with attach(model, default) as session:
        compiled = torch.compile(model, backend=compiler, fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="tba-offload is attached") as caught:
            train(compiled, session, steps=1)
        assert UnsupportedError.__name__ in str(caught.value)
