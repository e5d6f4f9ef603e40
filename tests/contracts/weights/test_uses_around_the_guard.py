"""Uses of a frozen weight that ignore its class give the right values, or an error. They never give NaN."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import same_bits
from test_frozen_weights import WIDTH, Model, is_away, offloaded
from torch import Tensor, nn

from tba_offload.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Use = Callable[[Tensor], Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*a use outside of its layer"),
]


def without_its_class(use: Use) -> Use:
    def run(weight: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return use(weight)

    return run


def backward(weight: Tensor) -> Tensor:
    x = torch.linspace(-1, 1, weight.shape[1]).requires_grad_()
    with torch._C.DisableTorchFunctionSubclass():
        nn.functional.linear(x, weight).exp().sum().backward()
    assert x.grad is not None
    return x.grad


RIGHT: dict[str, Use] = {
    "tensor": torch.tensor,
    "Tensor": torch.Tensor,
    "grad": torch.func.grad(lambda weight: weight.pow(3).sum()),
    "TorchScript": lambda weight: torch.jit.trace(lambda x: x.pow(2).sum(), torch.ones(2, 2))(weight),
    "compile": lambda weight: torch.compile(lambda x: x + weight, backend="eager")(torch.ones(1)),
    "operation": without_its_class(torch.exp),
    "view": without_its_class(lambda weight: weight.view(-1)[3:9]),
    "NumPy": without_its_class(lambda weight: torch.from_numpy(weight.numpy())),
    "backward": backward,
    "detach": lambda weight: nn.Parameter(weight.detach()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_values_are_right_and_the_memory_is_freed(name: str, tmp_path: Path) -> None:
    model = Model()
    expected = RIGHT[name](Model().layers[1].one.base.weight).detach()
    with offloaded(model, tmp_path) as weights:
        weight = model.layers[1].one.base.weight
        found = RIGHT[name](weight)
        assert same_bits(found.detach(), expected)
        del found
        gc.collect()
        weights.begin_step()
        assert is_away(weight)
        assert weights.resident_bytes == 0


REFUSED: dict[str, tuple[type[Exception], str, Use]] = {
    "vmap": (SessionError, r"layers\.1\.one\.base\.weight", torch.vmap(lambda row: row.sum())),
    "Parameter": (RuntimeError, r"requires that detach\(\)", nn.Parameter),
    "DLPack": (RuntimeError, "data pointer", torch.utils.dlpack.to_dlpack),
    "alias": (
        SessionError,
        r"Use weight\.detach\(\)",
        lambda weight: without_its_class(lambda each: each.data)(weight) + 0,
    ),
    "swap": (RuntimeError, "weakref", lambda weight: torch.utils.swap_tensors(weight, torch.ones(2))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_use_is_refused_and_nothing_is_lost(name: str, tmp_path: Path) -> None:
    model, plain = Model(), Model()
    kind, said, use = REFUSED[name]
    with offloaded(model, tmp_path) as weights:
        with pytest.raises(kind, match=said):
            use(model.layers[1].one.base.weight)
        weights.begin_step()
        assert weights.resident_bytes == 0
    assert same_bits(model.layers[1].one.base.weight, plain.layers[1].one.base.weight)


@pytest.mark.skipif(
    not hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"), reason="PyTorch's build has no CUDA"
)
def test_a_view_that_a_hook_keeps_is_named(tmp_path: Path) -> None:
    model = Model()
    kept: list[Tensor] = []
    layer = model.layers[1]
    layer.register_forward_hook(lambda *_: kept.append(layer.one.base.weight.view(-1)))
    with offloaded(model, tmp_path):
        model(torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match=r"layers\.1\.one\.base\.weight was freed"):
            kept[0].sum()
    assert same_bits(kept[0], layer.one.base.weight.view(-1))
