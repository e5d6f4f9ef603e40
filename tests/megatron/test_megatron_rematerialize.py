"""What fused activation functions of megatron-core put out is made again in ``offload-remat`` layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import quiesce
from models import assert_same_tensors
from torch import Tensor, nn

import tba_offload as tba
from tba_lab.megatron_cpu import single_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

LAYERS, ROWS, WIDTH, INNER = 2, 64, 16, 64
STEPS = 3


@pytest.fixture
def megatron() -> Iterator[None]:
    """The fused functions as they are written: to compile them here would take minutes."""
    stance = torch.compiler.set_stance("force_eager")
    with single_process(seed=1), stance:
        from megatron.core.transformer.transformer_layer import BaseTransformerLayer

        BaseTransformerLayer.register(Fused)
        yield


def fused(module: str, name: str) -> Any:
    return getattr(pytest.importorskip(f"megatron.core.fusions.{module}"), name)


class Fused(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor], takes: int, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.up, self.down = nn.Linear(WIDTH, takes, bias=False), nn.Linear(INNER, WIDTH)
        self.bias = nn.Parameter(torch.randn(takes))
        self.scale = nn.Linear(WIDTH, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.call(self.up(x), self.bias, self.scale(x)))


GELU, GEGLU, SWIGLU = "fused_bias_gelu", "fused_bias_geglu", "fused_bias_swiglu"
RELU = "fused_weighted_squared_relu"
FUNCTIONS: dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "gelu": (1, lambda h, b, _: fused(GELU, "GeLUFunction").apply(h, b)),
    "geglu": (2, lambda h, *_: fused(GEGLU, "GeGLUFunction").apply(h)),
    "geglu and bias": (2, lambda h, b, _: fused(GEGLU, "BiasGeGLUFunction").apply(h, b)),
    "quick geglu": (
        2,
        lambda h, _, s: fused(GEGLU, "WeightedQuickGeGLUFunction").apply(h, s, False, torch.tensor(0.5)),
    ),
    "quick geglu and bias": (
        2,
        lambda h, b, s: fused(GEGLU, "WeightedBiasQuickGeGLUFunction").apply(
            h, b, s, False, torch.tensor(0.5)
        ),
    ),
    "swiglu": (2, lambda h, *_: fused(SWIGLU, "SwiGLUFunction").apply(h, False, False)),
    "swiglu in fp8": (2, lambda h, *_: fused(SWIGLU, "SwiGLUFunction").apply(h, True, False)),
    "swiglu and bias": (2, lambda h, b, _: fused(SWIGLU, "BiasSwiGLUFunction").apply(h, b, False, False)),
    "weighted swiglu": (2, lambda h, _, s: fused(SWIGLU, "WeightedSwiGLUFunction").apply(h, s, False)),
    "squared relu": (1, lambda h, _, s: fused(RELU, "WeightedSquaredReLUFunction").apply(h, s)),
}


def run(
    takes: int, call: Callable[[Tensor, Tensor, Tensor], Tensor], session: bool
) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Fused(call, takes * INNER, number) for number in (1, 2)))
    config = tba.OffloadConfig(
        default=tba.Placement.OFFLOAD_REMAT, store=tba.StoreConfig(kind="host"), min_tensor_bytes=1024
    )
    found: list[Tensor] = []
    with tba.attach(model, config) if session else nullcontext() as attached:
        for number in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number), requires_grad=True)
            with attached.step() if attached else nullcontext():
                loss = model(x).pow(2).mean()
                if attached:
                    quiesce(attached.offloader)
                loss.backward()
            found += [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]
            model.zero_grad(set_to_none=True)
        return found, attached.records[-1].rebuilt_bytes if attached else 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    expected, _ = run(*FUNCTIONS[name], session=False)
    found, nbytes = run(*FUNCTIONS[name], session=True)
    assert_same_tensors(found, expected)
    # What is saved in another precision is no source.
    assert nbytes == (0 if name == "swiglu in fp8" else LAYERS * ROWS * INNER * 4)
